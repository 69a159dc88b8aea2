"""Speed of generation: reading a prompt, then decoding token by token, with the KV cache and without it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from llama_lab.model import Decoder
from llama_lab.model.generate import decoding_step, prefill
from llama_lab.runs.evaluation import GenerationSpeed

from .timing import time_in_turn

NEW_TOKENS = 16  # tokens at the end of a context over which the time per token is averaged


def generation_speed(
    model: Decoder,
    batch_size: int,
    context: int,
    rounds: int,
    compiled: bool = False,
    cache_dtype: torch.dtype | None = None,
) -> GenerationSpeed:
    """Measure all three in turn, on random tokens, whose values do not matter. compiled: compile the decoding step."""
    new_tokens = min(NEW_TOKENS, context)
    timings = time_in_turn(
        {
            "prefill": reading(model, batch_size, context, cache_dtype),
            "decode": decoding(model, batch_size, context, new_tokens, compiled, cache_dtype),
            "uncached": reading_again(model, batch_size, context),
        },
        rounds,
    )
    decode = [seconds / new_tokens for seconds in timings["decode"].times]
    return GenerationSpeed(batch_size, context, timings["prefill"].times, decode, timings["uncached"].times)


def reading(
    model: Decoder, batch_size: int, context: int, cache_dtype: torch.dtype | None = None
) -> Callable[[], object]:
    """A function that reads `batch_size` prompts of `context` tokens into a new cache, like `generate`."""
    prompts = random_tokens(model, batch_size, context).tolist()
    return inference(lambda: prefill(model, prompts, model.new_state(batch_size, context, cache_dtype)))


def decoding(
    model: Decoder,
    batch_size: int,
    context: int,
    new_tokens: int,
    compiled: bool = False,
    cache_dtype: torch.dtype | None = None,
) -> Callable[[], object]:
    """A function that decodes the last `new_tokens` of `context` tokens, one by one, with a cache of the others.

    Tokens are given rather than sampled, which would dominate for large vocabularies. The cached values are arbitrary.
    """
    tokens = random_tokens(model, batch_size, new_tokens)
    cache = model.new_state(batch_size, context, cache_dtype)

    def decode() -> None:
        cache.lengths.fill_(context - new_tokens)
        with decoding_step(model, cache, compiled) as step:
            for i in range(new_tokens):
                step(tokens[:, i : i + 1])

    return inference(decode)


def reading_again(model: Decoder, batch_size: int, context: int) -> Callable[[], object]:
    """A function that computes the next token of `batch_size` sequences of `context` tokens without a cache."""
    tokens = random_tokens(model, batch_size, context)
    return inference(lambda: model.embedding.logits(model.read(tokens)[:, -1]))


def random_tokens(model: Decoder, batch_size: int, n: int) -> Tensor:
    """Random tokens `(batch_size, n)`, the same in every call."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(model.vocab_size, (batch_size, n), generator=generator)
    return tokens.to(model.embedding.tokens.weight.device)


def inference(work: Callable[[], Any]) -> Callable[[], Any]:
    """`work` without gradients."""
    return torch.inference_mode()(work)
