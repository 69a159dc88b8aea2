"""Raising the budget of a run, so that it is as if the budget had been larger from the start.

With the schedule `constant` every step is, and with `wsd` those before its decay, if the warm-up takes as many steps as
before. So the warm-up is kept, and a run resumes from the checkpoint at the start of its decay.
"""

import sys
from collections.abc import Sequence

from omegaconf import DictConfig, OmegaConf

from llama_lab.config.components import build, targets
from llama_lab.config.grammar import override_key
from llama_lab.config.trust import Trust
from llama_lab.runs.checkpoint import checkpoint_step
from llama_lab.runs.folder import OVERRIDES, RESOLVED, RunFolder

from .schedule import part_of, steps_alike


def with_earlier_warmup(cfg: DictConfig, folder: RunFolder, steps: int) -> DictConfig:
    """`cfg`, of `steps`, with the warm-up of the run in `folder`, whatever fraction of the new budget that is.

    So resolved.yaml is that of a run which has had this budget from the start.
    """
    if not (folder.path / RESOLVED).exists():
        return cfg
    earlier = folder.config()
    if not {"warmup"} <= cfg.schedule.keys() & earlier.schedule.keys():
        return cfg
    before, warmup = steps_of(earlier), earlier.schedule.warmup
    cfg = cfg.copy()
    cfg.schedule.warmup = warmup if steps == before else min(1.0, part_of(before, "warmup", warmup) / steps)
    return cfg


def warn_of_differences(cfg: DictConfig, folder: RunFolder, steps: int, overrides: Sequence[str]) -> None:
    """Warn if the run in `folder` would have trained differently with `cfg`, of more `steps`, from the start.

    overrides: what was typed; a warm-up among it that was not there before comes too late.
    """
    if not (folder.path / RESOLVED).exists():
        return
    earlier = folder.config()
    typed_before = OmegaConf.to_container(OmegaConf.load(folder.path / OVERRIDES), resolve=True)
    assert isinstance(typed_before, list)
    for override in overrides:
        if override_key(override) == "schedule.warmup" and override not in typed_before:
            kept = part_of(steps, "warmup", cfg.schedule.warmup)
            print(f"{override}: comes too late, the run keeps its warm-up of {kept} steps", file=sys.stderr)
    if steps <= steps_of(earlier):
        return
    ours = frozenset(target for _, target in targets(OmegaConf.to_container(cfg)))
    Trust(targets=ours).check(earlier.schedule, f"resume={cfg.resume}", lambda _: "it to this command's schedule")
    trained = checkpoint_step(folder.checkpoint_for(cfg))
    if trained > steps_alike(build(earlier.schedule, "schedule"), steps_of(earlier)):
        print(
            f"train.tokens={cfg.train.tokens:g}: the learning rate of the first {trained} steps was that of a smaller "
            "budget, and rises again; a run with schedule=constant or wsd goes on as if it had always had this one",
            file=sys.stderr,
        )


def steps_of(cfg: DictConfig) -> int:
    """The optimizer steps of a config that has been checked."""
    return int(cfg.train.tokens) // int(cfg.train.batch_size * cfg.model.max_seq_len)
