"""Errors raised by a user's own components, as one line with the place in the user's code."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from llama_lab.errors import ConfigError, RunFailedError, first_line

OURS = ("llama_lab", "torch")
REPORTED = (ConfigError, RunFailedError, HydraException, OmegaConfBaseException)  # cli.py prints these

# Top-level packages of the components that were built in this process, other than OURS. By name, since a path would
# not distinguish a user's package from a library.
_components: set[str] = set()


def remember_components(settings: dict[str, Any]) -> None:
    """Remember the packages of a node's `_target_`s. settings: the flattened node."""
    _components.update(target.partition(".")[0] for target in users_targets(settings).values())


def users_targets(settings: dict[str, Any]) -> dict[str, str]:
    """The components of a node that are not ours, by their keys. settings: the flattened node."""
    targets = {key.removesuffix("._target_"): str(value) for key, value in settings.items() if key.endswith("_target_")}
    return {key: target for key, target in targets.items() if target.partition(".")[0] not in OURS}


def users_frame(error: BaseException) -> str | None:
    """The innermost frame of a user's component, `mylab/norm.py:14, in forward`; None if there is none.

    Searches the traceback of `error`, then those of its causes.
    """
    place = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package in _components:
            place = place_of(frame.f_code, package, line)
    cause = error.__cause__ or error.__context__
    return place or (users_frame(cause) if cause else None)


def place_of(code: CodeType, package: str, line: int) -> str:
    """Where code of a package stands: `mylab/norm.py:14, in forward`."""
    parts = Path(code.co_filename).parts
    begin = len(parts) - 1 - parts[::-1].index(package) if package in parts else -1
    return f"{'/'.join(parts[begin:])}:{line}, in {code.co_name}"


def users_method(component: object, *names: str) -> str | None:
    """Where the first of these methods that is a user's stands; None if the component has none."""
    for method in (getattr(type(component), name, None) for name in names):
        package = str(getattr(method, "__module__", "")).partition(".")[0]
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
