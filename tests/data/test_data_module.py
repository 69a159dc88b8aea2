"""The data module under real trainers: a run resumed from anywhere reads exactly what it would have read."""

import warnings
from itertools import chain, islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers.logger import DummyLogger

from llama_lab.data.data_module import Batch, TokenDataModule, micro_batches_per_step
from llama_lab.data.tokens import TokenDataset
from llama_lab.data.windows import TrainWindows, ValWindows
from llama_lab.model.loss import IGNORE
from llama_lab.util.errors import ConfigError
from tests.data.texts import dataset, sentences

T = 16
BATCH = 4
STEPS = 10


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> TokenDataset:
    return dataset(tmp_path_factory.mktemp("cache"), sentences(30))


class Bigram(L.LightningModule):
    """A bigram model that remembers the batches it was given."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = torch.nn.Embedding(257, 257)
        self.batches: list[torch.Tensor] = []  # (2, b, T) of each micro-batch: inputs and targets
        self.validated: list[torch.Tensor] = []

    def training_step(self, micro_batches: list[Batch], step: int) -> torch.Tensor:
        self.batches.extend(map(torch.stack, micro_batches))
        self.log("loss", 0.0, batch_size=BATCH)
        inputs, targets = map(torch.cat, zip(*micro_batches, strict=True))
        return torch.nn.functional.cross_entropy(self.table(inputs).flatten(0, 1), targets.flatten())

    def validation_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> None:
        self.validated.append(torch.stack(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.1)


class LoggedSteps(DummyLogger):
    """The steps under which Lightning logs."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[int] = []

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        self.steps.append(step)


