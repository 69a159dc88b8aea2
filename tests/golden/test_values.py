"""What no change of the code may change: models, batches, losses and reports as the golden files have them."""

import csv
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import islice, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

import llama_lab
from llama_lab.data.data_module import TokenDataModule
from llama_lab.data.open import open_dataset
from llama_lab.data.windows import TrainWindows
from llama_lab.report.write import write_report
from llama_lab.runs.study import Study
from tests.analysis.simulate_scaling import Condition, draw
from tests.analysis.synthetic import plant_config, plant_end, plant_facts, run_folder, write_study
from tests.composing import options
from tests.conftest import Command
from tests.data.test_data_module import on_device
from tests.golden.files import check, numbers

TRAINED = {
    "llama": ["arch=llama"],
    "latent": ["arch=llama", "attention=mla"],
    "vanilla": ["arch=vanilla"],
    "gpt2": ["arch=gpt2"],
    "gemma2": ["arch=gemma2"],
}


# Models


@pytest.mark.matrix
@pytest.mark.parametrize("arch", options("arch"))
def test_a_recipe_has_its_config_its_costs_and_its_first_weights(arch: str) -> None:
    cfg = llama_lab.load_config([f"arch={arch}"])
    settings = OmegaConf.to_container(cfg.model, resolve=True)
    check("recipes", {"cost": vars(llama_lab.cost(cfg)), "model": settings}, part=arch)
    model = llama_lab.build_model(llama_lab.load_config([f"arch={arch}", "size=pico", "seed=1"]), 97)
    check("weights", {name: described(parameter) for name, parameter in model.named_parameters()}, part=arch)


def described(tensor: torch.Tensor) -> list[Any]:
    """Shape, mean, standard deviation and the first values."""
    values = tensor.detach().double().flatten()
    return [list(tensor.shape), values.mean().item(), values.std(correction=0).item(), *values[:3].tolist()]


# Training


def test_a_seed_has_its_batches(tiny: list[str]) -> None:
    cfg = llama_lab.load_config([*tiny, "model.max_seq_len=32"])
    dataset = open_dataset(cfg)
    found = {}
    for seed in range(1, 6):
        windows = TrainWindows(np.arange(2000), 32, seed)
        data = on_device(TokenDataModule(dataset, 32, 8, None, seed), 0, 1)
        batches = (batch for (batch,) in islice(data.train_dataloader(), 3))
        steps = (0, 1, 2, 7, 8)  # an epoch has 61 or 62 windows
        found[seed] = {
            "starts": [windows.examples(step, 8).inputs[:, 0].tolist() for step in steps],
            "tokens": [[inputs[:, :4].tolist(), int(targets.sum())] for inputs, targets in batches],
        }
    check("batches", {str(seed): own for seed, own in found.items()})


