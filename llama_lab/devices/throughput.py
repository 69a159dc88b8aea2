"""Tokens per second and model FLOPs utilisation, of training alone."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from .gpus import named


def peak_flops(device_name: str, precision: str) -> float | None:
    """Dense peak of a device in FLOP/s; None for unknown devices, MIG slices, and precisions other than bf16."""
    if not precision.startswith("bf16") or "MIG" in device_name:
        return None
    device = named(device_name)
    return device.peak if device else None


class Stopwatch:
    """Seconds spent training: runs between `start` and now, less what happens inside `paused`."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._before = 0.0
        self._started: float | None = None  # None while it stands still

    def start(self, seconds: float = 0.0) -> None:
        """(Re)start from `seconds`."""
        self._before, self._started = seconds, self._clock()

    def stop(self) -> None:
        """Stand still until `resume`."""
        self._before, self._started = self.seconds, None

    def resume(self) -> None:
        """Run on."""
        self._started = self._clock()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count what happens inside, if running."""
        was_running = self._started is not None
        if was_running:
            self.stop()
        try:
            yield
        finally:
            if was_running:
                self.resume()

    @property
    def seconds(self) -> float:
        """Seconds counted so far."""
        return self._before if self._started is None else self._before + (self._clock() - self._started)


class Speed:
    """Tokens per second, from marks of (tokens so far, training seconds so far).

    interval: between the last two marks. overall: from the first to the last. Both are None before the second mark.
    Make the first mark after the steps in which kernels compile and caches fill, to leave them out.
    """

    def __init__(self) -> None:
        self.interval: float | None = None
        self.overall: float | None = None
        self._first: tuple[int, float] | None = None
        self._last: tuple[int, float] | None = None

    def mark(self, tokens: int, seconds: float) -> None:
        """Add a mark; the first one starts the measurement."""
        now = (tokens, seconds)
        self.interval = _rate(self._last or now, now)
        self.overall = _rate(self._first or now, now)
        self._first, self._last = self._first or now, now


def _rate(start: tuple[int, float], end: tuple[int, float]) -> float | None:
    """Tokens per second between two marks, None if no time has passed."""
    seconds = end[1] - start[1]
    return (end[0] - start[0]) / seconds if seconds > 0 else None


def synchronize(device: torch.device) -> None:
    """Wait for all work of the device, so that it can be timed."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
