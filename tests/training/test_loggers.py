"""W&B without a key and without a prompt, and TensorBoard over tokens."""

import json
import re
import sqlite3
from contextlib import closing
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from llama_lab import load, load_config
from llama_lab.runs.record import read_record
from llama_lab.training.logger_check import wandb_mode
from llama_lab.training.loggers import WandbMetrics, run_tags
from llama_lab.util.errors import ConfigError
from tests.conftest import Ran, RunTrain
from tests.selection import first
from tests.training.offline import OfflineRun
from tests.training.tiny import identical, killed_after, planned, rows

# The mode


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An environment that says nothing of W&B; the netrc file it points to is not there."""
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked"))
    return tmp_path / "netrc"


def test_without_a_key_w_and_b_is_offline() -> None:
    assert wandb_mode() == "offline"


KEY = "k" * 40
SELF_HOSTED = "https://wandb.example.com"


@pytest.mark.parametrize(
    ("environment", "netrc", "mode"),
    [
        ({"WANDB_API_KEY": KEY}, "", "online"),
        ({"WANDB_MODE": "online", "WANDB_API_KEY": KEY}, "", "online"),
        *(({"WANDB_MODE": m, "WANDB_API_KEY": k}, "", m) for m in ("offline", "disabled") for k in ("", "k")),
        ({}, "machine api.wandb.ai login user password key", "online"),
        ({}, "machine example.com login user password key", "offline"),
        ({"WANDB_BASE_URL": f"{SELF_HOSTED}:8080"}, "machine wandb.example.com login user password key", "online"),
        ({"WANDB_BASE_URL": SELF_HOSTED}, "machine api.wandb.ai login user password key", "offline"),
        ({}, "machine api.wandb.ai login user\n", "offline"),
    ],
)
def test_the_mode_follows_the_environment_and_otherwise_a_key_for_the_server_in_use(
    environment: dict[str, str], netrc: str, mode: str, nothing_set: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if netrc:
        nothing_set.write_text(netrc)
    assert wandb_mode() == mode


def test_the_config_s_mode_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert wandb_mode("offline") == "offline"


@pytest.mark.parametrize("mode", ["online", "onlin"])
def test_a_mode_of_the_environment_may_be_refused_too(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", mode)
    with pytest.raises(ConfigError, match=f"^WANDB_MODE={mode}: "):
        load_config(["logger=wandb"])


OFF = {
    "logger=none logger.entity=me": "logger.entity=me: ",
    "logger=wandb logger.mode=online": "logger.mode=online: ",
    "logger=wandb logger.mode=later": "logger.mode=later: ",
    "logger=wandb logger.project=mine/too": "logger.project=mine/too: ",
    "logger=wandb logger.wandb_project=mine": "logger.wandb_project=mine: ",
    "logger=tensorboard logger.tags=[a]": "logger.tags=['a']: ",
    "logger=none logger.mode=offline": "logger.mode=offline: ",
    "logger=trackio logger.notes=text": "logger.notes=text: ",
    "logger=none logger.artifacts=true": "logger.artifacts=True: ",
    f"logger=wandb logger.tags=[{'x' * 65}]": f"logger.tags=[{'x' * 65}]: ",
}


@pytest.mark.parametrize("overrides", first(5, OFF))
def test_a_setting_of_a_dashboard_that_is_off_or_impossible_is_refused(overrides: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(OFF[overrides])}"):
        load_config(overrides.split())


def test_a_netrc_in_the_home_folder_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("NETRC")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert wandb_mode() == "offline"
    (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password secret\n")
    assert wandb_mode() == "online"


def test_a_broken_netrc_means_offline_and_is_told(nothing_set: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nothing_set.write_text("machine api.wandb.ai login user\nnonsense")
    assert wandb_mode() == "offline"
    assert "offline" in capsys.readouterr().out


# Runs of W&B, as the files that `wandb sync` would upload


METRICS = ("tokens", "train/loss", "val/loss", "val/bits_per_byte", "optim/lr", "optim/grad_norm")


def metrics_of(history: list[dict[str, Any]]) -> list[dict[str, float]]:
    """The repeatable metrics of each row."""
    return [{key: row[key] for key in METRICS if key in row} for row in history]


def test_an_offline_run_is_named_and_grouped(finished: Ran) -> None:
    offline = OfflineRun(finished.run)
    assert offline.finished
    assert "W&B: offline; upload later with `wandb sync " in finished.out
    run = offline.run
    assert (run.project, run.run_group, run.job_type) == ("llama-lab", "llama", "train")
    typed = "size=pico tokenizer=byte train.batch_size=8 train.micro_batch_size=4 train.tokens=20000"
    assert run.display_name == f"llama {typed}/seed=1"
    assert f" llama {typed}/seed=1 ┌" in " ".join(finished.out.split())


def test_an_offline_run_holds_the_config_the_costs_and_every_row_of_metrics_csv_over_tokens(
    finished: Ran,
) -> None:
    offline = OfflineRun(finished.run)
    summary = json.loads((finished.run / "summary.json").read_text())
    assert (offline.config["model"]["dim"], offline.config["model"]["head_dim"]) == (32, 8), "not resolved"
    for cost in ("params", "params_non_embedding", "flops_per_token", "kv_cache/bytes_per_token", "kv_cache/bytes"):
        assert offline.config[cost] == summary[cost]
    assert metrics_of(offline.history) == metrics_of(rows(finished.run))
    assert offline.step_metrics["*"] == "tokens"
    trained = [row for row in rows(finished.run) if "train/loss" in row]
    assert trained[0]["tokens"] == 256, "not the first step"
    for row in (*trained, offline.summary):  # 2 layers, 4 heads of 8, keys and values, 2 bytes; 32 tokens
        assert (row["kv_cache/bytes_per_token"], row["kv_cache/bytes"]) == (256, 8192)
    assert not any("kv_cache" in name for row in offline.history for name in row)


@pytest.fixture(scope="module")
def swept(tiny: list[str], run_train: RunTrain) -> Ran:
    """Two runs in one process, with every setting of W&B."""
    ours = ("logger.entity=team", "logger.tags=[draft,7]", "logger.notes=why (and how)", "logger.mode=offline")
    overrides = ["train.tokens=2560", "logger=wandb", "logger.project=mine", "logger.artifacts=true", *ours]
    return run_train("--multirun", *tiny, *overrides, "model.position.theta=20000,30000")


def runs_of(swept: Ran) -> list[Path]:
    """The folders by their theta: their names end in hashes."""
    records = [read_record(status.parent) for status in swept.cwd.rglob("status.json")]
    return [record.path for record in sorted(records, key=lambda record: record.config["model.position.theta"])]


def test_runs_of_a_sweep_are_named_by_what_differs_have_every_setting_of_w_and_b_and_do_not_merge(swept: Ran) -> None:
    assert (swept.code, swept.err) == (0, "")
    assert len(runs_of(swept)[0].parent.name) > 90, "the folder's name is the long one"
    axes = {"arch=llama", "norm=rmsnorm", "block=prenorm", "position=rope", "ffn=swiglu", "attention=mha", "size=pico"}
    for folder, theta in zip(runs_of(swept), (20000, 30000), strict=True):
        offline = OfflineRun(folder)
        run = offline.run
        assert run.display_name == f"position.theta={theta}/seed=1"
        assert (run.entity, run.project, run.notes) == ("team", "mine", "why (and how)")
        assert {*run.tags} >= {*axes, f"model.position.theta={theta}", "draft", "7"}
        assert not any("data" in tag for tag in run.tags)
        assert offline.finished
        assert offline.config["model"]["position"]["theta"] == theta
        assert metrics_of(offline.history) == metrics_of(rows(folder))


def test_the_model_s_files_are_an_artifact_on_request(swept: Ran, finished: Ran, tmp_path: Path) -> None:
    assert OfflineRun(finished.run).artifacts == {}
    folder = runs_of(swept)[0]
    ((name, files),) = OfflineRun(folder).artifacts.items()
    assert name == f"model/model-{(folder / 'wandb_id').read_text()}"
    for file in files:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_bytes((folder / file).read_bytes())
    downloaded, trained = load(tmp_path), load(folder)
    assert identical(downloaded.model.state_dict(), trained.model.state_dict())
    assert read_record(tmp_path).status == "done"


def test_a_tag_is_cut_to_what_w_and_b_takes() -> None:
    long = f"model.attention.{'x' * 60}=1"
    assert run_tags(replace(planned("size=pico"), overrides=[long]))[-1] == long[:64]


@pytest.fixture(scope="module")
def killed_twice(tiny: list[str], run_train: RunTrain, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """A run with all loggers, killed before its first checkpoint and after one, and then brought to its end."""
    cwd: Path = tmp_path_factory.mktemp("killed")
    settings = (*tiny, "logger=all", "train.checkpoint_every=7", "train.log_every=3")
    ids = []
    for step in (5, 33, -1):
        ran = run_train(*settings, cwd=cwd, script=killed_after(step, cwd))
        ids.append((ran.run / "wandb_id").read_text())
    assert (ran.code, ran.err) == (0, "")
    assert ids == [ids[0]] * 3
    return ran


@pytest.mark.slow
def test_a_run_that_was_killed_is_one_run_of_w_and_b_with_every_row_once(killed_twice: Ran) -> None:
    offline = OfflineRun(killed_twice.run)  # the only one
    assert offline.run.run_id == (killed_twice.run / "wandb_id").read_text()
    assert offline.finished
    history = [{k: v for k, v in row.items() if not k.startswith("_")} for row in offline.history]
    sent = [{k: v for k, v in row.items() if k != "step" and "kv_cache" not in k} for row in rows(killed_twice.run)]
    assert history == sent
    assert [row["_step"] for row in offline.history] == list(range(len(history)))


@pytest.mark.parametrize("arrived", range(6))
def test_w_and_b_is_sent_what_it_does_not_have_whatever_a_kill_kept_from_arriving(arrived: int) -> None:
    """A run of W&B's that it resumes has rows already, and counts on from them."""
    table = [{"tokens": tokens} for tokens in range(8)]
    sent = table[:arrived]
    logger = WandbMetrics(SimpleNamespace(step=arrived, summary={}, log=sent.append))
    for row in table:
        logger.log_metrics(row)
    assert sent == table


