"""The engine of `hydra/launcher=ray`: a Ray task per run, on this machine or on a cluster."""

import os
import pickle
import time
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from hydra.core.utils import JobStatus
from omegaconf import DictConfig

from llama_lab.devices.hardware import Hardware, choose_accelerator, choose_hardware, hardware_elsewhere
from llama_lab.errors import ConfigError, first_line
from llama_lab.runs.folder import OUTPUT

from .engine import Engine, SubmittedRun, with_devices
from .ray_cluster import Cluster, Node, RaySettings, check_installed
from .slots import Slot, setting_error, slot_environment
from .sweep import Job
from .worker_process import LaunchContext, WorkerExit

if TYPE_CHECKING:
    from .ray_node import Place  # which imports Ray


class RayRun(SubmittedRun):
    """A run as a Ray task, submitted again up to `retries` times if its Ray worker or its node dies.

    Ray's own retries would not report where the run starts again.
    """

    def __init__(self, job: Job, submit: Callable[[], Any], retries: int) -> None:
        super().__init__(job)
        self._submit = submit
        self._retries = retries
        self._messages = submit()  # a generator of references: to the Place, and to the WorkerExit
        self._place: Place | None = None
        self._end: WorkerExit | None = None
        self._stopping = False
        self._started_at = self._start_tick = 0.0

    @property
    def place(self) -> str:
        """The GPUs and the host."""
        if self._place is None:
            return "?"
        device = f"gpu {'+'.join(self._place.gpus)}" if self._place.gpus else "cpu"
        return f"{device} of {self._place.host}"

    @property
    def started_at(self) -> float | None:
        """When the task last started on a node, as a time.time(); None while it waits."""
        return None if self._place is None else self._started_at

    @property
    def seconds(self) -> float:
        """Seconds since `started_at`; 0 while it waits."""
        return 0.0 if self._place is None else time.monotonic() - self._start_tick

    def has_ended(self) -> bool:
        """Whether the task has ended; reads all messages that have arrived."""
        import ray

        while self._end is None and ray.wait([self._messages], timeout=0)[0]:
            try:
                self._take(ray.get(next(self._messages)))
            except ray.exceptions.TaskCancelledError:
                self._end = WorkerExit(None, True, "cancelled")
            except StopIteration:  # Ray may drop the last message of a cancelled task
                self._end = WorkerExit(None, self._stopping, "Ray lost how it ended")
            except ray.exceptions.RayTaskError as error:  # in our own function: another node would fail the same way
                self._end = WorkerExit(None, False, first_line(error.cause or error))
            except ray.exceptions.RayError as error:
                self._retry(first_line(error))
        return self._end is not None

    def _take(self, message: "Place | WorkerExit") -> None:
        if isinstance(message, WorkerExit):
            self._end = message
        else:
            self._place = message
            self._started_at, self._start_tick = time.time(), time.monotonic()

    def _retry(self, reason: str) -> None:
        """Submit the task again, if retries are left."""
        if self._stopping or self._retries == 0:
            self._end = WorkerExit(None, self._stopping, reason)
            return
        self._retries -= 1
        self._place = None
        self._messages = self._submit()

    def interrupt(self) -> None:
        """Cancel the task: Ray raises KeyboardInterrupt in it, or removes it from its queue."""
        self._cancel(force=False)

    def kill(self) -> None:
        """Kill the task's worker."""
        self._cancel(force=True)

    def _cancel(self, force: bool) -> None:
        import ray

        self._stopping = True
        ray.cancel(self._messages, force=force)

    @property
    def was_stopped(self) -> bool:
        """Whether the task was cancelled, or its worker asked to stop."""
        return self._end is not None and self._end.was_stopped

    def read_result(self) -> tuple[JobStatus, Any] | None:
        """The result that the worker wrote."""
        assert self._end is not None
        return None if self._end.result is None else pickle.loads(self._end.result)

    def exit_reason(self) -> str:
        """The worker's exit status in words, or Ray's error."""
        assert self._end is not None
        return self._end.reason


