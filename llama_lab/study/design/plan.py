"""The plan of a study: every arm composed, checked, built on the meta device and matched before any run trains."""

import copy
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from llama_lab.analysis.settings import KIND, MIXER_WIDTH, WIDTH, planned_settings
from llama_lab.config.components import build_model, model_cost
from llama_lab.config.grammar import format_value, override_key, to_override
from llama_lab.config.schema import CHANGEABLE, INDIRECT, flatten
from llama_lab.data.dataset import HALVES, Dataset
from llama_lab.data.objectives import targets_of
from llama_lab.data.open import open_dataset, read_by
from llama_lab.data.tokenizer import encode_prompt
from llama_lab.devices.site import Site
from llama_lab.model import Cost, Decoder
from llama_lab.runs.checkpoint import existing
from llama_lab.runs.folder import check_no_file, is_run, resolved
from llama_lab.runs.stored import Environment
from llama_lab.runs.study import Arm, Member, Study
from llama_lab.training.assemble import build_optimizer
from llama_lab.training.compiling import check_compiler, decide, pays
from llama_lab.training.prepare import check_devices, check_effects, folder_name, requested_run
from llama_lab.training.run import Run, new_run
from llama_lab.training.warm_start import fit_weights, has_source, hash_of, load_source
from llama_lab.util.display import open_display
from llama_lab.util.errors import ConfigError, suggestion
from llama_lab.util.formatting import conjoin

from .command import StudyCommand
from .designs import Composer, Variants
from .matching import match_width
from .memory_fit import check_memory

WORTH_READING = 4  # times that text is about as good as new text (Muennighoff et al. 2023, abstract)
MEASURED_STEPS = 60  # as long as measuring an arm's speed takes: five rounds of six steps, and decoding


@dataclass(frozen=True, eq=False)
class PlannedRun:
    """A run, and its entry in study.yaml."""

    member: Member
    run: Run


@dataclass(frozen=True)
class PlannedArm:
    """An arm of the design with its final width, None if it has none to solve (see `width_key`), and cost.

    arm: with its residual, without its runs. draft: a run of it before it has a name, a seed and the final width.
    compiled: see `compiled_alike`; None leaves that to each run. runs: the judged ones, at the config's learning rate.
    tuning: those that choose its rate. rates: how many are in its grid.
    """

    arm: Arm
    draft: Run
    width: int | None
    cost: Cost
    compiled: bool | None = None
    runs: tuple[PlannedRun, ...] = ()
    tuning: tuple[PlannedRun, ...] = ()
    rates: int = 0

    @property
    def expected_tuning(self) -> int:
        """Its tuning runs with one on either side of the best rate; beyond a grid whose end is best, there are more."""
        seeds = {run.member.seed for run in self.tuning}
        return max(len(self.tuning), (self.rates + 2) * len(seeds))


