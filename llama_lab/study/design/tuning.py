"""Learning-rate tuning: the status of a study's runs, which rates are chosen, and which to try next."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from llama_lab.runs.folder import CHANGEABLE
from llama_lab.runs.record import is_run
from llama_lab.runs.stored import Environment, Summary
from llama_lab.study.learning_rate import Losses, best_rate, rate_beyond

from .plan import Plan, PlannedArm, PlannedRun, by_seed, tuning_member, with_arms

MOST_EXTENSIONS = 6  # of one grid; the report says if the best rate is still at its edge

PlannedStatus = Literal["missing", "unfinished", "changed", "failed", "done", "diverged"]


def status_of(planned: PlannedRun, plan: Plan) -> PlannedStatus:
    """The status of a planned run's folder; "changed" if its settings or data are not those of the plan."""
    folder = planned.run.folder
    status = folder.status
    if status is None or not is_run(folder.path):
        return "missing"
    ended = status.status in ("done", "diverged")
    now = {"data_hash": plan.dataset.data_hash, "tokenizer_hash": plan.dataset.tokenizer_hash}
    if not (ended or planned.run.hardware.elsewhere):  # finished runs of another device are compared, with a warning
        now["precision"] = planned.run.hardware.precision
    then = Environment.load(folder.path)
    if folder.changed_keys(planned.run.cfg, CHANGEABLE) or any(getattr(then, key) != now[key] for key in now):
        return "changed"
    known: dict[str, PlannedStatus] = {"done": "done", "diverged": "diverged", "failed": "failed"}
    return known.get(status.status, "unfinished")


def resolve_rates(plan: Plan) -> tuple[Plan, list[PlannedRun]]:
    """Choose learning rates from the tuning runs that are finished.

    Returns the plan, with a further tuning run wherever the best rate is at an edge of its grid, and the judged runs
    whose learning rate is known, at that rate.
    """
    if not plan.rates:
        return plan, plan.runs
    arms, judged = [], []
    for arm in plan.arms:
        tuning = tuning_by_seed(arm)
        for run in arm.runs:
            runs = tuning[run.member.seed]
            while (losses := final_losses(runs, plan)) and (rate := next_rate(losses, plan)):
                member = tuning_member(arm.variant.name, rate, runs[0].member.seed, run.member.seed)
                runs.append(arm.plan_member(member))
            if losses:
                judged.append(arm.plan_member(replace(run.member, learning_rate=best_rate(losses))))
        arms.append(replace(arm, tuning=tuple(run for runs in tuning.values() for run in runs)))
    return with_arms(plan, arms), by_seed(judged)


def next_rate(losses: Losses, plan: Plan) -> float | None:
    """The learning rate to try beyond the grid; None if the best is not at its edge, or it may not be extended."""
    may_extend = plan.extend_rates and len(losses) < len(plan.rates) + MOST_EXTENSIONS
    return rate_beyond(losses) if may_extend else None


def final_losses(runs: Sequence[PlannedRun], plan: Plan) -> Losses | None:
    """The loss at each learning rate, infinite where the run diverged; None until all runs have ended."""
    losses = {}
    for run in runs:
        status = status_of(run, plan)
        if status not in ("done", "diverged") or run.member.learning_rate is None:
            return None
        loss = Summary.load(run.run.folder.path).metrics["val/loss"] if status == "done" else math.inf
        losses[run.member.learning_rate] = loss
    return losses


def tuning_by_seed(arm: PlannedArm) -> dict[int, list[PlannedRun]]:
    """An arm's tuning runs by judged seed."""
    found: dict[int, list[PlannedRun]] = {}
    for run in arm.tuning:
        if run.member.tunes is not None:
            found.setdefault(run.member.tunes, []).append(run)
    return found
