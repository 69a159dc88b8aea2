"""Figures of texts that need no training, computed from the models themselves."""

from collections.abc import Callable

import torch

from llama_lab.api import build_model, cost, load_config
from llama_lab.model import Decoder, block
from llama_lab.model.attention import GroupedQueryAttention
from llama_lab.model.cost import count
from llama_lab.model.position import inverse_frequencies


def model(*overrides: str) -> Decoder:
    """A model that takes no memory."""
    with torch.device("meta"):
        return build_model(load_config(overrides), eot_id=0)


def qkv_saved(kv_heads: int) -> float:
    """The share of the parameters of queries, keys and values that fewer of 12 kv heads save, at width 768."""
    sizes = ("arch=llama", "model.dim=768", "model.n_heads=12", "model.n_layers=1")
    full, fewer = (
        sum(count(mixer.get_submodule(name)) for name in ("query", "key", "value"))
        for n in (12, kv_heads)
        for mixer in model(*sizes, "attention=gqa", f"model.n_kv_heads={n}").mixers
    )
    return 1 - fewer / full


def third_matrix() -> float:
    """What a gate adds to a feed-forward of the same width, as a share."""
    one = ("arch=llama", "model.n_layers=1", "model.hidden_dim=256")
    plain, gated = (count(model(*one, f"ffn={ffn}").blocks[0].get_submodule("ffn")) for ffn in ("silu", "swiglu"))
    return gated / plain - 1


def rope_angle(pair: int) -> float:
    """The angle, in radians, by which RoPE turns a pair of 64 dimensions from one position to the next."""
    return float(inverse_frequencies(64, 10_000.0, torch.device("cpu"))[pair])


def rope_bound_falls(first: int, last: int, step: int) -> float:
    """At what share of steps from one distance to the next, farther by `step` tokens, RoPE's bound on scores falls.

    Of 64 dimensions (Su et al. 2021, section 3.4.3).
    """
    phases = torch.arange(first, last + 1, step)[:, None] * inverse_frequencies(64, 10_000.0, torch.device("cpu"))
    bounds = torch.polar(torch.ones_like(phases), phases).cumsum(-1).abs().mean(-1)
    return float((bounds.diff() < 0).float().mean())


def cache_gib(*overrides: str) -> float:
    """A KV cache of a whole context in 16 bits."""
    return (cost(load_config(overrides)).kv_bytes or 0) / 2**30


def kv_heads(*overrides: str) -> int:
    """Heads of keys and values."""
    mixer = model(*overrides, "model.n_layers=1").mixers[0]
    assert isinstance(mixer, GroupedQueryAttention)
    return mixer.n_kv_heads


def has_block(kind: str, arch: str) -> float:
    """1 if the blocks of a recipe are of a class, else 0."""
    return float(all(isinstance(one, getattr(block, kind)) for one in model(f"arch={arch}", "size=pico").blocks))


FACTS: dict[str, Callable[..., float]] = {
    one.__name__: one for one in (qkv_saved, third_matrix, rope_angle, rope_bound_falls, cache_gib, kv_heads, has_block)
}
