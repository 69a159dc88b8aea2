"""The command line from end to end: what a person types, what they see, what lies in the folder afterwards."""

import fcntl
import json
import math
import os
import pty
import re
import shutil
import struct
import subprocess
import sys
import termios
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import yaml
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from llama_lab.api import load_config
from llama_lab.cli import COMMANDS, compare_command, convert_command, eval_command, main, train_command
from llama_lab.config.components import CONF_DIR, build_model
from llama_lab.config.messages import USER_ERRORS, nearest, one_line
from llama_lab.training.prepare import requested_run
from llama_lab.util.errors import ConfigError
from tests.composing import compose_config, decoder, options
from tests.conftest import TRAIN, Command, Ran, last_of_each
from tests.golden.files import FINISHED, RUNS, TEXT
from tests.preloaded import PreloadedPython
from tests.training.tiny import identical, repeatable, rows, trained_state


def summary(run: Path) -> dict[str, Any]:
    return dict(json.loads((run / "summary.json").read_text()))


def status(run: Path) -> str:
    return str(json.loads((run / "status.json").read_text())["status"])


def files(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Every file's bytes and time."""
    return {str(f): (f.read_bytes(), f.stat().st_mtime_ns) for f in folder.rglob("*") if f.is_file()}


# A whole run


def test_a_run_ends_well_and_prints_plain_lines_without_banners_and_nothing_on_standard_error(finished: Ran) -> None:
    assert (finished.code, finished.err) == (0, "")
    assert status(finished.run) == "done"
    assert "\x1b" not in finished.out
    assert "\r" not in finished.out
    for noise in ("GPU available", "TPU", "Lightning", "lightning", "💡", "Warning", "warn", "Trainer", "rank_zero"):
        assert noise not in finished.out
    assert re.search(r"^step 1/78  loss \d\.\d{3}$", finished.out, re.MULTILINE)
    assert re.search(r"^step 78/78  loss \d\.\d{3}  val \d\.\d{3}  [\d,]+ tokens/s$", finished.out, re.MULTILINE)
    assert len(finished.out.splitlines()) < 40


def test_the_table_tells_size_quality_speed_and_memory(finished: Ran) -> None:
    table = dict(re.findall(r"^│ +(\S.*?) +│ +(\S.*?) │$", finished.out, re.MULTILINE))
    values = summary(finished.run)
    assert table == {
        "parameters": f"{values['params']:,}",
        "without embeddings": f"{values['params_non_embedding']:,}",
        "tokens seen": "19,968",
        "val loss": f"{values['val/loss']:.4f} nats/token",
        "of unigram frequencies": f"{values['unigram_entropy']:.4f} nats/token",
        "val bits per byte": f"{values['val/bits_per_byte']:.4f}",
        "training speed": f"{values['perf/tokens_per_second']:,.0f} tokens/s",
        "peak memory": f"{values['perf/peak_memory_bytes'] / 2**20:.4g} MiB",
        "KV cache per token, 16-bit": "256 B",  # keys and values of 2 layers, 4 heads, 8 dimensions, 2 bytes
        "KV cache at 32 tokens": "8 KiB",
    }


def test_a_sample_is_shown_and_where_everything_is(finished: Ran) -> None:
    assert re.search(r"^╭─ sample ─+╮\n(│ .* │\n)+╰─+╯$", finished.out, re.MULTILINE)
    assert f"everything is in {finished.run.relative_to(finished.cwd)}\n" in finished.out


def test_a_run_s_folder_is_named_by_recipe_arm_and_seed_and_complete(finished: Ran) -> None:
    name, arm, seed = finished.run.relative_to(finished.cwd / "runs").parts
    assert (name, seed) == ("llama", "seed=1")
    assert arm.startswith("data.document_chars=500-data.files=")
    there = {path.name for path in finished.run.iterdir()}
    assert there >= {"resolved.yaml", "overrides.yaml", "environment.json", "metrics.csv", "summary.json"}
    assert there >= {"status.json", "checkpoints", "tensorboard", "wandb"}
    assert [path.name for path in (finished.run / "checkpoints").iterdir()] == ["last.ckpt"]
    assert list(finished.run.rglob("*.tmp")) == []
    assert [path.name for path in finished.cwd.iterdir()] == ["runs"], "litter"


def test_the_folder_tells_how_to_repeat_the_run(finished: Ran, tiny: list[str]) -> None:
    resolved = (finished.run / "resolved.yaml").read_text()
    assert "${" not in resolved
    assert OmegaConf.create(resolved).model.hidden_dim == 88
    typed = last_of_each([*tiny, "logger=all"])
    assert OmegaConf.load(finished.run / "overrides.yaml")[: len(typed)] == typed
    environment = json.loads((finished.run / "environment.json").read_text())
    assert environment["command"][1 : 1 + len(typed)] == typed
    assert environment["versions"]["torch"] == torch.__version__
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=TRAIN.parent, capture_output=True, text=True)
    if commit.returncode == 0:
        assert environment["git"] == {"commit": commit.stdout.strip(), "dirty": environment["git"]["dirty"]}
    assert all(re.fullmatch(r"[0-9a-f]{16,}", environment[key]) for key in ("data_hash", "tokenizer_hash"))


