"""The queue of runs: plans them, starts them through an engine, collects their results, and stops in order."""

import re
import sys
import time
from collections import Counter, deque
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from hydra.core.config_loader import ConfigLoader
from hydra.core.utils import JobReturn, JobStatus
from hydra.types import HydraContext
from omegaconf import DictConfig
from rich.console import Console

from llama_lab.config.composing import run_config
from llama_lab.config.grammar import override_key, typed_flags
from llama_lab.config.messages import USER_ERRORS, one_line
from llama_lab.config.schema import belongs
from llama_lab.devices.site import Site
from llama_lab.training.prepare import check_devices, check_effects, requested_run
from llama_lab.training.run import Run
from llama_lab.training.stop import StopRequest
from llama_lab.training.warm_start import check_start
from llama_lab.util.errors import FinishedRunError, RunFailedError
from llama_lab.util.formatting import duration

from .engine import Engine, QueuedRun
from .process import program
from .progress import QueueDisplay, latest_metrics, queue_seconds_left, read_progress

POLL_SECONDS = 0.05  # how long a free slot may go unnoticed
# Settings of the launching command that a run of its own does not have, and those that its hardware settles.
LAUNCHING = re.compile(r"hydra[./](launcher|sweeper|sweep|mode)\b")
PLACED = ("trainer.accelerator", "trainer.devices", "trainer.num_nodes")


