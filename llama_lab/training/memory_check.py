"""What a training takes of a device's memory at the least, found out before any of it is allocated."""

from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from llama_lab.config.components import build
from llama_lab.data.data_module import micro_batches_per_step
from llama_lab.devices.memory import device_memory
from llama_lab.model import Decoder
from llama_lab.model.cost import count
from llama_lab.util.errors import ConfigError
from llama_lab.util.formatting import in_bytes

from .run import Run


class AnyNumber(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, tensors without data give a number where one is asked of them, as Adafactor does of each norm."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return 1.0 if func is torch.ops.aten._local_scalar_dense.default else func(*args, **(kwargs or {}))


def check_memory(run: Run, model: Decoder) -> None:
    """Raise ConfigError if a device lacks the memory to train `model`, which is on the meta device and used up.

    Counted are weights, their average, gradients, states of the optimizer, and the inputs of all blocks: activations
    that even `train.recompute=block` keeps. A step takes more; see `llama_lab.estimate`.
    """
    cfg, hardware = run.cfg, run.hardware
    itemsize = 2 if hardware.precision == "bf16-true" else 4
    weights = count(model) * itemsize * (2 if cfg.train.ema is None else 3)
    share = cfg.train.batch_size // hardware.world_size
    share //= micro_batches_per_step(cfg.train.batch_size, cfg.train.micro_batch_size, hardware.world_size)
    inputs = share * model.max_seq_len * model.dim * len(model.blocks) * (4 if hardware.precision == "32-true" else 2)
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
    """Bytes of an optimizer's states after a step of `model`, which is on the meta device and used up."""
    with FakeTensorMode(allow_non_fake_inputs=True), AnyNumber():  # type: ignore[no-untyped-call]
        allocate(model)
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        optimizer = build(optim, "optim")(model)
        optimizer.step()
        states = [x for state in optimizer.state.values() for x in state.values() if isinstance(x, Tensor)]
        return sum(x.numel() * x.itemsize for x in states)


def allocate(model: nn.Module) -> None:
    """Move a meta model's parameters to the CPU, without values. Unlike `to_empty`, this keeps ties."""
    twins = {p: nn.Parameter(torch.empty_like(p, device="cpu")) for p in model.parameters()}
    for module in model.modules():
        for name, p in list(module.named_parameters(recurse=False)):
            setattr(module, name, twins[p])