def test_the_summary_holds_the_last_value_of_every_metric_and_the_costs(finished: Ran) -> None:
    values = summary(finished.run)
    last: dict[str, float] = {}
    for row in rows(finished.run):
        last |= row
    of_the_whole_run = {"perf/tokens_per_second", "perf/tokens_per_second_per_device"}
    assert all(values[key] == last[key] for key in last.keys() - of_the_whole_run)
    timed = [row for row in rows(finished.run) if "perf/tokens_per_second" in row]
    spans = [
        row["tokens"] - before for row, before in zip(timed, [3 * 256, *(r["tokens"] for r in timed)], strict=False)
    ]
    seconds = sum(tokens / row["perf/tokens_per_second"] for tokens, row in zip(spans, timed, strict=True))
    assert values["perf/tokens_per_second"] == pytest.approx(sum(spans) / seconds)
    assert values["perf/tokens_per_second_per_device"] == values["perf/tokens_per_second"]
    assert last.keys() >= {"tokens", "train/loss", "val/loss", "val/bits_per_byte", "optim/lr", "optim/grad_norm"}
    assert "perf/peak_memory_bytes" in last
    assert (values["arm"], values["seed"]) == (finished.run.parent.name, 1)
    model = decoder(vocab_size=257)
    assert values["params"] == sum(p.numel() for p in model.parameters())
    assert values["params_non_embedding"] == sum(p.numel() for p in model.blocks.parameters()) + 32  # the final norm's
    assert values["flops_per_token"] > 2 * values["params_non_embedding"]
    assert values["kv_cache/bytes"] == 32 * values["kv_cache/bytes_per_token"] == 32 * 2 * 2 * 32 * 2
    bytes_per_token = values["val/loss"] / math.log(2) / values["val/bits_per_byte"]
    assert values["bytes_per_token"] == pytest.approx(bytes_per_token, rel=1e-6)
    assert "perf/mfu" not in values, "a CPU has no known peak"


# In a terminal


def in_terminal(
    python: str, overrides: list[str], cwd: Path, environment: dict[str, str], interrupt_at: str = ""
) -> Ran:
    """Run train.py in a terminal of 80 columns; press Ctrl-C once it shows `interrupt_at`."""
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 80, 0, 0))
    with subprocess.Popen(
        [python, str(TRAIN), *overrides],
        stdin=its,
        stdout=its,
        stderr=its,
        cwd=cwd,
        env={**environment, "TERM": "xterm-256color"},
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # so that Ctrl-C is a signal
    ) as process:
        os.close(its)
        shown = b""
        while True:
            try:
                shown += os.read(ours, 1 << 16)
            except OSError:  # the end, on Linux
                break
            if interrupt_at and interrupt_at.encode() in shown:
                os.write(ours, b"\x03")
                interrupt_at = ""
    os.close(ours)
    return Ran(process.returncode, shown.decode(), "", cwd)


@pytest.fixture(scope="module")
def in_terminals(
    tiny: list[str], preloaded: PreloadedPython, environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Ran, Ran]:
    """The run of `finished` in a terminal, stopped by Ctrl-C as it begins to train; and the same command again."""
    cwd = tmp_path_factory.mktemp("terminal")
    overrides = [*tiny, "train.checkpoint_every=7", "train.micro_batch_size=4"]
    stopped = in_terminal(sys.executable, overrides, cwd, environment, "training ")
    return stopped, in_terminal(preloaded.executable, overrides, cwd, environment)


def lines(shown: str) -> list[str]:
    """What stood on the lines of a terminal, without colours and cursor movements."""
    return re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown))


