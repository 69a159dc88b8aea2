"""Opening the dataset that a config describes: a token folder, or a probe."""

from typing import TYPE_CHECKING

from omegaconf import DictConfig

from llama_lab.config.components import build
from llama_lab.errors import ConfigError

from .probes import ProbeDataset, ProbeValidation, Symbols
from .tokens import TokenDataset
from .windows import ValWindows

if TYPE_CHECKING:
    from llama_lab.display import Display


Dataset = TokenDataset | ProbeDataset
Validation = ValWindows | ProbeValidation


def is_probe(cfg: DictConfig) -> bool:
    """Whether a config's data is a synthetic probe."""
    return "probe" in cfg.data


def open_dataset(cfg: DictConfig, display: "Display | None" = None) -> Dataset:
    """Open the dataset that `cfg` describes. If a token folder must be built, show the progress on `display`.

    Raises ConfigError as `TokenDataset.open_or_build` and `ProbeDataset` do, and for a tokenizer that does not fit.
    """
    tokenizer = build(cfg.tokenizer, "tokenizer")
    if is_probe(cfg):
        if not isinstance(tokenizer, Symbols):
            raise ConfigError("tokenizer: a probe's symbols are its tokens; leave tokenizer= out")
        if cfg.train.prompt:
            raise ConfigError(
                f"train.prompt={cfg.train.prompt}: the sample of a probe is a validation sequence with the model's "
                f"answers; leave it out"
            )
        return ProbeDataset(build(cfg.data.probe, "data"), cfg.model.max_seq_len, cfg.data.val_sequences)
    if isinstance(tokenizer, Symbols):
        raise ConfigError("tokenizer=symbols: is for probes, and this data is text; choose bpe, byte or char")
    dataset = TokenDataset.open_or_build(
        build(cfg.data.source, "data.source"),
        tokenizer,
        cfg.data.val_fraction,
        cfg.data.cache_dir,
        display.prepare if display else None,
        cfg.data.get("val_tokens"),  # older configs have no bound
    )
    if display and dataset.times:
        display.print_line(dataset.describe_build())
    return dataset
