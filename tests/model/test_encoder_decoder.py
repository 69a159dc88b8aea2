"""The encoder-decoder: PyTorch's own Transformer as an oracle, halves of windows, the cache of a source, refusals."""

import pytest
import torch
from torch import Tensor, nn

from llama_lab.config.components import build_model
from llama_lab.model import EncoderDecoder, generate, measure_cost
from llama_lab.model.generate import Sampling, prefill
from tests.composing import compose_config, decoder, lively, refusal
from tests.model.cases import copy_attention

FAMILY = "family=encoder_decoder"
SOURCE = torch.randint(1, 97, (2, 9), generator=torch.Generator().manual_seed(0))
TOKENS = torch.randint(1, 97, (2, 7), generator=torch.Generator().manual_seed(1))


def model_of(*overrides: str) -> EncoderDecoder:
    model = lively(FAMILY, *overrides)
    assert isinstance(model, EncoderDecoder)
    return model


def theirs(model: EncoderDecoder, norm_first: bool) -> nn.Transformer:
    """PyTorch's own with the same weights."""
    width = model.blocks[0].ffn.up.out_features
    other = nn.Transformer(
        model.dim, 4, 3, 2, width, 0.0, batch_first=True, norm_first=norm_first, layer_norm_eps=1e-5
    ).eval()
    if not norm_first:
        other.encoder.norm = other.decoder.norm = None
    pairs: list[tuple[nn.Module, nn.Module]] = []
    layers = zip(model.all_blocks, (*other.encoder.layers, *other.decoder.layers), strict=True)
    for block, layer in layers:
        copy_attention(block.attention, layer.self_attn)
        names = ["attention", "ffn"]
        if layer in other.decoder.layers:
            copy_attention(block.cross_attention, layer.multihead_attn)
            names = ["attention", "cross_attention", "ffn"]
        pairs += [(getattr(block, f"{name}_norm"), getattr(layer, f"norm{i}")) for i, name in enumerate(names, 1)]
        pairs += [(block.ffn.up, layer.linear1), (block.ffn.down, layer.linear2)]
    if norm_first:
        pairs += [(model.encoder.norm, other.encoder.norm), (model.norm, other.decoder.norm)]
    for ours, copied in pairs:
        copied.load_state_dict(ours.state_dict())
    return other


@pytest.mark.filterwarnings("ignore:.*nested")
@pytest.mark.parametrize(("block", "norm_first"), [("postnorm", False), ("prenorm", True)])
@torch.no_grad()
def test_it_equals_pytorchs_transformer(block: str, norm_first: bool) -> None:
    model = model_of("arch=vanilla", f"block={block}", "bias=true", "model.n_layers=2", "model.encoder_layers=3")
    lengths = torch.tensor([9, 5])
    padding = torch.arange(9) >= lengths[:, None]
    x, y = (model.position.embed(model.embedding(ids), torch.arange(ids.shape[1])) for ids in (SOURCE, TOKENS))
    causal = nn.Transformer.generate_square_subsequent_mask(7)
    expected = theirs(model, norm_first)(
        x, y, tgt_mask=causal, src_key_padding_mask=padding, memory_key_padding_mask=padding, tgt_is_causal=True
    )
    found = model.hidden_states(TOKENS, None, SOURCE, lengths)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("position", ["sinusoidal", "rope", "relative", "shaw"])
