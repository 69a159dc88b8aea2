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
    Factorial,
    KVHeads,
    Ladder,
    LeaveOneOut,
    Recipes,
    Variants,
    combinations,
)
from tests.composing import compose_config
from tests.refusals import refusing

CONFIGS = Composer()


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


def test_kv_heads_go_from_one_per_query_head_to_one_for_all() -> None:
    variants = KVHeads("llama2").variants(CONFIGS)
    assert names(variants) == ["mha", "gqa-2", "mqa"]
    assert [compose_config(*arm.overrides).model.n_kv_heads for arm in variants.arms] == [4, 2, 1]
    assert names(KVHeads("llama2", [1, 4]).variants(CONFIGS)) == ["mha", "mqa"]


def test_recurrences_and_encoders_have_no_key_and_value_heads_to_compare() -> None:
    for shared in (("attention=linear", "position=none"), ("family=encoder", "objective=masked")):
        with refusing("study.base=llama2"):
            KVHeads("llama2").variants(Composer(shared))


def test_depth_crosses_blocks_depths_and_warm_up_and_matches_within_a_depth() -> None:
    variants = Depth("llama", ["postnorm", "prenorm"], [2, 4], [0.0, 0.1]).variants(CONFIGS)
    assert len({tuple(arm.axes.values()) for arm in variants.arms}) == 8
    depths = {arm.name: arm.axes["n_layers"] for arm in variants.arms}
    for arm in variants.arms:
        cfg, choices = CONFIGS.compose(*arm.overrides)
        made = (choices["block"], str(cfg.model.n_layers), f"{cfg.schedule.warmup:g}")
        assert tuple(arm.axes.values()) == made
        assert depths[arm.reference] == arm.axes["n_layers"]


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
    ("design", "fault"),
    [
        (Ladder("vanila", "llama"), "study.base=vanila: no such recipe (did you mean vanilla?); choose "),
        (Ladder("vanilla", "llama", ["nrom"]), "study.axes: nrom"),
        (Ladder("vanilla", "llama", []), "study.axes=[]"),
        (Ladder("gpt2", "mistral", ["block"]), "study.target=mistral"),
        (Factorial("vanilla", "llama2", ["norm", "ffn"], 0.3), "study.fraction=0.3"),
        (Factorial("vanilla", "llama2", ["norm", "ffn"], 2.0), "study.fraction=2"),
        (Recipes(["llama", "llama"]), "study.recipes=[llama,llama]"),
        (Recipes(["llama", "lama"]), "study.recipes=lama"),
        (Recipes(["llama", "gpt2"], [1, 1]), "study.lengths=[1,1]"),
        (KVHeads("llama"), "study.base=llama"),
        (KVHeads("llama2", [3]), "study.kv_heads: 3"),
        (Depth("llama", [], [2], [0.1]), "study.blocks=[]"),
    ],
)
def test_what_cannot_be_is_refused_by_its_key(design: Any, fault: str) -> None:
    with refusing(fault):
        design.variants(CONFIGS)


def test_a_study_has_a_title_that_a_person_would_write() -> None:
    assert Ladder("vanilla", "llama2").variants(CONFIGS).title == "From vanilla to llama2, one change at a time"
    assert Recipes(["gpt2", "llama", "mistral"]).variants(CONFIGS).title == "gpt2, llama and mistral compared"
