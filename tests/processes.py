"""What tests ask of processes: to wait for them, and what the machine knows of them."""

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import psutil

PATIENCE = 240  # seconds, on a busy machine


def wait_until(holds: Callable[[], object], pause: float = 0.01) -> None:
    """Ask again and again, until it does."""
    end = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < end, "never"
        time.sleep(pause)


def at_work_in(folder: Path) -> list[psutil.Process]:
    """The processes whose working directory is a folder; those that have ended have none."""
    return [process for process in psutil.process_iter(["cwd"]) if process.info["cwd"] == str(folder)]


def listening(processes: Iterable[psutil.Process]) -> set[str]:
    """The addresses at which processes wait for TCP connections."""
    found: set[str] = set()
    for process in processes:
        with suppress(psutil.Error):
            connections = process.net_connections("tcp")
            found |= {each.laddr.ip for each in connections if each.status == psutil.CONN_LISTEN}
    return {address.removeprefix("::ffff:") for address in found}
