"""Whether the arms of a study fit into the memory of the device that they train on."""

import os
from dataclasses import replace

import torch

from llama_lab.data.module import micro_batches_per_step
from llama_lab.data.open import Dataset
from llama_lab.errors import ConfigError
from llama_lab.estimate.estimate import USABLE, MemoryModel, Setup
from llama_lab.formatting import in_bytes
from llama_lab.training.run import Run


def check_memory(run: Run, dataset: Dataset) -> None:
    """Raise ConfigError for a run that by the estimate exceeds its device; one on another machine is not checked."""
    hardware, train = run.hardware, run.cfg.train
    if hardware.elsewhere:
        return
    world = hardware.world_size
    accumulate = micro_batches_per_step(train.batch_size, train.micro_batch_size, world)
    micro_batch = train.batch_size // world // accumulate
    setup = Setup(hardware.sharded, world, train.batch_size, micro_batch, run.cfg.model.max_seq_len)
    model = MemoryModel(run.cfg, dataset.index.vocab_size, run.steps, hardware.precision)
    limit = USABLE * device_memory(hardware.torch_device)
    if model.fits(setup, limit):
        return
    single = model.memory(replace(setup, micro_batch=1)).total
    fix = (
        "train.micro_batch_size=1" if single <= limit and micro_batch > 1 else "more devices with trainer.strategy=fsdp"
    )
    size = f"size={run.choices['size']}"
    raise ConfigError(
        f"{size}: a device would need {in_bytes(model.memory(setup).total)} by the estimate, and has "
        f"{in_bytes(limit)} to use; leave it out, or try {fix}"
    )


def device_memory(device: torch.device) -> int:
    """The bytes of memory of a GPU, or of this machine."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
