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

from llama_lab.config.components import model_cost
from llama_lab.devices.hardware import Hardware
from llama_lab.runs.folder import RESOLVED
from llama_lab.runs.result_table import summary_rows
from llama_lab.runs.stored import Summary
from llama_lab.study.measure import job_of
from llama_lab.training import compiling
from llama_lab.training import train as training
from llama_lab.training.checkpointing import Checkpointing
from llama_lab.training.command import train_run
from llama_lab.training.compiling import THRESHOLDS, Threshold, compile_in_place, decide, missing_part, pays
from llama_lab.training.run import Run
from llama_lab.util.errors import ConfigError, FinishedRunError
from tests.composing import decoder
from tests.conftest import Command, Ran, RunTrain, needs_compiler
from tests.training.tiny import identical, planned, repeatable, rows, trained_state

SHORT = ("train.tokens=5120", "train.evaluations=2", "train.eval_lengths=[2]")  # 20 steps
COMPILES = ("trainer.compile=true",)


def on(accelerator: str, devices: int = 1, **settings: Any) -> Hardware:
    """Devices of a machine."""
    return Hardware(accelerator, devices, 1, "32-true", accelerator, **settings)


def compiled_in(folder: Path) -> object:
    """What a run has recorded."""
    return OmegaConf.load(folder / RESOLVED).trainer.compile


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trace blocks, but run them as they are written, instead of compiling them for seconds."""
    monkeypatch.setattr(training, "compile_in_place", partial(compile_in_place, backend="eager"))
    monkeypatch.setattr(compiling, "missing_part", lambda hardware: None)
    counters.clear()


@pytest.fixture
def set_threshold(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Set the training FLOPs from which a run on a CPU compiles."""
    return lambda flops: monkeypatch.setitem(THRESHOLDS, "cpu", Threshold(1.0, flops))


