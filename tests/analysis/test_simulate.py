"""Simulated studies, and what docs/statistics.md promises of them through the command that users use."""

import csv
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from llama_lab.cli import compare_command
from tests.analysis import simulate_added_seeds
from tests.analysis.simulate import ARMS, COLUMNS, CONDITIONS, STEP, simulate
from tests.analysis.synthetic import write_study
from tests.conftest import Ran

NAMES = [f"arm{i}" for i in range(ARMS)]
RUN_SD, SEED_SD = 0.01, 0.05


@pytest.mark.parametrize("index", range(len(CONDITIONS)), ids=[condition.name for condition in CONDITIONS])
def test_every_condition_gives_verdicts(index: int) -> None:
    assert len(simulate(index, 3, 0)) == len(COLUMNS)


def test_reports_that_share_the_level_are_false_less_often_than_those_at_5_percent_each() -> None:
    three_arms = [condition.name for condition in CONDITIONS].index("three arms, equal noise")
    studies = [simulate_added_seeds.simulate(three_arms, draw) for draw in range(60)]
    assert all(study.false_at_5 for study in studies if study.false)
    assert sum(study.false for study in studies) < 3 < sum(study.false_at_5 for study in studies)
    assert all(3 <= study.seeds_per_arm <= 8 for study in studies)
    assert all(found_3_sd >= found_5_sd for found_3_sd, found_5_sd in (study.found_at for study in studies))


def reported(folder: Path, effects: Sequence[float], draw: int, in_process: Callable[..., Ran]) -> list[str]:
    """The steps that the command calls significant, of a study whose runs lie on disk."""
    write_study(folder, dict(zip(NAMES, effects, strict=True)), noise=RUN_SD, seed_noise=SEED_SD, draw=draw)
    assert in_process(compare_command, "llama-lab-compare", str(folder)).code == 0
    with (folder / "summary.csv").open() as file:
        return [row["arm"] for row in csv.DictReader(file) if float(row["to_previous_nats_p"] or 1) < 0.05]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_command_finds_a_planted_step_and_few_others(tmp_path: Path, in_process: Callable[..., Ran]) -> None:
    step = np.where(np.arange(ARMS) < 6, 0.0, STEP * RUN_SD)
    found = [reported(tmp_path / str(draw), step, draw, in_process) for draw in range(6)]
    assert sum(NAMES[6] in steps for steps in found) >= 5
    assert sum(any(step != NAMES[6] for step in steps) for steps in found) <= 2  # more in 1 of 400 times, at 5%
