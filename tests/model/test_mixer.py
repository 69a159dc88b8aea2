"""A mixer that is not attention decodes and costs; what it does not say is an error. test_model_check.py trains one."""

import math
from typing import Any

import pytest
import torch
from hydra.errors import InstantiationException
from torch import Tensor, nn

from llama_lab.evaluation.cache_memory import cache_dtypes, cache_sizes
from llama_lab.model import Decoder, Sampling, generate, measure_cost
from llama_lab.model.attention_context import AttentionContext
from llama_lab.model.init import ResidualOutput
from llama_lab.model.mixer import Mixer
from llama_lab.model.state import State
from tests.composing import decoder
from tests.model.cases import model_with

DIM = 32
NOWHERE = "position=none"


class Average(Mixer):
    """An exponential moving average of values, slower in later layers; its state is one vector per sequence."""

    max_state_tokens = 0

    def __init__(self, dim: int, layer: int, n_layers: int) -> None:
        super().__init__()
        self.dim, self.decay = dim, (layer + 1) / (n_layers + 1)
        self.value = nn.Linear(dim, dim, bias=False)
        self.output = ResidualOutput(dim, dim, bias=False)

    def forward(self, x: Tensor, context: AttentionContext, state: State | None = None) -> Tensor:
        values, means = self.value(x), []
        mean = values.new_zeros(len(x), self.dim) if state is None else state.tensors[0].type_as(values)
        for value in values.unbind(1):
            mean = self.decay * mean + (1 - self.decay) * value
            means.append(mean)
        if state is not None:
            state.tensors[0].copy_(mean)
        return self.output(torch.stack(means, 1))

    def flops_per_token(self, seq_len: int) -> float:
        return 2 * 2 * self.dim**2

    def new_state(self, batch_size: int, length: int, device: torch.device, dtype: torch.dtype) -> State:
        return State([torch.zeros(batch_size, self.dim, device=device, dtype=dtype)])


class Hoarder(Average):
    """The same, which keeps all that it has read beside what it says."""

    def forward(self, x: Tensor, context: AttentionContext, state: State | None = None) -> Tensor:
        if state is not None:
            state.tensors.append(x.clone())
        return super().forward(x, context, state)


class BatchLast(Average):
    """A state in another order."""

    def new_state(self, batch_size: int, length: int, device: torch.device, dtype: torch.dtype) -> State:
        return State([torch.zeros(self.dim, batch_size, device=device, dtype=dtype)])


def lively_with(**components: Any) -> Decoder:
    """A model, on no positions, with weights far from their small start."""
    model, generator = model_with(NOWHERE, **components), torch.Generator().manual_seed(0)
    for p in model.parameters():
        nn.init.normal_(p, 0.0, 0.3, generator=generator)
    return model


@torch.no_grad()
def test_another_mixer_decodes_with_its_state_as_without_and_without_end() -> None:
    model, prompts, n = lively_with(attention=Average), [[1, 2, 3], [5]], 40
    steps = generate(model, prompts, n, Sampling(temperature=0))  # beyond max_seq_len=32, since no position ends
    texts = [[*prompt, *text] for prompt, text in zip(prompts, zip(*steps, strict=True), strict=True)]
    for prompt, text in zip(prompts, texts, strict=True):
        again = list(prompt)
        for _ in range(n):
            again.append(int(model(torch.tensor([again]))[0, -1].argmax()))
        assert text == again
    assert model.max_context is None
    assert [mixer.decay for mixer in model.mixers] == [1 / 3, 2 / 3]


def test_another_mixer_is_costed_and_its_state_is_of_one_size() -> None:
    model, attention = model_with(NOWHERE, attention=Average), model_with(NOWHERE)
    cost, usual = measure_cost(model), measure_cost(attention)
    assert cost.params == usual.params - 2 * 2 * DIM**2  # without queries and keys, in two layers
    keys = 2 * 2 * DIM * (32 + 1) / 2
    assert cost.flops_per_token == usual.flops_per_token - 2 * (2 * 2 * DIM**2 + keys)
    assert (cost.kv_bytes_per_token, cost.kv_bytes) == (0, 2 * DIM * 2)
    assert measure_cost(model_with(NOWHERE, attention=Average, device="meta")) == cost
    assert cache_dtypes(model) == [torch.bfloat16, torch.float32]
    for size in cache_sizes(model, [1, 3], [1, 32]):
        assert size.measured_bytes == size.formula_bytes == size.batch_size * 2 * DIM * (2, 4)[size.dtype == "float32"]


def test_a_state_is_measured_as_it_is_after_decoding() -> None:
    with torch.no_grad():
        size = cache_sizes(model_with(NOWHERE, attention=Hoarder), [3], [32])[-1]
    assert size.measured_bytes == size.formula_bytes + 2 * 3 * 32 * DIM * 4  # two layers, float32


def test_a_state_of_another_batch_is_refused() -> None:
    for model in (model_with(NOWHERE, attention=Average), model_with(NOWHERE)):
        with pytest.raises(ValueError, match=r"^tokens: a batch of 2, but the state is of 3 sequences; make one with"):
            model(torch.zeros(2, 4, dtype=torch.long), model.new_state(3))
    with pytest.raises(
        ValueError, match=r"BatchLast\.new_state\(3, \.\.\.\) has a tensor of shape \(32, 3\); its first"
    ):
        model_with(NOWHERE, attention=BatchLast).new_state(3)
    with pytest.raises(ValueError, match=r"Average cannot keep its state in int8; choose a floating dtype"):
        model_with(NOWHERE, attention=Average).new_state(3, dtype=torch.int8)


def test_what_is_no_mixer_is_refused() -> None:
    with pytest.raises(InstantiationException, match=r"attention=torch\.nn\.modules\.linear\.Linear: must be a sub"):
        model_with(attention=lambda **_: nn.Linear(4, 4))
    with pytest.raises(TypeError, match=r"abstract.*flops_per_token"):
        type("Silent", (Average,), {"flops_per_token": Mixer.flops_per_token})(DIM, 0, 1)


@pytest.mark.parametrize(
    "hook", ["flops_per_token", "flops_per_token_dense", "active_params", "state_bytes", "state_bytes_per_token"]
)
def test_an_answer_that_is_no_cost_is_an_error_of_one_line(hook: str) -> None:
    for answer in (math.nan, math.inf, -1, None, "many"):
        lying = type("Lying", (Average,), {hook: lambda *_, answer=answer: answer})
        told = rf"^blocks\.0\.attention: Lying\.{hook}\(.*\) is {answer}; it must be a number"
        with pytest.raises(ValueError, match=told):
            measure_cost(model_with(NOWHERE, attention=lying))


def test_a_setting_of_a_component_s_own_is_not_overridden_by_the_decoder_s() -> None:
    model = model_with("+model.attention.n_heads=2", "+model.attention.n_kv_heads=2", "model.head_dim=8")
    assert [mixer.n_heads for mixer in model.mixers] == [2, 2]
    assert decoder("model.head_dim=8").mixers[0].n_heads == 4
