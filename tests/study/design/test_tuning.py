"""Which rates a study tries and judges at, given what its tuning runs end at."""

import math
import re
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from llama_lab.runs.folder import RunFolder
from llama_lab.study.design.tuning import resolve_rates
from tests.study.planning import planned_study

ENTROPY = 6.0
STUDY = [
    "study=options",
    "study.axis=norm",
    "study.options=[rmsnorm,layernorm]",
    "study.learning_rates=[1e-3,3e-3,9e-3]",
]


def tuned(
    tiny: list[str], monkeypatch: pytest.MonkeyPatch, loss: Callable[[float, int], float], *overrides: str
) -> tuple[dict[int, list[float]], dict[int, float]]:
    """The rates that an arm tries on each tuning seed, and the rate of each judged seed; `loss` of rate and seed."""

    def final_loss(folder: RunFolder) -> float:
        name = re.search(r"-lr=(.+)/seed=(\d+)$", str(folder.path))
        assert name
        return loss(float(name[1]), int(name[2]))

    plan = planned_study(*tiny, "hydra/launcher=basic", *STUDY, *overrides)
    monkeypatch.setattr(RunFolder, "final_loss", property(final_loss))
    monkeypatch.setattr(RunFolder, "environment", SimpleNamespace(unigram_entropy=ENTROPY, precision=None))
    plan, judged = resolve_rates(plan, lambda _: "done")
    arm = plan.arms[0]
    tried: dict[int, list[float]] = {}
    for run in arm.tuning:
        tried.setdefault(run.member.seed, []).append(run.member.learning_rate or 0)
    return tried, {run.member.seed: run.run.cfg.optim.lr for run in judged if run.run.arm == arm.arm.name}


def test_few_tuning_seeds_tune_the_judged_ones_in_turn(tiny: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    best = {7: 2e-3, 8: 4e-3}
    seeds = ["study.seeds=[1,2,3,4,5]", "study.tuning_seeds=[7,8]"]
    tried, judged = tuned(tiny, monkeypatch, lambda rate, seed: 3 + math.log(rate / best[seed]) ** 2, *seeds)
    assert {seed: len(rates) for seed, rates in tried.items()} == {7: 5, 8: 5}
    assert judged == {1: 2e-3, 2: 4e-3, 3: 2e-3, 4: 4e-3, 5: 2e-3}


def test_the_edge_of_a_cliff_is_searched_once_more(tiny: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def loss(rate: float, seed: int) -> float:
        return 5.0 if rate > 4e-3 else 3 + math.log(rate / 4e-3) ** 2 / 10  # of rates above, a model knows frequencies

    tried, judged = tuned(tiny, monkeypatch, loss, "study.seeds=[1]")
    assert tried == {1001: [1e-3, 3e-3, 9e-3, 1.732e-3, 5.196e-3, 2.279e-3, 3.948e-3]}
    assert judged == {1: 3.948e-3}
    tried, judged = tuned(
        tiny, monkeypatch, lambda rate, seed: loss(rate, seed) + 1.2 * (rate < 4e-3), "study.seeds=[1]"
    )
    assert len(tried[1001]) == 5, "it is no cliff"
