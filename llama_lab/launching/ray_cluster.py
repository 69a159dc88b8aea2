"""A connection to Ray for `hydra/launcher=ray`: the launcher's keys, and a cluster started here or joined."""

import importlib.util
import logging
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import Any

from llama_lab.devices.hardware import usable_cores
from llama_lab.errors import ConfigError, first_line

from .slots import setting_error

LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"  # 0 binds Ray to the loopback interface
CONNECT_SECONDS = 5.0
STORE_BYTES = 100 * 2**20  # for objects that tasks share; ours are some kilobytes


@dataclass(frozen=True)
class RaySettings:
    """Keys of `hydra/launcher=ray`. Raises ConfigError for an invalid one.

    address: of a cluster; `auto`: the one that this machine belongs to; None: one that is started here and stopped at
    the end. gpus_per_run: below 1 for a share of a GPU. max_retries: how often a run is resumed after its Ray worker or
    node died.
    """

    address: str | None
    gpus_per_run: float
    cpus_per_run: float
    max_retries: int

    def __post_init__(self) -> None:
        address, gpus, retries = self.address, self.gpus_per_run, self.max_retries
        if not (address is None or address == "auto" or is_host_and_port(address)):
            raise setting_error("address", address, "must be auto, or host:port of a cluster that this machine is in")
        if not is_number(gpus) or gpus <= 0 or (gpus > 1 and gpus != int(gpus)):
            raise setting_error("gpus_per_run", gpus, "must be a whole number, or a fraction to share a GPU")
        if not is_number(self.cpus_per_run) or self.cpus_per_run <= 0:
            raise setting_error("cpus_per_run", self.cpus_per_run, "must be a positive number")
        if type(retries) is not int or retries < 0:
            raise setting_error("max_retries", retries, "must be a whole number, 0 for none")

    @property
    def devices(self) -> int:
        """The number of GPUs that a run trains on."""
        return max(1, int(self.gpus_per_run))


def is_number(value: object) -> bool:
    """Whether `value` is an int or a float, but no bool."""
    return type(value) in (int, float)


def is_host_and_port(address: object) -> bool:
    """Whether an address is `host:port`."""
    host, _, port = str(address).rpartition(":")
    return bool(host) and "/" not in host and port.isdecimal()


@dataclass(frozen=True)
class Node:
    """The resources of a node, in use or not."""

    cpus: float
    gpus: float


class Cluster:
    """A connection to the Ray cluster at `address`; None: a cluster on this machine, stopped by `close`.

    gpus: those of this machine, for a cluster started here. Raises ConfigError if the cluster does not answer.
    """

    def __init__(self, address: str | None, gpus: int) -> None:
        self._files: TemporaryDirectory[str] | None = None
        with restore_sigterm():
            if address is None:
                self._start(gpus)
            else:
                self._connect(address)
        import ray

        self.ray: Any = ray

    def _start(self, gpus: int) -> None:
        """Start a cluster that only this machine can reach, in a temporary folder."""
        self._files = TemporaryDirectory(prefix="llama-lab-ray-", dir="/tmp", ignore_cleanup_errors=True)
        before = os.environ.get(LOOPBACK)
        os.environ[LOOPBACK] = "0"  # read as Ray is imported
        try:
            import ray

            ray.init(
                "local",
                num_cpus=usable_cores(),
                num_gpus=gpus,
                object_store_memory=STORE_BYTES,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.CRITICAL,
                _temp_dir=self._files.name,  # below /tmp, since the path of a socket must be short
            )
        finally:
            os.environ.pop(LOOPBACK)
            if before is not None:
                os.environ[LOOPBACK] = before

    def _connect(self, address: str) -> None:
        import ray

        found = os.environ.get("RAY_ADDRESS", address) if address == "auto" else address
        if is_host_and_port(found):
            check_answers(found)
        try:
            ray.init(found, log_to_driver=False, logging_level=logging.CRITICAL)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise setting_error(
                "address", address, f"no Ray cluster to join, {first_line(error)}; start one with `ray start --head`"
            ) from None

    def nodes(self) -> list[Node]:
        """The nodes that are alive now."""
        alive = [node["Resources"] for node in self.ray.nodes() if node["Alive"]]
        return [Node(resources.get("CPU", 0.0), resources.get("GPU", 0.0)) for resources in alive]

    def close(self) -> None:
        """Stop our tasks, and the cluster if it was started here."""
        self.ray.shutdown()
        if self._files is not None:
            self._files.cleanup()


def check_installed() -> None:
    """Raise ConfigError unless Ray is installed."""
    if importlib.util.find_spec("ray") is None:
        raise ConfigError("hydra/launcher=ray: needs Ray; pip install 'llama-lab[ray]'")


def check_answers(address: str) -> None:
    """Raise ConfigError if nothing listens at `host:port`. Ray itself would try for minutes, and ignore Ctrl-C."""
    from ray.util import get_node_ip_address

    host, _, port = address.rpartition(":")
    if host in ("localhost", "127.0.0.1"):  # Ray listens at the address that other nodes use
        host = get_node_ip_address()  # type: ignore[no-untyped-call]
    try:
        socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise setting_error(
            "address", address, f"nothing answers at {host}, {first_line(error)}; see `ray status`"
        ) from None


@contextmanager
def restore_sigterm() -> Iterator[None]:
    """Restore the SIGTERM handler, which stops our runs in order and which `ray.init` replaces."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
