"""Byte, character and BPE tokenizers, all lossless, and a wrapper of any `tokenizer.json`."""

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, Self

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from llama_lab.util.errors import ConfigError, require_positive
from llama_lab.util.files import replace_text

END_OF_TEXT = "<|endoftext|>"
MOST_IDS = 2**22  # sixteen times the largest published vocabulary
WORD_BYTES = 1024  # of a word when merges are learnt, which takes the square of its length
LONGEST_WORD = GROWTH = 1000  # of a tokenizer.json: characters of a word, and of what one becomes
TOKENIZER_NAME = "tokenizer.json"
TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP = "tokenizer_config.json", "special_tokens_map.json"


VocabularyFrom = Literal["nothing", "train", "all", "probe"]


class TextTokenizer:
    """A tokenizer: text to ids and back; exactly, if it is one of ours.

    The id `eot_id`, of the special token `end_of_text`, ends a document. No text is encoded to it, not even the
    token's own. Default for `end_of_text`: `<|endoftext|>`, else the only special token.
    Raises ConfigError, with the special tokens to choose from, if there is none such.
    """

    vocabulary_from: ClassVar[VocabularyFrom] = "nothing"

    def __init__(self, tokenizer: Tokenizer, end_of_text: str | None = None):
        special = [token.content for _, token in sorted(tokenizer.get_added_tokens_decoder().items()) if token.special]
        if not end_of_text:
            has_ours = END_OF_TEXT in special or (not special and tokenizer.token_to_id(END_OF_TEXT) is not None)
            if not has_ours and len(special) != 1:
                problem = f"which token ends a text is not known; name one of {special or 'its vocabulary'}"
                raise ConfigError(f"tokenizer.end_of_text=null: {problem}")
            end_of_text = END_OF_TEXT if has_ours else special[0]
        eot_id = tokenizer.token_to_id(end_of_text)
        if eot_id is None:
            raise ConfigError(f"tokenizer.end_of_text={end_of_text}: it has no such token; name one of {special}")
        if end_of_text not in special:
            tokenizer.add_special_tokens([end_of_text])  # keeps its id
        self.end_of_text, self.eot_id = end_of_text, eot_id
        self._tokenizer = tokenizer
        # A tokenizer.json may ask for these, but a document is encoded whole.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = True  # `<|endoftext|>` in a text is text; tokenizer.json does not store this

    @classmethod
    def load(cls, path: str | Path, end_of_text: str | None = None) -> "TextTokenizer":
        """Read any `tokenizer.json`; see `read_tokenizer`. Raises ConfigError as the class does, too."""
        return cls(*read_tokenizer(Path(path), end_of_text))

    def train(self, documents: Iterator[str]) -> Self:
        """Return the tokenizer, which is trained; `documents` are not read."""
        return self

    def with_tokens(self, names: Sequence[str]) -> "TextTokenizer":
        """The same tokenizer with the special tokens `names`; those that it lacks get ids above its own.

        Raises ConfigError if its ids leave no room above them.
        """
        tokenizer = Tokenizer.from_str(self._tokenizer.to_str())
        tokenizer.add_special_tokens([*names])
        if len({*tokenizer.get_vocab().values()}) < len(tokenizer.get_vocab()):  # it counts from the number of its ids
            raise ConfigError(f"tokenizer: leaves ids out, so that {names[0]} would be one of its own; choose another")
        return TextTokenizer(tokenizer, self.end_of_text)

    def save(self, path: str | Path) -> None:
        """Write a `tokenizer.json` and, beside it, a `tokenizer_config.json` with the end-of-text token.

        `transformers` loads a folder with the two, and any library built on `tokenizers` the first.
        """
        path = Path(path)
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": self.end_of_text,  # every document follows one, the first too
            "eos_token": self.end_of_text,
            "clean_up_tokenization_spaces": False,  # decodes to what was encoded
        }
        replace_text(path.with_name(TOKENIZER_CONFIG), json.dumps(settings, indent=2))
        replace_text(path, self._tokenizer.to_str(pretty=True))  # Tokenizer.save hides an OSError

    @cached_property
    def vocab_size(self) -> int:
        """One more than the highest id, the end-of-text token included; some published tokenizers leave ids out."""
        return int(max(self._tokenizer.get_vocab().values())) + 1

    @property
    def hash(self) -> str:
        """Hash of the whole `tokenizer.json` and the end-of-text token: equal hashes give equal ids."""
        named = "" if self.end_of_text == END_OF_TEXT else self.end_of_text
        return hashlib.blake2b((self._tokenizer.to_str() + named).encode(), digest_size=16).hexdigest()

    def ids_of(self, tokens: Sequence[str]) -> list[int]:
        """The ids of `tokens`, which are in the vocabulary."""
        ids = self._tokenizer.get_vocab()
        return [ids[token] for token in tokens]

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`. Raises ConfigError for a character that a character tokenizer does not have."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode several texts at once, on all cores. Raises as `encode` does."""
        try:
            encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        except Exception as error:  # tokenizers raises nothing more specific
            of_probe = isinstance(self._tokenizer.model, models.WordLevel)
            pieces = {piece for text in texts for piece in (text.split() if of_probe else text)}
            unknown = sorted(pieces - self._tokenizer.get_vocab().keys())
            if not unknown:
                raise
            key, advice = ("symbols", "or separate them by spaces") if of_probe else ("char", "or use tokenizer=byte")
            raise ConfigError(f"tokenizer={key}: no id for {' '.join(unknown)!r}; leave it out, {advice}") from error
        encoded = ((text, encoding.ids) for text, encoding in zip(texts, encodings, strict=True))
        return [self._encode_in_parts(text) if self.eot_id in ids else ids for text, ids in encoded]

    def _encode_in_parts(self, text: str) -> list[int]:
        """Encode a text whose own `</s>` a model looks up whole: cut it there, as no text is to end a document."""
        first, rest = re.escape(self.end_of_text[:1]), re.escape(self.end_of_text[1:])
        parts = re.split(f"(?<={first})(?={rest})", text)
        encodings = self._tokenizer.encode_batch_fast(parts, add_special_tokens=False)
        ids = [i for encoding in encodings for i in encoding.ids]
        if self.eot_id in ids:
            problem = "the tokenizer also makes it of text; name a token that it does not"
            raise ConfigError(f"tokenizer.end_of_text={self.end_of_text}: {problem}")
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`; bytes that are not UTF-8, as of a cut character, become U+FFFD."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))


