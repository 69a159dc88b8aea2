"""The task function of a study's runs for Hydra's own launchers."""

import sys
import traceback

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from llama_lab.config.composing import run_config
from llama_lab.devices.hardware import current_rank
from llama_lab.runs.stored import Status
from llama_lab.training.prepare import requested_run
from llama_lab.util.errors import INTERRUPTED, ConfigError, FinishedRunError


def study_task(cfg: DictConfig) -> None:
    """The task function of a study's runs. Hydra continues with the next run if this one fails."""
    from llama_lab.training.command import train_run  # Lightning takes seconds to import, and a dry run trains nothing

    from .measure import measure_study

    command = HydraConfig.get()
    cfg, choices = run_config(cfg, dict(command.runtime.choices))
    run = requested_run(cfg, choices, list(command.overrides.task))
    if cfg.measure:
        measure_study(run)
        return
    is_first = current_rank() == 0
    if is_first:
        print(f"{run.title}: begins")
    try:
        outcome = train_run(run)
    except FinishedRunError:
        return  # another process has finished it since the plan was made
    except Exception as error:
        if not isinstance(error, ConfigError):
            traceback.print_exc()  # Hydra does not print it
        if is_first:
            print(f"{run.title}: failed, {type(error).__name__}: {error}")
        raise
    if is_first:
        is_done = outcome == "done"
        detail = f"val loss {run.folder.final_loss:.4f}" if is_done else Status.load(run.folder.path).message
        print(f"{run.title}: {outcome}, {detail}")
    if outcome == "interrupted":
        sys.stderr.write("stopped; run the same command to resume\n")
        sys.exit(INTERRUPTED)
