"""Compiling in training: when it pays, what it needs, what it leaves as it was, and that arms decide alike."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch._dynamo.utils import counters

from llama_lab import load_config
from llama_lab.config.components import model_cost
from llama_lab.devices.hardware import Hardware
from llama_lab.runs.folder import RESOLVED
from llama_lab.runs.result_table import summary_rows
from llama_lab.runs.stored import Summary
from llama_lab.study.measure import timed_run
from llama_lab.training import compiling
from llama_lab.training import train as training
from llama_lab.training.checkpointing import Checkpointing
from llama_lab.training.compiling import THRESHOLDS, Threshold, compile_in_place, decide, missing_part, pays
from llama_lab.util.errors import ConfigError, FinishedRunError
from tests.composing import decoder
from tests.conftest import Command, RunTrain, needs_compiler
from tests.selection import first
from tests.training.stopping import at, cut, stopped
from tests.training.tiny import identical, logged, planned, trained, trained_state

Capsys = pytest.CaptureFixture[str]
SetThreshold = Callable[[float], None]
SHORT = ("train.tokens=5120", "train.evaluations=2", "train.eval_lengths=[2]")  # 20 steps
AT_STEP_3 = at(Checkpointing, "on_train_batch_end", 3)


def on(accelerator: str, devices: int = 1, **settings: Any) -> Hardware:
    """Devices of a machine."""
    return Hardware(accelerator, devices, 1, "32-true", accelerator, **settings)


def compiled_in(folder: Path) -> object:
    """What a run has recorded."""
    return OmegaConf.load(folder / RESOLVED).trainer.compile


@pytest.fixture
def set_threshold(monkeypatch: pytest.MonkeyPatch) -> SetThreshold:
    """Sets the training FLOPs from which a run on a CPU compiles: blocks are traced, but run as they are written."""
    monkeypatch.setattr(training, "compile_in_place", partial(compile_in_place, backend="eager"))
    monkeypatch.setattr(compiling, "missing_part", lambda hardware: None)
    counters.clear()
    return lambda flops: monkeypatch.setitem(THRESHOLDS, "cpu", Threshold(1.0, flops))


@pytest.fixture
def without_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without one."""
    monkeypatch.setattr(compiling.shutil, "which", lambda name: None)


# When it pays


def test_the_runs_of_the_readme_stay_eager_by_far(tmp_path: Path) -> None:
    for command in ((), ("train.tokens=3e5", "train.batch_size=8")):
        run = planned(*command, "trainer=cpu", f"runs_dir={tmp_path}")
        assert run.cfg.trainer.compile == "auto"
        cost = model_cost(decoder("size=nano", *command, vocab_size=4096))
        assert not pays(3 * run.flops(cost), run.hardware)


def test_a_run_pays_by_its_flops_per_device_and_their_kind() -> None:
    enough = {kind: one.flops_per_second * one.seconds * 1.01 for kind, one in THRESHOLDS.items()}
    assert pays(enough["cpu"], on("cpu"))
    assert not pays(enough["cpu"] / 1.02, on("cpu"))
    assert not pays(enough["cpu"], on("cpu", devices=2))
    assert not pays(enough["cpu"], on("gpu"))
    assert pays(enough["gpu"], on("gpu"))
    assert not pays(1e30, on("mps")), "where it was never tried"


@pytest.mark.slow
def test_auto_compiles_a_long_run_and_says_so(
    set_threshold: SetThreshold, tiny: list[str], tmp_path: Path, capsys: Capsys
) -> None:
    """What a run does is recorded, and what a measurement of it does."""
    set_threshold(1.0)
    folder = trained(*tiny, *SHORT, f"runs_dir={tmp_path}")
    told = [line.partition("; ")[0] for line in capsys.readouterr().err.splitlines()]
    assert told == ["trainer.compile=auto: compiles"]
    assert counters["stats"]["unique_graphs"] == 1, "evaluations and the sample compile nothing"
    assert not counters["graph_break"]
    summary = Summary.load(folder)
    assert compiled_in(folder) is summary.compiled is True
    assert summary.metrics["perf/compile_seconds"] > 0
    assert any("compiling" in label for label, _ in summary_rows(summary))
    for setting, measured in (("auto", True), ("false", False)):
        measuring = planned(*tiny, f"measure={tmp_path}", f"trainer.compile={setting}")
        assert timed_run(folder, measuring).compiled is measured


# What it needs


def test_without_a_compiler_auto_goes_on_eagerly_and_says_why(without_compiler: None, capsys: Capsys) -> None:
    assert decide(1e30, on("cpu")) is False
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("trainer.compile=auto: trains eagerly, since compiling needs a C++ compiler (apt install")
    assert decide(1.0, on("cpu")) is False
    assert capsys.readouterr().err == "", "it would not have compiled anyway"


def test_without_a_compiler_true_is_refused(without_compiler: None, command: Command, tiny: list[str]) -> None:
    ran = command(*tiny, "trainer.compile=true")
    assert (ran.code, ran.err.count("\n")) == (2, 1)
    assert ran.err.startswith("error: trainer.compile=true: needs a C++ compiler")
    assert not (ran.cwd / "runs").exists()


def test_a_gpu_needs_triton_and_any_device_the_headers_of_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "has_triton", lambda: False)
    assert (missing_part(on("gpu")) or "").startswith("Triton")
    monkeypatch.setattr(compiling, "has_triton", lambda: True)
    monkeypatch.setattr(compiling.shutil, "which", lambda name: name)
    monkeypatch.setattr(compiling.sysconfig, "get_path", lambda name: "/nowhere")
    for device in ("cpu", "gpu"):
        assert missing_part(on(device)) == "the headers of Python (apt install python3-dev)"
        assert missing_part(on(device, elsewhere=True)) is None, "this machine says nothing of another"


