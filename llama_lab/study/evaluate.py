"""`python eval.py run=...`: evaluates one or several runs, or a study, and then rewrites the study's report."""

import glob
import sys
from pathlib import Path

from omegaconf import DictConfig

from llama_lab.config.trust import Trust
from llama_lab.errors import ConfigError
from llama_lab.evaluation.display import print_evaluation
from llama_lab.evaluation.evaluate import evaluate
from llama_lab.evaluation.plot import plot_evaluation
from llama_lab.runs.record import is_run
from llama_lab.study.report.compare import runs_below
from llama_lab.study.report.write import write_report

from .study import FILE, Study


def evaluate_all(wanted: str, settings: DictConfig) -> bool:
    """Evaluate all runs that `wanted` names, and write the report if it is a study; False if a run failed.

    The error of a run is printed, and the others are evaluated. Raises ConfigError if it is the only run.
    """
    runs = found_runs(wanted)
    failed = 0
    for number, run in enumerate(runs, 1):
        if len(runs) > 1:
            print(f"run {number} of {len(runs)}")
        try:
            found = evaluate(run, settings)
        except ConfigError as error:
            if len(runs) == 1:
                raise
            failed += 1
            print(f"error: {error}", file=sys.stderr)
            continue
        plot_evaluation(found, run)
        print_evaluation(found, run)
    if (Path(wanted) / FILE).exists():
        write_report(Path(wanted), Trust.of_command(tuple(settings.trust)))
    if failed:
        print(f"{failed} of {len(runs)} runs could not be evaluated, see above", file=sys.stderr)
    return not failed


def found_runs(wanted: str) -> list[Path]:
    """The runs of a folder, a pattern or a study; those of a study by seed, so that arms take turns.

    Raises ConfigError if there are none.
    """
    if not wanted:  # perhaps an unset shell variable; run=. is the working directory
        raise ConfigError("run=: names nothing; name a run's folder, such as runs/llama/base/seed=1")
    path = Path(wanted)
    if (path / FILE).exists():
        members = [member for arm in Study.load(path).arms for member in arm.judged]
        listed = [path / member.folder for member in sorted(members, key=lambda member: member.seed)]
        started = [run for run in listed if is_run(run)]
        if len(started) < len(listed):
            print(f"{wanted}: {len(listed) - len(started)} of its {len(listed)} runs never began", file=sys.stderr)
        if started:
            return started
    matches = [path] if path.exists() else sorted(map(Path, glob.glob(wanted, recursive=True)))
    runs = [run for match in matches if match.is_dir() for run in runs_below(match)]
    if not runs:
        raise ConfigError(
            f"run={wanted}: holds no run; name folders of runs or studies, such as runs/llama/base/seed=1"
        )
    return list(dict.fromkeys(runs))
