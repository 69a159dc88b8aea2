"""Which of the tests a session takes: a share of the products of options, and none that would begin too late."""

import time
from collections.abc import Iterable
from typing import Any
from zlib import crc32

import pytest

SHARES = 8
KINDS = ("process", "matrix", "slow")


def first(count: int, cases: Iterable[Any]) -> list[Any]:
    """Cases of a test, of which the first are tested each time, and the others are `matrix`."""
    few, others = [*cases][:count], [*cases][count:]
    return few + [pytest.param(*case, marks=pytest.mark.matrix) for case in map(as_tuple, others)]


def as_tuple(case: Any) -> tuple[Any, ...]:
    """The values of a case, of one or several parameters."""
    return case if isinstance(case, tuple) else (case,)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Two options of `.ci/run`."""
    group = parser.getgroup("selection")
    numbers = "|".join(map(str, range(SHARES)))
    group.addoption("--share", default="all", metavar=f"{numbers}|all", help="of the tests marked matrix, one eighth")
    group.addoption("--until", type=float, metavar="SECONDS", help="since 1970; no test begins after that")


def share_of(test: str) -> int:
    """The share of a test of the matrix, by a hash of its id."""
    return crc32(test.encode()) % SHARES


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the other shares of the matrix."""
    share = config.getoption("share")
    if share == "all":
        return
    if share not in map(str, range(SHARES)):
        raise pytest.UsageError(f"--share={share}: must be 0 to {SHARES - 1}, or all")
    left_out = [item for item in items if item.get_closest_marker("matrix") and share_of(item.nodeid) != int(share)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in set(left_out)]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Begin no test that would hold up a landing."""
    end = item.config.getoption("until")
    if end is not None and time.time() > end:
        kind = next((kind for kind in KINDS if item.get_closest_marker(kind)), "quick")
        pytest.skip(f"left for lack of time ({kind})")