@dataclass(frozen=True)
class Plan:
    """A study that is ready to start, with its arms in the design's order.

    dataset: that of all runs. init_hashes: see `check_sources`.
    """

    command: StudyCommand
    variants: Variants
    folder: Path
    arms: tuple[PlannedArm, ...]
    dataset: Dataset
    init_hashes: Mapping[str, str]

    @property
    def runs(self) -> list[PlannedRun]:
        """All judged runs."""
        return by_seed(run for arm in self.arms for run in arm.runs)

    @property
    def tuning(self) -> list[PlannedRun]:
        """All tuning runs."""
        return by_seed(run for arm in self.arms for run in arm.tuning)

    @property
    def expected_runs(self) -> int:
        """All runs, tuning runs that are not planned yet included."""
        return sum(len(arm.runs) + arm.expected_tuning for arm in self.arms)

    def status_of(self, planned: PlannedRun) -> str:
        """Missing, unfinished, failed, done, diverged, or changed if the run has other settings or data than this."""
        cfg, folder, hardware = planned.run.cfg, planned.run.folder, planned.run.hardware
        status = folder.status
        if status is None or not is_run(folder.path):
            return "missing"
        ended = status.status in ("done", "diverged")
        index = read_by(cfg, self.dataset).index
        now = {"data_hash": index.data_hash, "tokenizer_hash": index.tokenizer_hash}
        if not (ended or hardware.elsewhere):  # finished runs of another device are compared, with a warning
            now["precision"] = hardware.precision
        if cfg.init_from in self.init_hashes:
            now["init_hash"] = self.init_hashes[cfg.init_from]
        then = Environment.load(folder.path)
        if folder.changed_keys(cfg, CHANGEABLE) or any(getattr(then, key) != now[key] for key in now):
            return "changed"
        return status.status if ended or status.status == "failed" else "unfinished"

    @property
    def repeats(self) -> list[str]:
        """A note on text that a scaling study reads too often: its laws count tokens as if all were new."""
        drafts = [one.draft for one in self.arms if self.command.design_name == "scaling"]
        read = [self.dataset.epochs(draft.cfg.model.max_seq_len, draft.sequences) for draft in drafts]
        most = max((n for parts in read for n in parts.values()), default=0)
        problem = f"Beyond about {WORTH_READING}, it teaches less than new text, and the laws count it as new."
        return [f"Text is read up to {most:,.0f} times. {problem}"] if most > WORTH_READING else []

    @cached_property
    def study(self) -> Study:
        """The study as study.yaml records it."""
        command, axes = self.command, {axis for planned in self.arms for axis in planned.arm.axes}
        is_swept = bool(command.learning_rates)
        settings = planned_settings(axes, command.match, [arm.runs[0].run.cfg for arm in self.arms], is_swept)
        notes = [*self.variants.notes, *self.repeats]
        if is_swept:
            grids: dict[tuple[float, ...], list[str]] = {}
            for one in self.arms:
                grids.setdefault(command.rates_of(one.arm), []).append(one.arm.name)
            tried = [f"{len(grid)} from {grid[0]:g} to {grid[-1]:g}" for grid in grids]
            if len(grids) > 1:
                tried = [f"{what} for {conjoin(names)}" for what, names in zip(tried, grids.values(), strict=True)]
            unit = "documents" if self.dataset.entropy_floor is None else "sequences"
            further = ", beyond them where the best is an end of the grid" if command.extend_rates else ""
            notes.append(
                f"Each judged run has the best learning rate of a tuning seed, by a parabola through the "
                f"lowest loss and those beside it. Rates tried: {'; '.join(tried)}{further}, and halfway from the best "
                f"to its neighbours. Tuning runs are validated on one half of the validation {unit}, judged runs on "
                f"the other."
            )
        arms = [
            replace(
                one.arm,
                members=tuple(run.member for run in (*one.runs, *one.tuning)),
                settings=own,
                flops=one.draft.flops(one.cost),
            )
            for one, own in zip(self.arms, settings, strict=True)
        ]
        return Study(
            name=command.name,
            design=command.design_name,
            baseline=arms[0].name,
            arms=tuple(arms),
            match=command.match,
            notes=tuple(notes),
            margin=command.margin,
            max_seeds=command.max_seeds,
            reported_seeds=(),
            compare=command.compare,
            title=self.variants.title,
            lead=self.variants.lead,
        )


def by_seed(runs: Iterable[PlannedRun]) -> list[PlannedRun]:
    """Sort runs by seed, so that a study that is stopped early has complete pairs."""
    found = list(runs)
    seeds = list(dict.fromkeys(run.member.seed for run in found))
    return sorted(found, key=lambda run: seeds.index(run.member.seed))


def plan_study(command: StudyCommand, composer: Composer, site: Site | None = None) -> Plan:
    """Plan all runs of a study. Raises ConfigError for an arm that cannot be composed, built, matched or trained.

    site: where they train; default: on this machine, in this process.
    """
    variants = command.design.variants(composer)
    folder = Path(command.runs_dir) / command.name
    check_no_file(folder, command.runs_dir)
    why = "arms are compared within one size and budget" if command.design_name == "scaling" else ""
    if Study("", command.design_name, "", variants.arms).is_factorial:
        why = "a factorial tests its effects, not pairs of arms"
    if command.compare == "all" and why:
        raise ConfigError(f"study.compare=all: {why}; leave it out")
    check_grids(command, variants.arms)
    drafts = {}
    for arm in variants.arms:  # all checks that need neither data nor model come first
        cfg, choices = composer.compose(*arm.overrides)
        if command.learning_rates:
            cfg.data.val_half = "judging"
        folder_name("arm", arm.name, "")
        check_devices(cfg, command.launcher)
        drafts[arm.name] = draft = requested_run(cfg, choices, [], site)
        if draft.compiled:
            check_compiler(draft.hardware)
    drafts = in_one_precision(drafts, folder)
    check_free(command, variants.arms, {width_key(draft.cfg) for draft in drafts.values()})
    check_distinct(drafts)
    check_effects([draft.cfg for draft in drafts.values()], command.shared)
    check_budget(drafts)
    check_families(drafts)
    with open_display(steps=1, rank=0) as display:
        dataset = open_dataset(drafts[variants.arms[0].name].cfg, display)
    planned: dict[str, PlannedArm] = {}
    for arm in sorted(variants.arms, key=lambda arm: arm.reference != arm.name):  # references first
        reference = planned[arm.reference].cost if arm.reference in planned else None
        draft = drafts[arm.name]
        try:
            planned[arm.name] = plan_arm(command, arm, draft, read_by(draft.cfg, dataset), reference)
        except ConfigError as error:
            raise ConfigError(f"{error} (arm {arm.name}){variants.hint}") from None
    if command.match == "active" and all(one.cost.params_active == one.cost.params for one in planned.values()):
        raise ConfigError("match=active: no arm has experts, so all parameters are active; use match=params")
    arms = compiled_alike(command, [planned[arm.name] for arm in variants.arms])
    return Plan(command, variants, folder, arms, dataset, check_sources(arms, dataset))


