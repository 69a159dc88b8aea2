"""The data module: the micro-batches of every step, on any number of devices, and what it refuses."""

from itertools import chain, islice
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lightning.pytorch.accelerators import CUDAAccelerator

from llama_lab.data.data_module import TokenDataModule, micro_batches_per_step
from llama_lab.data.tokens import TokenDataset
from llama_lab.data.windows import TrainWindows, ValWindows
from llama_lab.model.loss import IGNORE
from llama_lab.util.errors import ConfigError
from tests.data.texts import dataset, sentences

T = 16
BATCH = 4


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> TokenDataset:
    return dataset(tmp_path_factory.mktemp("cache"), sentences(30))


@pytest.mark.parametrize(
    ("key", "change"),
    [("data.seed", {"seed": 8}), ("train.batch_size", {"batch_size": 8}), ("model.max_seq_len", {"seq_len": 8})],
)
def test_a_checkpoint_of_another_order_of_data_is_refused(key: str, change: dict[str, int], data: TokenDataset) -> None:
    settings = {"seq_len": T, "batch_size": BATCH, "micro_batch_size": 2, "seed": 7}
    state = TokenDataModule(data, **settings).train_dataloader().state_dict()
    TokenDataModule(data, **(settings | {"micro_batch_size": 4})).train_dataloader().load_state_dict(state)
    changed = TokenDataModule(data, **(settings | change)).train_dataloader()
    with pytest.raises(ConfigError, match=rf"{key}={next(iter(change.values()))}: the checkpoint was trained with"):
        changed.load_state_dict(state)


# Several devices


def on_device(module: TokenDataModule, rank: int, world_size: int) -> TokenDataModule:
    """Attach the module to a stand-in for the trainer of one device."""
    module.trainer = SimpleNamespace(world_size=world_size, global_rank=rank, global_step=0, accelerator=None)
    return module


@pytest.mark.parametrize("first", [0, 5])
@pytest.mark.parametrize(
    ("world_size", "micro_batch_size", "accumulate"), [(1, 2, 4), (2, 2, 2), (1, None, 1), (4, None, 1)]
)
def test_devices_share_the_rows_of_every_step_from_that_of_the_trainer_on(
    world_size: int, micro_batch_size: int | None, accumulate: int, first: int, data: TokenDataset
) -> None:
    windows = TrainWindows(data.train, T, seed=7)
    modules = [
        on_device(TokenDataModule(data, T, 8, micro_batch_size, seed=7), rank, world_size) for rank in range(world_size)
    ]
    loaders = [iter(module.train_dataloader()) for module in modules]
    for module in modules:  # a checkpoint is restored when the loaders are there
        module.trainer.global_step = first
    for step, per_device in enumerate(islice(zip(*loaders, strict=True), 3), first):
        assert {len(micro_batches) for micro_batches in per_device} == {accumulate}
        batch = torch.cat([torch.stack(micro_batch) for micro_batch in chain(*per_device)], dim=1)
        assert torch.equal(batch, torch.from_numpy(np.stack(windows.examples(step, 8))))


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
@pytest.mark.parametrize("micro_batch_size", [1, 4])
def test_devices_share_the_validation_windows(world_size: int, micro_batch_size: int, data: TokenDataset) -> None:
    per_device = []
    for rank in range(world_size):
        module = TokenDataModule(data, T, 4 * 7 * 6, micro_batch_size, seed=7)
        per_device.append(list(on_device(module, rank, world_size).val_dataloader()[0]))
    assert len({len(batches) for batches in per_device}) == 1
    targets = torch.cat([targets for batches in per_device for _, targets in batches])
    assert all(len(targets) <= micro_batch_size for batches in per_device for _, targets in batches)
    shown = [window.tolist() for window in targets if (window != IGNORE).any()]
    assert sorted(shown) == sorted(targets.tolist() for _, targets in ValWindows(data.val, T))


# Sizes


@pytest.mark.parametrize(
    ("sizes", "key"), [((10, 4, 1), r"train\.micro_batch_size=4"), ((8, 2, 3), r"trainer\.devices=3")]
)
def test_sizes_that_do_not_divide_are_refused(sizes: tuple[int, int, int], key: str) -> None:
    with pytest.raises(ConfigError, match=rf"train\.batch_size={sizes[0]}: not a multiple of .* {key} .* are$"):
        micro_batches_per_step(*sizes)


def test_what_cannot_be_read_is_refused_when_the_module_is_made(data: TokenDataset) -> None:
    with pytest.raises(ConfigError, match="max_seq_len=100000"):
        TokenDataModule(data, 10**5, BATCH, 2, seed=0)


def test_batches_for_a_gpu_are_pinned(data: TokenDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[torch.Tensor] = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned.append(tensor) or tensor)
    module = on_device(TokenDataModule(data, T, BATCH, 2, seed=7), 0, 1)

    def tensors() -> list[torch.Tensor]:
        return list(chain(*next(iter(module.train_dataloader())), *module.val_dataloader()[0]))

    assert (len(tensors()) > 0, pinned) == (True, [])
    module.trainer.accelerator = CUDAAccelerator()
    given = tensors()
    assert len(given) == len(pinned) > 0
    assert all(map(torch.equal, given, pinned))
