"""Designs: from recipes and axes to arms."""

from collections import Counter
from itertools import combinations as pairs
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from llama_lab.config.schema import COMPONENTS
from llama_lab.study.design.designs import (
    AddOne,
    Composer,
    Context,
    Depth,
    Design,
    Factorial,
    KVHeads,
    Ladder,
    LeaveOneOut,
    Recipes,
    Variants,
    combinations,
)
from llama_lab.util.errors import ConfigError
from tests.composing import compose_config
from tests.study.planning import Loader

CONFIGS = Composer(Loader(), ())


def components(overrides: tuple[str, ...]) -> dict[str, str]:
    """The option of every component that an arm really composes to."""
    _, choices = CONFIGS.compose(*overrides)
    return {group: choices[group] for group in COMPONENTS}


def names(variants: Variants) -> list[str]:
    return [arm.name for arm in variants.arms]


@pytest.mark.slow
def test_the_ladder_climbs_from_vanilla_to_llama2_one_component_at_a_time() -> None:
    variants = Ladder("vanilla", "llama2").variants(CONFIGS)
    rungs = ["vanilla", "+prenorm", "+rmsnorm", "+rope", "+swiglu", "+gqa", "+embedding=untied", "+init=normal"]
    assert names(variants) == rungs
    made = [components(arm.overrides) for arm in variants.arms]
    assert made[0] == components(("arch=vanilla",))
    assert made[-1] == components(("arch=llama2",)), "the last rung is the whole recipe"
    for lower, higher in pairwise(made):
        assert sum(lower[group] != higher[group] for group in COMPONENTS) == 1
    assert [arm.previous for arm in variants.arms] == [None, *rungs[:-1]]
    assert variants.notes == ()


def test_axes_are_climbed_in_the_order_given() -> None:
    assert names(Ladder("vanilla", "llama2", ["ffn", "block"]).variants(CONFIGS)) == ["vanilla", "+swiglu", "+prenorm"]


def test_an_axis_on_which_both_agree_gives_no_arm_and_is_reported() -> None:
    variants = Ladder("gpt2", "mistral", ["block", "norm", "position", "ffn", "attention"]).variants(CONFIGS)
    assert names(variants) == ["gpt2", "+rmsnorm", "+rope", "+swiglu", "+gqa_window"]
    assert variants.notes == (
        "No arm for block: gpt2 and mistral both have prenorm.",
        "gpt2 and mistral also differ on embedding, init, which stay as in the baseline.",
    )


@pytest.mark.slow
def test_add_one_and_leave_one_out_turn_each_axis_once() -> None:
    base, target = components(("arch=vanilla",)), components(("arch=llama2",))
    for design, whole, other in ((AddOne, base, target), (LeaveOneOut, target, base)):
        variants = design("vanilla", "llama2").variants(CONFIGS)
        first, *arms = [components(arm.overrides) for arm in variants.arms]
        assert first == whole
        turned = [[g for g in COMPONENTS if arm[g] != whole[g]] for arm in arms]
        assert turned == [[group] for group in COMPONENTS if group != "pattern"], "neither has one"
        assert all(arm[group] == other[group] for arm, (group,) in zip(arms, turned, strict=True))


def test_leave_one_out_keeps_the_targets_other_groups() -> None:
    variants = LeaveOneOut("vanilla", "llama2", ["norm"]).variants(CONFIGS)
    assert names(variants) == ["llama2", "llama2-rmsnorm"]
    assert components(variants.arms[0].overrides) == components(("arch=llama2",))


def test_a_factorial_has_every_combination_once() -> None:
    variants = Factorial("vanilla", "llama2", ["norm", "ffn", "block"]).variants(CONFIGS)
    levels = [tuple(arm.axes.values()) for arm in variants.arms]
    assert len(set(levels)) == len(levels) == 8
    assert variants.arms[0].name == "vanilla"
    assert {arm.axes["ffn"] for arm in variants.arms} == {"relu", "swiglu"}


@given(st.integers(3, 7), st.integers(1, 3))
@pytest.mark.slow
def test_a_fraction_is_balanced_has_the_base_and_confounds_no_two_main_effects(n_axes: int, halvings: int) -> None:
    assume(2 ** (n_axes - halvings) > n_axes)  # fewer rows cannot tell all axes apart
    assume((n_axes, halvings) != (7, 4))  # saturated: pyDOE3 finds none
    rows = combinations(n_axes, 0.5**halvings)
    assert len(set(rows)) == 2 ** (n_axes - halvings)
    assert (False,) * n_axes in rows
    for one, other in pairs(range(n_axes), 2):
        counts = Counter((row[one], row[other]) for row in rows)
        assert len(counts) == 4
        assert len(set(counts.values())) == 1


@pytest.mark.parametrize("fraction", [0.3, 0.0625, 2.0, 0.0])
def test_a_fraction_that_is_none_is_refused_with_those_that_are(fraction: float) -> None:
    with pytest.raises(ConfigError, match=r"study.fraction=.*: with 3 axes choose 1, 0.5$"):
        Factorial("vanilla", "llama2", ["norm", "ffn", "block"], fraction).variants(CONFIGS)


def test_kv_heads_go_from_one_per_query_head_to_one_for_all() -> None:
    variants = KVHeads("llama2").variants(CONFIGS)
    assert names(variants) == ["mha", "gqa-2", "mqa"]
    assert [compose_config(*arm.overrides).model.n_kv_heads for arm in variants.arms] == [4, 2, 1]
    assert names(KVHeads("llama2", [1, 4]).variants(CONFIGS)) == ["mha", "mqa"]


