"""From a request to runs: every arm composed, checked, built on the meta device and matched, before one trains."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from llama_lab.config import build_model, model_cost, override_key
from llama_lab.data.tokens import TokenDataset
from llama_lab.errors import ConfigError
from llama_lab.job import check_devices, folder_name, plan_job
from llama_lab.model import Cost, Decoder
from llama_lab.training.display import open_display
from llama_lab.training.folder import check_no_file
from llama_lab.training.hardware import Hardware
from llama_lab.training.run import Run, build_module, encode_prompt, open_dataset, plan

from .design import Variant, Variants
from .matching import AIM, match_width
from .record import Arm, Member, Study
from .request import Composer, Request
from .settings import planned_settings


@dataclass(frozen=True)
class PlannedRun:
    """A run, and the overrides that start it."""

    member: Member
    overrides: tuple[str, ...]
    run: Run


@dataclass(frozen=True)
class PlannedArm:
    """An arm of the design with its real width and costs. residual: see `Matched`; None where nothing is matched."""

    variant: Variant
    width: int
    cost: Cost
    residual: float | None
    runs: tuple[PlannedRun, ...]


@dataclass(frozen=True)
class Plan:
    """A study that could start, its arms in the design's order. dataset: what all of its runs train on."""

    study: Study
    folder: Path
    arms: tuple[PlannedArm, ...]
    dataset: TokenDataset

    @property
    def runs(self) -> list[PlannedRun]:
        """All runs, one seed of all arms after the other: stopped early, a study has still compared equals."""
        runs = [run for arm in self.arms for run in arm.runs]
        seeds = list(dict.fromkeys(run.member.seed for run in runs))
        return sorted(runs, key=lambda run: seeds.index(run.member.seed))


@dataclass(frozen=True)
class Composed:
    """An arm's config and choice per group, as its first run has them but for the name of its folder."""

    variant: Variant
    cfg: DictConfig
    choices: dict[str, Any]
    hardware: Hardware


def plan_study(request: Request, composer: Composer, choose: Callable[[DictConfig], Hardware] | None = None) -> Plan:
    """Plan all runs of a study. Raises ConfigError for an arm that cannot be composed, built, matched or trained.

    choose: the hardware that a run will have, by its group `trainer`; this machine's if None.
    """
    variants = request.design.variants(composer)
    folder = Path(request.runs_dir) / request.name
    check_no_file(folder, request.runs_dir)
    check_free(request, variants.arms)
    composed = [check_arm(variant, composer, request.launcher, choose) for variant in variants.arms]
    with open_display(steps=1, rank=0) as display:
        dataset = open_dataset(composed[0].cfg, display)
    arms = plan_arms(request, composed, dataset)
    return Plan(describe(request, variants, arms), folder, arms, dataset)


def check_free(request: Request, variants: Sequence[Variant]) -> None:
    """Raise ConfigError for a setting on the command line that the study sets itself, arm by arm."""
    ours = {override.partition("=")[0] for variant in variants for override in variant.overrides}
    ours |= {"optim.lr"} if request.learning_rates else set()
    ours |= {"model.hidden_dim"} if request.match != "none" else set()
    for argument in request.shared:
        key = override_key(argument)
        if key in ours:
            raise ConfigError(f"{argument}: the study sets {key} itself, arm by arm; leave it out")


def check_arm(
    variant: Variant, composer: Composer, launcher: str, choose: Callable[[DictConfig], Hardware] | None
) -> Composed:
    """Compose an arm and check all that needs neither data nor model. Raises ConfigError."""
    cfg, choices = composer.compose(*variant.overrides)
    folder_name("arm", variant.name, "")
    check_devices(cfg, launcher)
    run = plan_job(copy.deepcopy(cfg), choices, [], choose)
    return Composed(variant, cfg, choices, run.hardware)


def plan_arms(request: Request, composed: Sequence[Composed], dataset: TokenDataset) -> tuple[PlannedArm, ...]:
    """Build every arm on the meta device and match it to its reference, which is planned before it."""
    arms: dict[str, PlannedArm] = {}
    for arm in sorted(composed, key=lambda arm: arm.variant.reference != arm.variant.name):
        reference = arms[arm.variant.reference].cost if arm.variant.reference in arms else None
        try:
            arms[arm.variant.name] = plan_arm(request, arm, dataset, reference)
        except ConfigError as error:
            raise ConfigError(f"{error} (arm {arm.variant.name})") from None
    return tuple(arms[arm.variant.name] for arm in composed)


