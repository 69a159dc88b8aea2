"""The statistics agree with SciPy, and keep their error rates over hundreds of simulated studies."""

import itertools
import math

import numpy as np
import pandas as pd
import pytest
import statsmodels.formula.api as smf
from pyDOE3 import fracfact
from scipy import stats
from statsmodels.stats.multitest import multipletests

from llama_lab.analysis.power import smallest_difference
from llama_lab.analysis.statistics import (
    Effect,
    Estimate,
    PairedDifference,
    estimate,
    factorial_effects,
    first_reach,
    geometric_mean,
    judge,
    paired_difference,
    pareto_front,
    rank_intervals,
    seeds_needed,
)

STUDIES = 500
RANDOM_SEED = 20261121
STEPS = [(i, i - 1) for i in range(1, 8)]  # of a ladder of eight arms


pytestmark = pytest.mark.filterwarnings("error")  # a warning of SciPy or NumPy is an unhandled case


def test_an_estimate_has_the_interval_of_scipys_one_sample_t_test() -> None:
    values = [3.71, 3.64, 3.69, 3.72]
    found, expected = estimate(values), stats.ttest_1samp(values, 0).confidence_interval()
    assert (found.n, found.mean, found.sd) == (4, pytest.approx(np.mean(values)), pytest.approx(np.std(values, ddof=1)))
    assert (found.low, found.high) == (pytest.approx(expected.low), pytest.approx(expected.high))
    assert estimate([2.0, 2.0, 2.0]) == Estimate(3, 2.0, 0.0, 2.0, 2.0)


def test_a_geometric_mean_is_scipys_with_the_interval_of_the_logarithms() -> None:
    values = [900.0, 1000.0, 1600.0]
    found, logs = geometric_mean(values), np.log(values)
    low, high = np.exp(stats.t.interval(0.95, 2, logs.mean(), stats.sem(logs)))
    assert (found.mean, found.sd) == (pytest.approx(stats.gmean(values)), pytest.approx(logs.std(ddof=1)))
    assert (found.low, found.high) == (pytest.approx(low), pytest.approx(high))


def test_one_seed_has_a_mean_and_nothing_else() -> None:
    assert estimate([3.7]).mean == 3.7
    assert all(map(math.isnan, (estimate([3.7]).sd, estimate([3.7]).low, estimate([3.7]).high)))
    pair = paired_difference([3.6], [3.7])
    assert pair.mean == pytest.approx(-0.1)
    assert all(map(math.isnan, (pair.sd, pair.low, pair.high, pair.p)))


def test_a_paired_difference_is_that_of_a_t_test_over_the_differences() -> None:
    values, reference = [3.60, 3.55, 3.72, 3.64], [3.66, 3.60, 3.71, 3.70]
    found = paired_difference(values, reference)
    differences = np.subtract(values, reference)
    t = differences.mean() / (differences.std(ddof=1) / 2)  # the textbook's formula, not SciPy's paired test
    half = stats.t.ppf(0.975, 3) * differences.std(ddof=1) / 2
    assert found.p == pytest.approx(2 * stats.t.sf(abs(t), 3))
    assert (found.low, found.high) == pytest.approx((differences.mean() - half, differences.mean() + half))


def test_differences_that_are_equal_to_rounding_are_not_tested_and_small_real_ones_are() -> None:
    moved = paired_difference([3.1, 3.2, 3.3], [3.0, 3.1, 3.2])  # equal only to rounding
    same = paired_difference([3.1, 3.2], [3.1, 3.2])
    assert (moved.mean, moved.sd) == (pytest.approx(0.1), 0.0)
    assert (same.mean, same.sd) == (0.0, 0.0)
    assert all(math.isnan(x) for found in (moved, same) for x in (found.low, found.high, found.p))

    tiny = paired_difference([3.0 + 1e-9, 3.1 + 2e-9, 3.2 + 3e-9], [3.0, 3.1, 3.2])
    assert tiny.sd == pytest.approx(1e-9, rel=1e-3)
    assert 0 < tiny.p < 0.2


def contrasts(losses: np.ndarray, pairs: list[tuple[int, int]]) -> list[PairedDifference]:
    """Each pair of arms, (arm, reference), over the seeds that both have."""
    samples = [(losses[arm] - losses[reference]) for arm, reference in pairs]
    signs = np.array([np.eye(len(losses))[arm] - np.eye(len(losses))[reference] for arm, reference in pairs])
    return judge([values[~np.isnan(values)] for values in samples], signs @ signs.T / 2)