def test_a_terminal_shows_a_bar_with_loss_and_speed_and_no_line_is_too_wide(
    in_terminals: tuple[Ran, Ran],
) -> None:
    shown = in_terminals[1].out
    bars = [line for line in lines(shown) if line.startswith("training ")]
    bar = r"training ━+ 100% \d:\d\d:\d\d loss \d\.\d{3}  val \d\.\d{3}  [\d,]+ tokens/s *"
    assert re.fullmatch(bar, bars[-1]), bars[-1]
    assert "step " not in shown
    wide = [line for line in lines(shown) if len(line) > 80]
    assert all(line.startswith("everything is in ") for line in wide), "the path to copy alone is wider"
    assert "│ parameters" in shown.replace("\x1b[1m", "").replace("\x1b[0m", "").replace("│  ", "│ ")


def test_after_ctrl_c_in_a_terminal_the_same_command_goes_on(in_terminals: tuple[Ran, Ran], finished: Ran) -> None:
    stopped, resumed = in_terminals
    assert stopped.code == 130
    assert "stopped; go on with the same command:" in stopped.out
    assert "Traceback" not in stopped.out
    assert resumed.code == 0
    assert repeatable(resumed.run) == repeatable(finished.run)
    assert identical(trained_state(resumed.run), trained_state(finished.run))


# Other runs


def test_the_decoder_of_2017_trains(command: Command, tiny: list[str]) -> None:
    groups = ["norm=layernorm", "block=postnorm", "position=sinusoidal", "attention=mha", "ffn=relu"]
    ran = command(*tiny, *groups)
    assert (ran.code, ran.err) == (0, "")
    cfg = OmegaConf.load(ran.run / "resolved.yaml")
    parts = [cfg.model[part]._target_.split(".")[-1] for part in ("norm", "block", "position")]
    assert parts == ["LayerNorm", "PostNorm", "Sinusoidal"]
    assert all(group in ran.run.parent.name or len(ran.run.parent.name) > 90 for group in groups)
    losses = [row["val/loss"] for row in rows(ran.run) if "val/loss" in row]
    assert losses[-1] < losses[0] < math.log(257)


@pytest.mark.slow
def test_a_multirun_trains_one_run_after_the_other(command: Command, tiny: list[str]) -> None:
    ran = command("--multirun", *tiny, "train.tokens=2560", "name=mine", "norm=rmsnorm,layernorm", "seed=1,2")
    assert (ran.code, ran.err) == (0, "")
    runs = sorted(path.parent for path in (ran.cwd / "runs" / "mine").rglob("summary.json"))
    assert len(runs) == 4
    assert [path.name for path in ran.cwd.iterdir()] == ["runs"], "Hydra's multirun.yaml is elsewhere"
    assert {run.parent.name.partition("-")[0] for run in runs} == {"norm=rmsnorm", "norm=layernorm"}, "comes first"
    assert len({summary(run)["val/loss"] for run in runs}) == 4
    assert {(OmegaConf.load(run / "resolved.yaml").model.norm._target_, run.name) for run in runs} == {
        (f"llama_lab.model.norm.{norm}", f"seed={seed}") for norm in ("RMSNorm", "LayerNorm") for seed in (1, 2)
    }


def test_a_value_of_another_type_than_the_default_may_have_a_meaning(command: Command, tiny: list[str]) -> None:
    scaling = "model.position.scaling={_target_: llama_lab.model.position.LinearScaling, factor: 2}"
    overrides = ["name=2017", "model.vocab_size=300", "model.attention.window=4", "optim.lr=1", scaling]
    overrides += ["model.hidden_dim=100", "train.grad_clip=null", "train.tokens=300.5"]
    ran = command(*tiny, *overrides)
    assert (ran.code, ran.err) == (0, "")
    for key, _, value in (override.partition("=") for override in overrides):
        assert OmegaConf.select(OmegaConf.load(ran.run / "resolved.yaml"), key) == yaml.safe_load(value)


def experiment(folder: Path, body: str) -> list[str]:
    """Write an experiment; return the arguments that choose it."""
    (folder / "mine" / "experiment").mkdir(parents=True)
    (folder / "mine" / "experiment" / "first.yaml").write_text(f"# @package _global_\n{body}\n")
    return ["--config-dir", "mine", "experiment=first"]


