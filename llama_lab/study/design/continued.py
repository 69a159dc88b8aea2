"""Designs whose arms continue training from the weights of `init_from`, each changed in one way."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from omegaconf import DictConfig, OmegaConf

from llama_lab.config.components import ROPE
from llama_lab.config.schema import is_kind
from llama_lab.model.init import KV_HEADS
from llama_lab.training.warm_start import changed_settings, source_config
from llama_lab.util.errors import ConfigError
from llama_lab.util.formatting import conjoin, percent

from .designs import Composer, Variants, check_levels, compose_base, heads_name, kv_head_levels, matched_arms


@dataclass(frozen=True)
class Continued:
    """Base class of these designs.

    base: the recipe of the arms, which must be the source's. share: of the source's tokens, that each arm trains for;
    None: `train.tokens`.
    """

    base: str
    share: float | None

    def source(self, configs: Composer, *varied: str) -> DictConfig:
        """The source's config. Raises ConfigError if the recipe departs from it in more than the settings `varied`."""
        cfg = compose_base(self.base, configs)
        if not cfg.init_from:
            raise ConfigError("init_from=null: this study trains on from a run; give its folder")
        source = source_config(cfg)
        self.check(source)
        for key, (theirs, ours) in changed_settings(source, cfg).items():
            if key not in varied:
                raise ConfigError(
                    f"{key}={ours}: {cfg.init_from} has {theirs}, and the arms differ from it in what the study "
                    f"changes alone; give the study the settings of its source"
                )
        return source

    def check(self, source: DictConfig) -> None:
        """Raise ConfigError for a source that this study cannot train on from."""

    def budget(self, source: DictConfig) -> list[str]:
        """The overrides of the arms' budget. Raises ConfigError for a share that is none."""
        if self.share is None:
            return []
        if not 0 < self.share < 1e6:
            raise ConfigError(f"study.share={self.share}: must be positive, such as 0.05, or null for train.tokens")
        tokens = OmegaConf.select(source, "train.tokens")
        if not is_kind(tokens, float):
            raise ConfigError(f"study.share={self.share}: the source records no budget; use null, and train.tokens")
        return [f"train.tokens={self.share * tokens:.0f}"]

    @property
    def budget_words(self) -> str:
        """The budget for a title."""
        return "" if self.share is None else f", for {percent(self.share)} of its tokens"


@dataclass(frozen=True)
class Uptrain(Continued):
    """From many key and value heads to fewer, which start as pooled, first or fresh ones (Ainslie et al. 2023, 2.1).

    kv_heads: default: all divisors of the source's number. starts: values of `init_kv_heads`.
    """

    kv_heads: Sequence[int] | None
    starts: Sequence[str]

    def check(self, source: DictConfig) -> None:
        """Raise ConfigError for one without key and value heads."""
        attention = source.model.attention._target_
        if attention.startswith("llama_lab.") and ".attention." not in attention:
            name = attention.rpartition(".")[2]
            raise ConfigError(f"init_from: its {name} has no key and value heads to share; name a run of attention=mha")

    def variants(self, configs: Composer) -> Variants:
        """The source trained on, then an arm per number of heads and start."""
        source = self.source(configs, "model.attention", "model.n_kv_heads")
        check_levels("starts", self.starts, str)
        if unknown := [start for start in self.starts if start not in KV_HEADS]:
            raise ConfigError(f"study.starts: {unknown[0]} is unknown; choose among {', '.join(KV_HEADS)}")
        levels, n_heads = kv_head_levels(self.base, self.kv_heads, configs)
        before = source.model.n_kv_heads
        if not is_kind(before, int):
            raise ConfigError(f"init_from: its model.n_kv_heads={before} is no number; name another run")
        fewer = [n for n in levels if n < before and before % n == 0]
        if not fewer:
            raise ConfigError(f"study.kv_heads: none divides the {before} of the source; choose fewer, or null for all")
        shared = [f"arch={self.base}", *self.budget(source)]
        reference = heads_name(before, n_heads)
        whole = {"n_kv_heads": str(before), "init_kv_heads": "all"}, [*shared, f"model.n_kv_heads={before}"]
        arms = {reference: whole} | {
            f"{heads_name(n, n_heads)}-{start}": (
                {"n_kv_heads": str(n), "init_kv_heads": start},
                [*shared, f"model.n_kv_heads={n}", f"init_kv_heads={start}"],
            )
            for n, start in product(fewer, self.starts)
        }
        title = f"Uptraining {reference} to fewer key and value heads{self.budget_words}"
        return Variants(matched_arms(arms), title=title)


@dataclass(frozen=True)
class Extend(Continued):
    """From one checkpoint with rotary positions to a longer context, by each scaling.

    growth: of the context. positions: options; the first is compared with the others.
    """

    growth: int
    positions: Sequence[str]

    def variants(self, configs: Composer) -> Variants:
        """An arm per position encoding."""
        source = self.source(configs)
        check_levels("positions", self.positions, str)
        if source.model.position._target_ != ROPE or source.model.position.scaling:
            raise ConfigError("init_from: has no rotary positions, or scaled ones; name a run with position=rope")
        if type(self.growth) is not int or self.growth < 2:
            raise ConfigError(f"study.growth={self.growth}: must be a whole number from 2")
        context, theta = source.model.max_seq_len, source.model.position.theta
        shared = [f"arch={self.base}", *self.budget(source), f"model.max_seq_len={self.growth * context}"]
        arms = {}
        for position in self.positions:
            chosen, _ = configs.compose(f"arch={self.base}", f"position={position}")
            if chosen.model.position._target_ != ROPE:
                raise ConfigError(f"study.positions: {position} is not rotary; choose among the options rope_*")
            settings = {"theta": theta}
            if scaling := chosen.model.position.scaling:
                settings["scaling.factor"] = float(self.growth)
                settings |= {"scaling.original_max_seq_len": context} if "original_max_seq_len" in scaling else {}
            own = (f"model.position.{key}={value}" for key, value in settings.items())
            arms[position] = {"position": position}, [*shared, f"position={position}", *own]
        title = f"{conjoin(self.positions)} from {context} to {self.growth * context} tokens{self.budget_words}"
        return Variants(matched_arms(arms), title=title, lead="Context length")
