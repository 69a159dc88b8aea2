"""A real Slurm cluster of two nodes: arrays, requeued and cancelled jobs, launchers that die, and bad input."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
from omegaconf import OmegaConf

from llama_lab.devices.hardware import Hardware
from llama_lab.launching import slurm_engine, slurm_script
from llama_lab.launching.settings import SlurmSettings
from llama_lab.launching.slurm_engine import JobInfo
from llama_lab.runs.stored import Git
from llama_lab.util.errors import ConfigError
from tests.conftest import TRAIN, RunTrain, last_of_each
from tests.launching.conftest import Sweep, mark, status
from tests.launching.tasks import PATIENCE, wait_for
from tests.search.searches import PRUNING, pruned
from tests.training.tiny import identical, repeatable, rows, trained_state

ON_SLURM = ("hydra/launcher=slurm", "hydra.launcher.setup=['export GLOO_SOCKET_IFNAME=lo']")
PRINTS = OmegaConf.create({"study": {"dry_run": True}})
RUN = ("train.tokens=60000", "train.checkpoint_every=50", "arm=a")


@cache
def cluster_is_missing() -> bool:
    try:
        return subprocess.run(["sinfo"], capture_output=True, timeout=10).returncode != 0
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return True


def on_slurm(test: Any) -> Any:
    """A test on the cluster."""
    no_slurm = pytest.mark.skipif(cluster_is_missing(), reason="no Slurm here: sinfo does not answer")
    return pytest.mark.slurm(pytest.mark.process(pytest.mark.slow(no_slurm(test))))


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is one file system here, and a small cluster."""
    monkeypatch.setattr(slurm_engine, "GRACE_SECONDS", 0.5)
    monkeypatch.setattr(slurm_engine, "LOOK_SECONDS", 0.5)


@pytest.fixture(autouse=True)
def no_jobs_stay() -> Iterator[None]:
    """Nothing of a failed test is left in the queue."""
    before = jobs()
    path = os.environ["PATH"]
    yield
    os.environ["PATH"] = path  # which some take away
    for job in jobs().keys() - before.keys():
        slurm_command("scancel", job)


def slurm_command(*command: str) -> str:
    """What a command of Slurm's prints."""
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def jobs() -> dict[str, str]:
    """State of every job in the queue."""
    if cluster_is_missing():
        return {}
    return dict(line.split() for line in slurm_command("squeue", "--me", "-h", "-r", "-o", "%i %T").splitlines())


def until(happened: Any) -> None:
    """Wait for it."""
    end = time.monotonic() + PATIENCE
    while not happened():
        assert time.monotonic() < end, "never"
        time.sleep(0.05)


def restart(job: str) -> None:
    """Have a requeued job begin now, and not after the two minutes that Slurm waits."""
    until(lambda: jobs().get(job) == "PENDING")
    time.sleep(2)  # a node refuses a job that begins in the second in which it was stopped there
    slurm_command("scontrol", "update", f"JobId={job}", "StartTime=now")


