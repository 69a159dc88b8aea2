"""Timings side by side: every round measures each once, and none is always first."""

import time
from itertools import groupby

import pytest

from llama_lab.evaluation.speed import time_in_turn


def test_each_has_a_time_for_every_round_and_they_take_turns() -> None:
    called: list[str] = []
    contenders = {name: (lambda name=name: called.append(name)) for name in "ab"}
    found = time_in_turn(contenders, rounds=3, min_seconds=0)
    assert {name: len(timing.times) for name, timing in found.items()} == {"a": 3, "b": 3}
    order = [name for name, _ in groupby(called)]
    assert order == list("ababab")  # ab before, then ab, ba, ab: who ended a round begins the next


def test_a_slower_one_takes_longer_and_times_are_of_one_call() -> None:
    found = time_in_turn(
        {"short": lambda: time.sleep(0.002), "long": lambda: time.sleep(0.02)}, rounds=3, min_seconds=0.01
    )
    assert 0.002 <= min(found["short"].times) < 0.02 <= min(found["long"].times)
    assert found["short"].median < found["long"].median


@pytest.mark.parametrize(("min_seconds", "calls"), [(0.0, 1), (0.06, 6)])
def test_short_calls_are_repeated_until_they_fill_the_time(min_seconds: float, calls: int) -> None:
    moments: list[float] = []

    def work() -> None:
        moments.append(time.perf_counter())
        time.sleep(0.01)

    (timing,) = time_in_turn({"one": work}, rounds=1, min_seconds=min_seconds).values()
    assert 0.01 <= timing.times[0] < 0.1
    assert len(moments) >= calls


def test_the_first_call_does_not_count() -> None:
    began: list[float] = []

    def work() -> None:
        time.sleep(0.001 if began else 0.3)
        began.append(0)

    (timing,) = time_in_turn({"one": work}, rounds=2, min_seconds=0.001).values()
    assert max(timing.times) < 0.15
