"""Kernels of a GPU: masks and biases through PyTorch's flex_attention, and the memory of the loss."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.optim import SGD

from llama_lab.devices.memory import peak_memory_bytes, reset_peak_memory
from llama_lab.model import Decoder
from llama_lab.model.attention import reference_attention
from llama_lab.model.layout import Layout
from llama_lab.model.mask import CAUSAL, Mask
from llama_lab.model.position import Alibi, Position, Relative
from llama_lab.timing import time_in_turn
from llama_lab.training.module import LanguageModel

from .decoders import build_decoder, compose
from .findings import Finding
from .gpu_decoding import calls
from .gpu_memory import allocated, free
from .layers import both

Score = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]  # (score, batch, head, query, key) to a new score


FUSED = {
    "causal": ("arch=llama",),
    "causal, shared heads": ("arch=llama3", "size.n_kv_heads=2"),
    "causal, shared heads, float32": ("arch=llama3", "size.n_kv_heads=2"),
    "window, shared heads": ("arch=llama3", "size.n_kv_heads=2", "model.attention.window=100"),
    "ALiBi": ("arch=bloom",),
    "relative bias": ("arch=llama", "position=relative"),
}


@dataclass(frozen=True)
class Variant:
    """Attention that is more than causal. mask: which keys are seen; softcap: of scores; position: its bias."""

    position: Position
    mask: Mask = CAUSAL
    softcap: float | None = None


def measure_attention(
    device: torch.device,
    shape: Sequence[int] = (4, 16, 4096, 128),
    window: int = 1024,
    compiled: bool = True,
    rounds: int = 5,
) -> Iterator[Finding]:
    """Rates of flex_attention, forward and backward, over that of the causal fused kernel, and its outputs' errors.

    shape: of queries, keys and values, `(B, H, T, Dh)`, in bf16 on a GPU. A rate counts visible keys alone, so that a
    window has to be as much faster as it computes less. The model's own path adds a mask to the scores.
    """
    _, n_heads, length, _ = shape
    on_gpu = device.type == "cuda"  # elsewhere flex_attention has no backward pass
    dtype, run = (torch.bfloat16, both) if on_gpu else (torch.float32, forward)
    heads = [torch.randn(*shape, device=device, dtype=dtype, requires_grad=on_gpu) for _ in range(3)]
    for name, variant in variants(n_heads, window, device).items():
        flex, masked = flex_path(variant, length, device, compiled), masked_path(variant, length, device)
        error = float((flex(*heads) - masked(*heads)).detach().abs().max())
        yield Finding(f"{name}: largest difference of flex from our masked path", error, goal=0.02, at_most=True)
        causal = partial(F.scaled_dot_product_attention, is_causal=True)
        ways: dict[str, Callable[..., Tensor]] = {"causal": causal, "flex": flex, "masked": masked}
        timings = time_in_turn({way: partial(run, partial(work, *heads), heads) for way, work in ways.items()}, rounds)
        share = variant.mask.mean_keys(length) / CAUSAL.mean_keys(length)
        for way, goal in (("flex", 70), ("masked", None)):
            rate = 100 * share * timings["causal"].median / timings[way].median
            yield Finding(f"{name}: {way}, of the causal fused rate", rate, "%", goal)
        free()  # PyTorch compiles no function for more than a few cases
    yield from fused_kernels(device)


def fused_kernels(device: torch.device, length: int = 256) -> Iterator[Finding]:
    """Whether attention of the model runs a fused kernel, forward and backward, and not PyTorch's written-out one."""
    for name, overrides in FUSED.items():
        cfg = compose("size=pico", *overrides, f"model.max_seq_len={length}", "model.vocab_size=64")
        model = build_decoder(cfg, device).train()
        tokens = torch.zeros(2, length, dtype=torch.long, device=device)
        mixed = torch.autocast(device.type, torch.bfloat16, enabled="float32" not in name)

        def work(model: Decoder = model, tokens: Tensor = tokens, mixed: torch.autocast = mixed) -> None:
            with mixed:
                logits = model(tokens)
            logits.float().sum().backward()

        written_out = sum(n for call, n in calls(work).items() if "scaled_dot_product_attention_math" in call)
        yield Finding(f"{name}: no written-out attention", written_out == 0, goal=True)


