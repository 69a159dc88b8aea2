"""Main effects and interactions of a factorial."""

from collections.abc import Sequence
from itertools import combinations, product

import pandas as pd

from llama_lab.runs.study import Study

from .result import ArmResult, Interaction, Metric, common_losses
from .statistics import Effect, factorial_effects


def effects_of(study: Study, losses: pd.DataFrame) -> tuple[Effect, ...]:
    """The effects of a factorial, from the options of the baseline."""
    runs = [(arm.axes, seed, loss) for arm in study.arms for seed, loss in losses[arm.name].dropna().items()]
    if not runs:
        return ()
    return tuple(factorial_effects(_options(study), *map(list, zip(*runs, strict=True))))


def interactions_of(study: Study, arms: Sequence[ArmResult], metric: Metric) -> tuple[Interaction, ...]:
    """For each pair of axes all of whose combinations were run, over the seeds that all arms have finished."""
    means = common_losses(arms, metric).mean()
    axes = pd.DataFrame({arm.name: arm.axes for arm in study.arms}).T
    varied = {axis: options for axis, options in _options(study).items() if len(options) > 1}
    found = []
    for pair in combinations(varied, 2):
        levels = varied[pair[0]], varied[pair[1]]
        cells = means.groupby([axes[axis] for axis in pair]).mean().reindex(list(product(*levels)))
        if cells.notna().all():
            rows = cells.to_numpy(dtype=float).reshape(len(levels[0]), len(levels[1]))
            found.append(Interaction(pair, levels, tuple(map(tuple, rows.tolist()))))
    return tuple(found)


def _options(study: Study) -> dict[str, tuple[str, ...]]:
    """The options of each axis, the baseline's first."""
    arms = sorted(study.arms, key=lambda arm: arm.name != study.baseline)
    return {axis: tuple(dict.fromkeys(arm.axes[axis] for arm in arms)) for axis in arms[0].axes}
