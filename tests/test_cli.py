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
from llama_lab.config.messages import known_keys, nearest
from llama_lab.training.prepare import requested_run
from tests.composing import compose_config, decoder, options
from tests.conftest import TRAIN, Command, Ran, last_of_each
from tests.golden.files import FINISHED, RUNS, TEXT
from tests.refusals import check_refused, faults, refusing
from tests.selection import first
from tests.study.planning import conducted
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
    assert values["perf/tokens_per_second_per_device"] == values["perf/tokens_per_second"]
    assert last.keys() >= {"tokens", "train/loss", "val/loss", "val/bits_per_byte", "optim/lr", "optim/grad_norm"}
    assert (values["arm"], values["seed"]) == (finished.run.parent.name, 1)
    model = decoder(vocab_size=257)
    assert values["params"] == sum(p.numel() for p in model.parameters())
    assert values["params_non_embedding"] == sum(p.numel() for p in model.blocks.parameters()) + 32  # the final norm's
    assert values["flops_per_token"] > 2 * values["params_non_embedding"]
    assert values["kv_cache/bytes"] == 32 * values["kv_cache/bytes_per_token"] == 32 * 2 * 2 * 32 * 2
    assert "perf/mfu" not in values, "a CPU has no known peak"


# In a terminal


def interrupted_in_terminal(overrides: list[str], cwd: Path, environment: dict[str, str], at: str) -> Ran:
    """Run train.py in a terminal of 80 columns; press Ctrl-C once it shows `at`."""
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 80, 0, 0))
    with subprocess.Popen(
        [sys.executable, str(TRAIN), *overrides],
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
            if at and at.encode() in shown:
                os.write(ours, b"\x03")
                at = ""
    os.close(ours)
    return Ran(process.returncode, shown.decode(), "", cwd)


@pytest.mark.process
def test_a_terminal_shows_a_bar_and_after_ctrl_c_the_same_command_goes_on(
    tiny: list[str], environment: dict[str, str], finished: Ran, tmp_path: Path
) -> None:
    """The run of `finished`, in a terminal, as it begins to train; and the same command again."""
    overrides = [*tiny, "train.checkpoint_every=7", "train.micro_batch_size=4"]
    stopped = interrupted_in_terminal(overrides, tmp_path, environment, " loss ")
    lines = re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stopped.out))
    bars = [line for line in lines if line.startswith("training ")]
    assert re.match(r"training [╸━].*% \S+ loss \d\.\d{3}", bars[-1])
    assert max(map(len, bars)) <= 80
    assert stopped.code == 130
    assert "stopped; go on with the same command:" in stopped.out
    assert "Traceback" not in stopped.out
    resumed = conducted(tmp_path, environment, *overrides)
    assert resumed.code == 0
    assert repeatable(resumed.run) == repeatable(finished.run)
    assert identical(trained_state(resumed.run), trained_state(finished.run))


# Other runs


def test_the_decoder_of_2017_trains(command: Command, tiny: list[str]) -> None:
    groups = ["norm=layernorm", "block=postnorm", "position=sinusoidal", "attention=mha", "ffn=relu"]
    ran = command(*tiny, "train.tokens=5120", *groups)
    assert (ran.code, ran.err) == (0, "")
    model = OmegaConf.load(ran.run / "resolved.yaml").model
    parts = [model[part]._target_.rpartition(".")[2] for part in ("norm", "block", "position")]
    assert parts == ["LayerNorm", "PostNorm", "Sinusoidal"]
    losses = [row["val/loss"] for row in rows(ran.run) if "val/loss" in row]
    assert losses[-1] < losses[0] < math.log(257)


@pytest.mark.slow
def test_a_multirun_trains_one_run_after_the_other(command: Command, tiny: list[str]) -> None:
    ran = command("--multirun", *tiny, "train.tokens=1280", "name=mine", "norm=rmsnorm,layernorm", "seed=1,2")
    assert (ran.code, ran.err) == (0, "")
    assert [path.name for path in ran.cwd.iterdir()] == ["runs"], "Hydra's multirun.yaml is elsewhere"
    runs = [path.parent for path in (ran.cwd / "runs" / "mine").rglob("summary.json")]
    assert len({summary(run)["val/loss"] for run in runs}) == 4
    for run in runs:
        norm = OmegaConf.load(run / "resolved.yaml").model.norm._target_.rpartition(".")[2].lower()
        assert run.parent.name.startswith(f"norm={norm}-"), "comes first"
    assert sorted(run.name for run in runs) == ["seed=1", "seed=1", "seed=2", "seed=2"]


