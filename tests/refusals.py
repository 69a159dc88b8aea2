"""What every refusal is: one line that begins with the key or file at fault and says what to do, and exit status 2."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from llama_lab.config.messages import USER_ERRORS, one_line
from tests.conftest import Ran

SAYS_WHAT_TO_DO = (
    ";",
    "must ",
    "needs ",
    "did you mean",
    "such as",
    "choose ",
    "use ",
    "give ",
    "add ",
    ", or ",
    "=true ",
)


def faults(table: str) -> list[tuple[str, str]]:
    """The lines of a table of overrides, each with the key at fault: of the last override, or what `->` names."""
    found = []
    for line in table.split("\n"):
        typed, _, named = line.partition(" -> ")
        if typed:
            found.append((typed, named or typed.split()[-1].partition("=")[0]))
    return found


def check_line(line: str, fault: str) -> None:
    """Fail unless this is one line that begins with `fault`, such as `train.tokens=-5`, and says what to do."""
    assert line.startswith(fault), line
    assert "\n" not in line, line
    assert any(words in line for words in SAYS_WHAT_TO_DO), f"it does not say what to do: {line}"


def check_refused(ran: Ran, fault: str) -> None:
    """Fail unless a command ended with status 2, and with that line alone on standard error."""
    assert ran.code == 2, ran.err
    assert ran.err.startswith("error: "), ran.err
    check_line(ran.err.removeprefix("error: ").removesuffix("\n"), fault)


@contextmanager
def refusing(fault: str) -> Iterator[None]:
    """Inside, an error of the user's is raised that a command would tell in that line."""
    with pytest.raises(USER_ERRORS) as raised:
        yield
    check_line(one_line(raised.value), fault)
