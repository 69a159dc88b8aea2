"""A fork of the preloaded Python is what a new process would be: what it trains, prints and sees, and how it ends."""

import re
import sys
from functools import partial
from pathlib import Path
from subprocess import PIPE, Popen, TimeoutExpired
from typing import Any

import pytest

from tests.conftest import Ran, RunTrain
from tests.preloaded import PreloadedPython
from tests.training.tiny import identical, repeatable, trained_state

SCRIPT = """
import atexit, os, signal, sys, threading, time
def act(deed): exec(deed)
atexit.register(print, "at exit")
threading.Thread(target=lambda: (time.sleep(0.4), print("a thread"))).start()
print(__name__, __file__, __spec__, sys.argv, sys.path[0], os.getcwd(), sorted(os.listdir("/proc/self/fd")))
print(sys.stdin.read(), os.getsid(0) == os.getpid(), signal.getsignal(signal.SIGINT))
print(sorted(item for item in os.environ.items() if not item[0].startswith(("PYTORCH_", "TORCH"))))  # set by imports
sys.stdout.write("without a new line, ")
act(sys.argv[1])
"""
ENDS = (
    "pass",
    "sys.exit()",
    "sys.exit(3)",
    "sys.exit(-1)",
    "sys.exit(257)",
    "sys.exit('words')",
    "1 / 0",
    "raise KeyboardInterrupt",
    "os._exit(7)",
    "os.kill(os.getpid(), signal.SIGKILL)",
    "os.kill(os.getpid(), signal.SIGINT); time.sleep(60)",
)


@pytest.mark.parametrize(("end", "own_session"), [*((end, False) for end in ENDS), ("pass", True)])
def test_a_fork_sees_prints_and_ends_as_a_new_process(
    end: str, own_session: bool, preloaded: PreloadedPython, environment: dict[str, str], tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [str(script), end]
    options: dict[str, Any] = {"cwd": tmp_path, "stdin": PIPE, "stdout": PIPE, "stderr": PIPE, "text": True}
    options["start_new_session"] = own_session
    ended = []
    new_process = partial(Popen, [sys.executable, *command], env=environment, **options)
    for start in (partial(preloaded.start, command, **options), new_process):
        process = start()
        out, err = process.communicate("input")
        err = re.sub(r'  File "(<frozen runpy>|.*preloaded\.py)".*\n(    .*\n)*', "", err)
        ended.append((process.returncode, out, err))
    assert ended[0] == ended[1]


def test_a_fork_can_be_waited_for_and_killed(preloaded: PreloadedPython, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import time; print('begun', flush=True); time.sleep(600)")
    process = preloaded.start([str(script)], stdout=PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    assert process.poll() is None
    with pytest.raises(TimeoutExpired):
        process.wait(0.01)
    process.kill()
    assert process.wait() == process.poll() == -9


def test_a_fork_trains_to_the_same_last_bit_as_a_new_process(
    finished: Ran, run_train: RunTrain, tiny: list[str]
) -> None:
    fork = run_train(*tiny, "logger=all", "train.checkpoint_every=7", "train.micro_batch_size=4")
    assert (fork.code, fork.err) == (0, "")
    assert repeatable(fork.run) == repeatable(finished.run)
    assert identical(trained_state(fork.run), trained_state(finished.run))
