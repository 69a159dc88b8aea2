"""Optimizers: what they decay, and that their steps are those of the papers."""

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from llama_lab.config.components import build
from llama_lab.model import Decoder
from llama_lab.training.optim import adafactor, adam, adamw, lion, muon, sgd
from llama_lab.util.errors import ConfigError
from tests.composing import compose_config, decoder, options
from tests.selection import first

SETTINGS = {"lr": 3e-3, "beta1": 0.8, "beta2": 0.95, "eps": 1e-6, "weight_decay": 0.3}
OPTIMIZERS = options("optim")


def made(optimizer: str, model: nn.Module, *overrides: str) -> torch.optim.Optimizer:
    """The optimizer that the command line would make."""
    factory = build(compose_config(f"optim={optimizer}", *overrides).optim, "optim")
    return factory(model)  # type: ignore[no-any-return]


DECAYING = ["mamba2 adamw", *(f"gpt2 {name}" for name in OPTIMIZERS), *(f"{arch} adamw" for arch in options("arch"))]


@pytest.mark.parametrize("case", first(len(OPTIMIZERS) + 1, dict.fromkeys(DECAYING)))
def test_matrices_and_tables_decay_and_norms_and_biases_do_not(case: str) -> None:
    arch, optimizer = case.split()
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


MUON = {**SETTINGS, "momentum": 0.9, "nesterov": True, "newton_schulz_steps": 5}


def test_muon_s_step_is_pytorch_s_for_matrices_of_blocks_and_adamw_s_for_the_rest() -> None:
    ours, theirs = decoder("arch=gpt2"), decoder("arch=gpt2")
    matrices = {n: m.weight for n, m in theirs.named_modules() if isinstance(m, nn.Linear) and n.startswith("blocks")}
    chosen = set(map(id, matrices.values()))
    rest = [p for p in theirs.parameters() if id(p) not in chosen]
    parts = [
        torch.optim.Muon(matrices.values(), 3e-3, 0.3, 0.9, True, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW([p for p in rest if p.ndim > 1], 3e-3, (0.8, 0.95), 1e-6, 0.3, fused=True),
        torch.optim.AdamW([p for p in rest if p.ndim < 2], 3e-3, (0.8, 0.95), 1e-6, 0.0, fused=True),
    ]
    assert_same_steps(muon(ours, **MUON), ours, parts, theirs)


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


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_optimizer_that_is_loaded_goes_on_as_if_it_had_not_stopped(optimizer: str) -> None:
    def take_steps(model: Decoder, opt: torch.optim.Optimizer, *seeds: int) -> None:
        for seed in seeds:
            generator = torch.Generator().manual_seed(seed)
            for p in model.parameters():
                p.grad = torch.randn(p.shape, generator=generator)
            opt.step()

    model, again = decoder("arch=llama"), decoder("arch=llama")
    through, resumed = made(optimizer, model), made(optimizer, again)
    take_steps(model, through, 0, 1)
    again.load_state_dict(model.state_dict())
    resumed.load_state_dict(copy.deepcopy(through.state_dict()))
    take_steps(model, through, 2, 3)
    take_steps(again, resumed, 2, 3)
    torch.testing.assert_close(again.state_dict(), model.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("wrong", [-1, math.inf, math.nan, "abc", None])
@pytest.mark.parametrize("key", SETTINGS)
def test_a_setting_out_of_range_is_refused_by_its_name(key: str, wrong: object) -> None:
    with pytest.raises(ConfigError, match=rf"^optim\.{key}={wrong}: "):
        adamw(nn.Linear(2, 2), **{**SETTINGS, key: wrong})


OUT_OF_RANGE = {
    "optim.momentum=1": "sgd",
    "optim.nesterov=True": "sgd optim.momentum=0",
    "optim.beta2_decay=0.8": "adafactor",
    "optim.clip=0": "adafactor",
    "optim.beta1=1": "adamw",
    "optim.beta2=1": "adamw",
    "optim.newton_schulz_steps=0": "muon",
}


@pytest.mark.parametrize("override", OUT_OF_RANGE)
def test_a_setting_of_another_optimizer_out_of_range_is_refused(override: str) -> None:
    optimizer, *more = OUT_OF_RANGE[override].split()
    with pytest.raises(ConfigError, match=rf"^{override}: "):
        made(optimizer, decoder("arch=llama"), override, *more)
