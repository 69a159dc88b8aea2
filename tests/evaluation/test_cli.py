"""`python eval.py` as a person types it: what it writes, and what it answers to what cannot be."""

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from llama_lab.config.components import CONF_DIR
from llama_lab.config.grammar import quote_argument
from llama_lab.runs.folder import RunFolder
from tests.conftest import Command
from tests.preloaded import PreloadedPython

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
    one, again, other = (evaluating(*settings, "prompt=def main(", f"seed={seed}") for seed in (1, 1, 2))
    assert one.code == 0
    assert one.out.startswith("def main(")
    assert one.out == again.out != other.out
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
    "--multirun: there is nothing to sweep here": "--multirun seed=1,2",
    "run=: is empty and sets nothing": "run=",
    "run=n*pe: holds no run": "run=n*pe",
    "eval.parts: los is no part (did you mean loss?); choose of loss, ": "eval.parts=[los]",
    "eval.parts=loss: must be a list": "eval.parts=loss",
    "~seed: takes a setting away": "~seed",
    "eval.lengths=[0]: 0 is no multiple of the context": "eval.lengths=[0]",
    "eval.batch_sizes=[0]: must hold positive whole numbers": "eval.batch_sizes=[0]",
    "eval.rounds=0: must be a positive whole number": "eval.rounds=0",
    "temperature=hot: must be a number": "prompt=d temperature=hot",
    "top_p=2: must be above 0 and at most 1": "prompt=d top_p=2",
    "max_new_tokens=-1: must not be negative": "prompt=d max_new_tokens=-1",
    "max_new_tokens=-2: must not be negative or 0": "max_new_tokens=-2",
    "max_new_tokens=40: prompts[0] of 1 tokens leaves room for 31 in max_seq_len=32": "max_new_tokens=40",
    "trainer.precision=16: this ": "trainer.precision=16",
    "trainer.precision=fp16: this ": "trainer.precision=fp16",
    "cache_dtype=int4: unknown; choose float32, ": "prompt=d cache_dtype=int4",
    "prompt: with its mark, it has 401 tokens": "prompt=" + 400 * "d",
    "prompt=§: tokenizer=char: no id for '§'": "prompt=§",
    "prompt=\\udcff: holds bytes that are not UTF-8": "prompt=\udcff",
    "prompts: there is a prompt too": "prompt=d prompts=[d]",
    "temperature=1: does nothing here, it is for prompt, sample; leave it out": f"{PART} temperature=1",
    "eval.tasks=['a']: does nothing here, it is for lm_eval": f"{PART} eval.tasks=[a]",
    "data: is for imported models, and run=": "data=stdlib",
    "beside: is for imported models, and run=": "beside=RUN",
    "weights=best: unknown; choose last | ema": "weights=best",
    "eval.rounds=2: does nothing here, it is for speed; leave it out": "eval.parts=[cache] eval.rounds=2",
}


@pytest.mark.parametrize("message", REFUSED)
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


QUOTED = re.compile(r"""(["'])(?:\\.|(?!\1|\\).)*\1""", re.DOTALL)  # one string in quotes


def composed_prompt(argument: str) -> Any:
    """The prompt of an argument as the command line hands it to Hydra."""
    with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        cfg = compose("eval", overrides=["run=here", quote_argument(argument)])
    return OmegaConf.to_container(cfg, resolve=True)["prompt"]  # type: ignore[index, call-overload]


TRICKY = st.text(st.sampled_from("\\\"'${}=,[]():~ \n\tab?#%€"), max_size=12)


@given(text=TRICKY | st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20))
@example(text='"""A docstring."""')
@example(text="'a' + 'b'")
@example(text="\\")
@example(text="\\\\${a}\\")
@example(text='\\"')
@example(text="${oc.env:HOME}")
@example(text="")
@settings(max_examples=60)
@pytest.mark.slow
def test_a_prompt_arrives_as_it_was_typed(text: str) -> None:
    assume(text not in ("null", "???") and not QUOTED.fullmatch(text))  # no prompt, nothing yet, or Hydra's own quotes
    assert composed_prompt(f"prompt={text}") == text


def test_quoted_values_are_left_to_hydra_and_null_is_no_prompt() -> None:
    for argument in ('prompt="a\\"b"', "prompt='a'", 'prompt=""', "prompt=null", "seed=${oc.env:HOME}", "prompt"):
        assert quote_argument(argument) == argument
    assert composed_prompt("prompt='a b'") == "a b"
    assert composed_prompt("prompt=null") is None


# Ctrl-C


@pytest.mark.slow
def test_ctrl_c_is_one_line_and_keeps_the_parts_found(
    preloaded: PreloadedPython, endless: Path, copied: Copied
) -> None:
    run = copied(endless)
    command = [str(EVAL), f"run={run}", "eval.rounds=100000"]
    process = preloaded.start(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if line.endswith(": speed\n"):
            break
    time.sleep(1)
    os.kill(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (130, "\nstopped; what was finished is kept\n")
    assert found(run).keys() >= {"val/loss", "lengths", "cache"}
    assert not found(run).keys() & {"speed", "sample"}


@pytest.mark.slow
def test_a_reader_that_has_seen_enough_is_no_error(preloaded: PreloadedPython, endless: Path) -> None:
    command = [str(EVAL), f"run={endless}", "prompt=def €", "max_new_tokens=100000"]
    process = preloaded.start(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout.read(7) == "def €".encode()
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(timeout=30) == 1
