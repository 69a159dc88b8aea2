"""A job as a file that a worker reads. Plain pickle is enough, since functions are stored by name."""

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
    """The name of a module-level function, by which another process can load it.

    script: the program that defines it; None if `module` can be imported.
    """

    module: str
    name: str
    script: str | None

    @classmethod
    def of(cls, function: TaskFunction) -> Self:
        """The name of `function`."""
        script = sys.modules["__main__"].__file__ if function.__module__ == "__main__" else None
        return cls(function.__module__, function.__qualname__, script)

    def load(self) -> TaskFunction:
        """Load the function, without the decorator that would start Hydra again."""
        if self.script is None:
            found = pkgutil.resolve_name(f"{self.module}:{self.name}")
        else:  # under the name that multiprocessing gives it, so that the program does not start again
            found = runpy.run_path(self.script, run_name="__mp_main__")[self.name]
        return inspect.unwrap(found)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Task:
    """A Hydra job, with the global state of Hydra that it needs. program: the launcher's `sys.argv[0]`."""

    function: Function
    config: DictConfig
    context: HydraContext
    singletons: Mapping[type, Any]
    program: str

    def to_bytes(self) -> bytes:
        """The content of a task file."""
        return pickle.dumps(self)

    def save(self, file: Path) -> None:
        """Write the task to `file`."""
        file.write_bytes(self.to_bytes())

    @classmethod
    def load(cls, file: Path) -> Self:
        """Read a task from `file`."""
        task: Self = pickle.loads(file.read_bytes())
        return task


def result_file(task_file: Path) -> Path:
    """The file to which a worker writes the status and the return value, or the error, of its job."""
    return task_file.with_suffix(".result")
