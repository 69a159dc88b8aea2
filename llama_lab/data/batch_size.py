"""How a batch is divided among devices and micro-batches."""

import math

from llama_lab.util.errors import ConfigError


def micro_batches_per_step(batch_size: int, micro_batch_size: int | None, world_size: int) -> int:
    """Return the number of micro-batches per device and optimizer step.

    `batch_size` counts sequences over all `world_size` devices, `micro_batch_size` those of one forward pass on one
    device; None: a device's whole share. Raises ConfigError unless the numbers divide each other.
    """
    unit = world_size * (micro_batch_size or 1)
    if batch_size % unit:
        near = " and ".join(map(str, multiples_around(batch_size, unit)))
        raise ConfigError(
            f"train.batch_size={batch_size}: not a multiple of {unit}, which train.micro_batch_size={micro_batch_size} "
            f"on trainer.devices={world_size} needs; {near} {'is' if batch_size < unit else 'are'}"
        )
    return batch_size // unit if micro_batch_size else 1


def multiples_around(number: int, unit: int) -> list[int]:
    """The positive multiples of `unit` next to `number`, below and above; `number` itself if it is one."""
    return sorted({max(number // unit, 1) * unit, math.ceil(number / unit) * unit})
