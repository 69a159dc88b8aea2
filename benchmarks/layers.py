"""Parts of a layer: norms and feed-forwards, forward and backward, and causal attention, fused against written out."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llama_lab.api import load_config
from llama_lab.config.components import CONF_DIR, build
from llama_lab.devices.performance import CLEAR, peak_memory_bytes, reset_peak_memory
from llama_lab.evaluation.speed import inference
from llama_lab.model.attention import reference_attention
from llama_lab.model.norm import LayerNorm, RMSNorm

from .processes import process
from .rows import measure

Pass = tuple[Callable[[], Tensor], Sequence[Tensor]]
Work = Callable[[], object]
Shapes = Sequence[Sequence[int]]  # of queries, keys and values, `(B, H, T, Dh)`
Peaks = dict[tuple[str, str, str], int]  # bytes by size, direction and contender

FIRST = "relu"  # the feed-forward of 2017, without biases: the others are compared with it
SHAPES: Shapes = [(1, 4, length, 64) for length in (512, 1024, 2048, 4096, 8192)]


def layer_norm(norm: LayerNorm, x: Tensor) -> Tensor:
    """`norm(x)` for `x (..., dim)`, written out (Ba et al. 2016, eq. 4)."""
    centred = x - x.mean(-1, keepdim=True)
    y = centred * (centred.square().mean(-1, keepdim=True) + norm.eps).rsqrt() * norm.weight
    return y if norm.bias is None else y + norm.bias


def rms_norm(norm: RMSNorm, x: Tensor) -> Tensor:
    """`norm(x)` for `x (..., dim)`, written out (Zhang & Sennrich 2019, eq. 4)."""
    return x * (x.square().mean(-1, keepdim=True) + norm.eps).rsqrt() * norm.weight


# The functions of LayerNorm and RMSNorm that are compared with each other.
# Of models: PyTorch's kernels, or what `RMSNorm` puts together of them on a CPU.
KINDS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "written out": (layer_norm, rms_norm),
    "of models": (LayerNorm.forward, RMSNorm.forward),
}


def measure_norms(
    rounds: int, device: torch.device, dims: Sequence[int] = (256, 512, 1024, 2048, 4096), vectors: int = 2048
) -> Iterator[pd.DataFrame]:
    """Measure both norms of each kind at every width, on float32 vectors."""
    for dim in dims:
        x = torch.randn(vectors, dim, device=device, requires_grad=True)
        norms = (LayerNorm(dim).to(device), RMSNorm(dim).to(device))
        for kind, functions in KINDS.items():
            pairs = zip(norms, functions, strict=True)
            contenders = {f"{type(n).__name__} {kind}": (partial(f, n, x), [x, *n.parameters()]) for n, f in pairs}
            yield from measure_passes(str(dim), contenders, rounds)


def measure_feedforwards(
    rounds: int, device: torch.device, dim: int = 768, tokens: int = 512
) -> Iterator[pd.DataFrame]:
    """Measure every option of the config group `ffn`, on float32 vectors.

    As in the configs, gated options have two thirds of the hidden width, to a multiple of 8. If the width is a multiple
    of 24, all have exactly equal parameters, except for biases.
    """
    x = torch.randn(1, tokens, dim, device=device, requires_grad=True)
    layers = {option: feedforward(option, dim).to(device) for option in options()}
    contenders = {option: (partial(layer, x), [x, *layer.parameters()]) for option, layer in layers.items()}
    return measure_passes(str(dim), contenders, rounds)


def options() -> list[str]:
    """The options of the group `ffn`, starting with `FIRST`."""
    return [FIRST, *sorted({path.stem for path in (CONF_DIR / "ffn").glob("*.yaml")} - {FIRST})]


def feedforward(option: str, dim: int) -> nn.Module:
    """The feed-forward of `ffn=option` in a model of width `dim`, with mlp_ratio 4."""
    cfg = load_config([f"ffn={option}", f"model.dim={dim}", "size.mlp_ratio=4.0"]).model
    layer: nn.Module = build(cfg.ffn, "model.ffn")(dim=dim, hidden_dim=cfg.hidden_dim)
    return layer


def measure_passes(size: str, contenders: Mapping[str, Pass], rounds: int) -> Iterator[pd.DataFrame]:
    """Measure each forward pass, as in training, and the backward pass to the tensors beside it."""
    yield measure(size, "forward", {what: forward for what, (forward, _) in contenders.items()}, rounds)
    backwards = {what: backward(forward(), inputs) for what, (forward, inputs) in contenders.items()}
    yield measure(size, "backward", backwards, rounds)


def backward(output: Tensor, inputs: Sequence[Tensor]) -> Work:
    """A function that computes only the gradients of `inputs`, from a random gradient of `output`."""
    return partial(torch.autograd.grad, output, inputs, torch.randn_like(output), retain_graph=True)


def measure_attention(rounds: int, device: torch.device, shapes: Shapes = SHAPES) -> Iterator[pd.DataFrame]:
    """Measure both options of `model.attention.kernel` at every length; `both` is forward and backward.

    Time and memory exclude queries, keys, values, and the mask of the written-out kernel, which all layers of a model
    share. Float32 on a CPU, bfloat16 on a GPU. Peak memory is not measured on a macOS CPU.
    """
    peaks = measure_peaks(shapes, device)
    for size, direction, contenders in cases(shapes, device):
        rows = measure(size, direction, contenders, rounds)
        yield rows.assign(peak_bytes=[peaks.get((size, direction, what)) for what in contenders])


def cases(shapes: Shapes, device: torch.device) -> Iterator[tuple[str, str, dict[str, Work]]]:
    """(size, direction, contenders) of each measurement."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    for shape in shapes:
        length = shape[2]
        heads = [torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3)]
        mask = torch.full((length, length), float("-inf"), device=device).triu(1)
        yield str(length), "forward", {name: inference(work) for name, work in kernels(heads, mask).items()}
        yield str(length), "both", {name: partial(both, work, heads) for name, work in kernels(heads, mask).items()}


