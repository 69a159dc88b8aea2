"""What carries over from one decoder to another, name by name; pooled heads against a loop over rows."""

import re

import pytest
import torch
from torch import Tensor

from llama_lab.model import Decoder
from llama_lab.model.transfer import patterns, transfer
from tests.composing import decoder, lively

TOKENS = torch.arange(32)[None]
EVERYTHING = ("attention=mha", "model.attention.key_bias=true", "model.attention.value_bias=true")


def weights(model: Decoder) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def pooled_by_hand(rows: Tensor, n_kv_heads: int, head_dim: int, how: str) -> Tensor:
    """Row r of new head h: the mean of row r of the heads whose queries h will serve, or that of the first of them."""
    heads = len(rows) // head_dim
    size = heads // n_kv_heads
    new = []
    for h in range(n_kv_heads):
        group = [h * size] if how == "first" else range(h * size, (h + 1) * size)
        for r in range(head_dim):
            new.append(sum((rows[old * head_dim + r] for old in group), torch.zeros_like(rows[0])) / len(group))
    return torch.stack(new)


def test_experts_start_as_copies_of_a_feed_forward_or_at_random_and_it_must_be_said_which() -> None:
    """With equal experts, whatever the router chooses computes what the feed-forward did."""
    source, experts = decoder(), ("ffn=moe", f"model.hidden_dim={decoder().blocks[0].ffn.up.out_features}")
    target = decoder(*experts)
    done = transfer(source, target, experts="copies")
    assert done.anew == ("blocks.0.ffn.router.weight", "blocks.1.ffn.router.weight")
    assert done.left == ()
    torch.testing.assert_close(target(TOKENS), source(TOKENS), rtol=1e-4, atol=1e-6)
    assert len(transfer(source, decoder(*experts), experts="random").left) == 6
    with pytest.raises(ValueError, match="init_experts=null: the source has no experts; start them as copies, or at"):
        transfer(source, target)


@pytest.mark.parametrize(
    ("how", "kv", "family", "projections"),
    [
        ("mean", ["attention=gqa", "model.n_kv_heads=2"], "decoder", 2 * 6),
        ("first", ["attention=gqa", "model.n_kv_heads=2"], "decoder", 2 * 6),
        ("mean", ["attention=mqa"], "encoder_decoder", 2 * (6 + 6 + 2)),
    ],
)
def test_key_and_value_heads_are_pooled_within_the_groups_that_share_them(
    how: str, kv: list[str], family: str, projections: int
) -> None:
    """In an encoder and in cross-attention, too."""
    source = lively(f"family={family}", *EVERYTHING, "model.attention.conv=2")
    keys = ("key_bias=true", "value_bias=true", "conv=2")
    target = decoder(f"family={family}", *kv, *(f"model.attention.{key}" for key in keys))
    done = transfer(source, target, how)
    n_kv_heads = target.mixers[0].n_kv_heads
    names = [name for name in source.state_dict() if re.search(r"attention\.(convs\.)?(key|value)\.", name)]
    assert len(names) == projections
    assert {*done.pooled} == {*names}
    for name in names:
        expected = pooled_by_hand(source.state_dict()[name], n_kv_heads, 8, how)
        torch.testing.assert_close(target.state_dict()[name], expected)
    assert (done.anew, done.left, done.share) == ((), (), 1.0)


def test_random_heads_keep_the_values_that_the_seed_gives_them() -> None:
    source, target = lively("attention=mha"), decoder("attention=mqa")
    before = weights(target)
    done = transfer(source, target, "random")
    names = {f"blocks.{layer}.attention.{part}.weight" for layer in range(2) for part in ("key", "value")}
    assert {*done.anew} == {*done.left} == names
    assert all(torch.equal(target.state_dict()[name], before[name]) for name in names)
    assert 0.9 < done.share < 1


def test_an_unknown_way_to_pool_is_refused() -> None:
    with pytest.raises(ValueError, match="init_kv_heads=median: unknown; choose mean, first or random"):
        transfer(lively("attention=mha"), decoder("attention=mqa"), "median")


