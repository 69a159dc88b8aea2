"""The token folder: split, deduplicated, built once, and never opened damaged."""

import hashlib
import itertools
import logging
import math
import multiprocessing
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from pydoc_data import topics
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from llama_lab.data import build as build_module
from llama_lab.data import folders
from llama_lab.data.build import HoldOut
from llama_lab.data.dataset import HALVES
from llama_lab.data.source import HandWrittenLibrary, TextFiles, cut
from llama_lab.data.tokenizer import BPETokenizer, ByteTokenizer, CharTokenizer, TextTokenizer, TokenizerFactory
from llama_lab.data.tokens import TokenDataset
from llama_lab.util.errors import ConfigError
from tests.data.texts import Documents, dataset, documents_of, sentences

TEXTS = sentences(200)
TOKENIZERS = [ByteTokenizer(), CharTokenizer(), BPETokenizer(vocab_size=300)]


# The split


@pytest.mark.parametrize("tokenizer", TOKENIZERS, ids=["byte", "char", "bpe"])
def test_both_splits_together_hold_every_document_once(tokenizer, tmp_path: Path) -> None:
    data = dataset(tmp_path, [*TEXTS, *TEXTS[:50]], tokenizer)
    train, val = documents_of(data, "train"), documents_of(data, "val")
    assert Counter(train + val) == Counter(TEXTS)
    assert train == sorted(train, key=TEXTS.index), "in order"
    index = data.index
    assert (index.duplicates, index.train.documents, index.val.documents) == (50, len(train), len(val))
    assert index.val.bytes == sum(len(text.encode()) for text in val)
    assert index.val.tokens == sum(len(data.tokenizer.encode(text)) + 1 for text in val) == len(data.val) - 1
    assert index.train.tokens == len(data.train) - 1
    assert (index.vocab_size, index.tokenizer_hash) == (data.tokenizer.vocab_size, data.tokenizer.hash)


def test_the_split_of_a_document_does_not_depend_on_the_others(tmp_path: Path) -> None:
    texts = sentences(1000)
    few, many, other = (dataset(tmp_path, some) for some in (texts[:100], texts, random.Random(1).sample(texts, 1000)))
    held_out = set(documents_of(many, "val"))
    assert set(documents_of(few, "val")) == held_out & set(texts[:100])
    assert set(documents_of(other, "val")) == held_out
    assert many.index.data_hash != other.index.data_hash  # the order of training text is part of the data
    larger = documents_of(dataset(tmp_path, texts, val_fraction=0.3), "val")
    assert (len(held_out) / 1000, len(larger) / 1000) == pytest.approx((0.2, 0.3), abs=0.05)
    assert held_out < set(larger)


@settings(max_examples=25)
@given(texts=st.lists(st.text(), min_size=2, max_size=12), val_fraction=st.sampled_from([1e-9, 0.2, 1 - 1e-9]))
def test_any_documents_survive_the_folder_and_two_suffice(
    texts: list[str], val_fraction: float, tmp_path_factory: pytest.TempPathFactory
) -> None:
    distinct = set(texts) - {""}
    assume(len(distinct) >= 2)
    data = dataset(tmp_path_factory.mktemp("any"), texts, val_fraction=val_fraction)
    train, val = documents_of(data, "train"), documents_of(data, "val")
    assert Counter(train + val) == Counter(distinct)
    assert train
    assert val
    assert data.index.empty == texts.count("")


# The bounds


def by_hash(texts: list[str], start: int = 0) -> list[str]:
    """Texts in the order of their hashes, or of what follows the first ``start`` bytes of these."""
    return sorted(texts, key=lambda text: hashlib.blake2b(text.encode(), digest_size=16).digest()[start:])


