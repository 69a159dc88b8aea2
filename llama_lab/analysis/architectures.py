"""A study's architectures: each arm beside the one that it is a step from, or else the baseline."""

from collections.abc import Sequence
from dataclasses import replace

from llama_lab.config.trust import Trust
from llama_lab.drawing.anatomy import Anatomy
from llama_lab.runs.record import MISSING
from llama_lab.runs.study import Study

from .audit import rebuilt
from .result import Architectures, ArmResult


def architectures(study: Study, arms: Sequence[ArmResult], trust: Trust) -> Architectures:
    """Each arm that differs from its reference, with that before it; the baseline and None if none does.

    Arms without runs, and those whose model cannot be rebuilt, which the audit reports, are left out, and so are pairs
    of architectures that are there already.
    """
    found = {arm.name: one for arm in arms if (one := _anatomy(arm, trust))}
    if not found:
        return ()
    baseline = found.get(study.baseline, next(iter(found.values())))
    pairs: list[tuple[Anatomy, Anatomy]] = []
    for arm in (arm for arm in arms if arm.name in found):
        one, other = found.get(arm.arm.previous or study.baseline, baseline), found[arm.name]
        is_there = any(not one.differs(left) and not other.differs(right) for left, right in pairs)
        pairs += [] if is_there or not other.differs(one) else [(one, other)]
    return tuple(pairs) or ((baseline, None),)


def _anatomy(arm: ArmResult, trust: Trust) -> Anatomy | None:
    """The parts of an arm's model; None if it cannot be rebuilt."""
    record = next((record for record in arm.records if record.status != MISSING), None)
    found = rebuilt(record, trust) if record else None
    return replace(found, name=arm.name) if isinstance(found, Anatomy) else None