@pytest.fixture
def without_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without one."""
    monkeypatch.setattr(compiling.shutil, "which", lambda name: None)


# When it pays


@pytest.mark.parametrize("command", [(), ("train.tokens=3e5", "train.batch_size=8")], ids=["first run", "ladder"])
def test_the_runs_of_the_readme_stay_eager_by_far(command: tuple[str, ...], tmp_path: Path) -> None:
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


@pytest.mark.parametrize("compiles", [True, False])
@pytest.mark.slow
def test_auto_compiles_a_long_run_and_says_so(
    compiles: bool,
    quick: None,
    set_threshold: Callable[[float], None],
    tiny: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """And keeps a short one eager in silence. What a run does is recorded, and what a measurement of it does."""
    if compiles:
        set_threshold(1.0)
    run = planned(*tiny, *SHORT, f"runs_dir={tmp_path}")
    assert train_run(run) == "done"
    told = [line.partition("; ")[0] for line in capsys.readouterr().err.splitlines()]
    assert told == (["trainer.compile=auto: compiles"] if compiles else [])
    assert counters["stats"]["unique_graphs"] == compiles, "evaluations and the sample compile nothing"
    assert not counters["graph_break"]
    summary = Summary.load(run.folder.path)
    assert compiled_in(run.folder.path) is summary.compiled is compiles
    assert (summary.metrics.get("perf/compile_seconds", 0) > 0) is compiles
    assert any("compiling" in label for label, _ in summary_rows(summary)) is compiles
    for setting, measured in (("auto", compiles), ("false", False)):
        job = planned(*tiny, f"measure={tmp_path}", f"trainer.compile={setting}")
        assert job_of(run.folder.path, job).compiled is measured


# What it needs


def test_without_a_compiler_auto_goes_on_eagerly_and_says_why(
    without_compiler: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert decide(1e30, on("cpu")) is False
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("trainer.compile=auto: trains eagerly, since compiling needs a C++ compiler (apt install")
    assert decide(1.0, on("cpu")) is False
    assert capsys.readouterr().err == "", "it would not have compiled anyway"


@pytest.mark.slow
def test_without_a_compiler_true_is_refused_with_the_fix_before_anything_is_written(
    without_compiler: None, command: Command, tiny: list[str]
) -> None:
    for study in ((), ("study=ladder", "study.dry_run=true")):
        ran = command(*tiny, *study, *COMPILES)
        needs = "needs a C++ compiler (apt install g++), or set trainer.compile=false"
        assert (ran.code, ran.err) == (2, f"error: trainer.compile=true: {needs}\n")
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


@pytest.mark.parametrize("value", ["yes", "1", "Auto", "null"])
def test_other_values_are_refused_in_one_line(value: str, command: Command, tiny: list[str]) -> None:
    ran = command(*tiny, f"trainer.compile={value}")
    assert (ran.code, ran.err) == (2, f"error: trainer.compile={value}: must be true or false or auto\n")


# How it is done


@pytest.mark.parametrize(
    ("overrides", "graphs"),
    [
        (["arch=llama"], 1),
        (["arch=gpt2", "model.dropout=0.1"], 1),
        (["arch=llama", "position=alibi"], 2),  # the first block makes the mask
        (["arch=gemma2"], 4),  # the same, of the layers with a window and those without
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_equal_blocks_share_their_code(overrides: list[str], graphs: int) -> None:
    model = decoder(*overrides, "model.n_layers=12", *(["model.attention.window=8"] if graphs == 4 else []))
    keys = list(model.state_dict())
    compile_in_place(model, backend="eager")
    counters.clear()
    for _ in range(2):
        model(torch.randint(97, (2, 24))).sum().backward()
    assert counters["stats"]["unique_graphs"] == graphs
    assert not counters["graph_break"]
    assert list(model.state_dict()) == keys


# What was begun


class Cut(BaseException):
    """A power cut."""


def interrupted(monkeypatch: pytest.MonkeyPatch, *overrides: str) -> Run:
    """A run that was cut off after its third step, with a checkpoint of each step."""
    run = planned(*overrides, "train.checkpoint_every=1")
    save = Checkpointing.on_train_batch_end

    def cut(self: Checkpointing, trainer: Any, *rest: Any) -> None:
        save(self, trainer, *rest)
        if trainer.global_step == 3:
            raise Cut

    with monkeypatch.context() as patched:
        patched.setattr(Checkpointing, "on_train_batch_end", cut)
        with pytest.raises(Cut):
            train_run(run)
    return run


@pytest.mark.parametrize("began", [True, False])
@pytest.mark.slow
def test_an_interrupted_run_goes_on_as_it_began(
    began: bool,
    quick: None,
    set_threshold: Callable[[float], None],
    monkeypatch: pytest.MonkeyPatch,
    tiny: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    overrides = [*tiny, *SHORT, f"runs_dir={tmp_path}", "train.checkpoint_every=1"]
    set_threshold(1.0 if began else 1e30)
    run = interrupted(monkeypatch, *overrides)
    assert compiled_in(run.folder.path) is began
    set_threshold(1e30 if began else 1.0)
    capsys.readouterr()
    counters.clear()
    assert train_run(planned(*overrides)) == "done"
    assert capsys.readouterr().err == ""
    assert compiled_in(run.folder.path) is Summary.load(run.folder.path).compiled is began
    assert bool(counters["stats"]) is began
    with pytest.raises(FinishedRunError):
        planned(*overrides)
    with pytest.raises(ConfigError, match="already holds a finished run") as refused:
        planned(*overrides, f"trainer.compile={str(not began).lower()}")
    assert not isinstance(refused.value, FinishedRunError)


# Arms

PAIR = ("study=kv_heads", "study.kv_heads=[4,1]", "study.seeds=[1]", "match=none", "study.learning_rates=null")
STUDY = (*PAIR, "name=pair", "study.measure_speed=false", *SHORT)


@pytest.fixture
def study(command: Command, tiny: list[str]) -> Callable[..., Ran]:
    """Run a study of two arms with unequal FLOPs."""
    return partial(command, *tiny, *STUDY)


def flops_of(folder: Path) -> float:
    """What a finished run has computed."""
    metrics = Summary.load(folder).metrics
    return metrics["tokens"] * metrics["train_flops_per_token"]


@pytest.mark.slow
def test_arms_on_both_sides_of_the_threshold_decide_alike_and_as_the_study_began(
    quick: None, set_threshold: Callable[[float], None], study: Callable[..., Ran]
) -> None:
    set_threshold(1.0)
    first = study("study.dry_run=true")
    assert first.err.count("trainer.compile=auto: compiles") == 1
    set_threshold(1e30)
    ran = study()
    assert (ran.code, ran.err) == (0, "")
    folder = ran.cwd / "runs" / "pair"
    arms = [path.parent for path in sorted(folder.glob("*/seed=1/summary.json"))]
    small, large = sorted(map(flops_of, arms))
    assert small < large
    between = (small + large) / 2
    assert [compiled_in(arm) for arm in arms] == [False, False]

    set_threshold(between)
    again = study("name=second")
    assert again.err.count("trainer.compile=auto: compiles") == 1
    second = [again.cwd / "runs" / "second" / arm.relative_to(folder) for arm in arms]
    assert [compiled_in(arm) for arm in second] == [True, True]
    third = study("study.seeds=[1,2]")
    assert (third.code, third.err) == (0, "")
    assert [compiled_in(arm.with_name("seed=2")) for arm in arms] == [False, False], "not as the study began"
    set_threshold(1e30)
    fourth = study("name=second", "study.seeds=[1,2]")
    assert (fourth.code, fourth.err) == (0, "")
    assert [compiled_in(arm.with_name("seed=2")) for arm in second] == [True, True]


# Real code

CACHED = """
import sys, torch
from torch._dynamo.utils import counters
from tests.composing import decoder
from llama_lab.training.compiling import compile_in_place
model = decoder("model.n_layers=3")
compile_in_place(model)
model(torch.randint(97, (2, 24))).sum().backward()
print(counters["aot_autograd"]["autograd_cache_hit"], counters["aot_autograd"]["autograd_cache_miss"])
"""


@needs_compiler
@pytest.mark.slow
def test_the_next_process_finds_what_the_first_has_compiled(tmp_path: Path, run_train: RunTrain) -> None:
    script = tmp_path / "once.py"
    script.write_text(CACHED)
    root = Path(__file__).parents[2]
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": str(root)}
    found = [run_train(script=script, fresh=True, **cache) for _ in range(2)]
    assert [ran.out.split() for ran in found] == [["0", "1"], ["1", "0"]], found


@needs_compiler
@pytest.mark.slow
def test_a_compiled_run_is_the_eager_one_and_resumes_to_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, tiny: list[str], tmp_path: Path
) -> None:
    runs = {}
    for name, setting in (("eager", "false"), ("compiled", "true")):
        run = planned(*tiny, *SHORT, f"trainer.compile={setting}", f"runs_dir={tmp_path / name}")
        assert train_run(run) == "done"
        runs[name] = run.folder.path
    losses = [[row[key] for row in rows(path) for key in row if key.endswith("loss")] for path in runs.values()]
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)
    overrides = [*tiny, *SHORT, *COMPILES, f"runs_dir={tmp_path / 'cut'}", "train.checkpoint_every=1"]
    cut = interrupted(monkeypatch, *overrides)
    assert train_run(planned(*overrides)) == "done"
    assert identical(trained_state(cut.folder.path), trained_state(runs["compiled"]))


@needs_compiler
@pytest.mark.slow
def test_a_cache_that_was_cut_short_is_told_in_one_line_and_changes_no_number(
    tmp_path: Path, run_train: RunTrain, tiny: list[str]
) -> None:
    cache = tmp_path / "inductor"
    compiled = partial(
        run_train, *tiny, "train.tokens=2560", "trainer.compile=true", TORCHINDUCTOR_CACHE_DIR=str(cache)
    )
    whole = compiled()
    assert whole.code == 0, whole.err
    for kind in (".so", ".py"):
        for file in cache.rglob(f"*{kind}"):
            os.truncate(file, file.stat().st_size // 2)
        ran = compiled()
        assert (ran.code, ran.err.count("\n")) == (0, 1), ran.err
        assert ran.err.startswith("trainer.compile: ")
        assert ran.err.endswith(f"; tries again without {cache}\n")
        assert repeatable(ran.run) == repeatable(whole.run)
    assert compiled().err == ""