def held_out_within(whole: TokenDataset, bound: int) -> tuple[list[str], int]:
    """As many held-out texts, by hash, as have ``bound`` tokens together, at least one; and their tokens."""
    held_out = by_hash(documents_of(whole, "val"))
    totals = [*itertools.accumulate(len(whole.tokenizer.encode(text)) + 1 for text in held_out)]
    fitting = max(1, sum(total <= bound for total in totals))
    return held_out[:fitting], totals[fitting - 1]


@pytest.mark.parametrize(("val_tokens", "tokenizer"), zip((1, 1000, 2500), TOKENIZERS, strict=True))
def test_bounded_validation_is_a_prefix_by_hash(val_tokens: int, tokenizer: TokenizerFactory, tmp_path: Path) -> None:
    whole = dataset(tmp_path, TEXTS, tokenizer)
    bounded = dataset(tmp_path, TEXTS, tokenizer, val_tokens=val_tokens)
    expected, tokens = held_out_within(whole, val_tokens)
    val = documents_of(bounded, "val")
    assert val == sorted(expected, key=TEXTS.index)
    assert np.array_equal(bounded.train[:], whole.train[:])
    assert bounded.index.tokenizer_hash == whole.index.tokenizer_hash
    assert bounded.index.data_hash != whole.index.data_hash
    counts = bounded.index.val
    assert counts.tokens == tokens == len(bounded.val) - 1
    assert counts.bytes == sum(len(text.encode()) for text in val)
    assert counts.documents + bounded.index.unread == whole.index.val.documents


def test_long_tokens_do_not_shorten_bounded_validation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_module, "_BYTES_PER_TOKEN", 1)
    texts = [f"{i} {'abcdefgh' * 50}" for i in range(100)]  # some 40 bytes per token
    bpe = BPETokenizer(vocab_size=300)
    whole, bounded = dataset(tmp_path, texts, bpe), dataset(tmp_path, texts, bpe, val_tokens=200)
    assert whole.bytes_per_token > 16
    assert set(documents_of(bounded, "val")) == set(held_out_within(whole, 200)[0])


def test_little_more_than_the_bound_is_encoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[str] = []
    encode = TextTokenizer.encode_batch

    def spy(self: TextTokenizer, texts: list[str]) -> list[list[int]]:
        encoded.extend(texts)
        return encode(self, texts)

    monkeypatch.setattr(TextTokenizer, "encode_batch", spy)
    data = dataset(tmp_path, sentences(1000), val_fraction=0.5, val_tokens=1000)
    held_out = len(encoded) - data.index.train.documents
    assert data.index.val.documents <= held_out < 0.2 * data.index.unread


def test_a_bound_that_does_not_bind_changes_no_byte(tmp_path: Path) -> None:
    plain = dataset(tmp_path, TEXTS, BPETokenizer(300))
    train, val = plain.index.train.bytes, plain.index.val.tokens
    bounded = dataset(tmp_path / "other", TEXTS, BPETokenizer(300, sample_bytes=train), val_tokens=val)
    assert bounded.index == plain.index
    for name in plain.index.files:
        assert (bounded.folder / name).read_bytes() == (plain.folder / name).read_bytes()


def test_the_tokenizer_learns_from_as_much_training_text_as_it_is_bound_to_by_hash(tmp_path: Path) -> None:
    learnt: list[str] = []

    @dataclass(frozen=True)
    class Spy(BPETokenizer):
        def train(self, documents: Iterator[str]) -> TextTokenizer:
            learnt.extend(documents)
            return super().train(iter(learnt))

    train = documents_of(dataset(tmp_path, TEXTS), "train")
    dataset(tmp_path, TEXTS, Spy(vocab_size=300, sample_bytes=5000))
    order = by_hash(train, start=8)
    ends = itertools.accumulate(len(text.encode()) for text in order)
    expected = order[: 1 + sum(end < 5000 for end in ends)]
    assert learnt == sorted(expected, key=TEXTS.index)
    assert 5000 <= len("".join(learnt).encode()) < 5500


# What is recorded


