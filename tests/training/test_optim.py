"""AdamW: what it decays, and that a step of it is the paper's."""

import copy
import math

import pytest
import torch
from torch import nn

from llama_lab.errors import ConfigError
from llama_lab.training.optim import adamw
from tests.composing import decoder, options

SETTINGS = {"lr": 3e-3, "beta1": 0.8, "beta2": 0.95, "eps": 1e-6, "weight_decay": 0.3}


@pytest.mark.parametrize("arch", options("arch"))
def test_matrices_and_tables_decay_and_norms_and_biases_do_not(arch: str) -> None:
    model = decoder(f"arch={arch}")
    decaying = {id(module.weight) for module in model.modules() if isinstance(module, nn.Linear | nn.Embedding)} | {
        id(p) for name, p in model.named_parameters() if "position" in name
    }
    groups = adamw(model, **SETTINGS).param_groups
    by_decay = {group["weight_decay"]: {id(p) for p in group["params"]} for group in groups}
    assert by_decay.pop(0.3) == decaying
    assert by_decay.pop(0.0, set()) == {id(p) for p in model.parameters()} - decaying
    assert by_decay == {}


def test_steps_are_those_of_an_adamw_written_by_hand_in_float64() -> None:
    model = decoder("arch=gpt2").double()
    by_hand = {name: p.detach().clone() for name, p in model.named_parameters()}
    mean = {name: torch.zeros_like(p) for name, p in by_hand.items()}
    square = copy.deepcopy(mean)
    optimizer = adamw(model, **SETTINGS)
    lr, beta1, beta2, eps = (SETTINGS[key] for key in ("lr", "beta1", "beta2", "eps"))
    generator = torch.Generator().manual_seed(0)
    for step in (1, 2, 3):
        for name, p in model.named_parameters():
            p.grad = g = torch.randn(p.shape, generator=generator, dtype=torch.float64)
            mean[name] = beta1 * mean[name] + (1 - beta1) * g
            square[name] = beta2 * square[name] + (1 - beta2) * g**2
            unbiased_mean, unbiased_square = mean[name] / (1 - beta1**step), square[name] / (1 - beta2**step)
            decay = 0.3 if p.ndim == 2 else 0.0
            update = unbiased_mean / (unbiased_square.sqrt() + eps) + decay * by_hand[name]
            by_hand[name] = by_hand[name] - lr * update
        optimizer.step()
        for name, p in model.named_parameters():
            torch.testing.assert_close(p.detach(), by_hand[name], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("wrong", [-1, math.inf, math.nan, "abc", None])
@pytest.mark.parametrize("key", SETTINGS)
def test_a_setting_out_of_range_is_refused_by_its_name(key: str, wrong: object) -> None:
    with pytest.raises(ConfigError) as error:
        adamw(nn.Linear(2, 2), **{**SETTINGS, key: wrong})
    assert str(error.value).startswith(f"optim.{key}={wrong}: must be ")


@pytest.mark.parametrize("key", ["beta1", "beta2"])
def test_a_beta_of_1_which_never_forgets_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"^optim\.{key}=1: "):
        adamw(nn.Linear(2, 2), **{**SETTINGS, key: 1})
