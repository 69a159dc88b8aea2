"""The design of scaling studies, and the memory that its sizes need."""

from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from llama_lab.analysis.power import smallest_difference
from llama_lab.runs.study import Study
from llama_lab.study.design import Scaling, dry_run
from llama_lab.study.design import memory_fit as memory
from llama_lab.study.design.dry_run import largest_in_a_day, power
from llama_lab.study.design.memory_fit import check_memory
from llama_lab.study.design.scaling import parameters
from llama_lab.training.run import new_run
from tests.composing import compose_config
from tests.refusals import refusing
from tests.study.design.test_designs import CONFIGS
from tests.study.planning import planned_study

NORMS = ("study=options", "study.axis=norm", "study.options=[rmsnorm,layernorm]", "match=none")

DESIGN: dict[str, Any] = {
    "axis": "ffn",
    "options": ["relu", "swiglu"],
    "sizes": ["pico", "nano"],
    "budgets": [5, 20, 10],
}


def test_arms_of_one_size_and_budget_have_equal_tokens_and_are_compared_there() -> None:
    arms = Scaling(**DESIGN).variants(CONFIGS).arms
    assert len(arms) == 12
    configs = {arm.name: compose_config(*arm.overrides) for arm in arms}
    for arm in arms:
        option, size, budget = arm.name.split("-")
        assert list(arm.axes.values()) == [option, size, budget]
        assert arm.reference == f"relu-{size}-{budget}"
        assert arm.previous == (arm.reference if option == "swiglu" else None)
        assert configs[arm.name].train.tokens == configs[arm.reference].train.tokens
        assert arm.tuned_by == f"{option}-{size}-10", "the middle budget"
    small, large = (configs[f"relu-pico-{budget}"].train.tokens for budget in (5, 20))
    assert large == 4 * small
    assert small == pytest.approx(5 * (2 * 4096 * 32 + 12 * 2 * 32**2), rel=0.02), "embeddings and head count"


def test_documents_that_are_apart_change_no_size() -> None:
    one, apart = (compose_config("size=pico", f"data.document_mask={mask}") for mask in ("false", "true"))
    assert parameters(one) == parameters(apart)


def test_the_dry_runs_power_counts_only_comparisons_within_one_size_and_budget() -> None:
    arms = Scaling(**DESIGN).variants(CONFIGS).arms
    runs = [SimpleNamespace(member=SimpleNamespace(seed=seed)) for seed in (1, 2, 3)]
    study, dataset = Study("", "scaling", arms[0].name, arms), SimpleNamespace(entropy_floor=None)
    plan: Any = SimpleNamespace(study=study, arms=arms, runs=runs, dataset=dataset)
    assert (
        f"a difference of {smallest_difference(12, 3, comparisons=6):.1f} standard deviations between seeds"
        in power(plan)[0]
    )


def test_a_design_of_more_than_a_day_is_told_the_largest_that_fits_one() -> None:
    arms = Scaling(**DESIGN).variants(CONFIGS).arms
    planned = [SimpleNamespace(arm=arm, runs=range(3), expected_tuning=15 * (arm.tuned_by == arm.name)) for arm in arms]
    hours = {"pico": 0.05, "nano": 0.16}  # of a run, by tokens per parameter
    per_run = {arm.name: 3600 * hours[arm.axes["size"]] * float(arm.axes["tokens_per_parameter"]) for arm in arms}
    advice = "The largest design that fits one: study.sizes=[pico,nano] study.budgets=[5], 18.9 h."
    plan: Any = SimpleNamespace(arms=planned)
    assert largest_in_a_day(plan, per_run, 1e9, devices=2) == advice
    assert largest_in_a_day(plan, per_run, 1e9, devices=1).startswith("So do two of its sizes at one budget; choose")


