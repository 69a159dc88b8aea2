"""Scaling laws and compute-equivalent gains, against SciPy and laws that are known."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats
from scipy.optimize import curve_fit, least_squares

from llama_lab.analysis.scaling_law import (
    HUBER,
    Gains,
    Point,
    Scaling,
    _lack_of_fit,
    fit_gains,
    fit_law,
    reason_not_fittable,
    scale,
)
from tests.analysis.simulate_scaling import CONDITIONS, COVERED, LAW, Condition, coverage, draw, true_gain

NOISELESS = Condition("no noise", noise=1e-7)
HARDEST = [CONDITIONS[i] for i in (1, 4, 6, 7, 9)]  # the others have a part of what these have


def points(condition: Condition, seed: int = 0) -> tuple[list[Point], list[Point]]:
    return draw(condition, np.random.default_rng(seed))


def random() -> np.random.Generator:
    return np.random.default_rng(0)


def gains_of(reference: Sequence[Point], others: Sequence[Sequence[Point]], draws: int) -> list[Gains]:
    generator = random()
    return fit_gains(fit_law(reference, generator, draws), reference, others, generator)


def drawn_with_options(condition: Condition) -> tuple[list[Point], list[list[Point]]]:
    reference, option = points(condition)
    return reference, [option]


def test_a_law_without_noise_is_found() -> None:
    fitted = fit_law(points(NOISELESS)[0], random(), draws=50)
    for name, value in LAW.items():
        assert fitted.estimate(name).mean == pytest.approx(value, rel=1e-3)


def test_a_fit_is_scipys_best_of_many_starts() -> None:
    own, _ = points(CONDITIONS[2])
    n, d = (np.log([getattr(point, key) for point in own]) for key in ("params", "tokens"))
    y = np.array([point.log_loss for point in own])

    def residuals(theta: np.ndarray) -> np.ndarray:
        return np.logaddexp.reduce([theta[0] + 0 * n, theta[1] - theta[3] * n, theta[2] - theta[4] * d]) - y

    tight = {"xtol": 1e-15, "ftol": 1e-15, "gtol": 1e-15, "max_nfev": 5000}
    starts = [(e, a, a, s, s) for e in (0.1, 0.6) for a, s in ((3.0, 0.2), (6.0, 0.4))]
    theirs = min(
        (least_squares(residuals, start, loss="huber", f_scale=HUBER, **tight) for start in starts),
        key=lambda found: found.cost,
    )
    fitted = fit_law(own, random(), draws=50)
    expected = [*np.exp(theirs.x[:3]), *theirs.x[3:]]
    assert [fitted.estimate(name).mean for name in LAW] == pytest.approx(expected, rel=1e-3)


def test_an_interval_is_as_wide_as_that_of_scipys_least_squares() -> None:
    own, _ = points(Condition("small noise", noise=3e-5))  # where Huber's loss is a square, and the law almost linear
    n, d = (np.log([getattr(point, key) for point in own]) for key in ("params", "tokens"))

    def log_law(_: object, e: float, a: float, b: float, alpha: float, beta: float) -> np.ndarray:
        return np.logaddexp.reduce([e + 0 * n, a - alpha * n, b - beta * d])

    start = (math.log(1.7), math.log(400), math.log(410), 0.34, 0.28)
    _, covariance = curve_fit(log_law, np.arange(len(own)), [point.log_loss for point in own], start)
    found = fit_law(own, random(), draws=4000).estimate("alpha")
    half = 2.364 * math.sqrt(covariance[3, 3])  # Student's t of 12 points and 5 coefficients
    assert (found.high - found.low) / 2 == pytest.approx(half, rel=0.1)


def test_an_option_that_is_the_reference_has_a_gain_of_exactly_one() -> None:
    reference, _ = points(CONDITIONS[3])
    (gains,) = gains_of(reference, [reference], draws=50)
    assert [gain.alone.mean for gain in gains.every] == pytest.approx([1.0] * 12, abs=1e-6)
    assert gains.growth.mean == pytest.approx(1.0, abs=1e-6)
    assert gains.trend == "holds"


def test_a_gain_and_its_growth_are_found() -> None:
    condition = replace(NOISELESS, gain=1.4, growth=1.2)
    reference, option = points(condition)
    (gains,) = gains_of(reference, [option], draws=50)
    truth = [true_gain(condition, gain.point.params, gain.point.tokens) for gain in gains.every]
    assert [gain.alone.mean for gain in gains.every] == pytest.approx(truth, rel=0.01)
    assert [gain.line.mean for gain in gains.every] == pytest.approx(truth, rel=0.01)
    assert (gains.growth.mean, gains.trend) == (pytest.approx(1.2, rel=0.01), "grows")


def test_the_compute_that_an_option_needs_beyond_the_reference_lowers_its_gain() -> None:
    condition = replace(NOISELESS, gain=1.4)
    reference, option = points(condition)
    dear = [replace(point, flops=2 * point.flops) for point in option]  # per token, as a longer window needs
    (gains,) = gains_of(reference, [dear], draws=50)
    for found in (found for gain in gains.every for found in (gain.alone, gain.line)):
        assert found.mean == pytest.approx(1.4 / 2, rel=0.01)
        assert found.low < 1.4 / 2 < found.high


def test_a_gain_is_given_only_where_the_reference_reached_the_loss() -> None:
    better, worse = (replace(NOISELESS, gain=gain) for gain in (1.4, 0.7))
    for condition, outside in ((better, "6.4e+07"), (worse, "1e+06")):
        (gains,) = gains_of(points(condition)[0], [points(condition)[1]], draws=20)
        assert {gain.point.size for gain in gains.every if not gain.is_reached} == {outside}


@pytest.mark.parametrize(("noise", "growth", "trend"), [(1e-4, 0.8, "shrinks"), (1e-4, 1.0, "holds"), (0.05, 1.0, "")])
def test_a_trend_is_named_only_where_its_interval_allows_it(noise: float, growth: float, trend: str) -> None:
    reference, option = points(Condition("", noise=noise, growth=growth))
    assert gains_of(reference, [option], draws=200)[0].trend == trend


@pytest.mark.parametrize("growth", [1.0, 1.2])
def test_no_trend_is_named_where_exponents_change_and_gains_leave_the_line(growth: float) -> None:
    broken = Condition("", noise=5e-4, growth=growth, breaks=16e6, late_alpha=0.44)
    straight = replace(broken, breaks=math.inf)
    of_broken, of_straight = (gains_of(*drawn_with_options(one), draws=200)[0] for one in (broken, straight))
    assert of_broken.lack_of_fit < 0.01
    assert of_broken.trend == ""
    assert of_straight.lack_of_fit > 0.05
    assert of_straight.trend == ("grows" if growth > 1 else "holds")


def test_single_seeds_say_nothing_about_the_line_and_name_a_trend() -> None:
    (gains,) = gains_of(*drawn_with_options(Condition("", noise=1e-4, growth=1.2, seeds=1)), draws=200)
    assert math.isnan(gains.lack_of_fit)
    assert gains.trend == "grows"


@pytest.mark.parametrize("fall", [0.5, 1.0, 2.0])
def test_gains_on_a_line_fail_its_test_in_one_of_twenty_studies(fall: float) -> None:
    generator = random()
    size = np.repeat(np.arange(4.0), 3)
    log_compute = 2.8 * size + np.tile((0.0, 0.7, 1.4), 4)
    line = 0.3 + 0.1 * log_compute
    p = [_lack_of_fit(line + fall**-size * generator.normal(size=(3, 12)), log_compute, size) for _ in range(1000)]
    assert 0.03 < np.mean(np.array(p) < 0.05) < 0.08
    assert 0.42 < np.mean(np.array(p) < 0.5) < 0.58


def test_the_test_of_the_line_is_the_f_test_of_nested_regressions() -> None:
    size, cell = np.repeat(np.arange(4), 3), np.arange(12)
    log_compute = np.repeat([0.0, 2.7, 5.6, 8.3], 3)
    log_gains = random().normal(size=12) + np.array([[-1.0], [1.0]])  # noise is equal, of all sizes
    line = np.stack([np.ones(12), log_compute], axis=1)
    regressors = line, np.eye(4)[size], np.eye(12)[cell]
    of_line, of_sizes, of_cells = (
        float(np.linalg.lstsq(np.vstack([x, x]), log_gains.ravel(), rcond=None)[1][0]) for x in regressors
    )
    expected = stats.f.sf((of_line - of_sizes) / 2 / (of_cells / 12), 2, 12)
    assert _lack_of_fit(log_gains, log_compute, size.astype(float)) == pytest.approx(expected)


def test_where_noise_falls_with_size_intervals_of_small_models_are_the_wider_ones() -> None:
    (gains,) = gains_of(*drawn_with_options(Condition("", falling=2.0)), draws=500)
    for part in ("alone", "line"):
        found = [getattr(gain, part) for gain in gains.every]
        widths = [math.log(one.high / one.low) for one in found]
        assert np.mean(widths[:3]) > 2 * np.mean(widths[-3:])


@pytest.mark.slow
def test_intervals_of_several_options_hold_together() -> None:
    reference, option = points(CONDITIONS[0])
    (alone,) = gains_of(reference, [option], draws=500)
    first, second = gains_of(reference, [option, option], draws=500)
    assert first.growth.mean == pytest.approx(second.growth.mean) == pytest.approx(alone.growth.mean, rel=1e-2)
    assert first.growth.high - first.growth.low > 1.05 * (alone.growth.high - alone.growth.low)


def test_a_point_without_common_seeds_does_not_count() -> None:
    reference, option = points(CONDITIONS[0])
    apart = [replace(option[0], losses={9: 3.0}), *option[1:]]
    (gains,) = gains_of(reference, [apart], draws=20)
    assert [gain.point for gain in gains.every] == option[1:]


def test_fewer_than_four_sizes_by_three_budgets_are_no_fit() -> None:
    reference, option = points(CONDITIONS[0])
    assert reason_not_fittable(reference) == ""
    for few in (reference[:9], [point for point in reference if point.budget < 20], reference[1:]):
        assert reason_not_fittable(few).endswith("where a law needs 4 by 3")
    found = scale({"relu": reference, "swiglu": option[:4]})
    assert found == Scaling(found.options, "swiglu has 4 points of 2 sizes and 3 budgets, where a law needs 4 by 3")
    assert all(option.law is None and option.gains is None for option in found.options)


@pytest.mark.slow
def test_an_option_that_lacks_a_point_hides_no_law_of_the_others() -> None:
    reference, option = points(CONDITIONS[0])
    whole = scale({"relu": reference, "swiglu": option})
    found = scale({"relu": reference, "gelu": option[1:], "swiglu": option})
    assert found.not_fittable == ""
    assert [bool(one.law) for one in found.options] == [True, False, True]
    assert found.options[1].not_fittable == "11 points of 4 sizes and 3 budgets, where a law needs 4 by 3"
    assert repr(found.options[2].gains) == repr(whole.options[1].gains), (
        "what cannot be fitted is no part of the family"
    )


@pytest.mark.process
@pytest.mark.matrix
@pytest.mark.parametrize("condition", HARDEST, ids=[condition.name for condition in HARDEST])
def test_intervals_hold_the_truth_about_as_often_as_they_say(condition: Condition) -> None:
    found = coverage(condition, studies=40, draws=200)
    assert all(found[name] >= 0.85 for name in COVERED), found  # less in 1 of 250 times, at 95%