def test_a_value_of_another_type_than_the_default_may_have_a_meaning(command: Command, tiny: list[str]) -> None:
    scaling = "model.position.scaling={_target_: llama_lab.model.position.LinearScaling, factor: 2}"
    overrides = ["name=2017", "model.vocab_size=300", "model.attention.window=4", "optim.lr=1", scaling]
    overrides += ["train.grad_clip=null", "train.tokens=300.5"]
    ran = command(*tiny, *overrides)
    assert (ran.code, ran.err) == (0, "")
    for key, _, value in (override.partition("=") for override in overrides):
        assert OmegaConf.select(OmegaConf.load(ran.run / "resolved.yaml"), key) == yaml.safe_load(value)


def test_the_command_line_wins_over_an_experiment(command: Command, tiny: list[str], tmp_path: Path) -> None:
    (tmp_path / "mine" / "experiment").mkdir(parents=True)
    body = "defaults: [override /norm: layernorm, override /ffn: gelu]\noptim: {lr: 1e-3}\ntrain: {log_every: 1}"
    (tmp_path / "mine" / "experiment" / "first.yaml").write_text(f"# @package _global_\n{body}\n")
    mine = ("--config-dir", "mine", "experiment=first")
    ran = command(*mine, *tiny, "train.tokens=256", "ffn=relu", "optim.lr=5e-4")
    assert (ran.code, ran.err) == (0, "")
    cfg = OmegaConf.load(ran.run / "resolved.yaml")
    assert cfg.model.norm._target_ == "llama_lab.model.norm.LayerNorm"
    assert cfg.model.ffn.activation._target_ == "torch.nn.ReLU"
    assert (cfg.optim.lr, cfg.train.log_every) == (5e-4, 1)


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
    assert (again.code, again.out.count("done before, passed over")) == (2, 1)


@pytest.mark.slow
def test_a_finished_run_is_refused_and_left_as_it_was(command: Command, tiny: list[str]) -> None:
    overrides = [*tiny, "train.tokens=2560"]
    first = command(*overrides)
    before = files(first.run)
    again = command(*overrides)
    check_refused(again, "name: ")
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


def test_ctrl_c_ends_any_command_in_one_line(in_process: Callable[..., Ran]) -> None:
    for words in ("compare runs", "convert export run out", "tensorboard runs"):
        with patch("llama_lab.cli.user_errors", side_effect=KeyboardInterrupt):
            ran = in_process(main, "llama-lab", *words.split())
        assert (ran.code, ran.out, ran.err) == (130, "", "\nstopped\n")


@pytest.mark.parametrize(
    ("words", "fault"),
    {
        "estimate draw=x.svg": "draw=x.svg",
        "draw one.svg measure=runs": "measure=runs",
        "draw": "llama-lab draw",
        "trian size=pico": "trian",
        "measure nowhere": "measure=nowhere",
        "evaluate estimate=true": "estimate=true",
    }.items(),
)
def test_a_command_that_cannot_be_is_one_line(words: str, fault: str, in_process: Callable[..., Ran]) -> None:
    check_refused(in_process(main, "llama-lab", *words.split()), fault)


