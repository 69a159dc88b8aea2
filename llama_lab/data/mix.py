"""Mixtures: windows of several corpora in exact shares, ordered by seed and step alone.

Their parts are options of the group `data`, composed as Hydra composes the option of a run.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from itertools import accumulate, pairwise
from math import ceil, floor, lcm
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from llama_lab.config.composing import options_of, with_options
from llama_lab.config.schema import check_kinds, flat_defaults, is_kind
from llama_lab.util.errors import ConfigError, first_line, require_positive, suggestion
from llama_lab.util.formatting import conjoin

from .build import HoldOut, survey_source
from .dataset import EMPTY, Ids, Index, Tokens, Validation
from .folders import FORMAT_VERSION, check_seal, json_hash, open_or_build, seal
from .source import ReportProgress, Source
from .tokenizer import TOKENIZER_NAME, TextTokenizer, TokenizerFactory, identity
from .tokens import UNDIVIDED, TextDataset, TokenDataset
from .windows import ValWindows, Windows

Order = npt.NDArray[np.intp]
"""The part of each window of a period: `(windows,)`."""


def balanced_order(shares: list[Fraction]) -> Order:
    """The part of each window of one period, in which every part has its exact share.

    At every prefix of n windows, part i has had fewer than one window more or less than `shares[i] * n` (Tijdeman 1980,
    The chairman assignment problem: the discrepancy is at most 1 - 1 / (2P - 2) for P parts). shares: they add up to 1.
    """
    period = lcm(*(share.denominator for share in shares))
    weights = [int(share * period) for share in shares]
    slack = max(2 * len(shares) - 2, 1)
    due = [0] * len(shares)  # windows that each part is behind, times the period
    order = np.empty(period, dtype=np.intp)
    for n in range(period):
        due = [behind + weight for behind, weight in zip(due, weights, strict=True)]
        ready = [i for i, behind in enumerate(due) if slack * behind >= period]
        order[n] = chosen = min(ready, key=lambda i: Fraction(period * (slack - 1) - slack * due[i], weights[i]))
        due[chosen] -= period
    return order


class MixedWindows(Windows):
    """Training sequences of several parts in exact shares; each part is read as it would be alone.

    A part that runs out is read again, in another order, as `TrainWindows` does.
    """

    def __init__(self, parts: list[Windows], shares: list[Fraction]):
        self._parts = parts
        self._order = balanced_order(shares)
        # How many windows each part has had at the end of each place of a period: `(period, parts)`.
        self._had = np.cumsum(self._order[:, None] == np.arange(len(parts)), axis=0)

    def take(self, sequences: list[int]) -> Ids:
        """Return these sequences of the endless series: `(sequences, seq_len + 1)`."""
        periods, places = np.divmod(sequences, len(self._order))
        chosen = self._order[places]
        own = periods * self._had[-1, chosen] + self._had[places, chosen] - 1
        windows = [self._parts[part].take([i]) for part, i in zip(chosen.tolist(), own.tolist(), strict=True)]
        return np.concatenate(windows)


class MixedDataset(TextDataset):
    """Token folders of several `parts`, by name, of the same tokenizer, and the share of the training tokens of each.

    `val` is the parts' validation texts one after the other.
    """

    def __init__(self, parts: Mapping[str, TokenDataset], shares: Mapping[str, Fraction], builds: Sequence[str] = ()):
        self.parts, self.shares, self.builds = dict(parts), dict(shares), builds
        self._first = first = next(iter(parts.values()))
        self.half = first.half
        indices = {name: part.index for name, part in parts.items()}
        self.index = Index(
            vocab_size=first.index.vocab_size,
            data_hash=json_hash([[str(shares[name]), index.data_hash] for name, index in indices.items()], 16),
            tokenizer_hash=first.index.tokenizer_hash,
            train=sum((index.train for index in indices.values()), EMPTY),
            val=sum((index.val for index in indices.values()), EMPTY),
            revisions={path: commit for index in indices.values() for path, commit in index.revisions.items()},
        )

    @cached_property
    def tokenizer(self) -> TextTokenizer:
        """The tokenizer of all parts."""
        return self._first.tokenizer

    def validated_on(self, half: str | None) -> "MixedDataset":
        """The same with this half of each part's validation documents."""
        return MixedDataset({n: part.validated_on(half) for n, part in self.parts.items()}, self.shares, self.builds)

    @cached_property
    def val(self) -> Tokens:
        """The parts' validation tokens one after the other, `(index.val.tokens + 1,)`; an end-of-text between two."""
        first, *others = (part.val for part in self.parts.values())
        return np.concatenate([first, *(stream[1:] for stream in others)])

    @property
    def val_documents(self) -> Ids:
        """The number of the held-out document of each token of `val` but the first, counted over all parts."""
        parts = [part.val_documents for part in self.parts.values()]
        firsts = np.cumsum([0, *(part.max() + 1 for part in parts[:-1])])
        return np.concatenate([part + first for part, first in zip(parts, firsts, strict=True)])

    def train_windows(self, seq_len: int, seed: int) -> MixedWindows:
        """The windows of all parts."""
        return MixedWindows([p.train_windows(seq_len, seed) for p in self.parts.values()], [*self.shares.values()])

    def val_parts(self, length: int) -> dict[str, Validation]:
        """The windows of `val` for each part; one in which two parts meet is in both, with the targets of each."""
        ends = [*accumulate((part.index.val.tokens for part in self.parts.values()), initial=0)]
        spans = pairwise(ends)
        return {name: ValWindows(self.val, length, range(*span)) for name, span in zip(self.parts, spans, strict=True)}

    def epochs(self, seq_len: int, sequences: int) -> dict[str, float]:
        """How often each part is read in so many training sequences."""
        return {n: float(self.shares[n]) * part.epochs(seq_len, sequences)[""] for n, part in self.parts.items()}

    def require_windows(self, seq_len: int, batch_size: int) -> None:
        """Raise ConfigError unless every part has windows for its share of a batch, and validation has one."""
        for name, part in self.parts.items():
            try:
                part.require_train_windows(seq_len, ceil(self.shares[name] * batch_size))
            except ConfigError as error:
                raise ConfigError(f"data.mix.{name}: {error}") from None
            if not part.index.val.tokens:
                problem = f"has no validation text in the {self.half} half of its documents"
                raise ConfigError(f"data.mix.{name}: {problem}; raise data.val_tokens, add text{UNDIVIDED}")
        self.require_val_window(seq_len)

    def val_bound(self, seq_len: int) -> tuple[str, str]:
        """The window, since the validation texts have the shares of the mixture, and which of them bound the others."""
        whole = [name for name, part in self.parts.items() if not part.index.unread]
        remedy = f"add text to {conjoin(whole)}" if whole else "raise data.val_tokens"
        return f"model.max_seq_len={seq_len}", remedy


