"""`python -m llama_lab.launching.worker`: the process of one run, as a launcher starts it.

Lightning starts the further ranks of a run by the same command line, so the task is in a file that an environment
variable names. The arguments are those of the user's command, for process listings and environment.json.
"""

import atexit
import os
import pickle
import signal
import sys
import threading
import traceback
from pathlib import Path

from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, JobStatus, run_job, setup_globals
from omegaconf.basecontainer import BaseContainer

from llama_lab.config.components import register_resolvers
from llama_lab.errors import INTERRUPTED, ConfigError, RunFailedError
from llama_lab.files import replacing

from .task import TASK_FILE, Task, result_file


def main() -> None:
    """Run the job; the first rank writes its result for the launcher."""
    threading.Thread(target=exit_with_launcher, daemon=True).start()
    file = Path(os.environ[TASK_FILE])
    is_first = "LOCAL_RANK" not in os.environ  # Lightning sets it, for itself and for the ranks that it starts
    try:
        result = run(Task.load(file), is_first)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    if is_first:
        with replacing(result_file(file)) as fresh:
            fresh.write_bytes(pickle.dumps((result.status, result._return_value)))
        exit_now()


def exit_now(status: int = 0) -> None:
    """Exit without Python's teardown, which takes almost a second once PyTorch is loaded."""
    atexit._run_exitfuncs()  # libraries rely on them
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def exit_with_launcher() -> None:
    """Kill this process group when stdin closes, which it does when the launcher exits, however it exits.

    A run without its launcher would train on unseen, and keep the same command out of its folder.
    """
    while os.read(0, 1):
        pass
    os.killpg(0, signal.SIGKILL)


def run(task: Task, is_first: bool) -> JobReturn:
    """Run a job with the launcher's state of Hydra."""
    if is_first:
        sys.argv[0] = task.program
    setup_globals()
    register_resolvers()
    resolvers = BaseContainer._resolvers
    Singleton.set_state({"instances": dict(task.singletons), "omegaconf_resolvers": resolvers})
    result = run_job(task.function.load(), task.config, "hydra.sweep.dir", "hydra.sweep.subdir", task.context)
    if result.status == JobStatus.FAILED:
        result.return_value = picklable_error(result._return_value)  # the public property would raise it
    return result


def picklable_error(error: Exception) -> Exception:
    """A ConfigError as it is; any other error as a RunFailedError, with its traceback printed here."""
    if isinstance(error, ConfigError):
        return error
    traceback.print_exception(error)
    return RunFailedError(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
