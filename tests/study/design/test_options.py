"""Options of one axis, or the combinations of several: what is an arm, what is refused, and whole studies of them."""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from llama_lab.analysis.analyse import analyse
from llama_lab.analysis.result import Result
from llama_lab.config.components import model_cost
from llama_lab.runs.study import Study
from llama_lab.study.design import tuning
from llama_lab.study.design.matching import MEASURES
from llama_lab.study.design.options import Options
from llama_lab.study.design.plan import meta_model
from llama_lab.util.errors import ConfigError
from tests.analysis.synthetic import warnings_of
from tests.conftest import Command, Ran
from tests.study.design.test_designs import CONFIGS
from tests.study.planning import planned_study, refusal

DRY = ("study=options", "study.dry_run=true", "study.seeds=[1]", "train.tokens=16384", "name=tried")
QUICK = ("study.measure_speed=false", "study.seeds=[1,2]", "train.tokens=5120", "train.evaluations=2", "name=tried")
RATES, GRIDS = "study.learning_rates=[1,2]", "study.learning_rates={adamw:[1e-3,2e-3],lion:[1e-4,3e-4]}"
STATE_SPACE = ("attention=mamba2", "position=none")
SHARDS = ("trainer=fsdp", "trainer.devices=2", "trainer.accelerator=cpu", "hydra/launcher=local_gpus")


@pytest.fixture
def study(command: Command, tiny: list[str]) -> Callable[..., Ran]:
    """Run a tiny study inside this process."""
    return partial(command, *tiny)


def reported(ran: Ran) -> Result:
    """The result of a study that went well."""
    assert (ran.code, ran.err) == (0, "")
    return analyse(Study.load(ran.cwd / "runs" / "tried"), ran.cwd / "runs" / "tried")