def test_a_contrast_rests_on_its_own_values_however_noisy_others_are() -> None:
    """A regression test: noise of one arm entered contrasts between others through the effects of seeds."""
    losses = simulated(0.0, arms=8, seeds=5)[0]
    noisy = losses.copy()
    noisy[3] += np.random.default_rng(0).normal(0, 0.1, 5)
    before, after = (contrasts(one, STEPS) for one in (losses, noisy))
    widths = [late.high - late.low for late in after]
    for i in (0, 1, 4, 5, 6):
        assert after[i].mean == before[i].mean
        assert widths[i] < 2 * (before[i].high - before[i].low)
    assert min(widths[2:4]) > 3 * max(widths[:2] + widths[4:])


def test_with_many_seeds_each_contrast_is_judged_by_its_paired_t_test_at_bonferronis_level() -> None:
    losses, pairs = simulated(0.0, arms=5, seeds=400)[0], [(i, 0) for i in range(1, 5)]
    for (arm, base), found in zip(pairs, contrasts(losses + 0.0007 * np.arange(5)[:, None], pairs), strict=True):
        sample = losses[arm] - losses[base] + 0.0007 * arm
        assert found.high - found.mean == pytest.approx(stats.t.isf(0.05 / 8, 399) * sample.std(ddof=1) / 20, rel=0.05)
        assert found.p == pytest.approx(min(1, 4 * stats.ttest_1samp(sample, 0).pvalue), rel=0.35, abs=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("noisy", "times", "studies", "most"),
    [([3], 1e6, 100, 0.1), ([0, 1, 2, 3], 10.0, STUDIES, 0.07)],  # the second is a regression test: 13% did
)
def test_arms_that_are_much_noisier_are_no_finding(noisy: list[int], times: float, studies: int, most: float) -> None:
    drawn = np.random.default_rng(RANDOM_SEED).standard_normal((studies, 8, 3))
    drawn[:, noisy] *= times
    assert np.mean([min(c.p for c in contrasts(losses, STEPS)) < 0.05 for losses in drawn]) <= most


def test_an_interval_excludes_zero_exactly_where_p_is_below_5_percent() -> None:
    verdicts = set()
    for losses in simulated(0.004, arms=5)[:100]:
        for found in contrasts(losses, STEPS[:4]):
            verdicts.add(found.p < 0.05)
            assert (found.p < 0.05) == (found.low > 0 or found.high < 0)
    assert verdicts == {True, False}


def test_a_missing_run_leaves_its_arm_to_be_judged_over_the_other_seeds() -> None:
    losses = simulated(0.0, arms=5, seeds=4)[1]
    losses[2, 1] = np.nan
    found = contrasts(losses, STEPS[:4])
    pair = np.delete(losses[2] - losses[1], 1)
    assert found[1].mean == pytest.approx(pair.mean())
    assert all(math.isfinite(c.p) for c in found)


@pytest.mark.parametrize(
    ("mean", "error", "df", "n", "family"),
    [(1.0, 0.5, 4.0, 3, 7), (0.005782201944428689, 0.0032430329795623395, 7.699133725394837, 5, 5)],
)
def test_the_needed_seeds_have_80_percent_power(mean: float, error: float, df: float, n: int, family: int) -> None:
    """The second is a regression test: 2,518 seeds were said to be needed, of which 21 are enough."""
    reach = error * stats.t.ppf(0.9, df)
    needed = seeds_needed(PairedDifference(n, mean, error=error, df=df), family)
    for effect, seeds in zip((mean, mean - reach), needed, strict=True):
        powers = []
        for k in (seeds - 1, seeds):
            dfs = (k - 1) * df / (n - 1)
            t = stats.t.ppf(1 - 0.05 / family / 2, dfs)
            powers.append(stats.nct.sf(t, dfs, effect / (error * math.sqrt(n)) * math.sqrt(k)))
        assert powers[1] >= 0.8
        assert seeds > n
        assert seeds == n + 1 or powers[0] < 0.8


def test_an_effect_that_may_be_zero_needs_seeds_without_an_upper_end() -> None:
    fewest, most = seeds_needed(PairedDifference(3, 0.1, error=0.4, df=4.0), family=1)
    assert fewest is not None
    assert most is None
    assert seeds_needed(PairedDifference(3, 0.0, error=0.4, df=4.0), 1)[1] is None