def test_the_command_line_wins_over_an_experiment(command: Command, tiny: list[str], tmp_path: Path) -> None:
    body = "defaults: [override /norm: layernorm, override /ffn: gelu]\noptim: {lr: 1e-3}\ntrain: {log_every: 1}"
    ran = command(*experiment(tmp_path, body), *tiny, "train.tokens=256", "ffn=relu", "optim.lr=5e-4")
    assert (ran.code, ran.err) == (0, "")
    cfg = OmegaConf.load(ran.run / "resolved.yaml")
    assert cfg.model.norm._target_ == "llama_lab.model.norm.LayerNorm"
    assert cfg.model.ffn.activation._target_ == "torch.nn.ReLU"
    assert (cfg.optim.lr, cfg.train.log_every) == (5e-4, 1)


@pytest.mark.parametrize("body", ["train: {lr: 1}", "train: {log_every: often}", "overwrite: flase"])
def test_an_experiment_is_checked_likewise(body: str, command: Command, tiny: list[str], tmp_path: Path) -> None:
    ran = command(*experiment(tmp_path, body), *tiny, "train.tokens=256")
    beginning = body.replace(": {", ".").replace(": ", "=").rstrip("}")
    assert (ran.code, ran.err.count("\n"), ran.err.startswith(f"error: {beginning}: ")) == (2, 1, True)
    assert not (tmp_path / "runs").exists()


DIVERGES = ["train.tokens=5120", "schedule=constant", "schedule.warmup=0", "train.grad_clip=null", "train.log_every=1"]


def test_a_run_that_diverges_says_so_and_exits_with_1(command: Command, tiny: list[str]) -> None:
    ran = command(*tiny, *DIVERGES, "optim.lr=1e30")
    assert ran.code == 1
    assert re.fullmatch(r"diverged: the training loss is \w+ at step \d+; try a lower optim.lr.*\n", ran.err)
    assert status(ran.run) == "diverged"
    assert not (ran.run / "summary.json").exists()


@pytest.mark.slow
def test_a_run_that_diverges_or_cannot_start_does_not_stop_a_sweep(command: Command, tiny: list[str]) -> None:
    overrides = ["--multirun", *tiny, *DIVERGES, "train.tokens=2560", "model.n_heads=3,4", "optim.lr=1e30,1e-3"]
    ran = command(*overrides)
    assert ran.code == 2
    assert "error: model.n_heads=3: does not divide model.dim=32" in ran.err
    assert "diverged: " in ran.err
    assert "Traceback" not in ran.err
    assert sorted(status(file.parent) for file in ran.cwd.rglob("status.json")) == ["diverged", "done"]
    again = command(*overrides)
    assert again.code == 2
    assert again.out.count("done before, passed over") == 1
    assert again.err.count(": does not divide model.dim=32") >= 2, "it tells of every failure"


@pytest.mark.slow
def test_a_finished_run_is_refused_and_left_as_it_was(command: Command, tiny: list[str]) -> None:
    overrides = [*tiny, "train.tokens=2560"]
    first = command(*overrides)
    before = files(first.run)
    again = command(*overrides)
    assert again.code == 2
    assert re.fullmatch(r"error: name: .*already holds a finished run; .*overwrite=true.*resume=.*\n", again.err)
    assert files(first.run) == before
    rows_before = repeatable(first.run)
    over = command(*overrides, "overwrite=true")
    assert (over.code, repeatable(over.run)) == (0, rows_before)


# Before a run


def test_the_help_lists_every_group_and_every_option(command: Command) -> None:
    ran = command("--help")
    assert (ran.code, ran.err) == (0, "")
    groups = [path.name for path in CONF_DIR.iterdir() if path.is_dir()]
    assert len(groups) > 12
    for group in groups:
        assert f"{group}: {', '.join(options(group))}\n" in ran.out
    for group in (*groups, "experiment"):
        assert re.search(rf"(^| {{3}}){group} {{2,}}\S", ran.out, re.MULTILINE), f"{group} is not explained"
    explained = ran.out.partition("Options of every group")[0]
    assert max(len(line) for line in explained.splitlines()) <= 80
    assert not (ran.cwd / "runs").exists()


def test_cfg_job_shows_the_whole_config_even_if_it_misses_a_value(command: Command) -> None:
    ran = command("--cfg", "job", "--resolve", "arch=gpt2", "model.dim=64")
    assert (ran.code, ran.err) == (0, "")
    cfg = OmegaConf.create(ran.out)
    assert (cfg.model.head_dim, cfg.model.norm._target_) == (16, "llama_lab.model.norm.LayerNorm")
    ran = command("--cfg", "job", "data=text")
    assert (ran.code, ran.err) == (0, "")
    assert "files: ???" in ran.out
    assert list(ran.cwd.iterdir()) == []


