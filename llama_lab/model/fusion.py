"""Prepare a model for decoding, from outside: linear layers with the same input are fused into one product.

Products with a single token are limited by call overhead and by reading the weights: fewer, larger ones are faster, and
so are weights stored along their longer side. Training, with many tokens per product, gains nothing.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .embedding import is_plain
from .encoder_decoder import CrossAttention

OF_ONE_INPUT = (("query", "key", "value"), ("query", "latent"), ("gate", "up"), ("up",), ("head",))
"""The maps of one input in attention, feed-forwards and embedding, by name; the first that a module of ours has."""


class Fusion:
    """Fuses the linear layers `names` of a module: the first call computes the product of all, later ones its slices.

    Functions take the place of the layers, which remain submodules: a call of a module takes longer.
    """

    def __init__(self, module: nn.Module, names: Sequence[str]) -> None:
        self._module, self._layers = module, {name: getattr(module, name) for name in names}
        layers = list(self._layers.values())
        self._weight = join([layer.weight for layer in layers], for_token=True)
        biases = [m.weight.new_zeros(m.out_features) if m.bias is None else m.bias.detach() for m in layers]
        self._bias = None if all(m.bias is None for m in layers) else torch.cat(biases)
        self._widths = [layer.out_features for layer in layers]
        self._input: Tensor | None = None
        self._outputs: tuple[Tensor, ...] = ()
        vars(module).update({name: self._part(number, self._layers[name]) for number, name in enumerate(names)})

    def undo(self) -> None:
        """Restore the layers."""
        for name in self._layers:
            del vars(self._module)[name]
        join([layer.weight for layer in self._layers.values()])

    def _part(self, number: int, layer: nn.Linear) -> Callable[[Tensor], Tensor]:
        def call(x: Tensor) -> Tensor:
            if number and x is self._input:
                return self._outputs[number]
            # A fusion has no gradients, and autocast would convert it again for each token.
            if torch.is_grad_enabled() or torch.is_autocast_enabled(x.device.type):
                self._input = None
                return layer(x)  # type: ignore[no-any-return]
            self._input = x
            self._outputs = F.linear(x, self._weight, self._bias).split_with_sizes(self._widths, -1)
            return self._outputs[number]

        return call


@contextmanager
def fused(model: nn.Module) -> Iterator[None]:
    """Context manager: fuse the layers of OF_ONE_INPUT in each of our modules; users' classes are left alone.

    Parameters become, and stay, views of the fused weight, which so takes no extra memory. On a CPU, a weight with more
    rows than columns is stored by columns inside.
    """
    fusions = [Fusion(module, names) for module in model.modules() if (names := layers_of_one_input(module))]
    try:
        yield
    finally:
        for fusion in fusions:
            fusion.undo()


def layers_of_one_input(module: nn.Module) -> Sequence[str]:
    """Names of the layers of a module that can be fused; none for a user's class, with hooks, or if already fused."""
    if not type(module).__module__.startswith(f"{__package__}."):
        return ()
    if isinstance(module, CrossAttention):  # while it decodes, of these only the query has an input
        return ()
    names = next((names for names in OF_ONE_INPUT if all(hasattr(module, name) for name in names)), ())
    return names if all(name not in vars(module) and is_plain(getattr(module, name)) for name in names) else ()


@torch.inference_mode(False)  # else the parameters could never be trained again
@torch.no_grad()
def join(tensors: list[Tensor], for_token: bool = False) -> Tensor:
    """Concatenate `tensors` along the rows; they become views of the result, unless they already are.

    for_token: store by columns where a single token's product is faster that way: 1.1 to 4 times as fast on a CPU in
    float32, for widths of 512 to 8192, up to 16 tokens, and more rows than columns; elsewhere no faster, or slower.
    """
    first, shape = tensors[0], (sum(map(len, tensors)), *tensors[0].shape[1:])
    ends = [tensor.data_ptr() + tensor.nbytes for tensor in tensors]
    same = {tensor.untyped_storage().data_ptr() for tensor in tensors} == {first.untyped_storage().data_ptr()}
    joined = same and first.is_contiguous() and [tensor.data_ptr() for tensor in tensors[1:]] == ends[:-1]
    whole = first.detach().as_strided(shape, first.stride()) if joined else torch.cat(tensors)
    by_columns = for_token and whole.is_cpu and whole.dtype == torch.float32 and whole.shape[0] > whole.shape[1]
    if by_columns:
        whole = whole.t().contiguous().t()
    if by_columns or not joined:
        for tensor, part in zip(tensors, torch.split(whole, [len(t) for t in tensors]), strict=True):
            tensor.data = part
    return whole


class SummedProducts(TorchFunctionMode):
    """Context manager: computes `F.linear` of `x (..., 1, in)` as an elementwise product and a sum.

    For the compiled decoding step on a CPU at batch 1: the compiler turns the sum into a fused loop on all cores, while
    `F.linear` is left to the math library, on one core. Without this, a step of `python -m benchmarks decode` takes 1.3
    times as long on two cores, and 1.2 times on one (best of 360, busy x86-64, torch 2.13.0, 2026-11-22).
    """

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Replace `F.linear`; call any other function."""
        if function is not F.linear:
            return function(*args, **(kwargs or {}))
        x, weight, bias = args
        y = (x.unsqueeze(-2) * weight).sum(-1)
        return y if bias is None else y + bias
