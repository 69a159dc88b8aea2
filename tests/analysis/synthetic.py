"""Studies on disk whose truth is known: run folders as training leaves them, without any training.

`write_study` writes a clean study. The functions below it then plant what a real one may suffer from, in one run:

    study = write_study(folder, {"layernorm": 0.0, "rmsnorm": -0.02}, seeds=(1, 2, 3))
    plant_facts(run_folder(folder, study, "rmsnorm", seed=2), device="cuda")
"""

import csv
import functools
import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from omegaconf import OmegaConf

from llama_lab.analysis.analyse import analyse
from llama_lab.analysis.result import Result
from llama_lab.config.components import build_model
from llama_lab.model import measure_cost
from llama_lab.model.cost import cost_metrics
from llama_lab.model.norm import RMSNorm
from llama_lab.runs.metrics import read_metrics
from llama_lab.runs.stored import COLUMNS
from llama_lab.runs.study import Arm, Member, Study
from llama_lab.training import schedule

BASE_LOSS = 3.7  # of an arm without effect, in nats per token, before the seed's and the run's share
BYTES_PER_TOKEN = 3.4383843898315534
BEST_RATE = 2e-3
TOKENS_PER_STEP = 16 * 256
STEPS = 390
EVALUATE_EVERY = 39

CONFIG: dict[str, Any] = {
    "name": None,
    "seed": 1,
    "runs_dir": "runs",
    "overwrite": False,
    "resume": False,
    "train": {
        "tokens": 1.6e6,
        "batch_size": 16,
        "micro_batch_size": None,
        "grad_clip": 1.0,
        "z_loss": 0.0,
        "evaluations": 10,
        "log_every": 10,
        "checkpoint_every": 200,
        "sample_tokens": 100,
        "prompt": "",
    },
    "model": {
        "_target_": "llama_lab.model.Decoder",
        "head_dim": 32,
        "dropout": 0.0,
        "seed": 1,
        "dim": 128,
        "n_layers": 4,
        "n_heads": 4,
        "max_seq_len": 256,
        "vocab_size": None,
        "norm": {"_target_": "llama_lab.model.norm.RMSNorm", "_partial_": True, "eps": 1e-05, "unit_offset": False},
        "block": {"_target_": "llama_lab.model.block.PreNorm", "_partial_": True},
        "position": {"_target_": "llama_lab.model.position.Rope", "_partial_": True, "theta": 10000.0, "scaling": None},
        "n_kv_heads": 4,
        "attention": {
            "_target_": "llama_lab.model.attention.GroupedQueryAttention",
            "_partial_": True,
            "window": None,
            "kernel": "auto",
        },
        "hidden_dim": 344,
        "ffn": {
            "_target_": "llama_lab.model.feedforward.GatedFeedForward",
            "_partial_": True,
            "activation": {"_target_": "torch.nn.SiLU", "_partial_": True},
        },
        "embedding": {"_target_": "llama_lab.model.embedding.Embedding", "_partial_": True, "tied": False, "std": 0.02},
        "init": {"_target_": "llama_lab.model.init.Normal", "_partial_": True, "std": 0.02},
    },
    "size": {"n_kv_heads": 2, "mlp_ratio": 4},
    "data": {
        "source": {"_target_": "llama_lab.data.source.StandardLibrary"},
        "val_fraction": 0.05,
        "seed": 1,
        "cache_dir": "/tmp/lc",
    },
    "tokenizer": {"_target_": "llama_lab.data.tokenizer.BPETokenizer", "vocab_size": 4096},
    "optim": {"_target_": "llama_lab.training.optim.adamw", "lr": BEST_RATE, "beta1": 0.9, "weight_decay": 0.1},
    "schedule": {
        "_target_": "llama_lab.training.schedule.cosine",
        "_partial_": True,
        "warmup": 0.05,
        "final": 0.1,
    },
    "trainer": {"accelerator": "auto", "devices": 1, "num_nodes": 1, "strategy": "auto", "precision": "auto"},
    "logger": {"tensorboard": False, "wandb": False, "project": "llama-lab"},
}

