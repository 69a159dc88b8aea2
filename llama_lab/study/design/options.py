"""A design whose arms are options of any one setting, or all combinations of the options of several."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from omegaconf import DictConfig, OmegaConf

from llama_lab.analysis.settings import INIT, SEEDS
from llama_lab.config.composing import options_of
from llama_lab.config.grammar import format_value, to_override
from llama_lab.config.messages import nearest
from llama_lab.config.schema import CHANGEABLE, belongs, flatten, groups
from llama_lab.util.errors import ConfigError, suggestion
from llama_lab.util.formatting import conjoin

from .designs import Composer, Variants, compose_recipe, label, matched_arms

# What cannot be an axis, and why.
REFUSED = {
    "arch": "study=recipes compares whole recipes",
    "study": "is of the study, not of its runs",
    "match": "is of the study, not of its runs",
    "experiment": "may set anything; name the keys that differ",
    "name": "names the runs",
    "arm": "names the runs",
    INIT: "arms start from the same weights",
    **dict.fromkeys(("seed", *SEEDS), "study.seeds repeats every arm at each seed"),
    "train.tokens": "arms have equal budgets; study=scaling compares budgets",
    **dict.fromkeys(
        ("train.eval_lengths", "train.evaluations"), "is no part of what is trained; it holds for all arms"
    ),
    "train.ema": "an average of the weights leaves these as they are, so that arms would be equal; it holds for all",
    "data.document_mask": "",  # is an axis, unlike the others below: it leaves the text as it is
    "data": "losses on different texts cannot be compared",
    "tokenizer": "all arms of a study read the same tokens; llama-lab-compare compares runs with other ones",
    "trainer.precision": "arms compute in one precision; llama-lab-compare compares runs in several",
    "trainer": "says where a run computes, not what",
    **dict.fromkeys(CHANGEABLE, "says where a run computes, not what"),
}


@dataclass(frozen=True)
class Options:
    """The options of an axis, each compared with the first, or all combinations of those of several axes.

    axis: a group or a key, or several. options: of the axis; of several, a list for each.
    """

    base: str
    axis: str | Sequence[str]
    options: Sequence[Any]

    def variants(self, configs: Composer) -> Variants:
        """An arm per option or combination."""
        cfg, _ = compose_recipe(self.base, "base", configs)
        axes = self.axes()
        for axis, options in axes.items():
            check_axis(axis, self.base, cfg)
            check_options(axis, options)
        arms: dict[str, tuple[dict[str, str], list[str]]] = {}
        for combination in product(*axes.values()):
            chosen = dict(zip(axes, combination, strict=True))
            name = "+".join(label(axis, option, axes) for axis, option in chosen.items())
            own = [f"{axis}={to_override(option)}" for axis, option in chosen.items()]
            if name in arms:
                raise ConfigError(f"study.options: two arms would have the name {name}; leave one of the options out")
            arms[name] = {axis: format_value(option) for axis, option in chosen.items()}, [f"arch={self.base}", *own]
        listed = {axis: conjoin([format_value(option) for option in options]) for axis, options in axes.items()}
        title = "; ".join(f"{axis}: {options}" for axis, options in listed.items())
        hint = "; arms with positions of their own are recipes: study=recipes" if "attention" in axes else ""
        return Variants(matched_arms(arms), title=f"{self.base} with {title}", hint=hint)

    def axes(self) -> dict[str, list[Any]]:
        """The options of each axis. Raises ConfigError unless each is named once and has two options, each once."""
        names, lists = list(self.axis), list(self.options)
        if isinstance(self.axis, str):
            names, lists = [self.axis], [self.options]
        if not names or len(set(names)) < len(names):
            raise ConfigError(f"study.axis=[{','.join(map(str, names))}]: must name one or more axes, each once")
        if len(lists) != len(names) or any(isinstance(one, str) or not isinstance(one, Sequence) for one in lists):
            raise ConfigError(
                f"study.options={format_value(self.options)}: must be a list for each of {len(names)} axes, such as "
                f"[[relu,swiglu],[layernorm,rmsnorm]]"
            )
        axes = {name: list(options) for name, options in zip(names, lists, strict=True)}
        for name, options in axes.items():
            texts = [format_value(option) for option in options]
            if len(options) < 2:
                raise ConfigError(f"study.options={format_value(options)}: {name} needs two or more to compare")
            if repeated := [text for text in texts if texts.count(text) > 1]:
                problem = f"has {repeated[0]} twice; name every option once"
                raise ConfigError(f"study.options={format_value(options)}: {problem}")
        return axes


def check_axis(axis: str, base: str, cfg: DictConfig) -> None:
    """Raise ConfigError for an axis that the base has not, or that a study sets itself. cfg: of the base."""
    if why := next((why for key, why in REFUSED.items() if belongs(axis, (key,))), ""):
        raise ConfigError(f"study.axis={axis}: {why}; choose another group or key")
    keys = flatten(OmegaConf.to_container(cfg))
    if axis in groups() or axis in keys:
        return
    if any(key.startswith(f"{axis}.") for key in keys):
        group = axis.rpartition(".")[2]
        fix = f"choose the group {group}" if group in groups() else f"name one of its keys, such as {axis}.<key>"
        raise ConfigError(f"study.axis={axis}: is not a single setting; {fix}")
    close = nearest(axis, [*keys, *groups()])
    guess = f" (did you mean {close}?)" if close else ""
    raise ConfigError(f"study.axis={axis}: is no group, and no key with arch={base}{guess}")


def check_options(axis: str, options: Sequence[Any]) -> None:
    """Raise ConfigError for an option that a group does not have."""
    known = options_of(axis) if axis in groups() else []
    for option in options:
        if known and option not in known:
            guess = suggestion(str(option), known)
            raise ConfigError(f"study.options: {axis} has no option {option}{guess}; choose among {', '.join(known)}")
