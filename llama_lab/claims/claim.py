"""A claim: what is said, by whom, what tests it, and by which rule. One YAML file each, `claims/NAME.yaml`."""

from dataclasses import dataclass, field
from inspect import signature
from pathlib import Path
from typing import Any, Literal, Self

import yaml

from llama_lab.runs.json_file import from_json
from llama_lab.runs.stored import Summary
from llama_lab.util.errors import ConfigError, first_line

from .facts import FACTS


@dataclass(frozen=True)
class Statement:
    """One statement about two arms of the claim's study, of which `arm` is compared with `against`.

    expects: of the quantity of `arm`. size: the change that is claimed, negative if it is lower; None: a direction
    alone. margin: the largest change that does not matter. quantity: the loss, in nats per token: of the last weights,
    of the average of `arm`'s against the last ones of `against`, or its change from the trained length to the longest
    windows evaluated; or the natural logarithm of the speed of training or decoding (`ArmSpeed`).
    """

    text: str
    source: str
    arm: str
    against: str
    expects: Literal["lower", "higher", "equal"]
    margin: float
    size: float | None = None
    quantity: Literal["loss", "average", "longest", "train", "decode", "decode_batch"] = "loss"


@dataclass(frozen=True)
class Figure:
    """One figure of a text, `says`. It holds if `fact`, of `FACTS`, called with `of`, gives it within `within`."""

    text: str
    source: str
    says: float
    within: float
    fact: str
    of: list[Any] = field(default_factory=list)


@dataclass(frozen=True)
class Claim:
    """A claim named after its file.

    title: in a line. rules: when they were stated, and what they rest on. study: overrides of `train.py`, without a
    name; none if figures alone are recomputed. statements and figures: what is judged. config_dir: a folder with
    options of its own, as for `--config-dir`. device: "gpu" if the study is too large for a CPU. source: overrides of
    the run that is the study's `init_from`.
    """

    name: str
    title: str
    study: list[str] = field(default_factory=list)
    statements: list[Statement] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    config_dir: str | None = None
    device: Literal["cpu", "gpu"] = "cpu"
    rules: str = ""
    source: list[str] = field(default_factory=list)

    @property
    def lacks_source(self) -> bool:
        """Whether the run that the study starts from is not here."""
        folders = [Path(one.removeprefix("init_from=")) for one in self.study if one.startswith("init_from=")]
        return any(not (folder / Summary.FILE).exists() for folder in folders)

    @classmethod
    def load(cls, file: Path) -> Self:
        """Read a claim. Raises ConfigError, in a line, for one that lacks a part."""
        try:
            given = yaml.safe_load(file.read_text(encoding="utf-8")) | {"name": file.stem}
            listed = ((Statement, given.get("statements", [])), (Figure, given.get("figures", [])))
            for kind, parts in ((cls, [given]), *listed):
                if unknown := [key for part in parts for key in part if key not in kind.__annotations__]:
                    raise ValueError(f"{unknown[0]}: no such key; choose from {', '.join(kind.__annotations__)}")
            claim = from_json(cls, given)
            said: list[Statement | Figure] = [*claim.statements, *claim.figures]
            if unsourced := [one.text for one in said if not one.source]:
                raise ValueError(f"a statement has no source: {unsourced[0]}")
            for statement in claim.statements:
                if statement.margin <= 0:
                    raise ValueError(f"margin={statement.margin}: must be positive: {statement.text}")
            if missing := [one.fact for one in claim.figures if one.fact not in FACTS]:
                raise ValueError(f"fact={missing[0]}: choose one of {', '.join(FACTS)}")
            for figure in claim.figures:
                signature(FACTS[figure.fact]).bind(*figure.of)
            if not (claim.statements or claim.figures):
                raise ValueError("it states nothing; add statements or figures")
            if bool(claim.statements) != bool(claim.study):
                raise ValueError("statements need a study, and a study statements")
        except (OSError, ValueError, TypeError, yaml.YAMLError) as error:
            raise ConfigError(
                f"{file}: is no claim: {first_line(error)}; claims/ladder.yaml shows what one has"
            ) from None
        return claim


def all_claims(folder: Path) -> dict[str, Claim]:
    """The claims in a folder, by name. Raises ConfigError if there are none, or one lacks a part."""
    claims = {file.stem: Claim.load(file) for file in sorted(folder.glob("*.yaml"))}
    if not claims:
        raise ConfigError(f"{folder}: holds no claims; run this at the top of the repository")
    return claims