@pytest.mark.parametrize("effect", [3.0, 20.0])
def test_for_large_effects_simulated_studies_agree(effect: float) -> None:
    """The noncentral t of other libraries is nan for many of these."""
    contrast = PairedDifference(
        2, effect, error=1 / math.sqrt(2), df=1.0
    )  # of two pairs with a standard deviation of 1
    reach = contrast.error * stats.t.ppf(0.9, 1)
    draw = np.random.default_rng(0)
    for needed, true in zip(seeds_needed(contrast, family=7), (effect, effect - reach), strict=True):
        assert needed is not None

        def power(n: int, true: float = true) -> float:
            differences = draw.normal(true, 1.0, (20_000, n))
            return float(np.mean(stats.ttest_1samp(differences, 0.0, axis=1).pvalue < 0.05 / 7))

        assert power(needed) >= 0.79
        assert needed == 3 or power(needed - 1) < 0.81


def simulated(effect: float, arms: int = 2, seeds: int = 3, noise: float = 0.005) -> np.ndarray:
    """Final losses of STUDIES studies, (STUDIES, arms, seeds); `effect` on all but the first arm."""
    random = np.random.default_rng(RANDOM_SEED)
    shared = 0.05 * random.standard_normal((STUDIES, 1, seeds))
    losses = 3.7 + shared + noise * random.standard_normal((STUDIES, arms, seeds))
    losses[:, 1:] += effect
    return losses


@pytest.mark.slow
@pytest.mark.parametrize(("arms", "seeds"), [(8, 3), (8, 5)])
def test_of_ladders_without_a_step_at_most_7_percent_report_one(arms: int, seeds: int) -> None:
    found = [min(c.p for c in contrasts(losses, STEPS[: arms - 1])) for losses in simulated(0.0, arms, seeds)]
    assert np.mean(np.array(found) < 0.05) <= 0.07


@pytest.mark.slow
def test_a_step_of_five_run_sds_is_found_in_three_of_four_ladders_of_seven_steps_and_three_seeds() -> None:
    losses = simulated(0.0, arms=8)
    losses[:, 4:] += 5 * 0.005
    assert np.mean([contrasts(study, STEPS)[3].p < 0.05 for study in losses]) >= 0.75


def test_the_ranks_of_an_arm_are_those_that_the_significant_pairs_allow() -> None:
    assert rank_intervals("abcd", []) == dict.fromkeys("abcd", (1, 4))
    found = rank_intervals("abcd", [("b", "a"), ("b", "c"), ("b", "d"), ("c", "a")])
    assert found == {"b": (1, 1), "c": (2, 3), "d": (2, 4), "a": (3, 4)}


@pytest.mark.slow
@pytest.mark.parametrize("spread", [0.0, 1.0], ids=lambda spread: f"{spread} run-sd apart")
def test_the_intervals_of_all_ranks_hold_together_in_93_percent_of_studies(spread: float) -> None:
    """Of tied arms, each may have any of the ranks that they share; then every interval must have all of them."""
    arms = 6
    means = spread * 0.005 * np.arange(arms)
    names = "abcdef"
    hold = []
    for losses in simulated(0.0, arms) + means[:, None]:
        pairs = list(itertools.combinations(range(arms), 2))
        tested = contrasts(losses, pairs)
        clear = [(pair, c.mean < 0) for pair, c in zip(pairs, tested, strict=True) if c.p < 0.05]
        found = rank_intervals(names, [tuple(names[i] for i in (pair if less else pair[::-1])) for pair, less in clear])
        true = {name: (1, arms) if spread == 0 else (i + 1, i + 1) for i, name in enumerate(names)}
        hold.append(all(found[name][0] <= true[name][0] and true[name][1] <= found[name][1] for name in names))
    assert np.mean(hold) >= 0.93


@pytest.mark.parametrize(("arms", "seeds"), [(2, 3), (5, 5)])
def test_the_smallest_difference_is_found_in_80_percent_of_studies(arms: int, seeds: int) -> None:
    losses = simulated(0.0, arms, seeds)[:200]
    losses[:, 1] += 0.005 * smallest_difference(arms, seeds, arms - 1)
    pairs = [(i, 0) for i in range(1, arms)]
    assert 0.72 <= np.mean([contrasts(study, pairs)[0].p < 0.05 for study in losses]) <= 0.93


@pytest.mark.parametrize("share", [0.125, 0.375])
def test_a_share_of_the_level_gives_the_intervals_of_tests_at_that_level(share: float) -> None:
    sample = np.random.default_rng(0).normal(0.5, 1, 400)
    expected = stats.ttest_1samp(sample, 0)
    (alone,) = judge([sample[:4]], np.eye(1), [share])
    few = stats.ttest_1samp(sample[:4], 0)
    assert (alone.low, alone.high) == pytest.approx([*few.confidence_interval(1 - 0.05 * share)])
    assert alone.p == pytest.approx(min(1, few.pvalue / share))
    one, other = judge([sample, -sample + 1], np.eye(2), [share, 1.0])
    for found, level in ((one, share), (other, 1.0)):
        half = stats.t.isf(0.05 * level / 4, 399) * sample.std(ddof=1) / 20
        assert found.high - found.mean == pytest.approx(half, rel=0.05)
    assert one.plain_p == pytest.approx(min(1, 2 * expected.pvalue / share))


