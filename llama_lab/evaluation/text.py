"""Text of a trained run: prompts are continued together, and printed as they are generated."""

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from omegaconf import DictConfig

from llama_lab.data.tokenizer import TextTokenizer, encode_prompt
from llama_lab.model import Decoder, Sampling, generate
from llama_lab.model.generate import check_prompts, marked
from llama_lab.util.display import VISIBLE
from llama_lab.util.errors import ConfigError

from .load import TrainedRun

SEPARATOR = f"\n{'-' * 20}\n"  # between the texts of several prompts
NEW_TOKENS = 200  # default; fewer if the context ends before
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "int8": torch.int8}


@contextmanager
def report_setting() -> Iterator[None]:
    """Turn a ValueError, whose message begins with a setting, into a ConfigError."""
    try:
        yield
    except ValueError as error:
        raise ConfigError(str(error)) from None


def sampling(settings: DictConfig) -> Sampling:
    """The sampling that the settings ask for. Raises ConfigError."""
    with report_setting():
        return Sampling(settings.temperature, settings.top_k, settings.top_p, settings.min_p)


def cache_dtype(settings: DictConfig) -> torch.dtype | None:
    """The dtype of the KV cache; None for the model's. Raises ConfigError."""
    if settings.cache_dtype is None:
        return None
    if settings.cache_dtype not in DTYPES:
        raise ConfigError(f"cache_dtype={settings.cache_dtype}: unknown; choose {', '.join(DTYPES)}, or null")
    return DTYPES[settings.cache_dtype]


@dataclass
class Text:
    """A prompt and the tokens generated so far. before: those of its text, which they go on from."""

    tokenizer: TextTokenizer
    prompt: str
    before: Sequence[int] = ()
    tokens: list[int] = field(default_factory=list)
    ended: bool = False

    @property
    def certain(self) -> str:
        """Prompt and text, without an incomplete character at the end that later tokens may complete."""
        decode = self.tokenizer.decode
        text = self.prompt + decode([*self.before, *self.tokens])[len(decode(self.before)) :]
        return text if self.ended else text.rstrip("\N{REPLACEMENT CHARACTER}")


def generate_texts(
    tokenizer: TextTokenizer, model: Decoder, prompts: Sequence[str], settings: DictConfig, are_sources: bool = False
) -> Iterator[list[Text]]:
    """Continue all prompts; yields the same growing texts after every step.

    are_sources: of pairs; see `marked`. What does not go on from its prompt stands on another line. Raises ConfigError
    for invalid prompts before anything is computed.
    """
    eot_id, dtype, compiled = tokenizer.eot_id, cache_dtype(settings), settings.compile
    tokens, length = encode_prompts(tokenizer, model, prompts, settings, are_sources)
    apart = are_sources or model.start_id is not None
    texts = [
        Text(tokenizer, f"{prompt}\n") if apart else Text(tokenizer, prompt, before)
        for prompt, (_, *before) in zip(prompts, tokens, strict=True)
    ]
    with report_setting():  # or the logits of a diverged model
        steps = generate(
            model, tokens, length, sampling(settings), eot_id, settings.seed, cache_dtype=dtype, compiled=compiled
        )
        for step in steps:
            for text, token in zip(texts, step, strict=True):
                if token == eot_id:
                    text.ended = True
                elif token is not None:
                    text.tokens.append(token)
            yield texts
    for text in texts:
        text.ended = True
    yield texts


def encode_prompts(
    tokenizer: TextTokenizer, model: Decoder, prompts: Sequence[str], settings: DictConfig, are_sources: bool = False
) -> tuple[list[list[int]], int]:
    """The ids of all prompts, and the number of new tokens. Raises ConfigError for prompts that leave no room."""
    encoded = (encode_prompt("prompt", prompt, tokenizer) for prompt in prompts)
    tokens = [marked(ids, model, tokenizer.eot_id, are_sources) for ids in encoded]
    longest, end = max(map(len, tokens)), model.max_context
    if end is not None and longest >= end:
        raise ConfigError(
            f"prompt: with its mark, it has {longest} tokens, and the model's context ends at {end}; shorten it"
        )
    length = settings.max_new_tokens
    if length is None:
        length = NEW_TOKENS if end is None else min(NEW_TOKENS, end - longest)
    with report_setting():
        check_prompts(model, tokens, length)
    return tokens, length


def write_texts(run: TrainedRun, model: Decoder, prompts: Sequence[str], settings: DictConfig) -> None:
    """Print the continued prompts one below the other; the first that has not ended is printed as it grows."""
    start = time.perf_counter()
    shown = current = 0
    texts: list[Text] = []
    for texts in generate_texts(run.tokenizer, model, prompts, settings, "pair_files" in run.cfg.data):
        while current < len(texts):
            text = texts[current]
            certain = text.certain
            show(certain[shown:])
            shown = len(certain)
            if not text.ended:
                break
            show(SEPARATOR if current < len(texts) - 1 else "\n")
            shown, current = 0, current + 1
    took = f"{sum(len(text.tokens) for text in texts)} tokens in {time.perf_counter() - start:.1f} s"
    trained = "" if run.step is None else f", trained for {run.step:,} steps"
    print(f"{took} by {run.folder.path}{trained}", file=sys.stderr)


def show(text: str) -> None:
    """Print text immediately; on a terminal, with control characters made visible."""
    print(text.translate(VISIBLE) if sys.stdout.isatty() else text, end="", flush=True)
