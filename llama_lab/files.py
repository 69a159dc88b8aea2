"""Files that are replaced in one move, so that nobody ever finds half of one."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(file: Path) -> Iterator[Path]:
    """A path beside `file` to write to, which takes its place at the end, unless writing failed."""
    fresh = file.with_name(f"{file.name}.tmp")
    yield fresh
    fresh.replace(file)
