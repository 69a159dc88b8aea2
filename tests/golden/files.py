"""Golden values: files beside this one, and how closely what the code gives now must be what they hold."""

import gzip
import json
import math
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from llama_lab.util.formatting import MINUS

HERE = Path(__file__).parent
VALUES = HERE / "values"
TOLERANCE = 1e-6  # relative, or absolute of numbers below one
LARGE = 50_000  # characters; larger files are compressed
RUNS = HERE / "runs"  # of version 0.4.0
# Of what made them: data without a path of this machine
SMALL = ["size=pico", "model.dim=16", "train.batch_size=8", "train.evaluations=2", "logger=none", "trainer=cpu"]
TEXT = [
    *SMALL,
    "data=stdlib",
    "tokenizer=byte",
    "data.val_tokens=2000",
    "data.cache_dir=cache",
    "train.sample_tokens=10",
]
FINISHED = [*TEXT, "train.tokens=20000", "name=finished", "arm=base"]
NUMBER = re.compile(rf"[<{MINUS}-]?\d+(?:,\d{{3}})*(?:\.\d+)?(?:e[-+]?\d+)?%?")

writing = False  # set by `python -m tests.golden.write`


def check(name: str, found: Any, tolerance: float = TOLERANCE, part: str | None = None) -> None:
    """Compare a value, of what JSON has, with the golden one or a part of it.

    In `python -m tests.golden.write`, write it.
    """
    if writing and part is None:
        write(name, found)
    elif writing:
        others = read(name) if [*VALUES.glob(f"{name}.json*")] else {}
        write(name, others | {part: found})
    golden = read(name) if part is None else read(name)[part]
    different = list(differences(golden, json.loads(json.dumps(found)), tolerance))
    assert not different, f"{len(different)} golden values of {name} differ:\n" + "\n".join(different[:20])


def write(name: str, value: Any) -> None:
    """Keep a value, with a line for each entry, or, a large one, compressed."""
    text = json.dumps(rounded(value), indent=1, sort_keys=True, ensure_ascii=False) + "\n"
    for ending in (".json", ".json.gz"):
        (VALUES / f"{name}{ending}").unlink(missing_ok=True)
    if len(text) < LARGE:
        (VALUES / f"{name}.json").write_text(text)
    else:
        (VALUES / f"{name}.json.gz").write_bytes(gzip.compress(text.encode(), mtime=0))


def read(name: str) -> Any:
    """A golden value."""
    packed = VALUES / f"{name}.json.gz"
    return json.loads(
        gzip.decompress(packed.read_bytes()) if packed.exists() else (VALUES / f"{name}.json").read_bytes()
    )


def rounded(value: Any) -> Any:
    """The same with numbers of nine digits."""
    if isinstance(value, dict):
        return {key: rounded(child) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(child) for child in value]
    return float(f"{value:.9g}") if isinstance(value, float) else value


def differences(golden: Any, found: Any, tolerance: float, at: str = "") -> Iterator[str]:
    """Where a value is not the golden one."""
    if isinstance(golden, dict) and isinstance(found, dict):
        for key in sorted(golden.keys() | found.keys()):
            place = f"{at}.{key}"
            if key in golden and key in found:
                yield from differences(golden[key], found[key], tolerance, place)
            else:
                yield f"{place}: {'is new' if key in found else 'is gone'}"
    elif isinstance(golden, list) and isinstance(found, list) and len(golden) == len(found):
        for i, (one, other) in enumerate(zip(golden, found, strict=True)):
            yield from differences(one, other, tolerance, f"{at}[{i}]")
    elif isinstance(golden, float | int) and isinstance(found, float | int):
        if not math.isclose(golden, found, rel_tol=tolerance, abs_tol=tolerance):
            yield f"{at}: {golden} was golden, {found} is found"
    elif golden != found:
        yield f"{at}: {golden!r} was golden, {found!r} is found"


def numbers(sentences: Iterable[str]) -> list[list[str]]:
    """The numbers of each sentence, as they are written."""
    return [NUMBER.findall(sentence) for sentence in sentences]
