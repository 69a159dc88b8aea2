"""Tokens per second is of training alone, whatever else takes time; MFU divides it by a dense peak we know."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from llama_lab.devices.hardware import Hardware
from llama_lab.devices.performance import Speed, Stopwatch, peak_flops
from llama_lab.model import Cost
from llama_lab.training.module import LanguageModel
from llama_lab.training.monitor import SLOW_STEPS, Monitor
from llama_lab.util.display import Display
from tests.training.tiny import Pieces, logged, pieces, planned

COST = Cost(32, 1, 1, 1, 1, 2e9, 2e9, 6e9, 8, 256, 0)
COMPILING, STEP, EVALUATION, CHECKPOINT = 100.0, 2.0, 1000.0, 10_000.0  # seconds, by the fake clock


class Clock:
    """A clock that moves when told."""

    def __init__(self) -> None:
        self.now = 12345.0

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        self.now += seconds


# Stopwatch and speed


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 10**6)), max_size=20))
def test_the_stopwatch_counts_all_seconds_but_those_inside_paused(waits: list[tuple[bool, int]]) -> None:
    clock = Clock()
    watch = Stopwatch(clock)
    watch.start(5.0)
    for paused, seconds in waits:
        if paused:
            with watch.paused():
                clock.wait(seconds)
        else:
            clock.wait(seconds)
    assert watch.seconds == 5 + sum(seconds for paused, seconds in waits if not paused)


def test_a_pause_during_a_stop_does_not_set_the_stopwatch_going() -> None:
    clock = Clock()
    watch = Stopwatch(clock)
    watch.start()
    watch.stop()
    with watch.paused():
        clock.wait(1)
    clock.wait(1)
    assert watch.seconds == 0


def test_speed_is_known_after_two_marks_of_the_last_interval_and_overall() -> None:
    speed = Speed()
    assert (speed.interval, speed.overall) == (None, None)
    speed.mark(1000, 50.0)
    assert (speed.interval, speed.overall) == (None, None)
    speed.mark(1600, 52.0)
    assert (speed.interval, speed.overall) == (300, 300)
    speed.mark(1800, 54.0)
    assert (speed.interval, speed.overall) == (100, 200)


def test_a_clock_that_stands_still_gives_no_speed() -> None:
    speed = Speed()
    speed.mark(0, 1.0)
    speed.mark(10, 1.0)
    assert (speed.interval, speed.overall) == (None, None)


def test_the_speed_of_a_resumed_run_is_that_of_all_its_sessions_before_its_first_mark_too() -> None:
    first, second, older = (Monitor(planned(), COST, Display(Console(quiet=True), 1, {})) for _ in range(3))
    for mark in ((0, 1.0), (1000, 11.0)):
        first.speed.mark(*mark)
    second.load_state_dict(first.state_dict())
    assert (second.speed.interval, second.speed.overall, second.warm_up_seconds) == (None, 100, None)
    for mark in ((5000, 20.0), (7000, 30.0)):
        second.speed.mark(*mark)
    assert (second.speed.interval, second.speed.overall) == (200, 150)
    older.load_state_dict({"seconds": 11.0})  # of a checkpoint from before speeds were in it
    assert older.speed.overall is None


# Under a Trainer


class Timed(LanguageModel):
    """A model whose every action takes a time of its own by the fake clock."""

    def __init__(self, clock: Clock, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.clock = clock
        self.steps_taken = 0

    def training_step(self, *arguments: Any) -> None:
        self.clock.wait(COMPILING if self.steps_taken < SLOW_STEPS else STEP)
        self.steps_taken += 1
        super().training_step(*arguments)

    def validation_step(self, *arguments: Any) -> None:
        self.clock.wait(EVALUATION)
        super().validation_step(*arguments)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.clock.wait(CHECKPOINT)
        super().on_save_checkpoint(checkpoint)


@pytest.fixture(scope="module")
def timed(tiny: list[str], tmp_path_factory: pytest.TempPathFactory) -> tuple[Pieces, Pieces]:
    """A run of 30 steps of 256 tokens, and the same trained on to 42."""
    runs = tmp_path_factory.mktemp("runs")
    settings = [*tiny, f"runs_dir={runs}", "train.log_every=2", "train.checkpoint_every=4"]

    def fit(*more: str) -> Pieces:
        clock = Clock()
        parts = pieces(*settings, *more, stopwatch=Stopwatch(clock), kind=Timed, clock=clock)
        assert parts.fit() == "done"
        parts.run.folder.write_status("done")
        return parts

    first = fit(f"train.tokens={30 * 256}", "train.evaluations=4")  # 30 / 4: the last evaluation comes after the loop
    return first, fit(f"train.tokens={42 * 256}", "train.evaluations=2", f"resume='{runs}/name/arm/seed=1'")


def test_speed_and_seconds_are_of_training_alone_in_a_resumed_run_too(
    timed: tuple[Pieces, Pieces],
) -> None:
    for parts in timed:
        assert parts.monitor.speed.overall == 256 / STEP
    steps = 30 + 12 - 2 * SLOW_STEPS
    assert timed[1].monitor.speed.measured == (steps * 256, steps * STEP), "of both sessions"
    speeds = logged(timed[1].run.folder.path, "perf/tokens_per_second")
    assert len(speeds) > 6
    assert set(speeds) == {256 / STEP}
    for row in timed[1].rows:
        step = row["step"]
        slow = min(step, SLOW_STEPS) + min(max(step - 30, 0), SLOW_STEPS)
        assert row["seconds"] == slow * COMPILING + (step - slow) * STEP


def test_what_compiling_takes_is_beyond_all_steps_that_a_profile_leaves_out(tiny: list[str], tmp_path: Path) -> None:
    clock = Clock()
    settings = [*tiny, f"runs_dir={tmp_path}", f"train.tokens={20 * 256}"]
    parts = pieces(*settings, stopwatch=Stopwatch(clock), kind=Timed, clock=clock)
    parts.monitor.slow_steps = 8
    assert parts.fit() == "done"
    assert parts.monitor.warm_up_seconds == pytest.approx(SLOW_STEPS * (COMPILING - STEP))


# Model FLOPs utilisation


def test_mfu_is_flops_per_second_and_device_over_the_peak_of_one() -> None:
    run = replace(planned(), hardware=Hardware("gpu", 8, 1, "bf16-mixed", "NVIDIA A100-SXM4-80GB"))
    monitor = Monitor(run, COST, Display(Console(quiet=True), 1, {}))
    metrics = monitor.speed_metrics(80_000.0)
    assert metrics == {
        "perf/tokens_per_second": 80_000,
        "perf/tokens_per_second_per_device": 10_000,
        "perf/mfu": pytest.approx(10_000 * 6e9 / 312e12),
    }


def test_a_device_without_a_known_peak_has_a_speed_but_no_mfu() -> None:
    monitor = Monitor(planned(), COST, Display(Console(quiet=True), 1, {}))
    assert monitor.speed_metrics(80_000.0).keys() == {"perf/tokens_per_second", "perf/tokens_per_second_per_device"}
    assert monitor.speed_metrics(None) == {}


# As torch.cuda.get_device_name tells them; dense bf16 TFLOP/s of NVIDIA's data sheets.
PEAKS = {
    "NVIDIA GB200": 2500,
    "NVIDIA B200": 2250,
    "NVIDIA H200": 989,
    "NVIDIA H200 NVL": 835,
    "NVIDIA GH200 480GB": 989,
    "NVIDIA H100 80GB HBM3": 989,
    "NVIDIA H100 PCIe": 756,
    "NVIDIA H100 NVL": 835,
    "NVIDIA A100-SXM4-80GB": 312,
    "NVIDIA A100-SXM4-40GB": 312,
    "NVIDIA A100 80GB PCIe": 312,
    "NVIDIA A100-PCIE-40GB": 312,
    "NVIDIA A40": 150,
    "NVIDIA A30": 165,
    "NVIDIA A10": 125,
    "NVIDIA A10G": 70,
    "NVIDIA L40S": 362,
    "NVIDIA L40": 181,
    "NVIDIA L4": 121,
}


def test_the_dense_bf16_peaks_of_known_devices() -> None:
    for precision in ("bf16-mixed", "bf16-true"):
        found = {name: peak_flops(name, precision) for name in PEAKS}
        assert found == pytest.approx({name: peak * 1e12 for name, peak in PEAKS.items()}, rel=0.01)


UNKNOWN = ("RTX A4000", "RTX A1000", "A100X", "A800-SXM4-80GB", "H20", "H800", "GeForce RTX 4090", "L400")
SLICES = ("A100-SXM4-40GB MIG 1g.5gb", "H100 80GB HBM3 MIG 3g.40gb")
OTHERS = ("Tesla V100-SXM2-16GB", "Tesla T4", "AMD Instinct MI300X", "cpu", "mps")


@pytest.mark.parametrize("name", [*(f"NVIDIA {name}" for name in (*UNKNOWN, *SLICES)), *OTHERS])
def test_a_device_we_do_not_know_or_a_slice_of_one_has_no_peak(name: str) -> None:
    assert peak_flops(name, "bf16-mixed") is None
    assert peak_flops("NVIDIA H100 80GB HBM3", "32-true") is None