FACTS: dict[str, Any] = {
    "command": ["train.py"],
    "python": "3.11.7",
    "versions": {
        "llama-lab": "0.4.0",
        "torch": "2.13.0+cpu",
        "lightning": "2.6.6",
        "numpy": "2.4.6",
        "tokenizers": "0.22.1",
    },
    "platform": "Linux-6.18.44-x86_64-with-glibc2.36",
    "cpu_threads": 2,
    "gpus": [],
    "git": {"commit": "799d2f66f95e0a9b71f6541347342cf7e5404c08", "dirty": False},
    "name": "synthetic",
    "choices": {"norm": "rmsnorm", "position": "rope"},
    "device": "cpu",
    "precision": "32-true",
    "attention_kernel": "sdpa",
    "data_hash": "9f4fcfe12c2f4bd836102f96fb390e1e",
    "tokenizer_hash": "c06e3e215dc62ae0bc533be8ae575bc9",
    "vocab_size": 4096,
    "bytes_per_token": BYTES_PER_TOKEN,
    "unigram_entropy": 6.268971992882659,
    "token_to_position_ratio": None,
    "seq_len": 256,
    "params": 1840256,
    "params_non_embedding": 791680,
    "flops_per_token": 2892800.0,
    "flops_per_token_dense": 3153920,
    "train_flops_per_token": 8678400.0,
    "kv_cache/bytes_per_token": 2048,
    "kv_cache/bytes": 524288,
}


class MyNorm(RMSNorm):
    """A component of a user's own package."""


def write_study(
    folder: Path,
    arms: Mapping[str, float],
    seeds: Sequence[int] = (1, 2, 3),
    *,
    noise: float = 0.005,
    seed_noise: float = 0.05,
    design: str = "ladder",
    match: str = "params",
    axes: Mapping[str, dict[str, str]] | None = None,
    rates: Sequence[float] = (),
    best_rates: Mapping[str, float] | None = None,
    tuned: bool = False,
    facts: Mapping[str, dict[str, Any]] | None = None,
    config: Mapping[str, dict[str, Any]] | None = None,
    lengths: Sequence[int] = (),
    draw: int = 0,
) -> Study:
    """Write a study of finished runs and its study.yaml into `folder`; the first arm is the baseline.

    arms: each arm's name and its planted effect on the final loss, in nats per token. noise, seed_noise: standard
    deviations of what each run, and each seed in all arms alike, adds to it. axes: the levels of each arm, its own name
    at the axis "arm" unless given. rates: learning rates to sweep; the loss is lowest at the arm's `best_rates`. tuned:
    they are swept on seeds of their own, 1000 above, and the judged runs have the best. facts, config: what differs in
    an arm's environment.json and resolved.yaml (`{"train.tokens": 2e6}`). lengths: context lengths of an eval.json.
    draw: seed of the noise. In a ladder each arm is counted from the one before.
    """
    random = np.random.default_rng(draw)
    shared = {seed: seed_noise * random.standard_normal() for seed in seeds}
    names = list(arms)
    made = []
    for index, (name, effect) in enumerate(arms.items()):
        best_rate = (best_rates or {}).get(name, BEST_RATE)
        members = _members(name, seeds, rates, best_rate, tuned)
        own = {seed: noise * random.standard_normal() for seed in dict.fromkeys(member.seed for member in members)}
        for member in members:
            rate = best_rate if tuned and member.tunes is None else member.learning_rate
            distance = math.log(rate / best_rate) if rate else 0.0
            penalty = 0.1 * distance**2 + 1e-6 * distance  # no two rates have the very same loss
            rated = {"optim.lr": rate} if rate else {}
            write_run(
                folder / member.folder,
                name,
                member.seed,
                BASE_LOSS + shared[member.tunes or member.seed] + effect + own[member.seed] + penalty,
                facts=(facts or {}).get(name, {}),
                config=(config or {}).get(name, {}) | rated,
                lengths=lengths,
            )
        made.append(
            Arm(
                name,
                axes[name] if axes else {"arm": name},
                members,
                names[index - 1] if design == "ladder" and index else None,
                0.001 if match != "none" and index else None,
            )
        )
    study = Study("synthetic", design, names[0], tuple(made), match, "llama-lab-study synthetic")
    study.save(folder)
    return study


def _members(
    arm: str, seeds: Sequence[int], rates: Sequence[float], best_rate: float, tuned: bool
) -> tuple[Member, ...]:
    if not tuned:
        swept = [(seed, rate) for seed in seeds for rate in rates or (None,)]
        return tuple(Member(f"{arm}-lr={r:g}/seed={s}" if r else f"{arm}/seed={s}", s, r) for s, r in swept)
    assert best_rate in rates
    tuning = [Member(f"{arm}-lr={r:g}/seed={s + 1000}", s + 1000, r, tunes=s) for s in seeds for r in rates]
    return (*(Member(f"{arm}/seed={seed}", seed) for seed in seeds), *tuning)


