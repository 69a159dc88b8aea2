"""Schedules: multiples of the peak learning rate from 0 to 1, equal to torch's own schedulers."""

import warnings
from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, LinearLR, LRScheduler, SequentialLR

from llama_lab.training.schedule import constant, cosine, linear, noam, wsd
from llama_lab.util.errors import ConfigError

Schedule = Callable[[int, int], float]

STEPS = st.integers(1, 400)
FRACTION = st.floats(0, 1)


def curve(schedule: Schedule, steps: int) -> list[float]:
    """The multiple at each step of the budget."""
    return [schedule(step, steps) for step in range(steps)]


def torch_curve(steps: int, *phases: tuple[int, Callable[[torch.optim.Optimizer], LRScheduler]]) -> list[float]:
    """The rates of torch schedulers, each from a step on, for a peak of 1."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    rates = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the optimizer takes no step
        schedulers = [make(optimizer) for _, make in phases]
        scheduler = SequentialLR(optimizer, schedulers, [start for start, _ in phases[1:]])
        for _ in range(steps):
            rates.append(float(optimizer.param_groups[0]["lr"]))
            scheduler.step()
    return rates


def warming(steps: int) -> tuple[int, Callable[[torch.optim.Optimizer], LRScheduler]]:
    """A line from 1/(steps + 1) up to the peak."""
    return 0, lambda o: LinearLR(o, 1 / (steps + 1), 1.0, steps) if steps else ConstantLR(o, 1.0)


@given(STEPS, FRACTION)
def test_the_warm_up_rises_to_1_at_the_end_of_its_fraction(steps: int, warmup: float) -> None:
    rising = round(warmup * steps)
    multiples = [constant(step, steps, warmup) for step in range(steps + 1)]
    assert multiples[rising:] == [1.0] * (steps + 1 - rising)
    assert multiples[: rising + 1] == sorted(set(multiples[: rising + 1])), "not strictly rising"


@given(STEPS, st.floats(0, 0.9), FRACTION)
def test_cosine_is_torch_s_linear_warm_up_and_cosine_annealing(steps: int, warmup: float, final: float) -> None:
    rising = round(warmup * steps)
    torch_s = torch_curve(
        steps, warming(rising), (rising, lambda o: CosineAnnealingLR(o, max(steps - rising, 1), eta_min=final))
    )
    assert curve(partial(cosine, warmup=warmup, final=final), steps) == pytest.approx(torch_s, abs=1e-9)


@given(STEPS, st.floats(0, 0.9), FRACTION)
def test_linear_is_torch_s_linear_warm_up_and_linear_decay(steps: int, warmup: float, final: float) -> None:
    rising = round(warmup * steps)
    torch_s = torch_curve(steps, warming(rising), (rising, lambda o: LinearLR(o, 1.0, final, max(steps - rising, 1))))
    assert curve(partial(linear, warmup=warmup, final=final), steps) == pytest.approx(torch_s, abs=1e-9)


@given(STEPS, FRACTION, st.data(), FRACTION)
def test_wsd_is_flat_at_1_then_falls_along_a_line(steps: int, warmup: float, data: st.DataObject, final: float) -> None:
    decay = data.draw(st.floats(0, 1 - warmup))
    multiples = curve(partial(wsd, warmup=warmup, decay=decay, final=final), steps)
    rising, falling = round(warmup * steps), steps - round(decay * steps)
    assert multiples[rising : falling + 1] == [1.0] * len(multiples[rising : falling + 1])
    line = [1 - (1 - final) * (step - falling) / (steps - falling) for step in range(max(rising, falling), steps)]
    assert multiples[max(rising, falling) :] == pytest.approx(line)


SETTINGS = {"warmup": 0.1, "final": 0.1, "decay": 0.2}
TAKES = {constant: ["warmup"], cosine: ["warmup", "final"], linear: ["warmup", "final"], wsd: list(SETTINGS)}


@pytest.mark.parametrize("wrong", [-0.1, 1.5, "abc", None, float("nan")])
@pytest.mark.parametrize(("schedule", "key"), [(schedule, key) for schedule in TAKES for key in TAKES[schedule]])
def test_a_setting_that_is_no_fraction_is_refused(schedule: Callable[..., float], key: str, wrong: object) -> None:
    settings = {name: SETTINGS[name] for name in TAKES[schedule]} | {key: wrong}
    with pytest.raises(ConfigError) as error:
        schedule(0, 100, **settings)
    assert str(error.value).startswith(f"schedule.{key}={wrong}: ")


def test_a_decay_that_begins_before_the_warm_up_ends_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^schedule\.decay=0\.95: .*schedule\.warmup=0\.1; "):
        wsd(0, 100, warmup=0.1, decay=0.95, final=0.0)


def test_noam_is_the_rate_of_the_2017_paper() -> None:
    """Equation 3 over its peak, for its own budget and warm-up."""
    dim, steps, warmup = 512, 100_000, 4000
    for n in (1, 2, 3999, 4000, 4001, 50_000, 100_000):
        rate = dim**-0.5 * min(n**-0.5, n * warmup**-1.5)
        assert noam(n - 1, steps, warmup / steps) == pytest.approx(rate * (dim * warmup) ** 0.5, rel=1e-12)