class Launcher:
    """A sweep's command as a process. acting: it does not train, see `tests.launching.tasks`."""

    def __init__(self, cwd: Path, environment: dict[str, str], *overrides: str, acting: bool = False) -> None:
        program = ["-m", "tests.launching.tasks"] if acting else [str(TRAIN)]
        before = jobs()
        self._process = subprocess.Popen(
            [sys.executable, *program, "--multirun", *last_of_each([*ON_SLURM, *overrides])],
            cwd=cwd,
            env={**environment, "PYTHONPATH": str(TRAIN.parent)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        until(lambda: self._process.poll() is not None or jobs().keys() - before.keys())
        self.jobs = sorted(jobs().keys() - before.keys())

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def end(self) -> tuple[int, str]:
        """Its exit status, and what it printed."""
        printed, _ = self._process.communicate(timeout=2 * PATIENCE)
        return self._process.returncode, printed


def has_step(run: Path, step: int) -> bool:
    """Whether a run has logged a step."""
    return (run / "metrics.csv").exists() and any(row["step"] >= step for row in rows(run))


# Training


@pytest.fixture(scope="module")
def whole(run_train: RunTrain, tiny: list[str]) -> Path:
    """Three runs that nothing stopped, as an array; the folders of all are in it."""
    ran = run_train("--multirun", *tiny, *RUN, *ON_SLURM, "seed=1,2,3", "hydra.launcher.cpus_per_task=1")
    assert ran.code == 0, ran.out + ran.err
    assert re.search(r"submitted job \d+: 3 runs, each on 1 x 1 cpu", ran.out)
    assert len(re.findall(r"a/seed=[123]: done, val loss \d\.\d{4}, in \d+ s", ran.out)) == 3
    return ran.cwd / "runs" / "llama" / "a"


@on_slurm
def test_a_run_on_slurm_gives_the_numbers_of_one_without_and_leaves_nothing_else(
    whole: Path, run_train: RunTrain, tiny: list[str]
) -> None:
    here = run_train(*tiny, *RUN, "seed=1").run
    assert repeatable(whole / "seed=1") == repeatable(here)
    assert identical(trained_state(whole / "seed=1"), trained_state(here))
    assert not list((whole.parents[1] / ".slurm").iterdir())
    assert "val loss" in (whole / "seed=1" / "output.log").read_text()
    assert "\x1b" not in (whole / "seed=1" / "output.log").read_text()
    recorded = json.loads((whole / "seed=1" / "environment.json").read_text())["command"]
    assert recorded[:2] == [str(TRAIN), "--multirun"]


@on_slurm
def test_a_job_that_is_requeued_or_warned_of_its_end_goes_on_to_the_same_weights(
    whole: Path, tiny: list[str], tmp_path: Path, environment: dict[str, str]
) -> None:
    launcher = Launcher(tmp_path, environment, *tiny, *RUN, "seed=1,2", "overwrite=true")
    runs = [tmp_path / "runs" / "llama" / "a" / f"seed={seed}" for seed in (1, 2)]
    stops = [("scontrol", "requeue", launcher.jobs[0]), ("scancel", "--batch", "--signal=USR2", launcher.jobs[1])]
    for run, stop in zip(runs, stops, strict=True):
        until(lambda run=run: has_step(run, 20))
        slurm_command(*stop)
    for job in launcher.jobs:
        restart(job)
    code, printed = launcher.end()
    assert code == 0, printed
    assert len(re.findall(r"begins on", printed)) >= 2
    for run in runs:
        sessions = json.loads((run / "environment.json").read_text())["earlier_sessions"]
        assert len(sessions) == 1, "overwrite=true does not start over what is its own"
        assert repeatable(run) == repeatable(whole / run.name)
        assert identical(trained_state(run), trained_state(whole / run.name))
    assert "goes back to the queue" in (runs[1] / "output.log").read_text()


@on_slurm
def test_two_nodes_train_as_one_process_does(run_train: RunTrain, tiny: list[str]) -> None:
    overrides = (*tiny, "train.tokens=51200", "train.log_every=1", "arm=a", "seed=1")
    alone = run_train(*overrides, "trainer=cpu").run
    both = run_train("--multirun", *overrides, *ON_SLURM, "trainer.num_nodes=2", "trainer.strategy=ddp")
    assert both.code == 0, both.out + both.err
    assert re.search(r"submitted job \d+: 1 runs, each on 2 x 1 cpu", both.out)
    assert "begins on n[1-2] (job " in both.out
    for name, tolerance in (("train/loss", 1e-5), ("val/loss", 1e-6)):
        curves = [[row[name] for row in rows(run) if name in row] for run in (both.run, alone)]
        assert curves[0] == pytest.approx(curves[1], rel=0, abs=tolerance)
        assert len(curves[0]) == (200 if name == "train/loss" else 4)


@on_slurm
def test_a_study_comes_to_its_report(run_train: RunTrain, tiny: list[str]) -> None:
    study = (
        "study=ladder",
        "study.learning_rates=null",
        "study.axes=[norm]",
        "study.seeds=[1]",
        "name=climb",
        "train.tokens=5000",
    )
    ran = run_train(*tiny, *study, *ON_SLURM)
    assert ran.code == 0, ran.out + ran.err
    assert (ran.cwd / "runs" / "climb" / "report.html").exists()


@on_slurm
def test_a_search_prunes_its_jobs(run_train: RunTrain, tiny: list[str]) -> None:
    ran = run_train(*tiny, *PRUNING, *ON_SLURM)
    pruned(ran)
    assert ran.out.count("submitted job") == 2
    assert "pruned, stopped by the search at step" in ran.out


# What does not train


@on_slurm
def test_a_crash_of_one_run_is_reported_with_its_last_lines_and_takes_nothing_else_down(
    sweep: Sweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm_engine, "GRACE_SECONDS", 10.0)
    ran = sweep(*ON_SLURM, "train.prompt='odd raise'", "seed=1,2")
    log = Path("runs/llama/a/seed=1/output.log")
    assert ran.code == 1
    assert f"a/seed=1: failed, RuntimeError: fire; its output is in {log}" in ran.out
    assert "  RuntimeError: fire" in ran.out, "of the traceback"
    assert "the last words" in (ran.cwd / log).read_text()
    assert status(ran, 2) == "done"


def test_a_run_has_ended_with_its_exit_file_or_a_while_after_its_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch script writes the file after srun has brought the last lines of output."""
    monkeypatch.setattr(slurm_engine, "GRACE_SECONDS", 10.0)
    info = JobInfo("7_0", "RUNNING", "node1", "", time.time(), None, tmp_path)
    engine = slurm_engine.SlurmEngine(SlurmSettings(), PRINTS)
    engine._watch = cast(Any, SimpleNamespace(jobs=lambda: {"7_0": info}, exists=Path.exists))
    job = Mock()  # of a run that is at work
    engine._infos[job] = info
    assert engine.poll(job) is None
    info = replace(info, state="FAILED", ended_at=time.time())
    assert engine.poll(job) is None, "its file may take a while to appear"
    monkeypatch.setattr(slurm_engine, "GRACE_SECONDS", 0.0)
    assert engine.poll(job) == "its job 7_0 ended as FAILED"
    info = replace(info, state="REQUEUED", ended_at=None)
    assert engine.poll(job) is None
    (tmp_path / "0.exit").write_text("1\n")
    assert engine.poll(job) == 1


@on_slurm
def test_a_killed_run_is_reported_as_slurm_calls_it(sweep: Sweep) -> None:
    ran = sweep(*ON_SLURM, "train.prompt='odd kill'", "seed=1")
    assert ran.code == 1
    assert re.search(r"a/seed=1: failed, its job \d+_0 ended as FAILED; its output is in runs/llama/a/seed=1/", ran.out)
    assert "Killed" in ran.out
    assert status(ran, 1) == "failed"


@on_slurm
def test_a_cancelled_job_is_reported_and_the_same_command_runs_it(
    tmp_path: Path, environment: dict[str, str], tiny: list[str], monkeypatch: pytest.MonkeyPatch, sweep: Sweep
) -> None:
    launcher = Launcher(tmp_path, environment, *tiny, "arm=a", "train.prompt='sleep 600'", "seed=1,2", acting=True)
    wait_for(tmp_path / "mark1")
    slurm_command("scancel", *launcher.jobs)
    code, printed = launcher.end()
    assert code == 1
    assert re.search(r"a/seed=1: interrupted, stopped by a signal; run the same command to resume", printed), printed
    assert "Traceback" not in printed
    (tmp_path / "mark1").unlink()
    ran = sweep(*ON_SLURM, "seed=1,2")
    assert ran.code == 0, ran.err
    assert mark(ran, 1)["devices"] == 1
    assert (status(ran, 1), status(ran, 2)) == ("done", "done")


@pytest.fixture
def attached(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once a launcher in this process has looked for jobs, it leaves a file of this name."""
    attach = slurm_engine.SlurmEngine._attach

    def attach_and_mark(*arguments: Any) -> Any:
        found = attach(*arguments)
        Path("attached").touch()
        return found

    monkeypatch.setattr(slurm_engine.SlurmEngine, "_attach", attach_and_mark)


@on_slurm
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_jobs_outlive_their_launcher_and_the_same_command_waits_for_them(
    number: signal.Signals, tmp_path: Path, environment: dict[str, str], tiny: list[str], attached: None, sweep: Sweep
) -> None:
    launcher = Launcher(tmp_path, environment, *tiny, "arm=a", "train.prompt='wait attached'", "seed=1,2", acting=True)
    wait_for(tmp_path / "mark1")
    launcher.send(number)
    code, printed = launcher.end()
    if number == signal.SIGINT:
        assert code == 130
        array = launcher.jobs[0].partition("_")[0]
        assert f"2 runs stay in Slurm; the same command waits for them, scancel {array} ends them\n" in printed
        assert "Traceback" not in printed
    again = sweep(*ON_SLURM, "train.prompt='wait attached'", "seed=1,2")
    assert again.code == 0, again.err
    assert "2 runs are in Slurm's queue, or at work: waiting for those" in again.out
    assert "submitted" not in again.out
    assert mark(again, 1)["environment"]["SLURM_ARRAY_JOB_ID"] == launcher.jobs[0].partition("_")[0]


def submit_and_die(*arguments: Any) -> str:
    slurm_script.submit(*arguments)
    raise KeyboardInterrupt


@on_slurm
def test_a_launcher_that_dies_right_after_sbatch_loses_nothing_and_a_part_of_its_sweep_can_be_waited_for(
    sweep: Sweep, attached: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = (*ON_SLURM, "train.prompt='wait attached'", "hydra.launcher.at_a_time=1")
    with monkeypatch.context() as patched:
        patched.setattr(slurm_engine, "submit", submit_and_die)
        assert sweep(*overrides, "seed=1,2").code == 130
    (tmp_path / "attached").unlink()
    first = sweep(*overrides, "seed=1")
    assert first.code == 0, first.err
    assert "submitted" not in first.out
    (tmp_path / "attached").unlink()
    second = sweep(*overrides, "seed=2")
    assert second.code == 0, second.err
    assert "submitted" not in second.out, "its task was not cleared away with the first's"
    assert not list((second.cwd / "runs" / ".slurm").iterdir())


@on_slurm
def test_a_job_that_trains_something_else_in_a_run_s_folder_is_not_taken_for_it(
    sweep: Sweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(slurm_engine, "submit", submit_and_die)
        sweep(*ON_SLURM, "train.prompt='sleep 60'", "seed=1")
    (job,) = jobs()
    ran = sweep(*ON_SLURM, "train.prompt='sleep 60'", "seed=1", "optim.lr=0.5")
    assert ran.code == 2
    assert re.search(
        rf"error: optim.lr=0.5: job {job} trains in runs/llama/a/seed=1 with optim.lr=\S+; give the", ran.err
    )


@on_slurm
def test_a_run_that_never_reaches_a_checkpoint_is_requeued_once_and_then_reported(
    tmp_path: Path, environment: dict[str, str], tiny: list[str]
) -> None:
    launcher = Launcher(tmp_path, environment, *tiny, "arm=a", "train.prompt='sleep 600'", "seed=1", acting=True)
    (job,) = launcher.jobs
    for turn in (1, 2):
        wait_for(tmp_path / "mark1")
        (tmp_path / "mark1").unlink()
        slurm_command("scancel", "--batch", "--signal=USR2", job)
        if turn == 1:
            restart(job)
    code, printed = launcher.end()
    assert code == 1
    assert (
        "failed, its time ended twice in a row before it could write a checkpoint; raise hydra.launcher.time" in printed
    )


@on_slurm
def test_shapes_are_arrays_of_their_own_and_every_rank_sees_its_share(sweep: Sweep) -> None:
    ran = sweep(*ON_SLURM, "seed=1", "trainer.devices=1,2")
    assert ran.code == 0, ran.err
    first, second = re.findall(r"submitted job \d+: 1 runs, each on (\d x \d) cpu", ran.out)
    assert (first, second) == ("1 x 1", "1 x 2")


@on_slurm
def test_why_a_job_waits_is_reported_if_it_is_not_for_its_turn(sweep: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    report = slurm_engine.SlurmEngine._report_reasons

    def release(self: slurm_engine.SlurmEngine, running: Any) -> None:
        report(self, running)
        if "JobHeldUser" in self._reported and "PENDING" in jobs().values():
            slurm_command("scontrol", "release", *jobs())

    monkeypatch.setattr(slurm_engine.SlurmEngine, "_report_reasons", release)
    ran = sweep(*ON_SLURM, "hydra.launcher.sbatch={hold: true}", "seed=1")
    assert ran.code == 0, ran.err
    assert len(re.findall(r"job \d+_0 waits, Slurm says: JobHeldUser\n", ran.out)) == 1


@on_slurm
def test_the_keys_reach_slurm(sweep: Sweep) -> None:
    keys = (
        "partition=debug",
        "time=7",
        "cpus_per_task=2",
        "memory=200M",
        "at_a_time=1",
        "sbatch={comment: hi, nice: 5}",
    )
    ran = sweep(
        *ON_SLURM, *(f"hydra.launcher.{key}" for key in keys), "seed=1,2", "hydra.launcher.setup=['export WORD=x']"
    )
    assert ran.code == 0, ran.err
    info = mark(ran, 1)["environment"]
    assert (info["WORD"], info["SLURM_JOB_PARTITION"], info["SLURM_CPUS_PER_TASK"]) == ("x", "debug", "2")
    shown = slurm_command("scontrol", "show", "job", info["SLURM_ARRAY_JOB_ID"])
    for line in (
        "TimeLimit=00:07:00",
        "ArrayTaskThrottle=1",
        "Comment=hi",
        "Nice=5",
        "Requeue=1",
        "MinMemoryNode=200M",
    ):
        assert line in shown


@on_slurm
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["hydra.launcher.partition=nope"], "hydra/launcher=slurm: sbatch refuses: invalid partition specified: nope"),
        (["trainer.num_nodes=4"], "hydra/launcher=slurm: sbatch refuses: "),
        (["+hydra.launcher.sbatch.nope=2"], "hydra/launcher=slurm: sbatch refuses: sbatch: unrecognized option"),
    ],
)
def test_what_sbatch_refuses_is_reported_in_one_line(overrides: list[str], message: str, sweep: Sweep) -> None:
    ran = sweep(*ON_SLURM, *overrides, "seed=1")
    assert ran.code == 2
    assert ran.err.splitlines()[-1].startswith(f"error: {message}")
    assert not jobs()


# Without a cluster


def test_a_machine_without_slurm_is_reported(sweep: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    ran = sweep(*ON_SLURM, "seed=1")
    assert ran.code == 2
    assert ran.err.startswith("error: hydra/launcher=slurm: this machine has no sbatch; start the command where jobs")


def test_a_dry_run_prints_a_script_that_trains_by_hand_without_slurm(
    run_train: RunTrain, tiny: list[str], tmp_path: Path
) -> None:
    study = ("study=ladder", "study.learning_rates=null", "study.axes=[norm]", "study.seeds=[1]", "train.tokens=5000")
    ran = run_train(*tiny, *study, "name=climb", "study.dry_run=true", *ON_SLURM, cwd=tmp_path, PATH="/nowhere")
    assert (ran.code, ran.err) == (0, "")
    assert not (tmp_path / "runs").exists()
    script = tmp_path / "by_hand.sh"
    script.write_text(ran.out[ran.out.index("#!/bin/bash") :])
    assert "#SBATCH --array=0-1%2\n" in script.read_text()
    subprocess.run(["bash", "-n", script], check=True)
    if not cluster_is_missing():
        slurm_command("sbatch", "--wait", str(script))
        assert len(list(tmp_path.rglob("summary.json"))) == 2


def array(runs: int, accelerator: str, devices: int, nodes: int) -> Any:
    """Jobs of one shape."""
    hardware = Hardware(accelerator, devices, nodes, "32-true", accelerator)
    run = SimpleNamespace(hardware=hardware, cfg=SimpleNamespace(runs_dir="runs"))
    commands = [["python", "train.py", f"seed={seed}"] for seed in range(1, runs + 1)]
    return [SimpleNamespace(run=run, folder=Path("run"), command=command) for command in commands]


def test_printed_scripts_of_several_shapes_keep_their_files_apart(capsys: pytest.CaptureFixture[str]) -> None:
    slurm_engine.print_scripts([*array(2, "gpu", 1, 1), *array(2, "gpu", 4, 2)], SlurmSettings())
    folders = re.findall(r"^mkdir -p (.*)$", capsys.readouterr().out, re.MULTILINE)
    assert len(folders) == len({*folders}) == 2


def test_a_job_on_gpus_asks_for_one_per_process_and_the_user_has_the_last_word(tmp_path: Path) -> None:
    two = slurm_script.batch_script(tmp_path, array(3, "gpu", 4, 2), SlurmSettings(sbatch={"account": "lab"}))
    for option in ("nodes=2", "ntasks-per-node=4", "gpus-per-node=4", "array=0-2%3", "account=lab"):
        assert f"#SBATCH --{option}\n" in two
    assert "#SBATCH --signal=B:USR2@120\n" in two
    named = slurm_script.batch_script(
        tmp_path, array(1, "gpu", 4, 1), SlurmSettings(sbatch={"gpus-per-node": "a100:4"})
    )
    assert re.findall(r"--gpus-per-node=(.*)", named) == ["a100:4"]
    assert "--gpus" not in slurm_script.batch_script(tmp_path, array(1, "cpu", 4, 1), SlurmSettings())


@pytest.mark.parametrize(
    ("partition", "has"), [(None, False), ("gpu", True), ("old,gpu", True), ("old", False), ("mixed", True)]
)
def test_auto_takes_gpus_where_the_partition_has_them(
    partition: str | None, has: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sinfo = tmp_path / "sinfo"
    sinfo.write_text(
        "#!/bin/sh\nprintf 'cpu*|(null)\\ngpu|gpu:a100:8(S:0-1)\\nold|mic:1\\nmixed|(null)\\nmixed|mps:2,gpu:4\\n'\n"
    )
    sinfo.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert slurm_engine.partition_has_gpus(partition) == has


def test_a_line_of_squeue_is_read_whatever_the_path_holds() -> None:
    line = "7_1|RUNNING|n[1-2]|None|2026-01-02T03:04:05|2026-01-03T03:04:05|/a|b/.slurm/x/script.sh"
    info = slurm_engine.read_job(line)
    assert (info.job_id, info.nodes, info.folder) == ("7_1", "n[1-2]", Path("/a|b/.slurm/x"))
    assert info.started_at == time.mktime((2026, 1, 2, 3, 4, 5, 0, 0, -1))
    assert info.ended_at is None, "it is when it would end"
    assert slurm_engine.read_job("7_2|PENDING||BeginTime|2026-01-02T03:04:05|N/A|/s").started_at is None


def test_when_squeue_fails_jobs_are_as_they_were_and_that_is_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    squeue = tmp_path / "squeue"
    squeue.write_text("#!/bin/sh\necho 'squeue: error: no controller' >&2\nexit 1\n")
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(slurm_engine, "LOOK_SECONDS", 0.0)
    watch = slurm_engine.Watch()
    watch.expect("7_0", tmp_path)
    assert [*watch.jobs(), *watch.jobs()] == ["7_0", "7_0"]
    assert capsys.readouterr().err == "squeue failed, and will be called again: squeue: error: no controller\n"
    with pytest.raises(ConfigError, match="squeue failed, so running jobs are unknown"):
        watch.jobs(fresh=True)


def test_uncommitted_changes_are_reported_before_jobs_wait_with_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = slurm_engine.SlurmEngine(SlurmSettings(), PRINTS)
    monkeypatch.setattr(slurm_engine.environment, "git_state", lambda folder: Git("c", dirty=True))
    engine._warn_if_dirty()
    engine._warn_if_dirty()
    assert capsys.readouterr().err.count("warning: the source tree has uncommitted changes") == 1
