"""Optimizers: what they decay, and that their steps are those of the papers."""

import copy
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.profiler import ProfilerActivity, profile

from llama_lab.config.components import build
from llama_lab.model import Decoder
from llama_lab.training.optim import adafactor, adam, adamw, lion, muon, sgd
from llama_lab.util.errors import ConfigError
from tests.composing import compose_config, decoder, options
from tests.training.tiny import pieces

SETTINGS = {"lr": 3e-3, "beta1": 0.8, "beta2": 0.95, "eps": 1e-6, "weight_decay": 0.3}
OPTIMIZERS = options("optim")


def made(optimizer: str, model: nn.Module, *overrides: str) -> torch.optim.Optimizer:
    """The optimizer that the command line would make."""
    factory = build(compose_config(f"optim={optimizer}", *overrides).optim, "optim")
    return factory(model)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("arch", "optimizer"), [*((arch, "adamw") for arch in options("arch")), *(("gpt2", name) for name in OPTIMIZERS)]
)
def test_matrices_and_tables_decay_and_norms_and_biases_do_not(arch: str, optimizer: str) -> None:
    model = decoder(f"arch={arch}")
    decaying = {id(module.weight) for module in model.modules() if isinstance(module, nn.Linear | nn.Embedding)} | {
        id(p) for name, p in model.named_parameters() if "position" in name
    }
    by_decay: dict[float, set[int]] = {}
    for group in made(optimizer, model, "optim.weight_decay=0.3").param_groups:
        by_decay.setdefault(group["weight_decay"], set()).update(id(p) for p in group["params"])
    assert by_decay.pop(0.3) == decaying
    assert by_decay.pop(0.0, set()) == {id(p) for p in model.parameters()} - decaying
    assert by_decay == {}


