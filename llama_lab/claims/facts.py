"""Figures of texts that need no training, computed from the models themselves."""

from collections.abc import Callable
from functools import partial

import torch

from llama_lab.api import build_model, cost, load_config
from llama_lab.model import Decoder
from llama_lab.model.attention import GroupedQueryAttention
from llama_lab.model.block import PreNorm, Serial
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


def rope_bound(*distances: int) -> torch.Tensor:
    """What bounds a score between tokens so far apart, with 64 dimensions (Su et al. 2021, section 3.4.3)."""
    phases = torch.tensor(distances)[:, None] * inverse_frequencies(64, 10_000.0, torch.device("cpu"))
    return torch.polar(torch.ones_like(phases), phases).cumsum(-1).abs().mean(-1)


def rope_bound_falls(*distances: int) -> float:
    """The share of steps from one distance to the next at which the bound falls."""
    return float((rope_bound(*distances).diff() < 0).float().mean())


def cache_gib(*overrides: str) -> float:
    """A KV cache of a whole context in 16 bits."""
    return (cost(load_config(overrides)).kv_bytes or 0) / 2**30


def kv_heads(*overrides: str) -> int:
    """Heads of keys and values."""
    mixer = model(*overrides, "model.n_layers=1").mixers[0]
    assert isinstance(mixer, GroupedQueryAttention)
    return mixer.n_kv_heads


def has_block(kind: type, arch: str) -> float:
    """1 if the blocks of a recipe are of a kind, else 0."""
    return float(all(isinstance(block, kind) for block in model(f"arch={arch}", "size=pico").blocks))


FACTS: dict[str, Callable[[], float]] = {
    "qkv_saved_by_4_kv_heads": partial(qkv_saved, 4),
    "qkv_saved_by_1_kv_head": partial(qkv_saved, 1),
    "rope_second_angle": partial(rope_angle, 1),
    "rope_last_angle": partial(rope_angle, 31),
    "rope_bound_falls_at_each_step": partial(rope_bound_falls, *range(251)),
    "rope_bound_falls_from_1_to_250": partial(rope_bound_falls, 1, 250),
    "rope_bound_falls_from_250_to_2048": partial(rope_bound_falls, 250, 2048),
    "third_matrix": third_matrix,
    "llama_7b_cache": partial(cache_gib, "arch=llama", "size=llama_7b"),
    "gpt2_is_prenorm": partial(has_block, PreNorm, "gpt2"),
    "bloom_is_serial": partial(has_block, Serial, "bloom"),
    "mistral_7b_kv_heads": partial(kv_heads, "arch=mistral", "size=mistral_7b"),
    "llama_7b_kv_heads": partial(kv_heads, "arch=llama", "size=llama_7b"),
    "llama2_7b_kv_heads": partial(kv_heads, "arch=llama2", "size=llama_7b"),
}
