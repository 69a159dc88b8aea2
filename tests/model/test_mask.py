"""Masks: one rule says which keys a query sees, for every kernel, with and without a cache, within documents."""

from collections.abc import Iterator
from copy import deepcopy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from llama_lab.config.components import build_model
from llama_lab.model import Decoder, blocked_attention, measure_cost
from llama_lab.model.attention_context import MaskRule
from llama_lab.model.generate import _static_step, prefill
from llama_lab.util.errors import ConfigError
from tests.composing import END_OF_TEXT, compose_config, cover, decoder, lively
from tests.model.cases import LENGTH, in_pieces

POSITIONS = ["none", "learned", "sinusoidal", "rope", "alibi", "relative"]
KERNELS = ["sdpa", "blocks", "reference"]
CHUNK, WINDOW, PREFIX = MaskRule(chunk=5), MaskRule(window=5), MaskRule(prefix=7)
DOCUMENTS = ["data.document_mask=true"]
STARTS = (0, 3, 14)  # of the documents in `packed`


@pytest.fixture(autouse=True, scope="module")
def small_blocks() -> Iterator[None]:
    """Blocks of queries of which a sequence here has several."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocked_attention, "BLOCK", 5)
        yield


def packed() -> Tensor:
    """A sequence that begins within a document, and holds one that is longer than the windows and chunks here."""
    tokens = torch.randint(1, 97, (1, LENGTH), generator=torch.Generator().manual_seed(0))
    tokens[0, STARTS[1:]] = END_OF_TEXT
    return tokens


def documents(tokens: Tensor) -> list[Tensor]:
    return list(tokens.split([b - a for a, b in zip(STARTS, (*STARTS[1:], LENGTH), strict=True)], 1))


def model_of(
    position: str, rule: MaskRule, kernel: str = "sdpa", document_start_id: int | None = None, layers: int = 2
) -> Decoder:
    """A lively model in float64 whose layers have this rule; it is built once, since that takes longest."""
    model = deepcopy(lively("arch=llama3", f"position={position}")).double()
    model.blocks, model.document_start_id = model.blocks[:layers], document_start_id
    for mixer in model.mixers:
        mixer.mask_rule, mixer.kernel = rule, kernel
    return model


def influence(model: Decoder, tokens: Tensor, readers: slice) -> list[bool]:
    """Whether each token of a sequence has any influence on the output at some positions."""
    embeddings = model.embedding.tokens(tokens).detach().requires_grad_()
    model.embedding.tokens.forward = lambda _: embeddings  # so that gradients reach every position by itself
    (found,) = torch.autograd.grad(model(tokens)[0, readers].square().sum(), embeddings)
    return (found[0] != 0).any(-1).tolist()


@given(
    length=st.integers(1, 40),
    window=st.none() | st.integers(1, 12),
    chunk=st.none() | st.integers(1, 12),
    prefix=st.none() | st.integers(2, 30),
    causal=st.booleans(),
)
def test_a_query_sees_what_all_settings_let_it_see(
    length: int, window: int | None, chunk: int | None, prefix: int | None, causal: bool
) -> None:
    rule, cache_positions = MaskRule(window, chunk, prefix, causal), torch.arange(length)
    seen = [
        [
            ((k <= q or k < (prefix or 0)) if causal else (k == q or k < (length if prefix is None else prefix)))
            and (window is None or (k > q - window if causal else abs(k - q) < window))
            and (chunk is None or k // chunk == q // chunk)
            for k in range(length)
        ]
        for q in range(length)
    ]
    assert rule.sees(cache_positions[:, None], cache_positions).tolist() == seen
    assert not rule.sees(cache_positions, cache_positions - length).any(), "negative positions are never seen"
    if (window is None or chunk is None) and (causal or prefix is None):
        assert rule.mean_keys(length) == sum(map(sum, seen)) / length


@pytest.mark.parametrize(
    ("position", "kernel"),
    [("rope", "sdpa"), ("rope", "blocks"), ("alibi", "blocks"), ("relative", "reference"), ("shaw", "reference")],
)
def test_with_one_layer_a_token_is_influenced_by_what_it_sees_alone(position: str, kernel: str) -> None:
    for rule, reader, seen in (
        (WINDOW, 17, range(13, 18)),
        (CHUNK, 17, range(15, 18)),
        (PREFIX, 17, range(18)),
        (PREFIX, 2, range(7)),
        (MaskRule(window=4, prefix=7), 5, range(2, 7)),
        (MaskRule(chunk=5, prefix=7), 2, range(5)),
    ):
        model = model_of(position, rule, kernel, layers=1)
        assert influence(model, packed(), slice(reader, reader + 1)) == [k in seen for k in range(LENGTH)]


@pytest.mark.parametrize(("position", "kernel"), cover(POSITIONS, KERNELS, meeting=1))
@torch.no_grad()
def test_a_packed_document_gives_what_it_gives_alone(position: str, kernel: str) -> None:
    for rule in (MaskRule(), WINDOW, CHUNK):
        alone = model_of(position, rule, kernel)
        apart = torch.cat([alone(document) for document in documents(packed())], 1)
        together = model_of(position, rule, kernel, END_OF_TEXT)(packed())
        tolerance = 1e-6 if kernel == "reference" else 1e-12  # the reference has scores in float32
        assert (together - apart).abs().max() <= tolerance * apart.abs().max()


DECODED = [
    *(cover(POSITIONS, [MaskRule(), WINDOW, CHUNK], [END_OF_TEXT], meeting=1)),
    *(("rope", rule, None) for rule in (PREFIX, MaskRule(window=4, prefix=7), MaskRule(chunk=5, prefix=7))),
    ("shaw", PREFIX, None),
]


@pytest.mark.parametrize(("position", "rule", "document_start_id"), DECODED, ids=str)
def test_decoding_knows_documents_and_a_prefix(position: str, rule: MaskRule, document_start_id: int | None) -> None:
    kernel = "reference" if position == "shaw" else "blocks"
    model = model_of(position, rule, kernel, document_start_id)
    for sizes in ([9, 4], [16], *([[], [2, 9, 7, 6]] if document_start_id is not None else [])):
        expected = model(packed()).detach()
        torch.testing.assert_close(in_pieces(model, packed(), sizes), expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_documents_end_for_each_sequence_of_a_batch_by_itself_in_a_compiled_step_too() -> None:
    model = model_of("rope", CHUNK, document_start_id=END_OF_TEXT)
    texts = [packed()[0, 1:17].tolist(), packed()[0, 10:22].tolist()]
    for step in ("eager", "static"):
        cache = model.new_state(2, LENGTH)
        logits = [prefill(model, [text[:9] for text in texts], cache)]
        positions = cache.lengths[:, None].clone()
        for i in (9, 10):
            tokens = torch.tensor([[text[i]] for text in texts])
            eager = step == "eager"
            logits.append(
                model(tokens, cache)[:, -1] if eager else _static_step(model, tokens, positions + i - 9, cache)
            )
        whole = [model(torch.tensor([text[:11]]))[0, 8:] for text in texts]
        torch.testing.assert_close(torch.stack(logits, 1), torch.stack(whole), rtol=1e-4, atol=1e-4)


def test_what_a_prefix_shows_is_not_predicted() -> None:
    model = decoder("model.attention.prefix=7")
    targets = torch.arange(LENGTH)[None]
    assert model.cut(targets, targets)[1].tolist() == [[-100] * 6 + list(range(6, LENGTH))]
    assert decoder().cut(targets, targets)[1].equal(targets)


def test_a_prefix_of_every_layer_costs_the_keys_that_it_adds() -> None:
    plain, prefix = (measure_cost(decoder(*rule), LENGTH) for rule in ([], ["model.attention.prefix=7"]))
    pairs = 7 * 6 / 2
    assert prefix.flops_per_token - plain.flops_per_token == pytest.approx(2 * 4 * 32 * pairs / LENGTH)
    assert prefix.kv_bytes == plain.kv_bytes


def test_layers_of_chunks_keep_one_chunk_and_global_ones_all() -> None:
    model = decoder("model.attention.chunk=5", "+pattern.global={at: '1::2', attention: {chunk: null}}")
    state = model.new_state(1, LENGTH)
    assert [layer.slots for layer in state.layers] == [5, LENGTH]
    assert [mixer.max_state_tokens for mixer in model.mixers] == [5, None]


def test_a_document_mask_needs_the_token_with_which_documents_start() -> None:
    with pytest.raises(ConfigError, match=r"^data.document_mask=true: documents start with the end-of-text token"):
        build_model(compose_config("size=pico", *DOCUMENTS), 97)
