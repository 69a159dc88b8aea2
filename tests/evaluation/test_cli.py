"""`python eval.py` as a person types it: what it writes, and what it answers to what cannot be."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from llama_lab.config.components import CONF_DIR
from llama_lab.config.grammar import quote_argument
from llama_lab.runs.folder import RunFolder
from tests.conftest import Command, Start
from tests.processes import wait_until
from tests.selection import first

EVAL = Path(__file__).parents[2] / "eval.py"
QUICK = ("eval.rounds=1", "eval.contexts=[0.25]", "eval.batch_sizes=[1]", "eval.lengths=[2]")
Copied = Callable[[Path], Path]


def found(run: Path) -> dict[str, Any]:
    return dict(json.loads((run / "eval.json").read_text()))


@pytest.mark.slow
def test_a_run_is_evaluated_in_all_its_parts(evaluating: Command, learned: Path, copied: Copied) -> None:
    run = copied(learned)
    ran = evaluating(f"run={run}", *QUICK)
    assert (ran.code, ran.err) == (0, "")
    result = found(run)
    assert result.keys() >= {"val/loss", "val/perplexity", "val/bits_per_byte", "lengths", "cache", "speed", "sample"}
    assert [entry["loss"] is None for entry in result["lengths"]] == [False, True]
    assert (run / "eval.png").exists()
    for words in ("perplexity", "cannot at 64: learned positions end at 32", "bfloat16", "no cache", "─ sample ─"):
        assert words in ran.out
    assert list(run.glob("*.tmp")) == []


@pytest.mark.slow
def test_a_bad_run_stops_no_other(evaluating: Command, endless: Path, tmp_path: Path, copied: Copied) -> None:
    for name in ("a", "b", "c"):
        copied(endless).rename(tmp_path / name)
    (tmp_path / "b" / "checkpoints" / "last.ckpt").write_bytes(b"")
    ran = evaluating(f"run={tmp_path}/?", "eval.parts=[loss]")
    assert ran.code == 1
    assert [(tmp_path / name / "eval.json").exists() for name in "abc"] == [True, False, True]
    error, count = ran.err.splitlines()
    assert error.startswith(f"error: {tmp_path}/b/checkpoints/last.ckpt: is damaged, ")
    assert count == "1 of 3 runs could not be evaluated, see above"


@pytest.mark.slow
def test_a_prompt_goes_on_on_standard_output(evaluating: Command, endless: Path) -> None:
    settings = (f"run={endless}", "max_new_tokens=20", "temperature=0.8", "top_k=50", "top_p=0.95")
    one = evaluating(*settings, "prompt=def main(", "seed=1")
    assert one.code == 0
    assert one.out.startswith("def main(")
    assert one.err.startswith("20 tokens in ")
    assert len(one.err.splitlines()) == 1
    assert not (endless / "eval.json").exists()
    several = evaluating(*settings, "seed=1", 'prompts=["def main(","€"]')
    assert several.out.startswith(one.out.removesuffix("\n") + "\n----")
    for prompt in ("", 5000 * "d"):  # a document begins; longer than the name of a file, it is no folder
        ran = evaluating(f"run={endless}", f"prompt={prompt}", "max_new_tokens=5", "temperature=0")
        assert ran.code == 0
        assert ran.out.startswith(prompt)
        assert ran.err.startswith("5 tokens in ")


def test_an_unfinished_run_may_write_and_says_so(evaluating: Command, endless: Path, copied: Copied) -> None:
    run = copied(endless)
    RunFolder(run).write_status("interrupted", "by the user")
    ran = evaluating(f"run={run}", "prompt=a", "max_new_tokens=3")
    assert ran.code == 0
    assert ran.err.startswith(f"run={run}: is interrupted; this is what it writes after 10 steps\n")


PART = "eval.parts=[loss]"
REFUSED = {  # the overrides beside run=, by what is said of them
    "--multirun": "--multirun seed=1,2",
    "run=: ": "run=",
    "run=n*pe: ": "run=n*pe",
    "eval.parts: los is no part": "eval.parts=[los]",
    "eval.lengths=[0]: ": "eval.lengths=[0]",
    "max_new_tokens=40: ": "max_new_tokens=40",
    "prompt=§: ": "prompt=§",
    "eval.tasks=['a']: does nothing here": f"{PART} eval.tasks=[a]",
    "weights=best: ": "weights=best",
    "~seed: ": "~seed",
    "eval.batch_sizes=[0]: ": "eval.batch_sizes=[0]",
    "eval.rounds=0: ": "eval.rounds=0",
    "temperature=hot: ": "prompt=d temperature=hot",
    "top_p=2: ": "prompt=d top_p=2",
    "max_new_tokens=-1: ": "prompt=d max_new_tokens=-1",
    "trainer.precision=fp16: ": "trainer.precision=fp16",
    "cache_dtype=int4: ": "prompt=d cache_dtype=int4",
    "prompt: with its mark, it has 401 tokens": "prompt=" + 400 * "d",
    "prompt=\\udcff: ": "prompt=\udcff",
    "prompts: ": "prompt=d prompts=[d]",
    "data: ": "data=stdlib",
    "beside: ": "beside=RUN",
}


@pytest.mark.parametrize("message", first(9, REFUSED))
def test_what_cannot_be_is_answered_in_one_line(message: str, evaluating: Command, learned: Path) -> None:
    named = [] if message.startswith("run=") else [f"run={learned}"]
    ran = evaluating(*REFUSED[message].replace("RUN", str(learned)).split(), *named)
    assert (ran.code, ran.out) == (2, "")
    (line,) = ran.err.splitlines()
    assert line.startswith(f"error: {message}")
    assert not (learned / "eval.json").exists()
    assert not list(ran.cwd.iterdir())


def test_without_one_run_to_evaluate_it_says_what_to_write(evaluating: Command, endless: Path, learned: Path) -> None:
    for arguments, message in (
        ([], "run=???: needs a value, such as run="),
        ([str(learned)], f"{learned}: is a folder; write run={learned}\n"),
        ([f"run={endless.parents[3]}", "prompt=d"], f"run={endless.parents[3]}: "),
    ):
        ran = evaluating(*arguments)
        assert ran.code == 2
        assert ran.err.startswith(f"error: {message}")
    assert "runs, and prompts are for one; name it" in ran.err


# What is typed after prompt= is the prompt.


def composed_prompt(argument: str) -> Any:
    """The prompt of an argument as the command line hands it to Hydra."""
    with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        cfg = compose("eval", overrides=["run=here", quote_argument(argument)])
    return OmegaConf.to_container(cfg, resolve=True)["prompt"]  # type: ignore[index, call-overload]


PROMPTS = ['"""A docstring."""', "'a' + 'b'", "\\", "\\\\${a}\\", '\\"', "${oc.env:HOME}", "", "[a,b]: {c} = d\n\t%€"]


@pytest.mark.parametrize("text", PROMPTS)
def test_a_prompt_arrives_as_it_was_typed(text: str) -> None:
    assert composed_prompt(f"prompt={text}") == text


def test_quoted_values_are_left_to_hydra_and_null_is_no_prompt() -> None:
    for argument in ('prompt="a\\"b"', "prompt='a'", 'prompt=""', "prompt=null", "seed=${oc.env:HOME}", "prompt"):
        assert quote_argument(argument) == argument
    assert composed_prompt("prompt='a b'") == "a b"
    assert composed_prompt("prompt=null") is None


# Ctrl-C


@pytest.mark.slow
def test_ctrl_c_is_one_line_and_keeps_the_parts_found(start: Start, endless: Path, copied: Copied) -> None:
    run = copied(endless)
    process = start(str(EVAL), f"run={run}", "eval.rounds=100000", cwd=run)
    wait_until(lambda: ": speed\n" in process.out.read_text())
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    assert process.wait() == 130
    assert process.err.read_text() == "\nstopped; what was finished is kept\n"
    assert found(run).keys() >= {"val/loss", "lengths", "cache"}
    assert not found(run).keys() & {"speed", "sample"}


@pytest.mark.process
@pytest.mark.slow
def test_a_reader_that_has_seen_enough_is_no_error(environment: dict[str, str], endless: Path) -> None:
    command = [sys.executable, str(EVAL), f"run={endless}", "prompt=def €", "max_new_tokens=100000"]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout.read(7) == "def €".encode()
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait() == 1
