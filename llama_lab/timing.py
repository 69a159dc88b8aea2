"""How long things take, side by side: a round measures each of them once, so that a machine that slows harms all."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median

import torch
from torch.utils.benchmark import Timer


@dataclass(frozen=True)
class Timing:
    """Seconds that one call took, in every round."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """The middle one."""
        return median(self.seconds)

    @property
    def low(self) -> float:
        """The shortest."""
        return min(self.seconds)

    @property
    def high(self) -> float:
        """The longest."""
        return max(self.seconds)

    def divided_by(self, n: int) -> "Timing":
        """The seconds of one of the `n` equal parts of a call."""
        return Timing(tuple(seconds / n for seconds in self.seconds))


def time_in_turn(
    contenders: Mapping[str, Callable[[], object]], rounds: int = 5, min_seconds: float = 0.1
) -> dict[str, Timing]:
    """Seconds per call of each contender, by name, in `rounds` rounds after a first one that does not count.

    Calls that are shorter are repeated until they fill `min_seconds`. Whoever goes first changes from round to round.
    PyTorch's timer waits for a GPU, and uses as many threads as PyTorch does here.
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
    """How many calls fill the time; PyTorch's timer warms up by two calls that do not count."""
    return max(1, math.ceil(min_seconds / max(timer.timeit(1).mean, 1e-9)))
