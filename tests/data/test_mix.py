"""Mixtures: exact shares at every prefix, the same windows on any number of devices, validation of each part."""

import math
import random
from collections import Counter
from collections.abc import Iterable
from fractions import Fraction
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from llama_lab.api import load_config
from llama_lab.data.build import HoldOut
from llama_lab.data.data_module import open_data_module
from llama_lab.data.dataset import HALVES
from llama_lab.data.mix import MixedDataset, MixedWindows, Part, balanced_order, exact_shares, open_mixture
from llama_lab.data.open import open_dataset
from llama_lab.data.source import TextFiles
from llama_lab.data.tokenizer import BPETokenizer, ByteTokenizer, CharTokenizer
from llama_lab.data.windows import TrainWindows, ValWindows
from llama_lab.evaluation.evaluate import evaluate
from llama_lab.evaluation.load import load_run
from llama_lab.runs.metrics import read_metrics
from llama_lab.runs.stored import Summary
from llama_lab.util.errors import ConfigError
from tests.composing import eval_settings
from tests.conftest import Command
from tests.data.texts import batch_of
from tests.refusals import refusing
from tests.training.tiny import planned, trained

ALPHABETS = ("abcdefgh", "ijklmnop", "qrstuvwx")


def write_corpora(folder: Path) -> list[Path]:
    """Corpora that share no letter, so that a token tells where it is from."""
    files = [folder / f"{i}.txt" for i in range(3)]
    for i, (file, alphabet, size) in enumerate(zip(files, ALPHABETS, (400, 250, 60), strict=True)):
        draw = random.Random(i)
        if not file.exists():
            file.write_text("".join(draw.choice(alphabet) for _ in range(40 * size)), encoding="ascii")
    return files


def origin(tokens: np.ndarray) -> list[int]:
    """The corpus of every token of a tokenizer of bytes; those that end a document are left out."""
    names = {ord(letter): i for i, alphabet in enumerate(ALPHABETS) for letter in alphabet}
    return [names[token] for token in tokens.flatten().tolist() if token in names]


def mixture(folder: Path, shares: tuple[str, ...] = ("0.5", "0.3", "0.2"), **settings: object) -> MixedDataset:
    files = write_corpora(folder)
    parts = {
        f"part{i}": Part(TextFiles([str(file)], document_chars=200), HoldOut(0.2), Fraction(share))
        for i, (file, share) in enumerate(zip(files, shares, strict=False))
    }
    options = {"tokenizer": ByteTokenizer(), "val_tokens": 2000, **settings}
    return open_mixture(parts, cache_dir=folder / "cache", progress=lambda *_: None, **options)  # type: ignore[arg-type]


@st.composite
def shares(draw: st.DrawFn) -> list[Fraction]:
    weights = draw(st.lists(st.integers(1, 60), min_size=1, max_size=6))
    return [Fraction(weight, sum(weights)) for weight in weights]


@given(shares())
@example([Fraction(7, 10), Fraction(3, 10)])
@example([Fraction(1, 3)] * 3)
@example([Fraction(9997, 10000), *[Fraction(1, 10000)] * 3])
def test_every_prefix_has_each_part_within_one_window_of_its_share_and_a_period_exactly(
    parts: list[Fraction],
) -> None:
    order = balanced_order(parts)
    counts = (order[:, None] == np.arange(len(parts))).cumsum(axis=0)
    due = np.arange(1, len(order) + 1)[:, None] * np.array([float(share) for share in parts])
    assert np.abs(counts - due).max() < 1
    assert [Fraction(int(count), len(order)) for count in counts[-1]] == parts


@given(shares(), st.integers(0, 500), st.integers(1, 40), st.data())
def test_mixed_windows_are_each_part_s_own_in_turn_whatever_is_asked_first(
    parts: list[Fraction], step: int, batch_size: int, data: st.DataObject
) -> None:
    assume(len(parts) > 1)
    streams = [np.arange(i * 1000, i * 1000 + 50 + 7 * i, dtype=np.uint16) for i in range(len(parts))]
    alone = [TrainWindows(stream, 5, seed=3) for stream in streams]
    mixed = MixedWindows([TrainWindows(stream, 5, seed=3) for stream in streams], parts)
    batch = batch_of(mixed, step, batch_size)
    first = data.draw(st.integers(0, batch_size - 1))
    assert (batch_of(mixed, step, batch_size, range(first, batch_size)) == batch[first:]).all()
    order = balanced_order(parts)
    had = Counter(order[i % len(order)] for i in range(step * batch_size))
    for i, window in enumerate(batch):
        part = order[(step * batch_size + i) % len(order)]
        (own,) = alone[part].take([had[part]])
        assert (window == own).all()
        had[part] += 1


