"""The plan of a study: every arm composed, checked, built on the meta device and matched before any run trains."""

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from llama_lab.config.arguments import quote
from llama_lab.config.components import build_model, model_cost, override_key
from llama_lab.data.open import open_dataset
from llama_lab.data.tokenizer import encode_prompt
from llama_lab.data.tokens import TokenDataset
from llama_lab.devices.site import Site
from llama_lab.display import open_display
from llama_lab.errors import ConfigError
from llama_lab.model import Cost, Decoder
from llama_lab.runs.folder import check_no_file
from llama_lab.study.settings import planned_settings
from llama_lab.study.study import Arm, Member, Study
from llama_lab.training.prepare import check_devices, folder_name, requested_run
from llama_lab.training.run import Run, build_module, new_run

from .command import Composer, StudyCommand
from .designs import Variant, Variants
from .matching import AIM, match_width


@dataclass(frozen=True)
class PlannedRun:
    """A run, its entry in study.yaml, and the overrides that start it."""

    member: Member
    overrides: tuple[str, ...]
    run: Run


@dataclass(frozen=True)
class PlannedArm:
    """An arm of the design with its final width and cost. residual: see `Matched`; None if nothing is matched.

    runs: the judged ones, at the config's learning rate. tuning: those that choose another rate. plan_member: plans the
    run of a member of this arm.
    """

    variant: Variant
    width: int
    cost: Cost
    residual: float | None
    runs: tuple[PlannedRun, ...]
    tuning: tuple[PlannedRun, ...]
    plan_member: Callable[[Member], PlannedRun]

    @property
    def members(self) -> tuple[Member, ...]:
        """The members of all runs."""
        return tuple(run.member for run in (*self.runs, *self.tuning))


@dataclass(frozen=True)
class Plan:
    """A study that is ready to start, with its arms in the design's order. dataset: that of all runs.

    rates: the grid of learning rates; empty if none are searched. extend_rates: whether to search beyond the grid.
    """

    study: Study
    folder: Path
    arms: tuple[PlannedArm, ...]
    dataset: TokenDataset
    rates: tuple[float, ...]
    extend_rates: bool

    @property
    def runs(self) -> list[PlannedRun]:
        """All judged runs."""
        return by_seed(run for arm in self.arms for run in arm.runs)

    @property
    def tuning(self) -> list[PlannedRun]:
        """All tuning runs."""
        return by_seed(run for arm in self.arms for run in arm.tuning)


def with_arms(plan: Plan, arms: Sequence[PlannedArm]) -> Plan:
    """The plan with `arms` in place of its own, in its study too."""
    recorded = tuple(replace(was, members=arm.members) for was, arm in zip(plan.study.arms, arms, strict=True))
    return replace(plan, arms=tuple(arms), study=replace(plan.study, arms=recorded))


def by_seed(runs: Iterable[PlannedRun]) -> list[PlannedRun]:
    """Sort runs by seed, so that a study that is stopped early has complete pairs."""
    found = list(runs)
    seeds = list(dict.fromkeys(run.member.seed for run in found))
    return sorted(found, key=lambda run: seeds.index(run.member.seed))


@dataclass(frozen=True)
class Composed:
    """An arm's config and choice per group, before its runs have names. site: where they train; see `plan_study`."""

    variant: Variant
    cfg: DictConfig
    choices: dict[str, Any]
    site: Site | None


def plan_study(command: StudyCommand, composer: Composer, site: Site | None = None) -> Plan:
    """Plan all runs of a study. Raises ConfigError for an arm that cannot be composed, built, matched or trained.

    site: where they train; default: on this machine, in this process.
    """
    variants = command.design.variants(composer)
    folder = Path(command.runs_dir) / command.name
    check_no_file(folder, command.runs_dir)
    check_free(command, variants.arms)
    composed = [check_arm(variant, composer, command.launcher, site) for variant in variants.arms]
    with open_display(steps=1, rank=0) as display:
        dataset = open_dataset(composed[0].cfg, display)
    arms = plan_arms(command, composed, dataset)
    study = describe(command, variants, arms)
    return Plan(study, folder, arms, dataset, command.learning_rates or (), command.extend_rates)


def check_free(command: StudyCommand, variants: Sequence[Variant]) -> None:
    """Raise ConfigError for a setting on the command line that the study sets for each arm."""
    ours = {override.partition("=")[0] for variant in variants for override in variant.overrides}
    ours |= {"optim.lr"} if command.learning_rates else set()
    ours |= {"model.hidden_dim"} if command.match != "none" else set()
    for argument in command.shared:
        key = override_key(argument)
        if key in ours:
            or_fix = ", or search none with study.learning_rates=null" if key == "optim.lr" else ""
            raise ConfigError(f"{argument}: the study sets {key} itself, arm by arm; leave it out{or_fix}")


def check_arm(variant: Variant, composer: Composer, launcher: str, site: Site | None) -> Composed:
    """Compose an arm and run the checks that need neither data nor model. Raises ConfigError."""
    cfg, choices = composer.compose(*variant.overrides)
    folder_name("arm", variant.name, "")
    check_devices(cfg, launcher)
    requested_run(copy.deepcopy(cfg), choices, [], site)
    return Composed(variant, cfg, choices, site)