def test_heads_of_other_queries_are_not_pooled() -> None:
    done = transfer(lively("attention=mha"), decoder("attention=gqa", "model.n_kv_heads=1", "model.n_heads=2"))
    assert done.pooled == ()
    assert "blocks.0.attention.key.weight" in done.anew


def test_the_same_architecture_takes_everything_and_computes_the_same_and_a_deeper_one_all_layers() -> None:
    source, target, deeper = lively("arch=gpt2"), decoder("arch=gpt2", "model.seed=5"), decoder("model.n_layers=3")
    done = transfer(source, target)
    assert (done.anew, done.left, done.share) == ((), (), 1.0)
    assert torch.equal(target(TOKENS), source(TOKENS))
    anew = transfer(lively(), deeper).anew
    assert anew
    assert all(name.startswith("blocks.2.") for name in anew)


def test_another_architecture_takes_what_has_its_name_and_shape_and_names_the_rest() -> None:
    source, target = lively("arch=gpt2"), decoder("arch=llama")
    before, theirs = weights(target), weights(source)
    done = transfer(source, target)
    after = weights(target)
    assert "embedding.head.weight" in done.taken, "the head of tied embeddings is the token table"
    for name in done.taken:
        assert torch.equal(after[name], theirs[name])
    for name in done.anew:
        assert torch.equal(after[name], before[name])
    assert {*done.taken, *done.anew} == {*after}
    n_layers = len(target.blocks)
    assert patterns(done.anew, n_layers) == [f"blocks.*.ffn.{part}.weight" for part in ("gate", "up", "down")]
    left = patterns(done.left, n_layers)
    assert {"position.table.weight", "blocks.*.attention.query.bias", "norm.bias"} <= {*left}
    share = sum(after[name].numel() for name in done.taken) / sum(p.numel() for p in target.parameters())
    assert done.share == pytest.approx(share)


def test_a_head_of_its_own_is_left_where_the_target_ties_it_and_buckets_are_no_rows_to_share() -> None:
    assert transfer(lively("embedding=untied"), decoder("embedding=tied")).left == ("embedding.head.weight",)
    done = transfer(lively("position=relative"), decoder("position=relative", "model.position.n_buckets=16"))
    assert "position.table.weight" in done.anew


@torch.no_grad()
def test_gains_that_are_stored_as_a_distance_from_one_stay_the_same_gains() -> None:
    """And biases are taken as they are."""
    for norm in ("rmsnorm", "layernorm"):
        source, offset, back = lively(f"norm={norm}"), decoder(f"norm={norm}_offset"), decoder(f"norm={norm}")
        transfer(source, offset)
        transfer(offset, back)
        torch.testing.assert_close(offset.norm.weight + 1, source.norm.weight)
        for model in (offset, back):
            torch.testing.assert_close(model.eval()(TOKENS), source(TOKENS), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", [48, 16])
def test_tables_of_tokens_and_of_learned_positions_share_their_first_rows(rows: int) -> None:
    source = lively("position=learned")
    target = decoder("position=learned", f"model.max_seq_len={rows}", vocab_size=100)
    before = weights(target)
    done = transfer(source, target)
    assert {*done.rows} == {"embedding.tokens.weight", "embedding.head.weight", "position.table.weight"}
    ours, theirs = target.state_dict()["position.table.weight"], source.state_dict()["position.table.weight"]
    shared = min(rows, 32)
    assert torch.equal(ours[:shared], theirs[:shared])
    assert torch.equal(ours[shared:], before["position.table.weight"][shared:])
    text = TOKENS[:, :shared]
    torch.testing.assert_close(target(text)[..., :97], source(text))


def test_on_the_meta_device_the_answer_is_the_same() -> None:
    source = lively("arch=gpt2")
    assert transfer(source, decoder("arch=llama", device="meta")) == transfer(source, decoder("arch=llama"))


def test_patterns_join_the_layers_that_share_a_name() -> None:
    names = ["a", *(f"blocks.{i}.up" for i in (0, 1, 2, 5, 7, 8)), *(f"blocks.{i}.down" for i in range(9)), "b"]
    assert patterns(names, 9) == ["a", "blocks.0-2,5,7-8.up", "blocks.*.down", "b"]
