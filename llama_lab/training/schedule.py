"""Learning-rate schedules: functions of the optimizer step that return a multiple of the peak rate.

Each takes `step` (0 for the first) and `steps`, the budget; `warmup` is the fraction of the budget spent on a
linear ramp from zero to the peak.
"""

import math
from collections.abc import Callable

from llama_lab.util.errors import ConfigError


def constant(step: int, steps: int, warmup: float) -> float:
    """Warm-up, then 1."""
    return min(1.0, (step + 1) / (part_of(steps, "warmup", warmup) + 1))


def cosine(step: int, steps: int, warmup: float, final: float) -> float:
    """Warm-up, then half a cosine from 1 to `final` (Loshchilov & Hutter 2016, eq. 5)."""
    progress = decay_progress(step, part_of(steps, "warmup", warmup), steps)
    shape = 0.5 * (1 + math.cos(math.pi * progress))
    return constant(step, steps, warmup) * between(final, shape)


def linear(step: int, steps: int, warmup: float, final: float) -> float:
    """Warm-up, then a line from 1 to `final`."""
    progress = decay_progress(step, part_of(steps, "warmup", warmup), steps)
    return constant(step, steps, warmup) * between(final, 1 - progress)


def noam(step: int, steps: int, warmup: float) -> float:
    """Warm-up, then down with the inverse square root of the step (Vaswani et al. 2017, eq. 3).

    Its rate there, dim^-0.5 min(n^-0.5, n warmup^-1.5) at step n, is this for a peak of (dim warmup)^-0.5.
    """
    rising = max(part_of(steps, "warmup", warmup), 1)
    return min((step + 1) / rising, math.sqrt(rising / (step + 1)))


def wsd(step: int, steps: int, warmup: float, decay: float, final: float) -> float:
    """Warm-up, stable at 1, then a line to `final` over the last `decay` of the budget (Hu et al. 2024, section 4)."""
    falling = part_of(steps, "decay", decay)
    peak = constant(step, steps, warmup)
    if warmup + decay > 1:
        raise ConfigError(f"schedule.decay={decay}: leaves no room for schedule.warmup={warmup}; their sum may be 1")
    return peak * between(final, 1 - decay_progress(step, steps - falling, steps))


def steps_alike(schedule: Callable[[int, int], float], steps: int) -> int:
    """Number of first steps whose rate stays the same under a larger budget with as many warm-up steps.

    All for `constant` and `noam`, those before the decay for `wsd`, else none.
    """
    function = getattr(schedule, "func", None)
    if function is wsd:
        return steps - part_of(steps, "decay", schedule.keywords["decay"])  # type: ignore[attr-defined]
    return steps if function in (constant, noam) else 0


def part_of(steps: int, name: str, fraction: float) -> int:
    """A fraction of the budget in steps."""
    check_fraction(name, fraction)
    return round(fraction * steps)


def between(final: float, height: float) -> float:
    """The rate at a height between `final` (0) and 1 (1)."""
    check_fraction("final", final)
    return final + (1 - final) * height


def check_fraction(name: str, value: float) -> None:
    """Raise ConfigError unless `value` is a number from 0 to 1."""
    if not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ConfigError(f"schedule.{name}={value}: is a fraction; choose a number from 0 to 1")


def decay_progress(step: int, start: int, end: int) -> float:
    """How far `step` is from `start` (0) to `end` (1)."""
    return min(max((step - start) / max(end - start, 1), 0.0), 1.0)
