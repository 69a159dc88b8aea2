"""Reports the evaluations of running trials to Optuna, and asks the runs to stop that its pruner gives up.

The command that searches does so, from the metrics.csv of the runs, while its launcher is at work. So every launcher
prunes, and a run needs to know nothing of the search but the file that asks it to stop.
"""

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

from optuna.trial import Trial

from llama_lab.runs.metrics import read_metrics
from llama_lab.training.run import Run

POLL_SECONDS = 0.5


@dataclass
class Planned:
    """A trial whose run is to be trained. known: how many values of the metric that it has written Optuna has."""

    trial: Trial
    run: Run
    metric: str
    known: int

    def report(self) -> bool:
        """Report the new values, the n-th as step n; whether there were any."""
        file = self.run.folder.metrics
        rows = read_metrics(file) if file.exists() else []
        new = list(enumerate((row[self.metric] for row in rows if self.metric in row), 1))[self.known :]
        for step, value in new:
            self.trial.report(value, step)
        self.known += len(new)
        return bool(new)


@contextmanager
def pruning(trials: Sequence[Planned]) -> Iterator[None]:
    """While the context lasts, ask the runs of trials to stop that the pruner gives up after a new evaluation.

    In a thread of its own. Raises at the end what that has raised.
    """
    over = threading.Event()

    def watch() -> None:
        while not over.wait(POLL_SECONDS):
            for one in trials:
                if one.report() and one.trial.should_prune():
                    one.run.folder.prune_request.touch()

    with ThreadPoolExecutor(1, "pruning") as pool:
        watching = pool.submit(watch)
        try:
            yield
        finally:
            over.set()
    watching.result()
