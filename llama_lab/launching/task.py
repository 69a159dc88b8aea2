"""What a worker is to do, as a file. Plain pickle does, since functions travel by their names."""

import inspect
import pickle
import pkgutil
import runpy
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

TASK_FILE = "LLAMA_LAB_TASK"  # the environment variable that names the file


@dataclass(frozen=True)
class Function:
    """A function at the top of a module, to be found again in another process.

    script: the program that defines it, None for a module that can be imported.
    """

    module: str
    name: str
    script: str | None

    @classmethod
    def of(cls, function: TaskFunction) -> Self:
        """How to find `function`."""
        script = sys.modules["__main__"].__file__ if function.__module__ == "__main__" else None
        return cls(function.__module__, function.__qualname__, script)

    def load(self) -> TaskFunction:
        """The function, without the decorator that would start Hydra again."""
        if self.script is None:
            found = pkgutil.resolve_name(f"{self.module}:{self.name}")
        else:  # under the name that multiprocessing gives it, so that the program does not start again
            found = runpy.run_path(self.script, run_name="__mp_main__")[self.name]
        return inspect.unwrap(found)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Task:
    """A job of Hydra's, and the state of Hydra that it needs. program: what the user has started, `sys.argv[0]`."""

    function: Function
    config: DictConfig
    context: HydraContext
    singletons: Mapping[type, Any]
    program: str

    def to_bytes(self) -> bytes:
        """What a file of it holds."""
        return pickle.dumps(self)

    def save(self, file: Path) -> None:
        """Write it."""
        file.write_bytes(self.to_bytes())

    @classmethod
    def load(cls, file: Path) -> Self:
        """Read it."""
        task: Self = pickle.loads(file.read_bytes())
        return task


def result_file(task_file: Path) -> Path:
    """Where a worker leaves the status and the return value, or the error, of its JobReturn."""
    return task_file.with_suffix(".result")
