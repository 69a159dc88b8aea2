"""What stands in for training in a launched process: it imports no PyTorch, and does what `train.prompt` says."""

import json
import os
import signal
import sys
import time
from pathlib import Path

from omegaconf import DictConfig

from llama_lab.cli import hydra_command
from llama_lab.config.grammar import typed_command
from llama_lab.launching.process import follow_launcher
from llama_lab.runs.stored import Status, Summary
from tests.processes import wait_until


def act(cfg: DictConfig) -> None:
    """Leave a mark, do what train.prompt says, and end as a run does."""
    if os.environ.get("SLURM_PROCID", "0") != "0":
        return  # one process of a run writes into its folder
    folder = Path(cfg.runs_dir, "llama", str(cfg.arm), f"seed={cfg.seed}")
    folder.mkdir(parents=True, exist_ok=True)
    Status("running").save(folder)
    mark = {
        "pid": os.getpid(),
        "parent": os.getppid(),
        "environment": dict(os.environ),
        "typed": typed_command(),
        "command": sys.argv,
        "devices": cfg.trainer.devices,
        "accelerator": cfg.trainer.accelerator,
    }
    written = Path(f"mark{cfg.seed}.{os.getpid()}")
    written.write_text(json.dumps(mark))
    written.replace(f"mark{cfg.seed}")
    do(cfg.train.prompt, cfg.seed, folder)
    Summary(metrics={"val/loss": 1.0}).save(folder)
    Status("done").save(folder)


def do(prompt: str, seed: int, folder: Path) -> None:
    """Do what a prompt says; runs of the seeds 1 and 2 can meet, which they cannot unless both are at work."""
    if "meet" in prompt and seed in (1, 2):
        wait_until(Path(f"mark{3 - seed}").exists)
    if "crash" in prompt:
        crash(seed, folder)
    if "stubborn" in prompt:
        signal.signal(signal.SIGINT, lambda *_: Path("heard").touch())
        time.sleep(600)
    deed, _, argument = prompt.partition(" ")
    if deed == "wait":
        wait_until(Path(argument).exists)
    if deed == "sleep":
        time.sleep(float(argument))


def crash(seed: int, folder: Path) -> None:
    """Crash in the way of this seed; those that have none go on."""
    if seed in (1, 3, 5):
        print("the last words")
    if seed == 1:  # as Python does
        raise RuntimeError("fire")
    if seed == 3:  # as the kernel does when memory runs out
        os.kill(os.getpid(), signal.SIGKILL)
    if seed == 5:  # as a library does
        os._exit(7)
    if seed == 7:  # what has started it dies, after it began
        (folder / "resolved.yaml").touch()
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(600)


if __name__ == "__main__":
    from tests.launching import tasks

    follow_launcher()
    hydra_command(tasks.act, "config", "")
