"""The space of a search: what Hydra's grammar of sweeps says about a setting, as a distribution of Optuna's."""

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep, Sweep
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

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
        raise ConfigError(
            "hydra/sweeper=optuna: there is nothing to search; give a space, such as norm=rmsnorm,layernorm or "
            "'optim.lr=tag(log,interval(1e-4,1e-2))'"
        )
    return space, fixed


def parameter(argument: str, override: Override) -> Parameter:
    """The searched setting of an override. Raises ConfigError for one with fewer than two values."""
    sweep, key = override.value(), override.get_key_element()
    tags: set[str] = sweep.tags if isinstance(sweep, Sweep) else set()
    if unknown := tags - {"log"}:
        raise ConfigError(f"{argument}: unknown tag {sorted(unknown)[0]}; the only one is log")
    if isinstance(sweep, IntervalSweep):
        assert sweep.start is not None
        assert sweep.end is not None
        check_bounds(argument, sweep.start, sweep.end, "log" in tags)
        return Parameter(key, argument, numbers(sweep.start, sweep.end, None, "log" in tags))
    if isinstance(sweep, RangeSweep):
        return of_range(key, argument, sweep, "log" in tags)
    if tags:
        raise ConfigError(f"{argument}: tag log is for a range or an interval; leave it out")
    texts = tuple(dict.fromkeys(override.sweep_string_iterator()))
    if len(texts) < 2:
        raise ConfigError(f"{argument}: a single option; give two or more, or take it out of the search as {key}=VALUE")
    return Parameter(key, argument, CategoricalDistribution(texts), texts, texts)


def of_range(key: str, argument: str, sweep: RangeSweep, log: bool) -> Parameter:
    """The searched setting of a range, whose stop is not a value, as in Hydra's own sweep. Raises ConfigError."""
    assert sweep.start is not None
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
    values = tuple(int(one) if whole else float(one) for one in exact)
    low, high = min(values), max(values)
    check_bounds(argument, low, high, log)
    distribution = numbers(low, high, None if log else abs(sweep.step), log)
    return Parameter(key, argument, distribution, values, texts)


def numbers(low: float, high: float, step: float | None, log: bool) -> IntDistribution | FloatDistribution:
    """From low to high, both included: whole numbers if these are. step: None for 1, or for a continuous range."""
    if isinstance(low, int) and isinstance(high, int):
        return IntDistribution(low, high, log=log, step=int(step or 1))
    return FloatDistribution(low, high, log=log, step=step)


def check_bounds(argument: str, low: float, high: float, log: bool) -> None:
    """Raise ConfigError unless low < high, and low > 0 on a logarithmic scale."""
    if low >= high:
        raise ConfigError(f"{argument}: from {low:g} to {high:g} there is nothing; give the lower bound first")
    if log and low <= 0:
        raise ConfigError(f"{argument}: a logarithmic scale has no {low:g}; give positive bounds, or leave tag log out")
