"""What Ray runs on one of its nodes for a run: a worker's process, watched to its end. Quick to import.

A process of its own, since data-parallel ranks that Lightning starts from inside a Ray worker do not come up.
"""

import signal
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import ray

from .child import Child, End, Origin

POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Order:
    """A run for a node. task: pickled, see `Task`. environment: but for the GPUs, which Ray chooses."""

    task: bytes
    output: Path
    environment: Mapping[str, str]
    origin: Origin


@dataclass(frozen=True)
class Place:
    """Where Ray has put a run. gpus: as CUDA_VISIBLE_DEVICES names them."""

    host: str
    gpus: tuple[str, ...]


def work(order: Order) -> Iterator[Place | End]:
    """Tell where the run begins, and in the end how it ended. A KeyboardInterrupt, from `ray.cancel`, makes it save."""
    place = Place(socket.gethostname(), tuple(ray.get_runtime_context().get_accelerator_ids()["GPU"]))
    missing = next((path for path in (order.origin.folder, order.output.parent) if not path.is_dir()), None)
    if missing is not None:
        yield End(None, False, f"{place.host} has no folder {missing}; all nodes must share runs_dir and this folder")
        return
    yield place
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # Ray blocks it, and the worker is to hear it
    with TemporaryDirectory(prefix="llama-lab-") as folder:
        file = Path(folder) / "run.task"
        file.write_bytes(order.task)
        environment = {**order.environment, "CUDA_VISIBLE_DEVICES": ",".join(place.gpus)}
        child = Child(file, order.output, environment, order.origin)
        try:
            wait(child)
        except KeyboardInterrupt:
            child.interrupt()
            wait(child)
        yield child.end()


def wait(child: Child) -> None:
    """Until it has ended; interruptible, as waiting for the process itself is not."""
    while not child.has_ended():
        time.sleep(POLL_SECONDS)
