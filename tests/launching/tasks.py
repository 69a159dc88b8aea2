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
from tests.processes import wait_until


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
        wait_until(Path(f"mark{3 - cfg.seed}").exists)
    elif deed == "wait":
        wait_until(Path(argument).exists)
    elif deed == "sleep":
        time.sleep(float(argument))
    elif deed == "stubborn":
        signal.signal(signal.SIGINT, lambda *_: Path("heard").touch())
        time.sleep(600)
    elif deed == "crash":
        crash(cfg.seed)
    Summary(metrics={"val/loss": 1.0}).save(folder.path)
    folder.write_status("done")


def crash(seed: int) -> None:
    """Crash in the way of this seed; those that have none go on."""
    if seed in (1, 3, 5, 7):
        print("the last words")
    if seed == 1:  # as Python does
        raise RuntimeError("fire")
    if seed == 3:  # as the kernel does when memory runs out
        os.kill(os.getpid(), signal.SIGKILL)
    if seed == 5:
        os.abort()
    if seed == 7:  # as a library does
        os._exit(7)


if __name__ == "__main__":
    from tests.launching import tasks

    follow_launcher()
    hydra_command(tasks.act, "config", "")