class SaveAt(Callback):
    """Write a checkpoint in the named hook, when so many steps have been begun."""

    def __init__(self, path: Path, hook: str, begun: int):
        self.path = path
        setattr(self, hook, self._save)
        self._begun = begun

    def _save(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.fit_loop.total_batch_idx + 1 == self._begun:
            trainer.save_checkpoint(self.path)


def fit(
    data: TokenDataset,
    *callbacks: Callback,
    resume: Path | None = None,
    max_steps: int = STEPS,
    micro_batch_size: int = 2,
    logger: DummyLogger | None = None,
    limit_val_batches: float = 1,
) -> Bigram:
    """Train a fresh model, or one from a checkpoint."""
    model = Bigram()
    trainer = L.Trainer(
        max_steps=max_steps,
        callbacks=list(callbacks),
        logger=logger or False,
        log_every_n_steps=1,
        val_check_interval=2,
        check_val_every_n_epoch=None,
        use_distributed_sampler=False,
        accelerator="cpu",
        enable_checkpointing=any(isinstance(callback, ModelCheckpoint) for callback in callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=limit_val_batches,
    )
    trainer.fit(model, datamodule=TokenDataModule(data, T, BATCH, micro_batch_size, seed=7), ckpt_path=resume)
    return model


@pytest.fixture(scope="module")
def whole_run(data: TokenDataset) -> tuple[Bigram, list[int]]:
    """A run that was never stopped, and the steps that it logged."""
    logger = LoggedSteps()
    return fit(data, logger=logger, limit_val_batches=1.0), logger.steps


def test_micro_batches_are_the_rows_of_each_step_in_order(
    data: TokenDataset, whole_run: tuple[Bigram, list[int]]
) -> None:
    windows = TrainWindows(data.train, T, seed=7)
    batches = whole_run[0].batches
    assert [batch.shape for batch in batches] == [(2, 2, T)] * (2 * STEPS)
    for step in range(STEPS):
        inputs, targets = torch.cat(batches[2 * step : 2 * step + 2], dim=1)
        expected = torch.from_numpy(windows.batch(step, BATCH))
        assert torch.equal(inputs, expected[:, :-1])
        assert torch.equal(targets, expected[:, 1:])


@pytest.mark.parametrize(
    ("hook", "completed", "first"),
    [
        ("on_train_batch_end", 5, {}),
        ("on_validation_end", 4, {}),
        ("on_train_batch_end", 5, {"max_steps": 5}),  # at the end of a run that is then given more steps
        ("on_train_end", 5, {"max_steps": 5}),
    ],
)
def test_a_run_resumed_from_anywhere_is_the_run_that_never_stopped(
    hook: str,
    completed: int,
    first: dict[str, int],
    data: TokenDataset,
    whole_run: tuple[Bigram, list[int]],
    tmp_path: Path,
) -> None:
    path, logger = tmp_path / "stopped.ckpt", LoggedSteps()
    fit(data, SaveAt(path, hook, completed), **first)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*resum.*")  # Lightning's, of loaders that cannot resume
        resumed = fit(data, resume=path, logger=logger)
    never_stopped, logged = whole_run
    expected = never_stopped.batches[2 * completed :]
    assert len(resumed.batches) == len(expected)
    assert all(map(torch.equal, resumed.batches, expected))
    assert torch.equal(resumed.table.weight, never_stopped.table.weight)
    assert logger.steps == logged[completed:]


@pytest.mark.parametrize("micro_batch_size", [1, 4])
def test_a_run_resumed_with_other_micro_batches_reads_the_same_rows(
    micro_batch_size: int, data: TokenDataset, whole_run: tuple[Bigram, list[int]], tmp_path: Path
) -> None:
    fit(data, SaveAt(tmp_path / "x.ckpt", "on_train_batch_end", 5))
    resumed = fit(data, resume=tmp_path / "x.ckpt", micro_batch_size=micro_batch_size)
    assert resumed.batches[0].shape == (2, micro_batch_size, T)
    assert torch.equal(torch.cat(resumed.batches, dim=1), torch.cat(whole_run[0].batches[10:], dim=1))
    torch.testing.assert_close(resumed.table.weight, whole_run[0].table.weight)


@pytest.mark.parametrize(
    ("key", "change"),
    [("data.seed", {"seed": 8}), ("train.batch_size", {"batch_size": 8}), ("model.max_seq_len", {"seq_len": 8})],
)
def test_a_checkpoint_of_another_order_of_data_is_refused(key: str, change: dict[str, int], data: TokenDataset) -> None:
    settings = {"seq_len": T, "batch_size": BATCH, "micro_batch_size": 2, "seed": 7}
    state = TokenDataModule(data, **settings).train_dataloader().state_dict()
    changed = TokenDataModule(data, **(settings | change)).train_dataloader()
    with pytest.raises(ConfigError, match=rf"{key}={next(iter(change.values()))}: the checkpoint was trained with"):
        changed.load_state_dict(state)


def test_a_checkpoint_of_other_text_is_refused(data: TokenDataset, tmp_path: Path) -> None:
    fit(data, SaveAt(tmp_path / "x.ckpt", "on_train_batch_end", 5))
    other = dataset(tmp_path, sentences(30, seed=1))
    with pytest.raises(ConfigError, match=rf"data_hash={other.index.data_hash}: .* {data.index.data_hash}; "):
        fit(other, resume=tmp_path / "x.ckpt")


# Several devices


def on_device(module: TokenDataModule, rank: int, world_size: int) -> TokenDataModule:
    """Attach the module to a stand-in for the trainer of one device."""
    module.trainer = SimpleNamespace(world_size=world_size, global_rank=rank, global_step=0, accelerator=None)
    return module


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_devices_share_the_rows_of_every_step(world_size: int, data: TokenDataset) -> None:
    windows = TrainWindows(data.train, T, seed=7)
    loaders = [
        on_device(TokenDataModule(data, T, 8, 2, seed=7), rank, world_size).train_dataloader()
        for rank in range(world_size)
    ]
    for step, per_device in enumerate(islice(zip(*loaders, strict=True), 3)):
        assert {len(micro_batches) for micro_batches in per_device} == {8 // world_size // 2}
        inputs = torch.cat([inputs for inputs, _ in chain(*per_device)])
        assert torch.equal(inputs, torch.from_numpy(windows.batch(step, 8)[:, :-1]))


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
@pytest.mark.parametrize("micro_batch_size", [1, 4])
def test_devices_share_the_validation_windows_without_a_copy(
    world_size: int, micro_batch_size: int, data: TokenDataset
) -> None:
    per_device = []
    for rank in range(world_size):
        module = TokenDataModule(data, T, 4 * 7 * 6, micro_batch_size, seed=7)
        per_device.append(list(on_device(module, rank, world_size).val_dataloader()[0]))
    assert len({len(batches) for batches in per_device}) == 1
    targets = torch.cat([targets for batches in per_device for _, targets in batches])
    assert all(len(targets) <= micro_batch_size for batches in per_device for _, targets in batches)
    shown = [window.tolist() for window in targets if (window != IGNORE).any()]
    assert sorted(shown) == sorted(targets.tolist() for _, targets in ValWindows(data.val, T))


def test_more_devices_than_windows_validate_in_step(tmp_path: Path) -> None:
    data = dataset(tmp_path, [f"document {i}" for i in range(9)])
    seq_len = data.index.val.tokens - 1  # two windows
    counts = []
    for rank in range(3):
        ((inputs, targets),) = on_device(TokenDataModule(data, seq_len, 3, 1, seed=0), rank, 3).val_dataloader()[0]
        assert inputs.shape == targets.shape == (1, seq_len)
        counts.append(int((targets != IGNORE).sum()))
    assert counts == [seq_len, 1, 0]


# Sizes


@pytest.mark.parametrize(
    ("sizes", "expected"), {(8, 2, 1): 4, (8, 2, 4): 1, (8, None, 1): 1, (8, None, 4): 1, (12, 1, 3): 4}.items()
)
def test_micro_batches_per_step(sizes: tuple[int, int | None, int], expected: int) -> None:
    assert micro_batches_per_step(*sizes) == expected


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((10, 4, 1), r"train\.batch_size=10: not a multiple of 4, .* train\.micro_batch_size=4 .*; 8 and 12 are$"),
        ((8, 2, 3), r"train\.batch_size=8: not a multiple of 6, .* trainer\.devices=3 .*; 6 and 12 are$"),
        ((4, None, 8), r"train\.batch_size=4: not a multiple of 8, .*; 8 is$"),
        ((0, None, 1), r"train\.batch_size=0: must be at least 1"),
        ((4, 0, 1), r"train\.micro_batch_size=0: must be at least 1"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(sizes: tuple[int, int | None, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        micro_batches_per_step(*sizes)


def test_a_device_takes_its_whole_share_by_default(data: TokenDataset) -> None:
    module = TokenDataModule(data, T, BATCH, None, seed=0)
    first_two = islice(module.train_dataloader(), 2)
    assert [[inputs.shape for inputs, _ in micro_batches] for micro_batches in first_two] == [[(BATCH, T)]] * 2
    assert next(iter(module.val_dataloader()[0]))[0].shape == (BATCH, T)


@pytest.mark.parametrize(("seq_len", "seed", "key"), [(T, -1, r"data\.seed=-1"), (10**5, 0, r"max_seq_len=100000")])
def test_what_cannot_be_read_is_refused_when_the_module_is_made(
    seq_len: int, seed: int, key: str, data: TokenDataset
) -> None:
    with pytest.raises(ConfigError, match=key):
        TokenDataModule(data, seq_len, BATCH, 2, seed)


def test_batches_for_a_gpu_are_pinned(data: TokenDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[torch.Tensor] = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned.append(tensor) or tensor)
    module = on_device(TokenDataModule(data, T, BATCH, 2, seed=7), 0, 1)

    def tensors() -> list[torch.Tensor]:
        return list(chain(*next(iter(module.train_dataloader())), *module.val_dataloader()[0]))

    assert tensors()
    assert not pinned
    module.trainer.accelerator = CUDAAccelerator()
    given = tensors()
    assert len(given) == len(pinned) > 0
    assert all(map(torch.equal, given, pinned))
