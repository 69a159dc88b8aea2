"""The search: asks Optuna for trials, starts their runs through Hydra's launcher, and tells it what became of them."""

import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from hydra.core.config_loader import ConfigLoader
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.types import HydraContext, TaskFunction
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from optuna.trial import Trial, TrialState

from llama_lab.analysis.result import SECOND_HALF
from llama_lab.analysis.unequal_settings import predicted
from llama_lab.config.grammar import override_key, to_override, typed_flags
from llama_lab.config.messages import USER_ERRORS, one_line
from llama_lab.config.schema import CHANGEABLE, KEYS, WORDS, belongs, declared_kinds, flatten, is_kind
from llama_lab.data.objectives import targets_of
from llama_lab.data.open import has_answers
from llama_lab.devices.site import Site
from llama_lab.launching.launch import LAUNCHING, composed_run
from llama_lab.launching.process import starts_over
from llama_lab.runs.folder import RunFolder, arm_name, check_no_file, locked
from llama_lab.runs.stored import COLUMNS, LOSSES, Status, Summary
from llama_lab.training.prepare import OWN_PROCESSES, check_devices, folder_name
from llama_lab.training.warm_start import check_start
from llama_lab.util.errors import INTERRUPTED, ConfigError, FinishedRunError, RunFailedError, first_line, suggestion
from llama_lab.util.files import discard, report_disk_errors
from llama_lab.util.formatting import conjoin

from .pruning import Planned, pruning
from .results import FOLDER, MESSAGE, STATUS, Results, print_line
from .settings import TRIALS, SearchSettings, setting_error
from .space import Grid, Parameter, read_space
from .storage import ANEW, open_study

NO_ARM = ("name", "arm", *CHANGEABLE)  # settings that give a run no folder of its own