def kernels(heads: Sequence[Tensor], mask: Tensor) -> dict[str, Callable[[], Tensor]]:
    """Each kernel on query, key and value `(B, H, T, Dh)`; returns the same shape. mask: additive, `(T, T)`."""
    query, key, value = heads
    return {
        "written out": partial(reference_attention, query, key, value, mask),
        "fused": partial(F.scaled_dot_product_attention, query, key, value, is_causal=True),
    }


def both(work: Callable[[], Tensor], inputs: Sequence[Tensor]) -> None:
    """Forward and backward; the output serves as the gradient, since it costs nothing to create."""
    output = work()
    torch.autograd.grad(output, inputs, output.detach())


def measure_peaks(shapes: Shapes, device: torch.device) -> Peaks:
    """Peak bytes of each case above those in use before it; empty where the peak of a CPU cannot be reset.

    On a CPU this is resident memory, in a process of its own whose allocator returns each tensor to the system at once:
    otherwise memory freed by earlier calls would hide the peak of later ones.
    """
    if device.type == "cuda":
        return peaks_here(shapes, device)
    if not CLEAR.exists():
        return {}
    with process(MALLOC_MMAP_THRESHOLD_="65536") as child:  # bytes; by default glibc raises it dynamically
        return child.submit(peaks_here, shapes, device).result()


def peaks_here(shapes: Shapes, device: torch.device) -> Peaks:
    """`measure_peaks` in this process."""
    peaks: Peaks = {}
    for size, direction, contenders in cases(shapes, device):
        for what, work in contenders.items():
            work()  # loads libraries and starts threads
            reset_peak_memory(device)
            before = peak_memory_bytes(device)
            work()
            peaks[size, direction, what] = peak_memory_bytes(device) - before
    return peaks
