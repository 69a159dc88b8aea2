"""Byte, character and BPE tokenizers, all lossless; a trained one is a standard `tokenizer.json`."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from llama_lab.errors import ConfigError

END_OF_TEXT = "<|endoftext|>"


class TextTokenizer:
    """A trained tokenizer: text to ids and back, exactly.

    The last id, `eot_id`, ends a document. No text is encoded to it, not even the text `<|endoftext|>`. Raises
    ValueError for a tokenizer without it.
    """

    def __init__(self, tokenizer: Tokenizer):
        eot_id = tokenizer.token_to_id(END_OF_TEXT)
        if eot_id is None:
            raise ValueError(f"the tokenizer has no {END_OF_TEXT}")
        self.eot_id = eot_id
        self._tokenizer = tokenizer
        tokenizer.encode_special_tokens = True  # `<|endoftext|>` in a text is text; tokenizer.json does not store this

    @classmethod
    def load(cls, path: str | Path) -> "TextTokenizer":
        """Read a `tokenizer.json` whose vocabulary holds `<|endoftext|>`."""
        return cls(Tokenizer.from_file(str(path)))

    def save(self, path: str | Path) -> None:
        """Write a `tokenizer.json` that any library built on `tokenizers` can load."""
        Path(path).write_text(self._tokenizer.to_str(pretty=True), encoding="utf-8")  # Tokenizer.save hides an OSError

    @property
    def vocab_size(self) -> int:
        """Number of ids, the end-of-text token included."""
        return int(self._tokenizer.get_vocab_size())

    @property
    def hash(self) -> str:
        """Hash of the whole `tokenizer.json`: equal hashes give equal ids."""
        return hashlib.blake2b(self._tokenizer.to_str().encode(), digest_size=16).hexdigest()

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`. Raises ConfigError for a character that a character tokenizer does not have."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode several texts at once, on all cores. Raises as `encode` does."""
        try:
            encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        except Exception as error:  # tokenizers raises nothing more specific
            if isinstance(self._tokenizer.model, models.WordLevel):
                words = sorted({word for text in texts for word in text.split()} - self._tokenizer.get_vocab().keys())
                raise ConfigError(
                    f"tokenizer=symbols: {', '.join(words)} is no symbol of this probe; separate its symbols by spaces"
                ) from error
            unknown = "".join(sorted(set().union(*texts) - self._tokenizer.get_vocab().keys()))
            if not unknown:
                raise
            raise ConfigError(
                f"tokenizer=char: no id for {unknown!r}, not in the text it was trained on; "
                "leave these characters out, or train with tokenizer=byte or tokenizer=bpe"
            ) from error
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`; bytes that are not UTF-8, as of a cut character, become U+FFFD."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))


VocabularyFrom = Literal["nothing", "train", "all"]


class TokenizerFactory(Protocol):
    """The object that `tokenizer=` selects: a dataclass whose name and fields determine the trained tokenizer.

    If it has a field `sample_bytes` that is not None, `train` gets a sample of about that size, chosen by the
    documents' hashes.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]

    vocabulary_from: ClassVar[VocabularyFrom]
    """Which documents `train` needs: none, those of the training split, or those of both splits."""

    def train(self, documents: Iterator[str]) -> TextTokenizer:
        """Learn a vocabulary from `documents`, which are iterated over once."""
        ...


def sample_bytes(factory: TokenizerFactory) -> int | None:
    """Return the limit on the text that `factory` learns from; None if there is none."""
    return getattr(factory, "sample_bytes", None)


@dataclass(frozen=True)
class ByteTokenizer:
    """One id per UTF-8 byte, equal to the byte, and 256 for the end of a text."""

    vocabulary_from: ClassVar[VocabularyFrom] = "nothing"

    def train(self, documents: Iterator[str]) -> TextTokenizer:
        """Return the tokenizer; `documents` are not read, as the vocabulary is fixed."""
        tokenizer = Tokenizer(models.BPE(vocab=_byte_characters(), merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        return _finish(tokenizer)


def _byte_characters() -> dict[str, int]:
    """Each byte by its character in a byte-level vocabulary.

    A printable byte is its Latin-1 character; the others are the characters from 256 on, in order.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    own = {character: ord(character) for character in alphabet if ord(character) < 256}
    others = sorted(set(range(256)) - set(own.values()))
    return own | dict(zip((c for c in alphabet if ord(c) >= 256), others, strict=True))


@dataclass(frozen=True)
class CharTokenizer:
    """One id per distinct character of the text, training and validation, in code point order."""

    vocabulary_from: ClassVar[VocabularyFrom] = "all"

    def train(self, documents: Iterator[str]) -> TextTokenizer:
        """Collect the characters of `documents`. Encoding any other character raises ConfigError."""
        characters: set[str] = set()
        for document in documents:
            characters.update(document)
        vocabulary = {character: i for i, character in enumerate(sorted(characters))}
        # An unk_token that is not in the vocabulary makes an unknown character an error; without, it would be dropped.
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
        tokenizer.decoder = decoders.Fuse()
        return _finish(tokenizer)


@dataclass(frozen=True)
class BPETokenizer:
    """Byte-level byte-pair encoding (GPT-2's, Radford et al. 2019, section 2.2), learnt from the training split.

    `vocab_size` counts the 256 bytes, the merges and the end-of-text token; a short text may yield fewer merges.
    `sample_bytes` bounds the text to learn from; default: all of it.
    Raises ConfigError if `vocab_size` has no room for the bytes, or `sample_bytes` is not positive.
    """

    vocab_size: int = 4096
    sample_bytes: int | None = None
    vocabulary_from: ClassVar[VocabularyFrom] = "train"

    def __post_init__(self) -> None:
        if self.vocab_size < 257:
            raise ConfigError(
                f"tokenizer.vocab_size={self.vocab_size}: must be at least 257 (256 bytes and {END_OF_TEXT})"
            )
        if self.sample_bytes is not None and self.sample_bytes < 1:
            raise ConfigError(f"tokenizer.sample_bytes={self.sample_bytes}: must be at least 1, or null for all text")

    def train(self, documents: Iterator[str]) -> TextTokenizer:
        """Learn the merges from `documents`."""
        tokenizer = Tokenizer(models.BPE())
        # Lossless: every byte has an id, and no space is added in front of a text.
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=self.vocab_size - 1,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator(documents, trainer)
        return _finish(tokenizer)


def _finish(tokenizer: Tokenizer) -> TextTokenizer:
    tokenizer.add_special_tokens([END_OF_TEXT])
    return TextTokenizer(tokenizer)


def encode_prompt(key: str, prompt: str, tokenizer: TextTokenizer) -> list[int]:
    """The ids of the prompt in setting `key`. Raises ConfigError for characters that the tokenizer does not have."""
    try:
        return tokenizer.encode(prompt)
    except ConfigError as error:
        raise ConfigError(f"{key}={prompt}: {error}") from None


def symbol_tokenizer(symbols: Sequence[str]) -> TextTokenizer:
    """A tokenizer of words: one id per symbol, in this order. In text, symbols are separated by spaces."""
    tokenizer = Tokenizer(models.WordLevel(vocab={symbol: i for i, symbol in enumerate(symbols)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return _finish(tokenizer)