def test_sizes_of_several_contexts_get_the_shortest() -> None:
    variants = Scaling(**DESIGN | {"budgets": [1]}).variants(CONFIGS)
    assert {compose_config(*arm.overrides).model.max_seq_len for arm in variants.arms} == {32}
    assert variants.notes[-1] == "All sizes have the shortest of their contexts, 32 tokens."


@pytest.mark.parametrize(
    ("axis", "two"), {"arch": ["gpt2", "llama"], "attention": ["gqa", "mha"], "optim": ["adamw", "lion"]}.items()
)
def test_axes_are_recipes_parts_of_the_model_and_of_the_training(axis: str, two: list[str]) -> None:
    base = None if axis == "arch" else "gpt2"
    arms = Scaling(axis, two, ["pico", "nano"], [1], base=base).variants(CONFIGS).arms
    _, choices = CONFIGS.compose(*arms[-1].overrides)
    assert (choices[axis], choices["size"]) == (two[1], "nano") == (arms[-1].axes[axis], arms[-1].axes["size"])
    assert base is None or choices["position"] == "learned"


@pytest.mark.parametrize(
    ("wrong", "fault"),
    [
        ({"axis": "fnn"}, "study.axis=fnn"),
        ({"axis": "arch", "options": ["gpt2", "llama"], "base": "llama"}, "study.base=llama"),
        ({"base": "lama"}, "study.base=lama"),
        ({"options": ["relu"]}, "study.options=[relu]"),
        ({"options": ["relu", "relu"]}, "study.options=[relu,relu]"),
        ({"sizes": ["pico", "pico"]}, "study.sizes=[pico,pico]"),
        ({"budgets": [0, 5]}, "study.budgets: 0"),
        ({"budgets": [1e-5]}, "study.budgets: 1e-05"),
        ({"budgets": []}, "study.budgets=[]"),
    ],
)
def test_settings_that_make_no_scaling_study_are_refused(wrong: dict[str, Any], fault: str) -> None:
    with refusing(fault):
        Scaling(**DESIGN | wrong).variants(CONFIGS)


@pytest.mark.slow
def test_a_study_of_laws_says_if_it_reads_its_text_too_often(tiny: list[str]) -> None:
    shared = [one for one in tiny if not one.startswith(("size", "train.tokens"))]
    design = ("study.axis=ffn", "study.options=[relu,swiglu]", "study.sizes=[pico,nano]", "study.learning_rates=null")
    often, seldom = (planned_study(*shared, "study=scaling", *design, f"study.budgets=[{n}]") for n in (1, 0.1))
    times = often.arms[-1].draft.cfg.train.tokens / often.dataset.index.train.tokens
    assert times > 10
    assert [f"up to {times:.0f} times" in note for note in often.study.notes[2:]] == [True]
    assert len(seldom.study.notes) == 2


@pytest.mark.slow
def test_a_timed_step_is_as_fast_as_all_that_it_computes(tiny: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a dry run's time would count what is recomputed twice: it also divides all of that by the speed."""
    monkeypatch.setattr(dry_run, "time", SimpleNamespace(perf_counter=partial(next, count())))  # a second for each step
    plans = [planned_study(*tiny, *NORMS, f"train.recompute={parts}") for parts in ("none", "block")]
    plain, again = (dry_run.flops_per_second(plan) for plan in plans)
    flops = [dry_run.training_flops(plan, plan.arms[0]) for plan in plans]
    assert again / plain == pytest.approx(flops[1] / flops[0])
    assert again > 1.1 * plain


def test_a_size_that_exceeds_the_memory_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    cfg, choices = CONFIGS.compose("size=pico", "tokenizer=byte")
    run = new_run(cfg, "name", "arm", [], choices)
    dataset = SimpleNamespace(index=SimpleNamespace(vocab_size=257))
    dataset.validated_on = dataset.with_tokens = lambda _: dataset
    check_memory(run, dataset)
    monkeypatch.setattr(memory, "device_memory", lambda _: 2**20)
    with refusing("size=pico: a device would need "):
        check_memory(run, dataset)
