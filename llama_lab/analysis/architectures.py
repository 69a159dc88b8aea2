"""A study's architectures: each arm beside the one that it is a step from, or else the baseline."""

from dataclasses import replace

from llama_lab.drawing.anatomy import Anatomy
from llama_lab.runs.record import started

from .audit import rebuilt
from .result import Architectures, Result


def architectures(result: Result) -> Architectures:
    """Each arm that differs from its reference, with that before it; the baseline and None if none does.

    Arms without runs, and those whose model cannot be rebuilt, which the audit reports, are left out, and so are pairs
    of architectures that are there already.
    """
    first = {arm.name: next(iter(started(arm.records)), None) for arm in result.arms}
    models = {name: rebuilt(record, result.trust) for name, record in first.items() if record}
    found = {name: replace(one, name=name) for name, one in models.items() if isinstance(one, Anatomy)}
    if not found:
        return ()
    baseline = found.get(result.study.baseline, next(iter(found.values())))
    pairs: list[tuple[Anatomy, Anatomy]] = []
    for arm in (arm for arm in result.arms if arm.name in found):
        one, other = found.get(arm.arm.previous or result.study.baseline, baseline), found[arm.name]
        is_there = any(not one.differs(left) and not other.differs(right) for left, right in pairs)
        pairs += [] if is_there or not other.differs(one) else [(one, other)]
    return tuple(pairs) or ((baseline, None),)