def test_a_mode_is_a_command_and_a_key(in_process: Callable[..., Ran], command: Command, tmp_path: Path) -> None:
    ours = in_process(main, "llama-lab", "draw", "one.svg", "size=pico")
    assert (ours.code, ours.out) == (0, "the picture is one.svg\n")
    picture = (tmp_path / "one.svg").read_bytes()
    assert command("size=pico", "draw=one.svg").code == 0
    assert (tmp_path / "one.svg").read_bytes() == picture


def test_the_commands_are_listed(in_process: Callable[..., Ran]) -> None:
    ran = in_process(main, "llama-lab", "--help")
    assert (ran.code, ran.err) == (0, "")
    assert re.findall(r"^  (\w+)  ", ran.out, re.MULTILINE) == [*COMMANDS]


@pytest.mark.parametrize("words", ["compare runs", "convert export run out", "tensorboard runs"])
def test_ctrl_c_ends_any_command_in_one_line(words: str, in_process: Callable[..., Ran]) -> None:
    with patch("llama_lab.cli.user_errors", side_effect=KeyboardInterrupt):
        ran = in_process(main, "llama-lab", *words.split())
    assert (ran.code, ran.out, ran.err) == (130, "", "\nstopped\n")


@pytest.mark.parametrize(
    ("words", "message"),
    {
        "estimate draw=x.svg": "draw=x.svg: asks for llama-lab draw; leave it out of llama-lab estimate",
        "draw one.svg measure=runs": "measure=runs: asks for llama-lab measure; leave it out of llama-lab draw",
        "draw": "llama-lab draw: misses what to draw, which comes first; see llama-lab --help",
        "trian size=pico": "trian: no such command (did you mean train?); see llama-lab --help",
        "measure nowhere": "measure=nowhere: holds no study; name the folder of one, such as runs/ladder",
        "evaluate estimate=true": "estimate=true: no such key; `--cfg job` shows them all, `--help` the groups",
    }.items(),
)
def test_a_command_that_cannot_be_is_one_line(words: str, message: str, in_process: Callable[..., Ran]) -> None:
    ran = in_process(main, "llama-lab", *words.split())
    assert (ran.code, ran.err) == (2, f"error: {message}\n")


