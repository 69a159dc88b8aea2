"""What a run's folder gives is what was trained, and one that is not whole is refused in one line."""

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from llama_lab.evaluation.evaluate import check_done
from llama_lab.evaluation.load import load_run
from llama_lab.runs.folder import RunFolder
from llama_lab.util.errors import ConfigError

LAST = Path("checkpoints/last.ckpt")
Copied = Callable[[Path], Path]


def load_finished(run: Path) -> None:
    """What an evaluation does first."""
    check_done(RunFolder(run))
    load_run(run)


def refusal(run: Path) -> str:
    """Why a folder cannot be evaluated."""
    with pytest.raises(ConfigError, match=rf"^[^\n]*{run}[^\n]*$") as caught:
        load_finished(run)
    return str(caught.value)


def test_a_loaded_run_has_the_weights_the_tokenizer_and_the_step_of_its_folder(endless: Path) -> None:
    run = load_run(endless)
    saved = torch.load(endless / LAST, weights_only=True)
    assert run.step == saved["global_step"] == 10
    state = run.model.state_dict()
    assert {f"model.{name}" for name in state} == saved["state_dict"].keys()
    assert all(torch.equal(state[name], saved["state_dict"][f"model.{name}"]) for name in state)
    assert not run.model.training
    assert run.tokenizer.hash == run.environment.tokenizer_hash
    assert run.tokenizer.decode(run.tokenizer.encode("a€")) == "a€"


GARBAGE = [b"", b"\xff\xfe\x00" * 100, b"hello", b"[]", b"{}", b"null"]
FILES = ["resolved.yaml", "environment.json", "status.json", "tokenizer.json"]


@pytest.mark.parametrize("name", FILES)
def test_a_damaged_or_missing_file_is_named(name: str, endless: Path, copied: Copied) -> None:
    file = copied(endless) / name
    whole = file.read_bytes()
    for content in [*GARBAGE, whole[: len(whole) // 2]]:
        file.write_bytes(content)
        assert f"its {name} is damaged, " in refusal(file.parent)
    file.unlink()
    assert any(words in refusal(file.parent) for words in ("holds no run", "is damaged"))


def test_a_damaged_or_missing_checkpoint_is_named(endless: Path, copied: Copied) -> None:
    file = copied(endless) / LAST
    whole = file.read_bytes()
    for kept in (0, 100, 20_000, -50):
        file.write_bytes(whole[:kept])
        assert "last.ckpt: is damaged, " in refusal(file.parents[1])
    file.unlink()
    assert "has no checkpoint yet" in refusal(file.parents[1])


@pytest.mark.parametrize("fact", ["vocab_size", "tokenizer_hash", "data_hash"])
def test_a_missing_fact_is_named(fact: str, endless: Path, copied: Copied) -> None:
    run = copied(endless)
    facts = json.loads((run / "environment.json").read_text())
    del facts[fact], facts["checksum"]
    (run / "environment.json").write_text(json.dumps(facts))
    assert f"its environment.json is damaged, KeyError: '{fact}'; " in refusal(run)


class Harm:
    """A pickle that makes a folder when it is read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)


def test_a_checkpoint_that_would_run_code_is_refused_and_does_not_run_it(
    endless: Path, copied: Copied, tmp_path: Path
) -> None:
    run, harm = copied(endless), Harm(tmp_path / "harm")
    torch.save(torch.load(run / LAST, weights_only=True) | {"extra": harm}, run / LAST)
    assert "it holds more than weights, and reading it could run code" in refusal(run)
    (run / LAST).write_bytes(pickle.dumps(harm))
    assert "is damaged, " in refusal(run)
    assert not harm.folder.exists()
    pickle.loads((run / LAST).read_bytes())
    assert harm.folder.exists(), "the pickle is harmless, and this test shows nothing"


def test_a_checkpoint_with_one_wrong_bit_among_its_weights_is_damaged(endless: Path, copied: Copied) -> None:
    run = copied(endless)
    content = bytearray((run / LAST).read_bytes())
    weights = load_run(run).model.blocks[0].attention.query.weight.detach().numpy().tobytes()
    content[content.index(weights) + 100] ^= 1
    (run / LAST).write_bytes(content)
    torch.load(run / LAST, weights_only=True)  # as PyTorch sees it, all is well
    assert "has another checksum than when it was written" in refusal(run)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([1, 2], "is no checkpoint of ours"),
        ({"state_dict": {}}, "is no checkpoint of ours"),
        ({"state_dict": {}, "global_step": "x"}, "is no checkpoint of ours"),
        ({"state_dict": {1: 2}, "global_step": 1}, "is no checkpoint of ours"),
        ({"state_dict": {"a": torch.ones(2)}, "global_step": 1}, "does not fit the model of its resolved.yaml, "),
    ],
)
def test_another_program_s_checkpoint_is_refused(content: Any, message: str, endless: Path, copied: Copied) -> None:
    run = copied(endless)
    torch.save(content, run / LAST)
    assert message in refusal(run)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (str(LAST), "does not fit the model"),
        ("tokenizer.json", "tokenizer.json is not the one it was trained with; restore the file"),
        ("resolved.yaml", "does not fit the model"),
    ],
)
def test_a_file_of_another_run_is_refused(
    name: str, message: str, endless: Path, learned: Path, copied: Copied
) -> None:
    run = copied(endless)
    shutil.copy(learned / name, run / name)
    assert message in refusal(run)


@pytest.mark.parametrize("status", ["running", "interrupted", "diverged", "failed"])
def test_an_unfinished_run_is_not_evaluated(status: Any, endless: Path, copied: Copied) -> None:
    run = copied(endless)
    RunFolder(run).write_status(status, "because")
    assert f"is {status} (because), and its losses would not be those of its budget" in refusal(run)
    assert load_run(run).step == 10
