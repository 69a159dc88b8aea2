"""Checks before training, to fail within seconds: memory, and whether a user's components work."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from llama_lab.config.components import build, build_model, model_cost, users_frame, users_method, users_targets
from llama_lab.devices.hardware import Hardware
from llama_lab.devices.performance import device_memory
from llama_lab.model import Decoder
from llama_lab.model.attention_context import MaskRule
from llama_lab.model.cost import count
from llama_lab.model.generate import prefill
from llama_lab.model.state import DecoderState
from llama_lab.util.errors import ConfigError, first_line
from llama_lab.util.formatting import in_bytes

from .run import Run

VOCAB, BATCH, LENGTH = 61, 2, 11  # unlike each other and unlike usual sizes, so that swapped dimensions do not fit
BORDER = 3  # a token in the midst of the first sequence
HOOKS = ("forward", "bias", "rotation", "embed")  # of a part, and of a position encoding
Outputs = dict[str, Tensor]  # of every part, in the order in which they act


class AnyNumber(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context manager: meta tensors return a number from `item()`, which Adafactor calls on norms."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return 1.0 if func is torch.ops.aten._local_scalar_dense.default else func(*args, **(kwargs or {}))


def check_memory(run: Run, model: Decoder) -> None:
    """Raise ConfigError if a device lacks the memory to train `model`, a meta model that is consumed.

    Counted are weights, their average, gradients, states of the optimizer, and the inputs of all blocks: activations
    that even `train.recompute=block` keeps. A step takes more; see `llama_lab.estimate`.
    """
    cfg, hardware = run.cfg, run.hardware
    itemsize = 2 if hardware.precision == "bf16-true" else 4
    weights = count(model) * itemsize * (2 if cfg.train.ema is None else 3)
    rows = cfg.train.micro_batch_size or cfg.train.batch_size // hardware.world_size
    read = sum(length * len(tower.blocks) for tower, length in model.readers(model.max_seq_len))
    inputs = rows * read * model.dim * (4 if hardware.precision == "32-true" else 2)
    shards = hardware.world_size if hardware.sharded else 1
    room = device_memory(hardware.torch_device)
    if weights / shards + inputs > room / 4:  # states of more than three times this are unknown
        weights += optimizer_bytes(model, cfg.optim)
    if weights / shards + inputs > room:
        raise ConfigError(
            f"model: to train its {count(model):,} parameters takes {in_bytes(weights / shards)} of a device, and a "
            f"micro-batch at least {in_bytes(inputs)}, but it has {in_bytes(room)}; make the model, the context or "
            f"train.micro_batch_size smaller"
        )


def optimizer_bytes(model: Decoder, optim: DictConfig) -> int:
    """Bytes of an optimizer's states after a step of `model`, a meta model that is consumed."""
    with FakeTensorMode(allow_non_fake_inputs=True), AnyNumber():  # type: ignore[no-untyped-call]
        allocate(model)
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        optimizer = build(optim, "optim")(model)
        optimizer.step()
        states = [x for state in optimizer.state.values() for x in state.values() if isinstance(x, Tensor)]
        return sum(x.numel() * x.itemsize for x in states)


def allocate(model: nn.Module) -> None:
    """Move a meta model's parameters and buffers to the CPU, without values. Unlike `to_empty`, this keeps ties."""
    twins = {p: nn.Parameter(torch.empty_like(p, device="cpu")) for p in model.parameters()}
    for module in model.modules():
        for name, p in list(module.named_parameters(recurse=False)):
            setattr(module, name, twins[p])
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, torch.empty_like(buffer, device="cpu"))


