"""Tokens per second and model FLOPs utilisation, of training alone."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from .gpus import named


def peak_flops(device_name: str, precision: str) -> float | None:
    """Dense peak of a device in FLOP/s; None for devices we do not know, slices of one, and precisions but bf16."""
    if not precision.startswith("bf16") or "MIG" in device_name:
        return None
    device = named(device_name)
    return device.peak if device else None


class Stopwatch:
    """Seconds spent training: runs between `start` and now, less what happens inside `paused`."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._started = 0.0
        self._before = 0.0
        self._running = False

    def start(self, seconds: float = 0.0) -> None:
        """(Re)start from `seconds`."""
        self._before, self._started, self._running = seconds, self._clock(), True

    def stop(self) -> None:
        """Stand still until `resume`."""
        self._before, self._running = self.seconds, False

    def resume(self) -> None:
        """Run on."""
        self._started, self._running = self._clock(), True

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count what happens inside, if running."""
        was_running = self._running
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
        return self._before + (self._clock() - self._started if self._running else 0.0)


class Speed:
    """Tokens per second, from marks of (tokens so far, training seconds so far).

    Make the first mark after the steps in which kernels compile and caches fill, to leave them out.
    """

    def __init__(self) -> None:
        self._first: tuple[int, float] | None = None
        self._last: tuple[int, float] | None = None
        self.interval: float | None = None

    def mark(self, tokens: int, seconds: float) -> None:
        """Note where training stands; the first mark begins the measurement."""
        if self._last is not None:
            self.interval = _rate(self._last, (tokens, seconds))
        self._first = self._first or (tokens, seconds)
        self._last = (tokens, seconds)

    @property
    def overall(self) -> float | None:
        """Tokens per second from the first mark to the last, None before the second."""
        if self._first is None or self._last is None:
            return None
        return _rate(self._first, self._last)


def _rate(start: tuple[int, float], end: tuple[int, float]) -> float | None:
    """Tokens per second between two marks, None if no time has passed."""
    seconds = end[1] - start[1]
    return (end[0] - start[0]) / seconds if seconds > 0 else None


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was told, so that a clock means something."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
