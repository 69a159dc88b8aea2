"""Jobs wait for slots: what is started when, what has ended and how, and an orderly stop."""

import signal
import sys
import time
from collections import Counter
from pathlib import Path

from hydra.core.utils import JobReturn, JobStatus

from llama_lab.cli import USER_ERRORS, one_line
from llama_lab.errors import FinishedRunError, RunFailedError
from llama_lab.training.callbacks import StopRequest
from llama_lab.units import duration

from .board import Board, Row, View
from .jobs import Job, Sweep
from .process import Process
from .progress import queue_seconds_left, read_progress
from .slots import Slot

POLL_SECONDS = 0.02  # how long a free slot may go unnoticed


class Queue:
    """The jobs of a sweep on their way through slots. tasks: a folder for what is handed to processes."""

    def __init__(self, sweep: Sweep, slots: list[Slot], tasks: Path, board: Board, stop: StopRequest) -> None:
        self._sweep = sweep
        self._slots = slots
        self._tasks = tasks
        self._board = board
        self._stop = stop
        self._planned = 0
        self._ready: list[Job] = []
        self._running: list[Process] = []
        self._results: dict[int, JobReturn] = {}
        self._ended: Counter[str] = Counter()
        self._durations: list[float] = []  # of the runs that came to their end here

    def work(self) -> list[JobReturn]:
        """Run all jobs. Raises KeyboardInterrupt when asked to stop, after the runs have saved."""
        stopping = False
        try:
            while len(self._results) < len(self._sweep.jobs):
                if self._stop.requested and not stopping:
                    stopping = True
                    for process in self._running:
                        process.send(signal.SIGINT)
                self._collect()
                if stopping and not self._running:
                    raise KeyboardInterrupt
                if not stopping:
                    self._start()
                if self._board.due:
                    self._board.show(self._view())
                # Jobs are planned while others train: it takes a tenth of a second each, in which no slot should idle.
                if stopping or not self._plan():
                    time.sleep(POLL_SECONDS)
        finally:
            for process in self._running:
                process.kill()
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
            self._ready.append(self._sweep.plan(index))
        except FinishedRunError:
            self._board.tell(f"{title}: done before, passed over")
            self._settle(index, "done", JobReturn(overrides, status=JobStatus.COMPLETED))
        except USER_ERRORS as error:
            sys.stderr.write(f"error: {title}: {one_line(error)}\n")
            self._settle(index, "failed", JobReturn(overrides, status=JobStatus.FAILED, _return_value=error))
        return True

    def _start(self) -> None:
        """Give every free slot a job, but none that another process is in the folder of."""
        for slot in self._slots:
            if any(process.slot == slot for process in self._running):
                continue
            taken = {process.job.run.folder.path for process in self._running}
            job = next((job for job in self._ready if job.run.folder.path not in taken), None)
            if job is None:
                return
            self._ready.remove(job)
            file = self._tasks / f"{job.index}.task"
            self._sweep.save_task(job, file)
            self._running.append(Process(job, slot, file))
            self._board.tell(f"{job.run.title}: begins on {slot.name}")

    def _collect(self) -> None:
        """Take the results of the processes that have ended."""
        for process in [process for process in self._running if process.has_ended()]:
            self._running.remove(process)
            result = process.result()
            state, how = ending(process, result)
            self._board.tell(f"{process.job.run.title}: {state}, {how}")
            if state == "done":
                self._durations.append(process.seconds)
            elif state == "failed" and isinstance(result._return_value, RunFailedError):
                for line in process.last_lines():
                    self._board.tell(f"  {line}")
            self._settle(process.job.index, state, result)

    def _settle(self, index: int, state: str, result: JobReturn) -> None:
        """A job has a result."""
        self._results[index] = result
        self._ended[state] += 1

    def _view(self) -> View:
        """Where the queue is."""
        progress = [read_progress(process.job.run, process.began) for process in self._running]
        waiting = len(self._sweep.jobs) - len(self._results) - len(self._running)
        times = [(process.seconds, p.seconds_left) for process, p in zip(self._running, progress, strict=True)]
        return View(
            rows=[Row(p.slot.name, p.job.run, at) for p, at in zip(self._running, progress, strict=True)],
            counts={**self._ended, "running": len(self._running), "waiting": waiting},
            seconds_left=queue_seconds_left(self._durations, times, waiting, len(self._slots)),
        )


def ending(process: Process, result: JobReturn) -> tuple[str, str]:
    """How a run has ended: done, diverged, interrupted or failed, and what there is to say of it."""
    folder = process.job.run.folder
    if process.was_stopped:
        status = folder.read_status()
        return "interrupted", status["message"] if status else "before it began"
    if result.status == JobStatus.FAILED:
        return "failed", one_line(result._return_value)  # the public property would raise it
    status = folder.read_status() or {"status": "done"}  # a function of the user's own may leave no record
    if status["status"] != "done":
        return status["status"], status["message"]
    summary = folder.read_json("summary.json") if (folder.path / "summary.json").exists() else {}
    loss = f"val loss {summary['val/loss']:.4f}, " if "val/loss" in summary else ""
    return "done", f"{loss}in {duration(process.seconds)}"
