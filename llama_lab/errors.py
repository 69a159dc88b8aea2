"""What is meant for users: one exception, and how its message helps."""

import difflib
from collections.abc import Iterable

FAILED, USER_ERROR, INTERRUPTED = 1, 2, 130  # exit statuses


class ConfigError(ValueError):
    """A setting that cannot work: one line naming the key, its value and the fix.

    The command line prints the message without a traceback and exits with status 2.
    """


class FinishedRunError(ConfigError):
    """The run that was asked for is there already, with the same settings. A sweep passes over it."""


class RunFailedError(Exception):
    """A run in a process of its own crashed or was killed: one line on how. The command line exits with status 1."""


def suggestion(wrong: str, known: Iterable[str]) -> str:
    """` (did you mean ...?)` if something known is close."""
    close = difflib.get_close_matches(wrong, list(known), n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def first_line(error: BaseException) -> str:
    """What an error says, short and as a part of a sentence; a library's with its kind."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if isinstance(error, ConfigError):
        return " ".join(lines)
    return f"{type(error).__name__}: {' '.join(lines)[:200]}"
