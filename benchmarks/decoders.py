"""Whole decoders, built from the configs as training builds them: MHA, GQA and MQA, with and without a KV cache."""

from collections.abc import Callable, Iterator, Sequence
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
SMALL = (
    "arch=llama3",
    "size.n_kv_heads=4",
    *("model.dim=256", "model.n_layers=6", "model.n_heads=8", "model.hidden_dim=688", "model.vocab_size=4096"),
)
TINY = ("arch=llama3", "size=pico", "model.vocab_size=64")
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
) -> Iterator[pd.DataFrame]:
    """A decoding step with MHA, GQA and MQA, at the end of each context, eager.

    The models differ only in key and value heads, so those with fewer heads are also slightly smaller.
    """
    longest = f"model.max_seq_len={max(contexts)}"
    models = {
        name.upper(): build_decoder(load_config([*overrides, f"attention={name}", longest]), device)
        for name in ("mha", "gqa", "mqa")
    }
    for batch_size, context in product(batch_sizes, contexts):
        steps = min(NEW_TOKENS, context)
        contenders = {name: decoding(model, batch_size, context, steps) for name, model in models.items()}
        rows = measure(f"{batch_size} x {context}", "decode", contenders, rounds, parts=steps)
        caches = [model.new_state(batch_size, context).nbytes for model in models.values()]
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
