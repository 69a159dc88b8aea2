"""Learning-rate tuning: which rates are chosen, and which to try next."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from llama_lab.analysis.rate_choice import (
    Losses,
    chosen_rate,
    is_beside_cliff,
    rate_beyond,
    rates_between,
    with_collapsed,
)

from .plan import Plan, PlannedArm, PlannedRun, by_seed, plan_run, plan_tuning

MOST_EXTENSIONS = 6  # of one grid; the report says if the best rate is still at its edge


def resolve_rates(plan: Plan, status: Callable[[PlannedRun], str]) -> tuple[Plan, list[PlannedRun]]:
    """Choose learning rates from the tuning runs that are finished.

    status: see `Plan.status_of`. Returns the plan, with a further tuning run wherever the best rate is at an edge
    of its grid, then one on either side of the best, once more where a run beside it diverged, and the judged runs
    whose learning rate is known, at that rate.
    """
    command = plan.command
    if not command.learning_rates:
        return plan, plan.runs
    arms: list[PlannedArm] = []
    found: dict[tuple[str, int], Losses] = {}  # by arm and the first judged seed
    tuned_with = command.tuned_with
    for arm in plan.arms:
        grid = len(command.rates_of(arm.arm))
        most = grid + (MOST_EXTENSIONS if command.extend_rates else 0)
        tuning: list[PlannedRun] = []
        for run in arm.runs if arm.tuning else ():
            runs = [one for one in arm.tuning if one.member.tunes == run.member.seed][:grid]  # the others follow again
            if not runs:
                continue
            tuning_run = partial(plan_tuning, command, arm, seed=runs[0].member.seed, tunes=run.member.seed)
            while (losses := final_losses(runs, status)) and len(losses) < most and (rate := rate_beyond(losses)):
                runs.append(tuning_run(rate))
            runs += [tuning_run(rate) for rate in rates_between(losses)] if losses else []
            if (losses := final_losses(runs, status)) and is_beside_cliff(losses):  # whose edge the optimum may be
                runs += [tuning_run(rate) for rate in rates_between(losses)]
            if losses := final_losses(runs, status):
                found[arm.arm.name, run.member.seed] = losses
            tuning += runs
        arms.append(replace(arm, tuning=tuple(tuning)))
    judged = [
        plan_run(command, arm, replace(run.member, learning_rate=chosen_rate(losses)))
        for arm in arms
        for run in arm.runs
        if (losses := found.get((arm.arm.tuner, tuned_with[run.member.seed])))
    ]
    return replace(plan, arms=tuple(arms)), by_seed(judged)


def final_losses(runs: Sequence[PlannedRun], status: Callable[[PlannedRun], str]) -> Losses | None:
    """The loss at each learning rate, infinite where the run diverged or collapsed; None until all runs have ended."""
    losses: dict[float, float] = {}
    entropy = None
    for run in runs:
        rate, has_ended = run.member.learning_rate, status(run) in ("done", "diverged")
        if not has_ended or rate is None or (loss := run.run.folder.final_loss) is None:
            return None
        losses[rate] = loss
        entropy = run.run.folder.environment.unigram_entropy
    return with_collapsed(losses, entropy)