def check_components(cfg: DictConfig, hardware: Hardware) -> None:
    """Build, train, decode and cost a model with one layer of each kind, if the user has components of their own.

    Raises ConfigError for invalid results; exceptions of components pass through to `report_component_errors`.
    """
    theirs = users_targets(OmegaConf.to_container(cfg.model))
    if not theirs:
        return
    kinds = [[layer in one["at"] for one in cfg.model.layers] for layer in range(cfg.model.n_layers)]
    of_each_kind = 1 + max(kinds.index(kind) for kind in kinds)
    n_layers = min(cfg.model.n_layers, max(2, of_each_kind))
    changes = {"n_layers": n_layers, "vocab_size": VOCAB, "layers": cfg.model.layers}
    small: Any = OmegaConf.merge(cfg, {"model": changes})
    tolerance = 1e-3 if hardware.precision.startswith("32") else 0.05
    device = hardware.torch_device
    generators = [device] if device.type == "cuda" else []
    with component_errors_of(theirs), torch.random.fork_rng(devices=generators), hardware.autocast():
        model: Decoder = build_model(small, VOCAB, BORDER).to(device)
        for mixer in model.mixers:
            if isinstance(rule := getattr(mixer, "mask_rule", None), MaskRule):  # a prefix is not causal
                mixer.mask_rule = rule._replace(prefix=None)  # type: ignore[assignment]
        tokens = torch.arange(BATCH * LENGTH, device=device).view(BATCH, LENGTH) % VOCAB
        tokens = tokens[:, : cfg.model.max_seq_len]
        check_positions(model, tokens.shape[1], cfg.model.n_heads)
        check_training(model.train(), tokens)
        if model.causal and len(model.towers) == 1:  # what reads a source, `check_training` has given one
            with torch.no_grad():
                check_reading(model.eval(), tokens, tolerance)
        with torch.device("meta"):
            model_cost(build_model(small, VOCAB, BORDER))


@contextmanager
def component_errors_of(theirs: dict[str, str]) -> Iterator[None]:
    """Context manager: turn an error in our code into a ConfigError that names the user's components."""
    try:
        yield
    except Exception as error:
        if isinstance(error, ConfigError) or users_frame(error):
            raise
        named = ", ".join(f"model.{key}={target}" for key, target in theirs.items())
        raise ConfigError(f"{named}: cannot train, {first_line(error)}; HYDRA_FULL_ERROR=1 shows where") from error


def fault(name: str, module: nn.Module, what: str) -> ConfigError:
    """The error for a module, with the place of its `forward`, or of a position's hook, in the user's code."""
    place = users_method(module, *HOOKS)
    return ConfigError(f"{f'{place}: ' if place else ''}model.{name}: {type(module).__name__} {what}")


def check_positions(model: Decoder, length: int, n_heads: int) -> None:
    """Raise ConfigError for biases of the wrong shape."""
    positions, wanted = torch.arange(length, device=model.embedding.tokens.weight.device), (n_heads, length, length)
    for position in {model.position_at(i) for i in range(len(model.blocks))}:
        bias = position.bias(positions, positions)
        if bias is None:
            continue
        try:
            bias.expand(wanted)
        except RuntimeError:
            what = f"returns a bias of shape {tuple(bias.shape)} for {length} positions; it must be {wanted}"
            raise fault("position", position, what) from None


def check_training(model: Decoder, tokens: Tensor) -> None:
    """Raise ConfigError unless forward and backward passes keep shapes and give finite numbers."""
    sources = [tokens] if len(model.towers) > 1 else []
    loss = F.cross_entropy(outputs_of(model, [tokens], None, *sources)["."].float().flatten(0, 1), tokens.flatten())
    loss.backward()  # type: ignore[no-untyped-call]
    if not loss.isfinite():
        raise ConfigError(f"model: the loss is {loss.item():g} before the first step; check the initial values")
    for name, p in model.named_parameters():
        if p.grad is not None and not p.grad.isfinite().all():
            raise ConfigError(f"model.{name}: its gradient is not finite before the first step")


def parts(model: Decoder) -> Iterator[tuple[str, nn.Module]]:
    """The mixers, feed-forwards and norms of all blocks, which map `(B, T, D)` to the same shape."""
    for i, block in enumerate(model.blocks):
        for name, part in block.named_children():
            if name in ("attention", "ffn") or name.endswith("norm"):
                yield f"blocks.{i}.{name}", part


