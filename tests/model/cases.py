"""Models that tests look at from several sides, and a text that is read with a state."""

from functools import cache
from typing import Any

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn

from llama_lab.model import Decoder
from llama_lab.model.mixer import Mixer
from tests.composing import compose_config, softmaxes, written

# The keys of `model` that each group's options set: the component, and the size that belongs to it.
GROUPS = {name: [name] for name in ("norm", "block", "position", "attention", "ffn", "embedding", "init")}
GROUPS["attention"].append("n_kv_heads")
GROUPS["ffn"].append("hidden_dim")
LENGTH = 24
FOUR = ("model.n_layers=4", "attention=gqa")
WINDOW = ("attention=gqa", "model.attention.window=5")
PATTERNS = {
    "global": (*FOUR, "model.attention.window=5", "pattern=global_every_2nd"),
    "theta by kind": (*FOUR, "model.attention.window=5", "pattern=global_every_6th"),
    "nope": (*FOUR, "pattern=nope_every_4th"),
    "nope global": (*FOUR, "model.attention.window=5", "pattern=nope_global_every_4th"),
    "biases by layer": (*FOUR, "position=alibi", "+pattern.a={at: '::3', position: relative}"),
    "explicit": (*FOUR, "+pattern.a={at: [0,2], n_kv_heads: 1, ffn: gelu, norm: layernorm}"),
    "blocks": (*FOUR, "+pattern.a={at: 1, block: parallel}", "+pattern.b={at: [0, -1], hidden_dim: 24}"),
}
VARIANTS = {
    "plain": ("attention=gqa",),
    "window": WINDOW,
    "window of 1": ("attention=mqa", "model.attention.window=1"),
    "global every other": (*WINDOW, "pattern=global_every_2nd"),
    "chunk": ("attention=gqa", "model.attention.chunk=5"),
    "reference": (*WINDOW, "model.attention.kernel=reference"),
    "gemma2": ("attention=gqa_gemma2",),
    "qk norm": ("attention=mha_qk_norm",),
    "gate and values": ("attention=gqa", "model.attention.gate=head", "model.attention.value_residual=learned"),
    "sinks": (*WINDOW, "model.attention.sinks=true"),
    "convolutions": ("attention=gqa", "model.attention.conv=4"),
    "convolutions in a window": (*WINDOW, "model.attention.conv=3", "model.attention.qk_norm=projection"),
    "temperature": ("attention=gqa_step_temperature", "model.attention.temperature.step=4"),
    "scalars": (
        *("attention=mha_log_temperature", "model.attention.window=5", "model.attention.scale=0.2"),
        *("model.attention.clip_qkv=1", "model.attention.qk_norm=head", "model.attention.qk_gain=heads"),
        *("model.attention.qk_norm_rotated=true", "model.block.residual_scale=0.4", "model.embedding.logit_scale=0.5"),
    ),
}
RECURRENT = {
    "linear": ("attention=linear",),
    "retnet": (
        "attention=linear",
        *(f"model.attention.{one}" for one in ("normalise=false", "decay=retnet", "conv=2")),
    ),
    "gated delta": ("attention=gated_delta", "model.attention.key_heads=2", "model.attention.value_dim=5"),
    "kimi delta": ("attention=kimi_delta", "model.attention.negative=true"),
    "mamba2": ("attention=mamba2", "model.attention.n_groups=2"),
    "mixer only": ("attention=mamba2", "block=mixer_only"),
    "conv": ("attention=conv", "model.attention.bias=true"),
    "hybrid, 1 in 4": ("model.n_layers=4", "attention=gated_delta", "pattern=attention_every_4th"),
    "hybrid": (*FOUR, "+pattern.state={at: '::2', attention: gated_delta, position: none, block: mixer_only}"),
}
ON_NONE = {name: keys if name == "hybrid" else (*keys, "position=none") for name, keys in RECURRENT.items()}


composed = cache(compose_config)


def recipe(arch: str) -> DictConfig:
    return composed("size=pico", f"arch={arch}")


def switched(arch: str, group: str, option: str) -> DictConfig:
    """What `arch=<arch> <group>=<option>` composes; faster; test_recipes.py shows that it is that."""
    if group == "block" and recipe(arch).model.ffn is None:  # it comes back with another block
        return composed("size=pico", f"arch={arch}", f"block={option}").copy()
    cfg, body = recipe(arch).copy(), written(group, option)
    if group not in body:
        body = OmegaConf.create({group: body})
    for key in body:
        OmegaConf.update(cfg.model, key, body._get_node(key), merge=False)
    is_added = cfg.model.position._target_.endswith(("Learned", "Sinusoidal"))
    if group == "attention" and option not in softmaxes() and not is_added:  # they would ignore it
        cfg.model.position = written("position", "none")
    return cfg


@torch.no_grad()
def in_pieces(model: Decoder, tokens: Tensor, sizes: list[int], dtype: torch.dtype | None = None) -> Tensor:
    """Logits of `tokens`, read with a state in pieces of these sizes and then one by one."""
    batch_size, length = tokens.shape
    state = model.new_state(batch_size, length, dtype)
    pieces = tokens.split([*sizes, *[1] * (length - sum(sizes))], 1)
    logits = torch.cat([model(piece, state) for piece in pieces], 1)
    assert state.lengths.tolist() == [length] * batch_size
    return logits


def model_with(*overrides: str, device: str = "cpu", **components: Any) -> Decoder:
    """A tiny decoder with components of a user's own."""
    cfg = compose_config("size=pico", *overrides)
    with torch.device(device):
        model: Decoder = instantiate(cfg.model, vocab_size=97, **components)
    return model.eval()


@torch.no_grad()
def copy_attention(own: Mixer, copied: nn.MultiheadAttention) -> None:
    """Give one of PyTorch's attentions the weights of ours."""
    maps = (own.query, own.key, own.value)
    copied.in_proj_weight.copy_(torch.cat([one.weight for one in maps]))
    copied.in_proj_bias.copy_(torch.cat([one.bias for one in maps]))
    copied.out_proj.load_state_dict(own.output.state_dict())
