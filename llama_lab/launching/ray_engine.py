"""The engine of `hydra/launcher=ray`: a task of Ray's per run, on this machine or over a cluster."""

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

from .child import End, Origin
from .engine import Engine, Execution, with_devices
from .jobs import Job
from .ray_cluster import Cluster, Node, Settings, check_installed
from .slots import Slot, setting_error, slot_environment

if TYPE_CHECKING:
    from .ray_node import Place  # which imports Ray


class RayRun(Execution):
    """A run that Ray has, submitted again by `submit` if its Ray worker or its node dies, so many `retries`.

    Ray would do so, too, but without a word: the user is told where a run begins again.
    """

    def __init__(self, job: Job, submit: Callable[[], Any], retries: int) -> None:
        super().__init__(job)
        self._submit = submit
        self._retries = retries
        self._messages = submit()  # a generator of references: to the Place, and to the End
        self._place: Place | None = None
        self._end: End | None = None
        self._stopping = False
        self._began = self._began_ticking = 0.0

    @property
    def place(self) -> str:
        """The GPUs and the machine."""
        if self._place is None:
            return "?"
        device = f"gpu {'+'.join(self._place.gpus)}" if self._place.gpus else "cpu"
        return f"{device} of {self._place.host}"

    @property
    def began(self) -> float | None:
        """When Ray had found a place for it, this time."""
        return None if self._place is None else self._began

    @property
    def seconds(self) -> float:
        """Since then."""
        return 0.0 if self._place is None else time.monotonic() - self._began_ticking

    def has_ended(self) -> bool:
        """Whether the run is over, after reading what Ray has to tell."""
        import ray

        while self._end is None and ray.wait([self._messages], timeout=0)[0]:
            try:
                self._take(ray.get(next(self._messages)))
            except ray.exceptions.TaskCancelledError:
                self._end = End(None, True, "cancelled")
            except StopIteration:  # of a task that was cancelled, Ray may drop the last message
                self._end = End(None, self._stopping, "Ray lost how it ended")
            except ray.exceptions.RayTaskError as error:  # in our own function: another node would fail the same way
                self._end = End(None, False, first_line(error.cause or error))
            except ray.exceptions.RayError as error:
                self._go_on(first_line(error))
        return self._end is not None

    def _take(self, message: "Place | End") -> None:
        """Note where it begins, or how it ended."""
        if isinstance(message, End):
            self._end = message
        else:
            self._place = message
            self._began, self._began_ticking = time.time(), time.monotonic()

    def _go_on(self, loss: str) -> None:
        """Submit it again after the loss of its worker, unless that was enough."""
        if self._stopping or self._retries == 0:
            self._end = End(None, self._stopping, loss)
            return
        self._retries -= 1
        self._place = None
        self._messages = self._submit()

    def interrupt(self) -> None:
        """Have Ray raise KeyboardInterrupt in the task, or forget one that waits."""
        self._cancel(force=False)

    def kill(self) -> None:
        """End it now."""
        self._cancel(force=True)

    def _cancel(self, force: bool) -> None:
        import ray

        self._stopping = True
        ray.cancel(self._messages, force=force)

    @property
    def was_stopped(self) -> bool:
        """Whether somebody asked it to stop before its end."""
        return self._end is not None and self._end.was_stopped

    def returned(self) -> tuple[JobStatus, Any] | None:
        """What the worker has left."""
        assert self._end is not None
        return None if self._end.result is None else pickle.loads(self._end.result)

    def how_it_ended(self) -> str:
        """By its exit status, or by what Ray says."""
        assert self._end is not None
        return self._end.how


class RayCluster(Engine):
    """Tasks of Ray's, which finds them a node. wanted: the accelerator that the command's config asks for.

    Ray is started or joined when the first run is to begin; before, to plan, only if the cluster alone can tell whether
    it has GPUs.
    """

    def __init__(self, settings: Settings, wanted: str) -> None:
        if int(os.environ.get("WORLD_SIZE", 1)) > 1:
            raise ConfigError("hydra/launcher=ray: starts all processes itself; start the command without torchrun")
        check_installed()
        self._settings = settings
        self._wanted = wanted

    @cached_property
    def _accelerator(self) -> str:
        """gpu or cpu. Raises ConfigError."""
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
        """Ray, started or joined."""
        return Cluster(self._settings.address, torch.cuda.device_count())

    @property
    def _gpus_per_run(self) -> float:
        """That Ray is to set aside."""
        return self._settings.gpus_per_run if self._accelerator == "gpu" else 0

    @property
    def places(self) -> str:
        """The cluster, and what it has. Raises ConfigError if a run would wait for ever."""
        gpus_per_run = self._gpus_per_run  # before Ray is started, since it may be refused
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
        """Raise ConfigError unless one node, idle, could take a run."""
        settings = self._settings
        most = max(node.gpus for node in nodes)
        if gpus_per_run > most:
            raise setting_error("gpus_per_run", settings.gpus_per_run, f"no node of the cluster has over {most:g} GPUs")
        most = max(node.cpus for node in nodes if node.gpus >= gpus_per_run)
        if settings.cpus_per_run > most:
            raise setting_error("cpus_per_run", settings.cpus_per_run, f"no node that could has over {most:g} CPUs")

    @property
    def width(self) -> None:
        """That is for Ray to say."""

    def settle(self, overrides: list[str]) -> list[str]:
        """On GPUs, each run has those that Ray sets aside for it."""
        if self._accelerator != "gpu":
            return overrides
        return with_devices(overrides, self._settings.devices, "ray")

    def hardware(self, trainer: DictConfig) -> Hardware:
        """This machine's, or that of the node which Ray will choose."""
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

    def start(self, ready: list[Job], running: Sequence[Execution], more: bool) -> list[Execution]:
        """Hand all of them to Ray, in order; those with a folder in use stay."""
        started: list[Execution] = []
        for job in list(ready):
            if any(execution.job.run.folder.path == job.run.folder.path for execution in (*running, *started)):
                continue
            ready.remove(job)
            started.append(RayRun(job, self._submission(job), self._settings.max_retries))
        return started

    def _submission(self, job: Job) -> Callable[[], Any]:
        """What hands a job to Ray."""
        import ray

        from .ray_node import Order, work

        job.config.trainer.accelerator = job.run.hardware.accelerator  # a node without its GPUs is not to train slowly
        task = ray.remote(work).options(
            name=job.run.title,
            num_cpus=self._settings.cpus_per_run,
            num_gpus=self._gpus_per_run,
            max_retries=0,  # see RayRun
        )
        slot = Slot("", (), int(self._settings.cpus_per_run))
        environment = slot_environment(slot, job.run.hardware.devices, os.environ)
        output = (job.run.folder.path / OUTPUT).absolute()
        order = Order(job.task.to_bytes(), output, environment, Origin.here())
        return lambda: task.remote(order)

    def close(self, running: Sequence[Execution]) -> None:
        """Runs do not outlive their launcher."""
        super().close(running)
        self._cluster.close()