def check_reading(model: Decoder, tokens: Tensor, tolerance: float) -> None:
    """Raise ConfigError unless outputs are causal, and decoding token by token equals one forward pass."""
    whole = outputs_of(model, [tokens])
    length = tokens.shape[1]
    begin = outputs_of(model, [tokens[:, : length // 2 + 1]])
    causal = "gives a token something else when other tokens follow it; it must be causal"
    check_equal(model, whole, begin, tolerance, causal)
    if length == 1 or not model.decodes:
        return
    check_state_bytes(model, length)
    state = model.new_state(len(tokens), length)
    chunks = list(torch.split(tokens, [length - length // 2, *[1] * (length // 2)], 1))
    decoded = outputs_of(model, chunks, state)
    check_equal(model, whole, decoded, tolerance, "gives something else token by token than for the whole text at once")
    state = model.new_state(len(tokens), length)
    read = prefill(model, tokens[:, :-1].tolist(), state)
    last = model(tokens[:, -1:], state)[:, -1]
    if not all(is_close(a, whole["."][:, i], tolerance) for a, i in ((read, -2), (last, -1))):
        name, mixer = next((n, part) for n, part in parts(model) if part is model.mixers[0])
        raise fault(name, mixer, "loses the state of single sequences; write into its tensors in place")


def outputs_of(model: Decoder, chunks: list[Tensor], state: DecoderState | None = None, *given: Tensor) -> Outputs:
    """Outputs of every part for the chunks of a text, concatenated along time; `.` is the logits.

    Raises ConfigError for a part whose output has another shape than its input.
    """
    found: defaultdict[str, list[Tensor]] = defaultdict(list)

    def keep(name: str, part: nn.Module, inputs: tuple[Tensor, ...], output: Any) -> None:
        shape, wanted = getattr(output, "shape", None), inputs[0].shape
        if shape != wanted:
            given = tuple(shape) if shape is not None else type(output).__name__
            raise fault(name, part, f"returns {given} for an input of {tuple(wanted)}; it must be the same")
        found[name].append(output)

    with ExitStack() as hooks:
        for name, part in parts(model):
            hooks.enter_context(part.register_forward_hook(partial(keep, name)))
        logits = [model(chunk, state, *given) for chunk in chunks]
    return {name: torch.cat(outputs, 1) for name, outputs in {**found, ".": logits}.items()}


def check_equal(model: Decoder, whole: Outputs, other: Outputs, tolerance: float, what: str) -> None:
    """Raise ConfigError, which says `what`, for the first module whose outputs differ within the length of `other`."""
    known = dict(parts(model))
    for name, outputs in other.items():
        if not is_close(outputs, whole[name][:, : outputs.shape[1]], tolerance):
            suspects = [(name, known[name])] if name in known else []
            suspects += [("position", model.position), ("blocks.0", model.blocks[0])]
            raise fault(*next((s for s in suspects if users_method(s[1], *HOOKS)), suspects[0]), what)


def is_close(a: Tensor, b: Tensor, tolerance: float) -> bool:
    """Whether two tensors are equal to within a share of the largest number."""
    return bool((a - b).abs().max() <= tolerance * b.abs().max())


def check_state_bytes(model: Decoder, length: int) -> None:
    """Raise ConfigError unless every mixer's state has as many bytes as it reports."""
    weight = model.embedding.tokens.weight
    for i, mixer in enumerate(model.mixers):
        for n in (1, length):
            said, taken = mixer.state_bytes(n, weight.dtype), mixer.new_state(1, n, weight.device, weight.dtype).nbytes
            if said != taken:
                what = f"says {said} bytes of state after {n} tokens, but its new_state takes {taken}"
                raise fault(f"blocks.{i}.attention", mixer, what)