def assert_same_steps(optimizer: torch.optim.Optimizer, model: Decoder, others: Sequence[Any], copied: Decoder) -> None:
    """Three steps of equal gradients leave the weights that the other optimizers leave in a copy, to the last bit."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        for p, q in zip(model.parameters(), copied.parameters(), strict=True):
            p.grad = torch.randn(p.shape, generator=generator)
            q.grad = p.grad.clone()
        for each in (optimizer, *others):
            each.step()
        torch.testing.assert_close(model.state_dict(), copied.state_dict(), rtol=0, atol=0)


BETAS = {"lr": 3e-3, "betas": (0.8, 0.95), "eps": 1e-6, "fused": True}
MOMENTUM = {"lr": 0.02, "momentum": 0.7, "weight_decay": 0.3}


@pytest.mark.parametrize(
    ("ours", "settings", "theirs", "their_settings"),
    [
        (adam, SETTINGS, torch.optim.Adam, BETAS),
        (adamw, SETTINGS, torch.optim.AdamW, BETAS),
        (sgd, MOMENTUM | {"nesterov": False}, torch.optim.SGD, {"lr": 0.02, "momentum": 0.7}),
        (sgd, MOMENTUM | {"nesterov": True}, torch.optim.SGD, {"lr": 0.02, "momentum": 0.7, "nesterov": True}),
    ],
)
def test_steps_of_adam_adamw_and_sgd_are_pytorch_s_whose_decay_is_of_matrices_alone(
    ours: Callable[..., Any], settings: dict[str, Any], theirs: Callable[..., Any], their_settings: dict[str, Any]
) -> None:
    model, copied = decoder("arch=gpt2"), decoder("arch=gpt2")
    others = [
        theirs([p for p in copied.parameters() if (p.ndim > 1) == decays], weight_decay=0.3 * decays, **their_settings)
        for decays in (True, False)
    ]
    assert_same_steps(ours(model, **settings), model, others, copied)


def test_steps_of_lion_are_those_written_by_hand_in_float64() -> None:
    model, generator = decoder("arch=gpt2").double(), torch.Generator().manual_seed(0)
    optimizer = lion(model, lr=1e-3, beta1=0.8, beta2=0.95, weight_decay=0.3)
    by_hand = {name: p.detach().clone() for name, p in model.named_parameters()}
    mean = {name: torch.zeros_like(p) for name, p in by_hand.items()}
    for _ in range(3):
        for name, p in model.named_parameters():
            g = p.grad = torch.randn(p.shape, generator=generator, dtype=torch.float64)
            decay = 0.3 if p.ndim == 2 else 0.0
            update = (0.8 * mean[name] + 0.2 * g).sign() + decay * by_hand[name]
            mean[name], by_hand[name] = 0.95 * mean[name] + 0.05 * g, by_hand[name] - 1e-3 * update
        optimizer.step()
        torch.testing.assert_close(dict(model.named_parameters()), by_hand, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("scale", [1.0, 1e-5])
def test_steps_of_adafactor_are_the_paper_s_by_hand_in_float64_whatever_the_scale_of_gradients(scale: float) -> None:
    """Also of gradients with rows of zeros, as of an embedding, and that grow or shrink, so that clipping acts."""
    model, generator = decoder("arch=gpt2"), torch.Generator().manual_seed(0)
    optimizer = adafactor(model, lr=0.5, beta2_decay=-0.8, clip=1.0, weight_decay=0.0)
    by_hand = {name: p.detach().double() for name, p in model.named_parameters()}
    rows, columns = ({name: torch.zeros(()) for name in by_hand} for _ in range(2))
    for t, size in enumerate((1.0, 2.0, 0.1), 1):
        for name, p in model.named_parameters():
            p.grad = scale * size * torch.randn(p.shape, generator=generator)
            if p.ndim == 2:
                p.grad[0] = 0
            beta2, squared = 1 - t**-0.8, p.grad.double() ** 2 + 1e-30
            rows[name] = beta2 * rows[name] + (1 - beta2) * (squared.mean(1, keepdim=True) if p.ndim == 2 else squared)
            columns[name] = beta2 * columns[name] + (1 - beta2) * squared.mean(0, keepdim=True)
            variance = rows[name] * columns[name] / rows[name].mean() if p.ndim == 2 else rows[name]
            update = p.grad.double() / variance.sqrt()
            clipped = update / max(1.0, float(update.square().mean().sqrt()))
            size_of = max(1e-3, float(by_hand[name].square().mean().sqrt()))
            by_hand[name] = by_hand[name] - size_of * min(0.5, t**-0.5) * clipped
        optimizer.step()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.double(), by_hand[name], rtol=1e-5, atol=1e-7)


def test_a_step_of_lion_allocates_no_more_than_two_copies_of_the_largest_weight() -> None:
    model = decoder("arch=gpt2", "model.n_layers=4")
    optimizer = lion(model, lr=1e-3, beta1=0.8, beta2=0.95, weight_decay=0.3)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()  # which makes its states
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        optimizer.step()
    events: Any = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]  # type: ignore[union-attr]
    live = np.cumsum([event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())])
    assert live.max() <= 2 * max(p.nbytes for p in model.parameters())


MUON = {**SETTINGS, "momentum": 0.9, "nesterov": True, "newton_schulz_steps": 5}


def test_muon_s_step_is_pytorch_s_for_matrices_of_blocks_and_adamw_s_for_the_rest() -> None:
    """And a matrix's update is a product of orthogonal ones, as large as AdamW's: 0.2 of every element's."""
    ours, theirs = decoder("arch=gpt2"), decoder("arch=gpt2")
    matrices = {n: m.weight for n, m in theirs.named_modules() if isinstance(m, nn.Linear) and n.startswith("blocks")}
    chosen = set(map(id, matrices.values()))
    rest = [p for p in theirs.parameters() if id(p) not in chosen]
    parts = [
        torch.optim.Muon(matrices.values(), 3e-3, 0.3, 0.9, True, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW([p for p in rest if p.ndim > 1], 3e-3, (0.8, 0.95), 1e-6, 0.3, fused=True),
        torch.optim.AdamW([p for p in rest if p.ndim < 2], 3e-3, (0.8, 0.95), 1e-6, 0.0, fused=True),
    ]
    joint = muon(ours, **MUON)
    assert_same_steps(joint, ours, parts, theirs)
    before = copy.deepcopy(ours.state_dict())
    joint.step()
    for name in matrices:
        weight = before[f"{name}.weight"]
        update = (weight * (1 - 3e-3 * 0.3) - ours.state_dict()[f"{name}.weight"]) / 3e-3
        values = torch.linalg.svdvals(update) / (0.2 * math.sqrt(max(update.shape)))
        assert 0.6 < values.median() < values.max() < 1.3


def test_muon_orthogonalises_every_matrix_of_a_stack_and_leaves_stacked_biases_to_adamw() -> None:
    model, generator = decoder("ffn=moe", "expert=gelu_bias"), torch.Generator().manual_seed(0)
    optimizer = muon(model, **MUON)
    copies = {}
    for name, p in model.named_parameters():
        p.grad = torch.randn(p.shape, generator=generator)
        if "experts" in name:
            copies[name] = [nn.Parameter(one.clone()) for one in p.detach()]
            for one, grad in zip(copies[name], p.grad, strict=True):
                one.grad = grad.clone()
    matrices = [one for name in copies if name.endswith("weight") for one in copies[name]]
    biases = [one for name in copies if name.endswith("bias") for one in copies[name]]
    others = (
        torch.optim.Muon(matrices, 3e-3, 0.3, 0.9, True, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(biases, 3e-3, (0.8, 0.95), 1e-6, 0.0, fused=True),
    )
    for each in (optimizer, *others):
        each.step()
    for name, ones in copies.items():
        torch.testing.assert_close(model.get_parameter(name), torch.stack(ones), rtol=0, atol=0)


def test_a_depthwise_convolution_is_no_matrix() -> None:
    model = decoder()
    model.blocks[0].ffn = nn.Sequential(nn.Conv1d(32, 32, 4, groups=32), nn.Conv1d(32, 32, 4))
    decaying, *_ = made("adamw", model).param_groups
    assert [any(p is own.weight for p in decaying["params"]) for own in model.blocks[0].ffn] == [False, True]


def test_muon_leaves_the_embeddings_and_a_head_of_its_own_to_adamw() -> None:
    model = decoder("arch=llama")
    first, second, third = muon(model, **MUON).param_groups
    assert {id(p) for p in second["params"]} == {id(model.embedding.tokens.weight), id(model.embedding.head.weight)}
    assert all(p.ndim == 1 for p in third["params"])
    assert len(first["params"]) == 7 * len(model.blocks)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_optimizer_that_is_loaded_goes_on_as_if_it_had_not_stopped(optimizer: str) -> None:
    """Under a schedule, as in a run."""

    def step(model: Decoder, opt: torch.optim.Optimizer, schedule: LambdaLR, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=generator)
        opt.step()
        schedule.step()

    def begin() -> tuple[Decoder, torch.optim.Optimizer, LambdaLR]:
        model = decoder("arch=llama")
        opt = made(optimizer, model)
        return model, opt, LambdaLR(opt, lambda n: 1 / (n + 1))

    through, stopped, resumed = begin(), begin(), begin()
    for seed in range(4):
        step(*through, seed)
    for seed in range(2):
        step(*stopped, seed)
    for before, after in zip(stopped, resumed, strict=True):
        after.load_state_dict(copy.deepcopy(before.state_dict()))
    for seed in range(2, 4):
        step(*resumed, seed)
    torch.testing.assert_close(resumed[0].state_dict(), through[0].state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_run_with_any_optimizer_learns(optimizer: str, tiny: list[str], tmp_path: Path) -> None:
    run = pieces(*tiny, f"optim={optimizer}", "train.tokens=12e3", f"runs_dir={tmp_path}")
    run.fit()
    assert run.rows[-1]["val/loss"] < 0.95 * math.log(run.dataset.index.vocab_size)


@pytest.mark.parametrize("wrong", [-1, math.inf, math.nan, "abc", None])
@pytest.mark.parametrize("key", SETTINGS)
def test_a_setting_out_of_range_is_refused_by_its_name(key: str, wrong: object) -> None:
    with pytest.raises(ConfigError) as error:
        adamw(nn.Linear(2, 2), **{**SETTINGS, key: wrong})
    assert str(error.value).startswith(f"optim.{key}={wrong}: must be ")


@pytest.mark.parametrize(
    ("optimizer", "override", "message"),
    [
        ("sgd", "optim.momentum=1", "optim.momentum=1: must be a number from 0 up to, but not including, 1"),
        ("adafactor", "optim.beta2_decay=0.8", "optim.beta2_decay=0.8: must be a negative number"),
        ("adafactor", "optim.clip=0", "optim.clip=0: nothing would be learned"),
        ("sgd", "optim.nesterov=true optim.momentum=0", "optim.nesterov=True: there is no momentum"),
        ("adamw", "optim.beta1=1", "optim.beta1=1: "),
        ("adamw", "optim.beta2=1", "optim.beta2=1: "),
        ("muon", "optim.newton_schulz_steps=0", "optim.newton_schulz_steps=0: must be a whole number from 1 to 99"),
    ],
)
def test_a_setting_of_another_optimizer_out_of_range_is_refused(optimizer: str, override: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        made(optimizer, decoder("arch=llama"), *override.split())
    assert str(error.value).startswith(message)
