"""From a command to a trained run: checks, warm start, callbacks, training, and errors in words."""

import sys
import traceback

import lightning as L
import torch
from omegaconf import DictConfig, OmegaConf

from llama_lab.config.components import build, report_component_errors, targets
from llama_lab.config.grammar import override_key
from llama_lab.config.trust import Trust
from llama_lab.devices.hardware import check_started, current_rank
from llama_lab.runs.checkpoint import checkpoint_step
from llama_lab.runs.folder import RESOLVED, read_overrides
from llama_lab.util.display import quiet_libraries
from llama_lab.util.errors import ConfigError, first_line
from llama_lab.util.files import report_disk_errors

from .compiling import check_compiler
from .profile import Profile
from .run import Run, budget_steps
from .schedule import part_of, steps_alike
from .stop import Outcome
from .telemetry import Telemetry
from .train import train
from .warm_start import check_start, warm_start


def train_run(run: Run) -> Outcome:
    """Train or resume a run. Raises ConfigError for errors of the user, and others unchanged."""
    try:
        with report_component_errors(), report_disk_errors(f"runs_dir={run.cfg.runs_dir}"):
            try:
                return train_on_disk(run)
            except Exception as error:
                # As TorchInductor raises every time once a file of its cache is truncated.
                frames = traceback.extract_tb(error.__traceback__)
                by_compiler = any("/torch/_inductor/" in frame.filename for frame in frames)
                if isinstance(error, torch.OutOfMemoryError) or not by_compiler:
                    raise
                from torch._inductor.runtime.cache_dir_utils import cache_dir  # takes a second to import

                remedy = f"delete {cache_dir()}, and run the same command again, or set trainer.compile=false"
                raise ConfigError(f"trainer.compile: {first_line(error)}; {remedy}") from error
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
    """`train_run` without the explanation of its errors."""
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
        warn_of_differences(run)
    return train(run, warm_start(run), build_callbacks(run.cfg))


def build_callbacks(cfg: DictConfig) -> list[L.Callback]:
    """The callbacks that a config asks for. Raises ConfigError for a node that is no callback."""
    callbacks: list[L.Callback] = [Profile()] if cfg.trainer.profile and current_rank() == 0 else []
    if cfg.train.telemetry:
        callbacks.append(Telemetry())
    nodes = cfg.get("callbacks") or {}  # configs that were stored by earlier versions have none
    for name, node in nodes.items() if isinstance(nodes, DictConfig) else enumerate(nodes):
        key = f"callbacks.{name!s}"
        if not isinstance(node, DictConfig) or "_target_" not in node:
            raise ConfigError(f"{key}={node}: must name its class, such as {{_target_: mylab.callbacks.Mine}}")
        callback = build(node, key)
        if not isinstance(callback, L.Callback):
            raise ConfigError(f"{key}={node._target_}: builds a {type(callback).__name__}; name a Lightning callback")
        callbacks.append(callback)
    return callbacks


def warn_of_differences(run: Run) -> None:
    """Warn if a resumed run differs from one trained with these settings from the start."""
    cfg, folder = run.cfg, run.folder
    if not (folder.path / RESOLVED).exists():
        return
    earlier = folder.config()
    typed_before = read_overrides(folder.path)
    for override in run.overrides:
        if override_key(override) == "schedule.warmup" and override not in typed_before:
            kept = part_of(run.steps, "warmup", cfg.schedule.warmup)
            print(f"{override}: comes too late, the run keeps its warm-up of {kept} steps", file=sys.stderr)
    if run.steps <= budget_steps(earlier):
        return
    ours = frozenset(target for _, target in targets(OmegaConf.to_container(cfg)))
    Trust(targets=ours).check(earlier.schedule, f"resume={cfg.resume}", lambda _: "it to this command's schedule")
    trained = checkpoint_step(folder.checkpoint_for(cfg))
    if trained > steps_alike(build(earlier.schedule, "schedule"), budget_steps(earlier)):
        print(
            f"train.tokens={cfg.train.tokens:g}: the learning rate of the first {trained} steps was that of a smaller "
            "budget, and rises again; a run with schedule=constant or wsd goes on as if it had always had this one",
            file=sys.stderr,
        )


def spare_devices(run: Run) -> str:
    """Why the run does not use all GPUs of this machine, in one line."""
    return (
        f"trainer.devices=auto: trains on {run.hardware.devices} of {run.hardware.devices + run.hardware.spare} GPUs, "
        f"since more cannot share train.batch_size={run.cfg.train.batch_size} with train.micro_batch_size="
        f"{'null' if run.cfg.train.micro_batch_size is None else run.cfg.train.micro_batch_size}"
    )
