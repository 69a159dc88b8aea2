"""Kernels of a GPU: masks and biases through PyTorch's flex_attention, and the memory of the loss."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.profiler import ProfilerActivity, profile

from llama_lab.api import load_config
from llama_lab.config.components import build
from llama_lab.devices.performance import peak_memory_bytes, reset_peak_memory
from llama_lab.evaluation.speed import time_in_turn
from llama_lab.model.attention import reference_attention
from llama_lab.model.attention_context import CAUSAL, AttentionContext, MaskRule
from llama_lab.model.encoding import Position
from llama_lab.model.position import Alibi, Relative
from llama_lab.training.module import LanguageModel

from .decoders import BILLION, build_decoder
from .findings import Finding
from .layers import both

Score = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]  # (score, batch, head, query, key) to a new score

WRITTEN_OUT = "scaled_dot_product_attention_math"
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
    """Attention that is more than causal. mask_rule: which keys are seen; softcap: of scores; position: its bias."""

    position: Position
    mask_rule: MaskRule = CAUSAL
    softcap: float | None = None

    def masked(self, length: int, device: torch.device) -> Callable[..., Tensor]:
        """What `GroupedQueryAttention` does: the fused kernel with a mask, or the reference if scores are capped."""
        mask = AttentionContext(self.position, torch.arange(length, device=device)).mask(self.mask_rule)
        if self.softcap is None:
            return partial(with_mask, mask)
        return partial(reference_attention, mask=mask, softcap=self.softcap)

    def flex(self, length: int, device: torch.device, compiled: bool) -> Callable[..., Tensor]:
        """The same through flex_attention, which skips blocks of keys that no query sees."""

        def visible(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return self.mask_rule.sees(query, key)

        blocks = create_block_mask(visible, None, None, length, length, device=str(device))
        attend: Any = torch.compile(flex_attention, dynamic=False) if compiled else flex_attention
        return partial(attend, score_mod=self.change(torch.arange(length, device=device)), block_mask=blocks)

    def change(self, positions: Tensor) -> Score | None:
        """The change of a score that the variant makes; None for none."""
        if self.softcap is not None:
            return capping(self.softcap)
        bias = self.position.bias(positions[-1:], positions)  # of the last query: all distances, the largest first
        return None if bias is None else biasing(bias[:, 0].flip(-1).contiguous())


def capping(softcap: float) -> Score:
    """A function that soft-caps scores."""

    def capped(score: Tensor, _batch: Tensor, _head: Tensor, _query: Tensor, _key: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return capped


def biasing(by_distance: Tensor) -> Score:
    """A function that adds the bias `(H, T)` of its distance to a score."""

    def biased(score: Tensor, _batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return score + by_distance[head, (query - key).clamp(min=0)]

    return biased


def with_mask(mask: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """PyTorch's attention with a mask that is added to the scores."""
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask.type_as(query))


def variants(n_heads: int, window: int, device: torch.device) -> dict[str, Variant]:
    """Every kind of attention for which the model needs a mask, or the written-out reference."""
    relative = Relative(n_heads)
    nn.init.normal_(relative.table.weight)  # until a model initialises it, a table holds what memory holds
    return {
        f"window of {window}": Variant(Position(), MaskRule(window=window)),
        "ALiBi": Variant(Alibi(n_heads)),
        "relative bias": Variant(relative.to(device).requires_grad_(False)),
        "soft-cap": Variant(Position(), softcap=50.0),
    }


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
    length, on_gpu = shape[2], device.type == "cuda"  # elsewhere flex_attention has no backward pass
    dtype, pass_of = (torch.bfloat16, both) if on_gpu else (torch.float32, forward)
    heads = [torch.randn(*shape, device=device, dtype=dtype, requires_grad=on_gpu) for _ in range(3)]
    for name, variant in variants(shape[1], window, device).items():
        ways: dict[str, Callable[..., Tensor]] = {
            "causal": partial(F.scaled_dot_product_attention, is_causal=True),
            "flex": variant.flex(length, device, compiled),
            "masked": variant.masked(length, device),
        }
        error = float((ways["flex"](*heads) - ways["masked"](*heads)).detach().abs().max())
        yield Finding(f"{name}: largest difference of flex from our masked path", error, goal=0.02, at_most=True)
        timings = time_in_turn({way: partial(pass_of, partial(f, *heads), heads) for way, f in ways.items()}, rounds)
        share = variant.mask_rule.mean_keys(length) / CAUSAL.mean_keys(length)
        for way, goal in (("flex", 70), ("masked", None)):
            rate = 100 * share * timings["causal"].median / timings[way].median
            yield Finding(f"{name}: {way}, of the causal fused rate", rate, "%", goal)
        torch.compiler.reset()  # PyTorch compiles no function for more than a few cases
    yield from fused_kernels(device)


def forward(work: Callable[[], Tensor], _inputs: Sequence[Tensor]) -> None:
    """A forward pass."""
    work()


def fused_kernels(device: torch.device, length: int = 256) -> Iterator[Finding]:
    """Whether attention of the model runs a fused kernel, forward and backward, and not PyTorch's written-out one."""
    for name, overrides in FUSED.items():
        cfg = load_config(["size=pico", *overrides, f"model.max_seq_len={length}", "model.vocab_size=64"])
        model = build_decoder(cfg, device).train()
        tokens = torch.zeros(2, length, dtype=torch.long, device=device)
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            with torch.autocast(device.type, torch.bfloat16, enabled="float32" not in name):
                logits = model(tokens)
            logits.float().sum().backward()
        written_out = sum(event.count for event in profiler.key_averages() if WRITTEN_OUT in event.key)
        yield Finding(f"{name}: calls of written-out attention", written_out, goal=0, at_most=True)


def measure_loss(
    device: torch.device,
    overrides: Sequence[str] = (*BILLION, "model.n_layers=1"),
    sequences: int = 8,
    length: int = 2048,
) -> Iterator[Finding]:
    """Peak memory of a forward and backward pass of one layer and `LanguageModel.loss`, as training computes it.

    Beside parameters and gradients. It is compared with the logits in float32, of which a whole copy would be one.
    """
    cfg = load_config([*overrides, f"model.max_seq_len={length}"])
    model = build_decoder(cfg, device).train()
    module = LanguageModel(model, build(cfg.optim, "optim"), build(cfg.schedule, "schedule"), 1, bytes_per_token=1)
    tokens = torch.randint(model.vocab_size, (sequences, length + 1), device=device)
    taken = 0
    for _ in range(2):  # the first makes the gradients
        reset_peak_memory(device)
        before = torch.cuda.memory_allocated() if device.type == "cuda" else peak_memory_bytes(device)
        with torch.autocast(device.type, torch.bfloat16):
            _, objective = module.loss(tokens[:, :-1], tokens[:, 1:])
        objective.backward()  # type: ignore[no-untyped-call]
        taken = peak_memory_bytes(device) - before
    whole = 4 * sequences * length * model.vocab_size
    yield Finding("peak memory of the loss", taken / 1e9, "GB", note=f"float32 logits are {whole / 1e9:.3g} GB")
    yield Finding("peak memory of the loss over float32 logits", taken / whole, goal=1, at_most=True)