def read_tokenizer(path: Path, end_of_text: str | None) -> tuple[Tokenizer, str | None]:
    """Read any `tokenizer.json`, and the token that ends a text.

    Default for `end_of_text`: the `eos_token` of the `tokenizer_config.json` beside it, else of the
    `special_tokens_map.json`, else None. Raises what `tokenizers` raises for a file that is none; ConfigError for one
    that would exhaust the memory.
    """
    _check_bounds(path)
    tokenizer = Tokenizer.from_file(str(path))
    for name in () if end_of_text else (TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP):
        with suppress(FileNotFoundError):
            try:
                known = json.loads(path.with_name(name).read_text(encoding="utf-8"))
                token = known.get("eos_token") or known.get("sep_token")  # BERT's
            except (ValueError, AttributeError) as error:
                raise ValueError(f"{name} beside it is no JSON object: {error}") from error
            if token:  # as text, or with its properties
                return tokenizer, str(token["content"] if isinstance(token, dict) else token)
    return tokenizer, end_of_text


def _check_bounds(path: Path) -> None:
    """Raise ConfigError for sizes with which `tokenizers` would exhaust memory, or never end."""
    growth = 1

    def check(node: dict[str, Any]) -> dict[str, Any]:
        nonlocal growth
        if node.get("type") in ("Replace", "Prepend"):
            growth *= max(1, len(str(node.get("content", node.get("prepend")))))
        ids = node["vocab"].values() if isinstance(node.get("vocab"), dict) else ()
        numbers = {
            "id": (max((i for i in ids if isinstance(i, int)), default=0), MOST_IDS),
            "max_input_chars_per_word": (node.get("max_input_chars_per_word", 0) if ids else 0, LONGEST_WORD),
            "characters that a Replace or Prepend makes of one": (growth, GROWTH),
        }
        for name, (number, most) in numbers.items():
            if isinstance(number, int) and number > most:
                raise ConfigError(f"{path}: {name}: {number} is more than {most}; lower it there, or take another file")
        return node

    with suppress(json.JSONDecodeError, UnicodeDecodeError, RecursionError):  # which tokenizers reports
        json.loads(path.read_bytes(), object_hook=check)


