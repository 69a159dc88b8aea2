"""The space of a search: what Hydra's grammar of sweeps says about a setting, as a distribution of Optuna's."""

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep, Sweep
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.samplers import GridSampler
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from llama_lab.util.errors import ConfigError

Distribution = CategoricalDistribution | FloatDistribution | IntDistribution
Value = str | int | float


@dataclass(frozen=True)
class Parameter:
    """A setting that is searched. key: as in an override, with its `+`. argument: as it was typed.

    values: all that it can have; empty for an interval. texts: the same, as Hydra's own sweep would write them.
    """

    key: str
    argument: str
    distribution: Distribution
    values: tuple[Value, ...] = ()
    texts: tuple[str, ...] = ()

    @property
    def examples(self) -> list[str]:
        """An override for each option, or for the lowest number."""
        if isinstance(self.distribution, CategoricalDistribution):
            return [f"{self.key}={text}" for text in self.texts]
        return [self.override(self.distribution.to_external_repr(self.distribution.low))]

    def override(self, value: Value) -> str:
        """The override for a value that was drawn."""
        if isinstance(value, str) or not self.values:
            return f"{self.key}={value}"
        nearest = min(range(len(self.values)), key=lambda i: abs(float(self.values[i]) - value))
        return f"{self.key}={self.texts[nearest]}"


def read_space(arguments: Sequence[str], loader: ConfigLoader) -> tuple[list[Parameter], list[str]]:
    """The searched settings of a command line, and its other overrides. Raises ConfigError if a sweep is no space."""
    overrides = OverridesParser.create(loader).parse_overrides(list(arguments))
    pairs = list(zip(arguments, overrides, strict=True))
    fixed = [argument for argument, override in pairs if not override.is_sweep_override()]
    space = [parameter(argument, override) for argument, override in pairs if override.is_sweep_override()]
    if not space:
        example = "norm=rmsnorm,layernorm or 'optim.lr=tag(log,interval(1e-4,1e-2))'"
        raise ConfigError(f"hydra/sweeper=optuna: there is nothing to search; give a space, such as {example}")
    return space, fixed


def parameter(argument: str, override: Override) -> Parameter:
    """The searched setting of an override. Raises ConfigError for one with fewer than two values."""
    sweep, key = override.value(), override.get_key_element()
    tags: set[str] = sweep.tags if isinstance(sweep, Sweep) else set()
    if unknown := tags - {"log"}:
        raise ConfigError(f"{argument}: unknown tag {sorted(unknown)[0]}; the only one is log")
    log = "log" in tags
    if not isinstance(sweep, IntervalSweep | RangeSweep):
        if log:
            raise ConfigError(f"{argument}: tag log is for a range or an interval; leave it out")
        texts = tuple(dict.fromkeys(override.sweep_string_iterator()))
        if len(texts) < 2:
            only = f"give two or more, or take it out of the search as {key}=VALUE"
            raise ConfigError(f"{argument}: a single option; {only}")
        return Parameter(key, argument, CategoricalDistribution(texts), texts, texts)
    low: Any
    high: Any
    if isinstance(sweep, RangeSweep):
        texts, values = range_values(argument, sweep, log)
        low, high, step = min(values), max(values), None if log else abs(sweep.step)
    else:
        texts, values, low, high, step = (), (), sweep.start, sweep.end, None
    if low >= high:
        raise ConfigError(f"{argument}: from {low:g} to {high:g} there is nothing; give the lower bound first")
    if log and low <= 0:
        raise ConfigError(f"{argument}: a logarithmic scale has no {low:g}; give positive bounds, or leave tag log out")
    distribution: Distribution
    if isinstance(low, int) and isinstance(high, int):
        distribution = IntDistribution(low, high, log=log, step=int(step or 1))
    else:
        distribution = FloatDistribution(low, high, log=log, step=step)
    return Parameter(key, argument, distribution, values, texts)


def range_values(argument: str, sweep: RangeSweep, log: bool) -> tuple[tuple[str, ...], tuple[float, ...]]:
    """The values of a range as Hydra's own sweep writes them, and as numbers; its stop is none. Raises ConfigError."""
    if sweep.step == 0:
        raise ConfigError(f"{argument}: the step is 0; give another")
    texts = tuple(map(str, sweep.range()))
    if len(texts) < 2:
        raise ConfigError(f"{argument}: holds {len(texts)} value(s); make it longer, or its step smaller")
    whole = all(text.lstrip("-").isdecimal() for text in texts)
    if log and not (whole and abs(sweep.step) == 1):
        raise ConfigError(f"{argument}: tag log takes whole numbers and a step of 1; leave it out, or write a choice")
    # In decimals, as Optuna counts: sums of 0.1 would miss 0.3.
    exact = [Decimal(str(sweep.start)) + i * Decimal(str(sweep.step)) for i in range(len(texts))]
    return texts, tuple(int(one) if whole else float(one) for one in exact)


class Grid(GridSampler):
    """Optuna's GridSampler over a space of choices and ranges. Raises ConfigError for an interval.

    The order of the points is shuffled by the seed.
    """

    def __init__(self, space: Sequence[Parameter], seed: int) -> None:
        if endless := next((one for one in space if not one.values), None):
            fix = "give a choice or a range, or another hydra/sweeper/sampler"
            raise ConfigError(f"{endless.argument}: an interval has no grid; {fix}")
        super().__init__({one.key: one.values for one in space}, seed)

    def after_trial(self, study: Study, trial: FrozenTrial, state: TrialState, values: Sequence[float] | None) -> None:
        """Nothing: Optuna's own would stop `Study.optimize` after the last point, and fails outside of it."""
