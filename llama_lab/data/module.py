"""The bridge to Lightning: which rows of which step each device reads, and where a resumed run goes on."""

import math
from collections.abc import Iterator
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.accelerators import CUDAAccelerator

from llama_lab.data.tokens import TokenDataset
from llama_lab.data.windows import Ids, TrainWindows, ValWindows
from llama_lab.errors import ConfigError

Batch = tuple[torch.Tensor, torch.Tensor]
"""Inputs and targets: ``(B, T)`` int64 each."""


def micro_batches_per_step(batch_size: int, micro_batch_size: int | None, world_size: int) -> int:
    """Return how many micro-batches a device runs per optimizer step: Lightning's ``accumulate_grad_batches``.

    ``batch_size`` counts sequences over all ``world_size`` devices, ``micro_batch_size`` those of one device and
    forward pass; None means a device's whole share. Raises ConfigError unless they divide.
    """
    for key, value in {"train.batch_size": batch_size, "train.micro_batch_size": micro_batch_size}.items():
        if value is not None and value < 1:
            raise ConfigError(f"{key}={value}: must be at least 1")
    unit = world_size * (micro_batch_size or 1)
    if batch_size % unit:
        raise ConfigError(
            f"train.batch_size={batch_size}: not a multiple of {unit}, which train.micro_batch_size={micro_batch_size} "
            f"on trainer.devices={world_size} needs; {' and '.join(map(str, multiples_around(batch_size, unit)))}"
            f"{' is' if batch_size < unit else ' are'}"
        )
    return batch_size // unit if micro_batch_size else 1


