"""Text that a trained run writes: prompts go on, all at once, and come as they are written."""

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from omegaconf import DictConfig

from llama_lab.data.tokenizer import TextTokenizer, encode_prompt
from llama_lab.display import VISIBLE
from llama_lab.errors import ConfigError
from llama_lab.model import Decoder, Sampling, generate
from llama_lab.model.generate import check_prompts

from .load import TrainedRun

SEPARATOR = f"\n{'-' * 20}\n"  # between the texts of several prompts
NEW_TOKENS = 200  # unless told, or the context ends before
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "int8": torch.int8}


def sampling(settings: DictConfig) -> Sampling:
    """How tokens are drawn. Raises ConfigError."""
    try:
        return Sampling(settings.temperature, settings.top_k, settings.top_p, settings.min_p)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def cache_dtype(settings: DictConfig) -> torch.dtype | None:
    """The KV cache's dtype, None for the model's own. Raises ConfigError."""
    if settings.cache_dtype is None:
        return None
    if settings.cache_dtype not in DTYPES:
        raise ConfigError(f"cache_dtype={settings.cache_dtype}: unknown; choose {', '.join(DTYPES)}, or null")
    return DTYPES[settings.cache_dtype]


@dataclass
class Text:
    """What a run adds to a prompt, as far as it has come."""

    tokenizer: TextTokenizer
    prompt: str
    tokens: list[int] = field(default_factory=list)
    ended: bool = False

    @property
    def certain(self) -> str:
        """Prompt and text, less the beginning of a character that spans several tokens and may still be completed."""
        text = self.prompt + self.tokenizer.decode(self.tokens)
        return text if self.ended else text.rstrip("\N{REPLACEMENT CHARACTER}")


def written(run: TrainedRun, model: Decoder, prompts: Sequence[str], settings: DictConfig) -> Iterator[list[Text]]:
    """What the run's `model` makes of the prompts, all at once: the growing texts, the same ones after every step.

    Every prompt is the beginning of a document. Raises ConfigError for one that cannot go on, before it is computed.
    """
    eot_id = run.tokenizer.eot_id
    texts = [Text(run.tokenizer, prompt) for prompt in prompts]
    tokens, length = starts(run, model, prompts, settings)
    try:
        steps = generate(
            model,
            tokens,
            length,
            sampling(settings),
            eot_id,
            settings.seed,
            cache_dtype=cache_dtype(settings),
            compiled=settings.compile,
        )
        for step in steps:
            for text, token in zip(texts, step, strict=True):
                if token == eot_id:
                    text.ended = True
                elif token is not None:
                    text.tokens.append(token)
            yield texts
    except ValueError as error:  # of settings at once, and of a diverged model's logits
        raise ConfigError(str(error)) from None
    for text in texts:
        text.ended = True
    yield texts


def starts(
    run: TrainedRun, model: Decoder, prompts: Sequence[str], settings: DictConfig
) -> tuple[list[list[int]], int]:
    """The ids that the texts begin with, and how many follow. Raises ConfigError for prompts that cannot go on."""
    tokens = [[run.tokenizer.eot_id, *encode_prompt("prompt", prompt, run.tokenizer)] for prompt in prompts]
    length = new_tokens(model, tokens, settings)
    try:
        check_prompts(model, tokens, length)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return tokens, length


def new_tokens(model: Decoder, starts: Sequence[Sequence[int]], settings: DictConfig) -> int:
    """How many tokens to write. Raises ConfigError for prompts that leave no room."""
    longest = max(map(len, starts))
    if model.max_context is not None and longest >= model.max_context:
        raise ConfigError(
            f"prompt: with the mark that begins it, it has {longest} tokens, and the model's context ends at "
            f"{model.max_context}; shorten it"
        )
    if settings.max_new_tokens is not None:
        return int(settings.max_new_tokens)
    return NEW_TOKENS if model.max_context is None else min(NEW_TOKENS, model.max_context - longest)


def write_texts(run: TrainedRun, model: Decoder, prompts: Sequence[str], settings: DictConfig) -> None:
    """Print what becomes of the prompts, one below the other; the first that has not ended, as it is written."""
    began = time.perf_counter()
    shown = current = 0
    texts: list[Text] = []
    for texts in written(run, model, prompts, settings):
        while current < len(texts):
            text = texts[current]
            certain = text.certain
            show(certain[shown:])
            shown = len(certain)
            if not text.ended:
                break
            show(SEPARATOR if current < len(texts) - 1 else "\n")
            shown, current = 0, current + 1
    seconds = time.perf_counter() - began
    tokens = sum(len(text.tokens) for text in texts)
    print(
        f"{tokens} tokens in {seconds:.1f} s by {run.folder.path}, trained for {run.step:,} steps",
        file=sys.stderr,
    )


def show(text: str) -> None:
    """Print a piece at once; a terminal is not to be steered by it."""
    print(text.translate(VISIBLE) if sys.stdout.isatty() else text, end="", flush=True)
