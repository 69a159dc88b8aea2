"""The task function of a study's runs for Hydra's own launchers, and the study's progress."""

import sys
import traceback
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig
from rich.console import Console
from rich.rule import Rule

from llama_lab.analysis.settings import KIND
from llama_lab.config.composing import run_config
from llama_lab.devices.hardware import current_rank
from llama_lab.runs.folder import RunFolder
from llama_lab.runs.stored import Status, Summary
from llama_lab.runs.study import Study
from llama_lab.training.command import train_run
from llama_lab.training.prepare import requested_run
from llama_lab.training.run import Run
from llama_lab.training.stop import Outcome
from llama_lab.util.errors import INTERRUPTED, ConfigError, FinishedRunError
from llama_lab.util.formatting import duration

from .measure import measure_study


def study_task(cfg: DictConfig) -> None:
    """The task function of a study's runs. Hydra continues with the next run if this one fails."""
    command = HydraConfig.get()
    cfg, choices = run_config(cfg, dict(command.runtime.choices))
    run = requested_run(cfg, choices, list(command.overrides.task))
    if cfg.measure:
        measure_study(run)
        return
    study_folder = run.folder.path.parents[1]
    progress = StudyProgress(Study.load(study_folder), study_folder)
    is_first = current_rank() == 0
    if is_first:
        progress.run_started(run)
    try:
        outcome = train_run(run)
    except FinishedRunError:
        return  # another process has finished it since the plan was made
    except Exception as error:
        if not isinstance(error, ConfigError):
            traceback.print_exc()  # Hydra does not print it
        if is_first:
            progress.print(f"{run.title}: failed, {type(error).__name__}: {error}")
        raise
    if is_first:
        progress.run_ended(run, outcome)
    if outcome == "interrupted":
        sys.stderr.write("stopped; run the same command to resume\n")
        sys.exit(INTERRUPTED)


class StudyProgress:
    """Prints a study's progress from the files of its runs, so that any process on any machine can do it."""

    def __init__(self, study: Study, folder: Path) -> None:
        self._study = study
        self._folder = folder
        self._arms = {member.folder: arm for arm in study.arms for member in arm.members}
        is_split = any(key in (arm.settings or ()) for arm in study.arms for key in KIND)
        self._metric = "val/second_half_loss" if is_split else "val/loss"  # as in `judged_by`
        self.print = Console(highlight=False, soft_wrap=True, markup=False).print

    def run_started(self, run: Run) -> None:
        """Print the start of a run, and the training time that is left, at the FLOP/s of the finished runs."""
        statuses = {folder: self._status(folder) for folder in self._arms}
        left = [folder for folder, status in statuses.items() if status not in ("done", "diverged", "failed")]
        done = [folder for folder, status in statuses.items() if status == "done"]
        line = f"run {len(statuses) - len(left) + 1} of {len(statuses)}: {run.title}"
        if done:
            seconds = sum(Summary.load(self._folder / folder).metrics["seconds"] for folder in done)
            flops = [sum(self._arms[folder].flops or 1.0 for folder in folders) for folders in (left, done)]
            line += f", about {duration(seconds * flops[0] / flops[1])} of training left"
        self.print(Rule(line))

    def run_ended(self, run: Run, outcome: Outcome) -> None:
        """Print how a run ended: its loss, the step from the arm before it, and the losses of all arms at its seed.

        Of an arm with several learning rates, that is the best.
        """
        if outcome != "done":
            self.print(f"{run.title}: {outcome}, {Status.load(run.folder.path).message}")
            return
        losses: dict[str, list[float]] = {}
        for folder, arm in self._arms.items():
            if folder.endswith(f"/seed={run.cfg.seed}") and (loss := self._loss(folder)) is not None:
                losses.setdefault(arm.name, []).append(loss)
        so_far = ", ".join(f"{arm} {min(found):.4f}" for arm, found in losses.items())
        self.print(f"{run.title}: val loss {self._loss(run.title):.4f}{self._step(run.title)}")
        self.print(f"seed {run.cfg.seed} so far: {so_far}")

    def _step(self, folder: str) -> str:
        """The difference to the step before, or its reference, at the same seed and learning rate, if that is done."""
        arm = self._arms[folder]
        own = next(member for member in arm.members if member.folder == folder)
        name = arm.previous or arm.reference or self._study.baseline
        for member in next(one for one in self._study.arms if one.name == name).members:
            same = (member.seed, member.learning_rate) == (own.seed, own.learning_rate)
            if same and arm.name != name and (other := self._loss(member.folder)) is not None:
                return f" ({(self._loss(folder) or 0) - other:+.4f} to {name})"
        return ""

    def _status(self, folder: str) -> str:
        """A run's status; empty before it starts."""
        status = RunFolder(self._folder / folder).status
        return status.status if status else ""

    def _loss(self, folder: str) -> float | None:
        """The final loss of a run; None unless it is done."""
        found = Summary.load(self._folder / folder).metrics if self._status(folder) == "done" else {}
        return found.get(self._metric, found.get("val/loss"))
