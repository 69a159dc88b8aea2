"""Timing several functions in turn: a round measures each once, so that a slowdown of the machine affects all."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

import torch
from torch.utils.benchmark import Measurement, Timer

T = TypeVar("T")
Contenders = Mapping[str, Callable[[], object]]  # what is timed, by name


def time_in_turn(contenders: Contenders, rounds: int = 5, min_seconds: float = 0.1) -> dict[str, Measurement]:
    """Seconds per call of each contender, by name, in `rounds` rounds after a warm-up.

    Shorter calls are repeated to fill `min_seconds`. PyTorch's timer makes two warm-up calls, synchronizes with a GPU,
    and uses PyTorch's present number of threads.
    """
    threads = torch.get_num_threads()
    timers = {
        name: Timer("work()", globals={"work": work}, description=name, num_threads=threads)
        for name, work in contenders.items()
    }
    calls = {name: max(1, math.ceil(min_seconds / timer.timeit(1).mean)) for name, timer in timers.items()}
    rounds_of_all = [timers[name].timeit(calls[name]) for n in range(rounds) for name in alternating(timers, n)]
    return {measured.description: measured for measured in Measurement.merge(rounds_of_all)}


def alternating(names: Iterable[T], number: int) -> list[T]:
    """The order of a round, which alternates: forwards in the first, whose number is 0, backwards in the next."""
    return list(names)[:: -1 if number % 2 else 1]