def test_at_any_share_of_the_level_an_interval_excludes_zero_where_p_is_below_5_percent() -> None:
    random, hits = np.random.default_rng(1), 0
    for share in (0.125, 0.375, 1.0):
        for _ in range(30):
            samples = random.normal(random.uniform(0, 12, (6, 1)), 1, (6, 4))
            for found in judge([*samples], np.eye(6), [share] * 6):
                assert (not found.low <= 0 <= found.high) == (found.p < 0.05)
                hits += found.significant
    assert 100 < hits < 440


AXES = ("norm", "block", "position", "ffn")


def planted_loss(run: dict[str, int], seed: int) -> float:
    """Main effects of -0.1 and +0.04, an interaction of 0.03, and a block of seeds; see Effect for what they mean."""
    return 3.7 + 0.05 * seed - 0.05 * run["norm"] + 0.02 * run["block"] + 0.015 * run["norm"] * run["block"]


def effects_of(design: list[tuple[int, ...]], noise: float = 0.0, seeds: tuple[int, ...] = (1, 2, 3)) -> list[Effect]:
    """The estimated effects if `planted_loss` is the truth."""
    random = np.random.default_rng(RANDOM_SEED)
    runs = [(dict(zip(AXES, levels, strict=False)), seed) for levels in design for seed in seeds]
    losses = [planted_loss(run, seed) + noise * random.standard_normal() for run, seed in runs]
    return two_level_effects([run for run, _ in runs], [seed for _, seed in runs], losses)


def two_level_effects(runs: list[dict[str, int]], seeds: list[int], losses: list[float]) -> list[Effect]:
    """Of runs whose levels are -1 and 1."""
    return factorial_effects(dict.fromkeys(runs[0], (-1, 1)), runs, seeds, losses)


def test_a_fraction_reports_inseparable_effects_once_main_effects_first_with_their_aliases() -> None:
    half = [tuple(map(int, row)) for row in fracfact("a b c abc")]
    effects = {effect.axes: effect for effect in effects_of(half, noise=0.002)}
    assert effects[("norm",)].change.mean == pytest.approx(-0.1, abs=0.004)
    assert effects[("norm",)].aliases == ()
    assert effects["norm", "block"].change.mean == pytest.approx(0.03, abs=0.004)
    assert effects["norm", "block"].aliases == (("position", "ffn"),)
    assert len(effects) == 4 + 3
    third = [tuple(map(int, row)) for row in fracfact("a b ab")]
    assert {effect.axes: effect.aliases for effect in effects_of(third, noise=0.002)} == {
        ("norm",): (("block", "position"),),
        ("block",): (("norm", "position"),),
        ("position",): (("norm", "block"),),
    }


OPTIONS = {"ffn": ("relu", "swiglu", "geglu"), "norm": ("layernorm", "rmsnorm"), "block": ("prenorm", "postnorm")}
CELLS = [dict(zip(OPTIONS, cell, strict=True)) for cell in itertools.product(*OPTIONS.values())]


@pytest.mark.parametrize("missing", [[], [4, 20]], ids=["complete", "two runs lost"])
def test_effects_of_many_options_are_contrasts_of_least_squares_means(missing: list[int]) -> None:
    """Of statsmodels' fit within each seed: its means of all combinations, averaged over the other axes."""
    random = np.random.default_rng(RANDOM_SEED)
    table = pd.DataFrame([run | {"seed": seed, "loss": random.normal(3.7, 0.1)} for seed in (1, 2, 3) for run in CELLS])
    table = table.drop(index=missing)
    runs = table[list(OPTIONS)].to_dict("records")
    effects = factorial_effects(OPTIONS, runs, table["seed"].tolist(), table["loss"].tolist())
    expected: dict[tuple[str, ...], list[float]] = {}
    for _, own in table.groupby("seed"):
        fit = smf.ols("loss ~ (C(ffn, Sum) + C(norm, Sum) + C(block, Sum)) ** 2", own).fit()
        grid = pd.DataFrame(CELLS)
        grid["mean"] = fit.predict(grid)
        for axis, (first, *others) in OPTIONS.items():
            means = grid.groupby(axis)["mean"].mean()
            for option in others:
                expected.setdefault((f"{axis}={option}",), []).append(means[option] - means[first])
        for one, other in itertools.combinations(OPTIONS, 2):
            cells = grid.groupby([one, other])["mean"].mean().unstack(other)
            for a, b in itertools.product(OPTIONS[one][1:], OPTIONS[other][1:]):
                base, against = OPTIONS[one][0], OPTIONS[other][0]
                twice = cells[b][a] - cells[b][base] - cells[against][a] + cells[against][base]
                expected.setdefault((f"{one}={a}", f"{other}={b}"), []).append(twice / 2)
    assert {effect.axes for effect in effects} == set(expected)
    for effect in effects:
        assert effect.change.mean == pytest.approx(np.mean(expected[effect.axes]))
        assert effect.change.sd == pytest.approx(np.std(expected[effect.axes], ddof=1))
        assert effect.change.low < effect.change.mean < effect.change.high


