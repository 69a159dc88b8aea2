"""The report of a scaling study: from arms to laws, gains, sentences, tables and charts."""

import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from llama_lab.analysis.analyse import analyse
from llama_lab.analysis.result import ArmResult, Result
from llama_lab.analysis.scaling_gains import iso_flop_lines, scaled, scaling_sentences
from llama_lab.analysis.scaling_law import Point
from llama_lab.report import figures
from llama_lab.report.charts import compute
from llama_lab.report.page import page
from llama_lab.report.summary import summary_rows
from llama_lab.report.tables import tables
from llama_lab.runs.record import Record
from llama_lab.runs.stored import Environment
from llama_lab.runs.study import Arm, ArmSpeed, Study, StudySpeed
from llama_lab.util.formatting import UNKNOWN
from tests.analysis import results
from tests.analysis.simulate_scaling import Condition, draw
from tests.analysis.synthetic import write_study

GAIN = Condition("a gain that holds", noise=1e-3, gain=1.4)


def arms_of(option: str, points: Sequence[Point], speed: float = 100.0) -> list[ArmResult]:
    """The arms that have these points, as an analysis finds them."""
    found = []
    for point in points:
        name = f"{option}-{point.size}-{point.budget:g}"
        costs = {"params": point.params, "train_flops_per_token": point.flops / point.tokens}
        summaries = {seed: {"val/loss": loss, "tokens": point.tokens} for seed, loss in point.losses.items()}
        environment = Environment(metrics=costs)
        records = tuple(
            Record(Path(name), name, seed, "done", environment=environment, summary=summary)
            for seed, summary in summaries.items()
        )
        arm = Arm(name, {"ffn": option, "size": point.size, "tokens_per_parameter": f"{point.budget:g}"})
        found.append(ArmResult(arm, (), records, None, None, costs=costs | {"perf/tokens_per_second": speed}))
    return found


@pytest.fixture(scope="module")
def arms() -> list[ArmResult]:
    """Those of a study whose second option is worth 1.4 times the compute, and trains half as fast."""
    reference, option = draw(GAIN, np.random.default_rng(0))
    return [*arms_of("relu", reference), *arms_of("swiglu", option, speed=50.0)]


@pytest.fixture(scope="module")
def result(arms: list[ArmResult]) -> Result:
    """A result with the scaling of these arms."""
    return replace(results.ladder(), scaling=scaled(arms, "val/loss"))


def gains_in_summary(result: Result, arms: Sequence[ArmResult]) -> dict[str, float | None]:
    """What the summary of a study of these arms has as their gains."""
    study = replace(result.study, design="scaling")
    return {row["arm"]: row["gain_mean"] for row in summary_rows(replace(result, study=study, arms=tuple(arms)))}


def diverged(arm: ArmResult) -> ArmResult:
    first, *others = arm.records
    return replace(arm, records=(replace(first, status="diverged"), *others))


def test_arms_become_the_points_of_their_options(result: Result) -> None:
    for own, points in zip(result.scaling.options, draw(GAIN, np.random.default_rng(0)), strict=True):
        assert [(p.cell, p.losses) for p in own.points] == [(p.cell, p.losses) for p in points]
        assert [(p.params, p.tokens) for p in own.points] == [(p.params, p.tokens) for p in points]
    assert [gain.speed for gain in result.scaling.options[1].gains.every] == [0.5] * 12


def test_the_verdict_states_the_gain_also_in_time_and_its_trend(result: Result) -> None:
    verdict, explained = scaling_sentences(result.scaling)
    assert re.match(r"swiglu is worth 1\.(39|4)\d* \[1\.3\d*,\s1\.4\d*\] times the compute of relu at 960 TF", verdict)
    assert "; with measured training speeds, 0.70 times the time" in verdict
    assert re.search(r"the gain holds within 10% \(\S+ \[0\.9\d*,\s1\.0\d*\] with every tenfold of compute\)", verdict)
    assert explained.startswith("A gain is the training FLOPs that relu would need")


def test_the_verdict_says_why_no_trend_is_stated_where_the_gain_follows_no_line(result: Result) -> None:
    reference, option = result.scaling.options
    bent = replace(option, gains=replace(option.gains, lack_of_fit=0.003))
    verdict, _ = scaling_sentences(replace(result.scaling, options=(reference, bent)))
    assert re.search(
        r"; no trend is stated, because log gain over log compute does not follow a straight line \(lack of fit: "
        r"p = 0\.003; by such a line \S+ \[0\.9\d*,\s1\.0\d*\] with every tenfold of compute\)\.$",
        verdict,
    )


def test_intervals_of_gains_are_called_pointwise(result: Result) -> None:
    for caption in (tables(result)["scaling"].caption, compute.gains(result).caption):
        assert "pointwise" in caption


def test_speeds_not_measured_side_by_side_give_no_gain_in_time(tmp_path: Path, arms: list[ArmResult]) -> None:
    verdict, _ = scaling_sentences(scaled(arms, "val/loss", is_timed=False))
    assert verdict.startswith("swiglu is worth 1.")
    assert "the time" not in verdict
    study = over_sizes(tmp_path, ("nano",), "ab")
    for measured, is_timed in (((), False), (("a-nano-1",), False), (("a-nano-1", "b-nano-1"), True)):
        speeds = dict.fromkeys(measured, ArmSpeed([12_000.0], [300.0]))
        if speeds:
            StudySpeed("cpu", 1, "32-true", 2, "2.13.0+cpu", speeds).save(tmp_path)
        points = [point for option in analyse(study, tmp_path).scaling.options for point in option.points]
        assert all(math.isfinite(point.flops_per_second) == is_timed for point in points)