def check_sources(arms: Sequence[PlannedArm], dataset: Dataset) -> dict[str, str]:
    """Hash of the weights of each `init_from`, except those that are gone and no longer needed.

    Raises ConfigError for a run that cannot start from them.
    """
    by_source: dict[str, list[Run]] = {}
    for planned in (run.run for arm in arms for run in (*arm.runs, *arm.tuning)):
        if planned.cfg.init_from:
            by_source.setdefault(planned.cfg.init_from, []).append(planned)
    hashes = {}
    for init_from, runs in by_source.items():
        starting = {run.arm: run for run in runs if not existing(run.folder.checkpoint)}
        if starting or has_source(runs[0].cfg):
            source = load_source(runs[0].cfg)
            for run in starting.values():
                read = read_by(run.cfg, dataset)
                fit_weights(source, run.cfg, meta_model(run.cfg, read), read)
            hashes[init_from] = hash_of(source.model.state_dict())
    return hashes


def compiled_alike(command: StudyCommand, arms: Sequence[PlannedArm]) -> tuple[PlannedArm, ...]:
    """Resolve `trainer.compile=auto` once for all arms: as their runs began, else by the largest arm.

    The decision is an override of every run, since smaller arms might decide otherwise on their own; where all of them
    would train eagerly anyway, there is none.
    """
    undecided = {arm.arm.name: arm for arm in arms if arm.draft.cfg.trainer.compile == "auto"}
    if not undecided:
        return tuple(arms)
    runs = [run.run for arm in undecided.values() for run in (*arm.tuning, *arm.runs)]
    largest, hardware = max(arm.draft.flops(arm.cost) for arm in undecided.values()), runs[0].hardware
    begun = (
        run.folder.compiled
        for run in runs
        if is_run(run.folder.path) and not run.folder.changed_keys(run.cfg, CHANGEABLE)
    )
    compiled = next(begun, None)
    if compiled is None:
        compiled = decide(largest, hardware)
    if not (compiled or pays(largest, hardware)):
        return tuple(arms)
    return tuple(
        with_runs(command, replace(arm, compiled=compiled)) if arm.arm.name in undecided else arm for arm in arms
    )


def in_one_precision(drafts: Mapping[str, Run], folder: Path) -> dict[str, Run]:
    """The drafts with one precision for all that leave it open: that of the study's first runs, else of its baseline.

    It becomes a setting of the runs that would decide otherwise on their own.
    """
    (baseline, *_), found = drafts.values(), dict[str, Run]()
    begun = (Environment.load(file.parent).precision for file in sorted(folder.glob(f"*/*/{Environment.FILE}")))
    precision = next(filter(None, begun), baseline.hardware.precision)
    for name, draft in drafts.items():
        is_open = draft.cfg.trainer.precision == "auto" and not draft.hardware.elsewhere
        if is_open and draft.hardware.precision != precision:
            draft.cfg.trainer.precision = precision
            draft = replace(draft, hardware=replace(draft.hardware, precision=precision))
        found[name] = draft
    return found


