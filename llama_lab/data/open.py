"""Opening the token folder that a config describes."""

from typing import TYPE_CHECKING

from omegaconf import DictConfig

from llama_lab.config.components import build

from .tokens import TokenDataset

if TYPE_CHECKING:
    from llama_lab.display import Display


def open_dataset(cfg: DictConfig, display: "Display | None" = None) -> TokenDataset:
    """Open the token folder that `cfg` describes. If it must be built, show the progress on `display`.

    Raises ConfigError as `TokenDataset.open_or_build` does.
    """
    dataset = TokenDataset.open_or_build(
        build(cfg.data.source, "data.source"),
        build(cfg.tokenizer, "tokenizer"),
        cfg.data.val_fraction,
        cfg.data.cache_dir,
        display.prepare if display else None,
        cfg.data.get("val_tokens"),  # older configs have no bound
    )
    if display and dataset.times:
        display.print_line(dataset.describe_build())
    return dataset
