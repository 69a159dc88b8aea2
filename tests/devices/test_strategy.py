"""Sharded training is the training of one device, its checkpoints in parts included, whatever kills it."""

import os
import shutil
import signal
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from llama_lab.devices.strategy import Checkpoints, DataParallel, FullySharded, materialise, shard
from llama_lab.evaluation.load import load_run
from llama_lab.model.init import linear_on_meta
from llama_lab.runs import checkpoint
from llama_lab.runs.checkpoint import (
    before,
    checkpoint_step,
    consolidate,
    load_checkpoint,
    newest_whole,
    read_checkpoint,
)
from llama_lab.runs.folder import RunFolder
from llama_lab.runs.stored import Summary
from llama_lab.training.module import LanguageModel
from llama_lab.util.errors import ConfigError
from tests.composing import decoder, kinds, options
from tests.conftest import Ran, RunTrain, needs_compiler
from tests.selection import first
from tests.training.stopping import Power, cut, while_replacing_the_checkpoint
from tests.training.tiny import (
    LOOPBACK,
    identical,
    killed_after,
    logged,
    pieces,
    repeatable,
    rows,
    trained,
    trained_state,
)

# 40 steps of several micro-batches, with a limit on the gradient that bites, and one table for both ends. At most
# checkpoints there are losses that are not logged yet.
RUN = [
    "embedding=tied",
    "train.tokens=10240",
    "train.micro_batch_size=2",
    "train.grad_clip=0.5",
    "train.log_every=4",
    "train.evaluations=2",
    "train.checkpoint_every=10",
    "train.ema=0.9",
]
SHARDED = ["trainer=fsdp", "trainer.accelerator=cpu", "trainer.devices=2"]


@pytest.fixture(autouse=True)
def on_loopback() -> Iterator[None]:
    """Run inside this process as if it were a fresh one: Lightning leaves a rank in the environment."""
    with patch.dict(os.environ, LOOPBACK):
        yield


