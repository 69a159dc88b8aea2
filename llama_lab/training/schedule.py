"""Learning-rate schedules: functions of the optimizer step that return a multiple of the peak rate.

Each takes `step` (0 for the first) and `steps`, the budget; `warmup` is the fraction of the budget that a line from
zero to the peak takes.
"""

import math

from llama_lab.errors import ConfigError


def constant(step: int, steps: int, warmup: float) -> float:
    """Warm-up, then 1."""
    return min(1.0, (step + 1) / (warmup_steps(steps, warmup) + 1))


def cosine(step: int, steps: int, warmup: float, final: float) -> float:
    """Warm-up, then half a cosine from 1 to `final` (Loshchilov & Hutter 2016, eq. 5)."""
    progress = decay_progress(step, warmup_steps(steps, warmup), steps)
    return constant(step, steps, warmup) * (final + (1 - final) * 0.5 * (1 + math.cos(math.pi * progress)))


def linear(step: int, steps: int, warmup: float, final: float) -> float:
    """Warm-up, then a line from 1 to `final`."""
    progress = decay_progress(step, warmup_steps(steps, warmup), steps)
    return constant(step, steps, warmup) * (1 - (1 - final) * progress)


def wsd(step: int, steps: int, warmup: float, decay: float, final: float) -> float:
    """Warm-up, stable at 1, then a line to `final` over the last `decay` of the budget (Hu et al. 2024, section 4)."""
    if warmup + decay > 1:
        raise ConfigError(f"schedule.decay={decay}: leaves no room for schedule.warmup={warmup}; their sum may be 1")
    progress = decay_progress(step, steps - round(decay * steps), steps)
    return constant(step, steps, warmup) * (1 - (1 - final) * progress)


def warmup_steps(steps: int, warmup: float) -> int:
    """Steps below the peak; raises ConfigError unless `warmup` is a fraction."""
    if not isinstance(warmup, int | float) or not 0 <= warmup <= 1:
        raise ConfigError(f"schedule.warmup={warmup}: is a fraction of the budget; choose a number from 0 to 1")
    return round(warmup * steps)


def decay_progress(step: int, start: int, end: int) -> float:
    """How far `step` is from `start` (0) to `end` (1)."""
    return min(max((step - start) / max(end - start, 1), 0.0), 1.0)
