"""Learning-rate tuning: the status of a study's runs, which rates are chosen, and which to try next."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from llama_lab.analysis.rate_choice import Losses, chosen_rate, rate_beyond, rates_between
from llama_lab.config.schema import CHANGEABLE
from llama_lab.data.dataset import Dataset
from llama_lab.runs.folder import is_run
from llama_lab.runs.stored import Environment, Summary

from .plan import Plan, PlannedArm, PlannedRun, by_seed, plan_run, plan_tuning

MOST_EXTENSIONS = 6  # of one grid; the report says if the best rate is still at its edge


def status_of(planned: PlannedRun, dataset: Dataset, init_hashes: Mapping[str, str]) -> str:
    """Missing, unfinished, failed, done, diverged, or changed if the run has other settings or data than the plan.

    init_hashes: of the weights that each `init_from` names now, unless they are gone.
    """
    folder = planned.run.folder
    status = folder.status
    if status is None or not is_run(folder.path):
        return "missing"
    ended = status.status in ("done", "diverged")
    index = dataset.validated_on(planned.run.cfg.data.val_half).index
    now = {"data_hash": index.data_hash, "tokenizer_hash": index.tokenizer_hash}
    if not (ended or planned.run.hardware.elsewhere):  # finished runs of another device are compared, with a warning
        now["precision"] = planned.run.hardware.precision
    if planned.run.cfg.init_from in init_hashes:
        now["init_hash"] = init_hashes[planned.run.cfg.init_from]
    then = Environment.load(folder.path)
    if folder.changed_keys(planned.run.cfg, CHANGEABLE) or any(getattr(then, key) != now[key] for key in now):
        return "changed"
    return status.status if ended or status.status == "failed" else "unfinished"


def resolve_rates(plan: Plan, status: Callable[[PlannedRun], str]) -> tuple[Plan, list[PlannedRun]]:
    """Choose learning rates from the tuning runs that are finished.

    status: of a run, see `status_of`. Returns the plan, with a further tuning run wherever the best rate is at an edge
    of its grid, then one on either side of the best, and the judged runs whose learning rate is known, at that rate.
    """
    command = plan.command
    if not command.learning_rates:
        return plan, plan.runs
    arms: list[PlannedArm] = []
    found: dict[tuple[str, int], Losses] = {}  # by arm and judged seed
    for arm in plan.arms:
        grid = len(command.rates_of(arm.arm))
        most = grid + (MOST_EXTENSIONS if command.extend_rates else 0)
        tuning: list[PlannedRun] = []
        for run in arm.runs if arm.tuning else ():
            runs = [one for one in arm.tuning if one.member.tunes == run.member.seed][:grid]  # the others follow again
            while (losses := final_losses(runs, status)) and len(losses) < most and (rate := rate_beyond(losses)):
                runs.append(plan_tuning(command, arm, rate, runs[0].member.seed, run.member.seed))
            for rate in rates_between(losses) if losses else ():
                runs.append(plan_tuning(command, arm, rate, runs[0].member.seed, run.member.seed))
            if losses := final_losses(runs, status):
                found[arm.arm.name, run.member.seed] = losses
            tuning += runs
        arms.append(replace(arm, tuning=tuple(tuning)))
    judged = [
        plan_run(command, arm, replace(run.member, learning_rate=chosen_rate(losses)))
        for arm in arms
        for run in arm.runs
        if (losses := found.get((arm.arm.tuner, run.member.seed)))
    ]
    return replace(plan, arms=tuple(arms)), by_seed(judged)


def final_losses(runs: Sequence[PlannedRun], status: Callable[[PlannedRun], str]) -> Losses | None:
    """The loss at each learning rate, infinite where the run diverged; None until all runs have ended."""
    losses = {}
    for run in runs:
        if status(run) not in ("done", "diverged") or run.member.learning_rate is None:
            return None
        loss = Summary.load(run.run.folder.path).metrics["val/loss"] if status(run) == "done" else math.inf
        losses[run.member.learning_rate] = loss
    return losses
