"""Whole decoders, built from the configs as training builds them: with a KV cache, without, and with recurrences."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from typing import cast

import pandas as pd
import torch
from omegaconf import DictConfig
from torch import Tensor, nn

from llama_lab.api import build_model, load_config
from llama_lab.evaluation.speed import NEW_TOKENS, decoding
from llama_lab.model import Decoder, Sampling, generate
from llama_lab.model.attention import GroupedQueryAttention

from .rows import measure

# Overrides for a Llama 3 of each size. `size.n_kv_heads` is that of attention=gqa.
NARROW = (
    "arch=llama3",
    "size.n_kv_heads=4",
    *("model.dim=256", "model.n_heads=8", "model.hidden_dim=688", "model.vocab_size=4096"),
)
SMALL = (*NARROW, "model.n_layers=6")
EIGHT = (*NARROW, "model.n_layers=8")
TINY = ("arch=llama3", "size=pico", "model.vocab_size=64")
# Overrides of models that are measured in turn, the first the reference.
HEADS = {name.upper(): (f"attention={name}",) for name in ("mha", "gqa", "mqa")}
DELTA = ("attention=gated_delta", "position=none")
STATES = {
    "MHA": HEADS["MHA"],
    "GQA": HEADS["GQA"],
    "linear": ("attention=linear", "position=none"),
    "mamba2": ("attention=mamba2", "position=none"),
    "gated delta": DELTA,
    "kimi delta": ("attention=kimi_delta", "position=none"),
    "gated delta, GQA every 4th": (*DELTA, "pattern=attention_every_4th"),
}
BILLION = ("arch=llama3", "size=llama3_1b", "embedding=tied")


def build_decoder(cfg: DictConfig, device: torch.device, dtype: torch.dtype = torch.float32) -> Decoder:
    """The untrained decoder of a config, in evaluation mode."""
    with device:
        return build_model(cfg, cfg.model.vocab_size).to(dtype).eval()


def measure_decoding(
    rounds: int,
    device: torch.device,
    overrides: Sequence[str] = SMALL,
    batch_sizes: Sequence[int] = (1, 8),
    contexts: Sequence[int] = (1024, 4096),
    models: Mapping[str, Sequence[str]] = HEADS,
) -> Iterator[pd.DataFrame]:
    """A decoding step of each of `models`, by their overrides, at the end of each context, eager.

    They differ only in attention, so those with fewer heads are also slightly smaller, and mixers with more parameters
    larger. `kv_cache_bytes` has recurrent states, too.
    """
    longest = f"model.max_seq_len={max(contexts)}"
    built = {name: build_decoder(load_config([*overrides, *own, longest]), device) for name, own in models.items()}
    for batch_size, context in product(batch_sizes, contexts):
        steps = min(NEW_TOKENS, context)
        contenders = {name: decoding(model, batch_size, context, steps) for name, model in built.items()}
        rows = measure(f"{batch_size} x {context}", "decode", contenders, rounds, parts=steps)
        caches = [model.new_state(batch_size, context).nbytes for model in built.values()]
        yield rows.assign(tokens_per_s=1e3 * batch_size / rows.median_ms, kv_cache_bytes=caches)


def measure_caching(
    rounds: int, device: torch.device, overrides: Sequence[str] = SMALL, new_tokens: int = 100
) -> Iterator[pd.DataFrame]:
    """`new_tokens` greedy tokens after a prompt of one, with and without a KV cache, eager."""
    model = build_decoder(load_config([*overrides, f"model.max_seq_len={new_tokens + 1}"]), device)
    contenders: dict[str, Callable[[], object]] = {
        "uncached": partial(generate_uncached, model, [0], new_tokens),
        "cached": partial(generate_cached, model, [0], new_tokens),
    }
    rows = measure(str(new_tokens), "generate", contenders, rounds)
    yield rows.assign(kv_computations=[kv_computations(model, work) for work in contenders.values()])


def generate_cached(model: Decoder, prompt: Sequence[int], new_tokens: int) -> list[int | None]:
    """The greedy text of `generate`."""
    return [token for (token,) in generate(model, [prompt], new_tokens, Sampling(temperature=0))]


@torch.inference_mode()
def generate_uncached(model: Decoder, prompt: Sequence[int], new_tokens: int) -> list[int]:
    """The same, with the whole sequence processed again for every token."""
    tokens = torch.tensor([prompt], device=model.embedding.tokens.weight.device)
    for _ in range(new_tokens):
        logits = model.embedding.logits(model.hidden_states(tokens)[:, -1])
        tokens = torch.cat((tokens, logits.argmax(-1, keepdim=True)), 1)
    new: list[int] = tokens[0, len(prompt) :].tolist()
    return new


def kv_computations(model: Decoder, work: Callable[[], object]) -> int:
    """Count the tokens for which the first layer computes a key, and with it a value, during `work`."""
    found: list[int] = []

    def count(_key: nn.Module, _inputs: object, keys: Tensor) -> None:
        found.append(keys.shape[0] * keys.shape[1])

    with cast(GroupedQueryAttention, model.mixers[0]).key.register_forward_hook(count):
        work()
    return sum(found)