def plan_arm(request: Request, arm: Composed, dataset: TokenDataset, reference: Cost | None) -> PlannedArm:
    """Build an arm, match it unless it is a reference, and plan its runs."""
    cfg = arm.cfg
    dataset.require_windows(cfg.model.max_seq_len, cfg.train.batch_size)
    encode_prompt("train.prompt", cfg.train.prompt, dataset.tokenizer)
    width, residual = cfg.model.hidden_dim, None
    cost = cost_at(cfg, dataset, width)
    if request.match != "none":
        residual = 0.0
        if reference is not None:
            matched = match_width(lambda w: cost_at(cfg, dataset, w), width, request.match, reference)
            width, cost, residual = matched.width, matched.cost, matched.residual
    settings = {} if request.match == "none" else {"model.hidden_dim": width}
    runs = tuple(plan_run(request, arm, member, settings) for member in members(request, arm.variant.name))
    build_module(runs[0].run, meta_model(runs[0].run.cfg, dataset), dataset.val_bytes)
    return PlannedArm(arm.variant, width, cost, residual, runs)


def members(request: Request, arm: str) -> list[Member]:
    """The runs of an arm: every seed at every learning rate."""
    rates = request.learning_rates or (None,)
    folders = {rate: arm if rate is None else f"{arm}-lr={rate:g}" for rate in rates}
    return [Member(f"{folder}/seed={seed}", seed, rate) for rate, folder in folders.items() for seed in request.seeds]


def plan_run(request: Request, arm: Composed, member: Member, settings: dict[str, Any]) -> PlannedRun:
    """One run, and the overrides by which its own command would start it."""
    folder = member.folder.partition("/")[0]
    settings = {"name": request.name, "arm": folder, "seed": member.seed} | settings
    if member.learning_rate is not None:
        settings["optim.lr"] = member.learning_rate
    overrides = (*arm.variant.overrides, *request.shared, *(f"{key}={quoted(v)}" for key, v in settings.items()))
    cfg = copy.deepcopy(arm.cfg)
    for key, value in settings.items():
        OmegaConf.update(cfg, key, value)
    run = plan(cfg, request.name, folder, list(overrides), arm.choices, lambda _: arm.hardware)
    return PlannedRun(member, overrides, run)


def quoted(value: Any) -> str:
    """A value as Hydra's grammar takes it."""
    return f"'{value}'" if isinstance(value, str) else str(value)


def meta_model(cfg: DictConfig, dataset: TokenDataset) -> Decoder:
    """A run's model without memory for its weights."""
    with torch.device("meta"):
        model: Decoder = build_model(cfg, dataset.vocab_size)
    return model


def cost_at(cfg: DictConfig, dataset: TokenDataset, width: int) -> Cost:
    """What an arm costs with a feed-forward of this width."""
    cfg = copy.deepcopy(cfg)
    cfg.model.hidden_dim = width
    return model_cost(meta_model(cfg, dataset))


def describe(request: Request, variants: Variants, arms: Sequence[PlannedArm]) -> Study:
    """The study's record."""
    axes = {axis for arm in arms for axis in arm.variant.axes}
    settings = planned_settings(axes, request.match, [arm.runs[0].run.cfg for arm in arms])
    return Study(
        name=request.name,
        design=request.option,
        baseline=variants.arms[0].name,
        arms=tuple(
            Arm(
                name=arm.variant.name,
                axes=arm.variant.axes,
                members=tuple(run.member for run in arm.runs),
                previous=arm.variant.previous,
                residual=arm.residual,
                settings=own,
            )
            for arm, own in zip(arms, settings, strict=True)
        ),
        match=request.match,
        notes=(*variants.notes, *rate_notes(request)),
        margin=request.margin,
        title=variants.title,
    )


def rate_notes(request: Request) -> list[str]:
    """What a reader must know of a grid of learning rates, if there is one."""
    if request.learning_rates is None:
        return []
    return [
        f"Each arm is judged at the best of {len(request.learning_rates)} learning rates, chosen on the runs that are "
        f"then compared: a little too good, for all arms alike."
    ]


def residual_notes(match: str, arms: Sequence[PlannedArm]) -> list[str]:
    """A sentence on the arms that rounding leaves further from their reference than we aim at, if there are any."""
    far = [arm for arm in arms if arm.residual is not None and abs(arm.residual) > AIM]
    named = ", ".join(f"{arm.variant.name} {arm.residual:+.2%}" for arm in far)
    return [f"Widths are whole numbers, so {match} are not equal to {AIM:.1%}: {named}."] if far else []