@pytest.mark.slow
def test_a_law_that_is_not_identified_gives_no_gain_anywhere(result: Result) -> None:
    reference, option = draw(Condition("noise of 20%", noise=0.2), np.random.default_rng(0))
    arms = [*arms_of("relu", reference), *arms_of("swiglu", option)]
    result = replace(result, scaling=scaled(arms, "val/loss"))
    (sentence,) = scaling_sentences(result.scaling)
    assert sentence.startswith("Worth in compute is unknown: the law of relu is not identified (alpha ")
    assert tables(result)["scaling"].head[-1] == "Loss"
    assert "Compute-equivalent gain" not in page(result)
    assert figures.figure(figures.FIGURES["gains"](result)) is None
    assert {*gains_in_summary(result, arms).values()} == {None}


@pytest.mark.slow
def test_the_report_shows_laws_and_gains_where_they_are_known(result: Result, arms: list[ArmResult]) -> None:
    found = tables(result)
    assert found["laws"].head[:7] == ["Option", "\u03b1", "\u03b2", "E", "A", "B", "\u03b3"]
    rows = {tuple(row[:3]): row for row in found["scaling"].rows}
    assert rows["swiglu", "1e+06", "5"][7][:3] in ("1.3", "1.4")
    assert rows["swiglu", "6.4e+07", "20"][7:] == [UNKNOWN] * 3, "the reference has no such loss"
    titles = ["Loss over compute", "Compute-equivalent gain", "Loss at equal compute"]
    assert all(title in page(result) for title in titles)
    points = [row for row in compute.gains(result).rows if not row.get("law")]
    assert Counter(row["arm"] for row in points) == {"swiglu": 9}
    gains = gains_in_summary(result, arms)
    assert gains["swiglu-1e+06-5"] == pytest.approx(1.4, rel=0.1)
    assert sum(gain is not None for gain in gains.values()) == 9


def test_an_option_with_a_diverged_run_is_shown_as_points_beside_the_laws_of_the_others(arms: list[ArmResult]) -> None:
    others = [replace(arm, arm=replace(arm.arm, axes=arm.arm.axes | {"ffn": "gelu"})) for arm in arms[12:]]
    others[0] = diverged(others[0])
    result = replace(results.ladder(), scaling=scaled([*arms[:12], *others, *arms[12:]], "val/loss"))
    verdict, lacking, _ = scaling_sentences(result.scaling)
    assert verdict.startswith("swiglu is worth ")
    assert lacking.startswith("No power law is fitted to gelu, which has 11 points of 4 sizes and 3 budgets")
    assert [row[0] for row in tables(result)["laws"].rows] == ["relu", "swiglu"]
    without = scaled([diverged(arms[0]), *arms[1:]], "val/loss")
    assert without.not_fittable == "relu has 11 points of 4 sizes and 3 budgets, where a law needs 4 by 3"


def test_an_iso_flop_curve_spends_its_compute_on_tokens_that_were_trained(result: Result) -> None:
    reference = result.scaling.options[0]
    tokens = [point.tokens for point in reference.points]
    for flops, line in iso_flop_lines(reference, reference):
        spent = [flops / 6 / params for params in line.x]
        assert min(tokens) <= min(spent)
        assert max(spent) <= max(tokens)
        truth = [1.7 + 400 / n**0.34 + 410 / d**0.28 for n, d in zip(line.x, spent, strict=True)]
        assert line.mean == pytest.approx(truth, rel=2e-3)
        assert all(low <= mean <= high for _, mean, low, high in zip(*line, strict=True))
        assert math.isclose(line.x[0] * spent[0] * 6, flops, rel_tol=1e-9)


def over_sizes(folder: Path, sizes: Sequence[str], options: Sequence[str], gain: float = 0.0) -> Study:
    """A study on disk of options at sizes, all of one budget; the second option is better by `gain` nats."""
    names = [f"{option}-{size}-1" for size in sizes for option in options]
    axes = {name: dict(zip(("ffn", "size", "tokens_per_parameter"), name.split("-"), strict=True)) for name in names}
    effects = {name: -gain if axes[name]["ffn"] == options[1] else 0.0 for name in names}
    study = write_study(folder, effects, design="scaling", match="none", axes=axes, noise=0.001)
    first = {name: f"{options[0]}-{axes[name]['size']}-1" for name in names}
    arms = tuple(replace(a, previous=first[a.name] if a.name != first[a.name] else None) for a in study.arms)
    return replace(study, arms=arms)


def test_arms_over_sizes_are_compared_with_their_reference_and_not_with_a_step(tmp_path: Path) -> None:
    result = analyse(over_sizes(tmp_path, ("nano", "micro"), ("relu", "swiglu", "gelu")), tmp_path)
    shown = page(result)
    assert result.tests == "moderated paired tests of the 4 comparisons"
    assert "Difference to its reference" in tables(result)["arms"].head
    assert shown.count('aria-label="Change from') == 1
    assert not re.search(r"the (step|one) before", shown)


def test_what_a_seed_does_at_one_size_is_no_noise_of_comparisons_at_another(tmp_path: Path) -> None:
    study = over_sizes(tmp_path, ("nano", "micro", "mini"), ("relu", "swiglu"), gain=0.1)
    for size, sign in (("nano", 1), ("mini", -1)):
        for path in tmp_path.glob(f"*-{size}-1/seed=*/summary.json"):
            summary = json.loads(path.read_text())
            summary["val/loss"] += 0.2 * sign * int(path.parent.name[-1])
            path.write_text(json.dumps(summary))
    steps = [step.change for arm in analyse(study, tmp_path).arms if (step := arm.to_previous)]
    assert len(steps) == 3
    for change in steps:
        assert change.mean == pytest.approx(-0.1, abs=0.01)
        assert change.significant
        assert change.high - change.low < 0.05
