"""Check by estimate that the arms of a study fit into device memory."""

from dataclasses import replace

from llama_lab.data.dataset import Dataset
from llama_lab.data.open import read_by
from llama_lab.devices.performance import device_memory
from llama_lab.estimate.estimate import USABLE, MemoryModel, Setup, setup_of
from llama_lab.training.run import Run
from llama_lab.util.errors import ConfigError
from llama_lab.util.formatting import in_bytes


def check_memory(run: Run, dataset: Dataset) -> None:
    """Raise ConfigError if a run's estimated memory exceeds its device; runs on other machines are not checked."""
    if run.hardware.elsewhere:
        return
    model, setup, limit = memory_of(run, dataset)
    if model.fits(setup, limit):
        return
    single = model.memory(replace(setup, micro_batch=1)).total
    fix = (
        "train.micro_batch_size=1"
        if single <= limit and setup.micro_batch > 1
        else "more devices with trainer.strategy=fsdp"
    )
    size = f"size={run.choices['size']}"
    raise ConfigError(
        f"{size}: a device would need {in_bytes(model.memory(setup).total)} by the estimate, and has "
        f"{in_bytes(limit)} to use; leave it out, or try {fix}"
    )


def copies_fit(run: Run, dataset: Dataset, copies: int) -> bool:
    """Whether so many runs like this one fit into the memory of their device at a time, by the estimate."""
    model, setup, limit = memory_of(run, dataset)
    return model.fits(setup, limit / copies)


def memory_of(run: Run, dataset: Dataset) -> tuple[MemoryModel, Setup, float]:
    """The estimated memory of a run, what it depends on, and the bytes that its device has for it."""
    hardware = run.hardware
    setup = setup_of(run.cfg, hardware.sharded, hardware.world_size, run.cfg.train.batch_size)
    model = MemoryModel(run.cfg, read_by(run.cfg, dataset).index.vocab_size, run.steps, hardware.precision)
    return model, setup, USABLE * device_memory(hardware.torch_device)
