"""Generation with whole decoders: MHA, GQA and MQA, and with and without a KV cache."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn

from llama_lab.evaluation.speed import NEW_TOKENS, decoding
from llama_lab.model import Decoder, Sampling, generate
from llama_lab.model.attention import GroupedQueryAttention

from .measurement import Measurement, measure, ratios
from .subjects import Shape, build_decoder, compose


def measure_decoding(
    shape: Shape, batch_sizes: Sequence[int], contexts: Sequence[int], rounds: int, device: torch.device
) -> list[Measurement]:
    """Seconds per decoding step with MHA, GQA and MQA, at the end of each context, eager.

    The models differ only in key and value heads, so those with fewer heads are also slightly smaller.
    """
    models = {
        name.upper(): build_decoder(
            compose(
                *replace(shape, n_kv_heads=n_kv_heads).overrides(),
                f"attention={name}",
                f"model.max_seq_len={max(contexts)}",
            ),
            device,
        )
        for name, n_kv_heads in (("mha", shape.n_heads), ("gqa", shape.n_kv_heads), ("mqa", 1))
    }
    return [
        m
        for batch_size in batch_sizes
        for context in contexts
        for m in decoding_speeds(models, batch_size, context, rounds)
    ]


def decoding_speeds(models: dict[str, Decoder], batch_size: int, context: int, rounds: int) -> list[Measurement]:
    """Measure the models at one batch size and one context."""
    steps = min(NEW_TOKENS, context)
    contenders = {name: decoding(model, batch_size, context, steps) for name, model in models.items()}
    measurements = measure("decoding", f"{batch_size} x {context}", "decode", contenders, rounds)
    return [
        replace(
            m,
            timing=m.timing.divided_by(steps),
            tokens_per_second=batch_size * steps / m.timing.median,
            kv_cache_bytes=models[m.what].new_state(batch_size, context).nbytes,
        )
        for m in measurements
    ]


def decoding_finding(measurements: Sequence[Measurement]) -> str:
    """The speed of GQA and MQA relative to MHA, over batch sizes and contexts."""
    return ", ".join(f"{name} {ratios(measurements, name, 'decode')} times MHA's speed" for name in ("GQA", "MQA"))


def measure_caching(shape: Shape, new_tokens: int, rounds: int, device: torch.device) -> list[Measurement]:
    """Seconds to generate `new_tokens` greedily after a prompt of one token, with and without a KV cache, eager."""
    model = build_decoder(compose(*shape.overrides(), f"model.max_seq_len={new_tokens + 1}"), device)
    contenders = {
        "uncached": lambda: generate_uncached(model, [0], new_tokens),
        "cached": lambda: list(generate(model, [[0]], new_tokens, Sampling(temperature=0))),
    }
    counts = {name: kv_computations(model, work) for name, work in contenders.items()}
    return [
        replace(m, kv_computations=counts[m.what])
        for m in measure("caching", str(new_tokens), "generate", contenders, rounds)
    ]


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
    counts = [0] * len(model.mixers)

    def count(layer: int) -> Callable[[nn.Module, object, Tensor], None]:
        def hook(_module: nn.Module, _inputs: object, keys: Tensor) -> None:
            counts[layer] += keys.shape[0] * keys.shape[1]

        return hook

    layers = cast(list[GroupedQueryAttention], model.mixers)
    hooks = [layer.key.register_forward_hook(count(i)) for i, layer in enumerate(layers)]
    try:
        work()
    finally:
        for handle in hooks:
            handle.remove()
    if len(set(counts)) > 1:
        raise RuntimeError(f"layers computed different numbers of keys: {counts}")
    return counts[0]


def caching_finding(measurements: Sequence[Measurement]) -> str:
    """The computations and the time that the cache saves."""
    uncached, cached = ({m.what: m for m in measurements}[name] for name in ("uncached", "cached"))
    before, after = uncached.kv_computations, cached.kv_computations
    assert before is not None
    assert after is not None
    return (
        f"{before:,} computations in each layer against {after:,}, {before / after:.1f} times fewer; "
        f"{cached.speed_ratio:.2f} times the speed"
    )