@pytest.mark.slow
@pytest.mark.parametrize("sd", [0.0, 0.005], ids=["of runs alike", "of seeds too"])
def test_of_factorials_of_many_options_without_an_effect_at_most_7_percent_report_one(sd: float) -> None:
    random = np.random.default_rng(RANDOM_SEED)
    runs = [(run, seed) for run in CELLS for seed in (0, 1, 2)]
    reported = []
    for _ in range(STUDIES):
        own = {(seed, option): sd * random.standard_normal() for seed in range(3) for option in OPTIONS["ffn"]}
        losses = [own[seed, run["ffn"]] + 0.01 * random.standard_normal() for run, seed in runs]
        effects = factorial_effects(OPTIONS, [run for run, _ in runs], [seed for _, seed in runs], losses)
        reported.append(any(effect.change.significant for effect in effects))
    assert np.mean(reported) <= 0.07


def test_a_seed_whose_runs_cannot_estimate_an_effect_is_left_out_of_it() -> None:
    design = list(itertools.product((-1, 1), repeat=2))
    runs = [(dict(zip(AXES, levels, strict=False)), seed) for levels in design for seed in (1, 2, 3)]
    losses = [planted_loss(run, seed) + 0.001 * seed * run["norm"] for run, seed in runs]
    kept = [i for i, (run, seed) in enumerate(runs) if seed != 3 or run != {"norm": 1, "block": 1}]
    effects = two_level_effects([runs[i][0] for i in kept], [runs[i][1] for i in kept], [losses[i] for i in kept])
    assert effects[0].axes == ("norm",)
    assert effects[0].change.mean == pytest.approx(-0.1 + 2 * 0.0015)  # of seeds 1 and 2


def test_what_never_varies_has_no_effect_and_a_missing_arm_makes_aliases() -> None:
    effects = {e.axes: e.aliases for e in effects_of([(-1, -1, 1), (-1, 1, 1), (1, -1, 1)])}
    assert effects == {
        ("norm",): (("norm", "block"), ("norm", "position")),
        ("block",): (("norm", "block"), ("block", "position")),
    }


def test_the_front_holds_what_nothing_beats_and_ties_stay() -> None:
    assert pareto_front([1, 2, 2, 3, 3], [4, 3, 3, 5, 2]) == [True, True, True, False, True]
    assert pareto_front([1, 1], [2, 1]) == [False, True]
    assert pareto_front([], []) == []


def test_a_target_is_reached_where_the_line_between_two_points_first_crosses_it() -> None:
    assert first_reach([0, 10, 20, 30], [5, 4, 6, 3], 4.5) == 5
    assert first_reach([0, 10, 20, 30], [5, 4, 6, 3], 3.5) == pytest.approx(20 + 10 * 2.5 / 3)
    assert first_reach([10, 20], [5, 4], 5.5) == 10
    assert first_reach([10, 20], [5, 4], 4) == 20
    assert first_reach([10, 20], [5, 4], 3.9) is None
    assert first_reach([], [], 1) is None


def test_plain_p_is_that_of_paired_t_tests_with_the_correction_of_holm() -> None:
    draws = np.random.default_rng(0).normal([0.2, 0.0, 1.0, 0.5], 0.3, (5, 4))
    alone = [stats.ttest_1samp(column, 0).pvalue for column in draws.T]
    found = judge([*draws.T], np.eye(4))
    assert [one.plain_p for one in found] == pytest.approx(multipletests(alone, method="holm")[1])
    assert [one.plain_p for one in judge([draws[:, 0]], np.eye(1))] == pytest.approx(alone[:1])
