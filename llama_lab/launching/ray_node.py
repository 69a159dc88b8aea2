"""The Ray task of a run: starts a worker's process on a node and waits for it. Quick to import.

It is a process of its own, because data-parallel ranks that Lightning starts inside a Ray worker do not come up.
"""

import signal
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import ray

from .worker_process import LaunchContext, WorkerExit, WorkerProcess

POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Order:
    """A run for a node. task: a pickled `Task`. environment: without the GPUs, which Ray chooses."""

    task: bytes
    output: Path
    environment: Mapping[str, str]
    context: LaunchContext


@dataclass(frozen=True)
class Place:
    """Where Ray has put a run. gpus: in the notation of CUDA_VISIBLE_DEVICES."""

    host: str
    gpus: tuple[str, ...]


def work(order: Order) -> Iterator[Place | WorkerExit]:
    """Yield where the run starts, then how its worker exited. On KeyboardInterrupt (`ray.cancel`), the run saves."""
    place = Place(socket.gethostname(), tuple(ray.get_runtime_context().get_accelerator_ids()["GPU"]))
    missing = next((path for path in (order.context.folder, order.output.parent) if not path.is_dir()), None)
    if missing is not None:
        yield WorkerExit(
            None, False, f"{place.host} has no folder {missing}; all nodes must share runs_dir and this folder"
        )
        return
    yield place
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # Ray blocks it, and the worker would inherit that
    with TemporaryDirectory(prefix="llama-lab-") as folder:
        file = Path(folder) / "run.task"
        file.write_bytes(order.task)
        environment = {**order.environment, "CUDA_VISIBLE_DEVICES": ",".join(place.gpus)}
        worker = WorkerProcess(file, order.output, environment, order.context)
        try:
            wait(worker)
        except KeyboardInterrupt:
            worker.interrupt()
            wait(worker)
        yield worker.collect()


def wait(worker: WorkerProcess) -> None:
    """Wait until the worker has ended. Polls, because waiting for the process cannot be interrupted."""
    while not worker.has_ended():
        time.sleep(POLL_SECONDS)
