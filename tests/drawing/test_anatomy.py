"""The parts of a decoder: their costs are the decoder's, and their wiring is what its blocks compute."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from llama_lab.drawing.anatomy import NAMES, Anatomy, Part, anatomy, changed, pattern
from llama_lab.drawing.picture import picture
from llama_lab.drawing.wiring import SCALE, Sum, wiring
from llama_lab.model.attention import GroupedQueryAttention
from llama_lab.model.block import PreNorm
from llama_lab.model.mixer import Mixer
from tests.composing import compose_config, decoder, options, written


@pytest.mark.parametrize("group", ["attention", "ffn", "block", "embedding"])
def test_every_packaged_component_is_called_what_people_call_it(group: str) -> None:
    nodes = [written(group, option) for option in options(group)]
    targets = {str(node.get("_target_") or node[group]["_target_"]) for node in nodes}
    assert {target.rpartition(".")[2] for target in targets} <= NAMES.keys()


def parts(found: Anatomy) -> list[tuple[Part, int]]:
    """Every part and how often it is there."""
    of_bert = (found.segments, found.input_norm, found.head_transform)
    once = [(part, 1) for part in (found.embedding, found.position, *of_bert, found.norm, found.head) if part]
    return once + [(part, len(at)) for layer, at in found.layers for part in (layer.own, *layer.parts.values())]


def anatomy_of(*overrides: str) -> Anatomy:
    return anatomy("one", decoder(*overrides, device="meta"), compose_config("size=pico", *overrides).model)


@pytest.mark.parametrize(
    "overrides",
    [
        ("arch=vanilla", "position=relative"),  # tied; a table that all layers share
        ("position=shaw", "model.n_layers=3"),  # vectors for each layer
        ("arch=bloom", "position=learned"),  # a norm on the embeddings; positions with parameters
        ("arch=falcon",),  # one norm for two parts
        ("arch=bert",),  # segments, a norm and a transform
        ("arch=gemma2", "model.n_layers=4", "model.max_seq_len=64"),  # two kinds of layers
        ("arch=transformer2017", "model.encoder_layers=3"),  # two towers
    ],
    ids=" ".join,
)
def test_the_costs_of_all_parts_add_up_to_the_model_s(overrides: tuple[str, ...]) -> None:
    found = anatomy_of(*overrides)
    cost = found.cost
    assert sum(part.params * n for part, n in parts(found)) == cost.params
    assert sum(part.active * n for part, n in parts(found)) == cost.params_active
    assert sum(part.flops * n for part, n in parts(found)) == pytest.approx(cost.flops_per_token, rel=1e-12)
    assert sum((part.state or 0) * n for part, n in parts(found)) == (cost.kv_bytes or 0) + (cost.kv_bytes_source or 0)


def test_both_towers_of_an_encoder_decoder_are_there() -> None:
    found = anatomy_of("arch=transformer2017", "model.encoder_layers=3")
    mixers = [[part.title for part in layer.parts.values() if part.kind == "mixer"] for layer, _ in found.layers]
    assert mixers == [["Multi-head attention"], ["Multi-head attention", "Cross-attention"]]
    assert [at for _, at in found.layers] == [(1, 2, 3), (1, 2)]
    assert found.layers[1][0].stages[2] == Sum((), (), (("cross_attention",),))
    assert "the source, to every cross-attention" in picture(found)


def test_equal_layers_are_one_and_others_stand_in_their_order() -> None:
    (layer, numbers), *others = anatomy_of("arch=llama", "model.n_layers=5").layers
    assert (layer.title, numbers, others) == ("Pre-norm block", (1, 2, 3, 4, 5), [])
    found = anatomy_of("arch=gemma2", "model.n_layers=5")
    assert [numbers for _, numbers in found.layers] == [(1, 3, 5), (2, 4)]
    local, everywhere = (layer.parts["attention"] for layer, _ in found.layers)
    assert "window" in local.settings
    assert "window" not in everywhere.settings
    assert local.state is not None
    assert everywhere.state is not None
    assert local.state < everywhere.state
    assert found.order == "(A B) \u00d7 2, A"


def test_a_pattern_of_layers_is_short() -> None:
    assert pattern("ABABAB") == "(A B) \u00d7 3"
    assert pattern("AAAAABAAAAABAA") == "(A\u00d75 B) \u00d7 2, A\u00d72"
    assert pattern("ABBB") == "A B\u00d73"


def test_a_part_has_its_heads_shapes_and_the_settings_that_are_not_the_default() -> None:
    found = anatomy_of("arch=llama2", "attention=gqa", "model.n_kv_heads=2", "model.attention.qk_norm=head")
    ((layer, _),) = found.layers
    attention = layer.parts["attention"]
    assert attention.settings.replace("\u00a0", " ") == "4 heads, 2 kv heads of 8, qk_norm head"
    assert attention.shapes == ("query, output 32 → 32", "key, value 32 → 16")
    assert layer.parts["ffn"].settings == "SiLU"
    assert found.head.title == "Head"
    assert "tied" in anatomy_of("arch=gpt2").head.title


CHAINS: dict[str, tuple[Any, ...]] = {
    "postnorm": (Sum((), (), (("attention",),)), "attention_norm", Sum((), (), (("ffn",),)), "ffn_norm"),
    "sandwich": (
        Sum((), (), (("attention_norm", "attention", "attention_post_norm"),)),
        Sum((), (), (("ffn_norm", "ffn", "ffn_post_norm"),)),
    ),
    "parallel": (Sum((), ("attention_norm",), (("attention",), ("ffn",))),),
    "parallel_two_norms": (Sum((), (), (("attention_norm", "attention"), ("ffn_norm", "ffn"))),),
}


@pytest.mark.parametrize("block", CHAINS)
def test_the_wiring_of_a_block_is_that_of_its_forward_pass(block: str) -> None:
    (built, *_) = decoder(f"block={block}", "model.dropout=0.1", device="meta").blocks
    assert wiring(built) == CHAINS[block]


class Scaled(PreNorm):
    """A user's block: a residual stream that is scaled, and a branch that is."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.gain = nn.Parameter(torch.ones(()))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.gain)

    def forward(self, x: Tensor, context: Any, state: Any = None) -> Tensor:
        x = 2.0 * x + self.attend(self.attention_norm(x), context, state)
        return x + self.gain * self.feed(self.ffn_norm(x))