def multiples_around(number: int, unit: int) -> list[int]:
    """The positive multiples of `unit` next to `number`, below and above; `number` itself if it is one."""
    return sorted({max(number // unit, 1) * unit, math.ceil(number / unit) * unit})


class TokenDataModule(L.LightningDataModule):
    """Feeds a Trainer ``(inputs, targets)`` micro-batches from a token folder.

    ``batch_size`` is the sequences of one optimizer step over all devices; each device takes an equal, contiguous
    share of its rows, in micro-batches of ``micro_batch_size`` (None: the whole share). ``steps`` is the length of the
    training in optimizer steps: one epoch, to Lightning.

    Training goes on at the trainer's ``global_step``, so that a resumed run reads exactly what it would have read.
    The trainer needs ``max_steps=steps`` or less, ``accumulate_grad_batches=accumulate`` and
    ``use_distributed_sampler=False``. Raises ConfigError for a text that is too short, or a negative seed.
    """

    def __init__(
        self,
        dataset: TokenDataset,
        seq_len: int,
        batch_size: int,
        micro_batch_size: int | None,
        seed: int,
        steps: int,
    ):
        super().__init__()
        dataset.require_windows(seq_len, batch_size)
        self.dataset = dataset
        self.seq_len = seq_len
        self.batch_size = batch_size
        self.micro_batch_size = micro_batch_size
        self.seed = seed
        self.steps = steps
        self.train_windows = TrainWindows(dataset.train, seq_len, seed)
        self.val_windows = ValWindows(dataset.val, seq_len)

    @property
    def world_size(self) -> int:
        """Number of devices that share a batch."""
        return self.trainer.world_size if self.trainer else 1

    @property
    def accumulate(self) -> int:
        """Micro-batches per device and optimizer step."""
        return micro_batches_per_step(self.batch_size, self.micro_batch_size, self.world_size)

    def train_dataloader(self) -> "TrainBatches":
        """Return this device's training micro-batches, from the trainer's current step on.

        Raises ValueError for a trainer that would leave the batch size or the length of the training unmet.
        """
        if self.trainer:
            self._check_trainer(self.trainer)
            _count_from_last_step(self.trainer, self.accumulate)
        return TrainBatches(self)

    def val_dataloader(self) -> "ValBatches":
        """Return this device's part of the validation windows."""
        return ValBatches(self)

    @property
    def rank(self) -> int:
        """Index of this device among ``world_size``."""
        return self.trainer.global_rank if self.trainer else 0

    @property
    def first_step(self) -> int:
        """The optimizer step that training starts or goes on at."""
        return self.trainer.global_step if self.trainer else 0

    @property
    def rows(self) -> range:
        """The rows of a batch that this device takes."""
        share = self.batch_size // self.world_size
        return range(self.rank * share, (self.rank + 1) * share)

    @property
    def pin_memory(self) -> bool:
        """Whether batches are put where a GPU can copy them from while it computes."""
        return self.trainer is not None and isinstance(self.trainer.accelerator, CUDAAccelerator)

    def _check_trainer(self, trainer: L.Trainer) -> None:
        if not 0 <= trainer.max_steps <= self.steps:
            raise ValueError(f"Trainer(max_steps={trainer.max_steps}) but the data has {self.steps} steps")
        accumulates = trainer.lightning_module.automatic_optimization
        if accumulates and trainer.accumulate_grad_batches != self.accumulate:
            raise ValueError(
                f"Trainer(accumulate_grad_batches={trainer.accumulate_grad_batches}) but a batch of {self.batch_size} "
                f"is {self.accumulate} micro-batches"
            )


class TrainBatches:
    """One device's training micro-batches, as ``Batch``.

    The length is that of the whole training, since Lightning counts on from the checkpoint's number of micro-batches;
    an iteration yields those from ``first_step`` on. The state in a checkpoint is no position, only what the
    order of the data depends on: a run cannot be resumed on other data.
    """

    def __init__(self, data: TokenDataModule):
        self._data = data

    def __len__(self) -> int:
        return self._data.steps * self._data.accumulate

    def __iter__(self) -> Iterator[Batch]:
        # A generator: it asks for the first step when the first batch is due, by which time the checkpoint is restored.
        data = self._data
        size = len(data.rows) // data.accumulate
        for step in range(data.first_step, data.steps):
            for start in range(data.rows.start, data.rows.stop, size):
                sequences = data.train_windows.batch(step, data.batch_size, range(start, start + size))
                yield _to_tensors(sequences[:, :-1], sequences[:, 1:], data.pin_memory)

    def state_dict(self) -> dict[str, Any]:
        """Return what determines the order of the data."""
        return {
            "data_hash": self._data.dataset.data_hash,
            "tokenizer_hash": self._data.dataset.tokenizer_hash,
            "data.seed": self._data.seed,
            "train.batch_size": self._data.batch_size,
            "model.max_seq_len": self._data.seq_len,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raise ConfigError if the checkpoint's run read its data in another order."""
        for key, value in self.state_dict().items():
            if state[key] != value:
                raise ConfigError(
                    f"{key}={value}: the checkpoint was trained with {state[key]}; resume with that, or start a new run"
                )


class ValBatches:
    """One device's validation windows, as ``Batch``: of W devices, device r takes windows r, r + W, r + 2W ...

    All devices have equally many batches, as collective operations in a forward pass require. One that runs out of
    windows has a last batch with nothing to predict.
    """

    def __init__(self, data: TokenDataModule):
        self._data = data
        self._batch_size = data.micro_batch_size or len(data.rows)

    def __len__(self) -> int:
        return math.ceil(len(self._data.val_windows) / self._data.world_size / self._batch_size)

    def __iter__(self) -> Iterator[Batch]:
        windows = self._data.val_windows
        mine = range(self._data.rank, len(windows), self._data.world_size)
        for i in range(len(self)):
            batch = [windows[j] for j in mine[i * self._batch_size : (i + 1) * self._batch_size]]
            inputs, targets = zip(*(batch or [windows.nothing()]), strict=True)
            yield _to_tensors(np.stack(inputs), np.stack(targets), self._data.pin_memory)


def _to_tensors(inputs: Ids, targets: Ids, pin_memory: bool) -> Batch:
    batch = torch.from_numpy(inputs).contiguous(), torch.from_numpy(targets).contiguous()
    return (batch[0].pin_memory(), batch[1].pin_memory()) if pin_memory else batch


def _count_from_last_step(trainer: L.Trainer, accumulate: int) -> None:
    """Set a restored trainer's count of micro-batches to those of its completed optimizer steps.

    They differ if the checkpoint was written between the micro-batches of a step, whose gradient it does not hold, or
    by a run with another number of micro-batches per step. The counters are left as a checkpoint at the end of the
    last completed step has them: that step's last micro-batch processed, its hooks not yet completed.
    """
    loop = trainer.fit_loop.epoch_loop
    loop.batch_progress.is_last_batch = False  # true in the checkpoint of a run that is now longer
    seen = trainer.global_step * accumulate
    if loop.batch_progress.current.ready == seen:
        return
    for count in (loop.batch_progress.total, loop.batch_progress.current):
        count.load_state_dict({"ready": seen, "started": seen, "processed": seen, "completed": seen - 1})
    loop._batches_that_stepped = trainer.global_step - 1
