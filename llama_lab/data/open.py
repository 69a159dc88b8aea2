"""Opening the token folder that a config describes, or those of a mixture."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from llama_lab.config.components import build
from llama_lab.config.parts import exact_shares

from .mix import Part, open_mixture
from .source import Source
from .tokens import TokenDataset

if TYPE_CHECKING:
    from llama_lab.display import Display


def open_dataset(
    cfg: DictConfig, display: "Display | None" = None, revisions: Mapping[str, str] | None = None
) -> TokenDataset:
    """Open the token folder that `cfg` describes. If it must be built, show the progress on `display`.

    revisions: commits that a run has recorded; they are used where the config names none. Raises ConfigError as
    `TokenDataset.open_or_build` does.
    """
    tokenizer = build(cfg.tokenizer, "tokenizer")
    val_tokens = cfg.data.get("val_tokens")  # older configs have no bound
    progress = display.prepare if display else lambda *_: None
    print_line = display.print_line if display else lambda _: None
    if "mix" in cfg.data:
        shares = exact_shares(cfg.data.mix)
        parts = {
            name: Part(_source(part, f"data.sources.{name}", revisions or {}, cfg), part.val_fraction, shares[name])
            for name, part in cfg.data.sources.items()
        }
        return open_mixture(parts, tokenizer, cfg.data.cache_dir, progress, val_tokens, print_line)
    source = _source(cfg.data, "data", revisions or {}, cfg)
    dataset = TokenDataset.open_or_build(
        source, tokenizer, cfg.data.val_fraction, cfg.data.cache_dir, progress, val_tokens
    )
    if dataset.times:
        print_line(dataset.describe_build())
    return dataset


def _source(data: DictConfig, key: str, revisions: Mapping[str, str], cfg: DictConfig) -> Source:
    """The source of a corpus, at the commit that is recorded for it."""
    node: dict[str, Any] = {}
    recorded = revisions.get(str(data.source.get("path")))
    if recorded and data.source.get("revision") is None:
        node["revision"] = recorded
    if "cache_dir" in data.source:
        node["cache_dir"] = cfg.data.cache_dir  # also of a part, and of a run that is evaluated elsewhere
    source: Source = build(data.source, f"{key}.source", **node)
    return source
