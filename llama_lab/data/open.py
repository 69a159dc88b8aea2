"""From a config to its tokens."""

from omegaconf import DictConfig

from llama_lab.config.components import build
from llama_lab.display import Display

from .tokens import TokenDataset


def open_dataset(cfg: DictConfig, display: Display | None = None) -> TokenDataset:
    """The token folder that `cfg` describes, built if need be, which `display` shows. Raises ConfigError."""
    dataset = TokenDataset.open_or_build(
        build(cfg.data.source, "data.source"),
        build(cfg.tokenizer, "tokenizer"),
        cfg.data.val_fraction,
        cfg.data.cache_dir,
        display.prepare if display else None,
        cfg.data.get("val_tokens"),  # the config of an older run has none, nor any bound
    )
    if display and dataset.times:
        display.tell(dataset.describe_build())
    return dataset
