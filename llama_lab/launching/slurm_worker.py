"""`python -m llama_lab.launching.slurm_worker`: one process of a run, as srun starts it on the nodes of a job.

Slurm sends USR2 before the time limit. It stops the run like Ctrl-C and requeues the job, whose next session resumes
from the checkpoint. After TERM (scancel, preemption, `scontrol requeue`), Slurm decides whether the job starts again.
Either way the process exits without a result.

Only the standard library is imported before the signal handlers are installed.
"""

import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

LAST_WORDS_SECONDS = (
    5.0  # for the first rank to report an error that all ranks have, before another one's exit kills it
)


class TimeLimit:
    """Whether Slurm has sent USR2. The handler raises INT, for which Lightning installs no handler."""

    def __init__(self) -> None:
        self.near = False
        signal.signal(signal.SIGUSR2, self._on_usr2)
        signal.signal(signal.SIGTERM, signal.default_int_handler)

    def _on_usr2(self, number: int, frame: FrameType | None) -> None:
        self.near = True
        signal.raise_signal(signal.SIGINT)


def main() -> None:
    """Run the job; the first rank writes its result for the launcher, or requeues the job."""
    limit = TimeLimit()
    is_first = os.environ["SLURM_PROCID"] == "0"
    file = Path(os.environ["LLAMA_LAB_TASK"]) / f"{os.environ['SLURM_ARRAY_TASK_ID']}.task"
    checkpoint = file.with_suffix(".log").resolve().parent / "checkpoints" / "last.ckpt"
    saved = modified(checkpoint)
    if threads := os.environ.get("SLURM_CPUS_PER_TASK"):
        os.environ.setdefault("OMP_NUM_THREADS", threads)
    try:
        result = run_task(file, is_first)
    except KeyboardInterrupt:
        result = None
    except SystemExit as stop:
        from llama_lab.errors import INTERRUPTED

        if stop.code != INTERRUPTED:
            raise
        result = None
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # the run is over
    if result is None and limit.near and is_first:
        result = requeue(file.with_suffix(".fruitless"), progressed=modified(checkpoint) != saved)
    finish(file, result, is_first)


def modified(file: Path) -> int | None:
    """The modification time of a file in ns; None if it does not exist."""
    return file.stat().st_mtime_ns if file.exists() else None


def run_task(file: Path, is_first: bool) -> tuple[Any, Any]:
    """Run the task in `file`; return its status, and its return value or error."""
    from llama_lab.runs.folder import RESOLVED

    from .task import Task
    from .worker import run

    task = Task.load(file)
    written = modified(file.with_suffix(".log").resolve().parent / RESOLVED)
    if task.config.get("overwrite") and (written is None or written > file.stat().st_mtime_ns):
        task.config.overwrite = False  # the run's folder is this job's own, from before it was requeued
    result = run(task, is_first)
    return result.status, result._return_value


def requeue(marker: Path, progressed: bool) -> tuple[Any, Any] | None:
    """Requeue this job; return a result for the launcher instead if that would not help, or fails.

    marker: a file left for the next session by one that wrote no checkpoint.
    """
    from hydra.core.utils import JobStatus

    from llama_lab.errors import RunFailedError

    if progressed:
        marker.unlink(missing_ok=True)
    elif marker.exists():
        return JobStatus.FAILED, RunFailedError(
            "its time ended twice in a row before it could write a checkpoint; raise hydra.launcher.time"
        )
    else:
        marker.touch()
    print("the job's time is nearly over, and it goes back to the queue", file=sys.stderr, flush=True)
    # Not SLURM_JOB_ID: in one job of an array, that is the array's.
    job_id = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    done = subprocess.run(("scontrol", "requeue", job_id), capture_output=True, text=True)
    if done.returncode:
        words = " ".join(done.stderr.split())
        return JobStatus.FAILED, RunFailedError(f"its time ended, and scontrol cannot requeue its job: {words}")
    return None


def finish(file: Path, result: tuple[Any, Any] | None, is_first: bool) -> None:
    """Write the result, if any, and exit: with status 1 if the run failed, 0 if it was asked to stop."""
    from hydra.core.utils import JobStatus

    from llama_lab.files import replacing

    from .task import result_file
    from .worker import exit_now

    failed = result is not None and result[0] == JobStatus.FAILED
    if is_first and result is not None:
        with replacing(result_file(file)) as fresh:
            fresh.write_bytes(pickle.dumps(result))
    elif failed:
        time.sleep(LAST_WORDS_SECONDS)
    exit_now(1 if failed else 0)


if __name__ == "__main__":
    main()
