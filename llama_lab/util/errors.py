"""Exceptions that are shown to users as one line, exit statuses, and helpers for messages."""

import difflib
from collections.abc import Iterable

FAILED, USER_ERROR, INTERRUPTED = 1, 2, 130  # exit statuses


class ConfigError(ValueError):
    """A setting that cannot work; the message is one line with the key, its value and the fix.

    The command line prints the message without a traceback and exits with status 2.
    """


class FinishedRunError(ConfigError):
    """The run exists and is finished, with the same settings. A sweep skips it."""


class RunFailedError(Exception):
    """A run in a process of its own crashed or was killed. The command line exits with status 1."""


def require_positive(key: str, value: object, or_null: bool = True) -> None:
    """Raise ConfigError unless a setting is a positive whole number, or null where that is allowed."""
    if not (value is None and or_null) and (type(value) is not int or value < 1):
        raise ConfigError(f"{key}={'null' if value is None else value}: must be a positive whole number")


def suggestion(wrong: str, known: Iterable[str]) -> str:
    """` (did you mean ...?)` with the closest of `known`; empty if none is close."""
    close = difflib.get_close_matches(wrong, list(known), n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def first_line(error: BaseException) -> str:
    """An error's message on one line, short enough for a sentence; with the type unless it is a ConfigError."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if isinstance(error, ConfigError):
        return " ".join(lines)
    return f"{type(error).__name__}: {' '.join(lines)[:200]}"