class Queue:
    """Runs on their way through an engine. config, context: what Hydra gives a launcher.

    runs: as a study has planned them, or the overrides of each. before, after: how many runs of the study ended before
    these, and how many will follow, its other work counted in runs.
    """

    def __init__(
        self,
        config: DictConfig,
        context: HydraContext,
        engine: Engine,
        runs: Sequence[Run | list[str]],
        before: int = 0,
        after: float = 0.0,
    ) -> None:
        self._before, self._after = before, after
        self._config = config
        self._loader = context.config_loader
        self._engine = engine
        self._overrides = [run.overrides if isinstance(run, Run) else run for run in runs]
        self._display = QueueDisplay(Console())
        self._unplanned = deque(enumerate(runs))
        self._ready: list[QueuedRun] = []
        self._running: list[QueuedRun] = []  # accepted by the engine, where they may still wait
        self._reported: dict[QueuedRun, float] = {}  # when each started
        self._returns: dict[int, JobReturn] = {}
        self._ended: Counter[str] = Counter()
        self._durations: list[float] = []  # of the runs that finished here
        self._trained = 0.0  # seconds of these, without evaluations and starting
        self._worked = 0.0  # seconds of all runs

    def work(self) -> list[JobReturn]:
        """Launch all runs; what Hydra is to know of each, in order, failures included. Prints totals and utilisation.

        Raises ConfigError for what the engine cannot do, and KeyboardInterrupt if the user stops the command, after the
        runs have saved.
        """
        stop, start, count = StopRequest(), time.monotonic(), len(self._overrides)
        with self._display, stop.listening():
            try:
                self._display.print_line(f"{count} runs on {self._engine.open()}; each writes its output.log")
                while len(self._returns) < count:
                    if stop.requested:
                        self._stop()
                    self._collect()
                    self._start()
                    self._show()
                    # Runs are planned one at a time while others train: each takes 0.1 s, in which no slot should idle.
                    if not self._plan_next():
                        time.sleep(POLL_SECONDS)
            finally:
                self._engine.close(self._running)
        if self._worked:
            ended = ", ".join(f"{count} {status}" for status, count in self._ended.items())
            seconds, slots = time.monotonic() - start, self._engine.site.slots
            share = "" if slots is None else f"; its slots were at work {self._worked / slots / seconds:.1%} of that"
            self._display.print_line(f"{ended}, in {duration(seconds)}{share}")
        return [self._returns[index] for index in range(count)]

    def _stop(self) -> NoReturn:
        """Wait until the runs have saved and stopped, then raise KeyboardInterrupt."""
        self._engine.stop(self._running)
        while self._running:
            self._collect()
            self._show()
            time.sleep(POLL_SECONDS)
        raise KeyboardInterrupt

    def _collect(self) -> None:
        """Print where runs have started, which may be more than once; print and store the results of ended ones."""
        for queued in list(self._running):
            exit_status = self._engine.poll(queued)
            if queued.place and self._reported.get(queued) != queued.started_at:
                self._reported[queued] = queued.started_at
                self._display.print_line(f"{queued.run.title}: begins on {queued.place}")
            if exit_status is None:
                continue
            self._running.remove(queued)
            self._worked += queued.seconds
            status, detail, error = queued.result(exit_status)
            self._display.print_line(f"{queued.run.title}: {status}, {detail}")
            if status == "done":
                self._durations.append(queued.seconds)
                if queued.run.folder.metrics.exists():  # not of what measures speeds
                    self._trained += latest_metrics(queued.run.folder.metrics).get("seconds", 0.0)
            elif status == "failed" and isinstance(error, RunFailedError):
                for line in queued.last_lines():
                    self._display.print_line(f"  {line}")
            self._store(queued.index, status, error or queued.run.folder.final_loss)

    def _start(self) -> None:
        """Start ready runs, except those whose folder another one uses or waits for."""
        first: dict[Path, QueuedRun] = {}
        for queued in (*self._running, *self._ready):
            first.setdefault(queued.folder, queued)
        startable = [queued for queued in self._ready if first[queued.folder] is queued]
        started = self._engine.start(startable, self._running, more=bool(self._unplanned))
        self._running += started
        self._ready = [queued for queued in self._ready if queued not in started]

    def _plan_next(self) -> bool:
        """Plan the next run, or store its result if it is done or cannot start; False if none is left."""
        if not self._unplanned:
            return False
        index, requested = self._unplanned.popleft()
        overrides = self._overrides[index]
        title = " ".join(overrides)
        try:
            if isinstance(requested, Run):
                run = requested
            else:
                run = composed_run(self._loader, self._config, requested, self._engine.site)
            check_start(run)
            self._ready.append(queued_run(index, run, self._config))
        except FinishedRunError:
            self._display.print_line(f"{title}: done before, passed over")
            self._store(index, "done", run.folder.final_loss)
        except USER_ERRORS as error:
            sys.stderr.write(f"error: {title}: {one_line(error)}\n")
            self._store(index, "failed", error)
        return True

    def _store(self, index: int, ended: str, value: Exception | float | None) -> None:
        """Count a run, and store its error, or its loss as the task function returns it."""
        self._ended[ended] += 1
        status = JobStatus.FAILED if isinstance(value, Exception) else JobStatus.COMPLETED
        self._returns[index] = JobReturn(self._overrides[index], status=status, _return_value=value)

    def _show(self) -> None:
        """Show the runs that are training, if it is time to."""
        if not self._display.due:
            return
        working = [(queued, read_progress(queued.run, queued.started_at)) for queued in self._running if queued.place]
        rows = [(str(queued.place), queued.run, progress) for queued, progress in working]
        # What finished runs took beside training, those that train will take too.
        share = max(1.0, sum(self._durations) / self._trained) if self._trained else 1.0
        times = [(queued.seconds, now.seconds_left and share * now.seconds_left) for queued, now in working]
        waiting = len(self._overrides) - len(self._returns) - len(rows)
        slots = self._engine.site.slots or max(1, len(rows))
        left = queue_seconds_left(self._durations, times, waiting + self._after, slots)
        counts = {"ended before": self._before, **self._ended, "running": len(rows), "waiting": waiting}
        self._display.show(rows, {**counts, "to follow": self._after}, left)


def composed_run(loader: ConfigLoader, config: DictConfig, overrides: list[str], site: Site | None) -> Run:
    """A run of a sweep. config: of the sweep's command. site: see `requested_run`. Raises ConfigError."""
    cfg = loader.load_sweep_config(config, overrides)
    typed = list(cfg.hydra.overrides.task)
    run_cfg, choices = run_config(cfg, dict(cfg.hydra.runtime.choices))
    if site:
        check_devices(run_cfg, site.launcher)
    run = requested_run(run_cfg, choices, typed, site)
    check_effects([run_cfg], typed)
    return run


def queued_run(index: int, run: Run, config: DictConfig) -> QueuedRun:
    """The run with the command line that trains it alone. config: of the launching command."""
    given = [o for o in (*config.hydra.overrides.hydra, *run.overrides) if not LAUNCHING.match(override_key(o))]
    kept = [o for o in given if not belongs(override_key(o), PLACED)]
    kept += ["hydra/launcher=basic", "hydra.mode=RUN"]  # an experiment may choose others, or a study
    values = (run.hardware.accelerator, run.hardware.devices, run.hardware.num_nodes)
    placed = [f"{key}={value}" for key, value in zip(PLACED, values, strict=True)]
    return QueuedRun(index, run, [*program(), *typed_flags(), *kept, *placed])
