"""Execute a study: plan it, train the missing runs through Hydra's launcher, write its report."""

import shlex
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from llama_lab.config.components import package_of, targets, users_targets
from llama_lab.config.grammar import format_value, to_override
from llama_lab.config.schema import CHANGEABLE
from llama_lab.config.trust import Trust
from llama_lab.data.open import is_probe
from llama_lab.devices.site import Site
from llama_lab.runs.folder import is_run, locked
from llama_lab.runs.study import FILE, SUMMARY, Study, StudySpeed, measured_speed
from llama_lab.study.design.command import read_command
from llama_lab.study.design.designs import Composer
from llama_lab.study.design.dry_run import print_plan, speed_of
from llama_lab.study.design.plan import MEASURED_STEPS, Plan, PlannedRun, plan_study, with_next_seed
from llama_lab.study.design.threads import threads_per_run
from llama_lab.study.design.tuning import resolve_rates
from llama_lab.training.prepare import OWN_PROCESSES
from llama_lab.util.errors import FAILED, ConfigError, RunFailedError
from llama_lab.util.files import discard
from llama_lab.util.formatting import conjoin, count

if TYPE_CHECKING:
    from llama_lab.analysis.result import Result


def execute(
    cfg: DictConfig,
    context: HydraContext,
    arguments: Sequence[str],
    task: TaskFunction,
    report: Callable[[Path, Trust, DictConfig | None], "Result"],
) -> None:
    """Run the study on the command line. Exits with status 1 if a run failed, or a judged one diverged.

    task: trains a run where Hydra's own launchers do. report: on the folder of the study, with the settings of a logger
    if there are new runs. Raises ConfigError before anything trains if an arm cannot be trained, or the study has
    changed since its runs.
    """
    _, defaults = Composer().compose()
    command = read_command(cfg.copy(), arguments, defaults["arch"])
    launcher: Any = Plugins.instance().instantiate_launcher(hydra_context=context, task_function=task, config=cfg)
    option = command.launcher
    site = launcher.site if option in OWN_PROCESSES and cfg.device is None else None
    if cfg.device is not None:  # priced as if Slurm gave a run any number of these devices
        command, site = replace(command, launcher="slurm"), Site("slurm", ("gpu",), elsewhere=True)
    plan = plan_study(command, Composer(command.shared), site)
    print_plan(plan, speed_of(plan, cfg) if cfg.study.dry_run else None)
    if cfg.study.dry_run:
        if option == "slurm":
            launcher.print_scripts([run.run for run in plan.tuning or plan.runs])
        return
    if option == "local_gpus" and (threads := threads_per_run(plan)):
        launcher.share_cores(threads)
    named = (OmegaConf.to_container(run.run.cfg) for run in plan.runs)  # tuning runs have the same targets
    trust = Trust(targets=frozenset(target for cfg in named for _, target in targets(cfg)))
    results: list[tuple[PlannedRun, JobReturn]] = []
    with locked(plan.folder):
        while True:
            plan, trained = train_all(plan, launcher, cfg.study.overwrite, cfg.study.measure_speed)
            results += trained
            if cfg.study.measure_speed:
                measure(plan, launcher)
            reported = report(plan.folder, trust, cfg.logger if trained else None)
            if not reported.is_complete:
                break
            record_report(reported, plan.folder)
            if not (plan.command.further_seeds and reported.undecided_arms):
                break
            print(f"undecided, with one more seed: {conjoin(reported.undecided_arms)}")
            plan = with_next_seed(plan, reported.undecided_arms)
    for run, result in results:  # again, since the lines above the report may have scrolled away
        if result.status == JobStatus.FAILED:
            error = result._return_value  # the public property would raise it
            kind = "" if isinstance(error, RunFailedError) else f"{type(error).__name__}: "
            sys.stderr.write(f"failed: {run.member.folder}: {kind}{error}\n")
    if any(record.status != "diverged" or member.tunes is None for member, record in reported.unfinished):
        sys.exit(FAILED)


def train_all(
    plan: Plan, launcher: Any, overwrite: bool, measures: bool
) -> tuple[Plan, list[tuple[PlannedRun, JobReturn]]]:
    """Train the missing runs, tuning runs first. Returns the plan with all tuning runs, and the results.

    measures: whether the arms' speeds will be measured, which progress counts.

    Raises ConfigError as `prepare` does.
    """
    set_damaged_aside(plan.folder / FILE)
    results: list[tuple[PlannedRun, JobReturn]] = []
    while True:
        # Reads each folder once before every launch.
        status = cache(plan.status_of)
        plan, judged = resolve_rates(plan, status)
        waiting = prepare(plan, judged, status, overwrite, tried={run.member.folder for run, _ in results})
        if not waiting:
            return plan, results
        if plan.command.launcher in OWN_PROCESSES:
            known = [run for run in (*plan.tuning, *judged) if run not in waiting]
            before = sum(status(run) in ("done", "diverged", "failed") for run in known)
            measuring = measures * sum(MEASURED_STEPS / arm.draft.steps for arm in plan.arms)  # in runs
            after = plan.expected_runs - before - len(waiting) + measuring
            returned = launcher.launch_runs([run.run for run in waiting], before, max(0.0, after))
        else:
            returned = launcher.launch([run.run.overrides for run in waiting], initial_job_idx=0)
        results += zip(waiting, returned, strict=True)


