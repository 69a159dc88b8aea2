"""A fork of the preloaded Python is what a new process would be: what it trains, prints and sees, and how it ends."""

import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

import pytest

from tests.preloaded import PreloadedPython

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
ENDS = ("pass", "sys.exit()", "sys.exit(3)", "sys.exit(257)", "sys.exit('words')", "1 / 0", "raise KeyboardInterrupt")
ENDS += ("os._exit(7)", "os.kill(os.getpid(), signal.SIGINT); time.sleep(60)")


def outcome(start: Callable[..., "Popen[str]"], command: list[str], **options: Any) -> tuple[int, str, str]:
    """Exit status, output and errors of what `start` starts."""
    process = start(command, stdin=PIPE, stdout=PIPE, stderr=PIPE, text=True, **options)
    out, err = process.communicate("input")
    return process.returncode, out, re.sub(r'  File "(<frozen runpy>|.*preloaded\.py)".*\n(    .*\n)*', "", err)


@pytest.mark.parametrize(("end", "own_session"), [*((end, False) for end in ENDS), *((end, True) for end in ENDS)])
def test_a_fork_and_a_stand_in_see_print_and_end_as_a_new_process(
    end: str, own_session: bool, preloaded: PreloadedPython, environment: dict[str, str], tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    options: dict[str, Any] = {"cwd": tmp_path, "start_new_session": own_session}
    expected = outcome(Popen, [sys.executable, str(script), end], env=environment, **options)
    assert outcome(preloaded.start, [str(script), end], **options) == expected
    if own_session:  # the fork of a stand-in always has one
        assert outcome(Popen, [preloaded.executable, str(script), end], env=environment, **options) == expected


CHAIN = """
import os, subprocess, sys, time
print(os.getpid(), os.environ["WORD"], flush=True)
if len(sys.argv) > 1:
    subprocess.Popen([sys.executable, __file__, *sys.argv[2:]])
time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_a_stand_in_reaches_its_fork_and_what_that_has_started(
    number: signal.Signals, preloaded: PreloadedPython, environment: dict[str, str], tmp_path: Path
) -> None:
    script = tmp_path / "chain.py"
    script.write_text(CHAIN)
    command, variables = [preloaded.executable, str(script), "another"], {**environment, "WORD": "here"}
    process = Popen(command, env=variables, stdout=PIPE, stderr=PIPE, text=True)
    (one, word), (other, same) = (process.stdout.readline().split() for _ in range(2))
    assert word == same == "here"
    assert str(process.pid) not in (one, other), "it was no fork"
    process.send_signal(number)
    process.communicate()  # until all have closed their ends of the pipes
    assert process.returncode == -number