# Values that cannot be, each with how the line about it begins.
NUMBERS = (
    "model.dim model.dropout size.mlp_ratio model.norm.eps model.position.theta model.max_seq_len model.vocab_size"
)
NUMBERS += " data.val_fraction data.document_chars train.tokens train.batch_size train.micro_batch_size train.grad_clip"
NUMBERS += " train.z_loss train.label_smoothing train.ema seed data.seed optim.lr schedule.final trainer.devices"
NUMBERS += " trainer.num_nodes"
GLOBAL = "model.attention.window=4 pattern=global_every_2nd pattern.global.at"
ROTATED = "model.attention.qk_norm_rotated=true"
VALUES = {f"{key}=abc": f"{key}=abc: " for key in NUMBERS.split()} | {
    "model.norm=layernrom": "model.norm=layernrom: is not a single setting; .*mean layernorm?",
    "model.position.scaling=linear": "model.position.scaling=linear: .*a component",
    "data.files=5": "data.files=5: ",
    "train.sample_tokens=2.5": "train.sample_tokens=2.5: ",
    "train.tokens=-5": "train.tokens=-5: ",
    "train.tokens=inf": "train.tokens=inf: ",
    "train.micro_batch_size=3": "train.batch_size=8: not a multiple of 3.*6 and 9 are",
    "train.micro_batch_size=2.0": "train.micro_batch_size=2.0: ",
    "train.ema=-0.1": "train.ema=-0.1: must be at least 0",
    "train.label_smoothing=1": "train.label_smoothing=1: must be more than 0 and less than 1",
    "seed=1.5": "seed=1.5: ",
    "logger.wandb=maybe": "logger.wandb=maybe: .*true",
    f"name={300 * 'n'}": "name=nnnnn.*use at most 255 letters",
    "trainer.precision=16": "trainer.precision=16: this .*did you mean bf16-mixed?",
    "trainer.precision=32": "trainer.precision=32: this .*did you mean 32-true?.*; choose auto or",
    "ffn=moe model.ffn.balance_bias=0.01 trainer.precision=bf16-true": "model.ffn.balance_bias=0.01: its updates round",
    "ffn=moe +pattern.a={at:0,ffn:moe_deepseek_v3} trainer.precision=bf16-true": "model.ffn.balance_bias=0.001: its",
    "trainer.devices=0": "trainer.devices=0: .*choose 1 or more, -1 or auto",
    "trainer.devices=1.5": "trainer.devices=1.5: ",
    "trainer.accelerator=tpu": "trainer.accelerator=tpu: not on this machine.*choose auto or",
    "trainer.strategy=abc": "trainer.strategy=abc: .*ddp",
    "model.attention.qk_norm=true": "model.attention.qk_norm=True: must be head .*or projection .*or null",
    "position=rope_yarn model.position.scaling.original_max_seq_len=0": ".*original_max_seq_len=0: ",
    "init=trunc model.init.cutoff=0": "model.init.cutoff=0: must be positive",
    f"{GLOBAL}=[0,8]": r"pattern.global.at=\[0, 8\]: there is no layer 8; the layers are 0 to 1",
    f"position=alibi model.attention.qk_norm=head {ROTATED}": f"{ROTATED}: the position encoding .*position=rope",
    "arch=gemma3 model.n_layers=3000": "model.n_layers=3000: at most 2048 layers",
    "estimate=true model.n_layers=1000000000": "model.n_layers=1000000000: at most 2048 layers are built; use fewer",
    "model.n_layers=0": "model.n_layers=0: must be a positive whole number",
    "model.vocab_size=1000000000000": "model.vocab_size=1000000000000: must be a positive.*at most",
    "train.batch_size=0": "train.batch_size=0: must be a positive whole number",
    "name=../../elsewhere": "name=../../elsewhere:",
}
BAD = {  # what else cannot work: overrides, how the line about them begins, and what it also holds
    "objective=prefix family=encoder_decoder": ("objective=prefix: is for family=decoder, not encoder_decoder; ", ""),
    "objective=span": (
        "objective=span: is for family=encoder_decoder, not decoder; change one of them",
        "",
    ),
    "objective=masked": ("objective=masked: is for family=encoder, not decoder; change one of them", ""),
    "family=encoder": ("family=encoder: sees what objective=next_token predicts; add objective=masked", ""),
    "family=encoder objective=masked train.prompt=hi": ("train.prompt=hi: an encoder writes no text; leave it out", ""),
    "family=encoder objective=masked train.sample_tokens=9": ("train.sample_tokens=9: model.encoder: predicts", "to 0"),
    "experiment=mine": ("experiment=mine: ", "--config-dir"),
    "position=none model.position.theta=5e5": ("model.position.theta=5e5: no such", "to position=rope | sinusoidal; "),
    "model.context_length=64": ("model.context_length=64: no such key (did you mean model.max_", ""),
    "wandb.project=a": ("wandb.project=a: no such key (did you mean logger.project?); ", "--help"),
    "data=my/a.txt": ("data=my/a.txt: no such option; ", "data=text data.files=[my/a.txt]\n"),
    "bias=false": ("bias=false: changes nothing, since every key of a bias has that already; ", "bias=null"),
    "ffn=moe model.ffn.expert.limit=5": ("model.ffn.expert.limit=5: no such key; ", "choose one with expert=, or"),
    "model.rope_theta=3": ("model.rope_theta=3: no such key", "did you mean model.position.theta?"),
    "lr=1": ("lr=1: no such key", "did you mean optim.lr?"),
    "heads=1": ("heads=1: no such key", "did you mean model.n_heads?"),
    "model.dmi=3": ("model.dmi=3: no such key", "did you mean model.dim?"),
    "+train.lr=1": ("train.lr=1: ", ""),
    "train.tokens": ("train.tokens: cannot be read", "key=value"),
    "optim=null": ("optim=null: a run needs one", "see --help"),
    "pattern=global_every_2nd": ("pattern=global_every_2nd: changes nothing, since all", "leave it out"),
    "data.files=???": ("data.files=???: ", "data.files=[book.txt]"),
    "data.files=[empty.txt]": ("data.files=[", "empty"),
    "data.files=[latin.txt]": ("data.files=[", "give UTF-8 text"),
    "data.files=[lines.txt] data.document_chars=20 data.val_fraction=0.0001": ("data.val_fraction=0.0001: ", "; raise"),
    "tokenizer=bpe tokenizer.vocab_size=9": ("tokenizer.vocab_size=9: must be at least 257", ""),
    "tokenizer=char train.prompt='#%'": ("train.prompt=#%: ", ""),
    "runs_dir=": ("runs_dir=: is empty", ""),
    "runs_dir=/proc": ("runs_dir=/proc: No such file or directory", "choose another folder"),
    "tokenizer=bpe tokenizer.vocab_size=1000000000000": ("tokenizer.vocab_size=1000000000000: must be", ""),
    "runs_dir=" + 300 * "r": ("runs_dir=rrrr", "File name too long"),
    "hydra/launcher=local_gpus": ("hydra/launcher=local_gpus: starts the runs of a sweep", "--multirun"),
    "plan=true": ("plan=true: no such key (did you mean estimate?)", ""),
}
FIXES = ("; ", "must ", "did you mean", "such as")


