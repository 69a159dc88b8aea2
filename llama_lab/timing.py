"""Timing several functions in turn: a round measures each once, so that a slowdown of the machine affects all."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median

import torch
from torch.utils.benchmark import Timer


@dataclass(frozen=True)
class Timing:
    """Seconds per call in every round."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """The median of the rounds."""
        return median(self.seconds)

    @property
    def low(self) -> float:
        """The fastest round."""
        return min(self.seconds)

    @property
    def high(self) -> float:
        """The slowest round."""
        return max(self.seconds)

    def divided_by(self, n: int) -> "Timing":
        """The timing of one of `n` equal parts of a call."""
        return Timing(tuple(seconds / n for seconds in self.seconds))


def time_in_turn(
    contenders: Mapping[str, Callable[[], object]], rounds: int = 5, min_seconds: float = 0.1
) -> dict[str, Timing]:
    """Seconds per call of each contender, by name, in `rounds` rounds after a warm-up.

    Shorter calls are repeated to fill `min_seconds`. The order alternates from round to round. PyTorch's timer
    synchronizes with a GPU, and uses PyTorch's present number of threads.
    """
    threads = torch.get_num_threads()
    timers = {name: Timer("work()", globals={"work": work}, num_threads=threads) for name, work in contenders.items()}
    calls = {name: _calls(timer, min_seconds) for name, timer in timers.items()}
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds):
        for name in list(timers) if number % 2 == 0 else reversed(list(timers)):
            seconds[name].append(timers[name].timeit(calls[name]).mean)
    return {name: Timing(tuple(found)) for name, found in seconds.items()}


def _calls(timer: Timer, min_seconds: float) -> int:
    """How many calls fill the time; PyTorch's timer makes two warm-up calls."""
    return max(1, math.ceil(min_seconds / max(timer.timeit(1).mean, 1e-9)))
