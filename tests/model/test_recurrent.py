"""Recurrent mixers are the recurrences of their papers, whatever the chunks, and those that `transformers` has."""

import math
from copy import deepcopy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import Lfm2Config, Mamba2Config, Qwen3NextConfig
from transformers.models.kimi_linear.configuration_kimi_linear import KimiLinearConfig
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDeltaAttention
from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from llama_lab.model import measure_cost
from llama_lab.model.attention_context import AttentionContext
from llama_lab.model.convolution import GatedConv, ShortConv
from llama_lab.model.encoding import Position
from llama_lab.model.mixer import Mixer
from llama_lab.model.norm import RMSNorm
from llama_lab.model.position import Rope
from llama_lab.model.recurrence import recur
from llama_lab.model.recurrent import GatedDelta, LinearAttention, Mamba2, Recurrent
from tests.composing import decoder, lively
from tests.model.cases import ON_NONE, in_pieces

B, H, T, DK, DV = 2, 3, 37, 4, 5
CASES = [(False, 1), (False, DK), (True, 1), (True, DK)]  # whether it is a delta rule, and how many decays it has
SIZES: dict[str, Any] = {"dim": 12, "n_heads": 4, "n_kv_heads": 4, "norm": RMSNorm, "key_dim": 4, "value_dim": 3}
LINEAR = SIZES | {"head_dim": 4}
NONE = Position()


