"""What a claim's study would be here: its arms, data and cost, before anything runs; and its first steps, run again."""

import math
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import lightning as L
from hydra import compose
from lightning.pytorch.callbacks import LambdaCallback

from llama_lab.api import composing
from llama_lab.config.grammar import to_hydra
from llama_lab.data.open import open_dataset, read_by
from llama_lab.study.design.command import read_command
from llama_lab.study.design.designs import Composer
from llama_lab.study.design.dry_run import flops_per_second, training_flops
from llama_lab.study.design.memory_fit import copies_fit
from llama_lab.study.design.plan import Plan, plan_study
from llama_lab.study.measure import train_bare
from llama_lab.training.run import new_run
from llama_lab.util.display import quiet_libraries
from llama_lab.util.errors import ConfigError

from .archive import configs_of, curve, rows_of
from .claim import Claim

FIRST = 5  # steps at least that are run again, up to a logged one
ROUNDING = 1e-3  # of a loss in them between machines, relative


def plan_of(claim: Claim) -> Plan:
    """The plan of a claim's study. Raises ConfigError where the study would, and for a statement on an arm it lacks."""
    words = to_hydra(claim.study)
    with composing(words, claim.config_dir):
        _, defaults = Composer().compose()
        cfg = compose("config", overrides=words, return_hydra_config=True)
        command = read_command(cfg, words, defaults["arch"])
        plan = plan_study(command, Composer(command.shared))
    arms = [arm.name for arm in plan.study.arms]
    if missing := [name for said in claim.statements for name in (said.arm, said.against) if name not in arms]:
        raise ConfigError(f"{claim.name}: its study has no arm {missing[0]}; choose from {', '.join(arms)}")
    tested = [{*pair} for pair in (*plan.study.family, *plan.study.ends)]
    if other := [
        said for said in claim.statements if said.quantity == "loss" and {said.arm, said.against} not in tested
    ]:
        pair = f"{other[0].arm} with {other[0].against}"
        raise ConfigError(f"{claim.name}: its study does not compare {pair}; set study.compare=all")
    return plan


def seconds(plan: Plan) -> float:
    """What all runs of a study would take here, one after the other, from a few timed steps."""
    return all_flops(plan) / (flops_per_second(plan) or float("nan"))


def all_flops(plan: Plan) -> float:
    """Training FLOPs of all runs of a study, those to tune rates included."""
    return sum((len(arm.runs) + arm.expected_tuning) * training_flops(plan, arm) for arm in plan.arms)


def too_large(plan: Plan) -> list[str]:
    """The arms that do not fit into the memory of this device, by the estimate."""
    return [arm.arm.name for arm in plan.arms if not copies_fit(arm.runs[0].run, plan.dataset, 1)]


def is_of_other_data(archive: Path, plan: Plan) -> bool:
    """Whether runs of an archive have read other data than they would here."""
    runs = (*plan.runs, *plan.tuning)
    now = {one.member.folder: read_by(one.run.cfg, plan.dataset).index.data_hash for one in runs}
    then = {row["run"]: row["environment.data_hash"] for row in rows_of(archive)}
    return any(then[run] != now[run] for run in then.keys() & now.keys())


def changed_loss(archive: Path, config_dir: str | None) -> str:
    """How a loss in the first steps of an archive's first run has changed, run again; empty if none has."""
    row = rows_of(archive)[0]
    logged = {int(one["step"]): one["train/loss"] for one in curve(row) if "train/loss" in one}
    spans = [(start, end) for start, end in pairwise([0, *logged]) if start < FIRST]
    losses: list[float] = []

    def note(trainer: L.Trainer, module: Any, *_: Any) -> None:
        losses.append(module.pop_train_metrics()["train/loss"])
        trainer.should_stop = len(losses) == spans[-1][1]

    quiet_libraries()
    cfg = configs_of([row["overrides"]], config_dir)[0]
    train_bare(new_run(cfg, "", "", [], {}), open_dataset(cfg), LambdaCallback(on_train_batch_end=note))
    for start, end in spans:
        if not math.isclose(logged[end], now := fmean(losses[start:end]), rel_tol=ROUNDING):
            return f"its loss was {logged[end]:.4f} at step {end}, and is {now:.4f} now"
    return ""