def complaints(result: Result) -> list[str]:
    """The warnings but those that are true of two seeds, of one rate, of 20 steps and of this machine."""
    expected = ("One learning rate", "Logged speeds", "The code had", "Matching left", "Two seeds")
    return [w for w in result.warnings if not w.startswith(expected) and "learned more" not in w]


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
        ("position", "rope", "alibi"),
        ("size", "pico", "nano", "match=none"),
        ("optim", "adamw", "muon"),
        ("model.position.theta", "1e4", "5e5"),
        ("model.attention.qk_norm", "null", "head"),
        ("train.batch_size", "4", "16"),
        ("schedule", "cosine", "noam"),
        ("model.n_layers", "2", "1", "match=none"),
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
    ("axis", "options", "message"),
    [
        ("ffn", ["relu", "relu"], r"study.options=\[relu,relu\]: has relu twice; name every option once"),
        ("model.attention.gate", ["a b", "a_b"], "study.options: two arms would have the name gate=a_b; leave one"),
        ("ffn", ["relu"], r"study.options=\[relu\]: ffn needs two or more to compare"),
        ("fnn", ["relu", "gelu"], r"study.axis=fnn: is no group, and no key with arch=llama \(did you mean ffn\?\)"),
        ("model.theta", [1, 2], r"study.axis=model.theta: is no group.*\(did you mean model.position.theta\?\)"),
        ("model.position", [1, 2], "study.axis=model.position: is not a single setting; choose the group position"),
        ("ffn", ["relu", "swigl"], r"study.options: ffn has no option swigl \(did you mean swiglu\?\); choose among "),
        ("seed", [1, 2], "study.axis=seed: study.seeds repeats every arm at each seed"),
        ("arch", ["gpt2", "llama"], "study.axis=arch: study=recipes compares whole recipes"),
        ("study.margin", [1, 2], "study.axis=study.margin: is of the study, not of its runs"),
        ("train.tokens", [5120, 10240], "study.axis=train.tokens: arms have equal budgets; study=scaling"),
        ("data", ["stdlib", "text"], "study.axis=data: losses on different texts cannot be compared"),
        ("train.ema", [0.9, 0.99], "study.axis=train.ema: an average of the weights leaves these as they are, so"),
        ("train.evaluations", [1, 4], "study.axis=train.evaluations: is no part of what is trained"),
        ("trainer.precision", [1, 2], "study.axis=trainer.precision: arms compute in one precision"),
        ("trainer.devices", [1, 2], "study.axis=trainer.devices: says where a run computes, not what"),
        ("model.position.theta", [1e4, 10000], r"study.options=\[10000,10000\]: has 10000 twice"),
        (["ffn", "ffn"], [["relu", "gelu"]] * 2, r"study.axis=\[ffn,ffn\]: must name one or more axes, each once"),
        (["ffn", "norm"], ["relu", "gelu"], r"study.options=\[relu,gelu\]: must be a list for each of 2 axes"),
        (["ffn", "norm"], [["relu", "gelu"]], "study.options=.*: must be a list for each of 2 axes"),
    ],
)
def test_what_is_no_axis_and_no_option_is_refused(axis: Any, options: list[Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        Options("llama", axis, options).variants(CONFIGS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (over("model.hidden_dim", "32", "64"), "model.hidden_dim: is an axis, and match=params would undo it"),
        (over("model.n_kv_heads", "2", "null"), "model.n_kv_heads=null: must be a whole number"),
        ((*over("optim.lr", "1", "2"), RATES), "optim.lr: is an axis, and study.learning_rates searches it; set these"),
        ((*over("ffn", "relu", "gelu"), "ffn=glu"), "ffn=glu: the study sets ffn itself, arm by arm"),
        (
            (*over("optim", "adamw", "adafactor"), *SHARDS),
            r"optim=adafactor: PyTorch's cannot hold .*\(arm adafactor\)",
        ),
        (
            over("attention", "gqa", "mamba2"),
            r"model.attention=.*Mamba2: would ignore the rotation of Rope positions; .*\(arm mamba2\); arms with "
            "positions of their own are recipes: study=recipes$",
        ),
        (
            (*over("model.max_seq_len", "32", "48"), "train.tokens=6000"),
            "train.tokens=6000: is no whole number of steps of 256 and 384 tokens, .*; give train.tokens=5376",
        ),
        (
            (*over("[optim,norm]", "[adamw,lion]", "[none,rmsnorm]"), GRIDS.replace("}", ",none:[1,2]}")),
            "study.learning_rates: arm adamw.norm=none has grids by adamw and none",
        ),
        (
            (*over("block", "prenorm", "mixer_only"), "position=none"),
            "match=params: this arm has no feed-forward, and its mixer no value_dim.*arm mixer_only",
        ),
        (
            (*over("block", "prenorm", "mixer_only"), *STATE_SPACE, "model.attention.value_dim=8"),
            "model.attention.value_dim=8: the study sets model.attention.value_dim itself",
        ),
        (
            (*over("model.attention.value_dim", "8", "16"), *STATE_SPACE, "block=mixer_only"),
            "model.attention.value_dim: is an axis, and match=params would undo it",
        ),
    ],
)
def test_what_cannot_be_planned_is_refused(tiny: list[str], arguments: tuple[str, ...], message: str) -> None:
    assert re.match(message, line := refusal(*tiny, *DRY, *arguments)), line


@pytest.mark.parametrize(
    ("grids", "message"),
    [
        ("adamw:[1,2]", "study.learning_rates: arm lion has no grid for lion; give one grid for each arm or option"),
        (
            "adamw:[1,2],loin:[1,2]",
            r"study.learning_rates: loin is no arm and no option \(did you mean lion\?\); choose",
        ),
        ("adamw:[1,2],lion:[1]", r"study.learning_rates.lion=\[1\]: must be two or more positive numbers"),
    ],
)
def test_an_option_without_a_grid_is_refused(tiny: list[str], grids: str, message: str) -> None:
    line = refusal(*tiny, *DRY, *over("optim", "adamw", "lion"), f"study.learning_rates={{{grids}}}")
    assert re.match(message, line), line


@pytest.mark.parametrize("match", ["params", "flops"])
def test_without_a_feed_forward_the_width_of_the_mixer_is_solved(tiny: list[str], match: str) -> None:
    plan = planned_study(*tiny, *DRY, *STATE_SPACE, *over("block", "prenorm", "mixer_only"), f"match={match}")
    usual, mixer_only = (arm.runs[0].run.cfg.model for arm in plan.arms)
    assert mixer_only.attention.value_dim == plan.arms[1].width != usual.attention.value_dim == usual.head_dim
    assert (mixer_only.ffn, mixer_only.hidden_dim) == (None, None)
    assert f"model.attention.value_dim={plan.arms[1].width}" in plan.arms[1].runs[0].run.overrides
    costs = [MEASURES[match](model_cost(meta_model(one.runs[0].run.cfg, plan.dataset))) for one in plan.arms]
    residual = plan.arms[1].arm.residual
    assert residual is not None
    assert costs[1] / costs[0] - 1 == pytest.approx(residual)
    assert abs(residual) < 0.03  # half a unit of 18 or so


@pytest.mark.slow
def test_a_block_without_a_feed_forward_is_accused_of_nothing(study: Callable[..., Ran]) -> None:
    result = reported(study("study=options", *STATE_SPACE, *over("block", "prenorm", "mixer_only"), *QUICK))
    assert complaints(result) == []


@pytest.mark.slow
def test_a_key_is_an_axis_that_the_report_accuses_of_nothing(command: Command, tiny: list[str]) -> None:
    ours = [argument for argument in tiny if not argument.startswith("train.batch_size")]
    axis = over("train.batch_size", "4", "16")
    result = reported(command(*ours, "study=options", *axis, *QUICK, "train.tokens=6144"))
    assert [arm.name for arm in result.arms] == ["batch_size=4", "batch_size=16"]
    assert len({record.summary["tokens"] for record in result.records}) == 1
    assert [warning for warning in complaints(result) if not warning.startswith("Runs differ in")] == []


@pytest.mark.slow
def test_several_axes_are_judged_by_the_effects_of_their_options(study: Callable[..., Ran]) -> None:
    axes = over("[ffn,norm]", "[relu,swiglu,geglu]", "[layernorm,rmsnorm]")
    ran = study("study=options", *axes, *QUICK, "train.tokens=2560")
    result = reported(ran)
    assert [effect.name for effect in result.effects] == [
        "ffn=swiglu",
        "ffn=geglu",
        "norm=rmsnorm",
        "ffn=swiglu \u00d7 norm=rmsnorm",
        "ffn=geglu \u00d7 norm=rmsnorm",
    ]
    assert result.tests == "moderated paired tests of the 5 effects"
    loss = {arm.name: arm.loss.mean for arm in result.arms if arm.loss}
    geglu, relu = (loss[f"{ffn}+layernorm"] + loss[f"{ffn}+rmsnorm"] for ffn in ("geglu", "relu"))
    change = (geglu - relu) / 2
    assert result.effects[1].change.mean == pytest.approx(change)
    (interaction,) = result.interactions
    assert interaction.levels == (("relu", "swiglu", "geglu"), ("layernorm", "rmsnorm"))
    page = (ran.cwd / "runs/tried/report.html").read_text(encoding="utf-8")
    assert "ffn=geglu \u00d7 norm=rmsnorm" in page.replace("<wbr>", "")


def test_each_optimizer_is_tuned_over_its_own_grid(tiny: list[str]) -> None:
    plan = planned_study(*tiny, *DRY, *over("optim", "adamw", "lion"), GRIDS)
    tried = {arm.arm.name: [run.run.cfg.optim.lr for run in arm.tuning] for arm in plan.arms}
    assert tried == {"adamw": [1e-3, 2e-3], "lion": [1e-4, 3e-4]}
    expected = "2 from 0.001 to 0.002 for adamw; 2 from 0.0001 to 0.0003 for lion"
    assert any(expected in note for note in plan.study.notes)
    grids = "study.learning_rates={1e4:[1e-3,2e-3],5e5:[2e-3,4e-3,8e-3]}"
    plan = planned_study(*tiny, *DRY, *over("model.position.theta", "1e4", "5e5"), grids)
    assert [len(arm.tuning) for arm in plan.arms] == [2, 3]


@pytest.mark.slow
def test_each_grid_goes_on_from_its_own_end(study: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "MOST_EXTENSIONS", 2)
    more = ("study.extend_rates=true", *QUICK, "study.seeds=[1]", "train.tokens=2560")
    result = reported(study("study=options", *over("optim", "adamw", "lion"), GRIDS, *more))
    tried = {arm.name: {member.learning_rate for member in arm.tuning} for arm in result.study.arms}
    assert tried["adamw"] > {1e-3, 2e-3}
    assert tried["lion"] > {1e-4, 3e-4}
    assert {sweep.arm: set(sweep.rates) for sweep in result.learning_rates} == tried
    assert [w for w in result.warnings if "optim" in w or "searched" in w] == []


def test_optimizers_at_one_rate_each_are_warned_of(tmp_path: Path) -> None:
    arms, axes = {"adamw": 0.0, "sgd": 0.1}, {name: {"optim": name} for name in ("adamw", "sgd")}
    found = warnings_of(tmp_path, arms=arms, axes=axes, design="options", config={"sgd": {"optim.lr": 0.3}})
    expected = "Each optimizer had one learning rate, which was not searched: adamw 0.002, sgd 0.3"
    assert any(warning.startswith(expected) for warning in found)