def write_run(
    path: Path,
    arm: str,
    seed: int,
    final_loss: float,
    *,
    facts: Mapping[str, Any] | None = None,
    config: Mapping[str, Any] | None = None,
    lengths: Sequence[int] = (),
) -> None:
    """Write the folder of one finished run that ends at `final_loss`, in nats per token."""
    path.mkdir(parents=True)
    settings = {"seed": seed, "model.seed": seed, "data.seed": seed} | dict(config or {})
    resolved = _nested(CONFIG, settings)
    environment = FACTS | _sizes(resolved) | {"arm": arm, "seed": seed} | dict(facts or {})
    _write_json(path / "environment.json", environment)
    _write_json(path / "status.json", {"status": "done", "message": ""})
    _write_yaml(path / "resolved.yaml", resolved)
    rows = _metrics(final_loss, environment["bytes_per_token"], resolved)
    _write_metrics(path / "metrics.csv", rows)
    last: dict[str, float] = {}
    for row in rows:
        last |= row
    _write_json(path / "summary.json", environment | last)
    if lengths:
        found = [_at_length(final_loss, length) for length in lengths]
        _write_json(path / "eval.json", {"step": STEPS, "lengths": found})


def run_folder(folder: Path, study: Study, arm: str, seed: int, rate: float | None = None) -> Path:
    """Where a study keeps one of its runs."""
    members = next(a for a in study.arms if a.name == arm).members
    (found,) = [m for m in members if m.seed == seed and m.learning_rate == rate]
    return folder / found.folder


Plant = Callable[[Path, Study], None]


def warnings_of(folder: Path, plant: Plant = lambda *_: None, **settings: Any) -> list[str]:
    """The warnings of a study of two arms and three seeds, in which `plant` has changed something."""
    study = write_study(folder, **{"arms": {"layernorm": 0.0, "rmsnorm": -0.02}} | settings)
    plant(folder, study)
    return planted_warnings(analyse(study, folder))


def planted_warnings(result: Result) -> list[str]:
    """All warnings but that of one learning rate, which every study without a search has."""
    return [warning for warning in result.warnings if not warning.startswith("One learning rate for all arms")]


def run_of(folder: Path, study: Study, seed: int = 2) -> Path:
    """The run in which something is planted."""
    return run_folder(folder, study, "rmsnorm", seed)


def in_runs(change: Callable[..., object], *seeds: int, **settings: Any) -> Plant:
    """Change the runs of these seeds (default: 2)."""

    def plant(folder: Path, study: Study) -> None:
        for seed in seeds or (2,):
            change(run_of(folder, study, seed), **settings)

    return plant


def replace_text(run: Path, name: str, old: str, new: str) -> None:
    """Change the text of a file of a run."""
    (run / name).write_text((run / name).read_text().replace(old, new))


def plant_facts(run: Path, **facts: Any) -> None:
    """Change what a run's environment.json and summary.json say."""
    for name in ("environment.json", "summary.json"):
        _write_json(run / name, json.loads((run / name).read_text()) | facts)


def plant_config(run: Path, **settings: Any) -> None:
    """Let a run have been trained with other settings, __ for the dot: `train__tokens=2e6`. Its losses stay."""
    dotted = {key.replace("__", "."): value for key, value in settings.items()}
    file = run / "resolved.yaml"
    resolved = _nested(yaml.safe_load(file.read_text()), dotted)
    _write_yaml(file, resolved)
    change_metrics(run, lambda row: {"optim/lr": _rate(resolved, int(row["step"]))} if "optim/lr" in row else {})
    plant_facts(run, **_sizes(resolved))


def change_metrics(run: Path, change: Callable[[dict[str, float]], dict[str, float]]) -> None:
    """Change rows of metrics.csv, and summary.json with them; `change` returns what is new in a row."""
    rows = [row | change(row) for row in read_metrics(run / "metrics.csv")]
    _write_metrics(run / "metrics.csv", rows)
    last = {key: value for row in rows for key, value in row.items()}
    summary = json.loads((run / "summary.json").read_text())
    _write_json(run / "summary.json", summary | {key: last[key] for key in last if last[key] != summary.get(key)})


def plant_evaluation(run: Path, step: int = STEPS, **parts: Any) -> None:
    """Let a run have been evaluated after `step` steps, on a CPU; `parts` as eval.json holds them."""
    measured_with = {"device": "cpu", "precision": "32-true", "threads": 2, "torch": "2.13.0+cpu"}
    _write_json(run / "eval.json", {"step": step, **measured_with, **parts})


