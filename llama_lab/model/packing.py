"""Linear maps as a single token wants them, while text is generated: those of one input as one product.

A token's products are limited by what each call costs and by reading the weights, so fewer and larger ones are faster,
and so are weights that are read along their longer side. Training has many tokens per product, and gains nothing.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Pack(NamedTuple):
    """Weights `(sum of out, in)` and biases `(sum of out,)` of several maps, and the width `out` of each."""

    weight: Tensor
    bias: Tensor | None
    widths: list[int]


def together(x: Tensor, *maps: nn.Linear) -> tuple[Tensor, ...]:
    """Each of `maps` of `x (..., in)`: as one product if they are `packed`."""
    pack: Pack | None = vars(maps[0]).get("pack")
    # The pack has no gradients, autocast would convert it again for each token, and the compiler joins what it can.
    if pack is None or torch.is_grad_enabled() or torch.is_autocast_enabled(x.device.type):
        return tuple(linear(x) for linear in maps)
    return F.linear(x, pack.weight, pack.bias).split_with_sizes(pack.widths, -1)


@contextmanager
def packed(model: nn.Module) -> Iterator[None]:
    """Inside, the maps that a module names in its `packs` are one product where it calls them `together`.

    Their parameters become views of the pack, and stay that, so that it takes no memory of its own. On a CPU, a pack
    with more rows than columns is kept by columns while inside.
    """
    packs = []
    for module in model.modules():
        maps = [getattr(module, name) for name in getattr(module, "packs", ())]
        if maps and all(is_plain(linear) for linear in maps) and "pack" not in vars(maps[0]):
            maps[0].pack = pack_maps(maps)
            packs.append(maps)
    try:
        yield
    finally:
        for maps in packs:
            del maps[0].pack
            weight_by_rows(maps)


def is_plain(linear: nn.Module) -> bool:
    """Whether a call of `linear` is a product and nothing else: a user's subclass or hook would not be called."""
    return type(linear) is nn.Linear and not linear._forward_hooks and not linear._forward_pre_hooks


@torch.inference_mode(False)  # else the parameters could never be trained again
@torch.no_grad()
def pack_maps(maps: list[nn.Linear]) -> Pack:
    """A pack whose parts are the parameters of `maps`; missing biases are zeros."""
    weight = weight_by_rows(maps)
    if is_faster_by_columns(weight):
        weight = weight.t().contiguous().t()
        become_views([linear.weight for linear in maps], weight)
    if all(linear.bias is None for linear in maps):
        bias = None
    else:
        zeros = [linear.weight.new_zeros(linear.out_features) for linear in maps]
        bias = join([zero if linear.bias is None else linear.bias for linear, zero in zip(maps, zeros, strict=True)])
    return Pack(weight, bias, [linear.out_features for linear in maps])


def is_faster_by_columns(weight: Tensor) -> bool:
    """Whether a token's product with `weight (out, in)` is faster if it is kept by columns.

    That of PyTorch's library for CPUs is, 1.1 to 4 times as fast for widths of 512 to 8192 and up to 16 tokens, where
    the rows are shorter than the columns; in bfloat16, or on a GPU, it makes no difference or is slower.
    """
    return weight.is_cpu and weight.dtype == torch.float32 and weight.shape[0] > weight.shape[1]


@torch.inference_mode(False)
@torch.no_grad()
def weight_by_rows(maps: list[nn.Linear]) -> Tensor:
    """The weights of all `maps`, contiguous, and they its views."""
    return join([linear.weight for linear in maps])


def join(tensors: list[Tensor]) -> Tensor:
    """The rows of all `tensors`, which become views of it, unless they have been since an earlier time."""
    first, shape = tensors[0], (sum(map(len, tensors)), *tensors[0].shape[1:])
    ends = [tensor.data_ptr() + tensor.nbytes for tensor in tensors]
    same = {tensor.untyped_storage().data_ptr() for tensor in tensors} == {first.untyped_storage().data_ptr()}
    if same and first.is_contiguous() and [tensor.data_ptr() for tensor in tensors[1:]] == ends[:-1]:
        return first.detach().as_strided(shape, first.stride())
    whole = torch.cat(tensors)
    become_views(tensors, whole)
    return whole


def become_views(tensors: list[Tensor], whole: Tensor) -> None:
    """Make `tensors` the rows of `whole`, one after the other."""
    for tensor, part in zip(tensors, torch.split(whole, [len(t) for t in tensors]), strict=True):
        tensor.data = part
