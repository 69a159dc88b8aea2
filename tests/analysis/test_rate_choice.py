"""The learning rate that tuning runs choose."""

import math

import numpy as np
import pytest

from llama_lab.analysis.rate_choice import chosen_rate, fitted_optimum, rate_beyond, rates_between, with_collapsed
from tests.analysis.simulate_rates import CONDITIONS, ladder


def losses_at(*rates: float, best: float, curvature: float = 0.2) -> dict[float, float]:
    return {rate: 3 + curvature * math.log(rate / best) ** 2 for rate in rates}


@pytest.mark.parametrize("best", [2.1e-3, 3e-3, 4.9e-3])
def test_the_rate_is_the_optimum_of_a_parabola_whatever_the_distances(best: float) -> None:
    rates = (1e-3, 1.732e-3, 3e-3, 5.2e-3, 9e-3)
    assert chosen_rate(losses_at(*rates, best=best)) == pytest.approx(best, rel=1e-3)
    place, curvature = fitted_optimum(losses_at(*rates, best=best)) or (0, 0)
    assert (place, curvature) == pytest.approx((math.log(best), 0.2))


def test_the_parabola_is_that_of_the_best_rate_and_its_neighbours_alone() -> None:
    losses = {1e-3: 9.0, 2e-3: 3.4, 3e-3: 3.1, 5e-3: 3.3, 9e-3: 3.2}
    a, b, _ = np.polyfit(np.log([2e-3, 3e-3, 5e-3]), [3.4, 3.1, 3.3], 2)
    assert chosen_rate(losses) == pytest.approx(math.exp(-b / (2 * a)), rel=1e-3)


@pytest.mark.parametrize(
    "losses",
    [
        {1e-3: 3.0, 3e-3: 3.2, 9e-3: 3.4},
        {1e-3: 3.2, 3e-3: 3.0, 9e-3: math.inf},
        {1e-3: math.inf, 3e-3: 3.0, 9e-3: 3.4},
        {1e-3: 3.0, 3e-3: 3.0, 9e-3: 3.0},
        {1e-3: math.inf, 3e-3: math.inf, 9e-3: math.inf},
    ],
    ids=["an end", "diverged above", "diverged below", "all equal", "all diverged"],
)
def test_without_a_parabola_the_best_rate_is_judged(losses: dict[float, float]) -> None:
    assert fitted_optimum(losses) is None
    assert chosen_rate(losses) == min(losses, key=lambda rate: (losses[rate], rate))


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ({1e-3: 3.2, 3e-3: 3.0, 9e-3: 3.1}, [1.732e-3, 5.196e-3]),
        ({1e-3: 3.0, 3e-3: 3.2, 9e-3: 3.4}, [1.732e-3]),
        ({1e-3: 3.2, 3e-3: 3.0, 9e-3: math.inf}, [1.732e-3, 5.196e-3]),
        ({1e-3: math.inf, 3e-3: math.inf}, []),
        ({1e-3: 3.0, 1.0001e-3: 3.1}, []),
    ],
    ids=["inside", "an end", "beside a diverged run", "all diverged", "too near"],
)
def test_halfway_rates_are_tried_beside_the_best(losses: dict[float, float], expected: list[float]) -> None:
    assert rates_between(losses) == expected


@pytest.mark.parametrize(
    ("losses", "entropy", "collapsed"),
    [
        ({1e-3: 3.4, 3e-3: 3.3, 9e-3: 5.6}, 6.3, [9e-3]),
        ({1e-3: 3.4, 3e-3: 3.3, 9e-3: 4.7}, 6.3, []),
        ({1e-3: 3.4, 3e-3: 3.3, 9e-3: 6.9, 2.7e-2: math.inf}, 6.3, [9e-3, 2.7e-2]),
        ({1e-3: 5.6, 3e-3: 5.7, 9e-3: 5.8}, 6.3, []),
        ({1e-3: 6.2, 3e-3: 6.26, 9e-3: 6.4}, 6.3, []),
        ({1e-3: math.inf, 3e-3: math.inf}, 6.3, [1e-3, 3e-3]),
        ({1e-3: 3.4, 3e-3: 5.6}, None, []),
    ],
    ids=["above", "a slope", "beyond the entropy", "all alike", "nothing learnt", "all diverged", "entropy not known"],
)
def test_rates_that_end_nearer_to_frequencies_than_to_the_best_have_collapsed(
    losses: dict[float, float], entropy: float | None, collapsed: list[float]
) -> None:
    found = with_collapsed(losses, entropy)
    assert [rate for rate, loss in found.items() if math.isinf(loss)] == collapsed
    assert all(found[rate] == losses[rate] for rate in losses if rate not in collapsed)


def test_a_grid_goes_on_at_its_own_ratio() -> None:
    assert rate_beyond({1e-3: 3.2, 3e-3: 3.0}) == 9e-3
    assert rate_beyond({1e-3: 3.0, 3e-3: 3.2}) == 3.333e-4
    assert rate_beyond({1e-3: 3.2, 3e-3: 3.0, 9e-3: 3.1}) is None


@pytest.mark.parametrize(("index", "most"), [(2, 0.3), (3, 0.15), (4, 0.15)])
def test_noisy_tuning_runs_miss_the_optimum_by_little_of_a_runs_noise(index: int, most: float) -> None:
    random = np.random.default_rng(1)
    drawn = [ladder(CONDITIONS[index], random, 3) for _ in range(60)]
    assert np.mean([excess for excess, _ in drawn]) < most
    assert np.mean([runs for _, runs in drawn]) < 6
