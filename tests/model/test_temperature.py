"""Temperatures of queries: their formulas. In a model: the Ministrals of test_families.py, and test_cache.py."""

import math

import pytest
import torch

from llama_lab.model.temperature import LogTemperature, StepTemperature

POSITIONS = torch.tensor([0, 1, 7, 8, 15, 16, 4095])


def test_a_logarithmic_temperature_is_one_at_its_length() -> None:
    factors = LogTemperature(16)(POSITIONS).tolist()
    assert factors == pytest.approx([math.log(p + 1) / math.log(16) for p in POSITIONS.tolist()])
    assert factors[4] == pytest.approx(1)  # the query that sees 16 keys
    assert LogTemperature(16, minimum=1)(POSITIONS).tolist() == pytest.approx([max(1.0, f) for f in factors])


def test_a_step_temperature_equals_llama_4s() -> None:
    expected = torch.log1p(torch.floor((POSITIONS.float() + 1.0) / 8)) * 0.1 + 1.0  # Llama4TextAttention.forward
    torch.testing.assert_close(StepTemperature(0.1, 8)(POSITIONS), expected)
