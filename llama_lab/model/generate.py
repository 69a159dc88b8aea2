"""Text generation: prefill each prompt into its row of the state, then decode one token per row and step."""

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .decoder import Decoder
from .fusion import SummedProducts, fused
from .init import parameter_generator
from .state import DecoderState

Step = list[int | None]  # the new token of each sequence, None for one that has ended


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn from the logits; the settings apply in this order, as in `transformers`.

    temperature: divides the logits; 0 always takes the likeliest token.
    top_k: keep the k likeliest tokens (Fan et al. 2018, section 5.4).
    top_p: keep the fewest likeliest tokens that together reach this probability (Holtzman et al. 2020, section 3.1).
    min_p: keep tokens with at least this fraction of the likeliest one's probability (Nguyen et al. 2024, section 3).
    Raises ValueError with a message that begins with the invalid setting.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature={self.temperature}: must be a number, at least 0")
        if self.top_k is not None and (not isinstance(self.top_k, int) or self.top_k < 1):
            raise ValueError(f"top_k={self.top_k}: must be a positive whole number, or null to keep all tokens")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p}: must be above 0 and at most 1, or null to keep all tokens")
        if self.min_p is not None and not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p={self.min_p}: must be from 0 to 1, or null to keep all tokens")

    def distribution(self, logits: Tensor) -> Tensor:
        """Float64 probabilities `(..., V)` of `logits (..., V)`. Ties are ranked by token id, lowest first."""
        if self.temperature == 0:
            return F.one_hot(logits.argmax(-1), logits.shape[-1]).double()
        probabilities = (logits.double() / self.temperature).softmax(-1)
        if self.top_k is None and self.top_p is None and self.min_p is None:
            return probabilities
        ranked, tokens = probabilities.sort(stable=True, descending=True)
        if self.top_k is not None:
            ranked[..., self.top_k :] = 0
        if self.top_p is not None:
            ranked = ranked / ranked.sum(-1, keepdim=True)
            likelier = ranked.cumsum(-1) - ranked
            ranked = ranked.masked_fill(likelier >= self.top_p, 0)
        if self.min_p is not None:
            ranked = ranked.masked_fill(ranked < self.min_p * ranked[..., :1], 0)
        ranked = ranked / ranked.sum(-1, keepdim=True)
        return torch.zeros_like(ranked).scatter(-1, tokens, ranked)

    def draw(self, logits: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
        """A token for each row of `logits (B, V)`, each with its own generator: int64 `(B,)`, on the CPU.

        Inverse transform sampling: a token of probability 0 is never drawn. Raises ValueError for the logits of a
        diverged model.
        """
        if not bool(logits.amax(-1).isfinite().all()):  # so would be a NaN anywhere, which argmax takes for a token
            raise ValueError("model: its logits are not finite; it has diverged")
        if self.temperature == 0:
            return logits.argmax(-1).cpu()
        cumulative = self.distribution(logits.cpu()).cumsum(-1)
        total = cumulative[:, -1:]
        uniform = torch.stack([torch.rand(1, generator=g, dtype=torch.float64) for g in generators])
        return torch.searchsorted(cumulative, uniform * total, right=True).squeeze(-1)


def generate(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampling: Sampling | None = None,
    eot_id: int | None = None,
    seed: int = 0,
    cache_dtype: torch.dtype | None = None,
    compiled: bool = False,
    given: Counter[tuple[int, ...]] | None = None,
) -> Iterator[Step]:
    """Yield one new token per prompt and step; `model` should be in evaluation mode.

    Sequences that have generated `eot_id` yield None. Stops after `max_new_tokens` steps, or when all have ended.
    sampling: default: temperature 1.
    seed: each sequence has its own generator, seeded by `seed` and the number of equal prompts before it, so that a
        text does not depend on its batch, and a prompt that is given twice is continued in two ways.
    cache_dtype: of the state, such as the KV cache; default: the model's.
    compiled: compile the step, for this batch size at the first call, with CUDA graphs on a GPU.
    given: prompts of batches before, which count as equal ones too; those of this batch are added to it.
    Raises ValueError with a message that begins with the invalid argument, before anything is computed.
    """
    check_prompts(model, prompts, max_new_tokens)
    context = max(map(len, prompts)) + max_new_tokens
    if compiled:  # code is compiled for one size of the cache, so calls share one where they can
        context = max(context, model.max_seq_len)
    state = model.new_state(len(prompts), context, cache_dtype)
    given = Counter() if given is None else given
    generators = []
    for prompt in map(tuple, prompts):
        generators.append(parameter_generator(seed, f"sequence {given[prompt]}"))
        given[prompt] += 1
    return _steps(model, prompts, max_new_tokens, sampling or Sampling(), eot_id, generators, state, compiled)


@torch.inference_mode()
def _steps(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampling: Sampling,
    eot_id: int | None,
    generators: Sequence[torch.Generator],
    state: DecoderState,
    compiled: bool,
) -> Iterator[Step]:
    """The steps of `generate`, until all sequences have ended."""
    ended: set[int] = set()
    logits = prefill(model, prompts, state)
    with decoding_step(model, state, compiled) as next_logits:
        for n in range(max_new_tokens):
            tokens = sampling.draw(logits, generators)
            step = tokens.tolist()
            yield [None if i in ended else token for i, token in enumerate(step)]
            ended |= {i for i, token in enumerate(step) if token == eot_id}
            if len(ended) == len(prompts) or n == max_new_tokens - 1:
                return
            logits = next_logits(tokens[:, None].to(logits.device))


def prefill(model: Decoder, prompts: Sequence[Sequence[int]], state: DecoderState) -> Tensor:
    """Fill `state` with the prompts; returns the logits `(B, V)` after each.

    Prompts are processed one by one: no padding, and no prompt affects the numbers of another.
    """
    device = model.embedding.tokens.weight.device
    last = [model.read_prompt(torch.tensor([p], device=device), state.row(i))[:, -1] for i, p in enumerate(prompts)]
    return model.embedding.logits(torch.cat(last))


@contextmanager
def decoding_step(model: Decoder, state: DecoderState, compiled: bool) -> Iterator[Callable[[Tensor], Tensor]]:
    """The compiled step, or the eager one with the model `fused`."""
    if compiled:
        yield compiled_step(model, state)
    else:
        with fused(model):
            yield eager_step(model, state)


def eager_step(model: Decoder, state: DecoderState) -> Callable[[Tensor], Tensor]:
    """A function from the newest tokens `(B, 1)` to the logits `(B, V)` after them; it reads only filled slots."""
    return lambda tokens: model.embedding.logits(model.hidden_states(tokens, state)[:, -1])


def compiled_step(model: Decoder, state: DecoderState) -> Callable[[Tensor], Tensor]:
    """The same as a compiled graph with static shapes: it attends to all slots, with a mask.

    On a GPU it is replayed as a CUDA graph, which needs the state to stay where it is, and positions to be a tensor.
    """
    for tensor in (state.starts, *(tensor for layer in state.layers for tensor in layer.tensors)):
        torch._dynamo.mark_static_address(tensor, guard=False)
    positions = state.lengths[:, None].to(model.embedding.tokens.weight.device, copy=True)
    compiled = _compile_static_step()

    def step(tokens: Tensor) -> Tensor:
        logits = compiled(model, tokens, positions, state)
        positions.add_(1)
        state.lengths.add_(1)
        return logits

    return step


@functools.cache
def _compile_static_step() -> Callable[[Decoder, Tensor, Tensor, DecoderState], Tensor]:
    """The compiled step, made at first use; torch.compile specialises it for each model and size."""
    return torch.compile(_static_step, mode="reduce-overhead", dynamic=False)


def _static_step(model: Decoder, tokens: Tensor, positions: Tensor, state: DecoderState) -> Tensor:
    """Logits `(B, V)` after `tokens (B, 1)` at `positions (B, 1)`, by the same operations at all positions."""
    context = model.attention_context(tokens, positions, 0, state.context, state)
    with SummedProducts() if tokens.shape[0] == 1 and not tokens.is_cuda else nullcontext():
        return model.embedding.logits(model.run_blocks(tokens, context, state.layers)[:, -1])


def marked(prompt: list[int], model: Decoder, eot_id: int, is_source: bool = False) -> list[int]:
    """A prompt with the end of text where `model` has learnt it: before a document, which goes on from the prompt.

    After a source, where the decoder begins with a token of its own; around one of pairs, `is_source`.
    """
    own_start = model.start_id is not None
    begins, ends = is_source or not own_start, is_source or own_start
    return [eot_id] * begins + prompt + [eot_id] * ends


def check_prompts(model: Decoder, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
    """Raise ValueError unless every prompt is valid and leaves room for `max_new_tokens`."""
    if not prompts:
        raise ValueError("prompts=[]: must hold at least one prompt")
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens={max_new_tokens}: must not be negative")
    for i, prompt in enumerate(prompts):
        if not prompt:
            raise ValueError(f"prompts[{i}]: is empty; begin with the end-of-text token")
        outside = [token for token in prompt if not 0 <= token < model.vocab_size]
        if outside:
            raise ValueError(f"prompts[{i}]: token {outside[0]} is not among the model's {model.vocab_size}")
        if model.max_context is None:
            continue
        if len(prompt) > model.max_context:
            raise ValueError(f"prompts[{i}]: has {len(prompt)} tokens, more than max_seq_len={model.max_seq_len}")
        if len(prompt) + max_new_tokens > model.max_context:
            raise ValueError(
                f"max_new_tokens={max_new_tokens}: prompts[{i}] of {len(prompt)} tokens leaves room for "
                f"{model.max_context - len(prompt)} in max_seq_len={model.max_seq_len}"
            )
