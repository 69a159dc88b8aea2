"""A profile shows five steps of a run, changes nothing that it trains, and counts in no speed."""

import json
from pathlib import Path

import pytest
import torch

from llama_lab.devices.performance import Stopwatch
from llama_lab.training.monitor import SLOW_STEPS
from llama_lab.training.profile import STEPS, TABLE, TRACE
from tests.conftest import Command
from tests.training.tiny import identical, pieces, repeatable, steps_of, trained, trained_state

RUN = ["train.tokens=5120", "train.evaluations=1", "train.log_every=1", "trainer.profile=true"]


def steps_in(trace: Path) -> list[int]:
    """The optimizer steps that a trace shows, counted from 1."""
    names = {event.get("name", "") for event in json.loads(trace.read_text())["traceEvents"]}
    return sorted(int(name.partition("#")[2]) + 1 for name in names if name.startswith("ProfilerStep#"))


@pytest.fixture(scope="module")
def profiled(tiny: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of 20 steps with a profile."""
    return trained(*tiny, *RUN, f"runs_dir={tmp_path_factory.mktemp('profiled')}")


@pytest.mark.slow
def test_the_trace_shows_five_steps_after_the_slow_ones_and_the_table_what_takes_longest(profiled: Path) -> None:
    assert steps_in(profiled / TRACE) == [*range(SLOW_STEPS + 1, SLOW_STEPS + STEPS + 1)] == [4, 5, 6, 7, 8]
    lines = (profiled / TABLE).read_text().splitlines()
    assert len(lines) < 30
    assert any(line.split()[0] in ("aten::mm", "aten::addmm") for line in lines if line.strip())


def test_a_profile_changes_no_weight_and_counts_in_no_speed(profiled: Path, tiny: list[str], tmp_path: Path) -> None:
    plain = trained(*tiny, *RUN[:-1], f"runs_dir={tmp_path}")
    assert not (plain / TRACE).exists()
    assert identical(trained_state(profiled), trained_state(plain))
    assert repeatable(profiled) == repeatable(plain)
    with_speed = steps_of(profiled, "perf/tokens_per_second")
    assert with_speed == [*range(SLOW_STEPS + STEPS + 1, 21)], "the first interval begins with the step after them"


@pytest.mark.slow
def test_writing_it_takes_no_time_of_the_run(tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    export = torch.profiler.profile.export_chrome_trace

    def slowly(self: torch.profiler.profile, path: str) -> None:
        export(self, path)
        now[0] += 1000.0

    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", slowly)
    run = pieces(*tiny, *RUN, f"runs_dir={tmp_path}", stopwatch=Stopwatch(lambda: now[0]))
    assert run.fit() == "done"
    assert now == [1000.0]
    assert run.rows[-1]["seconds"] == 0.0


@pytest.mark.slow
def test_a_run_that_ends_earlier_shows_the_steps_until_then(tiny: list[str], command: Command) -> None:
    ran = command(*tiny, *RUN, "train.tokens=1536", "name=some")
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.splitlines()[-1].startswith("the profile is in runs/some/")
    assert steps_in(ran.run / TRACE) == [4, 5, 6]
    none = command(*tiny, *RUN, "train.tokens=768", "name=none")
    assert none.out.splitlines()[-1] == "no profile: the run had no more than 3 steps left"


@pytest.mark.slow
def test_what_is_measured_is_not_profiled(command: Command) -> None:
    ran = command("measure=runs/ladder", "trainer.profile=true")
    assert (ran.code, ran.err.count("\n")) == (2, 1)
    assert ran.err.startswith("error: trainer.profile=true: ")


@pytest.mark.matrix
def test_a_study_of_profiled_runs_measures_their_speeds_without(tiny: list[str], command: Command) -> None:
    study = ["study=ladder", "study.learning_rates=null", "study.axes=[norm]", "study.seeds=[1]", "name=climb"]
    ran = command(*tiny, *study, *RUN)
    assert (ran.code, ran.err) == (0, "")
    assert (ran.cwd / "runs" / "climb" / "speed.json").exists()
    assert len([*(ran.cwd / "runs").rglob(TRACE)]) == 2
