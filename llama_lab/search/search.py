"""The search: asks Optuna for trials, starts their runs through Hydra's launcher, and tells it what became of them."""

import sys
import warnings
from collections.abc import Sequence
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import optuna
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from hydra.utils import instantiate
from omegaconf import DictConfig
from optuna.trial import Trial, TrialState

from llama_lab.config.grammar import override_key, written
from llama_lab.config.messages import USER_ERRORS, one_line
from llama_lab.config.schema import CHANGEABLE, KEYS, WORDS, belongs, declared_kinds, is_kind
from llama_lab.launching.launch import composed_run
from llama_lab.runs.folder import RunFolder, arm_name, check_no_file, locked
from llama_lab.runs.stored import COLUMNS, Status, Summary
from llama_lab.training.prepare import check_devices, folder_name
from llama_lab.training.run import Run
from llama_lab.training.warm_start import check_start
from llama_lab.util.errors import INTERRUPTED, ConfigError, FinishedRunError, RunFailedError, first_line
from llama_lab.util.files import discard, report_disk_errors
from llama_lab.util.formatting import conjoin

from .grid import Grid
from .pruning import Evaluations, pruning
from .results import FOLDER, MESSAGE, STATUS, Results, print_line
from .settings import TRIALS, SearchSettings, setting_error
from .space import Parameter, read_space
from .storage import ANEW, open_study

NO_ARM = ("name", "arm", *CHANGEABLE)  # settings that give a run no folder of its own


class Planned(NamedTuple):
    """A trial whose run is to be trained."""

    trial: Trial
    run: Run
    evaluations: Evaluations


def search(cfg: DictConfig, context: HydraContext, task_function: TaskFunction, arguments: Sequence[str]) -> None:
    """Search the space on the command line until it has had its trials, or go on with a search that was stopped.

    Raises ConfigError before anything trains for what cannot be searched, and RunFailedError if no trial has finished.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
    settings = read_settings(cfg)
    check_command(cfg)
    space, fixed = read_space(arguments, context.config_loader)
    fixed = [one for one in fixed if override_key(one) != "overwrite"]  # the search itself starts over, not its runs
    check_space(space)
    search_arm = arm_name(["name=", *fixed, *(one.argument for one in space)])
    name = folder_name("name", cfg.name, f"search-{search_arm}")
    if cfg.name is None:
        fixed.append(f"name={written(name)}")
    check_values(cfg, context, space, fixed)
    launcher = Plugins.instance().instantiate_launcher(hydra_context=context, task_function=task_function, config=cfg)
    folder = Path(cfg.runs_dir) / name
    check_no_file(folder, cfg.runs_dir)
    with report_disk_errors(f"runs_dir={cfg.runs_dir}"), locked(folder):
        Search(cfg, context, settings, space, fixed, launcher, folder).work()


def read_settings(cfg: DictConfig) -> SearchSettings:
    """The settings of the search. Raises ConfigError."""
    node = cfg.hydra.sweeper
    for part in ("sampler", "pruner"):
        if not isinstance(node[part], DictConfig):
            raise setting_error(part, node[part], f"choose it as hydra/sweeper/{part}={node[part]}")
        check_types(part, node[part])
    settings = SearchSettings(**{name: node[name] for name in vars(SearchSettings())})
    settings.check_metric(COLUMNS[1:])
    return settings


def check_types(part: str, node: DictConfig) -> None:
    """Raise ConfigError for a setting of a sampler or pruner of another type than its class declares."""
    for name, value in ((str(key), own) for key, own in node.items()):
        kinds = declared_kinds(node._target_, name)
        if dict not in kinds and kinds and not any(is_kind(value, kind) for kind in kinds):
            wanted = " or ".join(WORDS[kind] or "null" for kind in kinds)
            raise setting_error(f"{part}.{name}", value, f"must be {wanted}")


def check_command(cfg: DictConfig) -> None:
    """Raise ConfigError for a command that is no search over training."""
    if "train" not in cfg:
        raise ConfigError("hydra/sweeper=optuna: searches over training, with train.py; leave it out")
    if "study" in cfg:
        raise ConfigError("hydra/sweeper=optuna: a study makes its own runs; leave out the sweeper, or study=")
    for key, record in KEYS.items():
        if record.search and cfg[key]:
            raise ConfigError(f"{key}={str(cfg[key]).lower()}: {record.search}")
    check_devices(cfg.copy(), cfg.hydra.runtime.choices["hydra/launcher"])


def check_space(space: Sequence[Parameter]) -> None:
    """Raise ConfigError for a setting of which all values would train in one folder."""
    for one in space:
        if override_key(one.argument) == "trainer" or belongs(override_key(one.argument), NO_ARM):
            raise ConfigError(f"{one.argument}: makes no difference to what is trained; give it one value")


def check_values(cfg: DictConfig, context: HydraContext, space: Sequence[Parameter], fixed: Sequence[str]) -> None:
    """Raise Hydra's error for a key or an option that does not exist, before the trial that would draw it."""
    options = [one.examples for one in space]
    for i in range(max(map(len, options))):
        chosen = [texts[min(i, len(texts) - 1)] for texts in options]
        context.config_loader.load_sweep_config(cfg, [*fixed, *chosen])


