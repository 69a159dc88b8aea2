"""Lightning strategies of our own: FSDP2, and checkpoints that any strategy can load."""

import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.plugins import TorchCheckpointIO
from lightning.pytorch.strategies import DDPStrategy, Strategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor

from llama_lab.model.decoder import Decoder
from llama_lab.model.init import WeightInit, draw_weights
from llama_lab.runs.checkpoint import load_checkpoint, write_file, write_part

from .hardware import Hardware, below_srun

LOOPBACK = "127.0.0.1"


def make_strategy(hardware: Hardware) -> Strategy | str:
    """The strategy of a Lightning Trainer; by name where Lightning's own will do."""
    if hardware.sharded:
        return FullySharded()
    return DataParallel() if hardware.world_size > 1 else "auto"


def make_plugins() -> list[Any]:
    """The plugins of a Lightning Trainer: checkpoints, and no resubmission of jobs, since we answer the signals."""
    return [Checkpoints(), *([SLURMEnvironment(auto_requeue=False)] if below_srun() else [])]


class Checkpoints(TorchCheckpointIO):
    """Checkpoint files, written in place, not moved from the temporary folder as Lightning does; also reads parts."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write a file."""
        write_file(checkpoint, Path(path))

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The content of a checkpoint, its tensors memory-mapped."""
        return load_checkpoint(Path(path))


class DataParallel(DDPStrategy):
    """Lightning's data parallel, whose processes meet on loopback alone if they are all of this machine.

    PyTorch's own store listens on every interface, and so to anybody in the network.
    """

    def setup_distributed(self) -> None:
        """Join the other processes."""
        environment = self.cluster_environment
        assert environment is not None
        if isinstance(environment, LightningEnvironment) and self.num_nodes == 1:  # else torchrun or srun started them
            self.set_world_ranks()
            if not torch.distributed.is_initialized():
                join_on_loopback(self.root_device, environment.main_port, self.global_rank, self.world_size)
        super().setup_distributed()

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """The content of the checkpoint that rank 0 has chosen, on every rank."""
        return super().load_checkpoint(self.broadcast(checkpoint_path), weights_only)


def join_on_loopback(device: torch.device, port: int, rank: int, world_size: int) -> None:
    """Create the process group of this machine's processes; rank 0 listens at the port."""
    loopback = next(name for _, name in socket.if_nameindex() if name in ("lo", "lo0"))  # Linux; macOS
    os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    os.environ.setdefault("NCCL_SOCKET_IFNAME", loopback)
    store: Any
    if world_size == 1:  # nobody to meet
        store = torch.distributed.HashStore()  # type: ignore[attr-defined]
    else:
        listener = socket.create_server((LOOPBACK, port)).detach() if rank == 0 else None  # the store will close it
        store = torch.distributed.TCPStore(  # type: ignore[attr-defined]
            LOOPBACK, port, world_size, is_master=rank == 0, master_listen_fd=listener
        )
    backend = torch.distributed.get_default_backend_for_device(device)
    device_id = None if device.type == "cpu" else device
    torch.distributed.init_process_group(backend, store=store, rank=rank, world_size=world_size, device_id=device_id)


class FullySharded(DataParallel):
    """Data parallel with weights, gradients and optimizer cut into as many shards as there are devices (FSDP2).

    Rajbhandari et al. 2020 (ZeRO, stage 3). Each block is gathered while it computes; parameters outside of blocks,
    which may be tied, stay gathered from the forward pass to the end of the backward pass. In bf16-mixed, gathered
    weights and the residual stream are bf16; gradients are summed in float32 after every micro-batch.

    Lightning's ModelParallelStrategy (2.6) trains the same curve, but its checkpoints order the optimizer's states
    unlike those of one device, and gather everything on rank 0 or are PyTorch's folders, see `checkpoint.py`.
    """

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """A checkpoint is read into shards."""
        return True

    def setup(self, trainer: L.Trainer) -> None:
        """Shard the model, and build the optimizer on the shards."""
        assert self.accelerator is not None
        assert self.model is not None
        self.accelerator.setup(trainer)
        self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def model_to_device(self) -> None:
        """Shard the model, and move it to this device: at no time does this process hold the whole of it."""
        assert self.lightning_module is not None
        models: list[Any] = [*self.lightning_module.children()]  # the model, and with `train.ema` the average
        if not isinstance(models[0], FSDPModule):
            mesh = init_device_mesh(self.root_device.type, (self.world_size,))
            for model in models:
                shard(model, mesh, mixed=self.precision_plugin.precision == "bf16-mixed")
                materialise(model, model.weight_init, self.root_device)
        super().model_to_device()

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write this process's part."""
        folder = Path(filepath)
        if self.is_global_zero:
            folder.mkdir()
        self.barrier()
        write_part(checkpoint, folder, self.global_rank, self.world_size)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """The content of a checkpoint, a file or in parts, its tensors memory-mapped."""
        return load_checkpoint(Path(self.broadcast(checkpoint_path)), list)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Read this process's rows of the weights."""
        assert self.lightning_module is not None
        own = self.lightning_module.state_dict()
        weights = {name: sharded_like(own[name], weight) for name, weight in checkpoint["state_dict"].items()}
        self.lightning_module.load_state_dict(weights, strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Read this process's rows of the optimizer's state."""
        states = []
        for optimizer, saved in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            state = {
                i: {key: sharded_like(parameters[i], value) for key, value in values.items()}
                for i, values in saved["state"].items()
            }
            states.append(saved | {"state": state})
        super().load_optimizer_state_dict({"optimizer_states": states})

    def teardown(self) -> None:
        """Leave the shards where they are: Lightning would move them, and they live on their mesh."""
        parts: Any = (self.cluster_environment, self.precision_plugin, self.accelerator)
        for part in parts:
            part.teardown()


def shard(model: Decoder, mesh: DeviceMesh, mixed: bool) -> None:
    """Cut every parameter of `model` by its rows, in place; blocks are gathered one at a time."""
    policy = MixedPrecisionPolicy(torch.bfloat16 if mixed else None, reduce_dtype=torch.float32)
    for module in (*model.all_blocks, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    register_fsdp_forward_method(model, "loss")  # which gathers the parameters as `forward` does


def materialise(model: Decoder, weight_init: WeightInit, device: torch.device) -> None:
    """Initialise the linear layers that `linear_on_meta` left on the meta device: this process's rows of each."""
    empty = [module for module in model.modules() if any(p.is_meta for p in module.parameters(recurse=False))]
    for module in empty:
        module.to_empty(device=device, recurse=False)
    if empty:
        draw_weights(model, weight_init, model.seed, lambda own, value: own.copy_(sharded_like(own, value)))


def sharded_like(own: Any, value: Any) -> Any:
    """This process's rows of `value`, laid out as `own` is; values that are no tensors of its shape stay as they are.

    value: a tensor as a whole, or the rows of each process.
    """
    if not isinstance(own, DTensor) or (isinstance(value, Tensor) and value.shape != own.shape):
        return value
    whole = value if isinstance(value, Tensor) else torch.cat(value)
    return distribute_tensor(whole, own.device_mesh, own.placements, src_data_rank=None)  # every process has it