@pytest.mark.parametrize(
    "name", ["llama", *(pytest.param(name, marks=pytest.mark.matrix) for name in TRAINED if name != "llama")]
)
def test_a_recipe_has_its_losses_of_ten_steps(name: str, command: Command, tiny: list[str]) -> None:
    """To 1e-5, since the order of sums differs between processors."""
    ran = command(*tiny, *TRAINED[name], "train.tokens=2560", "train.log_every=1", "trainer=cpu")
    assert (ran.code, ran.err) == (0, "")
    with (ran.run / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    losses = {kind: [float(row[kind]) for row in rows if row[kind]] for kind in ("train/loss", "val/loss")}
    assert len(losses["train/loss"]) == 10
    check(f"losses_{name}", losses, 1e-5)


# Reports


Write = Callable[[Path], Study]


def factorial(folder: Path) -> Study:
    effects = dict(zip(product(("layernorm", "rmsnorm"), ("relu", "swiglu")), (0.0, 0.02, -0.1, -0.02), strict=True))
    axes = {"+".join(levels): dict(zip(("norm", "ffn"), levels, strict=True)) for levels in effects}
    return write_study(folder, dict(zip(axes, effects.values(), strict=True)), axes=axes, design="factorial")


def scaling(folder: Path) -> Study:
    """Four sizes by three budgets, at losses that follow a law, with a gain of 1.4 for the second option."""
    drawn = draw(Condition("gain", noise=1e-3, gain=1.4), np.random.default_rng(0))
    named = zip(("relu", "swiglu"), drawn, strict=True)
    points = {f"{o}-{p.size}-{p.budget:g}": (o, p) for o, own in named for p in own}
    axes = {n: {"ffn": o, "size": p.size, "tokens_per_parameter": f"{p.budget:g}"} for n, (o, p) in points.items()}
    effects = {n: float(np.mean([*p.losses.values()])) - 3.7 for n, (_, p) in points.items()}
    facts = {n: {"params": p.params, "train_flops_per_token": p.flops / p.tokens} for n, (_, p) in points.items()}
    study = write_study(folder, effects, design="scaling", match="none", axes=axes, facts=facts, noise=1e-3)
    arms = [replace(a, previous=a.name.replace("swiglu", "relu") if "swiglu" in a.name else None) for a in study.arms]
    for name, (_, point) in points.items():
        for seed in (1, 2, 3):
            plant_facts(run_folder(folder, study, name, seed), tokens=point.tokens)
    return replace(study, arms=tuple(arms))


def planted(folder: Path) -> Study:
    """A study with a divergence, an interruption, another device, other settings, and the data of another version."""
    study = write_study(folder, {"base": 0.0, "bad": 0.1, "other": -0.1, "cut": 0.0, "moved": 0.0})
    plant_end(run_folder(folder, study, "bad", 2), "diverged", "the loss is nan at step 200", 30)
    plant_end(run_folder(folder, study, "cut", 1), "interrupted", "", 20)
    plant_config(run_folder(folder, study, "other", 3), train__tokens=2e6, optim__weight_decay=0.0)
    plant_facts(run_folder(folder, study, "moved", 1), device="cuda", data_hash="0" * 32)
    return study


def simple(
    arms: Mapping[str, float], *seeds: int, compare: str = "baseline", **settings: Any
) -> Callable[[Path], Study]:
    def write(folder: Path) -> Study:
        return replace(write_study(folder, arms, seeds or (1, 2, 3), **settings), compare=compare)

    return write


STEPS = {"vanilla": 0.0, "+norm": -0.005, "+block": -0.13, "+rope": -0.21, "+swiglu": -0.21}
FOUR = {"gpt2": 0.0, "bloom": 0.2, "llama": -0.3, "mistral": -0.302}
RATES = (1e-3, 2e-3, 4e-3)
STUDIES: dict[str, Write] = {
    "ladder": simple(STEPS),
    "ladder_of_five_seeds_tuned": simple(STEPS, 1, 2, 3, 4, 5, rates=RATES, tuned=True),
    "ladder_of_two_seeds": simple(STEPS, 1, 2),
    "ladder_all_pairs": simple(STEPS, compare="all"),
    "leave_one_out": simple(STEPS, design="leave_one_out"),
    "add_one": simple(STEPS, design="add_one", best_rates={"+rope": 4e-3}, rates=RATES, tuned=True),
    "factorial": factorial,
    "options": simple(FOUR, design="options", compare="all"),
    "recipes": simple(FOUR, design="recipes", compare="all", lengths=(256, 512, 1024)),
    "rates": simple({"a": 0.0, "b": 0.01}, rates=RATES, best_rates={"b": 1e-3}, design="learning_rate"),
    "context": simple({"rope": 0.0, "learned": 0.1}, design="context", lengths=(256, 512)),
    "scaling": scaling,
    "planted": planted,
}  # fmt: skip


CORE = ("ladder", "factorial", "scaling", "planted")  # one of each kind of analysis


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in CORE else pytest.mark.matrix) for name in STUDIES]
)
def test_a_study_has_its_numbers(name: str, tmp_path: Path) -> None:
    study = STUDIES[name](tmp_path)
    study.save(tmp_path)
    result = write_report(tmp_path)
    with (tmp_path / "summary.csv").open(newline="") as file:
        summary = [{key: number(value) for key, value in row.items() if value} for row in csv.DictReader(file)]
    said = {"verdict": [result.verdict], "tests": [result.tests], "answer": result.answer}
    said |= {"warnings": result.warnings, "notes": result.notes}
    check(f"study_{name}", {"summary": summary} | {key: numbers(sentences) for key, sentences in said.items()})


def number(text: str) -> float | str:
    """A cell of a CSV file."""
    try:
        return float(text)
    except ValueError:
        return text
