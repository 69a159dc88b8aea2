"""What commands do to train a run: check it, open what its config names, train, and report what goes wrong."""

import sys

from llama_lab.config.components import report_component_errors
from llama_lab.devices.hardware import check_started, current_rank
from llama_lab.util.display import quiet_libraries
from llama_lab.util.errors import ConfigError, first_line
from llama_lab.util.files import report_disk_errors

from .callbacks import build_callbacks
from .compiling import check_compiler, compiler_failed, delete_compiled
from .longer_budget import warn_of_differences
from .run import Run, spare_devices
from .stop import Outcome
from .train import train
from .warm_start import check_start, warm_start


def train_run(run: Run) -> Outcome:
    """Train a run, or go on with it. Raises ConfigError, or what went wrong."""
    try:
        with report_component_errors(), report_disk_errors(f"runs_dir={run.cfg.runs_dir}"):
            try:
                return train_on_disk(run)
            except Exception as error:
                if run.hardware.world_size > 1 or not compiler_failed(error):
                    raise
                print(f"trainer.compile: {first_line(error)}; tries again without {delete_compiled()}", file=sys.stderr)
            return train_on_disk(run)
    except FileNotFoundError as error:
        if run.folder.path.exists():
            raise
        if not run.folder.path.parent.exists():  # in /proc, say
            raise ConfigError(
                f"runs_dir={run.cfg.runs_dir}: {error.strerror}: {error.filename}; choose another folder"
            ) from error
        raise ConfigError(
            f"{run.folder.path}: was moved or deleted while it trained; put it back, and run the same command again"
        ) from error


def train_on_disk(run: Run) -> Outcome:
    """`train_run`, which raises disk errors as OSError."""
    check_started(run.hardware)
    check_start(run)
    if run.cfg.trainer.compile == "auto" and not run.cfg.overwrite and (begun := run.folder.compiled) is not None:
        run = run.with_compile(begun)  # as it was decided when the run began
    if run.compiled:
        check_compiler(run.hardware)
    quiet_libraries()
    if current_rank() == 0 and run.hardware.spare:
        print(spare_devices(run), file=sys.stderr)
    if current_rank() == 0 and run.cfg.resume:
        warn_of_differences(run.cfg, run.folder, run.steps, run.overrides)
    return train(run, warm_start(run), build_callbacks(run.cfg))
