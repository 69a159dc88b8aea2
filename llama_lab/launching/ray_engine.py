"""The engine of `hydra/launcher=ray`: a Ray task per run, on a cluster started here or joined."""

import importlib.util
import logging
import os
import signal
import socket
from collections.abc import Sequence
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from omegaconf import DictConfig

from llama_lab.devices.hardware import choose_accelerator, usable_cores
from llama_lab.devices.site import Site
from llama_lab.runs.environment import RUNS_AT_ONCE
from llama_lab.runs.folder import PLACE
from llama_lab.util.errors import INTERRUPTED, ConfigError, first_line

from .engine import Engine, QueuedRun, check_alone
from .local_engine import Slot, slot_environment
from .process import run_variables
from .settings import RaySettings, is_host_and_port, setting_error

LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"  # 0 binds Ray to the loopback interface
CONNECT_SECONDS = 5.0
STORE_BYTES = 100 * 2**20  # for objects that tasks share; ours are some kilobytes
QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.CRITICAL}


def join(address: str) -> None:
    """Join a cluster. Raises ConfigError if nothing listens at its `host:port`, or it is no cluster."""
    import ray
    from ray.util import get_node_ip_address

    found = os.environ.get("RAY_ADDRESS", address) if address == "auto" else address
    if is_host_and_port(found):  # Ray itself would try for minutes, and ignore Ctrl-C
        host, _, port = found.rpartition(":")
        if host in ("localhost", "127.0.0.1"):  # Ray listens at the address that other nodes use
            host = get_node_ip_address()  # type: ignore[no-untyped-call]
        try:
            socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
        except (OSError, OverflowError) as error:
            reason = f"nothing answers at {host}, {first_line(error)}; see `ray status`"
            raise setting_error("address", found, reason) from None
    try:
        ray.init(found, **QUIET)
    except (ConnectionError, RuntimeError, ValueError) as error:
        reason = f"no Ray cluster to join, {first_line(error)}; start one with `ray start --head`"
        raise setting_error("address", address, reason) from None


