"""What the queue costs: `QUEUE_SECONDS=20 pytest tests/launching/test_overhead.py` prints it, on a quiet machine."""

import os
import sys
import time

import pytest
from hydra.core.utils import JobReturn

from llama_lab.launching import launch
from llama_lab.launching.engine import Job
from llama_lab.launching.launch import Queue
from llama_lab.launching.local_engine import LocalEngine
from llama_lab.runs.stored import Status
from tests.launching.conftest import ON_CPU, Sweep

SECONDS = float(os.environ.get("QUEUE_SECONDS", "1"))  # of sleep, which stands for training
RUNS, SLOTS = 24 if "QUEUE_SECONDS" in os.environ else 16, 4


@pytest.mark.slow
def test_the_queue_keeps_its_slots_at_work(
    sweep: Sweep, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Measured over the sum of the times of the runs' processes, from start to result, divided by the slots.

    About a second of it is planning the first four. The server that forks the runs is there, from a sweep before. The
    bound is wide, since other processes may hold up the queue.
    """
    times: dict[int, float] = {}
    poll = LocalEngine.poll

    def timed(engine: LocalEngine, job: Job) -> int | None:
        status = poll(engine, job)
        if status is not None and job.index not in times:
            ended = (job.folder / Status.FILE).stat().st_mtime
            times[job.index] = job.seconds - (time.time() - ended)
        return status

    walls: list[float] = []
    work = Queue.work

    def clocked(queue: Queue) -> list[JobReturn]:
        began = time.monotonic()
        results = work(queue)
        walls.append(time.monotonic() - began)
        return results

    monkeypatch.setattr(launch, "program", lambda: [sys.executable, "-m", "tests.launching.tasks"])  # as users' start
    monkeypatch.setattr(LocalEngine, "poll", timed)
    monkeypatch.setattr(Queue, "work", clocked)
    seeds = ",".join(map(str, range(1, RUNS + 1)))
    overrides = [*ON_CPU, f"hydra.launcher.cpu_slots={SLOTS}", f"train.prompt='sleep {SECONDS}'", f"seed={seeds}"]
    assert sweep(*overrides[:-1], "seed=0").code == 0
    times.clear()
    assert sweep(*overrides).code == 0
    _, wall = walls
    total = sum(times.values())
    overhead = wall / (total / SLOTS) - 1
    with capsys.disabled():
        print(f"\n{RUNS} runs of {total / RUNS:.2f} s on {SLOTS} slots: {wall:.2f} s, overhead {overhead:.1%}")
    assert len(times) == RUNS
    assert overhead < 0.5
