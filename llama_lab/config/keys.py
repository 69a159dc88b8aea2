"""The keys and options of the configs, and suggestions for those that do not exist."""

import re
from collections.abc import Iterable
from difflib import SequenceMatcher
from functools import cache
from pathlib import Path

from omegaconf import OmegaConf

from . import CONF_DIR
from .grammar import flatten

# The groups of an architecture, in the default order of a ladder.
COMPONENTS = ("block", "norm", "position", "ffn", "attention", "embedding", "init", "pattern")
CLOSE = 0.6  # difflib's default cutoff


def groups() -> list[str]:
    """The names of the config groups."""
    return sorted(p.name for p in CONF_DIR.iterdir() if p.is_dir())


def options(group: str) -> list[str]:
    """The names of a packaged group's options."""
    return sorted(p.stem for p in (CONF_DIR / group).glob("*.yaml"))


def option_file(group: str, option: str) -> Path:
    """The file of a packaged option."""
    return CONF_DIR / group / f"{option}.yaml"


@cache
def read(file: Path) -> tuple[frozenset[str], tuple[Path, ...]]:
    """The keys that a config file itself sets, and the files in its defaults list."""
    text = file.read_text(encoding="utf-8")
    header = re.match(r"# @package (\S+)", text)
    package = header[1] if header and header[1] != "_global_" else ""
    content = OmegaConf.to_container(OmegaConf.create(text))
    assert isinstance(content, dict)
    parents = [parent for parent in content.pop("defaults", []) if isinstance(parent, str) and parent != "_self_"]
    files = ((CONF_DIR if p.startswith("/") else file.parent) / f"{p.strip('/')}.yaml" for p in parents)
    return frozenset(flatten(content, package)), tuple(files)


def keys_of(file: Path) -> frozenset[str]:
    """The keys that a config file sets, including those of the files in its defaults list."""
    own, parents = read(file)
    return own.union(*map(keys_of, parents))


def homes(key: str) -> list[str]:
    """The options that set a key, by group: `position=rope | sinusoidal`; those that inherit it are left out."""
    found = []
    for group in groups():
        files = [option_file(group, option) for option in options(group)]
        having = [file for file in files if key in keys_of(file)]
        first = [file.stem for file in having if not set(read(file)[1]) & set(having)]
        if first:
            found.append(f"{group}={' | '.join(first)}")
    return found


def nearest(wrong: str, known: Iterable[str]) -> str | None:
    """The best guess for a mistyped key: one of `known`, a key of another option, or an option; None if none is close.

    The last part counts as much as the whole: `heads` is close to model.n_heads, and `model.tied` to embedding=tied.
    """
    last = wrong.rpartition(".")[2]
    if wrong in (last, f"model.{last}"):
        for group in COMPONENTS:
            if last in options(group):
                return f"{group}={last}"
    known = set(known)
    others = [group for group in groups() if group != "study" or wrong.startswith("study.")]
    elsewhere = {key for group in others for option in options(group) for key in keys_of(option_file(group, option))}
    scores = {key: likeness(wrong, key) - (0 if key in known else 0.15) for key in sorted(known | elsewhere)}
    best = max(scores, key=lambda key: (scores[key], whole_likeness(wrong, key)))
    if scores[best] < CLOSE:
        return None
    return best if best in known else f"{best}, of {homes(best)[0]}"


def likeness(a: str, b: str) -> float:
    """Similarity of two keys, from 0 to 1: of the whole keys, of their last parts, or by words that these share."""
    whole = whole_likeness(a, b)
    last_a, last_b = (key.rpartition(".")[2] for key in (a, b))
    last = whole_likeness(last_a, last_b)
    words_a, words_b = (set(last.split("_")) for last in (last_a, last_b))
    shared = 0.7 + 0.2 * whole if words_a <= words_b or words_b <= words_a else 0.0  # theta of rope_theta
    return max(whole, last if last >= 0.8 else 0.0, shared)


def whole_likeness(a: str, b: str) -> float:
    """difflib's similarity ratio."""
    return SequenceMatcher(None, a, b).ratio()


def group_of(key: str) -> str | None:
    """The group that sets a key's component: `ffn` of model.ffn.activation; None if there is none."""
    return next((part for part in reversed(key.split(".")) if part in groups()), None)
