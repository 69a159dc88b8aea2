"""The queue of a sweep's jobs: starts them through an engine, collects their results, and stops in order."""

import sys
import time
from collections import Counter

from hydra.core.utils import JobReturn, JobStatus

from llama_lab.config.messages import USER_ERRORS, one_line
from llama_lab.errors import FinishedRunError, RunFailedError
from llama_lab.formatting import duration
from llama_lab.training.stop import StopRequest

from .engine import Engine, SubmittedRun
from .progress import queue_seconds_left, read_progress
from .queue_display import QueueDisplay, Row, Snapshot
from .sweep import Job, Sweep

POLL_SECONDS = 0.02  # how long a free slot may go unnoticed


class Queue:
    """The jobs of a sweep on their way through an engine."""

    def __init__(self, sweep: Sweep, engine: Engine, display: QueueDisplay, stop: StopRequest) -> None:
        self._sweep = sweep
        self._engine = engine
        self._display = display
        self._stop = stop
        self._prepared = 0
        self._ready: list[Job] = []
        self._running: list[SubmittedRun] = []  # accepted by the engine, where they may still wait
        self._places: dict[SubmittedRun, str] = {}  # as reported
        self._results: dict[int, JobReturn] = {}
        self._ended: Counter[str] = Counter()
        self._durations: list[float] = []  # of the runs that finished here
        self._worked = 0.0  # seconds of all runs

    def work(self) -> list[JobReturn]:
        """Run all jobs. Raises KeyboardInterrupt if the user stops the command, after the runs have saved."""
        stopping = False
        start = time.monotonic()
        try:
            while len(self._results) < len(self._sweep.jobs):
                if self._stop.requested and not stopping:
                    stopping = True
                    self._engine.stop(self._running)
                self._collect()
                if stopping and not self._running:
                    raise KeyboardInterrupt
                if not stopping:
                    more = self._prepared < len(self._sweep.jobs)
                    self._running += self._engine.start(self._ready, self._running, more)
                self._report_places()
                if self._display.due:
                    self._display.show(self._snapshot())
                # Jobs are prepared one at a time while others train: each takes 0.1 s, in which no slot should idle.
                if stopping or not self._prepare_next():
                    time.sleep(POLL_SECONDS)
        finally:
            self._engine.close(self._running)
        self._report_totals(time.monotonic() - start)
        return [self._results[index] for index in range(len(self._sweep.jobs))]

    def _prepare_next(self) -> bool:
        """Prepare the next job, or store its result if it is done or cannot start; False if none is left."""
        index = self._prepared
        if index == len(self._sweep.jobs):
            return False
        self._prepared += 1
        overrides = self._sweep.jobs[index]
        title = " ".join(overrides)
        try:
            self._ready.append(self._sweep.prepare(index, self._engine.complete_overrides, self._engine.hardware))
        except FinishedRunError:
            self._display.print_line(f"{title}: done before, passed over")
            self._set_result(index, "done", JobReturn(overrides, status=JobStatus.COMPLETED))
        except USER_ERRORS as error:
            sys.stderr.write(f"error: {title}: {one_line(error)}\n")
            self._set_result(index, "failed", JobReturn(overrides, status=JobStatus.FAILED, _return_value=error))
        return True

    def _report_places(self) -> None:
        """Print which runs have started, and where; a run may start again elsewhere."""
        for submitted in self._running:
            if submitted.started_at is None:
                self._places.pop(submitted, None)
            elif self._places.get(submitted) != submitted.place:
                self._places[submitted] = submitted.place
                self._display.print_line(f"{submitted.job.run.title}: begins on {submitted.place}")

    def _collect(self) -> None:
        """Store and print the results of the runs that have ended."""
        for submitted in [submitted for submitted in self._running if submitted.has_ended()]:
            self._running.remove(submitted)
            self._worked += submitted.seconds
            result = submitted.job_return()
            status, detail = outcome(submitted, result)
            self._display.print_line(f"{submitted.job.run.title}: {status}, {detail}")
            if status == "done":
                self._durations.append(submitted.seconds)
            elif status == "failed" and isinstance(result._return_value, RunFailedError):
                for line in submitted.last_lines():
                    self._display.print_line(f"  {line}")
            self._set_result(submitted.job.index, status, result)

    def _report_totals(self, seconds: float) -> None:
        """Print how many runs ended how, in what time, and the utilisation of slots."""
        if not self._worked:
            return
        counted = ", ".join(f"{count} {status}" for status, count in self._ended.items())
        slots = self._engine.max_parallel
        share = "" if slots is None else f"; its slots were at work {self._worked / slots / seconds:.1%} of that"
        self._display.print_line(f"{counted}, in {duration(seconds)}{share}")

    def _set_result(self, index: int, status: str, result: JobReturn) -> None:
        self._results[index] = result
        self._ended[status] += 1

    def _snapshot(self) -> Snapshot:
        started = [(run, run.started_at) for run in self._running]
        rows = [Row(s.place, s.job.run, read_progress(s.job.run, at)) for s, at in started if at is not None]
        seconds = [run.seconds for run, at in started if at is not None]
        waiting = len(self._sweep.jobs) - len(self._results) - len(rows)
        times = [(since, row.progress.seconds_left) for since, row in zip(seconds, rows, strict=True)]
        slots = self._engine.max_parallel or max(1, len(rows))
        return Snapshot(
            rows=rows,
            counts={**self._ended, "running": len(rows), "waiting": waiting},
            seconds_left=queue_seconds_left(self._durations, times, waiting, slots),
        )


def outcome(submitted: SubmittedRun, result: JobReturn) -> tuple[str, str]:
    """The status of a run that has ended (done, diverged, interrupted or failed), and a detail to print with it."""
    folder = submitted.job.run.folder
    if submitted.was_stopped:
        status = folder.read_status()
        return "interrupted", status["message"] if status else "before it began"
    if result.status == JobStatus.FAILED:
        return "failed", one_line(result._return_value)  # the public property would raise it
    status = folder.read_status() or {"status": "done"}  # a function of the user's own may write no status
    if status["status"] != "done":
        return status["status"], status["message"]
    summary = folder.read_json("summary.json") if (folder.path / "summary.json").exists() else {}
    loss = f"val loss {summary['val/loss']:.4f}, " if "val/loss" in summary else ""
    return "done", f"{loss}in {duration(submitted.seconds)}"
