"""Learning-rate tuning: which rates are chosen, and which to try next."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from llama_lab.analysis.rate_choice import Losses, chosen_rate, rate_beyond, rates_between

from .plan import Plan, PlannedArm, PlannedRun, by_seed, plan_run, plan_tuning

MOST_EXTENSIONS = 6  # of one grid; the report says if the best rate is still at its edge


def resolve_rates(plan: Plan, status: Callable[[PlannedRun], str]) -> tuple[Plan, list[PlannedRun]]:
    """Choose learning rates from the tuning runs that are finished.

    status: see `Plan.status_of`. Returns the plan, with a further tuning run wherever the best rate is at an edge
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
        rate, has_ended = run.member.learning_rate, status(run) in ("done", "diverged")
        if not has_ended or rate is None or (loss := run.run.folder.final_loss) is None:
            return None
        losses[rate] = loss
    return losses
