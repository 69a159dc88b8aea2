"""Real runs through a real Ray, on clusters of this machine that nobody else can reach."""

import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from llama_lab.launching.process import LIFELINE
from tests.conftest import TRAIN, Ran, RunTrain, last_of_each
from tests.launching.conftest import Sweep, mark, status
from tests.launching.tasks import PATIENCE, wait_for
from tests.launching.test_queue import wait_until_dead
from tests.search.searches import PRUNING, pruned
from tests.training.tiny import identical, repeatable, trained_state

pytestmark = [
    pytest.mark.ray,
    pytest.mark.process,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray: pip install 'llama-lab[ray]'"),
]

# A token, or else Ray leaves one in the user's home.
TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0123456789abcdef" * 2}
VARIABLES = {**TOKEN, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}  # and no address but the loopback
ON_CPU = ("trainer=cpu", "hydra/launcher=ray")
LOOPBACK = ("0100007F", "0000000000000000FFFF00000100007F")


@pytest.fixture(scope="module")
def cluster(environment: dict[str, str]) -> Iterator[str]:
    """The address of a cluster with two CPUs, and two GPUs that are only names."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    with TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        log = Path(folder) / "log"
        options = [f"--port={address.partition(':')[2]}", "--node-ip-address=127.0.0.1", f"--temp-dir={folder}"]
        options += ["--include-dashboard=false", "--num-cpus=2", "--num-gpus=2", "--object-store-memory=100000000"]
        with log.open("w") as stream:
            head = subprocess.Popen(
                [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", *options],
                env={**environment, **VARIABLES},
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            wait_until(lambda: "Ray runtime started" in log.read_text())
            yield address
        finally:
            head.terminate()
            try:
                head.wait(20)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(head.pid, signal.SIGKILL)


def wait_until(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.02)


@pytest.fixture
def on_ray(sweep: Sweep, monkeypatch: pytest.MonkeyPatch) -> Sweep:
    """`sweep` over a Ray that is here alone."""
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    return sweep


@pytest.fixture
def start(environment: dict[str, str], tiny: list[str], tmp_path: Path) -> Iterator[Callable[..., "Launcher"]]:
    """Start a command that is to be disturbed: `python *program --multirun *overrides`."""
    started: list[subprocess.Popen[str]] = []

    def launcher(
        *overrides: str,
        program: tuple[str, ...] = ("-m", "tests.launching.tasks", "--multirun"),
        variables: dict[str, str] = VARIABLES,
    ) -> Launcher:
        started.append(
            subprocess.Popen(
                [sys.executable, *program, *last_of_each([*tiny, *ON_CPU, *overrides])],
                cwd=tmp_path,
                env={**environment, **variables, "PYTHONPATH": str(TRAIN.parent)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        )
        return started[-1]

    yield launcher
    for process in started:
        if process.poll() is None:
            process.kill()
            process.communicate()


Launcher = subprocess.Popen[str]


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def processes() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]


def descendants(pid: int) -> set[int]:
    """The processes that come from one, and itself."""
    parents: dict[int, int] = {}
    for each in processes():
        with suppress(OSError):
            parents[each] = parent(each)
    family = {pid}
    while more := {each for each, of in parents.items() if of in family} - family:
        family |= more
    return family


def listening(pids: set[int]) -> set[str]:
    """The addresses at which processes wait for TCP connections, as the kernel writes them."""
    tables = [Path(f"/proc/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    rows = [line.split() for table in tables for line in table]
    addresses = {f"socket:[{row[9]}]": row[1].partition(":")[0] for row in rows if row[3] == "0A"}
    found: set[str] = set()
    for pid in pids:
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                found.add(os.readlink(fd))
    return {addresses[name] for name in found & addresses.keys()}


# Fast tasks on a cluster that is there


def test_two_runs_go_on_at_a_time_on_a_cluster_that_is_there_and_stays(on_ray: Sweep, cluster: str) -> None:
    ran = on_ray(*ON_CPU, f"hydra.launcher.address={cluster}", "train.prompt=meet", "seed=1,2")
    assert (ran.code, ran.err) == (0, ""), "each waits for the other"
    assert f"2 runs on Ray at {cluster}: 2 CPUs, 2 GPUs" in ran.out
    assert len(re.findall(r"a/seed=[12]: begins on cpu of \S+\n", ran.out)) == 2
    assert len(re.findall(r"a/seed=[12]: done, val loss 1\.0000, in \d+ s", ran.out)) == 2
    assert mark(ran, 1)["argv"] == sys.argv, "which environment.json records"
    assert mark(ran, 1)["environment"]["CUDA_VISIBLE_DEVICES"] == ""
    assert mark(ran, 1)["accelerator"] == "cpu"


@pytest.mark.parametrize(("gpus", "visible", "devices"), [("2", {"0,1"}, 2), ("0.5", {"0"}, 1)])
def test_runs_have_the_gpus_that_ray_sets_aside_for_them(
    gpus: str, visible: set[str], devices: int, on_ray: Sweep, cluster: str
) -> None:
    prompt = [] if gpus == "2" else ["train.prompt=meet"]
    launcher = ["hydra/launcher=ray", f"hydra.launcher.address={cluster}", f"hydra.launcher.gpus_per_run={gpus}"]
    ran = on_ray(*launcher, *prompt, "seed=1,2")
    assert (ran.code, ran.err) == (0, "")
    marks = [mark(ran, seed) for seed in (1, 2)]
    assert {each["environment"]["CUDA_VISIBLE_DEVICES"] for each in marks} == visible
    assert [(each["accelerator"], each["devices"]) for each in marks] == [("gpu", devices)] * 2, "the cluster has some"


def test_threads_are_the_cpus_that_a_run_has(on_ray: Sweep, cluster: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    ran = on_ray(*ON_CPU, f"hydra.launcher.address={cluster}", "hydra.launcher.cpus_per_run=2", "seed=1")
    assert mark(ran, 1)["environment"]["OMP_NUM_THREADS"] == "2"


@pytest.mark.parametrize(("crash", "expected"), [("raise", "RuntimeError: fire"), ("kill", "killed by SIGKILL")])
def test_a_crash_is_reported_with_its_last_lines_and_not_tried_again(
    crash: str, expected: str, on_ray: Sweep, cluster: str
) -> None:
    ran = on_ray(*ON_CPU, f"hydra.launcher.address={cluster}", f"train.prompt='odd {crash}'", "seed=1,2")
    assert ran.code == 1
    assert re.search(rf"a/seed=1: failed, .*{expected}; its output is in ", ran.out)
    assert "  the last words" in ran.out or crash == "raise"
    assert ran.out.count("a/seed=1: begins") == 1
    assert status(ran, 2) == "done"


def test_a_search_prunes_its_tasks(run_train: RunTrain, tiny: list[str], cluster: str) -> None:
    ran = run_train(*tiny, *PRUNING, "hydra/launcher=ray", f"hydra.launcher.address={cluster}", **VARIABLES)
    pruned(ran)
    assert "pruned, stopped by the search at step" in ran.out


def test_a_cluster_that_does_not_answer_is_reported_in_one_line(on_ray: Sweep) -> None:
    began = time.monotonic()
    ran = on_ray(*ON_CPU, "hydra.launcher.address=127.0.0.1:1", "seed=1")
    assert ran.code == 2
    assert ran.err.splitlines()[-1].startswith(
        "error: hydra.launcher.address=127.0.0.1:1: nothing answers at 127.0.0.1"
    )
    assert not (ran.cwd / "runs").exists()
    assert time.monotonic() - began < 20


def test_without_ray_the_message_says_how_to_install_it(on_ray: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    ran = on_ray(*ON_CPU, "seed=1")
    assert ran.code == 2
    assert ran.err == "error: hydra/launcher=ray: needs Ray; pip install 'llama-lab[ray]'\n"


# Kills, and real training


def workers(cwd: Path) -> set[int]:
    """The first processes of the runs of a command that works in this folder, wherever Ray has started them."""
    found: dict[int, int] = {}
    for pid in processes():
        with suppress(OSError):
            variables = Path(f"/proc/{pid}/environ").read_bytes()
            if LIFELINE.encode() in variables and Path(f"/proc/{pid}/cwd").readlink() == cwd:
                found[pid] = parent(pid)
    return {pid for pid, of in found.items() if of not in found}


def kill_ray_worker(pid: int) -> None:
    """Kill what has started the process of a run; then that ends, too."""
    os.kill(parent(pid), signal.SIGKILL)
    wait_until_dead([pid])


def test_a_run_whose_ray_worker_dies_is_resumed_so_often_and_is_then_reported(
    start: Callable[..., Launcher], cluster: str, tmp_path: Path
) -> None:
    address = f"hydra.launcher.address={cluster}"
    launcher = start(address, "hydra.launcher.max_retries=1", "train.prompt='sleep 600'", "arm=a", "seed=1")
    for _ in range(2):
        wait_for(tmp_path / "mark1")
        pid = json.loads((tmp_path / "mark1").read_text())["pid"]
        (tmp_path / "mark1").unlink()
        kill_ray_worker(pid)
    shown, _ = launcher.communicate(timeout=PATIENCE)
    assert launcher.returncode == 1
    assert shown.count("a/seed=1: begins on cpu of") == 2
    assert "a/seed=1: failed, WorkerCrashedError: " in shown
    assert "Traceback" not in shown


def test_a_run_whose_ray_worker_dies_resumes_to_the_same_metrics(
    start: Callable[..., Launcher], run_train: RunTrain, tiny: list[str], cluster: str, tmp_path: Path
) -> None:
    longer = ("train.tokens=60000", "train.checkpoint_every=10")
    alone = run_train(*tiny, "arm=a", "seed=1", "trainer=cpu", *longer).run
    launcher = start(
        f"hydra.launcher.address={cluster}", *longer, "arm=a", "seed=1", program=(str(TRAIN), "--multirun")
    )
    run = tmp_path / "runs" / "llama" / "a" / "seed=1"
    wait_until((run / "checkpoints" / "last.ckpt").exists)
    (pid,) = workers(tmp_path)
    kill_ray_worker(pid)
    shown, _ = launcher.communicate(timeout=PATIENCE)
    assert launcher.returncode == 0, shown
    assert shown.count("a/seed=1: begins on cpu of") == 2
    assert len(json.loads((run / "environment.json").read_text())["earlier_sessions"]) == 1
    assert repeatable(run) == repeatable(alone)
    assert identical(trained_state(run), trained_state(alone))


@pytest.mark.parametrize("existing", [True, False])
def test_runs_die_with_a_launcher_that_is_killed(
    existing: bool, start: Callable[..., Launcher], cluster: str, tmp_path: Path
) -> None:
    address = [f"hydra.launcher.address={cluster}"] if existing else ["hydra.launcher.cpus_per_run=0.5"]
    launcher = start(*address, "train.prompt='sleep 600'", "arm=a", "seed=1,2")
    wait_until(lambda: len(workers(tmp_path)) == 2)
    at_work = workers(tmp_path)
    launcher.kill()
    launcher.communicate()
    wait_until_dead(list(at_work))


def test_ctrl_c_twice_ends_at_once(start: Callable[..., Launcher], cluster: str, tmp_path: Path) -> None:
    launcher = start(f"hydra.launcher.address={cluster}", "train.prompt=stubborn", "arm=a", "seed=1")
    wait_for(tmp_path / "mark1")
    pids = workers(tmp_path)
    launcher.send_signal(signal.SIGINT)
    wait_for(tmp_path / "heard")
    assert launcher.poll() is None, "it waits for its run"
    launcher.send_signal(signal.SIGINT)
    shown, _ = launcher.communicate(timeout=PATIENCE)
    assert launcher.returncode == 130, shown
    assert "Traceback" not in shown
    wait_until_dead(list(pids))


def test_a_run_on_two_devices_is_two_processes_inside_one_task(
    run_train: RunTrain, tiny: list[str], cluster: str, finished: Ran
) -> None:
    """Here on the CPU: Lightning starts the second rank from the worker, as it does without Ray."""
    two = ("trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2")
    launcher = ("hydra/launcher=ray", f"hydra.launcher.address={cluster}", "hydra.launcher.cpus_per_run=2")
    ran = run_train("--multirun", *tiny, "arm=a", "seed=1", *two, *launcher, **VARIABLES)
    assert (ran.code, ran.err) == (0, "")
    curves = [[row["val/loss"] for row in repeatable(run) if "val/loss" in row] for run in (ran.run, finished.run)]
    assert curves[0] == pytest.approx(curves[1], rel=1e-3)
    assert trained_state(ran.run)["global_step"] == 78


def test_a_study_on_a_cluster_of_its_own_saves_at_ctrl_c_and_goes_on_to_its_report(
    start: Callable[..., Launcher], run_train: RunTrain, tiny: list[str], tmp_path: Path
) -> None:
    study = (
        "study=ladder",
        "study.learning_rates=null",
        "study.axes=[norm]",
        "study.seeds=[1]",
        "name=climb",
        "train.tokens=60000",
    )
    launcher = start(*study, "hydra.launcher.cpus_per_run=0.5", program=(str(TRAIN),), variables=TOKEN)
    folder = tmp_path / "runs" / "climb"
    runs = [folder / arm / "seed=1" for arm in ("vanilla", "+rmsnorm")]
    wait_until(lambda: all((run / "metrics.csv").exists() for run in runs))
    of_ray = descendants(launcher.pid)
    assert listening(of_ray), "Ray listens"
    assert listening(of_ray) <= set(LOOPBACK)
    os.killpg(launcher.pid, signal.SIGINT)  # Ray's own processes hear it too, as they do in a terminal
    shown, _ = launcher.communicate(timeout=PATIENCE)
    assert launcher.returncode == 130, shown
    assert shown.count("interrupted, stopped by the user at step") == 2, shown
    wait_until_dead(list(of_ray))
    assert not list(Path("/tmp").glob(f"llama-lab-ray-*/session_*_{launcher.pid}"))
    again = run_train(*tiny, *study, *ON_CPU, "hydra.launcher.cpus_per_run=0.5", cwd=tmp_path, **TOKEN)
    assert (again.code, again.err) == (0, "")
    assert "2 runs on Ray on this machine: " in again.out
    assert (folder / "report.html").exists()
    for run in runs:
        assert json.loads((run / "status.json").read_text())["status"] == "done"
        assert len(json.loads((run / "environment.json").read_text())["earlier_sessions"]) == 1