def forward(work: Callable[[], Tensor], _inputs: Sequence[Tensor]) -> None:
    """A forward pass."""
    work()


def variants(n_heads: int, window: int, device: torch.device) -> dict[str, Variant]:
    """Every kind of attention for which the model needs a mask, or the written-out reference."""
    none = Position()
    return {
        f"window of {window}": Variant(none, Mask(window=window)),
        "ALiBi": Variant(Alibi(n_heads)),
        "relative bias": Variant(Relative(n_heads).to(device).requires_grad_(False)),
        "soft-cap": Variant(none, softcap=50.0),
    }


def masked_path(variant: Variant, length: int, device: torch.device) -> Callable[..., Tensor]:
    """What `GroupedQueryAttention` does: the fused kernel with a mask, or the reference if scores are capped."""
    positions = torch.arange(length, device=device)
    mask = Layout(variant.position, positions).mask(variant.mask)
    if variant.softcap is not None:
        return lambda q, k, v: reference_attention(q, k, v, mask, variant.softcap)
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=mask.type_as(q))


def flex_path(variant: Variant, length: int, device: torch.device, compiled: bool) -> Callable[..., Tensor]:
    """The same through flex_attention, which skips blocks of keys that no query sees."""

    def visible(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return variant.mask.sees(query, key)

    blocks = create_block_mask(visible, None, None, length, length, device=str(device))
    attend: Any = torch.compile(flex_attention, dynamic=False) if compiled else flex_attention
    return partial(attend, score_mod=score_of(variant, length, device), block_mask=blocks)


def score_of(variant: Variant, length: int, device: torch.device) -> Score | None:
    """The change of a score that the variant makes; None for none."""
    if variant.softcap is not None:
        cap = variant.softcap
        return lambda score, _batch, _head, _query, _key: cap * torch.tanh(score / cap)
    positions = torch.arange(length, device=device)
    bias = variant.position.bias(positions[-1:], positions)  # of the last query: all distances, the largest first
    if bias is None:
        return None
    by_distance = bias[:, 0].flip(-1).contiguous()  # `(H, T)`
    return lambda score, _batch, head, query, key: score + by_distance[head, (query - key).clamp(min=0)]


def measure_loss(
    device: torch.device,
    overrides: Sequence[str] = ("arch=llama3", "size=llama3_1b", "embedding=tied", "model.n_layers=1"),
    sequences: int = 8,
    length: int = 2048,
) -> Iterator[Finding]:
    """Peak memory of a forward and backward pass of one layer and `LanguageModel.loss`, as training computes it.

    Beside parameters and gradients. It is compared with the logits in float32, of which a whole copy would be one.
    """
    model = build_decoder(compose(*overrides, f"model.max_seq_len={length}"), device).train()
    module = LanguageModel(model, lambda m: SGD(m.parameters()), lambda step, steps: 1.0, steps=1, bytes_per_token=1)
    tokens = torch.randint(model.vocab_size, (sequences, length + 1), device=device)

    def work() -> None:
        with torch.autocast(device.type, torch.bfloat16):
            _, objective = module.loss(tokens[:, :-1], tokens[:, 1:])
        objective.backward()  # type: ignore[no-untyped-call]

    work()  # makes the gradients
    reset_peak_memory(device)
    before = allocated(device) if device.type == "cuda" else peak_memory_bytes(device)
    work()
    peak = peak_memory_bytes(device) - before
    whole = 4 * sequences * length * model.vocab_size
    yield Finding("peak memory of the loss", peak / 1e9, "GB", note=f"float32 logits are {whole / 1e9:.3g} GB")
    yield Finding("peak memory of the loss over float32 logits", peak / whole, goal=1, at_most=True)