def test_another_value_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^trainer\.compile=yes: "):
        load_config(["trainer.compile=yes"])


# How it is done


GRAPHS = {
    "arch=llama": 1,
    "arch=gemma2 model.attention.window=8": 4,  # the first block makes the mask, of a window or of none
    "arch=llama position=alibi": 2,
    "arch=gpt2 model.dropout=0.1": 1,
    "attention=linear position=none": 1,
    "attention=gated_delta position=none": 1,
    "attention=kimi_delta position=none": 1,
    "attention=mamba2 position=none": 1,
}


@pytest.mark.slow
@pytest.mark.parametrize("choice", first(2, GRAPHS))
def test_equal_blocks_share_their_code(choice: str) -> None:
    model = decoder(*choice.split(), "model.n_layers=6")
    keys = list(model.state_dict())
    compile_in_place(model, backend="eager")
    counters.clear()
    for _ in range(2):
        model(torch.randint(97, (2, 24))).sum().backward()
    assert counters["stats"]["unique_graphs"] == GRAPHS[choice]
    assert not counters["graph_break"]
    assert list(model.state_dict()) == keys


# What was begun


@pytest.mark.slow
def test_an_interrupted_run_goes_on_as_it_began(
    set_threshold: SetThreshold, tiny: list[str], tmp_path: Path, capsys: Capsys
) -> None:
    overrides = [*tiny, *SHORT, f"runs_dir={tmp_path}", "train.checkpoint_every=1"]
    set_threshold(1.0)
    folder = stopped(AT_STEP_3, cut, *overrides).folder.path
    set_threshold(1e30)
    capsys.readouterr()
    counters.clear()
    trained(*overrides)
    assert capsys.readouterr().err == ""
    assert compiled_in(folder) is Summary.load(folder).compiled is True
    assert counters["stats"]
    with pytest.raises(FinishedRunError):
        planned(*overrides)
    with pytest.raises(ConfigError, match="already holds a finished run") as refused:
        planned(*overrides, "trainer.compile=false")
    assert not isinstance(refused.value, FinishedRunError)


@pytest.mark.slow
def test_arms_decide_alike_and_as_the_study_began(
    set_threshold: SetThreshold, command: Command, tiny: list[str]
) -> None:
    options = ("kv_heads=[4,1]", "seeds=[1]", "learning_rates=null", "measure_speed=false")
    short = ("match=none", "train.tokens=1024", "train.evaluations=1")
    study = partial(command, *tiny, "study=kv_heads", *short, *(f"study.{option}" for option in options))

    def found(name: str, told: int, *more: str) -> set[object]:
        """What the arms of all seeds have recorded; `told`: how often compiling was."""
        ran = study(f"name={name}", *more)
        assert (ran.code, ran.err.count("\n"), ran.err.count("trainer.compile=auto: compiles")) == (0, told, told)
        return {compiled_in(path.parent) for path in Path("runs", name).rglob("summary.json")}

    set_threshold(1e30)
    assert found("first", 0) == {False}
    metrics = [Summary.load(path.parent).metrics for path in Path("runs").rglob("summary.json")]
    small, large = sorted(each["tokens"] * each["train_flops_per_token"] for each in metrics)
    set_threshold((small + large) / 2)
    assert found("second", 1) == {True}
    assert found("first", 0, "study.seeds=[1,2]") == {False}, "not as the study began"


# Real code


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("mixer", first(1, ["mha", "gated_delta"]))
def test_a_compiled_run_is_the_eager_one_and_resumes_to_the_same_bits(
    mixer: str, tiny: list[str], tmp_path: Path
) -> None:
    settings = [*tiny, *SHORT, f"attention={mixer}", "position=none", "model.n_layers=1", "train.checkpoint_every=1"]
    eager, compiled = (
        trained(*settings, f"trainer.compile={setting}", f"runs_dir={tmp_path / setting}")
        for setting in ("false", "true")
    )
    for loss in ("train/loss", "val/loss"):
        assert logged(compiled, loss) == pytest.approx(logged(eager, loss), abs=1e-4)
    overrides = [*settings, "trainer.compile=true", f"runs_dir={tmp_path / 'cut'}"]
    stopped(AT_STEP_3, cut, *overrides)
    assert identical(trained_state(trained(*overrides)), trained_state(compiled))


@needs_compiler
@pytest.mark.matrix
def test_compiled_code_is_kept_and_a_cut_cache_is_named(tmp_path: Path, run_train: RunTrain, tiny: list[str]) -> None:
    cache = tmp_path / "inductor"
    settings = ("train.tokens=1280", "trainer.compile=true", "model.n_layers=2", "norm=none", "ffn=relu")
    compiled = partial(run_train, *tiny, *settings, TORCHINDUCTOR_CACHE_DIR=str(cache))

    def written() -> dict[Path, int]:
        return {file: file.stat().st_mtime_ns for file in cache.rglob("*") if file.is_file()}

    assert compiled().code == 0
    before = written()
    assert any("aotautograd" in str(file) for file in before)
    assert compiled().err == ""
    assert written() == before
    for file in cache.rglob("*.so"):
        os.truncate(file, file.stat().st_size // 2)
    ran = compiled()
    assert (ran.code, ran.err.count("\n")) == (2, 1), ran.err
    assert ran.err.startswith("error: trainer.compile: ")
    assert f"; delete {cache}, and run the same command again" in ran.err