@dataclass(frozen=True)
class Part:
    """A part's documents, what of them is held out, without a bound on its tokens, and its share of the tokens."""

    source: Source
    hold_out: HoldOut
    share: Fraction


def open_mixture(
    parts: Mapping[str, Part],
    tokenizer: TokenizerFactory,
    cache_dir: str | Path,
    progress: ReportProgress,
    val_tokens: int | None,
) -> MixedDataset:
    """Open the token folders of all parts below `cache_dir`, building those that are not there.

    `val_tokens` is divided by share; a part with too little held-out text reduces all. A tokenizer to
    train learns from the parts in their shares. Raises ConfigError as `TokenDataset.open_or_build` does.
    """
    require_positive("data.val_tokens", val_tokens)
    if tokenizer.vocabulary_from != "nothing":
        tokenizer = _shared_tokenizer(parts, tokenizer, Path(cache_dir).expanduser(), progress)

    def opened(part: Part, total: Fraction | None) -> TokenDataset:
        bound = None if total is None else max(1, floor(total * part.share))
        hold_out = replace(part.hold_out, tokens=bound)
        return TokenDataset.open_or_build(part.source, tokenizer, hold_out, cache_dir, progress)

    asked = None if val_tokens is None else Fraction(val_tokens)
    datasets = {name: opened(part, asked) for name, part in parts.items()}
    builds = [f"{name}: {line}" for name, dataset in datasets.items() for line in dataset.builds]
    # Fractions, since a part that rounding puts above its own share would lose a document.
    whole = [Fraction(d.index.val.tokens) / parts[n].share for n, d in datasets.items() if not d.index.unread]
    total = min([*whole, *([] if asked is None else [asked])])
    for name, part in parts.items():
        if datasets[name].index.val.tokens > total * part.share:
            datasets[name] = opened(part, total)
    return MixedDataset(datasets, {name: part.share for name, part in parts.items()}, builds)


def _shared_tokenizer(
    parts: Mapping[str, Part], factory: TokenizerFactory, cache: Path, progress: ReportProgress
) -> TextTokenizer:
    """The tokenizer of all parts, trained once and kept in `cache`."""
    described = [[part.source.fingerprint(), part.hold_out.fraction, str(part.share)] for part in parts.values()]
    folder = cache / f"tokenizer-{json_hash([FORMAT_VERSION, *identity(factory), described])}"

    def texts() -> Iterator[str]:
        for part in parts.values():
            survey = survey_source(part.source, part.hold_out.fraction, progress)
            yield from survey.texts(survey.sample(factory, part.share))

    def build(empty: Path) -> None:
        factory.train(texts()).save(empty / TOKENIZER_NAME)
        seal(empty)

    open_or_build(folder, lambda: check_seal(folder), build)
    return TextTokenizer.load(folder / TOKENIZER_NAME)