@pytest.fixture(scope="module")
def one(tiny: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the run on one device."""
    return trained(*tiny, *RUN, f"runs_dir={tmp_path_factory.mktemp('one')}")


@pytest.fixture(scope="module")
def killed(tiny: list[str], run_train: RunTrain, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """The same run in two shards, both of whose processes the kernel kills after step 33."""
    cwd = tmp_path_factory.mktemp("killed")
    return run_train(*tiny, *RUN, *SHARDED, cwd=cwd, script=killed_after(33, cwd), **LOOPBACK)


@pytest.fixture(scope="module")
def two(killed: Ran, tiny: list[str], run_train: RunTrain, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """The same in two shards again, which go on from there to the end."""
    cwd = tmp_path_factory.mktemp("again") / "copy"
    shutil.copytree(killed.cwd, cwd)
    return run_train(*tiny, *RUN, *SHARDED, cwd=cwd, **LOOPBACK)


@pytest.fixture
def left(killed: Ran, tmp_path: Path) -> RunFolder:
    """A copy of what the killed run left, below `name/arm/seed=1`."""
    path = tmp_path / "runs" / "name" / "arm" / "seed=1"
    shutil.copytree(killed.run, path)
    return RunFolder(path)


def assert_same_curve(run: Path, expected: Path) -> None:
    """Two runs log the same, to what sums in another order leave of float32."""
    ours, theirs = repeatable(run), repeatable(expected)
    assert [row.keys() for row in ours] == [row.keys() for row in theirs]
    for row, other in zip(ours, theirs, strict=True):
        assert row == pytest.approx(other, abs=1e-6 if "val/loss" in row else 1e-5)


def assert_close(a: Any, b: Any) -> None:
    """Two nests of dicts and lists have the same form, and tensors of the same kind that differ by rounding alone."""
    assert type(a) is type(b)
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_close(a[key], b[key])
    elif isinstance(a, list | tuple):
        for x, y in zip(a, b, strict=True):
            assert_close(x, y)
    elif isinstance(a, torch.Tensor):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)
    else:
        assert a == b


# Data parallel


class Synced(LanguageModel):
    """A model that notes whether its backward passes average gradients over devices."""

    synced: ClassVar[list[bool]] = []

    def backward(self, loss: torch.Tensor, *arguments: Any, **keywords: Any) -> None:
        self.synced.append(self.trainer.strategy.model.require_backward_grad_sync)  # type: ignore[union-attr]
        super().backward(loss, *arguments, **keywords)


@pytest.mark.slow
def test_gradients_are_averaged_once_a_step_after_its_last_micro_batch(
    tiny: list[str], one: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llama_lab.training.train.make_strategy", lambda hardware: DataParallel())
    parts = pieces(*tiny, *RUN, f"runs_dir={tmp_path}", kind=Synced)
    assert parts.fit() == "done"
    assert Synced.synced == [False, False, False, True] * 40
    assert repeatable(parts.run.folder.path) == repeatable(one)


# The same training


@pytest.mark.slow
def test_two_shards_that_are_killed_and_go_on_log_what_one_device_logs_and_end_with_its_one_file(
    two: Ran, one: Path
) -> None:
    assert (two.code, two.err) == (0, "")
    assert two.out.count("│ parameters") == 1, "each rank prints"
    assert "step 20/" not in two.out, "they started over"
    assert_same_curve(two.run, one)
    assert len(rows(one)) == 11 + 2
    assert max(logged(one, "optim/grad_norm")) > 0.5, "nothing is clipped"
    assert [file.name for file in (two.run / "checkpoints").iterdir()] == ["last.ckpt"]
    ours, theirs = (torch.load(RunFolder(run).checkpoint, weights_only=True) for run in (two.run, one))
    assert ours.keys() == theirs.keys()
    for key in ("state_dict", "optimizer_states", "lr_schedulers", "train_metrics", "global_step"):
        assert_close(ours[key], theirs[key])
    ours = ours["state_dict"]
    assert ours["model.embedding.head.weight"].data_ptr() == ours["model.embedding.tokens.weight"].data_ptr()
    assert Summary.load(two.run).metrics["val/loss"] == rows(two.run)[-1]["val/loss"]
    assert (two.run / "sample.txt").read_text() == (one / "sample.txt").read_text()


@pytest.fixture
def mesh(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """This process alone, as a group."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


@pytest.fixture
def mesh_of_four() -> Iterator[DeviceMesh]:
    """The second of four processes, the others of which are not there."""
    torch.distributed.init_process_group("fake", rank=1, world_size=4, store=FakeStore())
    yield init_device_mesh("cpu", (4,))
    torch.distributed.destroy_process_group()


FEW = ["arch=llama", "arch=t5", "ffn=moe", "position=none attention=mamba2"]
MANY = [
    *(f"arch={name}" for name in options("arch")),
    *(f"position={name}" for name in kinds("position")),
    *(f"embedding={name}" for name in kinds("embedding")),
    *(f"block={name}" for name in kinds("block")),
    *(f"position=none attention={name}" for name in ("linear", "gated_delta", "kimi_delta")),
]
ZOO = first(4, dict.fromkeys(FEW + MANY))


@pytest.mark.parametrize("choice", ZOO)
def test_every_architecture_has_the_weights_logits_and_gradients_that_it_has_whole(choice: str, mesh: Any) -> None:
    tokens = torch.arange(24).view(2, 12)
    whole, sharded = decoder(*choice.split()), decoder(*choice.split())
    shard(sharded, mesh, mixed=False)
    assert all(isinstance(parameter, DTensor) for parameter in sharded.parameters())
    for (name, weight), (_, expected) in zip(sharded.state_dict().items(), whole.state_dict().items(), strict=True):
        found = weight.full_tensor() if isinstance(weight, DTensor) else weight  # buffers are whole
        assert torch.equal(found, expected), name
    inputs, targets, *given = whole.cut(tokens, tokens)
    of_each = [model(inputs, None, *given).flatten(0, 1) for model in (whole, sharded)]
    losses = [F.cross_entropy(logits, targets.flatten()) for logits in of_each]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(*losses)
    for ours, expected in zip(sharded.parameters(), whole.parameters(), strict=True):
        assert isinstance(ours.grad, DTensor)
        torch.testing.assert_close(ours.grad.full_tensor(), expected.grad)


@pytest.mark.parametrize("choice", ZOO)
def test_each_process_keeps_its_rows_of_weights_that_are_drawn_one_at_a_time(
    choice: str, mesh_of_four: DeviceMesh
) -> None:
    whole = decoder(*choice.split())
    with linear_on_meta(True):
        model = decoder(*choice.split())
    assert any(parameter.is_meta for parameter in model.parameters())
    shard(model, mesh_of_four, mixed=False)
    drawn: list[weakref.ref[torch.Tensor]] = []

    def draw(weight: torch.Tensor, residual: bool, generator: torch.Generator) -> None:
        kept = [one for earlier in drawn if (one := earlier()) is not None]
        own = weight.untyped_storage().data_ptr()  # which the matrices of a stack share
        assert all(one.untyped_storage().data_ptr() == own for one in kept)
        drawn.append(weakref.ref(weight))
        model.weight_init(weight, residual, generator)

    vars(draw).update(vars(model.weight_init))  # its gains of some matrices
    materialise(model, draw, torch.device("cpu"))
    model.to("cpu")  # which moves shards that share their memory with more than themselves
    assert len(drawn) > 1
    for (name, ours), (_, expected) in zip(model.named_parameters(), whole.named_parameters(), strict=True):
        own = [*expected.chunk(4), *[expected[:0]] * 3][1]
        assert isinstance(ours, DTensor)
        assert torch.equal(ours.to_local(), own), name
        assert ours.to_local().untyped_storage().nbytes() <= -(-len(expected) // 4) * expected[:1].nbytes


def test_mixed_precision_gathers_weights_in_bf16_and_keeps_them_and_their_gradients_in_float32(mesh: Any) -> None:
    model = decoder()
    gathered: set[torch.dtype] = set()
    shard(model, mesh, mixed=True)
    for block in model.blocks:
        assert isinstance(block, FSDPModule)
        policy = block._get_fsdp_state()._fsdp_param_group.mp_policy  # type: ignore[attr-defined]
        assert (policy.param_dtype, policy.reduce_dtype) == (torch.bfloat16, torch.float32)
        block.ffn.register_forward_pre_hook(lambda ffn, _: gathered.update(p.dtype for p in ffn.parameters()))
    model(torch.arange(24).view(2, 12)).float().square().mean().backward()
    assert gathered == {torch.bfloat16}
    assert {p.dtype for p in model.parameters()} == {p.grad.dtype for p in model.parameters()} == {torch.float32}


@needs_compiler
@pytest.mark.slow
def test_a_compiled_sharded_run_is_the_run_of_one_device(one: Path, tiny: list[str], tmp_path: Path) -> None:
    compiled = trained(*tiny, *RUN, *SHARDED[:2], "trainer.compile=true", f"runs_dir={tmp_path}")
    assert torch._dynamo.utils.counters["frames"]["ok"] > 0
    assert_same_curve(compiled, one)


# Checkpoints in parts


def test_a_killed_sharded_run_leaves_a_part_of_each_process(killed: Ran) -> None:
    assert killed.code == -signal.SIGKILL
    folder = RunFolder(killed.run)
    parts = ["0_of_2.ckpt", "1_of_2.ckpt"]
    for path, step in ((folder.checkpoint, 30), (before(folder.checkpoint), 20)):
        assert sorted(file.name for file in path.iterdir()) == parts
        assert checkpoint_step(path) == step
    sizes = [(folder.checkpoint / part).stat().st_size for part in parts]
    assert sizes[1] < 0.6 * sum(sizes)
    assert sizes[0] < 0.7 * sum(sizes), "rank 0 has written more than its rows"
    run = load_run(killed.run)  # which can write
    assert run.step == 30
    joined = read_checkpoint(folder.checkpoint)["state_dict"]
    assert torch.equal(run.model.embedding.head.weight, joined["model.embedding.head.weight"])


@pytest.mark.parametrize(("trainer", "damaged"), [("trainer=cpu", False), ("trainer=fsdp", True)])
def test_one_device_goes_on_from_the_parts_of_two_and_from_those_before_if_one_is_damaged(
    trainer: str,
    damaged: bool,
    left: RunFolder,
    one: Path,
    tiny: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if damaged:
        truncated(left.checkpoint / "1_of_2.ckpt")
    assert trained(*tiny, *RUN, trainer, "trainer.accelerator=cpu", f"runs_dir={tmp_path / 'runs'}") == left.path
    assert ("last.ckpt: is damaged" in capsys.readouterr().err) == damaged
    assert_same_curve(left.path, one)
    assert_close(trained_state(left.path), trained_state(one))


def test_shards_go_on_from_the_file_of_one_device(one: Path, two: Ran, tiny: list[str], tmp_path: Path) -> None:
    ends = []
    for trainer, source in (("cpu", one), ("fsdp", one), ("cpu", two.run)):
        folder = tmp_path / str(len(ends)) / "arm" / "seed=1"
        shutil.copytree(source, folder)
        longer = [f'resume="{folder}"', "train.tokens=12800", f"trainer={trainer}", "trainer.accelerator=cpu"]
        ends.append(trained_state(trained(*tiny, *RUN, *longer)))
        assert ends[-1]["global_step"] == 50
    for end in ends[1:]:
        assert_close(end["state_dict"], ends[0]["state_dict"])


def truncated(part: Path) -> None:
    part.write_bytes(part.read_bytes()[:-1])


DAMAGE: dict[str, Callable[[Path], None]] = {
    "cut": truncated,
    "missing": Path.unlink,
    "another step's": lambda part: shutil.copy(before(part.parent) / part.name, part) and None,
    "of other processes": lambda part: part.rename(part.with_name("0_of_1.ckpt")) and None,
    "none of ours": lambda part: torch.save({"weights": torch.ones(2)}, part),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_part_is_noticed_and_the_checkpoint_before_it_chosen(
    damage: str, left: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    assert newest_whole(left.checkpoint) == left.checkpoint
    DAMAGE[damage](left.checkpoint / "1_of_2.ckpt")
    with pytest.raises(ConfigError, match=r"last\.ckpt: is damaged, "):
        read_checkpoint(left.checkpoint)
    assert newest_whole(left.checkpoint) == before(left.checkpoint)
    assert capsys.readouterr().err.count("\n") == 1


def test_a_part_with_code_is_refused_and_the_code_not_run(left: RunFolder, tmp_path: Path) -> None:
    from tests.runs.test_checkpoint import Code

    torch.save({"global_step": 30, "rows": Code(tmp_path / "ran")}, left.checkpoint / "1_of_2.ckpt")
    with pytest.raises(ConfigError, match="reading it could run code"):
        read_checkpoint(left.checkpoint)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("kind", [DataParallel, FullySharded])
def test_every_rank_reads_the_checkpoint_that_rank_0_has_chosen(
    kind: type[DataParallel], left: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    strategy = kind(checkpoint_io=Checkpoints())
    monkeypatch.setattr(strategy, "broadcast", lambda path: before(path))
    assert strategy.load_checkpoint(left.checkpoint)["global_step"] == 20


# Joining the parts


def while_the_file_is_written(act: Callable[[], object]) -> AbstractContextManager[object]:
    def save(_: object, file: Path) -> None:
        file.write_bytes(b"half")
        act()

    return patch.object(checkpoint, "write_file", save)


def while_the_checkpoint_before_is_deleted(act: Callable[[], object]) -> AbstractContextManager[object]:
    def rmtree(folder: Path) -> None:
        next(folder.iterdir()).unlink()
        act()

    return patch.object(checkpoint.shutil, "rmtree", rmtree)


JOINING = {
    "writing": while_the_file_is_written,
    "deleting": while_the_checkpoint_before_is_deleted,
    "moving the parts": while_replacing_the_checkpoint(1),
    "moving the file": while_replacing_the_checkpoint(2),
}


@pytest.mark.parametrize("moment", JOINING)
def test_a_kill_while_parts_are_joined_leaves_a_whole_checkpoint(moment: str, left: RunFolder) -> None:
    expected = load_checkpoint(left.checkpoint)
    with JOINING[moment](cut), pytest.raises(Power):
        consolidate(left.checkpoint)
    newest = newest_whole(left.checkpoint)
    assert newest is not None
    assert identical(load_checkpoint(newest)["optimizer_states"], expected["optimizer_states"])
    consolidate(left.checkpoint)
    assert left.checkpoint.is_file()
    assert identical(load_checkpoint(left.checkpoint)["state_dict"], expected["state_dict"])
