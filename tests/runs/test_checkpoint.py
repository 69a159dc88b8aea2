"""What a power cut leaves of a checkpoint is noticed, and the one before it is used; code in one is never run."""

import os
import tracemalloc
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from llama_lab.runs.checkpoint import (
    before,
    checkpoint_step,
    newest_whole,
    read_checkpoint,
    replace_checkpoint,
    write_file,
)
from llama_lab.training.monitor import Monitor
from llama_lab.util.errors import ConfigError
from tests.training.stopping import RUN, at, ends_as_the_whole_run, stop, stopped


def write(file: Path, step: int) -> Path:
    torch.save({"global_step": step, "state_dict": {"weight": torch.arange(1000.0)}}, file)
    return file


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The bytes of a whole checkpoint."""
    return write(tmp_path_factory.mktemp("image") / "last.ckpt", 7).read_bytes()


@given(data=st.data())
def test_a_file_that_is_cut_anywhere_is_no_checkpoint(
    data: st.DataObject, image: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = tmp_path_factory.mktemp("cut") / "last.ckpt"
    file.write_bytes(image[: data.draw(st.integers(0, len(image) - 1))])
    with pytest.raises(ConfigError, match="is damaged"):
        read_checkpoint(file)


def test_zeros_in_the_place_of_weights_are_noticed(image: bytes, tmp_path: Path) -> None:
    file = tmp_path / "last.ckpt"
    start = image.index(torch.arange(1000.0).numpy().tobytes())
    file.write_bytes(image[: start + 100] + bytes(512) + image[start + 612 :])
    assert torch.load(file, weights_only=True)["global_step"] == 7  # PyTorch itself does not look
    with pytest.raises(ConfigError, match=r"is damaged, .* has another checksum"):
        read_checkpoint(file)


def test_a_checkpoint_is_written_without_a_copy_of_it_in_memory(tmp_path: Path) -> None:
    content = {"state_dict": {"weight": torch.ones(1 << 22)}}
    tracemalloc.start()
    write_file(content, tmp_path / "last.ckpt")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (tmp_path / "last.ckpt").stat().st_size > 4 << 22
    assert peak < 1 << 20


class Code:
    """What a pickle may do when it is read."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> object:
        return os.mkdir, (str(self.marker),)


def test_a_checkpoint_with_code_is_refused_and_the_code_not_run(tmp_path: Path) -> None:
    file, marker = tmp_path / "last.ckpt", tmp_path / "ran"
    torch.save({"global_step": 1, "state_dict": Code(marker)}, file)
    with pytest.raises(ConfigError, match="reading it could run code"):
        read_checkpoint(file)
    assert not marker.exists()


def test_the_last_whole_checkpoint_is_chosen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    last = tmp_path / "last.ckpt"
    assert (newest_whole(last), checkpoint_step(None)) == (None, 0)
    for step in (1, 2, 3):
        replace_checkpoint(write(tmp_path / "fresh", step), last)
        assert newest_whole(last) == last
    assert [checkpoint_step(file) for file in (last, before(last))] == [3, 2]
    last.write_bytes(last.read_bytes()[:1000])
    assert capsys.readouterr().err == ""
    assert newest_whole(last) == before(last)
    assert "last.ckpt: is damaged" in capsys.readouterr().err
    before(last).write_bytes(b"")
    with pytest.raises(ConfigError, match=r"there is no whole one before it; start over with overwrite=true"):
        newest_whole(last)


@pytest.mark.slow
def test_a_torn_checkpoint_is_replaced_by_the_one_before(whole: Path, tiny: list[str], tmp_path: Path) -> None:
    overrides = [*tiny, *RUN, f"runs_dir={tmp_path}"]
    last = stopped(at(Monitor, "on_train_batch_end", 14), stop, *overrides).folder.checkpoint
    assert [checkpoint_step(file) for file in (last, before(last))] == [14, 12]
    last.write_bytes(last.read_bytes()[:-1])
    assert ends_as_the_whole_run(whole, *overrides)
    assert not before(last).exists()