def test_unigram_entropy_is_the_loss_of_the_best_constant_guess(tmp_path: Path) -> None:
    data = dataset(tmp_path, TEXTS)
    counts = Counter(data.val[1:].tolist())
    expected = -math.fsum(n * math.log(n / data.index.val.tokens) for n in counts.values()) / data.index.val.tokens
    assert data.unigram_entropy() == pytest.approx(expected, rel=1e-12)


def test_data_hash_names_the_content_wherever_it_is_from(tmp_path: Path) -> None:
    for i, text in enumerate(TEXTS):
        (tmp_path / f"{i:03}.txt").write_bytes(text.encode())
    files = TokenDataset.open_or_build(
        TextFiles(f"{tmp_path}/*.txt"), ByteTokenizer(), HoldOut(0.2), tmp_path / "cache"
    )
    assert files.index.data_hash == dataset(tmp_path, TEXTS).index.data_hash
    assert files.index.data_hash != dataset(tmp_path, TEXTS[1:]).index.data_hash


@pytest.mark.parametrize(("size", "dtype"), [(65536, np.uint16), (65537, np.uint32)])
def test_tokens_take_two_bytes_while_every_id_fits(
    size: int, dtype: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TextTokenizer, "vocab_size", size)
    data = dataset(tmp_path, TEXTS[:10])
    assert data.train[:].dtype == data.val.dtype == np.dtype(data.index.dtype) == dtype
    assert len(documents_of(data, "train")) == data.index.train.documents


def test_progress_ends_every_phase_at_its_total_and_a_built_folder_is_opened_without_reading(tmp_path: Path) -> None:
    progress = Mock()
    source = Documents([text * 1000 for text in TEXTS[:20]])
    built, opened = (
        TokenDataset.open_or_build(source, CharTokenizer(), HoldOut(0.2), tmp_path, progress) for _ in range(2)
    )
    assert source.passes == 3
    assert opened.index == built.index
    ends = {phase: done for done, _, phase in (call.args for call in progress.call_args_list)}
    assert [*ends] == PHASES
    assert {*ends.values()} == {source.total_bytes()}


def test_a_build_is_described_once_with_what_is_read_of_the_held_out_text(tmp_path: Path) -> None:
    built = dataset(tmp_path, TEXTS, BPETokenizer(300, sample_bytes=10_000), val_tokens=1000)
    held_out = built.index.val.documents + built.index.unread
    (line,) = built.builds
    assert f"({built.index.val.documents} of {held_out} held-out documents)" in line
    assert "tokenizer trained on 0.0 MB in " in line
    assert "trained" not in dataset(tmp_path, TEXTS, ByteTokenizer()).builds[0]
    assert not dataset(tmp_path, TEXTS, ByteTokenizer()).builds


# Opening again


def test_each_setting_has_its_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts, bpe = TEXTS[:40], [BPETokenizer(n, sample_bytes) for n, sample_bytes in ((300, None), (301, None), (301, 9))]
    choices = [{"tokenizer": tokenizer} for tokenizer in (CharTokenizer(), *bpe, replace(bpe[0], sample_bytes=8))]
    choices += [{"val_fraction": 0.3}, {"val_tokens": 100}, {"val_tokens": 101}, {}]
    folders = {dataset(tmp_path, texts, **one).folder for one in choices}
    assert len({*folders, dataset(tmp_path, texts[1:]).folder}) == len(choices) + 1
    monkeypatch.setenv("HOME", str(tmp_path))
    assert dataset(Path("~"), texts).folder in folders


def flip(file: Path, position: int) -> None:
    """Change one bit of the byte at a position."""
    stored = bytearray(file.read_bytes())
    stored[position] ^= 1
    file.write_bytes(stored)


DAMAGE: dict[str, Callable[[Path], object]] = {  # by what is told of it
    "train.bin has": lambda folder: os.truncate(folder / "train.bin", 1000),
    "val.bin was altered": lambda folder: flip(folder / "val.bin", 500),
    "index.json cannot be read": lambda folder: (folder / "index.json").unlink(),
}


