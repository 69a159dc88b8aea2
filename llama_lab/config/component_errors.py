"""Errors raised by a user's own components, as one line with the place in the user's code."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from llama_lab.util.errors import ConfigError, RunFailedError, first_line

from .trust import package_of, users_targets

REPORTED = (ConfigError, RunFailedError, HydraException, OmegaConfBaseException)  # cli.py prints these

# Top-level packages of the user's components that were built in this process. By name, since a path would not
# distinguish a user's package from a library.
_components: set[str] = set()


def remember_components(node: Any) -> None:
    """Remember the packages of the user's components in a plain container."""
    _components.update(package_of(target) for target in users_targets(node).values())


def users_frame(error: BaseException) -> str | None:
    """The innermost frame of a user's component, `mylab/norm.py:14, in forward`; None if there is none.

    Searches the traceback of `error`, then those of its causes.
    """
    place = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        package = package_of(str(frame.f_globals.get("__name__", "")))
        if package in _components:
            place = place_of(frame.f_code, package, line)
    cause = error.__cause__ or error.__context__
    return place or (users_frame(cause) if cause else None)


def place_of(code: CodeType, package: str, line: int) -> str:
    """The place of code in a package: `mylab/norm.py:14, in forward`."""
    parts = Path(code.co_filename).parts
    begin = len(parts) - 1 - parts[::-1].index(package) if package in parts else -1
    return f"{'/'.join(parts[begin:])}:{line}, in {code.co_name}"


def users_method(component: object, *names: str) -> str | None:
    """The place of the first of these methods that the user defines; None if there is none."""
    for method in (getattr(type(component), name, None) for name in names):
        package = package_of(str(getattr(method, "__module__", "")))
        if package in _components and isinstance(method, FunctionType):
            return place_of(method.__code__, package, method.__code__.co_firstlineno)
    return None


@contextmanager
def report_component_errors() -> Iterator[None]:
    """Turn an error in a user's component into a ConfigError that names the place; other errors are bugs of ours."""
    try:
        yield
    except REPORTED:
        raise
    except Exception as error:
        if (place := users_frame(error)) is None:
            raise
        raise ConfigError(f"{place}: {first_line(error)}; fix it, HYDRA_FULL_ERROR=1 shows the traceback") from error
