"""Held-out documents that training text mostly has, word for word, leave validation."""

import random
from pathlib import Path

import numpy as np
import pytest

from llama_lab.data import near_copies
from llama_lab.data.near_copies import gram_size, shares_in_training
from llama_lab.data.tokenizer import BPETokenizer, ByteTokenizer, TokenizerFactory
from llama_lab.util.errors import ConfigError
from tests.data.texts import dataset, documents_of, sentences

WORDS = [f"word{i}" for i in range(2000)]


def prose(n: int, seed: int) -> list[str]:
    """Documents of 200 random words, which have no 13 words in common."""
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=200)) for _ in range(n)]


def edited(text: str, every: int) -> str:
    """The text with another word in the place of every so many."""
    return " ".join(f"edit{i}" if i % every == 0 else word for i, word in enumerate(text.split()))


@pytest.mark.parametrize("size", [1, 3, 13])
def test_shares_are_those_of_a_set_of_all_n_grams(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(near_copies, "_CHUNK", 50)  # n-grams reach over the ends of chunks
    rng = np.random.default_rng(size)
    train = rng.integers(0, 4, 333).astype(np.uint16)
    documents = [*(rng.integers(0, 4, n).astype(np.uint16) for n in (5, 12, 13, 40)), train[30:90], train[:0]]
    known = {tuple(train[i : i + size]) for i in range(len(train) - size + 1)}
    for tokens, share in zip(documents, shares_in_training(train, documents, size), strict=True):
        grams = [tuple(tokens[i : i + size]) in known for i in range(len(tokens) - size + 1)]
        assert share == (sum(grams) / len(grams) if grams else 0.0)


def test_short_tokens_make_longer_n_grams() -> None:
    assert [gram_size(bytes_per_token) for bytes_per_token in (1.0, 3.0, 4.0, 100.0)] == [45, 15, 13, 13]


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), BPETokenizer(vocab_size=300)], ids=["byte", "bpe"])
def test_edited_copies_leave_validation_and_are_counted(tokenizer: TokenizerFactory, tmp_path: Path) -> None:
    texts = prose(40, 0)
    near, far = [edited(text, 50) for text in texts[:20]], [edited(text, 5) for text in texts[20:]]
    known = dataset(tmp_path, [*texts, *near, *far], tokenizer, val_fraction=0.5)
    data = dataset(tmp_path, [*texts, *near, *far], tokenizer, val_fraction=0.5, max_overlap=0.5)
    held_out, train = documents_of(known, "val"), {*documents_of(known, "train")}
    pairs = dict([*zip(texts, near, strict=False), *zip(near, texts, strict=False)])
    gone = [text for text in held_out if pairs.get(text) in train]
    assert gone
    assert documents_of(data, "val") == [text for text in held_out if text not in gone]
    assert np.array_equal(data.train[:], known.train[:])
    assert (data.index.near_copies, data.index.val.documents) == (len(gone), len(held_out) - len(gone))
    assert f"documents left out: {len(gone)} near copies" in data.builds[0]
    assert data.index.data_hash != known.index.data_hash


def test_a_text_of_near_copies_alone_is_refused(tmp_path: Path) -> None:
    texts = [edited(prose(1, 0)[0], every) for every in range(60, 100)]
    with pytest.raises(ConfigError, match=r"^data.max_overlap=0.5: .* all \d+ held-out documents.*; raise it"):
        dataset(tmp_path, texts, max_overlap=0.5)


def test_ordinary_text_has_no_near_copies(tmp_path: Path) -> None:
    assert dataset(tmp_path, sentences(300), BPETokenizer(vocab_size=300), max_overlap=0.5).index.near_copies == 0
