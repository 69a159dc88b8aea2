"""The Ray task of a run: starts its process on a node and waits for it. Quick to import.

It is a process of its own, because data-parallel ranks that Lightning starts inside a Ray worker do not come up.
"""

import signal
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import ray

from llama_lab.util.files import replace_text

from .process import RunProcess, starts_over

POLL_SECONDS = 0.05


def work(command: Sequence[str], output: Path, place: Path, environment: Mapping[str, str], folder: Path) -> int | str:
    """Run a command in `folder` on this node; return its exit status, or why it cannot start.

    On KeyboardInterrupt, which `ray.cancel` raises, the run is asked to save and stop. place: the file in which to say
    where this is. environment: without the GPUs, which Ray chooses.
    """
    host, gpus = socket.gethostname(), ray.get_runtime_context().get_accelerator_ids()["GPU"]
    missing = next((path for path in (folder, output.parent) if not path.is_dir()), None)
    if missing is not None:
        return f"{host} has no folder {missing}; all nodes must share runs_dir and this folder"
    record = output.with_name("resolved.yaml")
    if place.exists() and record.exists() and record.stat().st_mtime > place.stat().st_mtime:  # it began, and died
        command = [word for word in command if not starts_over(word)]
    replace_text(place, f"{'gpu ' + '+'.join(gpus) if gpus else 'cpu'} of {host}")
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # Ray blocks it, and the process would inherit that
    process = RunProcess(command, output, {**environment, "CUDA_VISIBLE_DEVICES": ",".join(gpus)}, folder)
    while True:
        try:
            while (status := process.poll()) is None:
                time.sleep(POLL_SECONDS)  # waiting for the process cannot be interrupted
            return status
        except KeyboardInterrupt:
            process.send(signal.SIGINT)