@torch.no_grad()
def test_an_encoder_sees_both_ways_and_a_decoder_one(position: str) -> None:
    model = model_of(f"position={position}")
    expected = model(TOKENS, None, SOURCE)
    source, tokens = SOURCE.clone(), TOKENS.clone()
    source[:, -1], tokens[:, -1] = 3, 3
    assert (model.encode(source).encoded != model.encode(SOURCE).encoded).any(-1).all()
    assert (model(TOKENS, None, source) != expected).any(-1).all()
    torch.testing.assert_close(model(tokens, None, SOURCE)[:, :-1], expected[:, :-1])
    padded = torch.cat((SOURCE, torch.zeros(2, 3, dtype=torch.long)), 1)
    torch.testing.assert_close(model(TOKENS, None, padded, torch.tensor([9, 9])), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("overrides", [("arch=vanilla",), ("attention=gqa", "block=sandwich"), ("position=relative",)])
@torch.no_grad()
def test_decoding_with_the_cache_of_a_source_is_the_full_pass(overrides: tuple[str, ...]) -> None:
    """Prompts are sources, and their last tokens begin the text; sources of a batch may be unequally long."""
    model = model_of(*overrides)
    prompts = [SOURCE[0].tolist(), SOURCE[1, :4].tolist()]
    state = model.new_state(2, 12)
    calls: list[Tensor] = []
    model.encoder.blocks[0].register_forward_hook(lambda block, args, output: calls.append(output))
    logits = [prefill(model, prompts, state)]
    logits += [model(TOKENS[:, i : i + 1], state)[:, -1] for i in range(4)]
    assert len(calls) == 2, "each source is read once"
    for row, prompt in enumerate(prompts):
        text = torch.tensor([[prompt[-1], *TOKENS[row, :4].tolist()]])
        whole = model(text, None, torch.tensor([prompt]))[0]
        torch.testing.assert_close(torch.stack([step[row] for step in logits]), whole, rtol=1e-4, atol=1e-4)
    alone = [[*generate(model, [prompt], 5, Sampling(temperature=0))] for prompt in prompts]
    together = [*generate(model, prompts, 5, Sampling(temperature=0))]
    assert together == [[one[0], other[0]] for one, other in zip(*alone, strict=True)]


def test_the_second_half_of_a_window_is_predicted_from_the_first() -> None:
    model, window = decoder(FAMILY), torch.arange(9)[None]
    inputs, targets, source = model.cut(window[:, :-1], window[:, 1:])
    assert [ids.tolist() for ids in (source, inputs, targets)] == [[[0, 1, 2, 3]], [[3, 4, 5, 6]], [[4, 5, 6, 7]]]
    given = (TOKENS, TOKENS, SOURCE)
    assert model.cut(*given) == given


@pytest.mark.parametrize("attention", ["gqa_gpt_oss", "mla"])
def test_every_parameter_learns(attention: str) -> None:
    model = decoder(FAMILY, f"attention={attention}")
    model.loss(TOKENS, TOKENS, SOURCE)[1].backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []


@pytest.mark.parametrize(
    ("arch", "size", "params"),
    [
        ("transformer2017", "transformer_base", 63_045_632),
        ("t5", "t5_small", 60_506_624),
        pytest.param("transformer2017", "transformer_big", 214_171_648, marks=pytest.mark.matrix),
        pytest.param("t5", "t5_base", 222_903_552, marks=pytest.mark.matrix),
        ("t5_v1_1", "t5_base", 247_577_856),
    ],
)
def test_parameters_are_those_published(arch: str, size: str, params: int) -> None:
    with torch.device("meta"):
        assert measure_cost(build_model(compose_config(f"arch={arch}", f"size={size}"), 257)).params == params


@torch.no_grad()
def test_a_decoder_begins_with_the_token_that_is_named() -> None:
    model = model_of("model.start_id=5")
    for given in ((), (SOURCE,)):
        inputs, targets, *_ = model.cut(TOKENS, TOKENS, *given)
        assert inputs[:, 0].tolist() == [5, 5]
        usual, same, *_ = model_of().cut(TOKENS, TOKENS, *given)
        assert torch.equal(inputs[:, 1:], usual[:, 1:])
        assert torch.equal(targets, same)
    state = model.new_state(1, 12)
    expected = model(torch.tensor([[5]]), None, SOURCE[:1])[:, -1]
    torch.testing.assert_close(prefill(model, [SOURCE[0].tolist()], state), expected)


def test_costs_are_of_windows_whose_halves_are_read_by_either_tower() -> None:
    model = decoder(FAMILY, "arch=vanilla", "model.encoder_layers=3")
    cost = measure_cost(model, 24)
    d, width, v = 32, model.blocks[0].ffn.up.out_features, 97
    linear = 3 * (4 * d * d + 2 * d * width) + 2 * (8 * d * d + 2 * d * width) + d * v
    keys = 3 * 12 + 2 * (13 / 2 + 12)  # that a token sees, over layers
    assert cost.flops_per_token == pytest.approx((2 * linear + 4 * d * keys) / 2)
    assert cost.kv_bytes == 2 * 2 * 12 * d * 2
    state = model.new_state(1, 12, torch.bfloat16)
    assert cost.kv_bytes_source == sum(layer.source.nbytes for layer in state.layers)


REFUSED = {
    "block=parallel": "model.block=ParallelSharedNorm: ",
    "attention=linear position=none": "model.attention=llama_lab.model.recurrent.",
    "model.attention.prefix=4": "model.attention.prefix=4: ",
    "data.document_mask=true": "model.document_start_id: ",
    "init=deepnorm": "model.init=DeepNorm: ",
    "model.encoder_layers=0": "model.encoder_layers=0: ",
    "model.start_id=97": "model.start_id=97: ",
    "model.max_seq_len=1": "model.max_seq_len=1: ",
}


@pytest.mark.parametrize("overrides", REFUSED)
def test_what_it_cannot_be_is_one_line(overrides: str) -> None:
    assert refusal(FAMILY, *overrides.split()).startswith(REFUSED[overrides])


def test_a_text_without_a_source_and_a_source_in_int8_are_refused() -> None:
    model = decoder(FAMILY)
    with pytest.raises(ValueError, match=r"^source: an encoder-decoder needs one"):
        model(TOKENS)
    with pytest.raises(ValueError, match=r"^cross_attention: cannot keep a source in int8"):
        model.new_state(1, 4, torch.int8)
