"""A real Slurm cluster of two nodes: arrays, requeued and cancelled jobs, launchers that die, and bad input."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import ANY, Mock

import pytest
from omegaconf import OmegaConf

from llama_lab.devices.hardware import Hardware
from llama_lab.launching import launch, slurm_engine, slurm_script
from llama_lab.launching.settings import SlurmSettings
from llama_lab.launching.slurm_engine import JobInfo
from llama_lab.util.errors import ConfigError
from tests.conftest import TRAIN, Command, RunTrain
from tests.launching import tasks
from tests.launching.conftest import TRAINING, Launch, Sweep, ended, folder, mark, sessions, status
from tests.processes import wait_until
from tests.training.tiny import identical, logged, repeatable, rows, trained, trained_state

ON_SLURM = ("hydra/launcher=slurm", "hydra.launcher.setup=['export GLOO_SOCKET_IFNAME=lo']")
PRINTS = OmegaConf.create({"study": {"dry_run": True}})


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
    """State of every job in the queue, the first of an array first."""
    if cluster_is_missing():
        return {}
    return dict(
        sorted(line.split() for line in slurm_command("squeue", "--me", "-h", "-r", "-o", "%i %T").splitlines())
    )


def restart(*requeued: str) -> None:
    """Have requeued jobs begin now, and not after the two minutes that Slurm waits."""
    wait_until(lambda: {jobs().get(job) for job in requeued} == {"PENDING"})
    time.sleep(2)  # a node refuses a job that begins in the second in which it was stopped there
    for job in requeued:
        slurm_command("scontrol", "update", f"JobId={job}", "StartTime=now")


# Training


@on_slurm
def test_jobs_that_are_requeued_or_warned_of_their_end_come_to_the_numbers_of_runs_without_slurm(
    launcher: Launch, tiny: list[str], tmp_path: Path
) -> None:
    settings = ("train.tokens=40000", "train.checkpoint_every=50")
    started = launcher(*settings, *ON_SLURM, "seed=1,2", "overwrite=true", program=TRAINING)
    runs = [folder(tmp_path, seed) for seed in (1, 2)]
    wait_until(lambda: all((run / "metrics.csv").exists() and rows(run)[-1]["step"] >= 20 for run in runs))
    first, second = jobs()
    slurm_command("scontrol", "requeue", first)
    slurm_command("scancel", "--batch", "--signal=USR2", second)
    restart(first, second)
    code, printed = ended(started)
    assert code == 0, printed
    assert re.search(r"submitted job \d+: 2 runs, each on 1 x 1 cpu", printed)
    assert len(re.findall(r"begins on n[12] \(job ", printed)) >= 2
    assert len(re.findall(r"a/seed=[12]: done, val loss \d\.\d{4}, in \d+ s", printed)) == 2
    for seed, run in enumerate(runs, 1):
        alone = trained(*tiny, *settings, "arm=a", f"seed={seed}", f"runs_dir={tmp_path / 'alone'}")
        assert sessions(run) == 1, "overwrite=true does not start over what is its own"
        assert repeatable(run) == repeatable(alone)
        assert identical(trained_state(run), trained_state(alone))
        log = (run / "output.log").read_text()
        assert "val loss" in log
        assert "\x1b" not in log
    assert "goes back to the queue" in log
    recorded = json.loads((runs[0] / "environment.json").read_text())["command"]
    assert recorded[:2] == [str(TRAIN), "--multirun"]
    assert not list((tmp_path / "runs" / ".slurm").iterdir())


@pytest.mark.matrix
@on_slurm
def test_two_nodes_train_as_one_process_does(run_train: RunTrain, tiny: list[str], tmp_path: Path) -> None:
    overrides = (*tiny, "train.tokens=5120", "train.log_every=1", "arm=a", "seed=1")
    alone = trained(*overrides, "trainer=cpu", f"runs_dir={tmp_path}")
    both = run_train("--multirun", *overrides, *ON_SLURM, "trainer.num_nodes=2", "trainer.strategy=ddp")
    assert both.code == 0, both.out + both.err
    assert re.search(r"submitted job \d+: 1 runs, each on 2 x 1 cpu", both.out)
    assert "begins on n[1-2] (job " in both.out
    for name, tolerance in (("train/loss", 1e-5), ("val/loss", 1e-6)):
        assert logged(both.run, name) == pytest.approx(logged(alone, name), rel=0, abs=tolerance)
    assert len(logged(both.run, "train/loss")) == 20


# What does not train


@on_slurm
def test_a_crash_has_slurm_s_name_and_its_last_lines(sweep: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm_engine, "GRACE_SECONDS", 10.0)
    ran = sweep(*ON_SLURM, "train.prompt=crash", "seed=1,2,3")
    logs = {seed: f"runs/llama/a/seed={seed}/output.log" for seed in (1, 3)}
    assert ran.code == 1
    assert f"a/seed=1: failed, RuntimeError: fire; its output is in {logs[1]}" in ran.out
    assert "  RuntimeError: fire" in ran.out, "of the traceback"
    assert re.search(rf"a/seed=3: failed, its job \d+_2 ended as FAILED; its output is in {logs[3]}", ran.out)
    assert "Killed" in ran.out
    assert all("the last words" in (ran.cwd / log).read_text() for log in logs.values())
    assert (status(ran.cwd, 2), status(ran.cwd, 3)) == ("done", "failed")


def test_a_run_ends_with_its_exit_file_or_after_its_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch script writes the file after srun has brought the last lines of output."""
    monkeypatch.setattr(slurm_engine, "GRACE_SECONDS", 10.0)
    info = JobInfo("7_0", "RUNNING", "", tmp_path)
    info.file(".started").write_text("node1\n")
    engine = slurm_engine.SlurmEngine(SlurmSettings(), PRINTS)
    engine._watch = cast(Any, SimpleNamespace(jobs=lambda: {"7_0": info}, exists=Path.exists))
    job = Mock()  # of a run that is at work
    engine._infos[job] = info
    assert engine.poll(job) is None
    job.start.assert_called_with("node1 (job 7_0)", info.file(".started").stat().st_mtime, ANY)
    info = replace(info, state="FAILED")
    assert engine.poll(job) is None, "its file may take a while to appear"
    monkeypatch.setattr(slurm_engine, "GRACE_SECONDS", 0.0)
    assert engine.poll(job) == "its job 7_0 ended as FAILED"
    info = replace(info, state="REQUEUED")
    assert engine.poll(job) is None
    (tmp_path / "0.exit").write_text("1\n")
    assert engine.poll(job) == 1