def plan_arms(command: StudyCommand, composed: Sequence[Composed], dataset: TokenDataset) -> tuple[PlannedArm, ...]:
    """Build every arm on the meta device and match it to its reference. References are planned first."""
    arms: dict[str, PlannedArm] = {}
    for arm in sorted(composed, key=lambda arm: arm.variant.reference != arm.variant.name):
        reference = arms[arm.variant.reference].cost if arm.variant.reference in arms else None
        try:
            arms[arm.variant.name] = plan_arm(command, arm, dataset, reference)
        except ConfigError as error:
            raise ConfigError(f"{error} (arm {arm.variant.name})") from None
    return tuple(arms[arm.variant.name] for arm in composed)


def plan_arm(command: StudyCommand, arm: Composed, dataset: TokenDataset, reference: Cost | None) -> PlannedArm:
    """Build an arm, match it to `reference` if that is not None, and plan its runs."""
    cfg = arm.cfg
    dataset.require_windows(cfg.model.max_seq_len, cfg.train.batch_size)
    encode_prompt("train.prompt", cfg.train.prompt, dataset.tokenizer)
    width, residual = cfg.model.hidden_dim, None
    cost = cost_at(cfg, dataset, width)
    if command.match != "none":
        residual = 0.0
        if reference is not None:
            matched = match_width(lambda w: cost_at(cfg, dataset, w), width, command.match, reference)
            width, cost, residual = matched.width, matched.cost, matched.residual
    settings = {} if command.match == "none" else {"model.hidden_dim": width}
    plan_member = partial(plan_run, command, arm, settings)
    name = arm.variant.name
    runs = tuple(plan_member(Member(f"{name}/seed={seed}", seed)) for seed in command.seeds)
    tuning = tuple(
        plan_member(tuning_member(name, rate, by, seed))
        for seed, by in command.tuning_seeds.items()
        for rate in command.learning_rates or ()
    )
    build_module(runs[0].run, meta_model(runs[0].run.cfg, dataset), dataset.val_bytes)
    return PlannedArm(arm.variant, width, cost, residual, runs, tuning, plan_member)


def tuning_member(arm: str, rate: float, seed: int, tunes: int) -> Member:
    """A run on `seed` that helps to choose the learning rate of the judged seed `tunes`."""
    return Member(f"{arm}-lr={rate:g}/seed={seed}", seed, rate, tunes)


def plan_run(command: StudyCommand, arm: Composed, settings: dict[str, Any], member: Member) -> PlannedRun:
    """A run, and the overrides that would start it on its own."""
    folder = member.folder.partition("/")[0]
    settings = {"name": command.name, "arm": folder, "seed": member.seed} | settings
    if member.learning_rate is not None:
        settings["optim.lr"] = member.learning_rate
    overrides = (*arm.variant.overrides, *command.shared, *(f"{key}={quote(v)}" for key, v in settings.items()))
    cfg = copy.deepcopy(arm.cfg)
    for key, value in settings.items():
        OmegaConf.update(cfg, key, value)
    run = new_run(cfg, command.name, folder, list(overrides), arm.choices, arm.site)
    return PlannedRun(member, overrides, run)


def meta_model(cfg: DictConfig, dataset: TokenDataset) -> Decoder:
    """A run's model on the meta device."""
    with torch.device("meta"):
        model: Decoder = build_model(cfg, dataset.vocab_size)
    return model


def cost_at(cfg: DictConfig, dataset: TokenDataset, width: int) -> Cost:
    """The cost of an arm with this feed-forward width."""
    cfg = copy.deepcopy(cfg)
    cfg.model.hidden_dim = width
    return model_cost(meta_model(cfg, dataset))


def describe(command: StudyCommand, variants: Variants, arms: Sequence[PlannedArm]) -> Study:
    """The study as study.yaml records it."""
    axes = {axis for arm in arms for axis in arm.variant.axes}
    settings = planned_settings(axes, command.match, [arm.runs[0].run.cfg for arm in arms])
    return Study(
        name=command.name,
        design=command.option,
        baseline=variants.arms[0].name,
        arms=tuple(
            Arm(
                name=arm.variant.name,
                axes=arm.variant.axes,
                members=arm.members,
                previous=arm.variant.previous,
                residual=arm.residual,
                settings=own,
            )
            for arm, own in zip(arms, settings, strict=True)
        ),
        match=command.match,
        notes=(*variants.notes, *rate_notes(command)),
        margin=command.margin,
        title=variants.title,
    )


def rate_notes(command: StudyCommand) -> list[str]:
    """A sentence on the grid of learning rates, if there is one."""
    if command.learning_rates is None:
        return []
    low, high = min(command.learning_rates), max(command.learning_rates)
    further = ", and beyond them where the best is an end of the grid" if command.extend_rates else ""
    return [
        f"Each judged run has the learning rate that is best on a tuning seed of its own, of "
        f"{len(command.learning_rates)} from {low:g} to {high:g}{further}."
    ]


def residual_notes(match: str, arms: Sequence[PlannedArm]) -> list[str]:
    """A sentence on the arms whose residual is larger than `AIM`, if there are any."""
    far = [arm for arm in arms if arm.residual is not None and abs(arm.residual) > AIM]
    named = ", ".join(f"{arm.variant.name} {arm.residual:+.2%}" for arm in far)
    return [f"Widths are whole numbers, so {match} are not equal to {AIM:.1%}: {named}."] if far else []