@pytest.mark.parametrize("attention", ["linear", "mamba2", "gated_delta", "kimi_delta", "conv"])
def test_recurrences_have_no_key_and_value_heads_to_compare(attention: str) -> None:
    recurrent = Composer(Loader(), (f"attention={attention}", "position=none"))
    with pytest.raises(
        ConfigError, match=r"^study.base=llama2: its attention has a fixed number .*; add attention=gqa"
    ):
        KVHeads("llama2").variants(recurrent)


@pytest.mark.parametrize("design", [KVHeads("llama2"), Context("llama", ["rope"], [1])], ids=["kv_heads", "context"])
def test_an_encoder_has_no_cache_to_compare(design: Design) -> None:
    encoder = Composer(Loader(), ("family=encoder", "objective=masked"))
    with pytest.raises(ConfigError, match=r"^study.base=llama2?: an encoder has no cache, and .* or another family$"):
        design.variants(encoder)


def test_depth_crosses_blocks_depths_and_warm_up_and_matches_within_a_depth() -> None:
    variants = Depth("llama", ["postnorm", "prenorm"], [2, 4], [0.0, 0.1]).variants(CONFIGS)
    assert len(variants.arms) == 8
    for arm in variants.arms:
        cfg = compose_config(*arm.overrides)
        assert arm.axes == {
            "block": cfg.model.block._target_.rpartition(".")[2].lower(),
            "n_layers": str(cfg.model.n_layers),
            "warmup": f"{cfg.schedule.warmup:g}",
        }
        reference = next(other for other in variants.arms if other.name == arm.reference)
        assert reference.axes["n_layers"] == arm.axes["n_layers"]


def test_recipes_are_whole_and_evaluated_beyond_their_context() -> None:
    variants = Recipes(["gpt2", "bloom", "mistral"], [1, 2]).variants(CONFIGS)
    assert names(variants) == ["gpt2", "bloom", "mistral"]
    assert {arm.reference for arm in variants.arms} == {"gpt2"}
    for arm in variants.arms:
        assert components(arm.overrides) == components((f"arch={arm.name}",))
        assert compose_config(*arm.overrides).train.eval_lengths == [1, 2]


def test_context_trains_short_and_evaluates_long() -> None:
    variants = Context("llama", ["rope", "alibi"], [1, 1.5, 4]).variants(CONFIGS)
    assert names(variants) == ["rope", "alibi"]
    assert compose_config(*variants.arms[0].overrides).train.eval_lengths == [1, 1.5, 4]


@pytest.mark.parametrize(
    ("design", "message"),
    [
        (Ladder("vanila", "llama"), r"study.base=vanila: no such recipe \(did you mean vanilla\?\); choose bamba \| "),
        (Ladder("vanilla", "llama9"), r"study.target=llama9: no such recipe"),
        (
            Ladder("vanilla", "llama", ["nrom"]),
            r"study.axes: nrom is not an axis \(did you mean norm\?\); choose among",
        ),
        (Ladder("vanilla", "llama", ["norm", "norm"]), "names an axis twice"),
        (Ladder("vanilla", "llama", []), r"study.axes=\[\]: is empty; leave it out, or choose among block, norm, "),
        (Ladder("gpt2", "mistral", ["block"]), r"is the same as study.base=gpt2 on block; they differ on norm, "),
        (Ladder("llama", "llama"), r"study.target=llama: is the same as study.base=llama"),
        (Recipes(["llama"]), r"study.recipes=\[llama\]: must be two or more distinct levels, each text"),
        (Recipes(["llama", "llama"]), r"study.recipes=\[llama,llama\]: must be two or more distinct levels"),
        (Recipes(["llama", "lama"]), r"study.recipes=lama: no such recipe \(did you mean llama\?\)"),
        (Recipes(["llama", "gpt2"], [1, 1]), r"study.lengths=\[1,1\]: must be one or more distinct levels"),
        (KVHeads("llama"), "study.base=llama: its attention has a fixed number of key and value heads; add attention="),
        (KVHeads("llama2", [3]), r"study.kv_heads: 3 does not divide model.n_heads=4; choose among \[4, 2, 1\]"),
        (Depth("llama", [], [2], [0.1]), r"study.blocks=\[\]: must be one or more distinct levels, each text"),
        (Context("llama", ["rope", "rope"], [1]), r"study.positions=\[rope,rope\]: must be one or more"),
    ],
)
def test_what_cannot_be_is_refused_by_its_key(design: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        design.variants(CONFIGS)


@pytest.mark.parametrize(
    ("design", "title"),
    [
        (Ladder("vanilla", "llama2"), "From vanilla to llama2, one change at a time"),
        (AddOne("vanilla", "llama2"), "What each part of llama2 does for vanilla"),
        (LeaveOneOut("vanilla", "llama2"), "What each part of llama2 does for it"),
        (Factorial("vanilla", "llama2", ["norm", "ffn"]), "Norm and ffn between vanilla and llama2: all combinations"),
        (
            Factorial("vanilla", "llama2", ["block", "norm", "ffn"], 0.5),
            "Block, norm and ffn between vanilla and llama2: 1 in 2 combinations",
        ),
        (Recipes(["gpt2", "llama", "mistral"]), "gpt2, llama and mistral compared"),
        (KVHeads("llama2", [4, 1]), "llama2 with 4 and 1 key and value heads"),
        (Depth("vanilla", ["postnorm", "prenorm"], [2, 4], [0.0]), "postnorm and prenorm at 2 and 4 layers"),
        (Context("vanilla", ["rope", "alibi"], [1, 2]), "rope and alibi at the trained context and beyond"),
    ],
)
def test_a_study_has_a_title_that_a_person_would_write(design: Design, title: str) -> None:
    assert design.variants(CONFIGS).title == title