def check_free(command: StudyCommand, arms: Sequence[Arm], widths: Collection[str]) -> None:
    """Raise ConfigError for a setting on the command line that the study sets for each arm. widths: their keys."""
    ours = {override.partition("=")[0] for arm in arms for override in arm.overrides}
    ours |= {"optim.lr", "data.val_half"} if command.learning_rates else set()
    ours |= {WIDTH, *widths} if command.match != "none" else set()
    for argument in command.shared:
        key = override_key(argument)
        if key in ours:
            or_fix = ", or search none with study.learning_rates=null" if key == "optim.lr" else ""
            raise ConfigError(f"{argument}: the study sets {key} itself, arm by arm; leave it out{or_fix}")

    by_name = {arm.name: arm for arm in arms}
    for arm in arms:
        reference = by_name.get(arm.reference, arm)
        for override in arm.overrides:
            key = override_key(override)
            is_shared = override in reference.overrides  # with the arm that it is matched to
            if key == "optim.lr" and command.learning_rates:
                raise ConfigError(f"{key}: is an axis, and study.learning_rates searches it; set these to null")
            if key in (WIDTH, *widths, "size.mlp_ratio", "size") and command.match != "none" and not is_shared:
                raise ConfigError(f"{key}: is an axis, and match={command.match} would undo it; use match=none")


def check_grids(command: StudyCommand, arms: Sequence[Arm]) -> None:
    """Raise ConfigError unless each arm has one grid of learning rates, if they are searched, and each grid an arm."""
    names = {name for arm in arms for name in (arm.name, *arm.axes.values())}
    for name in command.learning_rates:
        if name and name not in names:
            raise ConfigError(
                f"study.learning_rates: {name} is no arm and no option{suggestion(name, names)}; choose among "
                f"{', '.join(sorted(names))}"
            )
    for arm in arms:
        command.rates_of(arm)


def check_distinct(drafts: Mapping[str, Run]) -> None:
    """Raise ConfigError for two arms with the same settings: of INDIRECT ones, what layers have by them."""
    settings = {name: flatten(resolved(draft.cfg) | dict.fromkeys(INDIRECT)) for name, draft in drafts.items()}
    for one, other in combinations(settings, 2):
        if settings[one] == settings[other]:
            raise ConfigError(f"study: arms {one} and {other} have the same settings; leave one of them out")


def check_budget(drafts: Mapping[str, Run]) -> None:
    """Raise ConfigError for a token budget that is no multiple of every arm's step."""
    budgets = {int(draft.cfg.train.tokens) for draft in drafts.values()}
    sizes = sorted({draft.tokens_per_step for draft in drafts.values()})
    tokens, common = min(budgets), math.lcm(*sizes)
    if len(budgets) == 1 and len(sizes) > 1 and tokens % common:
        raise ConfigError(
            f"train.tokens={tokens}: is no whole number of steps of {conjoin(list(map(str, sizes)))} tokens, so that "
            f"arms would train unequally; give train.tokens={max(tokens // common, 1) * common}"
        )


def check_families(drafts: Mapping[str, Run]) -> None:
    """Raise ConfigError for arms of several families or objectives whose losses do not compare."""
    configs = [flatten(resolved(draft.cfg)) for draft in drafts.values()]
    if len({tuple(config.get(key) for key in KIND) for config in configs}) == 1:
        return
    if len(targets := sorted({*map(targets_of, configs)})) > 1:
        raise ConfigError(f"objective: losses of {conjoin(targets)} do not compare; give all arms the same targets")
    if lengths := next((found for config in configs if (found := config["train.eval_lengths"])), None):
        problem = "beyond the trained context families read unlike parts of a window; set it to []"
        raise ConfigError(f"train.eval_lengths={format_value(lengths)}: {problem}")
    if len(windows := sorted({str(config["model.max_seq_len"]) for config in configs})) > 1:
        problem = "families are compared by the second halves of equal windows; give all arms one"
        raise ConfigError(f"model.max_seq_len: arms have {conjoin(windows)}, but {problem}")


