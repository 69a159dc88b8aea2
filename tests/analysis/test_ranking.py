"""Ranks by each quantity, worked out by hand or by SciPy, and the guide's words for what the evidence carries."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from llama_lab.analysis.analyse import analyse
from llama_lab.analysis.ranking import rankings
from llama_lab.analysis.result import Quantity, Result
from llama_lab.report.guide import guide
from llama_lab.report.summary import print_table, summary_rows
from llama_lab.report.tables import tables
from llama_lab.runs.study import ArmSpeed, Study, StudySpeed
from llama_lab.util.formatting import UNKNOWN
from tests.analysis.synthetic import plant_end, plant_evaluation, plant_facts, write_study

LOSSES = {"gpt2": 0.0, "bloom": 0.2, "llama": -0.3, "mistral": -0.302}
CACHES = {"gpt2": 8192, "bloom": 8192, "llama": 8192, "mistral": 4096}
NO_CHOICE = "no clear winner"


def speeds(medians: Mapping[str, float], noise: float = 0.01, rounds: int = 5) -> dict[str, ArmSpeed]:
    """Rounds in which the machine slows down by up to half, for all arms alike."""
    random = np.random.default_rng(1)
    load = random.uniform(0.5, 1, rounds)
    drawn = {name: median * load * np.exp(noise * random.standard_normal(rounds)) for name, median in medians.items()}
    return {name: ArmSpeed(own.tolist(), own.tolist(), own.tolist()) for name, own in drawn.items()}


def recipes(
    folder: Path,
    arms: Mapping[str, float] = LOSSES,
    seeds: Sequence[int] = (1, 2, 3),
    measured: Mapping[str, ArmSpeed] | None = None,
    lengths: Sequence[int] = (256, 512, 1024),
) -> Path:
    """A finished study of recipes, with other sizes of cache."""
    study = replace(write_study(folder, arms, seeds, design="recipes", lengths=lengths), compare="all")
    study.save(folder)
    for arm in study.arms:
        for member in arm.members:
            plant_facts(folder / member.folder, **{"kv_cache/bytes": CACHES.get(arm.name, 8192)})
    if measured:
        StudySpeed("cpu", 1, "32-true", 2, "2.13.0+cpu", dict(measured)).save(folder)
    return folder


def read(folder: Path) -> Result:
    """What the report shows."""
    return analyse(Study.load(folder), folder)


def ranks(result: Result, quantity: Quantity) -> dict[str, tuple[int, int] | None]:
    (found,) = (ranking for ranking in result.rankings if ranking.quantity == quantity)
    return {standing.arm: standing.ranks for standing in found.standings}


def advice(result: Result, need: str) -> str:
    """The guide's sentence on a need."""
    (found,) = (sentence for sentence in guide(result) if sentence.startswith(need))
    return found


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """Two recipes of equal loss, one that is fast, and caches of two sizes."""
    measured = speeds({"gpt2": 1000, "bloom": 1002, "llama": 1500, "mistral": 800})
    return read(recipes(tmp_path_factory.mktemp("recipes"), measured=measured))


def test_an_arm_is_ranked_between_those_that_are_significantly_better_and_worse(result: Result) -> None:
    assert ranks(result, "loss") == {"gpt2": (3, 3), "bloom": (4, 4), "llama": (1, 2), "mistral": (1, 2)}
    assert ranks(result, "loss") == result.ranks
    for quantity in ("train", "decode", "prefill"):
        assert ranks(result, quantity) == {"gpt2": (2, 3), "bloom": (2, 3), "llama": (1, 1), "mistral": (4, 4)}
    shared = (2, 4)  # bytes are exact
    assert ranks(result, "cache") == {"gpt2": shared, "bloom": shared, "llama": shared, "mistral": (1, 1)}


def test_the_guide_names_the_best_those_that_are_not_worse_or_the_reason_for_neither(result: Result) -> None:
    quality = advice(result, "Quality")
    assert quality.startswith("Quality: mistral (")
    assert quality.endswith("nats per token), or llama, which is not significantly worse; every other arm is.")
    assert advice(result, "Decoding speed").startswith("Decoding speed: llama, the fastest (")
    assert advice(result, "Decoding speed").endswith(" tokens/s): every other arm is significantly worse.")
    assert advice(result, "KV cache") == "KV cache: mistral, the smallest (4 KiB)."
    assert advice(result, "Training memory") == f"Training memory: {NO_CHOICE}: measured on GPUs only."
    assert advice(result, "Long context").startswith("Long context at 1,024 tokens: mistral (")


