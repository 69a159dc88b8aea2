"""Pictures of a study's architectures: each arm beside the arm before in a chain, or else beside the baseline."""

from collections.abc import Sequence
from dataclasses import replace

from llama_lab.config.trust import Trust
from llama_lab.drawing.anatomy import Anatomy
from llama_lab.drawing.picture import picture
from llama_lab.runs.record import MISSING

from .audit import rebuilt
from .result import ArmResult


def drawings(arms: Sequence[ArmResult], is_chain: bool, trust: Trust) -> dict[str, str]:
    """SVG by title, for each arm that differs from its reference; the baseline alone if none does.

    Arms without runs, and those whose model cannot be rebuilt, which the audit reports, are left out.
    """
    found = [one for arm in arms if (one := _anatomy(arm, trust))]
    if not found:
        return {}
    references = found if is_chain else [found[0]] * len(found)
    pairs = zip(references, found[1:], strict=False)
    beside = {f"{one.name} and {other.name}": picture(other, one) for one, other in pairs if other.differs(one)}
    return beside or {found[0].name: picture(found[0])}


def _anatomy(arm: ArmResult, trust: Trust) -> Anatomy | None:
    """The parts of an arm's model; None if it cannot be rebuilt."""
    record = next((record for record in arm.records if record.status != MISSING), None)
    found = rebuilt(record, trust) if record else None
    return replace(found, name=arm.name) if isinstance(found, Anatomy) else None
