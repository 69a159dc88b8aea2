"""Speed of generation: reading a prompt, then decoding token by token, with the KV cache and without it.

Functions are timed in turn: a round measures each once, so that a slowdown of the machine affects all.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.benchmark import Measurement, Timer

from llama_lab.model import Decoder
from llama_lab.model.generate import decoding_step, prefill
from llama_lab.runs.evaluation import GenerationSpeed

NEW_TOKENS = 16  # tokens at the end of a context over which the time per token is averaged
T = TypeVar("T")
Contenders = Mapping[str, Callable[[], object]]  # what is timed, by name


def time_in_turn(contenders: Contenders, rounds: int = 5, min_seconds: float = 0.1) -> dict[str, Measurement]:
    """Seconds per call of each contender, by name, in `rounds` rounds after a warm-up.

    Shorter calls are repeated to fill `min_seconds`. PyTorch's timer makes two warm-up calls, synchronizes with a GPU,
    and uses PyTorch's present number of threads.
    """
    threads = torch.get_num_threads()
    timers = {
        name: Timer("work()", globals={"work": work}, description=name, num_threads=threads)
        for name, work in contenders.items()
    }
    calls = {name: max(1, math.ceil(min_seconds / timer.timeit(1).mean)) for name, timer in timers.items()}
    rounds_of_all = [timers[name].timeit(calls[name]) for n in range(rounds) for name in alternating(timers, n)]
    return {measured.description: measured for measured in Measurement.merge(rounds_of_all)}


def alternating(names: Iterable[T], number: int) -> list[T]:
    """The order of a round, which alternates: forwards in the first, whose number is 0, backwards in the next."""
    return list(names)[:: -1 if number % 2 else 1]


def generation_speed(
    model: Decoder,
    batch_size: int,
    context: int,
    rounds: int,
    compiled: bool = False,
    cache_dtype: torch.dtype | None = None,
) -> GenerationSpeed:
    """Measure all three in turn, on random tokens, whose values do not matter. compiled: compile the decoding step."""
    new_tokens = min(NEW_TOKENS, context + 1 - len(model.towers))  # with its source an encoder-decoder reads another
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

    Tokens are given rather than sampled, which would dominate for large vocabularies. The cached values are arbitrary,
    but those of an encoder-decoder's source, which has `context` tokens, too.
    """
    tokens = random_tokens(model, batch_size, new_tokens)
    cache = model.new_state(batch_size, context, cache_dtype)
    if len(model.towers) > 1:
        inference(lambda: prefill(model, random_tokens(model, batch_size, context).tolist(), cache))()

    def decode() -> None:
        cache.lengths.fill_(context - new_tokens)
        with decoding_step(model, cache, compiled) as step:
            for i in range(new_tokens):
                step(tokens[:, i : i + 1])

    return inference(decode)


def reading_again(model: Decoder, batch_size: int, context: int) -> Callable[[], object]:
    """A function that computes the next token of `batch_size` sequences of `context` tokens without a cache."""
    tokens = random_tokens(model, batch_size, context)
    given = [tokens for _ in model.towers[1:]]  # the source of an encoder-decoder
    return inference(lambda: model.embedding.logits(model.hidden_states(tokens, None, *given)[:, -1]))


def random_tokens(model: Decoder, batch_size: int, n: int) -> Tensor:
    """Random tokens `(batch_size, n)`, the same in every call."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(model.vocab_size, (batch_size, n), generator=generator)
    return tokens.to(model.embedding.tokens.weight.device)


def inference(work: Callable[[], Any]) -> Callable[[], Any]:
    """`work` without gradients."""
    return torch.inference_mode()(work)