@on_slurm
def test_a_job_without_a_checkpoint_is_reported(launcher: Launch, tmp_path: Path) -> None:
    started = launcher(*ON_SLURM, "train.prompt='sleep 600'", "seed=1,2")
    wait_until((tmp_path / "mark2").exists)
    first, second = jobs()
    slurm_command("scancel", second)
    for turn in (1, 2):
        wait_until((tmp_path / "mark1").exists)
        (tmp_path / "mark1").unlink()
        slurm_command("scancel", "--batch", "--signal=USR2", first)
        if turn == 1:
            restart(first)
    code, printed = ended(started)
    assert code == 1
    assert re.search(r"a/seed=1: failed, .*checkpoint; raise hydra\.launcher\.time", printed), printed
    assert re.search(r"a/seed=2: interrupted, stopped by a signal", printed), printed
    assert "Traceback" not in printed


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
def test_jobs_outlive_their_launcher_and_the_same_command_waits_for_them(
    launcher: Launch, attached: None, sweep: Sweep, tmp_path: Path
) -> None:
    overrides = (*ON_SLURM, "train.prompt='wait attached'", "seed=1,2")
    waits = "2 runs are in Slurm's queue, or at work: waiting for those"
    killed = launcher(*overrides)
    wait_until((tmp_path / "mark1").exists)
    killed.send_signal(signal.SIGKILL)
    array = next(iter(jobs())).partition("_")[0]
    stopped = launcher(*overrides)
    wait_until(lambda: waits in stopped.out.read_text())
    stopped.send_signal(signal.SIGINT)
    code, printed = ended(stopped)
    assert code == 130
    assert f"2 runs stay in Slurm; the same command waits for them, scancel {array} ends them\n" in printed
    assert "Traceback" not in printed
    again = sweep(*overrides)
    assert again.code == 0, again.err
    assert waits in again.out
    assert "submitted" not in printed + again.out
    assert mark(tmp_path, 1)["environment"]["SLURM_ARRAY_JOB_ID"] == array


