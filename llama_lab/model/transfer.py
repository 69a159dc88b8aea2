"""Copy weights between decoders whose names and shapes partly agree."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from .attention import GroupedQueryAttention
from .decoder import Decoder
from .encoder_decoder import CrossAttention
from .init import KV_HEADS
from .position import Learned

Grouped = GroupedQueryAttention | CrossAttention  # whose query heads share kv heads
# Of these, a row belongs to a token: a vocabulary may be padded to another number of rows.
TOKEN_ROWS = ("embedding.tokens.weight", "embedding.head.weight", "embedding.head.bias")


@dataclass(frozen=True)
class Transfer:
    """The outcome for every tensor of source and target, by name.

    taken: copied. pooled: copied with fewer key and value heads. rows: only the first rows were copied. anew: target
    tensors that keep their initial values. left: unused source tensors. share: of the target's parameters that were
    copied.
    """

    taken: tuple[str, ...]
    pooled: tuple[str, ...]
    rows: tuple[str, ...]
    anew: tuple[str, ...]
    left: tuple[str, ...]
    share: float


@torch.no_grad()
def transfer(source: Decoder, target: Decoder, kv_heads: str = "mean", experts: str | None = None) -> Transfer:
    """Copy the weights of `source` into those of `target` with the same name and shape; others keep their values.

    Key and value heads of which `target` has fewer are pooled: see `pool_heads`. Where it has experts and the source
    one feed-forward of their width, `experts` says how these start: as "copies" (Komatsuzaki et al. 2023, section 3),
    or "random"; None is refused by a ValueError. Tables of tokens and of learned
    positions share their first rows. On the meta device nothing is copied, and the answer is the same.
    """
    theirs = source.state_dict(keep_vars=True)
    pooled = pool_heads(source, target, kv_heads)
    dense = dense_names(source, target)
    if dense and experts is None:
        raise ValueError("init_experts=null: the source has no experts; start them as copies, or at random")
    origins = dense if experts == "copies" else {}
    tables = [f"{name}.table.weight" for name, module in target.named_modules() if isinstance(module, Learned)]
    found: dict[str, list[str]] = {"taken": [], "pooled": [], "rows": [], "anew": []}
    own, used, shared = first_names(target), set[int](), 0
    for name, tensor in own.items():
        origin = origins.get(name, name)
        value = pooled.get(name, theirs.get(origin))
        fate = "pooled" if name in pooled else "taken"
        if value is not None and name in origins:
            value = value.expand_as(tensor)
        elif value is not None and value.shape != tensor.shape:
            by_row = name in (*TOKEN_ROWS, *tables) and value.shape[1:] == tensor.shape[1:]
            rows = min(len(value), len(tensor)) if by_row else 0
            value, tensor, fate = value[:rows] if rows else None, tensor[:rows], "rows"
        if value is None:
            found["anew"].append(name)
            continue
        found[fate].append(name)
        used.add(id(theirs[origin]))
        shared += tensor.numel()
        tensor.copy_(value + gain_offset(source, origin) - gain_offset(target, name))
    left = [name for name, tensor in first_names(source).items() if id(tensor) not in used]
    share = shared / sum(tensor.numel() for tensor in own.values())
    return Transfer(**{fate: tuple(names) for fate, names in found.items()}, left=tuple(left), share=share)


def pool_heads(source: Decoder, target: Decoder, kv_heads: str) -> dict[str, Tensor]:
    """Key and value projections of `source`, pooled to the number of heads in `target`, where these are fewer.

    Each pooled head replaces the group of heads whose queries it will serve: as their mean ("mean",
    Ainslie et al. 2023, section 2.1), or the first of them ("first"); "random" pools none. Heads are pooled as wholes:
    rotary positions turn every head alike, so that the mean of rotated keys is the rotated mean.
    """
    if kv_heads not in KV_HEADS:
        raise ValueError(f"init_kv_heads={kv_heads}: unknown; choose {', '.join(KV_HEADS[:-1])} or {KV_HEADS[-1]}")
    pooled: dict[str, Tensor] = {}
    for path, (theirs, ours) in fewer_heads(source, target).items() if kv_heads != "random" else ():
        for name, tensor in theirs.state_dict().items():
            per_head = len(tensor) == theirs.n_kv_heads * theirs.head_dim
            if per_head and re.match(r"(convs\.)?(key|value)\.|key_norm\.", name):
                shape = (ours.n_kv_heads, -1, theirs.head_dim, *tensor.shape[1:])  # (Hkv, H / Hkv, Dh, D)
                groups = tensor.float().view(shape)
                heads = groups.mean(1) if kv_heads == "mean" else groups[:, 0]
                pooled[f"{path}.{name}"] = heads.flatten(0, 1)
    return pooled


def fewer_heads(source: Decoder, target: Decoder) -> dict[str, tuple[Grouped, Grouped]]:
    """By name, attention of both with the same query heads, where groups of the source's kv heads become the target's.

    In all towers, and to a source.
    """
    modules, found = dict(source.named_modules()), {}
    for name, ours in target.named_modules():
        theirs = modules.get(name)
        if isinstance(theirs, Grouped) and isinstance(ours, Grouped):
            alike = (theirs.n_heads, theirs.head_dim) == (ours.n_heads, ours.head_dim)
            if alike and theirs.n_kv_heads > ours.n_kv_heads and theirs.n_kv_heads % ours.n_kv_heads == 0:
                found[name] = theirs, ours
    return found


def dense_names(source: Decoder, target: Decoder) -> dict[str, str]:
    """The weights of the source's feed-forwards by those of experts in `target` that have their shapes."""
    theirs, found = source.state_dict(), {}
    for name, tensor in target.state_dict().items():
        origin = name.replace(".ffn.experts.", ".ffn.")
        if origin != name and origin in theirs and theirs[origin].shape == tensor.shape[1:]:
            found[name] = origin
    return found


def first_names(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers of a checkpoint; tied ones under their first name only."""
    names: dict[int, str] = {}
    tensors = model.state_dict(keep_vars=True)
    for name, tensor in tensors.items():
        names.setdefault(id(tensor), name)
    return {name: tensors[name] for name in names.values()}


def gain_offset(model: nn.Module, name: str) -> float:
    """What a norm adds to the gain that it stores: see `RMSNorm.unit_offset`."""
    module, _, kind = name.rpartition(".")
    return 1.0 if kind == "weight" and getattr(model.get_submodule(module), "unit_offset", False) else 0.0


def patterns(names: Iterable[str], n_layers: int) -> list[str]:
    """Names in their order, one for all layers: `blocks.*.ffn.up.weight`, or `blocks.0-2.ffn.up.weight` for some."""
    layers: dict[str, list[int]] = {}
    for name in names:
        block = re.fullmatch(r"(encoder\.)?blocks\.(\d+)\.(.+)", name)
        pattern = f"{block[1] or ''}blocks.{{}}.{block[3]}" if block else name
        layers.setdefault(pattern, []).extend([int(block[2])] if block else [])
    return [
        pattern.format("*" if len(found) == n_layers else ranges(found)) if found else pattern
        for pattern, found in layers.items()
    ]


def ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers: `0-2,5`."""
    starts = [n for before, n in pairwise((-2, *numbers)) if n != before + 1]
    ends = [n for n, after in pairwise((*numbers, -2)) if after != n + 1]
    return ",".join(f"{a}-{b}" if a < b else f"{a}" for a, b in zip(starts, ends, strict=True))