def speed(context: int, batch_size: int = 1, **seconds: Sequence[float]) -> dict[str, Any]:
    """A measurement of eval.json: the seconds of each round, of what is not given 1 ms, 2 ms and 8 ms."""
    fixed = {"prefill": [0.001] * 3, "decode": [0.002] * 3, "uncached": [0.008] * 3}
    return {"batch_size": batch_size, "context": context} | fixed | seconds


def cache(context: int, size: int, batch_size: int = 1, dtype: str = "bfloat16", excess: int = 0) -> dict[str, Any]:
    """A cache of `size` bytes in eval.json, measured to be larger than its formula by `excess` bytes."""
    sizes = {"formula_bytes": size, "measured_bytes": size + excess, "allocated_bytes": None}
    return {"batch_size": batch_size, "context": context, "dtype": dtype} | sizes


def plant_end(run: Path, status: str, message: str, kept_rows: int) -> None:
    """Let a run end early, as diverged, interrupted, failed or running, with the first rows of metrics.csv left."""
    _write_json(run / "status.json", {"status": status, "message": message})
    (run / "summary.json").unlink()
    lines = (run / "metrics.csv").read_text().splitlines(keepends=True)
    (run / "metrics.csv").write_text("".join(lines[: 1 + kept_rows]))


def remove_run(run: Path) -> None:
    """Leave nothing of a run that the study lists."""
    shutil.rmtree(run)


def _metrics(final_loss: float, bytes_per_token: float, config: dict[str, Any]) -> list[dict[str, float]]:
    """The rows of a run of STEPS steps: training loss every 10 steps, validation every EVALUATE_EVERY."""
    rows = []
    for step in range(1, STEPS + 1):
        tokens, seconds = step * TOKENS_PER_STEP, step * TOKENS_PER_STEP / 12_000
        row: dict[str, float] = {"step": step, "tokens": tokens, "seconds": seconds}
        loss = final_loss + 4.5 * (math.exp(-6 * step / STEPS) - math.exp(-6))
        if step % 10 == 0:
            speed = {"perf/tokens_per_second": 12_000.0, "perf/peak_memory_bytes": 1_049_706_496}
            rows.append(
                row | {"train/loss": loss + 0.1, "optim/lr": _rate(config, step), "optim/grad_norm": 0.6} | speed
            )
        if step % EVALUATE_EVERY == 0:
            rows.append(row | {"val/loss": loss, "val/bits_per_byte": loss / math.log(2) / bytes_per_token})
    return rows


def _rate(config: dict[str, Any], step: int) -> float:
    """The learning rate that the config's schedule has after a step."""
    settings = {key: value for key, value in config["schedule"].items() if not key.startswith("_")}
    function = getattr(schedule, config["schedule"]["_target_"].rpartition(".")[2])
    return float(config["optim"]["lr"] * function(step, STEPS, **settings))


def _at_length(final_loss: float, length: int) -> dict[str, Any]:
    """What eval.json tells of one context length: longer ones are a little worse."""
    loss = final_loss + 0.001 * (length / 256 - 1)
    positions = [length * (bucket + 0.5) / 4 for bucket in range(4)]
    losses = [loss + 0.1 - 0.2 * bucket / 3 for bucket in range(4)]
    return {"length": length, "loss": loss, "positions": positions, "losses": losses}


def _sizes(config: dict[str, Any]) -> dict[str, Any]:
    """What a run has on record of its model's size; of the model of CONFIG what stands in FACTS."""
    model = config["model"] | {"seed": CONFIG["model"]["seed"]}
    return {} if model == CONFIG["model"] else _costs(json.dumps(model))


@functools.cache
def _costs(model: str) -> dict[str, Any]:
    with torch.device("meta"):
        built = build_model(OmegaConf.create({"model": json.loads(model)}), FACTS["vocab_size"])
    return cost_metrics(measure_cost(built))


def _nested(base: dict[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of `base` with dotted keys set."""
    copy: dict[str, Any] = json.loads(json.dumps(base))
    for key, value in settings.items():
        *parents, last = key.split(".")
        node = copy
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    return copy


def _write_metrics(path: Path, rows: list[dict[str, float]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def _write_yaml(path: Path, content: dict[str, Any]) -> None:
    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)  # ten times as fast, and tests write thousands of runs
    path.write_text(yaml.dump(content, Dumper=dumper, sort_keys=False))
