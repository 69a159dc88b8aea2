"""Parse a study's command line into the study's own settings and those of its runs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from llama_lab.config.components import build
from llama_lab.config.composing import without
from llama_lab.config.grammar import format_value, override_key
from llama_lab.config.schema import KEYS, PRICED, belongs, check_kinds, default_settings, is_kind
from llama_lab.runs.folder import arm_name
from llama_lab.runs.study import MATCHED, Arm
from llama_lab.training.prepare import check_complete, folder_name
from llama_lab.util.errors import ConfigError

from .designs import Design

# The keys of every study; all others are its design's. UNNAMED ones do not become part of the study's name.
COMMON = (
    *("seeds", "learning_rates", "tuning_seeds", "extend_rates"),
    *("compare", "margin", "max_seeds", "add_seeds", "measure_speed", "dry_run", "overwrite"),
)
UNNAMED = tuple(f"study.{key}" for key in COMMON if key != "learning_rates")
COMPARISONS = ("baseline", "all")
TUNING_SEED = 1000  # added to the judged seed by default


@dataclass(frozen=True)
class StudyCommand:
    """The settings of a study. design_name: the option of `study`. name: of its folder. shared: overrides of all runs.

    learning_rates: grids by arm or option, or "" for that of all arms; empty if none are searched. tuning_seeds: by
    judged seed, further ones included; empty likewise. further_seeds: those that `study.add_seeds` may add. launcher:
    option of `hydra/launcher`.
    """

    design_name: str
    name: str
    runs_dir: str
    design: Design
    seeds: tuple[int, ...]
    learning_rates: dict[str, tuple[float, ...]]
    tuning_seeds: dict[int, int]
    extend_rates: bool
    compare: str
    margin: float | None
    max_seeds: int | None
    further_seeds: tuple[int, ...]
    match: str
    shared: tuple[str, ...]
    launcher: str

    @property
    def tuned_with(self) -> dict[int, int]:
        """The first judged seed with the tuning seed of each judged seed."""
        first: dict[int, int] = {}
        return {seed: first.setdefault(tuning, seed) for seed, tuning in self.tuning_seeds.items()}

    def rates_of(self, arm: Arm) -> tuple[float, ...]:
        """The arm's grid of learning rates; empty if none are searched. Raises ConfigError unless it has one grid."""
        if "" in self.learning_rates or not self.learning_rates:
            return self.learning_rates.get("", ())
        names = dict.fromkeys((arm.name, *arm.axes.values()))
        found = [name for name in names if name in self.learning_rates]
        if len(found) != 1:
            has = f"has grids by {' and '.join(found)}" if found else f"has no grid for {' or '.join(names)}"
            raise ConfigError(f"study.learning_rates: arm {arm.name} {has}; give one grid for each arm or option")
        return self.learning_rates[found[0]]


def read_command(cfg: DictConfig, arguments: Sequence[str], default_recipe: str) -> StudyCommand:
    """Read the settings of a study from a composed command. Raises ConfigError.

    cfg: with Hydra's node. default_recipe: the default option of `arch`.
    """
    choices = dict(cfg.hydra.runtime.choices)
    option = choices["study"]
    cfg = without(cfg, "hydra")
    check_complete(cfg)
    defaults = default_settings(choices)
    check_kinds(cfg, defaults)
    keys = {argument: override_key(argument) for argument in arguments}
    if "arch" in keys.values() or choices["arch"] != default_recipe:  # an experiment may also set it
        raise ConfigError(f"arch={choices['arch']}: {KEYS['arch'].study}")
    for key, record in KEYS.items():
        is_priced = record.study == PRICED and cfg.study.dry_run and cfg.device is not None
        if record.study and key != "arch" and not is_priced and (key in keys.values() or cfg[key] != defaults[key]):
            raise ConfigError(f"{key}={str(cfg[key]).lower()}: {record.study}")
    for argument, override in zip(arguments, OverridesParser.create().parse_overrides(list(arguments)), strict=True):
        if override.is_sweep_override():  # only the design makes arms
            raise ConfigError(
                f"{argument}: a study takes one value; start a study for each, or write a list as '[1,2]'"
            )
    if cfg.match not in (*MATCHED, "none"):
        raise ConfigError(f"match={cfg.match}: unknown; choose {', '.join(MATCHED)} or none")
    if cfg.init_from and cfg.match != "none":
        raise ConfigError(
            f"match={cfg.match}: gives arms other widths than the weights of init_from have; use match=none"
        )
    naming = arm_name([a.removeprefix("study.") for a, key in keys.items() if key not in ("study", *UNNAMED)])
    if cfg.study.compare not in COMPARISONS:
        raise ConfigError(f"study.compare={cfg.study.compare}: unknown; choose {' or '.join(COMPARISONS)}")
    margin = cfg.study.margin
    if margin is not None and not (is_kind(margin, float) and margin > 0):
        raise ConfigError(f"study.margin={margin}: must be a positive change of the loss, such as 0.02, or null")
    seeds, grids = checked_seeds(cfg.study.seeds), cfg.study.learning_rates
    further_seeds = checked_further_seeds(cfg.study, seeds, option)
    if not grids or not isinstance(grids, Mapping):
        grids = {} if grids is None else {"": grids}
    rates = {format_value(name): checked_rates(grid, f".{name}".rstrip(".")) for name, grid in grids.items()}
    if not rates and "study.extend_rates" in keys.values() and cfg.study.extend_rates:
        raise ConfigError("study.extend_rates=true: there is no grid to extend; give study.learning_rates")
    return StudyCommand(
        design_name=option,
        name=folder_name("name", cfg.name, option if naming == "base" else f"{option}-{naming}"),
        runs_dir=cfg.runs_dir,
        design=build(OmegaConf.create({key: value for key, value in cfg.study.items() if key not in COMMON}), "study"),
        seeds=seeds,
        learning_rates=rates,
        tuning_seeds=checked_tuning_seeds(cfg.study.tuning_seeds, (*seeds, *further_seeds), bool(rates)),
        extend_rates=cfg.study.extend_rates,
        compare=cfg.study.compare,
        margin=None if margin is None else float(margin),
        max_seeds=cfg.study.max_seeds,
        further_seeds=further_seeds,
        match=cfg.match,
        shared=tuple(
            a for a, key in keys.items() if not belongs(key, ("study", "match", "name", "device", "estimate_mfu"))
        ),
        launcher=choices["hydra/launcher"],
    )


