"""A model on a GPU is the model on a CPU: its logits, gradients, texts and state."""

from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from benchmarks.gpu_decoding import graphs_launched
from benchmarks.gpu_kernels import FUSED, fused_kernels, measure_attention
from llama_lab.config.components import build_model
from llama_lab.model import Decoder, Sampling, generate
from llama_lab.model.generate import compiled_step, eager_step
from tests.composing import DECODERS, END_OF_TEXT, compose_config, decoder, lively

pytestmark = pytest.mark.gpu

PROMPTS = [[5, 3, 8], [1], [9, 9, 2, 4, 7, 0, 11], [30, 31]]
TOKENS = torch.randint(97, (2, 32), generator=torch.Generator().manual_seed(0))


def on(device: torch.device, model: Decoder) -> Decoder:
    """A copy of a model on a device; the one on the CPU stays."""
    return deepcopy(model).to(device)


def texts(model: Decoder, **settings: Any) -> list[list[int | None]]:
    """What follows each prompt greedily, token by token."""
    return list(generate(model, PROMPTS, 20, Sampling(temperature=0), **settings))


def difference(ours: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest, relative to the largest expected number."""
    return float((ours.cpu().float() - expected).abs().max() / expected.abs().max())


@torch.no_grad()
@pytest.mark.parametrize("arch", DECODERS)
def test_logits_of_every_recipe_are_those_of_a_cpu(arch: str, gpu: torch.device) -> None:
    model = lively(f"arch={arch}")
    assert difference(on(gpu, model)(TOKENS.to(gpu)), model(TOKENS)) < 1e-3


@pytest.mark.parametrize("arch", DECODERS)
def test_gradients_of_every_recipe_are_those_of_a_cpu(arch: str, gpu: torch.device) -> None:
    model = deepcopy(decoder(f"arch={arch}"))
    ours = on(gpu, model)
    for each, tokens in ((model, TOKENS), (ours, TOKENS.to(gpu))):
        F.cross_entropy(each(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
    for (name, expected), own in zip(model.named_parameters(), ours.parameters(), strict=True):
        assert own.grad is not None
        assert expected.grad is not None
        assert difference(own.grad, expected.grad) < 2e-3, name


@torch.no_grad()
@pytest.mark.parametrize("position", ["rope", "learned", "alibi"])
@pytest.mark.parametrize("rule", ["model.attention.chunk=5", "model.attention.prefix=7", "data.document_mask=true"])
def test_masks_are_those_of_a_cpu(rule: str, position: str, gpu: torch.device) -> None:
    model = lively("arch=llama3", f"position={position}", rule)
    ours, tokens = on(gpu, model), TOKENS.clone()
    tokens[:, 11] = END_OF_TEXT
    assert difference(ours(tokens.to(gpu)), model(tokens)) < 1e-3
    if "prefix" not in rule:
        assert texts(ours, compiled=True) == texts(model)


@torch.no_grad()
@pytest.mark.parametrize("arch", ["llama", "llama3", "gemma2", "bloom"])
def test_logits_in_bf16_are_near_those_in_float32(arch: str, gpu: torch.device) -> None:
    model = decoder(f"arch={arch}").eval()
    with torch.autocast(gpu.type, torch.bfloat16):
        logits = on(gpu, model)(TOKENS.to(gpu))
    assert difference(logits, model(TOKENS)) < 0.05


def test_attention_runs_a_fused_kernel_forward_and_backward(gpu: torch.device) -> None:
    found = list(fused_kernels(gpu))
    assert [finding.name for finding in found if finding.outcome != "met"] == []
    assert len(found) == len(FUSED)


def test_initial_weights_are_those_of_a_cpu_wherever_they_are_built(gpu: torch.device) -> None:
    with gpu:
        built = build_model(compose_config("size=pico", "arch=gpt2"), 97)
    expected = decoder("arch=gpt2").state_dict()
    assert all(value.is_cuda and torch.equal(value.cpu(), expected[name]) for name, value in built.state_dict().items())


@pytest.mark.parametrize("arch", ["llama3", "gemma2", "bloom", "gpt2"])
def test_greedy_texts_are_those_of_a_cpu(arch: str, gpu: torch.device) -> None:
    model = lively(f"arch={arch}")
    assert texts(on(gpu, model)) == texts(model)


@pytest.mark.parametrize("cache_dtype", [None, torch.int8])
@pytest.mark.parametrize("overrides", [["arch=llama3"], ["arch=gemma2"], ["arch=bloom"]], ids=str)
def test_compiled_texts_are_those_of_the_eager_step(
    overrides: list[str], cache_dtype: torch.dtype | None, gpu: torch.device
) -> None:
    model = on(gpu, lively(*overrides))
    found, expected = (texts(model, compiled=compiled, cache_dtype=cache_dtype) for compiled in (True, False))
    assert found == expected


def test_the_compiled_step_is_a_cuda_graph_and_the_state_knows_its_length(gpu: torch.device) -> None:
    model = on(gpu, decoder("arch=llama3")).eval()
    with torch.inference_mode():
        state = model.new_state(1, 16)
        step, token = compiled_step(model, state), torch.zeros(1, 1, dtype=torch.long, device=gpu)
        for _ in range(5):
            step(token)
        assert graphs_launched(lambda: step(token)) >= 1
    assert state.lengths.tolist() == [6]


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_logits_from_a_smaller_kv_cache_are_those_of_a_cpu(dtype: torch.dtype, gpu: torch.device) -> None:
    logits = []
    for model in (decoder("arch=llama3").eval(), on(gpu, decoder("arch=llama3").eval())):
        device = next(model.parameters()).device
        state = model.new_state(2, 32, dtype)
        model(TOKENS[:, :-1].to(device), state)
        logits.append(eager_step(model, state)(TOKENS[:, -1:].to(device)))
    assert difference(logits[1], logits[0]) < 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("arch", ["llama3", "mistral"])
def test_a_state_takes_the_bytes_that_it_reports(arch: str, dtype: torch.dtype, gpu: torch.device) -> None:
    model = on(gpu, decoder(f"arch={arch}", "model.max_seq_len=2048"))
    before = torch.cuda.memory_allocated()
    state = model.new_state(4, 2048, dtype)
    taken = torch.cuda.memory_allocated() - before
    tensors = sum(len(layer.tensors) for layer in state.layers)
    assert state.nbytes == 4 * sum(mixer.state_bytes(2048, dtype) for mixer in model.mixers)
    assert 0 <= taken - state.nbytes < 512 * tensors  # the allocator rounds up


def test_flex_attention_compiled_gives_what_our_masked_path_gives(gpu: torch.device) -> None:
    found = list(measure_attention(gpu, (1, 4, 512, 64), window=128, rounds=1))
    assert [finding.outcome for finding in found if "difference" in finding.name] == ["met"] * 4