def measure(plan: Plan, launcher: Any) -> None:
    """Measure the arms' speeds through the launcher, unless that was done since the last run; print a failure."""
    measured = measured_speed(plan.folder)
    statuses = {arm.arm.name: [run.run.folder.status for run in arm.runs] for arm in plan.arms}
    finished = {name for name, found in statuses.items() if any(one and one.status == "done" for one in found)}
    if not finished or (measured and measured.arms.keys() == finished):
        return
    cfg = plan.runs[0].run.cfg
    theirs = [target for run in plan.runs for target in users_targets(OmegaConf.to_container(run.run.cfg)).values()]
    trusted = sorted({*map(package_of, theirs)})
    settings = {"measure": str(plan.folder), "trust": trusted}
    if not is_probe(cfg):
        settings["data.cache_dir"] = cfg.data.cache_dir
    settings |= {f"trainer.{key}": value for key, value in cfg.trainer.items() if key != "profile"}
    settings["trainer.compile"] = "auto"  # as each run was
    (result,) = launcher.launch([[f"{key}={to_override(value)}" for key, value in settings.items()]], initial_job_idx=0)
    if result.status == JobStatus.FAILED:
        sys.stderr.write(f"failed: the arms' speeds could not be measured: {result._return_value}\n")


def prepare(
    plan: Plan,
    judged: Sequence[PlannedRun],
    status: Callable[[PlannedRun], str],
    overwrite: bool,
    tried: Collection[str],
) -> list[PlannedRun]:
    """Write study.yaml, and return the runs to train now, after clearing the folders of those that changed.

    judged: the judged runs whose learning rate is known. status: see `Plan.status_of`, before anything is cleared.
    tried: folders of runs that this command has started already, which are not retried after a crash. Raises
    ConfigError for runs whose settings have changed, unless `overwrite`.
    """
    known = {run.member.folder for run in judged}
    early = [run for run in plan.runs if run.member.folder not in known and is_run(run.run.folder.path)]
    if early and not overwrite:  # further tuning may change their learning rates
        raise ConfigError(
            f"study.learning_rates: {count(len(early), 'run')} of {plan.folder}, such as {early[0].member.folder}, "
            f"took their rates from fewer tuning runs; give the same study.learning_rates and study.extend_rates, "
            f"another name=, or retrain those whose rate changes with study.overwrite=true"
        )
    runs = [run for run in (*plan.tuning, *judged) if run.member.folder not in tried]
    changed = [run for run in runs if status(run) == "changed"]
    if changed and not overwrite:
        first = changed[0].run
        keys = first.folder.changed_keys(first.cfg, CHANGEABLE) or [
            ("data, tokenizer, precision or init_from's weights", "others", "these")
        ]
        key, old, new = keys[0]
        raise ConfigError(
            f"{key}={new}: {len(changed)} runs of {plan.folder} are not what the study now asks for, such as "
            f"{changed[0].member.folder} with {key}={old}; give the same settings, another name=, or retrain them with "
            f"study.overwrite=true"
        )
    command = shlex.join(["python", *sys.argv])
    notes = (*plan.study.notes, *unlisted_notes(plan))
    replace(with_reports(plan), command=command, notes=notes).save(plan.folder)
    for run in changed:
        run.run.folder.clear()
    waiting = [run for run in runs if status(run) not in ("done", "diverged")]
    if waiting:
        (plan.folder / StudySpeed.FILE).unlink(missing_ok=True)  # measured with other arms, or other settings
    for run in runs:
        if status(run) == "failed":  # progress counts the runs that this command has ended
            run.run.folder.write_status("interrupted", "failed before, and waits to be trained again")
    return waiting


def set_damaged_aside(file: Path) -> None:
    """Rename an unreadable study.yaml, which the command writes anew, and print that."""
    if not file.exists():
        return
    try:
        Study.load(file.parent)
    except ConfigError as error:
        aside = file.with_suffix(".damaged")
        discard(aside)
        file.replace(aside)
        problem = str(error).partition("; ")[0]
        sys.stderr.write(f"{problem}; renamed {aside.name} and written again, without its record of earlier reports\n")


def with_reports(plan: Plan) -> Study:
    """The study with the record of its earlier reports. Raises ConfigError if these had another `max_seeds`."""
    if not (plan.folder / FILE).exists():
        return plan.study
    before = Study.load(plan.folder)
    reported = before.reported_seeds
    if reported is None:  # as of version 0.4
        seeds = {member.seed for arm in before.arms for member in arm.judged}
        reported = (len(seeds),) if len(seeds) > 1 and (plan.folder / SUMMARY).exists() else ()
    if reported and before.max_seeds != plan.study.max_seeds:
        raise ConfigError(
            f"study.max_seeds={format_value(plan.study.max_seeds)}: the first report of {plan.folder} had "
            f"{format_value(before.max_seeds)}, and all of its reports share one level; give that, or another name="
        )
    return replace(plan.study, looks=before.looks, reported_seeds=reported)


def record_report(result: "Result", folder: Path) -> None:
    """Record the number of seeds on which a report has tested, if these are more than before; one seed has no test."""
    seeds, reported = len(result.seeds), result.study.reported_seeds or ()
    if seeds > max(reported, default=1):
        replace(result.study, reported_seeds=(*reported, seeds)).save(folder)


def unlisted_notes(plan: Plan) -> list[str]:
    """A sentence on the runs in the study's folder that it does not list, so that none is left out silently."""
    listed = {run.member.folder for run in (*plan.tuning, *plan.runs)}
    found = {str(folder.relative_to(plan.folder)) for folder in plan.folder.glob("*/seed=*") if is_run(folder)}
    left = sorted(found - listed)
    return [f"Not part of this report, though in its folder: {', '.join(left)}."] if left else []
