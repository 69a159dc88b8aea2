"""How far a study has come: the states of its runs, which learning rates are known, and which are still to be tried."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from llama_lab.runs.folder import CHANGEABLE
from llama_lab.runs.record import is_run
from llama_lab.study.learning_rate import Losses, best_rate, rate_beyond

from .plan import Plan, PlannedArm, PlannedRun, by_seed, tuning_member, with_arms

MOST_EXTENSIONS = 6  # of one grid; its report then says that the best rate is still at the edge

State = Literal["missing", "unfinished", "changed", "failed", "done", "diverged"]


def state(planned: PlannedRun, plan: Plan) -> State:
    """What there is of a run. A run that diverged would diverge again; one that crashed may not."""
    folder = planned.run.folder
    status = folder.read_status()
    if status is None or not is_run(folder.path):
        return "missing"
    ended = status["status"] in ("done", "diverged")
    now = {"data_hash": plan.dataset.data_hash, "tokenizer_hash": plan.dataset.tokenizer_hash}
    if not (ended or planned.run.hardware.elsewhere):  # what has ended on another device is compared, with a warning
        now["precision"] = planned.run.hardware.precision
    then = folder.read_json("environment.json")
    if folder.changed_keys(planned.run.cfg, CHANGEABLE) or any(then[key] != value for key, value in now.items()):
        return "changed"
    known: dict[str, State] = {"done": "done", "diverged": "diverged", "failed": "failed"}
    return known.get(status["status"], "unfinished")


def settle(plan: Plan) -> tuple[Plan, list[PlannedRun]]:
    """What tuning has told so far, from one reading of its runs.

    The plan, with another tuning run wherever it is to go on beyond an end of its grid; and the runs that are judged,
    each at its best learning rate, without those that still wait for it.
    """
    if not plan.rates:
        return plan, plan.runs
    arms, judged = [], []
    for arm in plan.arms:
        tuning = tuning_by_seed(arm)
        for run in arm.runs:
            runs = tuning[run.member.seed]
            while (losses := final_losses(runs, plan)) and (rate := next_rate(losses, plan)):
                runs.append(arm.at(tuning_member(arm.variant.name, rate, runs[0].member.seed, run.member.seed)))
            if losses:
                judged.append(arm.at(replace(run.member, learning_rate=best_rate(losses))))
        arms.append(replace(arm, tuning=tuple(run for runs in tuning.values() for run in runs)))
    return with_arms(plan, arms), by_seed(judged)


def next_rate(losses: Losses, plan: Plan) -> float | None:
    """The learning rate to try beyond the grid; None where there is no need, no wish, or no end to it."""
    may_go_on = plan.extend_rates and len(losses) < len(plan.rates) + MOST_EXTENSIONS
    return rate_beyond(losses) if may_go_on else None


def final_losses(runs: Sequence[PlannedRun], plan: Plan) -> Losses | None:
    """The loss at each learning rate, infinite where the run diverged; None while one has not come to its end."""
    losses = {}
    for run in runs:
        ended = state(run, plan)
        if ended not in ("done", "diverged") or run.member.learning_rate is None:
            return None
        loss = run.run.folder.read_json("summary.json")["val/loss"] if ended == "done" else math.inf
        losses[run.member.learning_rate] = loss
    return losses


def tuning_by_seed(arm: PlannedArm) -> dict[int, list[PlannedRun]]:
    """An arm's tuning runs by the judged seed that they are for."""
    found: dict[int, list[PlannedRun]] = {}
    for run in arm.tuning:
        if run.member.tunes is not None:
            found.setdefault(run.member.tunes, []).append(run)
    return found
