"""The queue of runs: starts them through an engine, collects their results, and stops in order."""

import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hydra.core.utils import JobReturn, JobStatus

from llama_lab.config.messages import USER_ERRORS, one_line
from llama_lab.errors import FinishedRunError, RunFailedError
from llama_lab.formatting import duration
from llama_lab.training.run import Run
from llama_lab.training.stop import StopRequest

from .engine import Engine, Job, Result, SubmittedRun
from .progress import queue_seconds_left, read_progress
from .queue_display import QueueDisplay, Row, Snapshot

POLL_SECONDS = 0.02  # how long a free slot may go unnoticed


@dataclass(frozen=True)
class Request:
    """A run to launch. plan: returns it with its command line. Raises ConfigError, or an error of Hydra's."""

    overrides: list[str]
    plan: Callable[[], tuple[Run, list[str]]]


class Queue:
    """Runs on their way through an engine."""

    def __init__(self, requests: Sequence[Request], engine: Engine, display: QueueDisplay, stop: StopRequest) -> None:
        self._requests = requests
        self._engine = engine
        self._display = display
        self._stop = stop
        self._planned = 0
        self._ready: list[Job] = []
        self._running: list[SubmittedRun] = []  # accepted by the engine, where they may still wait
        self._reported: dict[SubmittedRun, tuple[float, str]] = {}  # when and where each started
        self._returns: dict[int, JobReturn] = {}
        self._ended: Counter[str] = Counter()
        self._durations: list[float] = []  # of the runs that finished here
        self._worked = 0.0  # seconds of all runs

    def work(self) -> list[JobReturn]:
        """Launch all runs; what Hydra is to know of each, in the order of the requests, failures included.

        Raises ConfigError for what the engine cannot do, and KeyboardInterrupt if the user stops the command, after the
        runs have saved.
        """
        stopping = False
        start = time.monotonic()
        try:
            while len(self._returns) < len(self._requests):
                if self._stop.requested and not stopping:
                    stopping = True
                    self._engine.stop(self._running)
                self._collect()
                if stopping and not self._running:
                    raise KeyboardInterrupt
                if not stopping:
                    more = self._planned < len(self._requests)
                    self._running += self._engine.start(self._ready, self._running, more)
                self._report_places()
                if self._display.due:
                    self._display.show(self._snapshot())
                # Runs are planned one at a time while others train: each takes 0.1 s, in which no slot should idle.
                if stopping or not self._plan_next():
                    time.sleep(POLL_SECONDS)
        finally:
            self._engine.close(self._running)
        self._report_totals(time.monotonic() - start)
        return [self._returns[index] for index in range(len(self._requests))]

    def _plan_next(self) -> bool:
        """Plan the next run, or store its result if it is done or cannot start; False if none is left."""
        index = self._planned
        if index == len(self._requests):
            return False
        self._planned += 1
        request = self._requests[index]
        title = " ".join(request.overrides)
        try:
            self._ready.append(Job(index, request.overrides, *request.plan()))
        except FinishedRunError:
            self._display.print_line(f"{title}: done before, passed over")
            self._store(index, Result("done", ""))
        except USER_ERRORS as error:
            sys.stderr.write(f"error: {title}: {one_line(error)}\n")
            self._store(index, Result("failed", "", error))
        return True

    def _report_places(self) -> None:
        """Print which runs have started, and where; a run may start again elsewhere."""
        for submitted in self._running:
            if (session := submitted.session) is None:
                continue
            if self._reported.get(submitted) != (start := (session.started_at, session.place)):
                self._reported[submitted] = start
                self._display.print_line(f"{submitted.job.run.title}: begins on {session.place}")

    def _collect(self) -> None:
        """Store and print the results of the runs that have ended."""
        for submitted in [run for run in self._running if run.exit_status is not None]:
            self._running.remove(submitted)
            self._worked += submitted.seconds
            result = submitted.result()
            self._display.print_line(f"{submitted.job.run.title}: {result.status}, {result.detail}")
            if result.status == "done":
                self._durations.append(submitted.seconds)
            elif result.status == "failed" and isinstance(result.error, RunFailedError):
                for line in submitted.last_lines():
                    self._display.print_line(f"  {line}")
            self._store(submitted.job.index, result)

    def _store(self, index: int, result: Result) -> None:
        self._ended[result.status] += 1
        status = JobStatus.COMPLETED if result.error is None else JobStatus.FAILED
        self._returns[index] = JobReturn(self._requests[index].overrides, status=status, _return_value=result.error)

    def _report_totals(self, seconds: float) -> None:
        """Print how many runs ended how, in what time, and the utilisation of slots."""
        if not self._worked:
            return
        counted = ", ".join(f"{count} {status}" for status, count in self._ended.items())
        slots = self._engine.max_parallel
        share = "" if slots is None else f"; its slots were at work {self._worked / slots / seconds:.1%} of that"
        self._display.print_line(f"{counted}, in {duration(seconds)}{share}")

    def _snapshot(self) -> Snapshot:
        at_work = [(run.job.run, run.session) for run in self._running if run.session]
        rows = [Row(session.place, run, read_progress(run, session.started_at)) for run, session in at_work]
        waiting = len(self._requests) - len(self._returns) - len(rows)
        times = [(s.seconds, row.progress.seconds_left) for (_, s), row in zip(at_work, rows, strict=True)]
        slots = self._engine.max_parallel or max(1, len(rows))
        return Snapshot(
            rows=rows,
            counts={**self._ended, "running": len(rows), "waiting": waiting},
            seconds_left=queue_seconds_left(self._durations, times, waiting, slots),
        )