class RayEngine(Engine):
    """Ray, which schedules the runs on its nodes. config: of the command.

    Ray is started or joined for the first run; earlier only if it takes the cluster to know whether there are GPUs.
    Raises ConfigError for an accelerator that Ray does not have.
    """

    def __init__(self, settings: RaySettings, config: DictConfig) -> None:
        check_alone("ray")
        if importlib.util.find_spec("ray") is None:
            raise ConfigError("hydra/launcher=ray: needs Ray; pip install 'llama-lab[ray]'")
        self._settings = settings
        self._cluster = ExitStack()
        self._tasks: dict[QueuedRun, Any] = {}  # Ray's own, which it starts again if their Ray worker or node dies
        self._cancelled: set[QueuedRun] = set()
        elsewhere, wanted = settings.address is not None, config.trainer.accelerator
        accelerator = wanted if elsewhere else choose_accelerator(wanted)
        if accelerator == "auto":
            accelerator = "gpu" if any(gpus for _, gpus in self._nodes) else "cpu"
        if accelerator not in ("gpu", "cpu"):
            raise ConfigError(
                f"trainer.accelerator={accelerator}: Ray has CUDA GPUs and the CPU; choose trainer=cpu, or leave "
                f"hydra/launcher out"
            )
        if accelerator == "cpu" and settings.gpus_per_run != 1:
            raise setting_error("gpus_per_run", settings.gpus_per_run, "the runs train on the CPU; leave it out")
        gpus = max(1, int(settings.gpus_per_run))
        self.site = Site("ray", (accelerator,), gpus=gpus, elsewhere=elsewhere)
        self._options = {
            "num_cpus": settings.cpus_per_run,
            "num_gpus": settings.gpus_per_run if accelerator == "gpu" else 0,
            "max_retries": settings.max_retries,
        }

    @cached_property
    def _nodes(self) -> list[tuple[float, float]]:
        """(CPUs, GPUs) of each node that is alive, in use or not; the cluster is started or joined as this is asked.

        One that is started can be reached by this machine only. Raises ConfigError if a cluster does not answer.
        """
        handler = signal.getsignal(signal.SIGTERM)  # it stops our runs in order, and `ray.init` replaces it
        if self._settings.address is None:
            os.environ[LOOPBACK] = "0"  # read as Ray is imported
        import ray

        if self._settings.address is None:
            files = TemporaryDirectory(prefix="llama-lab-ray-", dir="/tmp", ignore_cleanup_errors=True)
            ray.init(
                "local",
                num_cpus=usable_cores(),
                num_gpus=torch.cuda.device_count(),
                object_store_memory=STORE_BYTES,
                include_dashboard=False,
                _temp_dir=self._cluster.enter_context(files),  # below /tmp, since the path of a socket must be short
                **QUIET,
            )
        else:
            join(self._settings.address)
        self._cluster.callback(ray.shutdown)  # stops our tasks, and a cluster that was started here
        signal.signal(signal.SIGTERM, handler)
        alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
        return [(found.get("CPU", 0.0), found.get("GPU", 0.0)) for found in alive]

    def open(self) -> str:
        """Start or join the cluster; return its size. Raises ConfigError unless a run fits on some idle node."""
        nodes, settings, gpus = self._nodes, self._settings, self._options["num_gpus"]
        if gpus > (most := max(gpus for _, gpus in nodes)):
            raise setting_error("gpus_per_run", settings.gpus_per_run, f"no node of the cluster has over {most:g} GPUs")
        if settings.cpus_per_run > (most := max(cpus for cpus, has in nodes if has >= gpus)):
            raise setting_error("cpus_per_run", settings.cpus_per_run, f"no node that could has over {most:g} CPUs")
        cpus, gpus = (sum(amounts) for amounts in zip(*nodes, strict=True))
        where = "Ray on this machine" if settings.address is None else f"Ray at {settings.address}"
        machines = "" if len(nodes) == 1 else f"{len(nodes)} nodes, "
        return f"{where}: {machines}{cpus:g} CPUs" + (f", {gpus:g} GPUs" if gpus else "")

    @property
    def _at_once(self) -> int:
        """How many runs may share the GPU of one, or the CPUs of its node."""
        gpus, cpus = self._options["num_gpus"], self._options["num_cpus"]
        return max(1, int(1 / gpus if gpus else max(cpus for cpus, _ in self._nodes) / cpus))

    def start(self, ready: Sequence[QueuedRun], running: Sequence[QueuedRun], more: bool) -> Sequence[QueuedRun]:
        """Submit all runs to Ray, in order."""
        import ray

        from .ray_node import work

        slot = Slot("", (), int(self._options["num_cpus"]))
        for queued in ready:
            place = queued.folder / PLACE
            place.unlink(missing_ok=True)
            environment = slot_environment(slot, queued.run.hardware.devices, os.environ) | run_variables()
            environment[RUNS_AT_ONCE] = str(self._at_once)
            task = ray.remote(work).options(name=queued.run.title, **self._options)
            self._tasks[queued] = task.remote(queued.command, queued.open_output(), place, environment, Path.cwd())
        return ready

    def poll(self, queued: QueuedRun) -> int | str | None:
        """The exit status of the run's process, or Ray's error."""
        import ray
        from ray import exceptions

        place = queued.folder / PLACE
        if place.exists() and (started_at := place.stat().st_mtime) != queued.started_at:
            queued.start(place.read_text(), started_at)
        if not ray.wait([self._tasks[queued]], timeout=0)[0]:
            return None
        try:
            exit_status: int | str = ray.get(self._tasks[queued])
            return exit_status
        except exceptions.TaskCancelledError:
            return INTERRUPTED
        except exceptions.RayTaskError as error:
            return first_line(error.cause or error)
        except exceptions.RayError as error:
            return INTERRUPTED if queued in self._cancelled else first_line(error)

    def stop(self, running: Sequence[QueuedRun], force: bool = False) -> None:
        """Remove the runs from Ray's queue, or raise KeyboardInterrupt in their tasks; or kill these if `force`."""
        import ray

        for queued in running:
            self._cancelled.add(queued)
            ray.cancel(self._tasks[queued], force=force)

    def close(self, running: Sequence[QueuedRun]) -> None:
        """Kill the runs: none outlives its launcher."""
        self.stop(running, force=True)
        self._cluster.close()
