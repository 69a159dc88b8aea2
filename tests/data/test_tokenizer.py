"""Tokenizers: lossless, and never confused by the text they read."""

import random
import time
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, processors

from llama_lab.data.tokenizer import (
    WORD_BYTES,
    BPETokenizer,
    ByteTokenizer,
    CharTokenizer,
    TextTokenizer,
)
from llama_lab.util.errors import ConfigError
from tests.data.texts import sentences

TEXT = sentences(50)
BYTE = ByteTokenizer().train(iter([]))
BPE = BPETokenizer(vocab_size=350).train(iter(TEXT))
CHAR = CharTokenizer().train(iter([*TEXT, "<|endoftext|>"]))


@given(text=st.text())
@example(text="<|endoftext|>")
@example(text="a<|endoftext|> <0x41> b")
@example(text="  two  spaces\r\n\ttab\0 \ufeff\u2028e\u0301é")
@pytest.mark.slow
def test_any_text_round_trips_without_the_end_of_text_token(text: str) -> None:
    assert bytes(BYTE.encode(text)) == text.encode()
    for tokenizer in (BYTE, BPE):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert tokenizer.eot_id not in ids


@given(st.text(alphabet=sorted(set("".join(TEXT)))))
@example("<|endoftext|>")
def test_text_of_known_characters_round_trips_one_id_each_and_an_unknown_one_is_named(text: str) -> None:
    ids = CHAR.encode(text)
    assert CHAR.decode(ids) == text
    assert len(ids) == len(text)
    assert CHAR.eot_id not in ids
    with pytest.raises(ConfigError, match="tokenizer=char: no id for '漢'"):
        CHAR.encode(f"{text}漢b")


def test_sizes_are_those_asked_for_and_bpe_shortens_the_text_and_learns_the_same_twice() -> None:
    characters = len(set("".join(TEXT) + "<|endoftext|>"))
    assert (BYTE.vocab_size, BPE.vocab_size, CHAR.vocab_size) == (257, 350, characters + 1)
    assert len(BPE.encode(TEXT[0])) < 0.6 * len(BYTE.encode(TEXT[0]))
    assert BPETokenizer(vocab_size=350).train(iter(TEXT)).hash == BPE.hash
    assert BPETokenizer(vocab_size=351).train(iter(TEXT)).hash != BPE.hash


def test_bpe_without_room_for_the_bytes_or_without_text_is_refused() -> None:
    for settings, message in [
        ({"vocab_size": 256}, r"tokenizer\.vocab_size=256: must be at least 257"),
        ({"sample_bytes": 0}, r"tokenizer\.sample_bytes=0: must be a positive whole number"),
    ]:
        with pytest.raises(ConfigError, match=message):
            BPETokenizer(**settings)
    assert BPETokenizer(vocab_size=257).train(iter(TEXT)).vocab_size == 257


def unigram(*special: str) -> Tokenizer:
    """A tokenizer as of SentencePiece, which looks `</s>` up whole, with settings that are for other uses."""
    pieces = ["<unk>", "<s>", "</s>", *"</s>ab "]
    tokenizer = Tokenizer(models.Unigram([(piece, -float(len(piece) == 1)) for piece in dict.fromkeys(pieces)], 0))
    tokenizer.add_special_tokens(list(special))
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=8)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def test_the_only_special_token_ends_a_text_and_no_text_is_encoded_to_it_or_cut_or_padded() -> None:
    tokenizer = TextTokenizer(unigram("</s>"))
    assert (tokenizer.end_of_text, tokenizer.eot_id) == ("</s>", 2)
    ids = tokenizer.encode("a</s>b</s>")
    assert tokenizer.eot_id not in ids
    assert tokenizer._tokenizer.decode_batch([[i] for i in ids]) == list("a</s>b</s>")