LARGEST_DENOMINATOR = 10_000  # of a share: four decimals, or a simple fraction such as 1/3
LONGEST_PERIOD = 100_000  # windows after which the order of the parts repeats
OF_THE_MIX = ("seed", "cache_dir", "val_tokens", "document_mask")


def mixture_parts(mix: Any, parts: Any) -> DictConfig | None:
    """The config of each part of `data.mix`, with the settings in `data.parts`; None without a mixture.

    Raises ConfigError for shares that do not add up to 1, and parts or settings that do not exist.
    """
    if mix is None:
        return None
    shares = exact_shares(mix)
    settings: Any = {} if parts is None else OmegaConf.to_container(parts, resolve=True)
    if not isinstance(settings, dict) or not all(isinstance(own, dict) for own in settings.values()):
        raise ConfigError(f"data.parts={settings}: must be settings by part, such as {{mine: {{files: [a.txt]}}}}")
    if unknown := [str(name) for name in settings if name not in shares]:
        choose = f"give it a share, or choose of {', '.join(shares)}"
        raise ConfigError(f"data.parts.{unknown[0]}: is no part of data.mix; {choose}")
    own = {name: json.dumps(settings.get(name, {})) for name in shares}
    return OmegaConf.create({name: _part(name, own[name]) for name in shares})


def exact_shares(mix: Any) -> dict[str, Fraction]:
    """The shares in `data.mix` as fractions. Raises ConfigError unless they are positive and add up to 1."""
    if not isinstance(mix, Mapping):
        given = "null" if mix is None else mix
        raise ConfigError(f"data.mix={given}: must be shares by name, such as {{stdlib: 0.7, shakespeare: 0.3}}")
    typed = f"data.mix={{{', '.join(f'{name}: {share}' for name, share in mix.items())}}}"
    shares = {}
    for name, share in mix.items():
        if not is_kind(share, float) or not 0 < share <= 1:
            raise ConfigError(f"data.mix.{name}={share}: a share is above 0 and at most 1; leave other parts out")
        shares[str(name)] = fraction = Fraction(share).limit_denominator(LARGEST_DENOMINATOR)
        if fraction == 0:
            raise ConfigError(f"data.mix.{name}={share}: is 0 once rounded to four decimals; raise it, or leave it out")
    total = sum(mix.values())
    if sum(shares.values()) != 1:
        rounded = "" if abs(total - 1) > 1e-6 else " once rounded to four decimals"
        raise ConfigError(f"{typed}: the shares add up to {total:.6g} rather than 1{rounded}; correct them")
    if (period := lcm(*(share.denominator for share in shares.values()))) > LONGEST_PERIOD:
        raise ConfigError(f"{typed}: repeats only after {period:,} windows; use at most four decimals")
    return shares


def _part(name: str, settings: str) -> dict[str, Any]:
    """The resolved config of a part with settings of its own, which JSON holds."""
    own = json.loads(settings)
    option = str(own.pop("data", name))
    known = [one for one in options_of("data") if one != "mix"]
    if option not in known:
        raise ConfigError(
            f"data.mix.{name}: {option} is no data that can be mixed{suggestion(option, known)}; choose of "
            f"{', '.join(known)}, or name one of them, data.parts={{{name}: {{data: text, files: [a.txt]}}}}"
        )
    cfg = with_options({"data": option})
    if "source" not in cfg.data:
        kind = "a probe" if "probe" in cfg.data else "of pairs"
        raise ConfigError(f"data.mix.{name}: {option} is {kind}, and only text can be mixed; leave it out")
    possible = [str(setting) for setting in cfg.data if setting not in (*OF_THE_MIX, "source")]
    for setting, value in own.items():
        if setting not in possible:
            where = "belongs to the whole mixture" if setting in OF_THE_MIX else f"is no setting of data={option}"
            raise ConfigError(f"data.parts.{name}.{setting}={value}: {where}; choose of {', '.join(possible)}")
    if missing := [one for one in possible if OmegaConf.is_missing(cfg.data, one) and own.get(one, "???") == "???"]:
        example = f"data.parts={{{name}: {{{missing[0]}: ...}}}}"
        raise ConfigError(f"data.parts.{name}.{missing[0]}=???: needs a value; set it, {example}")
    try:
        merged: Any = OmegaConf.merge(cfg, {"data": own})
        check_kinds(merged, flat_defaults(cfg))
        composed: Any = OmegaConf.to_container(merged.data, resolve=True)
    except (ConfigError, OmegaConfBaseException) as error:
        raise ConfigError(f"data.parts.{name}: {first_line(error)}") from None
    return {setting: value for setting, value in composed.items() if setting not in OF_THE_MIX}