# Settings that cannot be, see `faults`.
WRONG_VALUES = """
model.dim=abc
model.dropout=abc
model.vocab_size=abc
train.tokens=abc
seed=abc
optim.lr=abc
schedule.final=abc
trainer.devices=abc
model.norm=layernrom
model.position.scaling=linear
data.files=5
train.sample_tokens=2.5
train.tokens=-5
train.tokens=inf
train.micro_batch_size=3 -> train.batch_size=8
train.micro_batch_size=2.0
train.ema=-0.1
train.label_smoothing=1
seed=1.5
logger.wandb=maybe
trainer.precision=16
ffn=moe trainer.precision=bf16-true model.ffn.balance_bias=0.01
ffn=moe trainer.precision=bf16-true +pattern.a={at:0,ffn:moe_deepseek_v3} -> model.ffn.balance_bias=0.001
trainer.devices=0
trainer.devices=1.5
trainer.accelerator=tpu
trainer.strategy=abc
model.attention.qk_norm=true
position=rope_yarn model.position.scaling.original_max_seq_len=0
init=trunc model.init.cutoff=0
model.attention.window=4 pattern=global_every_2nd pattern.global.at=[0,8]
position=alibi model.attention.qk_norm=head model.attention.qk_norm_rotated=true
arch=gemma3 model.n_layers=3000
estimate=true model.n_layers=1000000000
model.n_layers=0
model.vocab_size=1000000000000
train.batch_size=0
name=../../elsewhere
"""
# What takes a command to see; `bad_files` has the files.
CANNOT_WORK = """
family=encoder_decoder objective=prefix
objective=span
family=encoder
family=encoder objective=masked train.prompt=hi
family=encoder objective=masked train.sample_tokens=9
experiment=mine
position=none model.position.theta=5e5
attention=mamba2 position=none model.attention.window=4
data=my/a.txt
bias=false
ffn=moe model.ffn.expert.limit=5
model.dmi=3
+train.lr=1 -> train.lr=1
train.tokens
optim=null
pattern=global_every_2nd
tokenizer=hf -> tokenizer.path=???
data.files=???
data.files=[empty.txt]
data.files=[latin.txt]
data.files=[lines.txt] data.document_chars=20 data.val_fraction=0.0001
tokenizer=bpe tokenizer.vocab_size=9
tokenizer=bpe tokenizer.vocab_size=1000000000000
tokenizer=char train.prompt='#%'
runs_dir=
runs_dir=/proc
hydra/launcher=local_gpus
"""


@cache
def choices(*overrides: str) -> dict[str, str | None]:
    """The option of every group."""
    with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        return dict(compose("config", list(overrides), return_hydra_config=True).hydra.runtime.choices)


def test_what_other_programs_call_a_key_leads_to_ours() -> None:
    known = known_keys("config", ())
    for ours, names in {
        "train.micro_batch_size": ("train.grad_accum", "gradient_accumulation_steps"),
        "model.hidden_dim": ("model.ffn.hidden_dim", "ffn.hidden_size", "intermediate_size"),
        "model.dim": ("hidden_size", "model.d_model", "model.dmi"),
        "model.max_seq_len": ("model.context_length",),
        "model.position.theta": ("model.rope_theta",),
        "model.n_heads": ("heads",),
        "optim.lr": ("lr",),
        "logger.project": ("wandb.project",),
        "estimate": ("plan",),
        "bias": ("model.bias",),
    }.items():
        assert {nearest(name, known) for name in names} == {ours}


HEADER = "# @package _global_\n"
BROKEN = {
    "tabs": b"a:\n\tb: 1\n",
    "a key twice": b"seed: 1\nseed: 2\n",
    "a list": f"{HEADER}- a\n".encode(),
    "no UTF-8": b"name: \xff\xfe\n",
    "itself": f"{HEADER}a: &x {{b: *x}}\n".encode(),
    "nesting without end": f"{HEADER}a: {'[' * 3000}{']' * 3000}\n".encode(),
    "a call": b"seed: !!python/object/apply:os.getpid []\n",
    "two documents": b"---\nseed: 1\n---\nseed: 2\n",
    "a null key": f"{HEADER}null: 3\n".encode(),
    "NUL": b"a\0b: 1\n",
    "a key that is none": f"{HEADER}train: {{lr: 1}}\n".encode(),
    "a value that is none": f"{HEADER}overwrite: flase\n".encode(),
}