def test_two_arms_are_ranked_as_by_a_paired_t_test_of_their_logarithms(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    study = read(recipes(tmp_path, {"one": 0.0, "other": 0.1}))
    decided = []
    for _ in range(20):
        one, other = np.exp(random.normal([0, 0.02], 0.02, (5, 2))).T.tolist()
        measured = {"one": ArmSpeed(one, []), "other": ArmSpeed(other, [])}
        found = rankings(replace(study, speed=StudySpeed("", 1, "", 1, "", measured)))[1]
        p = stats.ttest_rel(np.log(one), np.log(other)).pvalue
        if abs(p - 0.05) > 1e-3:  # the distribution of the maximum is drawn
            assert bool(found.better) == (p < 0.05)
        decided.append(p < 0.05)
        low, high = stats.t.interval(0.95, 4, np.log(one).mean(), stats.sem(np.log(one)))
        value = found.standing("one").value
        assert (value.low, value.high) == pytest.approx((np.exp(low), np.exp(high)))
    assert 2 < sum(decided) < 18


def test_one_seed_and_no_measurement_carry_no_choice(tmp_path: Path) -> None:
    found = read(recipes(tmp_path, seeds=[1], lengths=[256]))
    assert advice(found, "Quality") == f"Quality: {NO_CHOICE}: one seed."
    assert advice(found, "Decoding speed") == f"Decoding speed: {NO_CHOICE}: not measured."
    assert advice(found, "Long context") == f"Long context: {NO_CHOICE}: not evaluated beyond the trained context."
    assert "rankings" in tables(found)
    assert summary_rows(found)[0]["train:rank_from"] is None


def test_arms_that_diverged_or_whose_positions_end_are_named_and_the_others_ranked(tmp_path: Path) -> None:
    folder = recipes(tmp_path)
    plant_end(folder / "bloom/seed=3", "diverged", "nan", 5)
    ended = {"length": 1024, "loss": None, "note": "cannot: learned positions end at 256"}
    for seed in (1, 2, 3):
        plant_evaluation(folder / f"gpt2/seed={seed}", lengths=[{"length": 256, "loss": 3.0}, ended])
    found = read(folder)
    assert ranks(found, "loss") == {"gpt2": (3, 3), "bloom": None, "llama": (1, 2), "mistral": (1, 2)}
    assert advice(found, "Quality").endswith("every other arm is. Not ranked: bloom (diverged in 1 of 3 seeds).")
    assert ranks(found, "longest") == {"gpt2": None, "bloom": None, "llama": (1, 2), "mistral": (1, 2)}
    assert "gpt2 (learned positions end at 256)" in advice(found, "Long context")
    assert tables(found)["rankings"].rows[0][-1] == f"{UNKNOWN}\nlearned positions end at 256"


def test_memory_measured_on_a_gpu_is_ranked_and_equal_rounds_are_not_tested(tmp_path: Path) -> None:
    sizes = dict(zip(LOSSES, (3 << 30, 2 << 30, 1 << 30, 1 << 30), strict=True))
    measured = {name: ArmSpeed([1.0] * 5, [2.0] * 5, memory=[size] * 2) for name, size in sizes.items()}
    found = read(recipes(tmp_path, measured=measured))
    assert ranks(found, "memory") == {"gpt2": (4, 4), "bloom": (3, 3), "llama": (1, 2), "mistral": (1, 2)}
    assert advice(found, "Training memory") == "Training memory: llama and mistral, the least (1 GiB)."
    assert advice(found, "Training speed") == f"Training speed: {NO_CHOICE}: not tested."


def test_the_ranks_fit_a_terminal(
    result: Result, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    print_table(result)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert ["1", "to", "2", "1", "1", "1", "2", "to", "4", "1", "to", "2"] in [line.split() for line in lines]
    assert "Which to choose:" in lines


def test_only_a_study_of_all_pairs_is_ranked(tmp_path: Path) -> None:
    study = write_study(tmp_path, LOSSES, design="recipes")
    found = analyse(study, tmp_path)
    assert (found.rankings, guide(found)) == ((), ())
    assert "rankings" not in tables(found)
