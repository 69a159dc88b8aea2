"""Output gates, sinks and value residuals: as independent implementations and hand-written sums have them."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention

from llama_lab.model import Decoder
from llama_lab.model.attention import GroupedQueryAttention
from llama_lab.model.attention_context import AttentionContext
from llama_lab.model.encoding import Position
from llama_lab.model.norm import RMSNorm
from llama_lab.training.compiling import compile_in_place
from tests.composing import decoder, lively

TOKENS = torch.randint(97, (2, 24), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("kernel", ["sdpa", "reference"])
def test_sinks_are_those_of_gpt_oss(kernel: str) -> None:
    torch.manual_seed(0)
    T, H, G, Dh, D = 12, 6, 2, 8, 40
    config = GptOssConfig(
        hidden_size=D, num_attention_heads=H, num_key_value_heads=G, head_dim=Dh, layer_types=["full_attention"] * 36
    )
    config._attn_implementation = "eager"
    theirs = GptOssAttention(config, 0)
    biases = dict.fromkeys(("query_bias", "key_bias", "value_bias", "output_bias"), True)
    ours = GroupedQueryAttention(D, H, G, Dh, RMSNorm, **biases, sinks=True, kernel=kernel)
    parts = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "o_proj"}
    pairs = {f"{a}.{kind}": f"{b}.{kind}" for a, b in parts.items() for kind in ("weight", "bias")}
    pairs["sinks.logits"] = "sinks"
    for p in theirs.parameters():
        torch.nn.init.normal_(p, 0.0, 0.5)
    ours.load_state_dict({a: theirs.state_dict()[b] for a, b in pairs.items()})
    ours.double(), theirs.double()  # what is left is the softmax, in float32 by the written-out kernel
    x = torch.randn(2, T, D, dtype=torch.float64)
    turned = torch.ones(1, T, Dh // 2), torch.zeros(1, T, Dh // 2)  # by no angle
    hidden = torch.full((T, T), float("-inf")).triu(1)[None, None]
    expected = theirs(x, turned, hidden)[0]
    actual = ours(x, AttentionContext(Position(), torch.arange(T)))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    actual.square().sum().backward()
    expected.square().sum().backward()
    found, wanted = dict(ours.named_parameters()), dict(theirs.named_parameters())
    for a, b in pairs.items():
        torch.testing.assert_close(found[a].grad, wanted[b].grad, rtol=1e-3, atol=1e-3)


def values_by_layer(model: Decoder) -> tuple[list[Tensor], list[Tensor]]:
    """Of each layer, what its map to values gives, and the values that it attends to, both `(B, T, dim)`."""
    own: list[Tensor] = []
    mixed: list[Tensor] = []
    for mixer in model.mixers:
        mixer.value.register_forward_hook(lambda _module, _args, output: own.append(output))
        attend = mixer.attend

        def seen(query: Tensor, key: Tensor, value: Tensor, *rest: Any, attend: Any = attend) -> Tensor:
            mixed.append(value.transpose(1, 2).flatten(2))
            return attend(query, key, value, *rest)

        mixer.attend = seen  # type: ignore[method-assign]
    model(TOKENS)
    return own, mixed


def test_later_layers_mix_in_the_values_of_the_first() -> None:
    for weight, first, later in (("0.3", 0.3, 0.7), ("learned", 0.5, 0.5)):
        own, mixed = values_by_layer(decoder(f"model.attention.value_residual={weight}", "model.n_layers=3"))
        torch.testing.assert_close(mixed, [own[0], *(later * values + first * own[0] for values in own[1:])])
    last = "+pattern.mixing={at: [2], attention: {value_residual: 0.3}}"  # the first keeps its values for that
    own, mixed = values_by_layer(decoder("model.n_layers=3", last))
    torch.testing.assert_close(mixed, [own[0], own[1], 0.7 * own[2] + 0.3 * own[0]])


def test_a_gate_per_head_multiplies_heads_by_a_sigmoid_of_the_input() -> None:
    layer = lively("model.attention.gate=head").blocks[0].attention
    plain = decoder("attention=mha").blocks[0].attention
    plain.load_state_dict({k: v for k, v in layer.state_dict().items() if k != "output_gate.weight"})
    plain.output, output = torch.nn.Identity(), layer.output
    x, context = torch.randn(2, 7, 32), AttentionContext(Position(), torch.arange(7))
    gates = torch.sigmoid(x @ layer.output_gate.weight.T).repeat_interleave(8, -1)
    torch.testing.assert_close(layer(x, context), output(plain(x, context) * gates))


def test_short_convolutions_add_earlier_queries_keys_and_values_to_each() -> None:
    layer = lively("attention=gqa", "model.attention.conv=3").blocks[0].attention
    x, context = torch.randn(2, 7, 32), AttentionContext(Position(), torch.arange(7))
    for part, heads in zip(("query", "key", "value"), layer._heads(x, context, [None] * 3), strict=True):
        p, weights = getattr(layer, part)(x), layer.convs[part].weight[:, 0]
        expected = [
            p[:, t] + sum(weights[:, 2 - lag] * p[:, t - lag] for lag in range(min(t + 1, 3))) for t in range(7)
        ]
        torch.testing.assert_close(heads.transpose(1, 2).flatten(2), torch.stack(expected, 1))
    plain = decoder("attention=gqa").blocks[0].attention
    assert layer.flops_per_token(9) - plain.flops_per_token(9) == 2 * 3 * (32 + 16 + 16)


@pytest.mark.slow
def test_compiled_blocks_compute_the_same() -> None:
    keys = ("gate=head", "value_residual=learned", "sinks=true")
    overrides = ["model.n_layers=3", *(f"model.attention.{key}" for key in keys)]
    one, other = decoder(*overrides), decoder(*overrides)
    compile_in_place(other, backend="aot_eager")
    for model in (one, other):
        model.loss(TOKENS[:, :-1], TOKENS[:, 1:])[1].backward()
    for p, q in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-6)