class TokenizerFactory(Protocol):
    """The object that `tokenizer=` selects: a dataclass whose name and fields determine the trained tokenizer.

    If it has a field `sample_bytes` that is not None, `train` gets a sample of about that size, chosen by the
    documents' hashes.
    """

    vocabulary_from: ClassVar[VocabularyFrom]
    """Which documents `train` needs: none, those of the training split, or those of both splits."""

    def train(self, documents: Iterator[str]) -> TextTokenizer:
        """Learn a vocabulary from `documents`, which are iterated over once."""
        ...


def identity(factory: TokenizerFactory) -> list[object]:
    """Key that is equal for factories that train the same tokenizer."""
    settings = {"hash": factory.hash} if isinstance(factory, TextTokenizer) else asdict(factory)  # type: ignore
    return [type(factory).__module__, type(factory).__qualname__, settings]


@dataclass(frozen=True)
class ByteTokenizer:
    """One id per UTF-8 byte, equal to the byte, and 256 for the end of a text."""

    vocabulary_from: ClassVar[VocabularyFrom] = "nothing"

    def train(self, documents: Iterator[str]) -> TextTokenizer:
        """Return the tokenizer; `documents` are not read, as the vocabulary is fixed."""
        # In a byte-level vocabulary, printable bytes are their Latin-1 characters, the others those from 256 on.
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        printable = [ord(character) for character in alphabet if ord(character) < 256]
        vocabulary = dict(zip(alphabet, [*printable, *sorted({*range(256)} - {*printable})], strict=True))
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        return _finish(tokenizer)


@dataclass(frozen=True)
class CharTokenizer:
    """One id per distinct character of the text, training and validation, in code point order."""

    vocabulary_from: ClassVar[VocabularyFrom] = "all"

    def train(self, documents: Iterator[str]) -> TextTokenizer:
        """Collect the characters of `documents`. Encoding any other character raises ConfigError."""
        vocabulary = {character: i for i, character in enumerate(sorted({*chain.from_iterable(documents)}))}
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
        if not 257 <= self.vocab_size <= MOST_IDS:  # the trainer allocates room for all
            bounds = f"at least 257 (256 bytes and {END_OF_TEXT}), at most {MOST_IDS}"
            raise ConfigError(f"tokenizer.vocab_size={self.vocab_size}: must be {bounds}")
        require_positive("tokenizer.sample_bytes", self.sample_bytes)

    def train(self, documents: Iterator[str]) -> TextTokenizer:
        """Learn the merges from `documents`."""
        tokenizer = Tokenizer(models.BPE())
        # Lossless: every byte has an id, and no space is added in front of a text.
        words = pre_tokenizers.ByteLevel(add_prefix_space=False)
        cut = pre_tokenizers.Split(Regex(f".{{{WORD_BYTES}}}"), "isolated")  # encoding is linear, and needs none
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, cut])
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=self.vocab_size - 1, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
        )
        tokenizer.train_from_iterator([*documents], trainer)  # a list, since the library reads them where Ctrl-C waits
        tokenizer.pre_tokenizer = words
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
