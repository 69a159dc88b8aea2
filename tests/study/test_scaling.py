"""Scaling studies from the command line."""

import json
from pathlib import Path

import pytest

from llama_lab.analysis.analyse import analyse
from llama_lab.runs.study import Study
from tests.conftest import Command
from tests.study.planning import planned_study

COMMON = ("study=scaling", "study.axis=ffn", "study.options=[relu,swiglu]", "study.measure_speed=false", "name=scale")
QUICK = ("trainer.compile=false", "train.evaluations=1", "train.sample_tokens=0", "train.batch_size=4")


@pytest.fixture
def shared(tiny: list[str]) -> list[str]:
    """The overrides of tiny runs, without those that the study sets."""
    return [o for o in tiny if not o.startswith(("size=", "train.tokens=", "train.batch_size=", "train.sample"))]


@pytest.mark.slow
def test_rates_are_tuned_at_one_budget_of_a_size(shared: list[str]) -> None:
    grid = ("study.learning_rates=[1e-3,8e-3]", "study.seeds=[1]", "study.sizes=[pico,nano]", "study.budgets=[0.2,0.4]")
    plan = planned_study(*shared, *COMMON, *QUICK, *grid)
    arms = [f"{option}-{size}" for option in ("relu", "swiglu") for size in ("pico", "nano")]
    assert {arm.arm.name for arm in plan.arms if arm.tuning} == {f"{arm}-0.2" for arm in arms}
    assert {arm.arm.name: arm.arm.tuner for arm in plan.arms} == {
        f"{arm}-{budget}": f"{arm}-0.2" for arm in arms for budget in (0.2, 0.4)
    }


@pytest.mark.matrix
def test_four_sizes_by_three_budgets_are_fitted(command: Command, shared: list[str], tmp_path: Path) -> None:
    sizes = tmp_path / "mine" / "size"
    sizes.mkdir(parents=True)
    for name, dim in {"a": 8, "b": 12, "c": 16, "d": 24}.items():
        model = f"{{dim: {dim}, n_layers: 1, n_heads: 2, max_seq_len: 32, vocab_size: null}}"
        text = f"# @package _global_\nsize: {{n_kv_heads: 2, mlp_ratio: 4.0}}\nmodel: {model}\n"
        (sizes / f"{name}.yaml").write_text(text)
    axes = ("study.sizes=[a,b,c,d]", "study.budgets=[0.2,0.5,1]", "study.seeds=[1]", "study.learning_rates=null")
    ran = command("--config-dir=mine", *shared, *COMMON, *QUICK, *axes)
    assert (ran.code, ran.err) == (0, "")
    folder = ran.cwd / "runs" / "scale"
    result = analyse(Study.load(folder), folder)
    assert result.scaling.not_fittable == ""
    for option in result.scaling.options:
        assert [len(point.losses) for point in option.points] == [1] * 12
        for point in option.points:
            arm = f"{option.option}-{point.size}-{point.budget:g}"
            summary = json.loads((folder / arm / "seed=1" / "summary.json").read_text())
            assert point.flops == pytest.approx(summary["tokens"] * summary["train_flops_per_token"])