@on_slurm
def test_a_launcher_that_dies_right_after_sbatch_loses_nothing_and_a_part_of_its_sweep_can_be_waited_for(
    sweep: Sweep, attached: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def submit_and_die(*arguments: Any) -> str:
        slurm_script.submit(*arguments)
        raise KeyboardInterrupt

    overrides = (*ON_SLURM, "train.prompt='wait attached'", "hydra.launcher.at_a_time=1")
    with monkeypatch.context() as patched:
        patched.setattr(slurm_engine, "submit", submit_and_die)
        assert sweep(*overrides, "seed=1,2").code == 130
    (tmp_path / "attached").unlink()
    (job, _) = jobs()
    other = sweep(*overrides, "seed=1", "optim.lr=0.5")
    assert other.code == 2
    told = rf"error: optim.lr=0.5: job {job} trains in runs/llama/a/seed=1 with optim.lr=\S+; give the"
    assert re.search(told, other.err), "it is another run"
    for seed in (1, 2):
        part = sweep(*overrides, f"seed={seed}")
        assert part.code == 0, part.err
        assert "submitted" not in part.out, "its task was not cleared away with the first's"
        (tmp_path / "attached").unlink()
    assert not list((tmp_path / "runs" / ".slurm").iterdir())


@on_slurm
def test_the_keys_reach_slurm_and_why_a_job_waits_is_reported(sweep: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    report = slurm_engine.SlurmEngine._report_reasons

    def release(self: slurm_engine.SlurmEngine, running: Any) -> None:
        report(self, running)
        held = [job for job, state in jobs().items() if state == "PENDING"]
        if "JobHeldUser" in self._reported and held:
            slurm_command("scontrol", "release", *held)

    monkeypatch.setattr(slurm_engine.SlurmEngine, "_report_reasons", release)
    keys = ("partition=debug", "time=7", "cpus_per_task=2", "memory=200M", "at_a_time=1", "setup=['export WORD=x']")
    options = "sbatch={comment: hi, hold: true}"
    ran = sweep(*ON_SLURM, *(f"hydra.launcher.{key}" for key in (*keys, options)), "seed=1")
    assert ran.code == 0, ran.err
    assert len(re.findall(r"job \d+_0 waits, Slurm says: JobHeldUser\n", ran.out)) == 1
    info = mark(ran.cwd, 1)["environment"]
    assert (info["WORD"], info["SLURM_JOB_PARTITION"], info["SLURM_CPUS_PER_TASK"]) == ("x", "debug", "2")
    shown = slurm_command("scontrol", "show", "job", info["SLURM_ARRAY_JOB_ID"])
    told = "TimeLimit=00:07:00 ArrayTaskThrottle=1 Comment=hi Requeue=1 MinMemoryNode=200M"
    assert all(line in shown for line in told.split()), shown


@on_slurm
def test_what_sbatch_refuses_is_reported_in_one_line(sweep: Sweep) -> None:
    for override, message in (
        ("hydra.launcher.partition=nope", "invalid partition specified: nope"),
        ("trainer.num_nodes=4", ""),
        ("+hydra.launcher.sbatch.nope=2", "sbatch: unrecognized option"),
    ):
        ran = sweep(*ON_SLURM, override, "seed=1")
        assert ran.code == 2
        assert ran.err.splitlines()[-1].startswith(f"error: hydra/launcher=slurm: sbatch refuses: {message}")
        assert not jobs()


# Without a cluster


def test_a_machine_without_slurm_is_reported(sweep: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    ran = sweep(*ON_SLURM, "seed=1")
    assert ran.code == 2
    assert ran.err.startswith("error: hydra/launcher=slurm: this machine has no sbatch; ")


@pytest.mark.slow
def test_a_dry_run_prints_a_script_to_start_by_hand(
    command: Command, tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = ("study=ladder", "study.learning_rates=null", "study.axes=[norm]", "study.seeds=[1]", "study.dry_run=true")
    monkeypatch.setattr(launch, "program", lambda: [sys.executable, tasks.__file__])
    monkeypatch.setenv("PYTHONPATH", str(TRAIN.parent))
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv("PATH", "/nowhere")
        ran = command(*tiny, *study, "name=climb", *ON_SLURM)
    assert (ran.code, ran.err) == (0, "")
    assert not (tmp_path / "runs").exists()
    script = tmp_path / "by_hand.sh"
    script.write_text(ran.out[ran.out.index("#!/bin/bash") :])
    assert "#SBATCH --array=0-1%2\n" in script.read_text()
    slurm_command("bash", "-n", str(script))
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


Fake = Callable[[str, str], None]


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    """Put a shell script in the place of one of Slurm's commands."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)

    def write(name: str, script: str) -> None:
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)

    return write


@pytest.mark.parametrize(
    ("partition", "has"), [(None, False), ("gpu", True), ("old,gpu", True), ("old", False), ("mixed", True)]
)
def test_auto_takes_gpus_where_the_partition_has_them(partition: str | None, has: bool, fake: Fake) -> None:
    nodes = r"cpu*|(null)\ngpu|gpu:a100:8(S:0-1)\nold|mic:1\nmixed|(null)\nmixed|mps:2,gpu:4\n"
    fake("sinfo", f"printf '{nodes}'")
    assert slurm_engine.partition_has_gpus(partition) == has


def test_a_cluster_that_does_not_answer_is_reported_in_one_line(sweep: Sweep, fake: Fake) -> None:
    for name in ("sbatch", "squeue", "sinfo"):
        fake(name, "echo 'error: Unable to contact' >&2\necho 'slurm controller' >&2\nexit 1")
    ran = sweep(*ON_SLURM, "seed=1")
    assert (ran.code, ran.err.count("\n")) == (2, 1)
    assert ran.err.startswith("error: hydra/launcher=slurm: sinfo failed, error: Unable to contact slurm controller;")


def test_a_line_of_squeue_is_read_whatever_the_path_holds() -> None:
    info = slurm_engine.read_job("7_1|RUNNING|None|/a|b/.slurm/x/script.sh")
    assert info == JobInfo("7_1", "RUNNING", "None", Path("/a|b/.slurm/x"))


def test_when_squeue_fails_jobs_are_as_they_were_and_that_is_reported_once(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake("squeue", "echo 'squeue: error: no controller' >&2\nexit 1")
    monkeypatch.setattr(slurm_engine, "LOOK_SECONDS", 0.0)
    watch = slurm_engine.Watch()
    watch.expect("7_0", tmp_path)
    assert [*watch.jobs(), *watch.jobs()] == ["7_0", "7_0"]
    assert capsys.readouterr().err.count("squeue: error: no controller\n") == 1
    with pytest.raises(ConfigError, match="squeue failed, so running jobs are unknown"):
        watch.jobs(fresh=True)


def test_jobs_whose_files_another_launcher_has_deleted_ended_as_their_runs_did(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake("squeue", f"echo '7_0|COMPLETED|None|{tmp_path}/deleted/batch.sh'")
    monkeypatch.setattr(slurm_engine, "GRACE_SECONDS", -1.0)
    engine, queued = slurm_engine.SlurmEngine(SlurmSettings(), PRINTS), Mock()
    engine._infos[queued] = JobInfo("7_0", "RUNNING", "None", tmp_path / "deleted")
    assert engine.poll(queued) == 0
    engine.close([])
