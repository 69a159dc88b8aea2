"""The LightningDataModule: which rows of a step each device reads, and where a resumed run continues."""

import itertools
import math
from collections.abc import Iterator
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.accelerators import CUDAAccelerator
from omegaconf import DictConfig

from llama_lab.util.errors import ConfigError

from .batch_size import micro_batches_per_step
from .dataset import Dataset, Ids, Validation
from .objectives import Objective, open_objective

Batch = tuple[torch.Tensor, ...]
"""Inputs and targets, `(B, T)` int64 each, and what a model is given beside them."""


class TokenDataModule(L.LightningDataModule):
    """Feeds a Trainer from a dataset; each of its training batches is the micro-batches of one optimizer step.

    `batch_size` is the number of sequences of one optimizer step over all devices; each device takes an equal,
    contiguous share of its rows, in micro-batches of `micro_batch_size` (None: the whole share).

    Training data starts at the trainer's `global_step`, and is endless: the trainer stops at `max_steps`. It needs
    `use_distributed_sampler=False`. objective: draws what is predicted of windows; None: each next token. Raises
    ConfigError for a text that is too short, and for windows without room for the objective.
    """

    trainer: L.Trainer  # from when one takes it

    def __init__(
        self,
        dataset: Dataset,
        seq_len: int,
        batch_size: int,
        micro_batch_size: int | None,
        seed: int,
        objective: Objective | None = None,
    ):
        super().__init__()
        dataset.require_windows(seq_len, batch_size)
        self.dataset, self.seq_len, self.seed = dataset, seq_len, seed
        self.objective = objective or Objective(dataset.tokenizer)
        self.objective.require_room(seq_len)
        self.batch_size, self.micro_batch_size = batch_size, micro_batch_size
        self.train_windows = dataset.train_windows(seq_len, seed)
        self.val_parts = dataset.val_parts(seq_len)
        every = ((windows, [i]) for windows in self.val_parts.values() for i in range(len(windows)))
        if not any((self.objective.val_batch(*one)[1] >= 0).any() for one in every):
            problem = f"no validation window of model.max_seq_len={seq_len} is of one part of the mixture alone"
            raise ConfigError(f"data.val_tokens: {problem}, as the objective needs; raise it, or shorten windows")

    def train_dataloader(self) -> "TrainBatches":
        """Return this device's training micro-batches, step by step, from the trainer's current step on."""
        return TrainBatches(self)

    def val_dataloader(self) -> "list[ValBatches]":
        """Return this device's share of the validation windows of each part."""
        return [ValBatches(self, windows) for windows in self.val_parts.values()]

    @property
    def rows(self) -> range:
        """The rows of a batch that this device takes."""
        share, rank = self.batch_size // self.trainer.world_size, self.trainer.global_rank
        return range(rank * share, (rank + 1) * share)

    def to_tensors(self, *ids: Ids) -> Batch:
        """Ids as tensors; for a GPU in pinned memory, from which it copies them while it computes."""
        batch = tuple(torch.from_numpy(part).contiguous() for part in ids)
        if isinstance(self.trainer.accelerator, CUDAAccelerator):
            return tuple(part.pin_memory() for part in batch)
        return batch


def open_data_module(cfg: DictConfig, dataset: Dataset) -> TokenDataModule:
    """The batches of the run that `cfg` describes. Raises ConfigError as the class and the objective do."""
    sizes = (cfg.model.max_seq_len, cfg.train.batch_size, cfg.train.micro_batch_size)
    return TokenDataModule(dataset, *sizes, cfg.data.seed, open_objective(cfg, dataset))


class TrainBatches:
    """One device's micro-batches of each optimizer step, from the trainer's current step on, endlessly.

    So Lightning sees no end of an epoch, and a run with a larger budget continues like any other. Checkpoints store no
    position, only what determines the order of the data, so that a run cannot be resumed on other data.
    """

    def __init__(self, data: TokenDataModule):
        self._data = data

    def __iter__(self) -> Iterator[list[Batch]]:
        # A generator: it reads `global_step` when the first batch is due, after the checkpoint is restored.
        data, trainer = self._data, self._data.trainer
        count = micro_batches_per_step(data.batch_size, data.micro_batch_size, trainer.world_size)
        for step in itertools.count(trainer.global_step):
            whole = data.train_windows.examples(step, data.batch_size, data.rows)
            examples = data.objective.examples(whole, data.seed, step, data.batch_size, data.rows)
            micro_batches = (np.split(part, count) for part in examples)
            yield [data.to_tensors(*rows) for rows in zip(*micro_batches, strict=True)]

    def state_dict(self) -> dict[str, Any]:
        """Return what determines the order of the data."""
        return {
            "data_hash": self._data.dataset.index.data_hash,
            "tokenizer_hash": self._data.dataset.index.tokenizer_hash,
            "data.seed": self._data.seed,
            "train.batch_size": self._data.batch_size,
            "model.max_seq_len": self._data.seq_len,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raise ConfigError if the checkpoint's run read its data in another order."""
        for key, value in self.state_dict().items():
            if state[key] != value:
                before = f"the checkpoint was trained with {state[key]}"
                raise ConfigError(f"{key}={value}: {before}; resume with that, or start a new run")


class ValBatches:
    """One device's validation windows, as `Batch`: of W devices, device r takes windows r, r + W, r + 2W, ...

    All devices have equally many batches, as collective operations in a forward pass require. A device that runs out
    of windows gets a last batch with nothing to predict.
    """

    def __init__(self, data: TokenDataModule, windows: Validation):
        self._data = data
        self._windows = windows
        self._batch_size = data.micro_batch_size or len(data.rows)

    def __len__(self) -> int:
        return math.ceil(len(self._windows) / self._data.trainer.world_size / self._batch_size)

    def __iter__(self) -> Iterator[Batch]:
        windows, trainer = self._windows, self._data.trainer
        mine = range(trainer.global_rank, len(windows), trainer.world_size)
        for i in range(len(self)):
            at = mine[i * self._batch_size : (i + 1) * self._batch_size]
            yield self._data.to_tensors(*self._data.objective.val_batch(windows, at))
