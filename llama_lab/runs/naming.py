"""Short names of runs, by what differs between them; folders have longer, unique names, see `arm_name`."""

import re
from collections import Counter
from collections.abc import Collection, Sequence

from llama_lab.config.grammar import override_key
from llama_lab.config.schema import UNNAMED, belongs

from .record import Record

TEXT_AND_DEVICES = ("data", "trainer")  # what the name of a run on its own leaves out
LONGEST = 100  # characters; W&B takes 128, with the seed
FOLDERS = re.compile(r"[^\s,\[\](){}'\"=]*/(?!seed=)")  # before a file's name; a run's folder keeps its arm and seed


def short_name(recipe: str, overrides: Sequence[str], shared: Collection[str] | None = None) -> str:
    """A run's name from its recipe and what was typed: `llama norm=layernorm optim.lr=1e-3`.

    shared: the keys that have the same value in all runs that this one is shown with; the name is then that of the
    others, `norm=layernorm`, or the recipe if there are none. None for a run on its own.
    """
    settings = {override_key(o): o.lstrip("+") for o in overrides}
    left_out = (*UNNAMED, *(TEXT_AND_DEVICES if shared is None else shared))
    shown = {key: typed for key, typed in sorted(settings.items()) if not belongs(key, left_out)}
    chosen = shown.pop("arch", None)
    words = [FOLDERS.sub("", typed.removeprefix("model.")) for typed in shown.values()]
    if chosen or shared is None or not words:
        words.insert(0, chosen.partition("=")[2] if chosen else recipe)
    name = re.sub(r"['\"]", "", " ".join(words))
    return name if len(name) <= LONGEST else f"{name[: LONGEST - 1]}…"


def short_names(records: Sequence[Record]) -> list[str]:
    """The short name of each run's arm among the others; ambiguous ones are replaced by folder names."""
    typed = [{override_key(o): o for o in record.overrides} for record in records]
    shared = {key for key, value in typed[0].items() if all(of_run.get(key) == value for of_run in typed)}
    names = {
        record.folder_name: str(record.config.get("arm") or "")
        or short_name(record.environment.choices.get("arch", record.environment.name), record.overrides, shared)
        for record in records
    }
    taken = Counter(names.values())
    return [own if taken[own := names[record.folder_name]] == 1 else record.folder_name for record in records]
