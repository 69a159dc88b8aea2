"""Reports the evaluations of running trials to Optuna, and asks the runs to stop that its pruner gives up.

The command that searches does so, from the metrics.csv of the runs, while its launcher is at work. So every launcher
prunes, and a run needs to know nothing of the search but the file that asks it to stop.
"""

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from optuna.trial import Trial

from llama_lab.runs.folder import RunFolder
from llama_lab.runs.metrics import read_metrics

POLL_SECONDS = 0.5


class Evaluations:
    """The values of a metric that a trial's run has written. known: how many of them Optuna has."""

    def __init__(self, trial: Trial, folder: RunFolder, metric: str, known: int) -> None:
        self.trial = trial
        self.folder = folder
        self._metric = metric
        self._known = known

    def report(self) -> bool:
        """Report the new values, the n-th as step n; whether there were any."""
        if not self.folder.metrics.exists():
            return False
        rows = read_metrics(self.folder.metrics)
        values = [row[self._metric] for row in rows if self._metric in row]
        new = list(enumerate(values, 1))[self._known :]
        for step, value in new:
            self.trial.report(value, step)
        self._known += len(new)
        return bool(new)


@contextmanager
def pruning(trials: Sequence[Evaluations]) -> Iterator[None]:
    """Prune trials while the context lasts, in a thread of its own. Raises at the end what that has raised."""
    over = threading.Event()
    with ThreadPoolExecutor(1, "pruning") as pool:
        watching = pool.submit(watch, trials, over)
        try:
            yield
        finally:
            over.set()
    watching.result()


def watch(trials: Sequence[Evaluations], over: threading.Event) -> None:
    """Ask the runs of trials to stop that the pruner gives up after a new evaluation, until it is over."""
    while not over.wait(POLL_SECONDS):
        for evaluations in trials:
            if evaluations.report() and evaluations.trial.should_prune():
                evaluations.folder.prune_request.touch()
