"""Studies from the command line: what is trained, what is refused, what a second command does."""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from llama_lab.analysis.analyse import analyse
from llama_lab.analysis.rate_choice import chosen_rate
from llama_lab.config.components import build_model
from llama_lab.config.schema import flatten
from llama_lab.runs.folder import OUTPUT
from llama_lab.runs.study import Study
from llama_lab.study.design import tuning
from llama_lab.training import train as train_module
from tests.conftest import Command, Ran, RunTrain
from tests.refusals import check_refused
from tests.study.planning import conducted, planned_study
from tests.training.offline import OfflineRun

SHORT = ("train.tokens=2560", "train.evaluations=2")  # 10 steps
QUICK = ("study.measure_speed=false", *SHORT)
LADDER = (
    "study=ladder",
    "study.learning_rates=null",
    "study.axes=[norm,ffn]",
    "study.seeds=[1,2]",
    "name=climb",
    *QUICK,
)
GRID = ("study=learning_rate", "study.learning_rates=[1e-3,4e-3]", "study.seeds=[1,2]", "name=grid", *QUICK)


@pytest.fixture
def study(command: Command, tiny: list[str]) -> Callable[..., Ran]:
    """Run a tiny study inside this process."""
    return partial(command, *tiny)


@pytest.fixture(scope="module")
def ladder(tiny: list[str], environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """The study LADDER, trained once for all tests of this file."""
    return conducted(tmp_path_factory.mktemp("ladder"), environment, *tiny, *LADDER)


@pytest.fixture(scope="module")
def grid_search(tiny: list[str], environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """The study GRID, trained once for all tests of this file."""
    return conducted(tmp_path_factory.mktemp("grid"), environment, *tiny, *GRID)


def copied(ran: Ran, cwd: Path) -> Path:
    """A copy of a study's folder, which the next command in `cwd` finds."""
    (folder,) = (ran.cwd / "runs").iterdir()
    return Path(shutil.copytree(folder, cwd / "runs" / folder.name))


@pytest.fixture
def climb(ladder: Ran, tmp_path: Path) -> Path:
    """A copy of the folder of LADDER."""
    return copied(ladder, tmp_path)


@pytest.fixture
def grid(grid_search: Ran, tmp_path: Path) -> Path:
    """A copy of the folder of GRID."""
    return copied(grid_search, tmp_path)


def summaries(folder: Path) -> dict[str, dict[str, Any]]:
    """The summary of every finished run below a folder, by its path."""
    found = {file.parent: json.loads(file.read_text()) for file in sorted(folder.rglob("summary.json"))}
    return {str(path.relative_to(folder)): summary for path, summary in found.items()}


def statuses(folder: Path) -> dict[str, str]:
    files = sorted(folder.rglob("status.json"))
    return {str(f.parent.relative_to(folder)): json.loads(f.read_text())["status"] for f in files}


def written(folder: Path) -> dict[Path, int]:
    """When each file of the runs was written."""
    files = (file for file in folder.rglob("seed=*/**/*.*") if file.is_file() and file.name != ".lock")
    return {file: file.stat().st_mtime_ns for file in files}


def changed(folder: Path, before: dict[Path, int]) -> set[str]:
    """The runs that have been written since, by their paths."""
    files = [file for file, time in written(folder).items() if before.get(file) != time]
    return {"/".join(file.relative_to(folder).parts[:2]) for file in files}


@contextmanager
def failing(title: str, error: str) -> Iterator[None]:
    """Inside, the training of one run fails."""
    fit = train_module.fit

    def fails(run: Any, *args: Any) -> Any:
        if run.title == title:
            raise RuntimeError(error)
        return fit(run, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_module, "fit", fails)
        yield


@pytest.mark.slow
def test_a_ladder_trains_every_rung_at_every_seed_and_reports(ladder: Ran) -> None:
    assert (ladder.code, ladder.err) == (0, "")
    folder = ladder.cwd / "runs" / "climb"
    arms = ["vanilla", "+rmsnorm", "+swiglu"]
    assert statuses(folder) == {f"{arm}/seed={seed}": "done" for arm in arms for seed in (1, 2)}
    record = Study.load(folder)
    assert [arm.name for arm in record.arms] == arms
    assert record.command.startswith("python train.py size=pico")
    assert f"the report is {Path('runs/climb/report.html')}" in ladder.out


CORNERS = ("vanilla/seed=1", "+swiglu/seed=2")


@pytest.mark.slow
def test_arms_differ_in_their_axes_and_their_matched_width_alone(climb: Path) -> None:
    base, top = (flatten(yaml.safe_load((climb / run / "resolved.yaml").read_text())) for run in CORNERS)
    assert base["model.hidden_dim"] != top["model.hidden_dim"] != 88
    different = {key for key in base.keys() | top.keys() if base.get(key) != top.get(key)}
    expected = ("model.hidden_dim", "model.norm", "model.ffn", "model.seed", "arm", "seed", "data.seed")
    assert {key for key in different if not key.startswith(expected)} == set()
    params = {summary["params_non_embedding"] for summary in summaries(climb).values()}
    assert max(params) / min(params) < 1.01


@pytest.mark.slow
def test_a_study_that_nobody_touched_is_accused_of_nothing(climb: Path) -> None:
    record = Study.load(climb)
    assert record.arms[1].settings["model.norm._target_"] == "llama_lab.model.norm.RMSNorm"
    assert "model.dim" not in record.arms[1].settings
    # What is true of two seeds, of 10 steps, and of this machine.
    expected = ("One learning rate", "Logged speeds", "The code had", "Matching left", "Two seeds", "Arms vary more")
    found = [warning for warning in analyse(record, climb).warnings if not warning.startswith(expected)]
    assert [warning for warning in found if "learned more" not in warning] == []


def test_arms_start_from_the_same_values_wherever_their_shapes_agree(tiny: list[str]) -> None:
    plan = planned_study(*tiny, *LADDER)
    first, *others = (dict(build_model(arm.runs[0].run.cfg, 257).named_parameters()) for arm in plan.arms)
    for other in others:
        shared = [name for name in first if name in other and first[name].shape == other[name].shape]
        assert any("attention" in name for name in shared)
        assert any("embedding" in name for name in shared)
        assert all(torch.equal(first[name], other[name]) for name in shared)


@pytest.mark.slow
def test_a_dry_run_prints_the_arms_and_their_costs_and_writes_nothing(study: Callable[..., Ran]) -> None:
    name = "long" * 20  # which is still one line
    ran = study(*LADDER, f"name={name}", "study.dry_run=true")
    assert (ran.code, ran.err) == (0, "")
    assert not (ran.cwd / "runs").exists()
    assert f"{name}: 3 arms, 6 runs\n" in ran.out
    for expected in ("vanilla", "+rmsnorm", "+swiglu", "residual", "FLOPs", "KV B", "time"):
        assert expected in ran.out
    assert "2 seeds would find a difference of " in ran.out
    assert max(len(line) for line in ran.out.splitlines() if "│" in line or "─" in line) <= 80


@pytest.mark.slow
def test_a_dry_run_has_the_state_per_sequence_of_recurrent_arms(study: Callable[..., Ran]) -> None:
    arms = ("study=options", "study.axis=attention", "study.options=[linear,conv]", "position=none", *QUICK)
    ran = study(*arms, "study.learning_rates=null", "study.dry_run=true")
    assert (ran.code, ran.err) == (0, "")
    assert re.findall(r" +(\+ \d.*B) +\n", ran.out) == ["+ 2.25 KiB", "+ 256 B"]
    assert ran.out.count(" + state ") == 1
    assert max(len(line) for line in ran.out.splitlines() if " k " in line or "─" in line) <= 80


def test_a_dry_run_prices_a_study_on_devices_that_are_not_here(study: Callable[..., Ran]) -> None:
    ran = study(*LADDER, "study.dry_run=true", "device=h100", "trainer.devices=8", "estimate_mfu=0.5")
    assert (ran.code, ran.err) == (0, "")
    assert "from 50% of the peak of 8 x h100" in ran.out
    assert not (ran.cwd / "runs").exists()


@pytest.mark.slow
def test_the_same_command_and_a_comparison_of_all_pairs_train_nothing(study: Callable[..., Ran], climb: Path) -> None:
    before, table = written(climb), (climb / "summary.csv").read_text()
    assert study(*LADDER).code == 0
    assert (written(climb), (climb / "summary.csv").read_text()) == (before, table)
    assert study(*LADDER, "study.compare=all").code == 0
    assert "moderated paired tests of the 3 pairs of arms" in (climb / "report.html").read_text(encoding="utf-8")
    assert study(*LADDER, "study.seeds=[2]").code == 0
    left = "Not part of this report, though in its folder: +rmsnorm/seed=1, +swiglu/seed=1, vanilla/seed=1."
    assert left in Study.load(climb).notes
    assert written(climb) == before


@pytest.mark.slow
def test_another_seed_trains_that_seed_alone(study: Callable[..., Ran], climb: Path) -> None:
    before = written(climb)
    assert study(*LADDER, "study.seeds=[1,2,3]").code == 0
    after = written(climb)
    assert {file: time for file, time in after.items() if file in before} == before
    assert len(summaries(climb)) == 9
    table = (climb / "summary.csv").read_text()
    for _ in range(2):
        assert Study.load(climb).reported_seeds == (2, 3)
        assert "There is no p at 3 seeds" in (climb / "report.html").read_text(encoding="utf-8")
        assert (climb / "summary.csv").read_text() == table
        assert study(*LADDER, "study.seeds=[1,2,3]").code == 0


@pytest.mark.slow
def test_a_changed_arm_is_refused_and_retrained_on_demand_alone(study: Callable[..., Ran], climb: Path) -> None:
    before = written(climb)
    check_refused(study(*LADDER, "optim.lr=1e-3"), "optim.lr=0.001: 6 runs of runs/climb ")
    assert written(climb) == before
    only_ffn = [o for o in LADDER if not o.startswith("study.axes")] + ["study.axes=[ffn,norm]"]
    assert study(*only_ffn).code == 2  # +swiglu comes first now, with another norm
    assert study(*only_ffn, "study.overwrite=true").code == 0
    kept = {file for file, time in before.items() if written(climb).get(file) == time and file.name != OUTPUT}
    assert {file.relative_to(climb).parts[0] for file in kept} == {"vanilla"}


@pytest.mark.slow
def test_a_crash_is_recorded_and_the_rest_goes_on(study: Callable[..., Ran], climb: Path) -> None:
    for run in ("+rmsnorm/seed=1", "+swiglu/seed=2"):  # one to crash, and one of the rest
        shutil.rmtree(climb / run)
    with failing("+rmsnorm/seed=1", "the machine is on fire"):
        ran = study(*LADDER)
    assert ran.code == 1
    assert statuses(climb)["+rmsnorm/seed=1"] == "failed"
    assert sorted(statuses(climb).values()) == ["done"] * 5 + ["failed"]
    assert "+rmsnorm/seed=1: failed, RuntimeError: the machine is on fire" in ran.out
    assert "failed: +rmsnorm/seed=1: RuntimeError: the machine is on fire" in ran.err
    assert "the machine is on fire" in (climb / "report.html").read_text()
    before = written(climb)
    assert study(*LADDER).code == 0, "what crashed is trained again"
    assert changed(climb, before) == {"+rmsnorm/seed=1"}


DIVERGING = ("train.grad_clip=null", "train.log_every=1")


def rates(folder: Path) -> dict[str, float]:
    """The learning rate of every run that is judged."""
    files = {arm: folder / arm for arm in ("vanilla", "llama2")}
    runs = {f"{arm}/{run.name}": run for arm, file in files.items() for run in sorted(file.glob("seed=*"))}
    return {name: yaml.safe_load((run / "resolved.yaml").read_text())["optim"]["lr"] for name, run in runs.items()}


def tuning_losses(folder: Path, arm: str, seed: int) -> dict[float, float]:
    found = {name: one["val/loss"] for name, one in summaries(folder).items() if name.endswith(f"/seed={seed}")}
    return {float(n.split("-lr=")[1].split("/")[0]): loss for n, loss in found.items() if n.startswith(f"{arm}-lr=")}


@pytest.mark.slow
def test_each_judged_run_has_the_rate_of_its_tuning_seed(
    study: Callable[..., Ran], grid_search: Ran, grid: Path
) -> None:
    assert (grid_search.code, grid_search.err) == (0, "")
    arms = ("vanilla", "llama2")
    tried = (0.001, 0.002, 0.004)  # the grid, and halfway from its best end to the other
    tuning = {f"{arm}-lr={rate}/seed={seed}" for arm in arms for rate in tried for seed in (1001, 1002)}
    judged = {f"{arm}/seed={seed}" for arm in arms for seed in (1, 2)}
    assert set(statuses(grid)) == tuning | judged
    expected = {f"{arm}/seed={s}": chosen_rate(tuning_losses(grid, arm, s + 1000)) for arm in arms for s in (1, 2)}
    assert rates(grid) == expected
    result = analyse(Study.load(grid), grid)
    assert [record.seed for record in result.arms[1].records] == [1, 2], "what tunes is not compared"
    assert result.learning_rates[1].chosen == {s: expected[f"llama2/seed={s}"] for s in (1, 2)}
    before = written(grid)
    assert study(*GRID).code == 0
    assert written(grid) == before


@pytest.mark.slow
def test_tuning_runs_are_validated_once_on_other_documents_than_judged_runs(grid: Path) -> None:
    hashes: dict[bool, set[str]] = {True: set(), False: set()}
    for name, run in summaries(grid).items():
        tunes = "-lr=" in name
        hashes[tunes].add(run["data_hash"])
        assert pd.read_csv(grid / name / "metrics.csv")["val/loss"].count() == (1 if tunes else 2)
    assert [len(found) for found in hashes.values()] == [1, 1]
    assert hashes[True] != hashes[False]
    result = analyse(Study.load(grid), grid)
    assert not [w for w in result.warnings if "Runs differ" in w or "differs" in w]
    assert any("Tuning runs are validated on one half of the validation documents" in note for note in result.notes)


@pytest.mark.slow
def test_a_rate_that_diverges_is_not_judged_unless_all_do(study: Callable[..., Ran], tmp_path: Path) -> None:
    folder, grid = tmp_path / "runs" / "grid", [*GRID, *DIVERGING, "study.seeds=[1]"]
    assert study(*grid, "study.learning_rates=[1e-3,1e30]").code == 0
    assert statuses(folder)["llama2-lr=1e+30/seed=1001"] == "diverged"
    assert rates(folder) == {"vanilla/seed=1": 1e-3, "llama2/seed=1": 1e-3}
    shutil.rmtree(folder)
    ran = study(*grid, "study.learning_rates=[1e29,1e30]")
    assert ran.code == 1
    assert rates(folder) == {"vanilla/seed=1": 1e29, "llama2/seed=1": 1e29}
    assert "diverged in 1 of 1 seed" in ran.out
    before = written(folder)
    assert study(*grid, "study.learning_rates=[1e29,1e30]").code == 1
    assert written(folder) == before, "they would diverge again"


@pytest.mark.slow
def test_an_interrupted_tuning_run_delays_the_choice_alone(study: Callable[..., Ran], grid: Path) -> None:
    expected, tunes = rates(grid), "llama2-lr=0.004/seed=1001"
    for run in (tunes, "llama2/seed=1", "llama2/seed=2"):
        shutil.rmtree(grid / run)
    with failing(tunes, "stopped"):
        assert study(*GRID).code == 1
    assert "llama2/seed=1" not in statuses(grid), "its rate is not known yet"
    assert statuses(grid)["llama2/seed=2"] == "done"
    before = written(grid)
    assert study(*GRID).code == 0
    assert rates(grid) == expected
    assert changed(grid, before) == {tunes, "llama2/seed=1"}


@pytest.mark.matrix
def test_a_grid_goes_on_if_its_best_rate_is_an_end(study: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "MOST_EXTENSIONS", 2)
    grid = [*GRID, "study.learning_rates=[1e-5,2e-5]", "study.seeds=[1]"]
    short = study(*grid)
    folder = short.cwd / "runs" / "grid"
    assert rates(folder) == {"vanilla/seed=1": 2e-5, "llama2/seed=1": 2e-5}
    assert "Best at an end of the grid of learning rates: " in " ".join(short.out.split())
    check_refused(study(*grid, "study.extend_rates=true"), "study.learning_rates")
    assert study(*grid, "study.extend_rates=true", "study.overwrite=true").code == 0
    tried = {float(run.partition("-lr=")[2].partition("/")[0]) for run in statuses(folder) if "llama2-lr" in run}
    between = {1.414e-5, 5.657e-5}  # beside the best, before and after
    assert tried == {1e-5, 2e-5, 4e-5, 8e-5} | between, "two more, and no end"
    assert rates(folder) == {"vanilla/seed=1": 8e-5, "llama2/seed=1": 8e-5}


@pytest.mark.slow
def test_after_a_kill_no_old_weights_are_taken_up(study: Callable[..., Ran], ladder: Ran, tmp_path: Path) -> None:
    """A run's checkpoints and config go first, and its status last: between them it must not be taken up."""
    only = ("study.axes=[norm]", "study.seeds=[1]", "optim.lr=1e-5", "study.overwrite=true")
    losses = set()
    for killed in (False, True):
        run = copied(ladder, tmp_path) / "vanilla" / "seed=1"
        if killed:
            shutil.rmtree(run / "checkpoints")
            (run / "resolved.yaml").unlink()
        assert study(*LADDER, *only).code == 0
        losses.add(json.loads((run / "summary.json").read_text())["val/loss"])
        shutil.rmtree(run.parents[1])
    assert len(losses) == 1


@pytest.mark.slow
def test_an_experiment_may_hold_a_study_but_not_a_seed(study: Callable[..., Ran], tmp_path: Path) -> None:
    (tmp_path / "my_conf" / "experiment").mkdir(parents=True)
    experiment = tmp_path / "my_conf" / "experiment" / "mine.yaml"
    text = "# @package _global_\ndefaults:\n  - override /study: ladder\nstudy:\n"
    text += "  axes: [norm]\n  seeds: [4]\n  learning_rates: null\n"
    experiment.write_text(text + "name: ours\n")
    ran = study("--config-dir=my_conf", "experiment=mine", *QUICK)
    assert (ran.code, ran.err) == (0, "")
    assert set(statuses(tmp_path / "runs" / "ours")) == {"vanilla/seed=4", "+rmsnorm/seed=4"}
    experiment.write_text(text + "seed: 7\n")
    check_refused(study("--config-dir=my_conf", "experiment=mine"), "seed=7")
    experiment.write_text(text.replace("defaults:", "defaults:\n  - override /arch: gpt2"))
    check_refused(study("--config-dir=my_conf", "experiment=mine"), "arch=gpt2")


def test_every_run_of_a_study_is_a_command_of_its_own(climb: Path, command: Command) -> None:
    overrides = yaml.safe_load((climb / "+swiglu" / "seed=2" / "overrides.yaml").read_text())
    before = summaries(climb)["+swiglu/seed=2"]
    ran = command(*overrides, "overwrite=true")
    assert (ran.code, ran.err) == (0, "")
    after = summaries(climb)["+swiglu/seed=2"]
    assert after["val/loss"] == before["val/loss"]


@pytest.mark.slow
def test_multirun_and_cfg_keep_working(study: Callable[..., Ran]) -> None:
    shown = study(*LADDER, "--cfg=job")
    assert "design.Ladder" in shown.out
    assert not (shown.cwd / "runs").exists()
    assert study("--multirun", *LADDER, "study.dry_run=true").out.startswith("climb: 3 arms")
    assert study("--multirun", "study=ladder,add_one", *SHORT).code == 2


@pytest.mark.slow
def test_a_bad_arm_fails_before_the_first_one_trains(study: Callable[..., Ran]) -> None:
    ran = study("study=context", "study.positions=[rope,sinusoidal]", "model.dim=36", "model.head_dim=9", *QUICK)
    check_refused(ran, "model.")
    assert "(arm rope)" in ran.err
    assert not (ran.cwd / "runs").exists()


@pytest.mark.slow
def test_an_arm_may_lose_the_windows_that_its_pattern_acts_on(tiny: list[str]) -> None:
    """Without them all layers are alike, in another model than the baseline's."""
    recipes = ["study=leave_one_out", "study.base=llama", "study.target=gemma2", "study.axes=[pattern,attention]"]
    plan = planned_study(*tiny, *recipes, *QUICK, "study.learning_rates=null")
    assert "gemma2-gqa_gemma2" in [arm.arm.name for arm in plan.arms]


def test_dashboards_show_arms_tags_and_final_metrics(run_train: RunTrain, tiny: list[str]) -> None:
    overrides = (*tiny, *LADDER, "study.seeds=[1]", "study.axes=[norm]", "logger=all", "hydra/launcher=basic")
    ran = run_train(*overrides, fresh=True)  # a fork would share the folder that W&B makes as it is imported
    assert ran.code == 0, ran.err
    folder = ran.cwd / "runs" / "climb"
    events = EventAccumulator(str(folder / "+rmsnorm" / "seed=1" / "tensorboard"))
    events.Reload()
    plugin = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    assert b"rmsnorm" in plugin
    assert b"ffn" not in plugin, "in which no arm differs"
    assert "final/val/loss" in events.Tags()["scalars"]

    report, arm = OfflineRun(folder), OfflineRun(folder / "+rmsnorm" / "seed=1")
    assert report.finished
    assert (report.run.run_group, report.run.job_type) == ("climb", "report")
    media = next(folder.glob("wandb/offline-run-*/files/media"))
    (table,) = media.glob("**/arms*.table.json")
    assert "+rmsnorm" in table.read_text()
    assert len(json.loads(table.read_text())["columns"]) <= 10, "wider than a screen"
    drawn = {file.name.partition("_")[0] for file in media.glob("html/figures/*.html")}
    assert drawn >= {"Change at each step", "Loss over training", "Difference over training"}
    assert (arm.run.run_group, arm.run.display_name) == ("climb", "+rmsnorm/seed=1")
    assert {"arch=vanilla", "norm=rmsnorm"} <= set(arm.run.tags)
    assert arm.step_metrics["*"] == "tokens"
