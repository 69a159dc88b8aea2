"""The engine of `hydra/launcher=ray`: a Ray task per run, on this machine or on a cluster."""

import json
import os
import time
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from llama_lab.devices.hardware import choose_accelerator
from llama_lab.devices.site import Site
from llama_lab.errors import INTERRUPTED, ConfigError, first_line
from llama_lab.runs.folder import PLACE

from .engine import Engine, Job, Session, SubmittedRun, startable
from .local_engine import check_alone
from .process import run_variables
from .ray_cluster import Cluster, Node, RaySettings, check_installed
from .slots import Slot, setting_error, slot_environment


class RayRun(SubmittedRun):
    """A run as a Ray task, which Ray starts again if its Ray worker or its node dies. options: of the task."""

    def __init__(self, job: Job, options: dict[str, Any]) -> None:
        super().__init__(job)
        import ray

        from .ray_node import work

        self._place_file = job.folder / PLACE
        self._place_file.unlink(missing_ok=True)
        self._place, self._start_stamp, self._start_tick = "", 0, 0.0
        self._end: int | str | None = None
        self._stopping = False
        slot = Slot("", (), int(options["num_cpus"]))
        environment = slot_environment(slot, job.run.hardware.devices, os.environ) | run_variables()
        task = ray.remote(work).options(name=job.run.title, **options)
        self._task = task.remote(job.command, self.output.absolute(), self._place_file, environment, Path.cwd())

    @property
    def session(self) -> Session | None:
        """The last one whose start this process has seen."""
        if not self._place_file.exists():
            return None
        stamp = self._place_file.stat().st_mtime_ns
        if stamp != self._start_stamp:
            self._start_stamp, self._start_tick = stamp, time.monotonic()
            self._place = json.loads(self._place_file.read_text())
        return Session(self._place, stamp / 1e9, time.monotonic() - self._start_tick)

    @property
    def exit_status(self) -> int | str | None:
        """The exit status of the run's process, or Ray's error."""
        from ray import exceptions, get, wait

        if self._end is None and wait([self._task], timeout=0)[0]:
            try:
                self._end = get(self._task)
            except exceptions.TaskCancelledError:
                self._end = INTERRUPTED
            except exceptions.RayTaskError as error:
                self._end = first_line(error.cause or error)
            except exceptions.RayError as error:
                self._end = INTERRUPTED if self._stopping else first_line(error)
        return self._end

    def interrupt(self) -> None:
        """Cancel the task: Ray raises KeyboardInterrupt in it, or removes it from its queue."""
        self._cancel(force=False)

    def kill(self) -> None:
        """Kill the task's worker."""
        self._cancel(force=True)

    def _cancel(self, force: bool) -> None:
        import ray

        self._stopping = True
        ray.cancel(self._task, force=force)


class RayEngine(Engine):
    """Ray, which schedules the runs on its nodes. wanted: the accelerator in the command's config.

    Ray is started or joined for the first run; earlier only if it takes the cluster to know whether there are GPUs.
    """

    def __init__(self, settings: RaySettings, wanted: str) -> None:
        check_alone("ray")
        check_installed()
        self._settings = settings
        self._wanted = wanted

    @cached_property
    def site(self) -> Site:
        """This machine, or a cluster. Raises ConfigError for an accelerator that Ray does not have."""
        settings, accelerator = self._settings, self._wanted
        if settings.address is None:
            accelerator = choose_accelerator(accelerator)
        elif accelerator == "auto":
            accelerator = "gpu" if any(node.gpus for node in self._cluster.nodes()) else "cpu"
        if accelerator not in ("gpu", "cpu"):
            raise ConfigError(
                f"trainer.accelerator={accelerator}: Ray has CUDA GPUs and the CPU; choose trainer=cpu, or leave "
                f"hydra/launcher out"
            )
        if accelerator == "cpu" and settings.gpus_per_run != 1:
            raise setting_error("gpus_per_run", settings.gpus_per_run, "the runs train on the CPU; leave it out")
        elsewhere = settings.address is not None
        return Site("ray", (accelerator,), gpus=settings.devices, elsewhere=elsewhere, several_nodes=False)

    @cached_property
    def _cluster(self) -> Cluster:
        return Cluster(self._settings.address, torch.cuda.device_count())

    @property
    def _gpus_per_run(self) -> float:
        return self._settings.gpus_per_run if self.site.accelerators == ("gpu",) else 0

    @property
    def description(self) -> str:
        """The cluster and its size. Raises ConfigError if no node is large enough for a run."""
        gpus_per_run = self._gpus_per_run  # before Ray is started: it may raise ConfigError
        nodes = self._cluster.nodes()
        try:
            self._check_fit(nodes, gpus_per_run)
        except ConfigError:
            self._cluster.close()
            raise
        cpus, gpus = sum(node.cpus for node in nodes), sum(node.gpus for node in nodes)
        where = "Ray on this machine" if self._settings.address is None else f"Ray at {self._settings.address}"
        machines = "" if len(nodes) == 1 else f"{len(nodes)} nodes, "
        return f"{where}: {machines}{cpus:g} CPUs" + (f", {gpus:g} GPUs" if gpus else "")

    def _check_fit(self, nodes: Sequence[Node], gpus_per_run: float) -> None:
        """Raise ConfigError unless a run fits on some node when that is idle."""
        settings = self._settings
        most = max(node.gpus for node in nodes)
        if gpus_per_run > most:
            raise setting_error("gpus_per_run", settings.gpus_per_run, f"no node of the cluster has over {most:g} GPUs")
        most = max(node.cpus for node in nodes if node.gpus >= gpus_per_run)
        if settings.cpus_per_run > most:
            raise setting_error("cpus_per_run", settings.cpus_per_run, f"no node that could has over {most:g} CPUs")

    @property
    def max_parallel(self) -> None:
        """Ray decides."""

    def start(self, ready: list[Job], running: Sequence[SubmittedRun], more: bool) -> list[SubmittedRun]:
        """Submit all jobs to Ray, in order, except those whose folder is in use."""
        settings = self._settings
        options = {"num_cpus": settings.cpus_per_run, "num_gpus": self._gpus_per_run}
        options["max_retries"] = settings.max_retries
        started = [RayRun(job, options) for job in startable(ready, running)]
        for submitted in started:
            ready.remove(submitted.job)
        return list(started)

    def close(self, running: Sequence[SubmittedRun]) -> None:
        """Kill the runs: none outlives its launcher."""
        super().close(running)
        self._cluster.close()
