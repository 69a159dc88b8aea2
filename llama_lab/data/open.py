"""Opening the dataset that a config describes: a token folder, those of a mixture, or a probe."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from llama_lab.config.components import build
from llama_lab.util.errors import ConfigError

from .index import HALVES
from .mix import Part, open_mixture
from .parts import exact_shares
from .probes import ProbeDataset, ProbeValidation, Symbols
from .source import Source
from .tokenizer import TokenizerFactory
from .tokens import TokenDataset
from .windows import ValWindows

if TYPE_CHECKING:
    from llama_lab.util.display import Display


Dataset = TokenDataset | ProbeDataset
Validation = ValWindows | ProbeValidation


def is_probe(cfg: DictConfig) -> bool:
    """Whether a config's data is a synthetic probe."""
    return "probe" in cfg.data


def open_dataset(
    cfg: DictConfig, display: "Display | None" = None, revisions: Mapping[str, str] | None = None
) -> Dataset:
    """Open the dataset that `cfg` describes. If a token folder must be built, show the progress on `display`.

    revisions: commits that a run has recorded; they are used where the config names none. Raises ConfigError as
    `TokenDataset.open_or_build` and `ProbeDataset` do, and for a tokenizer that does not fit.
    """
    tokenizer, half = (
        build(cfg.tokenizer, "tokenizer"),
        cfg.data.get("val_half"),
    )  # which an imported model's text lacks
    if half not in (None, *HALVES):
        raise ConfigError(f"data.val_half={half}: unknown; choose {' or '.join(HALVES)}, or null for all documents")
    if is_probe(cfg):
        return open_probe(cfg, tokenizer).validated_on(half)
    if isinstance(tokenizer, Symbols):
        raise ConfigError("tokenizer=symbols: is for probes, and this data is text; choose bpe, byte, char or hf")
    dataset = open_text(cfg, tokenizer, display, revisions or {})
    if cfg.data.get("document_mask") and dataset.index.train.documents < 2:
        raise ConfigError(
            "data.document_mask=true: the training text is one document; leave it out, or cut plain text finer with a "
            "lower data.document_chars"
        )
    return dataset.validated_on(half)


def open_text(
    cfg: DictConfig, tokenizer: TokenizerFactory, display: "Display | None", revisions: Mapping[str, str]
) -> TokenDataset:
    """`open_dataset` of text."""
    progress = display.prepare if display else lambda *_: None
    print_line = display.print_line if display else lambda _: None
    if "mix" in cfg.data:
        shares = exact_shares(cfg.data.mix)
        parts = {
            name: Part(_source(part, f"data.sources.{name}", revisions, cfg), part.val_fraction, shares[name])
            for name, part in cfg.data.sources.items()
        }
        return open_mixture(parts, tokenizer, cfg.data.cache_dir, progress, cfg.data.val_tokens, print_line)
    source = _source(cfg.data, "data", revisions, cfg)
    dataset = TokenDataset.open_or_build(
        source, tokenizer, cfg.data.val_fraction, cfg.data.cache_dir, progress, cfg.data.val_tokens
    )
    if dataset.times:
        print_line(dataset.describe_build())
    return dataset


def open_probe(cfg: DictConfig, tokenizer: object) -> ProbeDataset:
    """The probe that `cfg` describes. Raises ConfigError for settings that only text has."""
    if not isinstance(tokenizer, Symbols):
        raise ConfigError("tokenizer: a probe's symbols are its tokens; leave tokenizer= out")
    if cfg.train.prompt:
        raise ConfigError(
            f"train.prompt={cfg.train.prompt}: the sample of a probe is a validation sequence with the model's "
            f"answers; leave it out"
        )
    return ProbeDataset(build(cfg.data.probe, "data"), cfg.model.max_seq_len, cfg.data.val_sequences)


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