class Averaging(Mixer):
    """A user's mixer, without a state."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.value = nn.Linear(dim, dim)

    def forward(self, x: Tensor, context: Any, state: Any = None) -> Tensor:
        return self.value(x).cumsum(1)  # type: ignore[no-any-return]

    def flops_per_token(self, seq_len: int) -> float:
        return 2 * self.value.weight.numel()


def test_a_block_of_the_user_s_own_is_read_like_ours_and_what_it_owns_is_counted() -> None:
    found = anatomy_of(f"model.block._target_={__name__}.Scaled")
    ((layer, numbers),) = found.layers
    assert layer.stages == (
        Sum((SCALE,), (), (("attention_norm", "attention"),)),
        Sum((), (), (("ffn_norm", "ffn", SCALE),)),
    )
    assert (layer.title, layer.own.params, len(numbers)) == ("Scaled", 1, 2)
    assert sum(part.params * n for part, n in parts(found)) == found.cost.params


def test_a_mixer_of_the_user_s_own_is_a_part_with_its_matrices() -> None:
    model = decoder("size=pico", "position=none")
    for block in model.blocks:
        block.attention = Averaging(model.dim)
    found = anatomy("mine", model, compose_config("size=pico", "position=none").model)
    part = found.layers[0][0].parts["attention"]
    assert (part.kind, part.title, part.shapes, part.state) == ("mixer", "Averaging", ("value 32 → 32",), None)
    assert found.cost.kv_bytes is None
    assert found.position is None


def test_settings_that_a_class_passes_on_to_its_base_are_compared_with_its_defaults() -> None:
    class Mine(GroupedQueryAttention):
        def __init__(self, share: float = 0.5, **settings: Any) -> None:
            super().__init__(**settings)

    assert [*changed({"share": 0.25, "window": None, "chunk": 8}, Mine)] == ["share 0.25", "chunk 8"]


def test_two_of_one_architecture_do_not_differ() -> None:
    one = anatomy_of("arch=llama")
    assert not one.differs(replace(one, name="two"))
    assert one.differs(anatomy_of("arch=llama", "norm=layernorm"))
