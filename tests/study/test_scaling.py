"""Scaling studies from the command line."""

import json
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

from llama_lab.analysis.analyse import analyse
from llama_lab.runs.study import Study
from tests.conftest import Command, Ran

COMMON = ("study=scaling", "study.axis=ffn", "study.options=[relu,swiglu]", "study.measure_speed=false", "name=scale")
QUICK = ("trainer.compile=false", "train.evaluations=1", "train.sample_tokens=0", "train.batch_size=4")


@pytest.fixture
def sizes(tmp_path: Path) -> Callable[..., str]:
    """Write sizes of these widths into a folder of configs of the user's own."""

    def write(**widths: int) -> str:
        (tmp_path / "my_conf" / "size").mkdir(parents=True)
        for name, dim in widths.items():
            model = f"{{dim: {dim}, n_layers: 1, n_heads: 2, max_seq_len: 32, vocab_size: null}}"
            text = f"# @package _global_\nsize: {{n_kv_heads: 2, mlp_ratio: 4.0}}\nmodel: {model}\n"
            (tmp_path / "my_conf" / "size" / f"{name}.yaml").write_text(text)
        return f"--config-dir={tmp_path / 'my_conf'}"

    return write


@pytest.fixture
def shared(tiny: list[str]) -> list[str]:
    """The overrides of tiny runs, without those that the study sets."""
    return [o for o in tiny if not o.startswith(("size=", "train.tokens=", "train.batch_size=", "train.sample"))]


@pytest.mark.slow
def test_rates_are_tuned_at_one_budget_of_a_size(
    command: Command, shared: list[str], sizes: Callable[..., str]
) -> None:
    mine = sizes(slim=8, wide=16)
    grid = ("study.learning_rates=[1e-3,8e-3]", "study.extend_rates=false", "study.seeds=[1]")
    ran: Ran = command(mine, *shared, *COMMON, *QUICK, *grid, "study.sizes=[slim,wide]", "study.budgets=[0.2,0.4]")
    assert (ran.code, ran.err) == (0, "")
    folder = ran.cwd / "runs" / "scale"
    study = Study.load(folder)
    tuned = {arm.name for arm in study.arms if arm.tuning}
    assert tuned == {f"{option}-{size}-0.2" for option in ("relu", "swiglu") for size in ("slim", "wide")}
    rate = pd.read_csv(folder / "summary.csv").set_index("arm")["learning_rate:seed=1"]
    for arm in study.arms:
        assert rate[arm.name] == rate[arm.tuner]
    assert "No power law is fitted: relu has 4 points of 2 sizes and 2 budgets, where a law needs 4 by 3." in " ".join(
        ran.out.split()
    )
    kinds = ("Training tokens differ", "Parameters without", "Runs are judged")
    assert not [w for w in analyse(study, folder).warnings if w.startswith(kinds)]
    assert "One learning rate" not in ran.out


@pytest.mark.slow
def test_four_sizes_by_three_budgets_are_fitted(command: Command, shared: list[str], sizes: Callable[..., str]) -> None:
    mine = sizes(a=8, b=12, c=16, d=24)
    axes = ("study.sizes=[a,b,c,d]", "study.budgets=[0.2,0.5,1]", "study.seeds=[1]", "study.learning_rates=null")
    ran: Ran = command(mine, *shared, *COMMON, *QUICK, *axes)
    assert (ran.code, ran.err) == (0, "")
    folder = ran.cwd / "runs" / "scale"
    result = analyse(Study.load(folder), folder)
    assert result.scaling.not_fittable == ""
    assert result.verdict.startswith(
        ("swiglu is worth ", "What swiglu is worth in compute is unknown", "Worth in compute is unknown")
    )
    for option in result.scaling.options:
        assert [len(point.losses) for point in option.points] == [1] * 12
        for point in option.points:
            summary = json.loads(
                (folder / f"{option.option}-{point.size}-{point.budget:g}/seed=1/summary.json").read_text()
            )
            assert point.flops == pytest.approx(summary["tokens"] * summary["train_flops_per_token"])