def plan_arm(command: StudyCommand, arm: Arm, draft: Run, dataset: Dataset, reference: Cost | None) -> PlannedArm:
    """Build an arm on the meta device, match it to `reference` if that is not None, and plan its runs."""
    cfg = draft.cfg
    for half in HALVES if command.learning_rates else (cfg.data.val_half,):
        dataset.validated_on(half).require_windows(cfg.model.max_seq_len, cfg.train.batch_size)
    encode_prompt("train.prompt", cfg.train.prompt, dataset.tokenizer)
    width, residual = OmegaConf.select(cfg, width_key(cfg)), None if command.match == "none" else 0.0
    cost = model_cost(meta_model(cfg, dataset))
    if command.match != "none" and reference is not None:
        part = "feed-forward" if width_key(cfg) == WIDTH else "mixer"
        width, cost, residual = match_width(lambda w: cost_at(cfg, dataset, w), width, command.match, reference, part)
    planned = with_runs(command, PlannedArm(replace(arm, residual=residual), draft, width, cost))
    first = planned.runs[0].run
    if "size" in arm.axes and arm.tuner == arm.name:  # another budget takes no more memory
        check_memory(first, dataset)
    build_optimizer(first, meta_model(first.cfg, dataset))  # for its checks
    return planned


def with_runs(command: StudyCommand, planned: PlannedArm) -> PlannedArm:
    """The arm with its runs planned."""
    name = planned.arm.name
    runs = tuple(plan_run(command, planned, Member(f"{name}/seed={seed}", seed)) for seed in command.seeds)
    tuning = tuple(
        plan_tuning(command, planned, rate, command.tuning_seeds[seed], seed)
        for seed in command.seeds
        if command.tuned_with.get(seed) == seed
        for rate in command.rates_of(planned.arm)
    )
    rates = len(command.rates_of(planned.arm))
    return replace(planned, runs=runs, tuning=tuning if planned.arm.tuner == name else (), rates=rates)


def with_next_seed(plan: Plan, names: Collection[str]) -> Plan:
    """The plan with the first of its further seeds for these arms."""
    seed, *others = plan.command.further_seeds
    command = replace(plan.command, seeds=(*plan.command.seeds, seed), further_seeds=tuple(others))
    arms = tuple(with_runs(command, arm) if arm.arm.name in names else arm for arm in plan.arms)
    return replace(plan, command=command, arms=arms)


def plan_tuning(command: StudyCommand, planned: PlannedArm, rate: float, seed: int, tunes: int) -> PlannedRun:
    """A run on `seed` that helps to choose the learning rate of the judged seed `tunes`."""
    return plan_run(command, planned, Member(f"{planned.arm.name}-lr={rate:g}/seed={seed}", seed, rate, tunes))


def plan_run(command: StudyCommand, planned: PlannedArm, member: Member) -> PlannedRun:
    """A run with the overrides that would start it on its own."""
    folder = member.folder.partition("/")[0]
    settings: dict[str, Any] = {"name": command.name, "arm": folder, "seed": member.seed}
    if command.match != "none" and planned.width is not None:
        settings[width_key(planned.draft.cfg)] = planned.width
    if member.learning_rate is not None:
        settings["optim.lr"] = member.learning_rate
    if command.learning_rates:
        settings["data.val_half"] = "judging"
    if member.tunes is not None:
        settings |= {"data.val_half": "tuning", "train.evaluations": 1, "train.eval_lengths": []}
    if planned.compiled is not None:
        settings["trainer.compile"] = planned.compiled
    if (precision := planned.draft.cfg.trainer.precision) != "auto":
        settings["trainer.precision"] = precision
    shared = [override for override in command.shared if override_key(override) not in settings]
    overrides = [*planned.arm.overrides, *shared, *(f"{key}={to_override(v)}" for key, v in settings.items())]
    cfg = copy.deepcopy(planned.draft.cfg)
    for key, value in settings.items():
        OmegaConf.update(cfg, key, value)
    draft = planned.draft
    run = new_run(cfg, command.name, folder, overrides, draft.choices, lambda *_: draft.hardware)
    return PlannedRun(member, run)


def meta_model(cfg: DictConfig, dataset: Dataset) -> Decoder:
    """A run's model on the meta device."""
    with torch.device("meta"):
        model: Decoder = build_model(cfg, dataset.index.vocab_size, dataset.tokenizer.eot_id)
    return model


def width_key(cfg: DictConfig) -> str:
    """The key that matching solves: the feed-forward's width or, without one, that of values in the mixer's heads."""
    return WIDTH if cfg.model.ffn is not None else MIXER_WIDTH


def cost_at(cfg: DictConfig, dataset: Dataset, width: int) -> Cost:
    """The cost of an arm with this width, that of `width_key`."""
    cfg = copy.deepcopy(cfg)
    OmegaConf.update(cfg, width_key(cfg), width)
    return model_cost(meta_model(cfg, dataset))