def search(cfg: DictConfig, context: HydraContext, task_function: TaskFunction, arguments: Sequence[str]) -> None:
    """Search the space on the command line until it has had its trials, or go on with a search that was stopped.

    Raises ConfigError before anything trains for what cannot be searched, and RunFailedError if no trial has finished.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
    settings = read_settings(cfg)
    check_command(cfg)
    space, fixed = read_space(arguments, context.config_loader)
    fixed = [one for one in fixed if not starts_over(one)]  # the search itself starts over, not its runs
    check_space(cfg, context.config_loader, space, fixed, settings.metric)
    search_arm = arm_name(["name=", *fixed, *(one.argument for one in space)])
    name = folder_name("name", cfg.name, f"search-{search_arm}")
    if cfg.name is None:
        fixed.append(f"name={to_override(name)}")
    launcher = Plugins.instance().instantiate_launcher(hydra_context=context, task_function=task_function, config=cfg)
    folder = Path(cfg.runs_dir) / name
    check_no_file(folder, cfg.runs_dir)
    with report_disk_errors(f"runs_dir={cfg.runs_dir}"), locked(folder):
        Search(cfg, context.config_loader, settings, space, fixed, launcher, folder).work()


def read_settings(cfg: DictConfig) -> SearchSettings:
    """The settings of the search. Raises ConfigError."""
    node = cfg.hydra.sweeper
    for part in ("sampler", "pruner"):
        if not isinstance(node[part], DictConfig):
            raise setting_error(part, node[part], f"choose it as hydra/sweeper/{part}={node[part]}")
        for name, value in node[part].items():
            kinds = declared_kinds(node[part]._target_, name)
            if dict not in kinds and kinds and not any(is_kind(value, kind) for kind in kinds):
                wanted = " or ".join(WORDS[kind] or "null" for kind in kinds)
                raise setting_error(f"{part}.{name}", value, f"must be {wanted}")
    settings = SearchSettings(**{name: node[name] for name in vars(SearchSettings())})
    if settings.metric not in COLUMNS[1:]:
        known = f"{suggestion(settings.metric, COLUMNS[1:])}; choose one of {', '.join(COLUMNS[1:])}"
        raise setting_error("metric", settings.metric, f"no such metric{known}")
    return settings


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


def check_space(
    cfg: DictConfig, loader: ConfigLoader, space: Sequence[Parameter], fixed: Sequence[str], metric: str
) -> None:
    """Raise ConfigError for a setting of which all values would train in one folder, and for losses of unlike tokens.

    And Hydra's error for a key or an option that does not exist, before the trial that would draw it.
    """
    for one in space:
        if override_key(one.argument) == "trainer" or belongs(override_key(one.argument), NO_ARM):
            raise ConfigError(f"{one.argument}: makes no difference to what is trained; give it one value")
    options = [one.examples for one in space]
    chosen = ([texts[min(i, len(texts) - 1)] for texts in options] for i in range(max(map(len, options))))
    composed = [loader.load_sweep_config(cfg, [*fixed, *texts]) for texts in chosen]
    flat = [flatten(OmegaConf.to_container(one)) for one in composed if not has_answers(one)]
    unlike = len({(predicted(one), targets_of(one)) for one in flat}) > 1
    if unlike and metric in {*LOSSES, "val/ema_loss"} - {SECOND_HALF}:
        fix = f"choose {SECOND_HALF}, or search within one family and objective"
        raise setting_error("metric", metric, f"trials predict unlike tokens, whose losses do not compare; {fix}")


@dataclass
class Search:
    """A search at work. fixed: the overrides of all trials. folder: of the search, which has those of its runs."""

    cfg: DictConfig
    loader: ConfigLoader
    settings: SearchSettings
    space: Sequence[Parameter]
    fixed: Sequence[str]
    launcher: Any
    folder: Path

    def __post_init__(self) -> None:
        cfg, hydra = self.cfg, self.cfg.hydra
        is_ours = hydra.runtime.choices["hydra/launcher"] in OWN_PROCESSES
        self.site: Site | None = self.launcher.site if is_ours else None
        self.n_trials, self.n_jobs = self._wanted_trials(), self._batch_size()
        definition = [one for one in self.fixed if not belongs(override_key(one), ("name", *CHANGEABLE))]
        definition += [one.argument for one in self.space]
        parts = ("hydra/sweeper/sampler", "hydra/sweeper/pruner")  # of which each makes an order of trials of its own
        definition += [f"{part}={hydra.runtime.choices[part]}" for part in parts]
        settings = ("hydra.sweeper.sampler", "hydra.sweeper.pruner")
        definition += [one for one in hydra.overrides.hydra if belongs(override_key(one), settings)]
        definition += [f"hydra.sweeper.seed={self.settings.seed}"]
        pruner = instantiate(hydra.sweeper.pruner)
        self.study = open_study(self.folder, self.settings, pruner, definition, cfg.overwrite)
        ours = [o for o in hydra.overrides.hydra if not LAUNCHING.match(override_key(o))]
        words = [*typed_flags(), *ours, *self.fixed]
        self.results = Results(self.study, self.folder, self.settings.metric, self.space, words)
        self.had: set[int] = set()  # trials of this command
        # Folders of runs that this search has begun, in this command or an earlier one.
        self.begun = {Path(one.user_attrs[FOLDER]) for one in self.study.trials if FOLDER in one.user_attrs}

    def work(self) -> None:
        """Run batches of trials until the search has had all, and print the best."""
        while batch := self._next_batch():
            numbers = conjoin([str(trial.number) for trial in batch])
            print_line(f"{'trial' if len(batch) == 1 else 'trials'} {numbers} ({self.n_trials} in all)")
            self._run(batch)
            self.results.write()
        self.results.print()
        if any(trial.state == TrialState.RUNNING for trial in self.study.trials):
            sys.stderr.write("some trials were interrupted; run the same command to resume them\n")
            sys.exit(INTERRUPTED)

    def _wanted_trials(self) -> int:
        """The number of trials of the whole search. Raises ConfigError if a grid has fewer points."""
        wanted = self.settings.n_trials
        if not isinstance(self._sampler(0), Grid):
            return wanted or TRIALS
        points = prod(len(one.values) for one in self.space)
        if wanted is not None and wanted > points:
            raise setting_error("n_trials", wanted, f"the grid has {points} points; leave it out for all of them")
        return wanted or points

    def _batch_size(self) -> int:
        """The number of trials that are started together. Raises ConfigError if neither user nor launcher knows it."""
        if self.settings.n_jobs is not None:
            return self.settings.n_jobs
        if self.site is None:
            return 1
        if self.site.slots is None:
            problem = f"hydra/launcher={self.site.launcher} has no slots to fill; say how many trials"
            raise setting_error("n_jobs", None, problem)
        return self.site.slots

    def _sampler(self, number: int) -> optuna.samplers.BaseSampler:
        """The sampler of a trial, which proposes the same whether the search was stopped before or not."""
        node = self.cfg.hydra.sweeper.sampler
        seed = int(np.random.SeedSequence([self.settings.seed, number]).generate_state(1)[0])
        sampler: Any = instantiate(node, **({} if "seed" in node else {"seed": seed}))
        made: optuna.samplers.BaseSampler = sampler(self.space) if isinstance(sampler, partial) else sampler
        return made

    def _next_batch(self) -> list[Trial]:
        """The next trials: those that an earlier command left behind, then new ones."""
        trials = self.study.get_trials(deepcopy=False)
        left = [one.number for one in trials if one.state == TrialState.RUNNING and one.number not in self.had]
        batch: list[Trial] = []
        for number in [*left, *range(len(trials), self.n_trials)][: self.n_jobs]:
            self.study.sampler = self._sampler(number)
            is_new = number >= len(trials)
            trial = self.study.ask() if is_new else Trial(self.study, trials[number]._trial_id)
            for one in self.space:  # by its own sampler, and before the next trial is asked for
                trial._suggest(one.key, one.distribution)
            batch.append(trial)
            self.had.add(number)
        return batch

    def _run(self, batch: Sequence[Trial]) -> None:
        """Train the runs of trials, and tell Optuna how they have ended."""
        planned = [one for trial in batch if (one := self._plan(trial))]
        if not planned:
            return
        with pruning(planned):
            overrides = [one.run.overrides for one in planned]
            results = self.launcher.launch(overrides, initial_job_idx=planned[0].trial.number)
        for one, result in zip(planned, results, strict=True):
            self._collect(one, result)

    def _plan(self, trial: Trial) -> Planned | None:
        """The trial with its run; None if that is known to be done, pruned or refused, which Optuna is told."""
        drawn = [one.override(trial.params[one.key]) for one in self.space]
        try:
            run = composed_run(self.loader, self.cfg, [*self.fixed, *drawn], self.site)
            self._clear(run.folder)
            known = len(self.study.trials[trial.number].intermediate_values)
            planned = Planned(trial, run, self.settings.metric, known)
            trial.set_user_attr(FOLDER, str(run.folder.path))
            check_start(run)
        except FinishedRunError:
            self._tell_result(planned, "done")
            return None
        except USER_ERRORS as error:
            self._tell(trial, "failed", one_line(error))
            return None
        status = run.folder.status
        if status and status.status == "pruned":
            planned.report()
            if trial.should_prune():
                self._tell_result(planned, "pruned")
                return None
        return planned

    def _clear(self, folder: RunFolder) -> None:
        """In a search that began with overwrite=true, delete a run from before it; two of its trials may share one."""
        is_old = self.study.user_attrs.get(ANEW, False) and folder.path not in self.begun
        if is_old and (folder.path / Status.FILE).exists():
            with locked(folder.path):
                folder.clear()
        self.begun.add(folder.path)

    def _collect(self, planned: Planned, result: JobReturn) -> None:
        """Tell Optuna how a run ended that was launched."""
        discard(planned.run.folder.prune_request)  # of one that was done before it saw the request
        status = planned.run.folder.status
        error = result._return_value if result.status == JobStatus.FAILED else None  # the public property raises it
        if error is None:
            assert status is not None
            self._tell_result(planned, status.status, status.message)
        elif isinstance(error, RunFailedError) and status and status.status == "interrupted":
            print_line(f"trial {planned.trial.number}: interrupted, {status.message}")
        else:
            message = one_line(error) if isinstance(error, USER_ERRORS) else first_line(error)
            self._tell(planned.trial, "failed", message)

    def _tell_result(self, planned: Planned, status: str, message: str = "") -> None:
        """Tell Optuna the result in a run's folder."""
        value, folder = None, planned.run.folder.path
        if status in ("done", "pruned"):
            planned.report()
        if status == "done" and (value := Summary.load(folder).metrics.get(self.settings.metric)) is None:
            raise setting_error("metric", self.settings.metric, f"{folder} has none; choose another")
        self._tell(planned.trial, status, message, value)

    def _tell(self, trial: Trial, status: str, message: str, value: float | None = None) -> None:
        """Tell Optuna how a trial has ended, and print it."""
        state = {"done": TrialState.COMPLETE, "pruned": TrialState.PRUNED}.get(status, TrialState.FAIL)
        trial.set_user_attr(STATUS, status)
        if state == TrialState.FAIL:
            trial.set_user_attr(MESSAGE, message)
        self.study.tell(trial, value, state)
        self.results.print_trial(trial.number)
