"""Conduct a study: plan it, train what is missing through Hydra's launcher, and end with a report."""

import shlex
import sys
import traceback
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.types import HydraContext
from omegaconf import DictConfig

from llama_lab.errors import ConfigError, FinishedRunError
from llama_lab.job import check_one_device, plan_job
from llama_lab.training.folder import CHANGEABLE, held
from llama_lab.training.run import train

from .dry_run import print_plan
from .plan import Plan, PlannedRun, plan_study
from .progress import Progress
from .record import Study
from .request import Composer, read_request, run_config
from .trial import is_run

FAILED, INTERRUPTED = 1, 130

State = Literal["missing", "unfinished", "changed", "done", "diverged"]


def conduct(cfg: DictConfig, context: HydraContext, arguments: Sequence[str]) -> None:
    """Conduct the study that a composed command asks for; exits with status 1 if a run failed or diverged.

    Raises ConfigError before anything trains if an arm cannot be trained, or the study has changed since its runs.
    """
    request = read_request(cfg.copy(), arguments)
    plan = plan_study(request, Composer(context.config_loader, request.shared))
    print_plan(plan, timed=request.dry_run)
    if request.dry_run:
        return
    states = {run.member: state(run, plan) for run in plan.runs}
    if not request.overwrite:
        refuse_changed(plan, states)
    with held(plan.folder):
        replace(plan.study, command=shlex.join(["python", *sys.argv])).save(plan.folder)
        waiting = [run for run in plan.runs if states[run.member] not in ("done", "diverged")]
        results = launch(waiting, states, cfg, context)
        from .dashboard import log_report
        from .report import write_report  # after the runs, and not in each of them: SciPy and Plotly take a second

        result = write_report(plan.folder)
        if cfg.logger.wandb:
            log_report(result, plan.folder, cfg.logger)
    tell_failures(results)
    if result.divergences:
        sys.exit(FAILED)


def state(planned: PlannedRun, plan: Plan) -> State:
    """What there is of a run. A run that diverged would diverge again; one that crashed may not."""
    folder = planned.run.folder
    status = folder.read_status()
    if status is None or not is_run(folder.path):
        return "missing"
    trained_on = folder.read_json("environment.json")["data_hash"]
    if trained_on != plan.dataset.data_hash or folder.changed_keys(planned.run.cfg, CHANGEABLE):
        return "changed"
    if status["status"] in ("done", "diverged"):
        return "done" if status["status"] == "done" else "diverged"
    return "unfinished"


def refuse_changed(plan: Plan, states: dict[Any, State]) -> None:
    """Raise ConfigError if a run was made, or begun, with other settings than it has now."""
    changed = [run for run in plan.runs if states[run.member] == "changed"]
    if not changed:
        return
    run = changed[0].run
    keys = run.folder.changed_keys(run.cfg, CHANGEABLE)
    key, old, new = keys[0] if keys else ("data", "another text", "this one")
    raise ConfigError(
        f"{key}={new}: {len(changed)} runs of {plan.folder} are not what the study now asks for, such as "
        f"{changed[0].member.folder} with {key}={old}; give the same settings, another name=, or retrain them with "
        f"study.overwrite=true"
    )


def launch(
    runs: Sequence[PlannedRun], states: dict[Any, State], cfg: DictConfig, context: HydraContext
) -> list[tuple[PlannedRun, JobReturn]]:
    """Hand the runs to the launcher that the command line chose."""
    if not runs:
        return []
    launcher = Plugins.instance().instantiate_launcher(hydra_context=context, task_function=study_job, config=cfg)
    over = [("overwrite=true",) if states[run.member] == "changed" else () for run in runs]
    jobs = [[*run.overrides, *extra] for run, extra in zip(runs, over, strict=True)]
    return list(zip(runs, launcher.launch(jobs, initial_job_idx=0), strict=True))


def study_job(cfg: DictConfig) -> None:
    """One run of a study, wherever its launcher puts it. Hydra goes on with the next one if this one fails."""
    job = HydraConfig.get()
    overrides = list(job.overrides.task)
    cfg, choices = run_config(cfg, dict(job.runtime.choices))
    run = plan_job(cfg, choices, overrides)
    check_one_device(cfg)
    study_folder = run.folder.path.parents[1]
    progress = Progress(Study.load(study_folder), study_folder)
    progress.begin(run)
    try:
        outcome = train(run)
    except FinishedRunError:
        return  # by another process, since this one looked
    except Exception as error:
        traceback.print_exc()  # Hydra keeps it to itself
        progress.failed(run, error)
        raise
    progress.ended(run, outcome)
    if outcome == "interrupted":
        sys.stderr.write("stopped; the same command goes on where it left off\n")
        sys.exit(INTERRUPTED)


def tell_failures(results: Sequence[tuple[PlannedRun, JobReturn]]) -> None:
    """Repeat, after the report, what failed and why: the lines above it may have scrolled away."""
    for run, result in results:
        if result.status == JobStatus.FAILED:
            error = result._return_value
            sys.stderr.write(f"failed: {run.member.folder}: {type(error).__name__}: {error}\n")