def test_a_part_that_runs_out_is_read_again_and_its_epochs_are_counted(tmp_path: Path) -> None:
    data = mixture(tmp_path)
    windows = data.train_windows(16, 0)
    own = [len(part.train_windows(16, 0)) for part in data.parts.values()]  # type: ignore[arg-type]
    sequences = 20 * own[2]
    seen = Counter(window.tobytes() for window in batch_of(windows, 0, sequences) if origin(window)[0] == 2)
    epochs = data.epochs(16, sequences)
    assert epochs["part2"] == pytest.approx(4)
    assert epochs["part0"] == pytest.approx(sequences * 0.5 / own[0])
    assert len(seen) > own[2], "each epoch begins somewhere else"
    assert sum(seen.values()) == 4 * own[2]


def predicted(windows: Iterable[tuple[np.ndarray, np.ndarray]]) -> list[int]:
    return [token for _, targets in windows for token in targets.tolist() if token >= 0]


def test_validation_has_the_shares_and_every_token_once_in_all_and_in_its_part(tmp_path: Path) -> None:
    data = mixture(tmp_path)
    counts = Counter(origin(data.val))
    for i, (name, share) in enumerate(data.shares.items()):
        assert counts[i] == data.parts[name].index.val.bytes
        assert 2000 * share - 250 < data.parts[name].index.val.tokens <= 2000 * share
    of_parts = [predicted(windows[i] for i in range(len(windows))) for windows in data.val_parts(32).values()]
    assert of_parts == [part.val[1:].tolist() for part in data.parts.values()]
    assert [*chain(*of_parts)] == predicted(ValWindows(data.val, 32)) == data.val[1:].tolist()


def test_a_part_that_bounds_the_others_keeps_all_its_held_out_text_whatever_its_share(tmp_path: Path) -> None:
    data = mixture(tmp_path, ("0.4", "0.274", "0.326"), val_tokens=None)
    part = data.parts["part2"]
    tokens, share = part.index.val.tokens, 0.326
    assert tokens / share * share < tokens, "floats round down"
    assert part.index.unread == 0


@pytest.mark.parametrize(("val_tokens", "remedy"), [(None, "add text to part2"), (600, "raise data.val_tokens")])
def test_too_little_held_out_text_names_what_bounds_it(val_tokens: int | None, remedy: str, tmp_path: Path) -> None:
    data = mixture(tmp_path, val_tokens=val_tokens)
    longest = data.index.val.tokens
    data.require_val_window(longest)
    with pytest.raises(ConfigError, match=rf"^model\.max_seq_len={longest + 1}: .*; {remedy} or lower"):
        data.require_val_window(longest + 1)


