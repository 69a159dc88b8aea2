"""Jobs wait for an engine: what is started when, what has ended and how, and an orderly stop."""

import sys
import time
from collections import Counter

from hydra.core.utils import JobReturn, JobStatus

from llama_lab.config.messages import USER_ERRORS, one_line
from llama_lab.errors import FinishedRunError, RunFailedError
from llama_lab.formatting import duration
from llama_lab.training.stop import StopRequest

from .board import Board, Row, View
from .engine import Engine, Execution
from .jobs import Job, Sweep
from .progress import queue_seconds_left, read_progress

POLL_SECONDS = 0.02  # how long a free slot may go unnoticed


class Queue:
    """The jobs of a sweep on their way through an engine."""

    def __init__(self, sweep: Sweep, engine: Engine, board: Board, stop: StopRequest) -> None:
        self._sweep = sweep
        self._engine = engine
        self._board = board
        self._stop = stop
        self._planned = 0
        self._ready: list[Job] = []
        self._running: list[Execution] = []  # taken by the engine, where they may wait in their turn
        self._places: dict[Execution, str] = {}  # that were told
        self._results: dict[int, JobReturn] = {}
        self._ended: Counter[str] = Counter()
        self._durations: list[float] = []  # of the runs that came to their end here
        self._worked = 0.0  # seconds of all runs

    def work(self) -> list[JobReturn]:
        """Run all jobs. Raises KeyboardInterrupt when asked to stop, after the runs have saved."""
        stopping = False
        began = time.monotonic()
        try:
            while len(self._results) < len(self._sweep.jobs):
                if self._stop.requested and not stopping:
                    stopping = True
                    self._engine.stop(self._running)
                self._collect()
                if stopping and not self._running:
                    raise KeyboardInterrupt
                if not stopping:
                    self._start()
                self._tell_places()
                if self._board.due:
                    self._board.show(self._view())
                # Jobs are planned while others train: it takes a tenth of a second each, in which no slot should idle.
                if stopping or not self._plan():
                    time.sleep(POLL_SECONDS)
        finally:
            self._engine.close(self._running)
        self._tell_end(time.monotonic() - began)
        return [self._results[index] for index in range(len(self._sweep.jobs))]

    def _plan(self) -> bool:
        """Plan the next job, and settle it if it is done or cannot start; False if all are planned."""
        index = self._planned
        if index == len(self._sweep.jobs):
            return False
        self._planned += 1
        overrides = self._sweep.jobs[index]
        title = " ".join(overrides)
        try:
            self._ready.append(self._sweep.plan(index, self._engine.settle, self._engine.hardware))
        except FinishedRunError:
            self._board.tell(f"{title}: done before, passed over")
            self._settle(index, "done", JobReturn(overrides, status=JobStatus.COMPLETED))
        except USER_ERRORS as error:
            sys.stderr.write(f"error: {title}: {one_line(error)}\n")
            self._settle(index, "failed", JobReturn(overrides, status=JobStatus.FAILED, _return_value=error))
        return True

    def _start(self) -> None:
        """Hand the engine what it takes."""
        more = self._planned < len(self._sweep.jobs)
        self._running += self._engine.start(self._ready, self._running, more)

    def _tell_places(self) -> None:
        """Tell which runs have begun, and where; some begin again."""
        for execution in self._running:
            if execution.began is None:
                self._places.pop(execution, None)
            elif self._places.get(execution) != execution.place:
                self._places[execution] = execution.place
                self._board.tell(f"{execution.job.run.title}: begins on {execution.place}")

    def _collect(self) -> None:
        """Take the results of the runs that have ended."""
        for execution in [execution for execution in self._running if execution.has_ended()]:
            self._running.remove(execution)
            self._worked += execution.seconds
            result = execution.result()
            state, how = ending(execution, result)
            self._board.tell(f"{execution.job.run.title}: {state}, {how}")
            if state == "done":
                self._durations.append(execution.seconds)
            elif state == "failed" and isinstance(result._return_value, RunFailedError):
                for line in execution.last_lines():
                    self._board.tell(f"  {line}")
            self._settle(execution.job.index, state, result)

    def _tell_end(self, seconds: float) -> None:
        """How many runs ended how, in what time, and how much of it slots were at work, if they are ours to fill."""
        if not self._worked:
            return
        counted = ", ".join(f"{count} {state}" for state, count in self._ended.items())
        width = self._engine.width
        share = "" if width is None else f"; its slots were at work {self._worked / width / seconds:.1%} of that"
        self._board.tell(f"{counted}, in {duration(seconds)}{share}")

    def _settle(self, index: int, state: str, result: JobReturn) -> None:
        """A job has a result."""
        self._results[index] = result
        self._ended[state] += 1

    def _view(self) -> View:
        """Where the queue is."""
        begun = [(execution, execution.began) for execution in self._running]
        rows = [Row(e.place, e.job.run, read_progress(e.job.run, began)) for e, began in begun if began is not None]
        seconds = [execution.seconds for execution, began in begun if began is not None]
        waiting = len(self._sweep.jobs) - len(self._results) - len(rows)
        times = [(since, row.progress.seconds_left) for since, row in zip(seconds, rows, strict=True)]
        return View(
            rows=rows,
            counts={**self._ended, "running": len(rows), "waiting": waiting},
            seconds_left=queue_seconds_left(self._durations, times, waiting, self._engine.width or max(1, len(rows))),
        )


def ending(execution: Execution, result: JobReturn) -> tuple[str, str]:
    """How a run has ended: done, diverged, interrupted or failed, and what there is to say of it."""
    folder = execution.job.run.folder
    if execution.was_stopped:
        status = folder.read_status()
        return "interrupted", status["message"] if status else "before it began"
    if result.status == JobStatus.FAILED:
        return "failed", one_line(result._return_value)  # the public property would raise it
    status = folder.read_status() or {"status": "done"}  # a function of the user's own may leave no record
    if status["status"] != "done":
        return status["status"], status["message"]
    summary = folder.read_json("summary.json") if (folder.path / "summary.json").exists() else {}
    loss = f"val loss {summary['val/loss']:.4f}, " if "val/loss" in summary else ""
    return "done", f"{loss}in {duration(execution.seconds)}"