def test_of_several_special_tokens_the_file_beside_names_the_end_of_text_or_all_are_listed(
    tmp_path: Path,
) -> None:
    file = tmp_path / "tokenizer.json"
    unigram("<unk>", "<s>", "</s>").save(str(file))
    for name, message in [
        (None, "which token ends a text is not known; name one of"),
        ("<eos>", "end_of_text=<eos>: it has no such token;"),
    ]:
        with pytest.raises(ValueError, match=rf"{message}.*\['<unk>', '<s>', '</s>'"):
            TextTokenizer.load(file, name)
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "</s>"}')
    assert TextTokenizer.load(file).eot_id == 2
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "<s>", "lstrip": false}}')
    assert TextTokenizer.load(file).eot_id == 1
    named = TextTokenizer.load(file, "</s>")
    assert named.eot_id == 2
    assert named.hash != TextTokenizer.load(file).hash
    (tmp_path / "own").mkdir()
    named.save(tmp_path / "own" / "tokenizer.json")
    loaded = TextTokenizer.load(tmp_path / "own" / "tokenizer.json")
    assert (loaded.end_of_text, loaded.eot_id, loaded.hash) == ("</s>", 2, named.hash)


def test_the_vocabulary_reaches_the_highest_id_where_ids_are_left_out() -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 7}))
    tokenizer.add_special_tokens(["</s>"])
    assert TextTokenizer(tokenizer).vocab_size >= 8 > tokenizer.get_vocab_size()


@pytest.mark.parametrize("tokenizer", [BYTE, BPE, CHAR], ids=["byte", "bpe", "char"])
def test_tokens_that_a_tokenizer_gains_have_ids_above_its_own_and_no_text_is_encoded_to_them(
    tokenizer: TextTokenizer, tmp_path: Path
) -> None:
    more, own = tokenizer.with_tokens(["<a>", "<b>"]), tokenizer.vocab_size
    assert (more.ids_of(["<b>", "<a>"]), more.vocab_size) == ([own + 1, own], own + 2)
    assert (more.eot_id, more.decode([own, *tokenizer.encode("to"), own + 1])) == (tokenizer.eot_id, "<a>to<b>")
    more.save(tmp_path / "tokenizer.json")
    again = TextTokenizer.load(tmp_path / "tokenizer.json")
    assert again.hash == more.hash == more.with_tokens(["<a>"]).hash != tokenizer.hash
    assert BYTE.with_tokens(["<a>"]).encode("<a>") == [*b"<a>"]


def test_a_tokenizer_that_leaves_ids_out_gains_none_of_its_own() -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 2}))
    with pytest.raises(ConfigError, match="leaves ids out, so that <a> would be one of its own"):
        TextTokenizer(tokenizer, "a").with_tokens(["<a>"])


@pytest.mark.parametrize("tokenizer", [BYTE, BPE, CHAR], ids=["byte", "bpe", "char"])
def test_a_saved_tokenizer_loads_unchanged_by_us_and_by_transformers(tokenizer: TextTokenizer, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    assert tokenizer.eot_id == tokenizer.vocab_size - 1
    assert tokenizer.decode([*tokenizer.encode("a"), tokenizer.eot_id]) == "a<|endoftext|>"
    tokenizer.save(tmp_path / "tokenizer.json")
    loaded, theirs = TextTokenizer.load(tmp_path / "tokenizer.json"), AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.hash == tokenizer.hash
    assert loaded.encode("a <|endoftext|>") == tokenizer.encode("a <|endoftext|>")
    for text in TEXT:
        ids = tokenizer.encode(text)
        assert theirs.encode(text) == ids
        assert theirs.decode(ids) == tokenizer.decode(ids) == text
    assert (theirs.eos_token_id, len(theirs)) == (tokenizer.eot_id, tokenizer.vocab_size)


@pytest.mark.slow
@pytest.mark.parametrize("alphabet", ["a", " ", "漢字中文的一"])
def test_a_word_of_megabytes_takes_seconds_and_round_trips(alphabet: str) -> None:
    word = "".join(random.Random(0).choices(alphabet, k=1_000_000 // len(alphabet[0].encode())))
    start = time.process_time()
    tokenizer = BPETokenizer(vocab_size=300).train(iter([word]))
    assert tokenizer.decode(tokenizer.encode(word)) == word
    assert time.process_time() - start < 60  # without a bound, it takes many minutes


def test_the_bound_on_a_word_changes_no_text_of_shorter_words(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [*TEXT, "a" * WORD_BYTES, "b" * (WORD_BYTES - 1)]
    bounded = BPETokenizer(vocab_size=400).train(iter(texts)).hash
    monkeypatch.setattr("llama_lab.data.tokenizer.WORD_BYTES", 10**5)
    assert BPETokenizer(vocab_size=400).train(iter(texts)).hash == bounded
