"""The design of scaling studies: options of one group over sizes and budgets."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch
from omegaconf import DictConfig

from llama_lab.config.components import build_model, model_cost
from llama_lab.config.schema import COMPONENTS
from llama_lab.estimate.estimate import expected_vocabulary
from llama_lab.runs.study import Arm
from llama_lab.util.errors import ConfigError, suggestion
from llama_lab.util.formatting import conjoin

from .designs import Composer, Variants, check_levels, compose_recipe, matched_arms

AXES = ("arch", *COMPONENTS, "optim", "schedule")
CONTEXT = "model.max_seq_len"


@dataclass(frozen=True)
class Scaling:
    """Options at several sizes, each for several budgets (Hoffmann et al. 2022, section 3.3).

    axis: of AXES. base: the recipe of the other groups; None: the default one; has no meaning for `arch`. sizes:
    options of the group `size`. budgets: tokens per parameter of the first option at that size, so that all options are
    trained on the same tokens. Arms are matched to, and compared with, the first option at the same size and budget.
    Every budget is a training of its own, with a schedule of its own length; the learning rates that are chosen at the
    middle budget of a size hold for its other budgets, of which they are the fewest steps away.
    """

    axis: str
    options: Sequence[str]
    sizes: Sequence[str]
    budgets: Sequence[float]
    base: str | None = None

    def variants(self, configs: Composer) -> Variants:
        """An arm per size, budget and option."""
        self._check(configs)
        shared = () if self.base is None else (f"arch={self.base}",)
        first = {
            size: configs.compose(*shared, f"{self.axis}={self.options[0]}", f"size={size}")[0] for size in self.sizes
        }
        context = min(cfg.model.max_seq_len for cfg in first.values())
        is_cut = any(cfg.model.max_seq_len != context for cfg in first.values())
        cut = (f"{CONTEXT}={context}",) if is_cut else ()
        arms: list[Arm] = []
        middle = sorted(self.budgets)[(len(self.budgets) - 1) // 2]
        for size, budget in product(self.sizes, self.budgets):
            tokens = round(budget * parameters(first[size]))
            if tokens < (step := first[size].train.batch_size * context):
                raise ConfigError(
                    f"study.budgets: {budget:g} tokens per parameter are {tokens} tokens at size={size}, and a step "
                    f"takes {step}; give more, or a smaller train.batch_size"
                )
            own = f"size={size}", f"train.tokens={tokens}", *cut
            alike = {
                f"{option}-{size}-{budget:g}": (
                    {self.axis: option, "size": size, "tokens_per_parameter": f"{budget:g}"},
                    (*shared, f"{self.axis}={option}", *own),
                )
                for option in self.options
            }
            tuners = [f"{option}-{size}-{middle:g}" for option in self.options]
            for arm, tuner in zip(matched_arms(alike, is_step=True), tuners, strict=True):
                arms.append(replace(arm, tuned_by=tuner))
        notes = ["Arms are matched within one size, and have equal tokens at one size and budget."]
        if is_cut:
            notes.append(f"All sizes have the shortest of their contexts, {context} tokens.")
        title = f"{conjoin(self.options)} over {len(self.sizes)} sizes and {len(self.budgets)} budgets"
        return Variants(tuple(arms), tuple(notes), title)

    def _check(self, configs: Composer) -> None:
        """Raise ConfigError for settings that make no scaling study."""
        if self.axis not in AXES:
            raise ConfigError(
                f"study.axis={self.axis}: is no axis of a scaling study{suggestion(self.axis, AXES)}; choose among "
                f"{', '.join(AXES)}"
            )
        if self.base is not None:
            if self.axis == "arch":
                raise ConfigError(f"study.base={self.base}: study.axis=arch has a recipe for each option; leave it out")
            compose_recipe(self.base, "base", configs)
        check_levels("options", self.options, str, least=2)
        check_levels("sizes", self.sizes, str, least=2)
        check_levels("budgets", self.budgets, float)
        for budget in self.budgets:
            if not 0 < budget < 1e6:
                raise ConfigError(f"study.budgets: {budget:g} tokens per parameter; must be positive, such as 20")


def parameters(cfg: DictConfig) -> int:
    """All parameters of the model, embeddings included, before matching. Raises ConfigError as the estimate does."""
    with torch.device("meta"):
        return int(model_cost(build_model(cfg, expected_vocabulary(cfg)[0], eot_id=0)).params)
