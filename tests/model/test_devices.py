"""No step mixes tensors of two devices: PyTorch's meta device stands in for a GPU, and the lengths stay on the CPU."""

import sys
from contextlib import nullcontext

import pytest
import torch

from llama_lab.model.generate import _static_step, compiled_step, prefill
from tests.composing import DECODERS, decoder, kinds

QUICK = ["arch=mixtral", "arch=qwen3_next", "position=relative"]
EVERY = [*(f"arch={name}" for name in DECODERS), *(f"position={name}" for name in kinds("position"))]
OTHERS = [pytest.param(one, marks=pytest.mark.matrix) for one in EVERY if one not in QUICK]
META = torch.device("meta")


@pytest.mark.parametrize("overrides", [*QUICK, "arch=bert", "arch=t5_v1_1", *OTHERS])
def test_a_training_step_stays_on_its_device(overrides: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.is_autocast_enabled", lambda device: False)  # there is none on meta
    monkeypatch.setattr("torch.autocast", lambda device, enabled: nullcontext())
    model = decoder(overrides, device="meta")
    assert all(t.is_meta for t in (*model.parameters(), *model.buffers())), "building materialises nothing"
    tokens = torch.zeros(2, 16, dtype=torch.long, device=META)
    nll, objective, _ = model.loss(*model.cut(tokens, tokens), z_loss=1e-4)
    objective.backward()
    assert nll.is_meta
    assert all(p.grad is not None and p.grad.is_meta for p in model.parameters())


@torch.inference_mode()
@pytest.mark.parametrize("overrides", [*QUICK, *OTHERS])
def test_decoding_stays_on_its_device(overrides: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, token = decoder(overrides, device="meta").eval(), torch.zeros(2, 1, dtype=torch.long, device=META)
    monkeypatch.setattr(sys.modules[compiled_step.__module__], "_compile_static_step", lambda: _static_step)
    for dtype in (None, torch.int8)[: 1 + all(mixer.int8_state for mixer in model.mixers)]:
        state = model.new_state(2, 16, dtype)
        assert prefill(model, [[1, 2, 3], [4]], state).is_meta
        assert model(token, state).is_meta
        assert compiled_step(model, state)(token).is_meta
        assert state.lengths.tolist() == [5, 3]
        assert state.lengths.device.type == "cpu"
