"""Options of one axis, or the combinations of several: what is an arm, what is refused, and whole studies of them."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from llama_lab.analysis.analyse import analyse
from llama_lab.analysis.result import Result
from llama_lab.config.components import model_cost
from llama_lab.runs.study import Study
from llama_lab.study.design.matching import MEASURES
from llama_lab.study.design.options import Options
from llama_lab.study.design.plan import meta_model
from tests.analysis.synthetic import warnings_of
from tests.conftest import Command, Ran
from tests.refusals import refusing
from tests.study.design.test_designs import CONFIGS
from tests.study.planning import planned_study

DRY = ("study=options", "study.dry_run=true", "study.seeds=[1]", "train.tokens=16384", "name=tried")
QUICK = ("study.measure_speed=false", "study.seeds=[1,2]", "train.tokens=2560", "train.evaluations=2", "name=tried")
GRIDS = "study.learning_rates={adamw:[1e-3,2e-3],lion:[1e-4,3e-4]}"
STATE_SPACE = ("attention=mamba2", "position=none")


@pytest.fixture
def study(command: Command, tiny: list[str]) -> Callable[..., Ran]:
    """Run a tiny study inside this process."""
    return partial(command, *tiny)


def reported(ran: Ran) -> Result:
    """The result of a study that went well."""
    assert (ran.code, ran.err) == (0, "")
    return analyse(Study.load(ran.cwd / "runs" / "tried"), ran.cwd / "runs" / "tried")


def over(axis: str, *options: str) -> tuple[str, str]:
    return f"study.axis={axis}", f"study.options=[{','.join(options)}]"


def test_an_arm_is_an_option_and_the_first_is_what_others_are_compared_with() -> None:
    found = Options("gpt2", "ffn", ["relu", "swiglu", "geglu"]).variants(CONFIGS)
    assert [arm.name for arm in found.arms] == ["relu", "swiglu", "geglu"]
    assert {arm.reference for arm in found.arms} == {"relu"}
    assert found.arms[1].overrides == ("arch=gpt2", "ffn=swiglu")
    assert found.arms[1].axes == {"ffn": "swiglu"}
    assert found.title == "gpt2 with ffn: relu, swiglu and geglu"


def test_several_axes_make_every_combination_the_first_options_first() -> None:
    options = [["relu", "swiglu", "geglu"], ["layernorm", "none"], [0.0, 0.1]]
    found = Options("llama", ["ffn", "norm", "model.dropout"], options).variants(CONFIGS)
    assert len(found.arms) == 12
    assert found.arms[0].name == "relu+layernorm+dropout=0"
    assert found.arms[-1].name == "geglu+norm=none+dropout=0.1"
    assert found.arms[-1].overrides == ("arch=llama", "ffn=geglu", "norm=none", "model.dropout=0.1")
    assert found.arms[-1].axes == {"ffn": "geglu", "norm": "none", "model.dropout": "0.1"}


def test_keys_that_end_alike_are_named_in_full() -> None:
    axes = ["model.init.std", "model.embedding.std", "ffn"]
    found = Options("llama", axes, [[0.02, 0.05], [0.02, 0.05], ["relu", "glu"]]).variants(CONFIGS)
    assert found.arms[2].name == "model.init.std=0.02+model.embedding.std=0.05+relu"


@pytest.mark.parametrize(
    "axis",
    [
        ("size", "pico", "nano", "match=none"),
        ("optim", "adamw", "muon"),
        ("model.attention.qk_norm", "null", "head"),
        ("data.document_mask", "false", "true"),
    ],
    ids=" ".join,
)
@pytest.mark.slow
def test_any_group_and_any_key_is_an_axis(tiny: list[str], axis: tuple[str, ...]) -> None:
    name, first, second, *more = axis
    ours = [argument for argument in tiny if not argument.startswith(f"{name}=")]
    plan = planned_study(*ours, *DRY, *over(name, first, second), *more)
    assert [len(arm.runs) for arm in plan.arms] == [1, 1]


@pytest.mark.parametrize(
    ("axis", "options", "fault"),
    [
        ("ffn", ["relu", "relu"], "study.options"),
        ("ffn", ["relu"], "study.options"),
        ("ffn", ["relu", "swigl"], "study.options"),
        ("model.attention.gate", ["a b", "a_b"], "study.options"),
        ("model.position.theta", [1e4, 10000], "study.options"),
        ("fnn", ["relu", "gelu"], "study.axis=fnn"),
        ("model.theta", [1, 2], "study.axis=model.theta"),
        ("model.position", [1, 2], "study.axis=model.position"),
        (["ffn", "ffn"], [["relu", "gelu"]] * 2, "study.axis=[ffn,ffn]"),
        (["ffn", "norm"], ["relu", "gelu"], "study.options"),
        (["ffn", "norm"], [["relu", "gelu"]], "study.options"),
    ],
)
def test_what_is_no_axis_and_no_option_is_refused(axis: Any, options: list[Any], fault: str) -> None:
    with refusing(fault):
        Options("llama", axis, options).variants(CONFIGS)


OF_NO_MODEL = "seed arch study.margin train.tokens data train.ema train.evaluations trainer.precision trainer.devices"


def test_what_decides_no_model_is_no_axis() -> None:
    for axis in OF_NO_MODEL.split():
        with refusing(f"study.axis={axis}: "):
            Options("llama", axis, [1, 2]).variants(CONFIGS)


@pytest.mark.parametrize("match", ["params", "flops"])
def test_without_a_feed_forward_the_width_of_the_mixer_is_solved(tiny: list[str], match: str) -> None:
    plan = planned_study(*tiny, *DRY, *STATE_SPACE, *over("block", "prenorm", "mixer_only"), f"match={match}")
    usual, mixer_only = (arm.runs[0].run.cfg for arm in plan.arms)
    assert mixer_only.model.attention.value_dim == plan.arms[1].width != usual.model.attention.value_dim
    assert f"model.attention.value_dim={plan.arms[1].width}" in plan.arms[1].runs[0].run.overrides
    costs = [MEASURES[match](model_cost(meta_model(cfg, plan.dataset))) for cfg in (usual, mixer_only)]
    residual = plan.arms[1].arm.residual
    assert residual == pytest.approx(costs[1] / costs[0] - 1)
    assert abs(residual) < 0.03  # half a unit of 18 or so


@pytest.mark.slow
def test_a_key_is_an_axis_that_the_report_accuses_of_nothing(command: Command, tiny: list[str]) -> None:
    ours = [argument for argument in tiny if not argument.startswith("train.batch_size")]
    mixers = (*STATE_SPACE, "block=mixer_only", "train.tokens=3072")
    result = reported(command(*ours, "study=options", *over("train.batch_size", "4", "16"), *QUICK, *mixers))
    assert [arm.name for arm in result.arms] == ["batch_size=4", "batch_size=16"]
    assert len({record.summary["tokens"] for record in result.records}) == 1
    # What is true of two seeds, of one rate, of 20 steps and of this machine.
    expected = ("One learning rate", "Logged speeds", "The code had", "Matching left", "Two seeds")
    expected += ("Runs differ in", "Arms vary more")
    found = [warning for warning in result.warnings if not warning.startswith(expected)]
    assert [warning for warning in found if "learned more" not in warning] == []


@pytest.mark.slow
def test_several_axes_are_judged_by_the_effects_of_their_options(study: Callable[..., Ran]) -> None:
    axes = over("[ffn,norm]", "[relu,swiglu,geglu]", "[layernorm,rmsnorm]")
    result = reported(study("study=options", *axes, *QUICK, "train.tokens=1280"))
    pairs = ["ffn=swiglu \u00d7 norm=rmsnorm", "ffn=geglu \u00d7 norm=rmsnorm"]
    assert [effect.name for effect in result.effects] == ["ffn=swiglu", "ffn=geglu", "norm=rmsnorm", *pairs]
    assert result.tests == "moderated paired tests of the 5 effects"
    loss = {arm.name: arm.loss.mean for arm in result.arms if arm.loss}
    geglu, relu = (loss[f"{ffn}+layernorm"] + loss[f"{ffn}+rmsnorm"] for ffn in ("geglu", "relu"))
    assert result.effects[1].change.mean == pytest.approx((geglu - relu) / 2)
    (interaction,) = result.interactions
    assert interaction.levels == (("relu", "swiglu", "geglu"), ("layernorm", "rmsnorm"))


def test_each_optimizer_is_tuned_over_its_own_grid(tiny: list[str]) -> None:
    plan = planned_study(*tiny, *DRY, *over("optim", "adamw", "lion"), GRIDS)
    tried = {arm.arm.name: [run.run.cfg.optim.lr for run in arm.tuning] for arm in plan.arms}
    assert tried == {"adamw": [1e-3, 2e-3], "lion": [1e-4, 3e-4]}
    expected = "2 from 0.001 to 0.002 for adamw; 2 from 0.0001 to 0.0003 for lion"
    assert any(expected in note for note in plan.study.notes)


def test_optimizers_at_one_rate_each_are_warned_of(tmp_path: Path) -> None:
    arms, axes = {"adamw": 0.0, "sgd": 0.1}, {name: {"optim": name} for name in ("adamw", "sgd")}
    found = warnings_of(tmp_path, arms=arms, axes=axes, design="options", config={"sgd": {"optim.lr": 0.3}})
    expected = "Each optimizer had one learning rate, which was not searched: adamw 0.002, sgd 0.3"
    assert any(warning.startswith(expected) for warning in found)
