"""`python -m llama_lab.launching.worker`: the process of one run, as the launcher starts it.

Lightning starts the further ranks of a run by the same command line, so what to do is in a file that the environment
names. The command line itself is the user's, for those who look at the processes or at environment.json.
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
    """Run the job; leave its result for the launcher, unless this is a further rank."""
    threading.Thread(target=die_with_the_launcher, daemon=True).start()
    file = Path(os.environ[TASK_FILE])
    is_first = "LOCAL_RANK" not in os.environ  # Lightning sets it, for itself and for the ranks that it starts
    try:
        result = run(Task.load(file), is_first)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    if is_first:
        with replacing(result_file(file)) as fresh:
            fresh.write_bytes(pickle.dumps((result.status, result._return_value)))
        leave()


def leave(status: int = 0) -> None:
    """End the process now: with all that PyTorch brings, Python takes almost a second to take itself apart."""
    atexit._run_exitfuncs()  # what libraries want to have done
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def die_with_the_launcher() -> None:
    """Standard input is a pipe that ends with the launcher, however that ends. A run without one would go on unseen,
    and stand in the way of the same command."""
    while os.read(0, 1):
        pass
    os.killpg(0, signal.SIGKILL)


def run(task: Task, is_first: bool) -> JobReturn:
    """Run a job with Hydra as it was in the launcher."""
    if is_first:
        sys.argv[0] = task.program
    setup_globals()
    register_resolvers()
    resolvers = BaseContainer._resolvers
    Singleton.set_state({"instances": dict(task.singletons), "omegaconf_resolvers": resolvers})
    result = run_job(task.function.load(), task.config, "hydra.sweep.dir", "hydra.sweep.subdir", task.context)
    if result.status == JobStatus.FAILED:
        result.return_value = told(result._return_value)  # the public property would raise it
    return result


def told(error: Exception) -> Exception:
    """An error as it can be handed over: a user's as it is, any other with its traceback printed here."""
    if isinstance(error, ConfigError):
        return error
    traceback.print_exception(error)
    return RunFailedError(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
