"""What a worker is to do, as a file: plain pickle, since functions are known by their names."""

import pickle
import runpy
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

TASK_FILE = "LLAMA_LAB_TASK"  # the environment variable that names the file


@dataclass(frozen=True)
class Task:
    """What a worker is to do: a job of Hydra's, and the state of Hydra that it needs.

    program: what the user has started, `sys.argv[0]`.
    """

    function: TaskFunction
    config: DictConfig
    context: HydraContext
    singletons: Mapping[type, Any]
    program: str

    def save(self, file: Path) -> None:
        """Write it, and before it the script that the function is defined in, if that is the program itself."""
        main = sys.modules["__main__"].__file__ if self.function.__module__ == "__main__" else None
        with file.open("wb") as stream:
            pickle.dump(main, stream)
            pickle.dump(self, stream)

    @classmethod
    def load(cls, file: Path) -> "Task":
        """Read it."""
        with file.open("rb") as stream:
            main = pickle.load(stream)
            if main is not None:  # by another name, as multiprocessing does it, so that it does not start the program
                vars(sys.modules["__main__"]).update(runpy.run_path(main, run_name="__mp_main__"))
            task: Task = pickle.load(stream)
        return task


def result_file(task_file: Path) -> Path:
    """Where a worker leaves the status and the return value, or the error, of its JobReturn."""
    return task_file.with_suffix(".result")