class Search:
    """A search at work. fixed: the overrides of all trials. folder: of the search, which has those of its runs."""

    def __init__(
        self,
        cfg: DictConfig,
        context: HydraContext,
        settings: SearchSettings,
        space: Sequence[Parameter],
        fixed: Sequence[str],
        launcher: Launcher,
        folder: Path,
    ) -> None:
        self._cfg = cfg
        self._loader = context.config_loader
        self._settings = settings
        self._space = space
        self._fixed = fixed
        self._launcher = launcher
        self._site = getattr(launcher, "site", None)  # of our launchers
        self._n_trials = self._wanted_trials()
        self._n_jobs = self._batch_size()
        definition = [one for one in fixed if not belongs(override_key(one), ("name", *CHANGEABLE))]
        definition += [one.argument for one in space]
        sampler = cfg.hydra.runtime.choices["hydra/sweeper/sampler"]  # of which each has its own order of trials
        definition += [f"hydra/sweeper/sampler={sampler}", f"hydra.sweeper.seed={settings.seed}"]
        self._study = open_study(folder, settings, instantiate(cfg.hydra.sweeper.pruner), definition, cfg.overwrite)
        self._results = Results(self._study, folder, cfg, settings.metric, space, fixed)
        self._had: set[int] = set()  # trials of this command
        # Folders of runs that this search has begun, in this command or an earlier one.
        self._begun = {Path(one.user_attrs[FOLDER]) for one in self._study.trials if FOLDER in one.user_attrs}

    def work(self) -> None:
        """Run batches of trials until the search has had all, and print the best."""
        while batch := self._next_batch():
            numbers = conjoin([str(trial.number) for trial in batch])
            print_line(f"{'trial' if len(batch) == 1 else 'trials'} {numbers} ({self._n_trials} in all)")
            self._run(batch)
            self._results.write()
        self._results.print()
        if any(trial.state == TrialState.RUNNING for trial in self._study.trials):
            sys.stderr.write("some trials were interrupted; run the same command to resume them\n")
            sys.exit(INTERRUPTED)

    def _wanted_trials(self) -> int:
        """The number of trials of the whole search. Raises ConfigError if a grid has fewer points."""
        wanted = self._settings.n_trials
        if not isinstance(self._sampler(0), Grid):
            return wanted or TRIALS
        points = prod(len(one.values) for one in self._space)
        if wanted is not None and wanted > points:
            raise setting_error("n_trials", wanted, f"the grid has {points} points; leave it out for all of them")
        return wanted or points

    def _batch_size(self) -> int:
        """The number of trials that are started together. Raises ConfigError if neither user nor launcher knows it."""
        if self._settings.n_jobs is not None:
            return self._settings.n_jobs
        if not hasattr(self._launcher, "engine"):
            return 1
        if self._launcher.engine.max_parallel is None:
            launcher = self._cfg.hydra.runtime.choices["hydra/launcher"]
            raise setting_error("n_jobs", None, f"hydra/launcher={launcher} has no slots to fill; say how many trials")
        return int(self._launcher.engine.max_parallel)

    def _sampler(self, number: int) -> optuna.samplers.BaseSampler:
        """The sampler of a trial, which proposes the same whether the search was stopped before or not."""
        node = self._cfg.hydra.sweeper.sampler
        seed = int(np.random.SeedSequence([self._settings.seed, number]).generate_state(1)[0])
        sampler: Any = instantiate(node, **({} if "seed" in node else {"seed": seed}))
        made: optuna.samplers.BaseSampler = sampler(self._space) if isinstance(sampler, partial) else sampler
        return made

    def _next_batch(self) -> list[Trial]:
        """The next trials: those that an earlier command left behind, then new ones."""
        trials = self._study.get_trials(deepcopy=False)
        left = [one for one in trials if one.state == TrialState.RUNNING and one.number not in self._had]
        batch: list[Trial] = []
        for number in [one.number for one in left] + list(range(len(trials), self._n_trials)):
            if len(batch) == self._n_jobs:
                break
            self._study.sampler = self._sampler(number)
            is_new = number >= len(trials)
            batch.append(self._study.ask() if is_new else Trial(self._study, trials[number]._trial_id))
            self._had.add(number)
        return batch

    def _run(self, batch: Sequence[Trial]) -> None:
        """Train the runs of trials, and tell Optuna how they have ended."""
        planned = [one for trial in batch if (one := self._plan(trial))]
        if not planned:
            return
        with pruning([one.evaluations for one in planned]):
            if hasattr(self._launcher, "launch_runs"):  # of our launchers
                results = self._launcher.launch_runs([one.run for one in planned])
            else:
                overrides = [one.run.overrides for one in planned]
                results = self._launcher.launch(overrides, initial_job_idx=planned[0].trial.number)
        for one, result in zip(planned, results, strict=True):
            self._collect(one, result)

    def _plan(self, trial: Trial) -> Planned | None:
        """The trial with its run; None if that is known to be done, pruned or refused, which Optuna is told."""
        values = {one: trial._suggest(one.key, one.distribution) for one in self._space}
        overrides = [*self._fixed, *(one.override(value) for one, value in values.items())]
        try:
            run = composed_run(self._loader, self._cfg, overrides, self._site)
            self._clear(run.folder)
            known = len(self._study.trials[trial.number].intermediate_values)
            planned = Planned(trial, run, Evaluations(trial, run.folder, self._settings.metric, known))
            trial.set_user_attr(FOLDER, str(run.folder.path))
            check_start(run)
        except FinishedRunError:
            self._tell(planned, "done")
            return None
        except USER_ERRORS as error:
            self._fail(trial, "failed", one_line(error))
            return None
        status = run.folder.status
        if status and status.status == "pruned":
            planned.evaluations.report()
            if trial.should_prune():
                self._tell(planned, "pruned")
                return None
        return planned

    def _clear(self, folder: RunFolder) -> None:
        """In a search that began with overwrite=true, delete a run from before it; two of its trials may share one."""
        is_old = self._study.user_attrs.get(ANEW, False) and folder.path not in self._begun
        if is_old and (folder.path / Status.FILE).exists():
            with locked(folder.path):
                folder.clear()
        self._begun.add(folder.path)

    def _collect(self, planned: Planned, result: JobReturn) -> None:
        """Tell Optuna how a run ended that was launched."""
        discard(planned.run.folder.prune_request)  # of one that was done before it saw the request
        status = planned.run.folder.status
        error = result._return_value if result.status == JobStatus.FAILED else None  # the public property raises it
        if error is None:
            assert status is not None
            self._tell(planned, status.status, status.message)
        elif isinstance(error, RunFailedError) and status and status.status == "interrupted":
            print_line(f"trial {planned.trial.number}: interrupted, {status.message}")
        else:
            self._fail(
                planned.trial, "failed", one_line(error) if isinstance(error, USER_ERRORS) else first_line(error)
            )

    def _tell(self, planned: Planned, status: str, message: str = "") -> None:
        """Tell Optuna the result in a run's folder."""
        trial, folder = planned.trial, planned.run.folder
        if status not in ("done", "pruned"):
            self._fail(trial, status, message)
            return
        planned.evaluations.report()
        trial.set_user_attr(STATUS, status)
        if status == "pruned":
            self._study.tell(trial, state=TrialState.PRUNED)
        else:
            value = Summary.load(folder.path).metrics.get(self._settings.metric)
            if value is None:
                raise setting_error("metric", self._settings.metric, f"{folder.path} has none; choose another")
            self._study.tell(trial, value)
        self._results.print_trial(trial.number)

    def _fail(self, trial: Trial, status: str, message: str) -> None:
        """Tell Optuna that a trial has no result."""
        trial.set_user_attr(STATUS, status)
        trial.set_user_attr(MESSAGE, message)
        self._study.tell(trial, state=TrialState.FAIL)
        self._results.print_trial(trial.number)