def inputs(delta: bool, width: int, strong: float = 1.0) -> dict[str, Tensor | None]:
    """Arguments of `recur`, in float64."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(B, H, T, n, dtype=torch.float64) for n in (DK, DK, DV))
    decay = -strong * torch.rand(B, H, T, width, dtype=torch.float64)
    beta = 2 * torch.rand(B, H, T, 1, dtype=torch.float64) if delta else None
    state = torch.randn(B, H, DK, DV, dtype=torch.float64)
    key = key / key.norm(dim=-1, keepdim=True)
    return {"query": query, "key": key, "value": value, "decay": decay, "beta": beta, "state": state}


def by_steps(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Any, state: Tensor, starts: Any = None
) -> tuple[Tensor, Tensor]:
    """The recurrence written out, a token at a time."""
    outputs = []
    for t in range(query.shape[2]):
        if starts is not None:
            state = torch.where(starts[:, t, None, None, None], 0.0, state)
        q, k, v, g = (x[:, :, t, :, None] for x in (query, key, value, decay))
        state = g.exp() * state
        written = v.mT
        if beta is not None:
            written = beta[:, :, t, None] * (v.mT - k.mT @ state)
        state = state + k @ written
        outputs.append((state.mT @ q)[..., 0])
    return torch.stack(outputs, 2), state


@pytest.mark.parametrize("chunk", [1, 7, 64])
@pytest.mark.parametrize(("delta", "width"), CASES)
def test_chunks_of_any_length_give_the_recurrence_and_its_gradients(delta: bool, width: int, chunk: int) -> None:
    ours, theirs = (inputs(delta, width) for _ in range(2))
    leaves = [[x.requires_grad_() for x in given.values() if x is not None] for given in (ours, theirs)]
    results = recur(**ours, chunk_size=chunk), by_steps(**theirs)  # type: ignore[arg-type]
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)
    for out, state in results:
        (out.square().sum() + state.sin().sum()).backward()  # type: ignore[no-untyped-call]
    for a, b in zip(*leaves, strict=True):
        torch.testing.assert_close(a.grad, b.grad)


@settings(deadline=None, max_examples=25)
@given(st.sets(st.integers(0, T - 1)), st.sets(st.integers(0, T - 1)), st.sampled_from(CASES), st.sampled_from([5, 16]))
def test_documents_begin_anew_inside_chunks(
    first: set[int], second: set[int], case: tuple[bool, int], chunk: int
) -> None:
    starts = torch.tensor([[t in one for t in range(T)] for one in (first, second)])
    given = inputs(*case)
    for a, b in zip(recur(**given, starts=starts, chunk_size=chunk), by_steps(**given, starts=starts), strict=True):  # type: ignore[arg-type]
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(("delta", "width"), CASES)
def test_strong_decays_stay_finite_in_float32_forward_and_backward(delta: bool, width: int) -> None:
    given = inputs(delta, width, strong=200.0)
    single = {name: x if x is None else x.float().requires_grad_() for name, x in given.items()}
    out, _ = recur(**single, chunk_size=16)  # type: ignore[arg-type]
    out.sum().backward()  # type: ignore[no-untyped-call]
    assert all(x.grad.isfinite().all() for x in single.values() if x is not None and x.grad is not None)
    torch.testing.assert_close(out.double(), by_steps(**given)[0], rtol=1e-4, atol=1e-5)  # type: ignore[arg-type]


def mixed(mixer: Mixer, x: Tensor, position: Position = NONE) -> Tensor:
    """The output of a mixer for a text alone."""
    return mixer(x, AttentionContext(position, torch.arange(x.shape[1])))


@torch.no_grad()
def like(theirs: nn.Module, ours: Mixer, pairs: dict[str, Tensor]) -> float:
    """The largest difference of the outputs, after the weights have been copied."""
    own = dict(ours.named_parameters())
    assert pairs.keys() == own.keys()
    for name, weight in pairs.items():
        own[name].copy_(weight.view_as(own[name]))
    x = torch.randn(2, 70, 12)
    found = theirs.eval()(x)
    return float((mixed(ours, x) - (found[0] if isinstance(found, tuple) else found)).abs().max())


def drawn(module: nn.Module) -> dict[str, Tensor]:
    """The parameters of a module, far from their start."""
    for p in module.parameters():
        nn.init.normal_(p, 0.0, 0.5)
    return {name: p.detach() for name, p in module.named_parameters()}


def of_convs(conv: Tensor, *widths: int) -> dict[str, Tensor]:
    return {f"{n}.conv.weight": w for n, w in zip(("query", "key", "value"), conv.split(widths), strict=True)}


def test_the_gated_delta_rule_is_that_of_qwen3_next() -> None:
    names = {"num_key_heads": 2, "num_value_heads": 4, "key_head_dim": 4, "value_head_dim": 3, "conv_kernel_dim": 4}
    config = Qwen3NextConfig(
        hidden_size=12,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
        **{f"linear_{k}": n for k, n in names.items()},
    )
    theirs = Qwen3NextGatedDeltaNet(config, 0)
    w = drawn(theirs)
    ours = GatedDelta(**SIZES | {"norm": lambda n: RMSNorm(n, config.rms_norm_eps)}, key_heads=2, value_heads=4)
    # By key head: queries, keys, the values of its two heads, and their gates.
    query, key, value, gate = w["in_proj_qkvz.weight"].view(2, -1, 12).split((4, 4, 6, 6), 1)
    beta, step = w["in_proj_ba.weight"].view(2, 4, 12).split((2, 2), 1)
    projections = {"query": query, "key": key, "value": value}
    pairs = {f"{name}.project.weight": p.reshape(-1, 12) for name, p in projections.items()}
    pairs |= of_convs(w["conv1d.weight"], 8, 8, 12)
    pairs |= {"gate.project.weight": gate.reshape(-1, 12), "beta.weight": beta.reshape(-1, 12)}
    pairs |= {"decay.step.weight": step.reshape(-1, 12), "decay.rate": w["A_log"], "decay.bias": w["dt_bias"]}
    pairs |= {"norm.weight": w["norm.weight"], "output.weight": w["out_proj.weight"]}
    assert like(theirs, ours, pairs) < 1e-4


def test_a_decay_by_channel_is_kimis() -> None:
    config = KimiLinearConfig(
        hidden_size=12,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
        linear_num_heads=4,
        linear_head_dim=4,
        linear_conv_kernel_dim=4,
    )
    theirs = KimiLinearDeltaAttention(config, 0)
    w = drawn(theirs)
    norm = lambda n: RMSNorm(n, config.rms_norm_eps)  # noqa: E731
    ours = GatedDelta(
        **SIZES | {"norm": norm, "value_dim": 4},
        key_heads=4,
        value_heads=4,
        decay="channel",
        gate="sigmoid",
        chunk_size=16,
    )
    pairs = {f"{n}.project.weight": w[f"{n[0]}_proj.weight"] for n in ("query", "key", "value")}
    pairs |= of_convs(w["conv1d.weight"], 16, 16, 16)
    pairs |= {f"gate.project.{i}.weight": w[f"g_{one}_proj.weight"] for i, one in enumerate("ab")}
    pairs |= {f"decay.step.{i}.weight": w[f"forget_gate.f_{one}_proj.weight"] for i, one in enumerate("ab")}
    pairs |= {"decay.rate": w["forget_gate.A_log"], "decay.bias": w["forget_gate.dt_bias"]}
    pairs |= {"beta.weight": w["b_proj.weight"], "norm.weight": w["o_norm.weight"], "output.weight": w["o_proj.weight"]}
    assert like(theirs, ours, pairs) < 1e-4


def test_the_state_space_is_that_of_mamba2() -> None:
    config = Mamba2Config(
        hidden_size=12, num_hidden_layers=1, num_heads=8, head_dim=3, state_size=5, n_groups=1, expand=2, chunk_size=16
    )
    theirs = Mamba2Mixer(config, 0)
    w = drawn(theirs)
    norm = lambda n: RMSNorm(n, config.layer_norm_epsilon)  # noqa: E731
    ours = Mamba2(dim=12, n_heads=4, n_kv_heads=4, norm=norm, value_heads=8, key_dim=5, value_dim=3)
    gate, value, key, query, step = w["in_proj.weight"].split((24, 24, 5, 5, 8))
    projections = {"query": query, "key": key, "value": value}
    pairs = {f"{name}.project.weight": p for name, p in projections.items()}
    for kind in ("weight", "bias"):
        of_value, of_key, of_query = w[f"conv1d.{kind}"].split((24, 5, 5))
        pairs |= {f"query.conv.{kind}": of_query, f"key.conv.{kind}": of_key, f"value.conv.{kind}": of_value}
    pairs |= {"gate.weight": gate, "decay.step.weight": step, "decay.rate": w["A_log"], "decay.bias": w["dt_bias"]}
    pairs |= {"skip.weight": w["D"], "norm.weight": w["norm.weight"], "output.weight": w["out_proj.weight"]}
    assert like(theirs, ours, pairs) < 1e-4


def test_the_gated_convolution_is_that_of_lfm2() -> None:
    theirs = Lfm2ShortConv(Lfm2Config(hidden_size=12, num_hidden_layers=1, layer_types=["conv"]), 0)
    w = drawn(theirs)
    gate_in, gate_out, value = w["in_proj.weight"].chunk(3)
    pairs = {"gate_in.weight": gate_in, "gate_out.weight": gate_out, "value.weight": value}
    pairs |= {"conv.weight": w["conv.weight"], "output.weight": w["out_proj.weight"]}
    assert like(theirs, GatedConv(12, 4, 4), pairs) < 1e-5


def heads_of(mixer: LinearAttention, x: Tensor) -> list[Tensor]:
    """Queries, keys and values by head, before their features."""
    return [part.project(x).unflatten(-1, (4, -1)).transpose(1, 2) for part in (mixer.query, mixer.key, mixer.value)]


@torch.no_grad()
def test_linear_attention_is_the_average_of_values_by_the_weights_of_its_features() -> None:
    mixer, x = LinearAttention(**LINEAR).double(), torch.randn(2, 19, 12, dtype=torch.float64)
    query, key, value = heads_of(mixer, x)
    query, key = (torch.where(part > 0, part + 1, part.exp()) for part in (query, key))
    weights = (query @ key.mT).tril()
    expected = (weights / weights.sum(-1, keepdim=True) @ value).transpose(1, 2).flatten(2)
    torch.testing.assert_close(mixed(mixer, x), mixer.output(expected))


@torch.no_grad()
def test_retnets_decays_are_constants_by_head() -> None:
    rope = Rope(head_dim=4)
    mixer = LinearAttention(**LINEAR, normalise=False, features="identity", decay="retnet").double()
    x = torch.randn(2, 19, 12, dtype=torch.float64)
    query, key, value = heads_of(mixer, x)
    ages = torch.arange(19)[:, None] - torch.arange(19)
    left = torch.stack([(1 - 2.0 ** (-5 - h)) ** ages for h in range(4)]).tril()
    for position in (Position(), rope):
        if position is rope:
            query, key = (rope.rotation(torch.arange(19))(part.float()).double() for part in (query, key))
        out = mixer.norm((query @ key.mT / 2 * left @ value).transpose(1, 2))  # type: ignore[misc]
        expected = mixer.output(out.flatten(2))
        torch.testing.assert_close(mixed(mixer, x, position), expected, rtol=1e-5, atol=1e-6)


@torch.no_grad()
def test_the_gated_delta_rule_writes_with_up_to_twice_the_strength_if_it_may() -> None:
    """What a text of one token gives is linear in that strength."""
    once, twice = (
        GatedDelta(**SIZES | {"norm": nn.Identity}, key_heads=2, value_heads=4, negative=negative)
        for negative in (False, True)
    )
    drawn(once)
    twice.load_state_dict(once.state_dict())
    x = torch.randn(2, 1, 12)
    torch.testing.assert_close(mixed(twice, x), 2 * mixed(once, x))


@pytest.mark.parametrize(
    ("case", "mixed"),
    [("linear", True), ("retnet", False), ("gated delta", True), ("kimi delta", False), ("mamba2", True)],
)
def test_in_16_bits_logits_are_near_gradients_finite_and_states_float32(case: str, mixed: bool) -> None:
    exact, model = (deepcopy(lively(*ON_NONE[case])) for _ in range(2))
    tokens = torch.arange(48).view(2, 24)
    if not mixed:
        model.bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
        logits = model(tokens)
        state = model.new_state(2, 24)
        pieces = [model(piece, state) for piece in tokens.split(10, 1)]
    for found in (logits, torch.cat(pieces, 1)):
        assert (found - exact(tokens)).square().mean().sqrt() < 0.05 * exact(tokens).std()
    logits.float().square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert {layer.tensors[0].dtype for layer in state.layers} == {torch.float32}


@torch.no_grad()
@pytest.mark.parametrize("case", ["linear", "gated delta", "mamba2", "conv", "hybrid"])
def test_documents_of_a_window_do_not_see_each_other_read_at_once_or_with_a_state(case: str) -> None:
    model = lively(*ON_NONE[case], "data.document_mask=true")
    tokens = torch.arange(1, 25).repeat(2, 1)
    tokens[0, 9], tokens[1, 17] = 0, 0
    whole = model(tokens)
    for row, border in enumerate((9, 17)):
        alone = model(tokens[row : row + 1, border:])
        torch.testing.assert_close(whole[row : row + 1, border:], alone, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(in_pieces(model, tokens, [7, 5]), whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", ["linear", "gated delta", "kimi delta", "mamba2", "conv"])
def test_flops_are_those_of_every_product_of_the_recurrence(case: str) -> None:
    mixer = decoder(*ON_NONE[case]).mixers[0]
    own = sum(2 * m.weight.numel() for m in mixer.modules() if isinstance(m, nn.Linear | ShortConv))
    if isinstance(mixer, GatedConv):
        assert mixer.flops_per_token(64) == own
        return
    writes_and_reads = (3 if isinstance(mixer, GatedDelta) else 2) * 2 * mixer.n_heads * mixer.key_dim * mixer.value_dim
    assert mixer.flops_per_token(64) == mixer.flops_per_token(512) == own + writes_and_reads


@pytest.mark.parametrize("case", ["linear", "mamba2"])
@pytest.mark.parametrize("length", [16, 70])
def test_dense_flops_are_those_that_pytorch_counts(case: str, length: int) -> None:
    mixer = decoder(*ON_NONE[case], "model.attention.chunk_size=16").mixers[0]
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        mixed(mixer, torch.randn(1, length, 32))
    padding = sum(2 * conv.weight.numel() * (conv.kernel_size[0] - 1) for conv in mixer.convs)
    assert counter.get_total_flops() == pytest.approx(mixer.flops_per_token_dense(length) * length, abs=padding)


def test_a_state_has_one_size_at_any_context_in_float32() -> None:
    mixer = decoder(*ON_NONE["gated delta"]).mixers[0]
    pasts = 3 * sum(conv.in_channels for conv in mixer.convs)
    for length in (1, 100, 100_000):
        assert mixer.state_bytes(length, torch.bfloat16) == 4 * mixer.n_heads * 8 * 5 + 2 * pasts
    assert mixer.state_bytes_per_token(torch.bfloat16) == 0


@torch.no_grad()
@pytest.mark.parametrize("case", ["gated delta", "mamba2", "conv", "hybrid"])
def test_a_filled_cache_holds_the_state_per_sequence_and_the_bytes_of_every_token(case: str) -> None:
    model, sizes = decoder(*ON_NONE[case]), {}
    for length in (1, 30):
        state = model.new_state(1, length, torch.bfloat16)
        model(torch.arange(length)[None], state)
        for mixer, layer in zip(model.mixers, state.layers, strict=True):
            assert layer.tensors[0].dtype == (torch.float32 if isinstance(mixer, Recurrent) else torch.bfloat16)
        sizes[length] = sum(x.untyped_storage().nbytes() for layer in state.layers for x in layer.tensors)
        cost = measure_cost(model, length, torch.bfloat16)
        assert cost.kv_bytes == cost.state_bytes_per_sequence + length * cost.kv_bytes_per_token == sizes[length]
    assert (sizes[30] > sizes[1]) == (case == "hybrid")
    with pytest.raises(ValueError, match=r"cannot keep its state in int8"):
        model.new_state(1, dtype=torch.int8)


def test_states_decay_at_first_by_known_shares() -> None:
    decay = decoder(*ON_NONE["mamba2"]).mixers[0].decay
    steps = torch.nn.functional.softplus(decay.bias.detach())
    assert steps.min() >= 1e-3 * 0.999
    assert steps.max() <= 0.1 * 1.001
    assert 0 <= decay.rate.min() <= decay.rate.max() <= math.log(16)