@pytest.mark.parametrize("factory", [CharTokenizer(), BPETokenizer(300, sample_bytes=4000)])
def test_a_tokenizer_learns_from_all_parts_once(
    factory: CharTokenizer | BPETokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = mixture(tmp_path, tokenizer=factory)
    everything = "".join(ALPHABETS)
    assert data.tokenizer.decode(data.tokenizer.encode(everything)) == everything
    assert len({part.index.tokenizer_hash for part in data.parts.values()}) == 1
    if isinstance(factory, BPETokenizer):  # merges of every part
        assert all(len(data.tokenizer.encode(alphabet * 20)) < 160 for alphabet in ALPHABETS)
    monkeypatch.setattr(type(factory), "train", lambda *_: pytest.fail("trained again"))
    assert mixture(tmp_path, tokenizer=factory).index == data.index


def test_each_part_of_a_mixture_is_divided_and_one_without_a_document_in_a_half_is_refused(tmp_path: Path) -> None:
    whole, little = mixture(tmp_path), mixture(tmp_path, val_tokens=1)  # one document of each part
    halves = [whole.validated_on(half) for half in HALVES]
    for name, part in whole.parts.items():
        assert sum(half.parts[name].index.val.tokens for half in halves) == part.index.val.tokens
    assert [len(half.val) - 1 for half in halves] == [half.index.val.tokens for half in halves]
    others = (*halves, mixture(tmp_path, ("0.5", "0.2", "0.3")))
    assert len({one.index.data_hash for one in (whole, *others)}) == 4, "it follows the halves and the shares"
    for half in HALVES:
        data = little.validated_on(half)
        lacking = next(name for name, part in data.parts.items() if not part.index.val.tokens)
        with pytest.raises(ConfigError, match=rf"^data\.mix\.{lacking}: has no validation text in the {half} half"):
            data.require_windows(1, 1)


# From the command line


@pytest.fixture
def mixed(tmp_path: Path) -> list[str]:
    """The overrides of a run on a mixture of two corpora, each of them one of `data=text`."""
    a, b, _ = write_corpora(tmp_path)
    cut = "document_chars: 200, val_fraction: 0.2"
    return [
        "data=mix",
        "data.mix={wide: 0.75, text: 0.25}",
        f"data.parts={{wide: {{data: text, files: ['{a}'], {cut}}}, text: {{files: ['{b}'], {cut}}}}}",
        f"data.cache_dir={tmp_path / 'cache'}",
        "size=pico",
        "tokenizer=byte",
        "train.batch_size=8",
        "train.sample_tokens=10",
        "logger=none",
    ]


@pytest.mark.slow
def test_a_run_on_a_mixture_logs_each_part_and_is_evaluated_from_its_folder(mixed: list[str], command: Command) -> None:
    ran = command(*mixed, "train.tokens=40000", "train.evaluations=2", "train.eval_lengths=[1]")
    assert ran.code == 0, ran.err
    last = read_metrics(ran.run / "metrics.csv")[-1]
    summary = Summary.load(ran.run)
    assert summary.epochs.keys() == {"wide", "text"}
    run = load_run(ran.run)
    data = run.open_dataset()
    assert isinstance(data, MixedDataset)
    tokens = [part.index.val.tokens for part in data.parts.values()]
    losses = [last["val/loss/wide"], last["val/loss/text"]]
    assert last["val/loss"] == pytest.approx(np.average(losses, weights=tokens), rel=1e-6)
    assert last["val/bits_per_byte"] == pytest.approx(last["val/loss"] / math.log(2) / data.bytes_per_token)


SPAN = ("objective=span", "family=encoder_decoder")


@pytest.mark.slow
def test_an_evaluation_divides_the_parts_as_validation_does(mixed: list[str], tmp_path: Path) -> None:
    path = trained(*mixed, *SPAN, "train.tokens=2560", f"runs_dir={tmp_path}")
    found = evaluate(path, eval_settings("eval.parts=[loss]"))
    assert "val/bits_per_byte" not in found.metrics
    assert found.metrics["val/loss"] == pytest.approx(Summary.load(path).metrics["val/loss"], rel=1e-6)


def test_a_mixture_without_a_window_that_has_targets_is_refused(mixed: list[str], tmp_path: Path) -> None:
    short = [one.replace("200", "20") for one in mixed]
    cfg = planned(*short, *SPAN, "data.val_tokens=48", f"runs_dir={tmp_path}").cfg
    with pytest.raises(ConfigError, match=r"^data\.val_tokens: no validation window of .*=32 is of one part"):
        open_data_module(cfg, open_dataset(cfg))


@pytest.mark.parametrize(
    ("mix", "parts", "key"),
    [
        ("{stdlib: 0.7, text: 0.2}", "", "data.mix={stdlib: 0.7, text: 0.2}"),
        ("{stdlib: 1.2, text: -0.2}", "", "data.mix.stdlib=1.2"),
        ("{stdlib: 1, text: 0}", "", "data.mix.text=0"),
        ("{stdlib: 0.999999, text: 1e-6}", "", "data.mix.text=1e-06"),
        ("{stdlib: 0.5, copy: 0.5}", "", "data.mix.copy"),
        ("{stdlib: 0.5, pairs: 0.5}", "", "data.mix.pairs"),
        ("{stdlib: 0.7, shakespear: 0.3}", "", "data.mix.shakespear"),
        ("{stdlib: 0.7, mix: 0.3}", "", "data.mix.mix"),
        ("{stdlib: 0.7, text: 0.3}", "", "data.parts.text.files=???"),
        ("[stdlib]", "", "data.mix=['stdlib']"),
        ("{stdlib: 1}", "{text: {files: [a]}}", "data.parts.text"),
        ("{stdlib: 1}", "{stdlib: {file: [a]}}", "data.parts.stdlib.file=['a']"),
        ("{stdlib: 1}", "{stdlib: {val_fraction: no}}", "data.parts.stdlib: data.val_fraction=no"),
        ("{stdlib: 1}", "{stdlib: {seed: 1}}", "data.parts.stdlib.seed=1"),
    ],
)
def test_a_mixture_that_cannot_be_is_refused_by_name(mix: str, parts: str, key: str) -> None:
    with refusing(key):
        load_config(["data=mix", f"data.mix={mix}", *([f"data.parts={parts}"] if parts else [])])


def test_a_mixture_without_shares_is_refused() -> None:
    with refusing("data.mix=null"):
        exact_shares(None)


def test_thirds_are_shares() -> None:
    assert [*exact_shares(dict.fromkeys("abc", 1 / 3)).values()] == [Fraction(1, 3)] * 3
