"""Opening the dataset that a config describes: a token folder, of text or pairs, those of a mixture, or a probe."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from llama_lab.config.components import build
from llama_lab.util.errors import ConfigError

from .build import HoldOut
from .dataset import HALVES, Dataset
from .mix import Part, exact_shares, open_mixture
from .objectives import kind_of
from .pairs import PairDataset
from .source import Source
from .tokenizer import TokenizerFactory
from .tokens import TextDataset, TokenDataset

if TYPE_CHECKING:
    from llama_lab.util.display import Display


def is_probe(cfg: DictConfig) -> bool:
    """Whether a config's data is a synthetic probe."""
    return "probe" in cfg.data


def has_answers(cfg: DictConfig) -> bool:
    """Whether of a config's data only answers are predicted: those of a probe, or the targets of pairs."""
    return is_probe(cfg) or "pair_files" in cfg.data


def open_dataset(
    cfg: DictConfig, display: "Display | None" = None, revisions: Mapping[str, str] | None = None
) -> Dataset:
    """Open the dataset that `cfg` describes. If a token folder must be built, show the progress on `display`.

    revisions: commits that a run has recorded; they are used where the config names none. Raises ConfigError as
    `TokenDataset.open_or_build` and `open_probe` do, and for a tokenizer that does not fit.
    """
    half = cfg.data.get("val_half")  # which an imported model's text lacks
    if half not in (None, *HALVES):
        raise ConfigError(f"data.val_half={half}: unknown; choose {' or '.join(HALVES)}, or null for all documents")
    tokenizer = build(cfg.tokenizer, "tokenizer")
    if is_probe(cfg):
        return read_by(cfg, open_probe(cfg, tokenizer))
    if tokenizer.vocabulary_from == "probe":
        raise ConfigError("tokenizer=symbols: is for probes, and this data is text; choose bpe, byte, char or hf")
    data, progress = cfg.data, display.prepare if display else lambda *_: None
    dataset: TextDataset
    if "mix" in data:
        shares = exact_shares(data.mix)
        parts = {
            name: Part(_source(part, f"data.sources.{name}", revisions, cfg), _hold_out(part, None), shares[name])
            for name, part in data.sources.items()
        }
        dataset = open_mixture(parts, tokenizer, data.cache_dir, progress, data.val_tokens)
    else:
        arguments = (tokenizer, _hold_out(data, data.val_tokens), data.cache_dir, progress)
        if "pair_files" in data:
            check_prompt(cfg, "pairs")
            dataset = PairDataset.open_or_build(build(data.pair_files, "data", _convert_="all"), *arguments)
        else:
            dataset = TokenDataset.open_or_build(_source(data, "data", revisions, cfg), *arguments)
    if display:
        for line in dataset.builds:
            display.print_line(line)
    if data.get("document_mask") and dataset.index.train.documents < 2:
        advice = "leave it out, or cut plain text finer with a lower data.document_chars"
        raise ConfigError(f"data.document_mask=true: the training text is one document; {advice}")
    read = read_by(cfg, dataset)
    if display and (gained := read.index.vocab_size - dataset.index.vocab_size):
        display.print_line(f"objective: the tokenizer's {dataset.index.vocab_size:,} ids, and {gained:,} of its own")
    return read


def read_by(cfg: DictConfig, dataset: Dataset) -> Dataset:
    """A dataset as the run that `cfg` describes reads it: with its half of validation, and its objective's tokens."""
    return dataset.validated_on(cfg.data.get("val_half")).with_tokens(kind_of(cfg).extra_tokens)


def open_probe(cfg: DictConfig, tokenizer: TokenizerFactory) -> Dataset:
    """The probe that `cfg` describes. Raises ConfigError for settings that only text has."""
    if tokenizer.vocabulary_from != "probe":
        raise ConfigError("tokenizer: a probe's symbols are its tokens; leave tokenizer= out")
    check_prompt(cfg, "a probe")
    dataset: Dataset = build(cfg.data.probe, "data").dataset(cfg.model.max_seq_len, cfg.data.val_sequences)
    return dataset


def check_prompt(cfg: DictConfig, kind: str) -> None:
    """Raise ConfigError for a prompt, if data of a kind has answers."""
    if cfg.train.prompt:
        problem = f"the sample of {kind} is a validation sequence with the model's answers"
        raise ConfigError(f"train.prompt={cfg.train.prompt}: {problem}; leave it out")


def _hold_out(data: DictConfig, tokens: int | None) -> HoldOut:
    """What the config of a corpus holds out; runs of version 0.4.0 know no near copies, cuts and blocks."""
    bounds = ("max_overlap", "val_document_chars", "val_block_chars")
    return HoldOut(data.val_fraction, tokens, *(data.get(key) for key in bounds))


def _source(data: DictConfig, key: str, revisions: Mapping[str, str] | None, cfg: DictConfig) -> Source:
    """The source of a corpus, at the commit that is recorded for it."""
    node: dict[str, Any] = {"_convert_": "all"}  # plain lists and mappings
    recorded = (revisions or {}).get(str(data.source.get("path")))
    if recorded and data.source.get("revision") is None:
        node["revision"] = recorded
    if "cache_dir" in data.source:
        node["cache_dir"] = cfg.data.cache_dir  # also of a part, and of a run that is evaluated elsewhere
    source: Source = build(data.source, f"{key}.source", **node)
    return source