@pytest.mark.parametrize("reason", DAMAGE)
def test_a_damaged_folder_is_reported_and_rebuilt(
    reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    built = dataset(tmp_path, TEXTS)
    expected = built.train[:].tolist(), built.val.tolist()
    DAMAGE[reason](built.folder)
    again = dataset(tmp_path, TEXTS)
    assert (again.train[:].tolist(), again.val.tolist()) == expected
    (record,) = caplog.records
    assert (record.levelno, reason in record.getMessage()) == (logging.WARNING, True)


@pytest.mark.parametrize("split", ["train", "val"])
def test_a_wrong_bit_in_the_middle_of_a_large_file_is_named_when_its_block_is_first_read_and_no_other(
    split: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "_READ_AT_ONCE", 0)
    monkeypatch.setattr(folders, "BLOCK", 100)
    folder = dataset(tmp_path, TEXTS).folder
    whole = np.fromfile(folder / f"{split}.bin", np.uint16)
    flip(folder / f"{split}.bin", 299)  # of two bytes each, the tokens from 100 to 149 are of its block
    data = dataset(tmp_path, TEXTS)
    assert data.folder == folder
    stream = folders.TokenStream(folder, f"{split}.bin", data.index)
    for part in (slice(0, 100), slice(150, None)):
        assert np.array_equal(stream[part], whole[part])
    for part in (slice(149, 150), slice(99, 101), slice(0, len(whole))):
        with pytest.raises(ConfigError, match=rf"{folder} is damaged, {split}.bin was altered; delete the folder"):
            stream[part]
    with pytest.raises(ConfigError, match=f"{split}.bin was altered"):
        data.val_windows(20) if split == "val" else data.train_windows(20, 1).take([*range(len(whole) // 20 - 1)])


def test_another_format_version_is_built_beside_and_never_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = dataset(tmp_path, TEXTS)
    monkeypatch.setattr("llama_lab.data.tokens.FORMAT_VERSION", folders.FORMAT_VERSION + 1)
    new = dataset(tmp_path, TEXTS)
    assert new.builds
    assert new.folder != old.folder


def test_what_a_dead_builder_left_is_removed(tmp_path: Path) -> None:
    folder = dataset(tmp_path / "elsewhere", TEXTS).folder
    unfinished = tmp_path / f"{folder.name}.building"
    unfinished.mkdir()
    (unfinished / "train.bin").write_bytes(b"half")
    data = dataset(tmp_path, TEXTS)
    assert data.folder.name == folder.name
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == {"elsewhere", folder.name}
    assert len(documents_of(data, "train")) == data.index.train.documents


PHASES = ["reading", "training tokenizer", "tokenising"]


@pytest.mark.process
@pytest.mark.parametrize("phase", PHASES[1:])
def test_ctrl_c_leaves_neither_a_folder_nor_a_process_in_either_phase(phase: str, tmp_path: Path) -> None:
    texts = tmp_path / "texts.txt"
    texts.write_text("\n".join(sentences(20_000)))  # 4 MB
    script = """
import sys, time
from llama_lab.data.build import HoldOut
from llama_lab.data.tokens import TokenDataset
from llama_lab.data.tokenizer import BPETokenizer
from llama_lab.data.source import HandWrittenLibrary, TextFiles, cut

def progress(done, total, phase):
    if phase == sys.argv[3] and done:
        print(phase, flush=True)
        time.sleep(2)

TokenDataset.open_or_build(TextFiles(sys.argv[1]), BPETokenizer(300), HoldOut(0.2), sys.argv[2], progress)
"""
    command = [sys.executable, "-c", script, str(texts), str(tmp_path / "cache"), phase]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout.readline() == f"{phase}\n"
        os.killpg(process.pid, signal.SIGINT)
        more, error = process.communicate(timeout=60)
    assert more == ""  # it read no further
    assert error.splitlines()[-1] == "KeyboardInterrupt"
    assert not [path for path in (tmp_path / "cache").iterdir() if path.suffix != ".lock"]
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)


class Logged(Documents):
    """A source that appends a line to a file for each pass over it, by whichever process."""

    def __init__(self, texts: list[str], log: Path):
        super().__init__(texts)
        self.log = log

    def documents(self) -> Iterator[str]:
        with self.log.open("a") as file:
            file.write(f"{os.getpid()}\n")
        yield from super().documents()


def _open_at_once(barrier, results, cache_dir: Path, log: Path) -> None:
    barrier.wait()
    data = TokenDataset.open_or_build(Logged(TEXTS * 30, log), ByteTokenizer(), HoldOut(0.2), cache_dir)
    results.put((data.index.data_hash, int(data.train[:].sum()), int(data.val.sum())))


@pytest.mark.process
def test_processes_that_race_build_once_and_open_the_same(tmp_path: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    barrier, results, log = spawn.Barrier(2), spawn.Queue(), tmp_path / "passes"
    processes = [spawn.Process(target=_open_at_once, args=(barrier, results, tmp_path, log)) for _ in range(2)]
    for process in processes:
        process.start()
    assert results.get(timeout=60) == results.get(timeout=60)
    for process in processes:
        process.join()
        assert process.exitcode == 0
    builders = log.read_text().split()
    assert len(builders) == 2  # one pass to read, one to tokenise
    assert len(set(builders)) == 1


# Refusals


@pytest.mark.parametrize(
    ("texts", "settings", "message"),
    [
        *((TEXTS, {"val_fraction": some}, f"{some}: must be between 0 and 1") for some in (0, 1, math.nan)),
        (["the same", "the same", ""], {"val_fraction": 0.2}, r"0\.2: .* has 1 distinct one\(s\)"),
        (TEXTS, {"val_tokens": 0}, "0: must be a positive whole number"),
        (TEXTS, {"cache_dir": __file__}, rf"{__file__}: File exists.*choose another folder"),
    ],
)
def test_what_cannot_be_built_is_refused_and_leaves_no_folder(
    texts: list[str], settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=rf"^data\.{next(iter(settings))}={message}[^\n]*$"):
        dataset(**{"cache_dir": tmp_path, "texts": texts, **settings})
    assert not [path for path in tmp_path.iterdir() if path.suffix != ".lock"]


@pytest.mark.parametrize("later", [TEXTS[:-1], [*TEXTS, "new"], [*TEXTS[:-1], "new"]], ids=["less", "more", "other"])
def test_text_that_changes_in_between_is_refused(
    later: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Documents, "documents", Mock(side_effect=[TEXTS, later]))
    with pytest.raises(ConfigError, match="the text changed while it was read"):
        dataset(tmp_path, TEXTS)
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


def test_text_too_short_for_a_window_is_refused_by_what_makes_it_so(tmp_path: Path) -> None:
    data, bounded = dataset(tmp_path, TEXTS), dataset(tmp_path, TEXTS, val_tokens=300)
    train, val = data.index.train.tokens, data.index.val.tokens
    data.require_windows(seq_len=100, batch_size=8)
    data.require_windows(seq_len=val, batch_size=1)
    for of, seq_len, batch_size, key in [
        (data, train + 1, 1, f"model.max_seq_len={train + 1}"),
        (data, 100, 1000, "train.batch_size=1000"),
        (data, val + 1, 1, "data.val_fraction=0.2"),
        (bounded, 301, 1, "data.val_tokens"),
    ]:
        with pytest.raises(ConfigError, match=f"^{key}: the [^\n]* lower"):
            of.require_windows(seq_len, batch_size)


# The halves of validation


def test_two_halves_hold_every_validation_document_once_by_its_hash(tmp_path: Path) -> None:
    whole = dataset(tmp_path, TEXTS)
    halves = [whole.validated_on(half) for half in HALVES]
    expected: list[list[str]] = [[], []]
    for text in documents_of(whole, "val"):
        expected[hashlib.blake2b(text.encode(), digest_size=16).digest()[7] % 2].append(text)
    assert [documents_of(half, "val") for half in halves] == expected
    for half, texts in zip(halves, expected, strict=True):
        counted = half.index.val
        assert (counted.documents, counted.bytes) == (len(texts), sum(len(text.encode()) for text in texts))
        assert (counted.tokens, half.index.train) == (len(half.val) - 1, whole.index.train)
    assert len({one.index.data_hash for one in (whole, *halves)}) == 3


def test_halves_take_the_blocks_of_every_document_in_turn_whatever_the_tokenizer(tmp_path: Path) -> None:
    texts = [" ".join(random.Random(i).choices(TEXTS, k=20)) for i in range(40)]
    read = [next(cut([text], 1500)) for text in documents_of(dataset(tmp_path, texts), "val")]
    for tokenizer in TOKENIZERS:
        whole = dataset(tmp_path, texts, tokenizer, document_chars=1500, block_chars=200)
        assert documents_of(whole, "val") == read
        halves = [whole.validated_on(half) for half in HALVES]
        for number, text in enumerate(read):
            blocks = [*cut([text], 200)]
            own = ["".join(documents_of_tokens(half, half.predicted[half.val_documents == number])) for half in halves]
            assert own in (["".join(blocks[i::2]) for i in (0, 1)], ["".join(blocks[i::2]) for i in (1, 0)])
        counted = [half.index.val for half in halves]
        assert sum(one.bytes for one in counted) == whole.index.val.bytes == sum(len(text.encode()) for text in read)
        assert [one.tokens for one in counted] == [len(half.predicted) for half in halves]
        assert [one.documents for one in counted] == [len(set(half.val_documents)) for half in halves]


def documents_of_tokens(data: TokenDataset, tokens: np.ndarray) -> list[str]:
    """The text of tokens, without ends of texts."""
    return [data.tokenizer.decode([token for token in tokens.tolist() if token != data.tokenizer.eot_id])]


CORPORA = {
    "the standard library": HandWrittenLibrary(),
    "tests": TextFiles("tests/**/*.py", document_chars=None),
    "the package": TextFiles("llama_lab/**/*.py", document_chars=None),
    "numpy": TextFiles(f"{Path(np.__file__).parent}/**/*.py", document_chars=None),
    "English": TextFiles(topics.__file__, document_chars=4096),
}


@pytest.mark.parametrize("corpus", CORPORA)
def test_both_halves_are_as_hard_for_one_model(corpus: str, tmp_path: Path) -> None:
    hold_out = HoldOut(0.13, None, 0.5, 28672, 1024 if corpus == "English" else 4096)
    data = TokenDataset.open_or_build(CORPORA[corpus], ByteTokenizer(), hold_out, tmp_path)
    pairs = np.bincount(data.train[:-1].astype(int) * 257 + data.train[1:], minlength=257**2).reshape(257, 257)
    logs = np.log((pairs + 0.1) / (pairs + 0.1).sum(1, keepdims=True))  # of a bigram model
    losses = [-logs[half.val[:-1], half.val[1:]].mean() for half in map(data.validated_on, HALVES)]
    assert losses[0] == pytest.approx(losses[1], rel=0.015)


def test_a_text_too_short_for_halves_is_refused_by_the_half_that_is(tmp_path: Path) -> None:
    whole = dataset(tmp_path, TEXTS[:3], val_fraction=0.01)
    full, empty = sorted(map(whole.validated_on, HALVES), key=lambda half: -half.index.val.documents)
    full.require_windows(16, 1)
    message = r"data.val_fraction=0.01: the \w+ half of the validation text has 0 tokens .* study.learning_rates="
    with pytest.raises(ConfigError, match=message):
        empty.require_windows(16, 1)
