"""What stands in for training in a launched process: it starts in no time, and does what `train.prompt` says."""

import json
import os
import signal
import time
from pathlib import Path

import torch
from omegaconf import DictConfig

from llama_lab.cli import hydra_command
from llama_lab.config.grammar import typed_command
from llama_lab.launching.process import follow_launcher
from llama_lab.runs.folder import RunFolder
from llama_lab.runs.stored import Summary

PATIENCE = 240  # seconds, on a busy machine


def act(cfg: DictConfig) -> None:
    """Leave a mark, do what train.prompt says, and end as a run does."""
    if os.environ.get("SLURM_PROCID", "0") != "0":
        return  # one process of a run writes into its folder
    folder = RunFolder(Path(cfg.runs_dir) / "llama" / str(cfg.arm) / f"seed={cfg.seed}")
    folder.write_status("running")
    trainer = {"devices": cfg.trainer.devices, "accelerator": cfg.trainer.accelerator}
    place = {"pid": os.getpid(), "parent": os.getppid(), "threads": torch.get_num_threads()}
    mark = {**place, "environment": dict(os.environ), "argv": typed_command(), **trainer}
    Path(f"mark{cfg.seed}.tmp").write_text(json.dumps(mark))
    Path(f"mark{cfg.seed}.tmp").replace(f"mark{cfg.seed}")
    deed, _, argument = cfg.train.prompt.partition(" ")
    if deed == "meet":
        wait_for(Path(f"mark{3 - cfg.seed}"))
    elif deed == "wait":
        wait_for(Path(argument))
    elif deed == "sleep":
        time.sleep(float(argument))
    elif deed == "stubborn":
        signal.signal(signal.SIGINT, lambda *_: Path("heard").touch())
        time.sleep(600)
    elif deed == "odd" and cfg.seed % 2:
        print("the last words")
        {"raise": fail, "kill": kill, "abort": os.abort, "exit": leave}[argument]()
    Summary(metrics={"val/loss": 1.0}).save(folder.path)
    folder.write_status("done")


def wait_for(file: Path) -> None:
    """Until a file is there."""
    until = time.monotonic() + PATIENCE
    while not file.exists():
        assert time.monotonic() < until, f"{file} never came"
        time.sleep(0.05)


def fail() -> None:
    """Crash as Python does."""
    raise RuntimeError("fire")


def kill() -> None:
    """Crash as the kernel does when memory runs out."""
    os.kill(os.getpid(), signal.SIGKILL)


def leave() -> None:
    """Crash as a library does."""
    os._exit(7)


if __name__ == "__main__":
    from tests.launching import tasks

    follow_launcher()
    hydra_command(tasks.act, "config", "")