def checked_seeds(seeds: Sequence[Any], key: str = "seeds") -> tuple[int, ...]:
    """The seeds. Raises ConfigError unless they are distinct whole numbers, at least one."""
    if not seeds or len(set(seeds)) < len(seeds) or not all(type(seed) is int and seed >= 0 for seed in seeds):
        raise ConfigError(f"study.{key}={list(seeds)}: must be whole numbers, each once, such as [1,2,3]")
    return tuple(seeds)


def checked_further_seeds(settings: DictConfig, seeds: tuple[int, ...], design: str) -> tuple[int, ...]:
    """The seeds that the study may add, up to `max_seeds`. Raises ConfigError where it could not decide to."""
    most = settings.max_seeds
    if most is not None and not (type(most) is int and most >= len(seeds)):
        raise ConfigError(
            f"study.max_seeds={most}: must be a whole number, not below the {len(seeds)} of study.seeds, or null"
        )
    if not settings.add_seeds:
        return ()
    if most is None or settings.margin is None or len(seeds) == 1:
        raise ConfigError(
            "study.add_seeds=true: needs study.max_seeds, study.margin, which decides where an arm stops, and two or "
            "more study.seeds"
        )
    if design == "scaling":
        raise ConfigError("study.add_seeds=true: a law is fitted to equally many seeds of all arms; give study.seeds")
    return tuple(max(seeds) + more for more in range(1, most - len(seeds) + 1))


def checked_tuning_seeds(wanted: Sequence[Any] | None, seeds: Sequence[int], searches: bool) -> dict[int, int]:
    """The tuning seed of each judged seed, fewer in turn; empty without a search.

    Raises ConfigError unless all seeds are distinct.
    """
    if not searches:
        if wanted is not None:
            raise ConfigError("study.tuning_seeds: there are no rates to choose; give study.learning_rates, or null")
        return {}
    if wanted is None:
        wanted = [seed + TUNING_SEED for seed in seeds]
    tuning = checked_seeds(wanted, "tuning_seeds")
    if len(tuning) > len(seeds):
        raise ConfigError(
            f"study.tuning_seeds={list(tuning)}: are more than the judged ones, study.seeds={list(seeds)}, which take "
            f"one each in turn; leave some out"
        )
    if both := sorted({*seeds} & {*tuning}):
        raise ConfigError(
            f"study.tuning_seeds={list(tuning)}: {', '.join(map(str, both))} would be judged too (study.seeds), and a "
            f"rate chosen on judged runs biases the comparison; give other seeds"
        )
    return dict(zip(seeds, cycle(tuning), strict=False))


def checked_rates(rates: Any, name: str) -> tuple[float, ...]:
    """The sorted rates. Raises ConfigError unless they are distinct positive numbers, at least two."""
    is_list = isinstance(rates, Sequence) and not isinstance(rates, str)
    wanted = list(rates) if is_list else []
    if len(set(wanted)) < max(2, len(wanted)) or not all(isinstance(rate, int | float) and rate > 0 for rate in wanted):
        raise ConfigError(
            f"study.learning_rates{name}={wanted or rates}: must be two or more positive numbers, each once; "
            f"study.learning_rates=null takes optim.lr"
        )
    return tuple(sorted(float(rate) for rate in wanted))