class RayEngine(Engine):
    """Ray, which schedules the runs on its nodes. wanted: the accelerator in the command's config.

    Ray is started or joined for the first run; earlier only if it takes the cluster to know whether there are GPUs.
    """

    def __init__(self, settings: RaySettings, wanted: str) -> None:
        if int(os.environ.get("WORLD_SIZE", 1)) > 1:
            raise ConfigError("hydra/launcher=ray: starts all processes itself; start the command without torchrun")
        check_installed()
        self._settings = settings
        self._wanted = wanted

    @cached_property
    def _accelerator(self) -> str:
        accelerator = self._wanted
        if self._settings.address is None:
            accelerator = choose_accelerator(accelerator)
        elif accelerator == "auto":
            accelerator = "gpu" if any(node.gpus for node in self._cluster.nodes()) else "cpu"
        if accelerator not in ("gpu", "cpu"):
            raise ConfigError(
                f"trainer.accelerator={accelerator}: Ray has CUDA GPUs and the CPU; choose trainer=cpu, or leave "
                f"hydra/launcher out"
            )
        if accelerator == "cpu" and self._settings.gpus_per_run != 1:
            raise setting_error("gpus_per_run", self._settings.gpus_per_run, "the runs train on the CPU; leave it out")
        return accelerator

    @cached_property
    def _cluster(self) -> Cluster:
        return Cluster(self._settings.address, torch.cuda.device_count())

    @property
    def _gpus_per_run(self) -> float:
        return self._settings.gpus_per_run if self._accelerator == "gpu" else 0

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

    def complete_overrides(self, overrides: list[str]) -> list[str]:
        """Set `trainer.devices` to the GPUs that Ray reserves for a run, on GPUs."""
        if self._accelerator != "gpu":
            return overrides
        return with_devices(overrides, self._settings.devices, "ray")

    def hardware(self, trainer: DictConfig) -> Hardware:
        """This machine's hardware, or that of a node. Raises ConfigError for several nodes or another accelerator."""
        local = self._settings.address is None
        if trainer.num_nodes not in (1, "auto"):
            raise ConfigError(f"trainer.num_nodes={trainer.num_nodes}: Ray gives each run one node; set it to 1")
        asked = choose_accelerator(trainer.accelerator) if local else trainer.accelerator
        if asked not in ("auto", self._accelerator):
            raise ConfigError(
                f"trainer.accelerator={asked}: this sweep trains on the {self._accelerator} alone; give each "
                f"accelerator a command of its own"
            )
        return choose_hardware(trainer) if local else hardware_elsewhere(trainer, self._accelerator)

    def start(self, ready: list[Job], running: Sequence[SubmittedRun], more: bool) -> list[SubmittedRun]:
        """Submit all jobs to Ray, in order, except those whose folder is in use."""
        started: list[SubmittedRun] = []
        for job in list(ready):
            if any(submitted.job.run.folder.path == job.run.folder.path for submitted in (*running, *started)):
                continue
            ready.remove(job)
            started.append(RayRun(job, self._submission(job), self._settings.max_retries))
        return started

    def _submission(self, job: Job) -> Callable[[], Any]:
        """A function that submits a job to Ray."""
        import ray

        from .ray_node import Order, work

        job.config.trainer.accelerator = job.run.hardware.accelerator  # not on a CPU for want of a GPU
        task = ray.remote(work).options(
            name=job.run.title,
            num_cpus=self._settings.cpus_per_run,
            num_gpus=self._gpus_per_run,
            max_retries=0,  # see RayRun
        )
        slot = Slot("", (), int(self._settings.cpus_per_run))
        environment = slot_environment(slot, job.run.hardware.devices, os.environ)
        output = (job.run.folder.path / OUTPUT).absolute()
        order = Order(job.task.to_bytes(), output, environment, LaunchContext.current())
        return lambda: task.remote(order)

    def close(self, running: Sequence[SubmittedRun]) -> None:
        """Kill the runs: none outlives its launcher."""
        super().close(running)
        self._cluster.close()