@pytest.mark.parametrize("kind", first(4, BROKEN))
def test_a_broken_config_file_is_refused_in_one_line(kind: str, command: Command, tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "e.yaml").write_bytes(BROKEN[kind])
    ran = command("--config-dir", str(tmp_path), "experiment=e")
    assert (ran.code, ran.err.count("\n")) == (2, 1)
    assert len(ran.err) > len("error: \n") + 10
    assert not (tmp_path / "runs").exists()


def test_an_option_with_the_name_of_a_packaged_one_is_refused(command: Command, tmp_path: Path) -> None:
    own = tmp_path / "mine" / "arch" / "mamba2.yaml"
    own.parent.mkdir(parents=True)
    own.touch()
    for study in ([], ["study=recipes", "study.recipes=[llama,mamba2]"]):
        check_refused(command("--config-dir", str(tmp_path / "mine"), *study), f"--config-dir: {own} ")
    with refusing(f"--config-dir: {own} "):
        load_config([], tmp_path / "mine")


@pytest.mark.parametrize(("typed", "fault"), first(9, faults(CANNOT_WORK)))
def test_what_cannot_work_is_one_line(
    typed: str, fault: str, command: Command, tiny: list[str], bad_files: Path
) -> None:
    before = files(bad_files)
    check_refused(command(*tiny, "train.tokens=256", *typed.split()), fault)
    assert files(bad_files) == before


def test_a_name_that_is_no_file_name_is_refused(command: Command, tiny: list[str]) -> None:
    for key in ("name", "runs_dir"):
        check_refused(command(*tiny, f"{key}={300 * 'n'}"), f"{key}=nnnn")


@pytest.mark.parametrize(("typed", "fault"), first(12, faults(WRONG_VALUES)))
def test_a_value_that_cannot_be_is_refused_before_any_folder_or_file_is_opened(
    typed: str, fault: str, tiny: list[str]
) -> None:
    overrides = last_of_each([*tiny, "train.tokens=256", *typed.split()])
    with refusing(fault):
        cfg = compose_config(*overrides)
        chosen = choices(*(override for override in overrides if "." not in override.partition("=")[0]))
        with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
            requested_run(cfg, chosen, typed.split())
        build_model(cfg, 257)


def test_a_wrong_key_beside_an_option_of_the_user_s_own_is_reported(command: Command, tmp_path: Path) -> None:
    (tmp_path / "mine" / "norm").mkdir(parents=True)
    (tmp_path / "mine" / "norm" / "my.yaml").write_text("# @package model.norm\n_target_: my.Norm\n")
    check_refused(command("--config-dir", "mine", "norm=my", "model.dmi=3"), "model.dmi=3")


def test_several_devices_in_a_multirun_are_refused(command: Command, tiny: list[str]) -> None:
    ran = command("--multirun", *tiny, "trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2", "seed=1,2")
    assert (ran.code, ran.err.count("trainer.devices=2: hydra/launcher=basic trains on one device")) == (2, 3)
    assert not (ran.cwd / "runs").exists()


# A run of an older version

WAYS: dict[str, tuple[Callable[[], None], list[str]]] = {
    "the same command": (train_command, [*FINISHED, "runs_dir=runs"]),
    "starting from it": (train_command, [*TEXT, "init_from={run}"]),
    "evaluating": (eval_command, ["run={run}"]),
    "exporting": (convert_command, ["export", "{run}", "exported"]),
    "comparing": (compare_command, ["{run}"]),
}


@pytest.mark.parametrize("way", first(2, WAYS))
def test_a_run_of_a_version_before_0_4_is_refused(way: str, in_process: Callable[..., Ran], tmp_path: Path) -> None:
    command, arguments = WAYS[way]
    run = Path("runs") / "finished" / "base" / "seed=1"
    shutil.copytree(RUNS / "finished", tmp_path / "runs" / "finished")
    file = tmp_path / run / "environment.json"
    facts = {key: value for key, value in json.loads(file.read_text()).items() if key not in ("checksum", "versions")}
    file.write_text(json.dumps(facts | {"versions": {} if way == "comparing" else {"llama-lab": "0.3.1"}}))
    ran = in_process(command, "the command", *(argument.format(run=run) for argument in arguments))
    check_refused(ran, f"init_from={run}" if way == "starting from it" else str(run))