@cache
def choices(*overrides: str) -> dict[str, str | None]:
    """The option of every group."""
    with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        return dict(compose("config", list(overrides), return_hydra_config=True).hydra.runtime.choices)


def test_what_other_programs_call_a_key_leads_to_ours() -> None:
    for ours, names in {
        "train.micro_batch_size": ("train.grad_accum", "gradient_accumulation_steps"),
        "model.hidden_dim": ("model.ffn.hidden_dim", "ffn.hidden_size", "intermediate_size"),
        "model.dim": ("hidden_size", "model.d_model"),
        "bias": ("model.bias",),
    }.items():
        assert {nearest(name, ()) for name in names} == {ours}


HEADER = "# @package _global_\n"
BROKEN = {
    "tabs": b"a:\n\tb: 1\n",
    "an open quote": b'a: "x\n',
    "a key twice": b"seed: 1\nseed: 2\n",
    "a list": f"{HEADER}- a\n".encode(),
    "no UTF-8": b"name: \xff\xfe\n",
    "an unknown anchor": b"seed: *y\n",
    "itself": f"{HEADER}a: &x {{b: *x}}\n".encode(),
    "itself among its defaults": f"{HEADER}defaults: [e]\n".encode(),
    "nesting without end": f"{HEADER}a: {'[' * 3000}{']' * 3000}\n".encode(),
    "a tag": b"seed: !foo 3\n",
    "a call": b"seed: !!python/object/apply:os.getpid []\n",
    "two documents": b"---\nseed: 1\n---\nseed: 2\n",
    "a number": b"3\n",
    "defaults that are none": f"{HEADER}defaults: 3\n".encode(),
    "a header without a package": b"# @package\nseed: 3\n",
    "half an interpolation": f"{HEADER}seed: ${{seed\n".encode(),
    "a null key": f"{HEADER}null: 3\n".encode(),
    "NUL": b"a\0b: 1\n",
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_config_file_is_refused_in_one_line(kind: str, command: Command, tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "e.yaml").write_bytes(BROKEN[kind])
    ran = command("--config-dir", str(tmp_path), "experiment=e")
    assert (ran.code, ran.err.count("\n")) == (2, 1)
    assert len(ran.err) > len("error: \n") + 10


def test_an_option_with_the_name_of_a_packaged_one_is_refused(command: Command, tmp_path: Path) -> None:
    own = tmp_path / "mine" / "arch" / "mamba2.yaml"
    own.parent.mkdir(parents=True)
    own.touch()
    for study in ([], ["study=recipes", "study.recipes=[llama,mamba2]"]):
        ran = command("--config-dir", str(tmp_path / "mine"), *study)
        problem = f"{own} has the name of a packaged option, which is read; rename it"
        assert (ran.code, ran.err) == (2, f"error: --config-dir: {problem}\n")
    with pytest.raises(ConfigError, match=r"mamba2\.yaml has the name of a packaged option"):
        load_config([], tmp_path / "mine")


@pytest.mark.parametrize("typed", BAD)
def test_what_cannot_work_is_one_line(typed: str, command: Command, tiny: list[str], bad_files: Path) -> None:
    before = files(bad_files)
    beginning, holds = BAD[typed]
    ran = command(*tiny, "train.tokens=256", *typed.split())
    assert ran.code == 2
    assert ran.err.startswith(f"error: {beginning}")
    assert holds in ran.err
    assert any(fix in ran.err for fix in FIXES), "no fix"
    assert ran.err.count("\n") == 1
    assert files(bad_files) == before


def start(overrides: list[str], typed: list[str]) -> None:
    """Check a run and build its model, as the command does, but for its data and its folder."""
    cfg = compose_config(*overrides)
    chosen = choices(*(override for override in overrides if "." not in override.partition("=")[0]))
    with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        requested_run(cfg, chosen, typed)
    build_model(cfg, 257)


@pytest.mark.parametrize("typed", VALUES)
def test_a_value_that_cannot_be_is_refused_before_any_folder_or_file_is_opened(typed: str, tiny: list[str]) -> None:
    with pytest.raises(USER_ERRORS) as refused:
        start(last_of_each([*tiny, "train.tokens=256", *typed.split()]), typed.split())
    message = one_line(refused.value)
    assert re.match(VALUES[typed], message), message
    assert any(fix in message for fix in FIXES), "no fix"


def test_what_is_missing_is_named_with_an_example(command: Command) -> None:
    for override, message in {
        "data.files=[book.txt]": "data.files=[book.txt]: no such key here, it belongs to data=pairs | text; choose ",
        "tokenizer=hf": "tokenizer.path=???: needs a value, such as tokenizer.path=gpt2\n",
        "data=text": "data.files=???: needs a value, such as data.files=[book.txt]\n",
    }.items():
        ran = command(override)
        assert (ran.code, ran.err.startswith(f"error: {message}")) == (2, True)


@pytest.mark.parametrize("key", ["window=4", "sinks=true", "qk_norm=head"])
def test_a_recurrent_layer_has_no_windows_sinks_and_norms_of_queries_and_keys(key: str, command: Command) -> None:
    ran = command("attention=mamba2", "position=none", f"model.attention.{key}")
    problem = "no such key here, it belongs to attention=mha; choose that, or leave this out"
    assert (ran.code, ran.err) == (2, f"error: model.attention.{key}: {problem}\n")


def test_a_wrong_key_beside_an_option_of_the_user_s_own_is_reported(command: Command, tmp_path: Path) -> None:
    (tmp_path / "mine" / "norm").mkdir(parents=True)
    (tmp_path / "mine" / "norm" / "my.yaml").write_text("# @package model.norm\n_target_: my.Norm\n")
    ran = command("--config-dir", "mine", "norm=my", "model.dmi=3")
    assert ran.code == 2
    assert ran.err.startswith("error: model.dmi=3: no such key (did you mean model.dim?); ")


def test_several_devices_in_a_multirun_are_refused(command: Command, tiny: list[str]) -> None:
    ran = command("--multirun", *tiny, "trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2", "seed=1,2")
    assert ran.code == 2
    assert "error: trainer.devices=2: hydra/launcher=basic trains on one device" in ran.err
    assert "set trainer.devices=1, or choose hydra/launcher=local_gpus\n" in ran.err
    assert not (ran.cwd / "runs").exists()


# A run of an older version

WAYS: dict[str, tuple[Callable[[], None], list[str]]] = {
    "the same command": (train_command, [*FINISHED, "runs_dir=runs"]),
    "resuming": (train_command, [*TEXT, "resume={run}", "train.tokens=3e4"]),
    "starting from it": (train_command, [*TEXT, "init_from={run}"]),
    "evaluating": (eval_command, ["run={run}"]),
    "generating": (eval_command, ["run={run}", "prompt=def"]),
    "exporting": (convert_command, ["export", "{run}", "exported"]),
    "comparing": (compare_command, ["{run}"]),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_run_of_a_version_before_0_4_is_refused(way: str, in_process: Callable[..., Ran], tmp_path: Path) -> None:
    command, arguments = WAYS[way]
    run = Path("runs") / "finished" / "base" / "seed=1"
    shutil.copytree(RUNS / "finished", tmp_path / "runs" / "finished")
    file = tmp_path / run / "environment.json"
    facts = {key: value for key, value in json.loads(file.read_text()).items() if key not in ("checksum", "versions")}
    for versions, named in (({"llama-lab": "0.3.1"}, "0.3.1"), ({}, "before 0.4")):
        file.write_text(json.dumps(facts | {"versions": versions}))
        ran = in_process(command, "the command", *(argument.format(run=run) for argument in arguments))
        why = f"was written by llama-lab {named}; this version reads runs of 0.4 and later: use that version"
        assert (ran.code, ran.err.removeprefix("error: ").removeprefix("init_from=")) == (2, f"{run}: {why}\n")
