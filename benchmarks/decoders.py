"""Whole decoders, built from the configs as training builds them: MHA, GQA and MQA, with and without a KV cache."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import product
from typing import cast

import hydra
import pandas as pd
import torch
from omegaconf import DictConfig
from torch import Tensor, nn

from llama_lab.config.components import CONF_DIR, build_model, register_resolvers
from llama_lab.evaluation.speed import NEW_TOKENS, decoding
from llama_lab.model import Decoder, Sampling, generate
from llama_lab.model.attention import GroupedQueryAttention

from .rows import measure, ratios

# Overrides for a Llama 3 of each size. `size.n_kv_heads` is that of attention=gqa.
SMALL = (
    "arch=llama3",
    "size.n_kv_heads=4",
    *("model.dim=256", "model.n_layers=6", "model.n_heads=8", "model.hidden_dim=688", "model.vocab_size=4096"),
)
TINY = ("arch=llama3", "size=pico", "model.vocab_size=64")


def compose(*overrides: str) -> DictConfig:
    """The config of `python train.py *overrides`."""
    register_resolvers()
    with hydra.initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        return hydra.compose("config", list(overrides))


def build_decoder(cfg: DictConfig, device: torch.device, dtype: torch.dtype = torch.float32) -> Decoder:
    """The untrained decoder of a config that sets `model.vocab_size`, in evaluation mode."""
    with device:
        model: Decoder = build_model(cfg, cfg.model.vocab_size)
    return model.to(dtype).eval()


def measure_decoding(
    rounds: int,
    device: torch.device,
    overrides: Sequence[str] = SMALL,
    batch_sizes: Sequence[int] = (1, 8),
    contexts: Sequence[int] = (1024, 4096),
) -> Iterator[pd.DataFrame]:
    """Seconds per decoding step with MHA, GQA and MQA, at the end of each context, eager.

    The models differ only in key and value heads, so those with fewer heads are also slightly smaller.
    """
    longest = f"model.max_seq_len={max(contexts)}"
    models = {
        name.upper(): build_decoder(compose(*overrides, f"attention={name}", longest), device)
        for name in ("mha", "gqa", "mqa")
    }
    for batch_size, context in product(batch_sizes, contexts):
        steps = min(NEW_TOKENS, context)
        contenders = {name: decoding(model, batch_size, context, steps) for name, model in models.items()}
        rows = measure(f"{batch_size} x {context}", "decode", contenders, rounds, parts=steps)
        caches = [model.new_state(batch_size, context).nbytes for model in models.values()]
        yield rows.assign(tokens_per_s=batch_size / rows.median_s, kv_cache_bytes=caches)


def decoding_finding(rows: pd.DataFrame) -> str:
    """The speed of GQA and MQA relative to MHA, over batch sizes and contexts."""
    return ", ".join(f"{name} {ratios(rows, 'decode', name)} times MHA's speed" for name in ("GQA", "MQA"))


def measure_caching(
    rounds: int, device: torch.device, overrides: Sequence[str] = SMALL, new_tokens: int = 100
) -> Iterator[pd.DataFrame]:
    """Seconds to generate `new_tokens` greedily after a prompt of one token, with and without a KV cache, eager."""
    model = build_decoder(compose(*overrides, f"model.max_seq_len={new_tokens + 1}"), device)
    contenders = {
        "uncached": lambda: generate_uncached(model, [0], new_tokens),
        "cached": lambda: list(generate(model, [[0]], new_tokens, Sampling(temperature=0))),
    }
    rows = measure(str(new_tokens), "generate", contenders, rounds)
    yield rows.assign(kv_computations=[kv_computations(model, work) for work in contenders.values()])


@torch.inference_mode()
def generate_uncached(model: Decoder, prompt: Sequence[int], new_tokens: int) -> list[int]:
    """The greedy text of `generate`, with the whole sequence processed again for every token."""
    tokens = torch.tensor([prompt], device=model.embedding.tokens.weight.device)
    for _ in range(new_tokens):
        logits = model.embedding.logits(model.read(tokens)[:, -1])
        tokens = torch.cat((tokens, logits.argmax(-1, keepdim=True)), 1)
    new: list[int] = tokens[0, len(prompt) :].tolist()
    return new


def kv_computations(model: Decoder, work: Callable[[], object]) -> int:
    """Count the tokens for which each layer computes a key, and with it a value, during `work`.

    Raises RuntimeError if the layers differ.
    """
    found: Counter[nn.Module] = Counter()

    def count(key: nn.Module, _inputs: object, keys: Tensor) -> None:
        found[key] += keys.shape[0] * keys.shape[1]

    layers = cast(list[GroupedQueryAttention], model.mixers)
    with ExitStack() as hooks:
        for layer in layers:
            hooks.enter_context(layer.key.register_forward_hook(count))
        work()
    counts = [found[layer.key] for layer in layers]
    if len(set(counts)) > 1:
        raise RuntimeError(f"layers computed different numbers of keys: {counts}")
    return counts[0]


def caching_finding(rows: pd.DataFrame) -> str:
    """The computations and the time that the cache saves."""
    before, after = rows.kv_computations
    return (
        f"{before:,} computations in each layer against {after:,}, {before / after:.1f} times fewer; "
        f"{ratios(rows, 'generate', 'cached')} times the speed"
    )
