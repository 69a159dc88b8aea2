"""Temperatures of queries: their formulas. In a model: the Ministrals of test_families.py, and test_cache.py."""

import math

import pytest
import torch

from llama_lab.model.temperature import LogTemperature, StepTemperature
from tests.composing import decoder

POSITIONS = torch.tensor([0, 1, 7, 8, 15, 16, 4095])


def test_a_logarithmic_temperature_is_one_at_its_length() -> None:
    factors = LogTemperature(16)(POSITIONS).tolist()
    assert factors == pytest.approx([math.log(p + 1) / math.log(16) for p in POSITIONS.tolist()])
    assert factors[4] == pytest.approx(1)  # the query that sees 16 keys
    assert LogTemperature(16, minimum=1)(POSITIONS).tolist() == pytest.approx([max(1.0, f) for f in factors])


def test_a_step_temperature_equals_llama_4s() -> None:
    expected = torch.log1p(torch.floor((POSITIONS.float() + 1.0) / 8)) * 0.1 + 1.0  # Llama4TextAttention.forward
    torch.testing.assert_close(StepTemperature(0.1, 8)(POSITIONS), expected)


def test_every_attention_takes_every_temperature() -> None:
    """By an option, or by a component."""
    for kind in ("mha", "gqa"):
        assert decoder(f"attention={kind}_log_temperature").blocks[0].attention.temperature == LogTemperature(32)
    steps = {"mha_step_temperature": 1, "gqa_step_temperature": 0, "mla_step_temperature": 0}
    for option, offset in steps.items():
        assert decoder(f"attention={option}").blocks[0].attention.temperature == StepTemperature(0.1, 16, offset)
    chosen = "{_target_: llama_lab.model.temperature.StepTemperature, scale: 0.2, step: 4}"
    for kind in ("mqa", "gqa", "mla"):
        model = decoder(f"attention={kind}", f"model.attention.temperature={chosen}")
        assert model.blocks[0].attention.temperature == StepTemperature(0.2, 4)