# TensorBoard


@pytest.mark.process
@pytest.mark.parametrize("ran", ["finished", pytest.param("killed_twice", marks=pytest.mark.slow)])
def test_tensorboard_shows_the_metrics_over_tokens(ran: str, request: pytest.FixtureRequest) -> None:
    finished = request.getfixturevalue(ran)
    events = EventAccumulator(str(finished.run / "tensorboard"))
    events.Reload()
    for name in METRICS[1:]:
        expected = [(row["tokens"], row[name]) for row in rows(finished.run) if name in row]
        shown = [(event.step, event.value) for event in events.Scalars(name)]
        assert [step for step, _ in shown] == [tokens for tokens, _ in expected]
        assert [value for _, value in shown] == pytest.approx([value for _, value in expected])


# Trackio


def trackio_rows(database: Path) -> tuple[set[str], list[tuple[int, dict[str, float]]]]:
    """What Trackio's database holds: the names of its runs, and the step and metrics of every row."""
    with closing(sqlite3.connect(database)) as connection:
        found = list(connection.execute("SELECT run_name, step, metrics FROM metrics ORDER BY id"))
    return {name for name, _, _ in found}, [(step, json.loads(metrics)) for _, step, metrics in found]


@pytest.mark.slow
@pytest.mark.skipif(find_spec("trackio") is None, reason="needs the extra trackio")
def test_trackio_holds_a_killed_run_once_with_every_row(tiny: list[str], run_train: RunTrain, tmp_path: Path) -> None:
    settings = (*tiny, "logger=trackio", "logger.tensorboard=false", "train.checkpoint_every=7", "train.log_every=3")
    settings = (*settings, "logger.project=mine", "arm=judged", "train.tokens=10000")
    database = tmp_path / "trackio"
    for step in (17, -1):
        ran = run_train(*settings, cwd=tmp_path, script=killed_after(step, tmp_path), TRACKIO_DIR=str(database))
    assert ran.code == 0, ran.err
    names, logged = trackio_rows(database / "mine.db")
    assert names == {"judged/seed=1"}
    assert [metrics for _, metrics in logged] == [{k: v for k, v in r.items() if k != "step"} for r in rows(ran.run)]
    assert all(step == metrics["tokens"] for step, metrics in logged)


def test_trackio_that_is_not_installed_is_told_with_its_pip_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llama_lab.training.logger_check.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"needs Trackio; pip install 'llama-lab\[trackio\]'"):
        load_config(["logger=trackio"])
