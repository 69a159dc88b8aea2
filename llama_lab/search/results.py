"""What a search has found: a line for each trial, a table of the best, and files beside its runs."""

import shlex
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState
from rich.console import Console

from llama_lab.config.grammar import to_override
from llama_lab.report.summary import write_csv
from llama_lab.runs.folder import write_yaml
from llama_lab.util.display import plain_table
from llama_lab.util.errors import RunFailedError
from llama_lab.util.files import replacing

from .space import Parameter

TRIALS_FILE = "search.csv"
BEST_FILE = "optimization_results.yaml"  # as other sweepers of Hydra's call it
BEST = 5  # shown at the end
FOLDER, STATUS, MESSAGE = "folder", "status", "message"  # attributes of a trial in Optuna's storage


def print_line(line: str) -> None:
    """Print an event of the search."""
    Console().print(line, highlight=False, markup=False, soft_wrap=True)


@dataclass(frozen=True)
class Results:
    """The trials of a search so far, in `folder`. words: of the command line that all trials share."""

    study: optuna.Study
    folder: Path
    metric: str
    space: Sequence[Parameter]
    words: Sequence[str]

    @property
    def _ranked(self) -> list[FrozenTrial]:
        """The trials that have finished, the best first."""
        done = self.study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        sign = 1 if self.study.direction == optuna.study.StudyDirection.MINIMIZE else -1
        return sorted(done, key=lambda trial: sign * (trial.value or 0.0))

    def print_trial(self, number: int) -> None:
        """Print how a trial ended."""
        trial = self.study.trials[number]
        told = trial.user_attrs[STATUS]
        if trial.state == TrialState.COMPLETE:
            best = self._ranked[0]
            told = f"{self.metric} {trial.value:.4f}, "
            told += "the best so far" if best.number == number else f"best {best.value:.4f} of trial {best.number}"
        elif trial.state == TrialState.PRUNED:
            told = f"pruned at evaluation {trial.last_step}, {self.metric} {trial.value:.4f}"
        elif message := trial.user_attrs.get(MESSAGE):
            told = f"{told}, {message}"
        print_line(f"trial {number}: {' '.join(self._overrides(trial))}: {told}")

    def write(self) -> None:
        """Write search.csv, with a row for each trial, and the best trial to optimization_results.yaml."""
        rows = [self._row(trial) for trial in self.study.get_trials(deepcopy=False)]
        with replacing(self.folder / TRIALS_FILE) as fresh:
            write_csv(rows, fresh)
        if ranked := self._ranked:
            best = ranked[0]
            found = {"name": "optuna", "best_value": best.value, "best_params": dict(best.params)}
            write_yaml(found | {"trial": best.number, "command": self.command(best)}, self.folder / BEST_FILE)

    def print(self) -> None:
        """Print the best trials, and the best as a command. Raises RunFailedError if no trial has finished."""
        trials = self.study.get_trials(deepcopy=False)
        counts = Counter(trial.user_attrs.get(STATUS, "interrupted") for trial in trials)
        counted = ", ".join(f"{number} {status}" for status, number in counts.items())
        ranked = self._ranked
        if not ranked and counts["interrupted"] < len(trials):
            reasons = [f"trial {t.number}: {t.user_attrs[MESSAGE]}; " for t in trials if MESSAGE in t.user_attrs]
            fix = f"{''.join(reasons[-1:])}search other values, under another name="
            raise RunFailedError(f"no trial of {self.folder} finished: {counted}; {fix}")
        print_line(f"best of {len(trials)} trials: {counted}")  # a table's own title wraps at its width
        table = plain_table("", ["trial"], [self.metric])
        for one in self.space:
            table.add_column(one.key, overflow="fold")
        for trial in ranked[:BEST]:
            values = [override.partition("=")[2] for override in self._overrides(trial)]
            table.add_row(str(trial.number), f"{trial.value:.4f}", *values)
        Console(highlight=False).print(table)
        if ranked:
            print_line(f"all trials: {self.folder / TRIALS_FILE}; the best:")
            print_line(f"  {self.command(ranked[0])}")

    def command(self, trial: FrozenTrial) -> str:
        """The command line that trains a trial's run alone."""
        arm = Path(trial.user_attrs[FOLDER]).parent.name  # without it, the name would begin with another key
        return shlex.join(["python", sys.argv[0], *self.words, f"arm={to_override(arm)}", *self._overrides(trial)])

    def _overrides(self, trial: FrozenTrial) -> list[str]:
        return [one.override(trial.params[one.key]) for one in self.space]

    def _row(self, trial: FrozenTrial) -> dict[str, Any]:
        attributes = trial.user_attrs
        return {
            "trial": trial.number,
            "status": attributes.get(STATUS, "interrupted"),
            self.metric: trial.value,
            "evaluations": len(trial.intermediate_values),
            **{one.key: trial.params.get(one.key) for one in self.space},
            "folder": attributes.get(FOLDER, ""),
            "message": attributes.get(MESSAGE, ""),
        }
