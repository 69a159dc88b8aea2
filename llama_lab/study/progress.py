"""What a person sees while a study goes on, in a terminal or a file: which run of how many, its loss, time left."""

from pathlib import Path

from rich.console import Console

from llama_lab.training.folder import RunFolder
from llama_lab.training.run import Outcome, Run

from .record import Study


class Progress:
    """Tells of one run of a study, from the files of all: it works the same in any process, on any machine."""

    def __init__(self, study: Study, folder: Path) -> None:
        self._study = study
        self._runs = {member.folder: RunFolder(folder / member.folder) for arm in study.arms for member in arm.members}
        self._console = Console(highlight=False, soft_wrap=True)

    def begin(self, run: Run) -> None:
        """A run begins."""
        self._console.rule(f"run {len(self._ended()) + 1} of {len(self._runs)}: {run.title}{self._time_left()}")

    def ended(self, run: Run, outcome: Outcome) -> None:
        """A run ended: how, and against the arm that it is a step from."""
        if outcome != "done":
            message = run.folder.read_json("status.json")["message"]
            self._print(f"{run.title}: {outcome}, {message}")
            return
        loss = run.folder.read_json("summary.json")["val/loss"]
        self._print(f"{run.title}: val loss {loss:.4f}{self._step(run, loss)}")
        self._print(f"so far: {self._so_far()}")

    def failed(self, run: Run, error: BaseException) -> None:
        """A run crashed; the others go on."""
        self._print(f"{run.title}: failed, {type(error).__name__}: {error}")

    def _so_far(self) -> str:
        """The latest loss of every arm that has one."""
        latest = {}
        for arm in self._study.arms:
            for folder in (self._runs[member.folder] for member in arm.members):
                if (folder.path / "summary.json").exists():
                    latest[arm.name] = folder.read_json("summary.json")["val/loss"]
        return ", ".join(f"{arm} {loss:.4f}" for arm, loss in latest.items())

    def _step(self, run: Run, loss: float) -> str:
        """The difference to the arm before, or the baseline, at the same seed and learning rate, if that is done."""
        own = f"{run.arm}/seed={run.cfg.seed}"
        arm = next(arm for arm in self._study.arms if any(member.folder == own for member in arm.members))
        against = arm.previous or self._study.baseline
        if against == arm.name:
            return ""
        other = self._runs[own.replace(arm.name, against, 1)]
        status = other.read_status()
        if status is None or status["status"] != "done":
            return ""
        return f" ({loss - other.read_json('summary.json')['val/loss']:+.4f} to {against})"

    def _ended(self) -> list[RunFolder]:
        """The runs that are at an end, good or bad."""
        statuses = {folder: folder.read_status() for folder in self._runs.values()}
        return [f for f, status in statuses.items() if status and status["status"] in ("done", "diverged", "failed")]

    def _time_left(self) -> str:
        """The training time of the runs still to come, as the finished ones had it on average."""
        ended = self._ended()
        done = [f.read_json("summary.json")["seconds"] for f in ended if (f.path / "summary.json").exists()]
        if not done:
            return ""
        left = (len(self._runs) - len(ended)) * sum(done) / len(done)
        return f", about {duration(left)} of training left"

    def _print(self, line: str) -> None:
        """One line, as it is."""
        self._console.print(line, markup=False)


def duration(seconds: float) -> str:
    """Seconds as a person says them: `45 s`, `12 min`, `3.5 h`, `4.2 days`."""
    for limit, unit, size in ((90, "s", 1), (5400, "min", 60), (48 * 3600, "h", 3600)):
        if seconds < limit:
            return f"{seconds / size:.{1 if unit == 'h' else 0}f} {unit}"
    return f"{seconds / 86400:.1f} days"
