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
from llama_lab.evaluation.load import TrainedRun, load_run
from llama_lab.runs.folder import RunFolder
from llama_lab.util.errors import ConfigError

LAST = Path("checkpoints/last.ckpt")
Copied = Callable[[Path], Path]


def load_finished(run: Path) -> TrainedRun:
    """What an evaluation does first."""
    check_done(RunFolder(run))
    return load_run(run)


def refusal(run: Path) -> str:
    """Why a folder cannot be evaluated."""
    with pytest.raises(ConfigError) as caught:
        load_finished(run)
    message = str(caught.value)
    assert "\n" not in message
    assert str(run) in message
    return message


def rewrite(run: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change what a run's checkpoint holds."""
    checkpoint = torch.load(run / LAST, weights_only=True)
    change(checkpoint)
    torch.save(checkpoint, run / LAST)


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


GARBAGE = {
    "empty": b"",
    "no text": b"\xff\xfe\x00" * 100,
    "text": b"hello",
    "a list": b"[]",
    "nothing": b"{}",
    "null": b"null",
}


@pytest.mark.parametrize("content", [*GARBAGE, "cut short"])
@pytest.mark.parametrize("name", ["resolved.yaml", "environment.json", "status.json", "tokenizer.json"])
def test_a_damaged_file_is_named(name: str, content: str, endless: Path, copied: Copied) -> None:
    file = copied(endless) / name
    whole = file.read_bytes()
    file.write_bytes(GARBAGE.get(content, whole[: len(whole) // 2]))
    assert f"its {name} is damaged, " in refusal(file.parent)


@pytest.mark.parametrize("name", ["resolved.yaml", "environment.json", "status.json", "tokenizer.json", str(LAST)])
def test_a_missing_file_is_an_error_of_one_line(name: str, endless: Path, copied: Copied) -> None:
    run = copied(endless)
    (run / name).unlink()
    assert any(words in refusal(run) for words in ("holds no run", "is damaged", "has no checkpoint yet"))


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
    rewrite(run, lambda checkpoint: checkpoint.update(extra=harm))
    assert "it holds more than weights, and reading it could run code" in refusal(run)
    (run / LAST).write_bytes(pickle.dumps(harm))
    assert "is damaged, " in refusal(run)
    assert not harm.folder.exists()
    pickle.loads((run / LAST).read_bytes())
    assert harm.folder.exists(), "the pickle is harmless, and this test shows nothing"


@pytest.mark.parametrize("kept", [0, 100, 20_000, -50])
def test_a_truncated_checkpoint_is_damaged(kept: int, endless: Path, copied: Copied) -> None:
    run = copied(endless)
    (run / LAST).write_bytes((run / LAST).read_bytes()[:kept])
    assert "last.ckpt: is damaged, " in refusal(run)


def test_a_checkpoint_with_one_wrong_bit_among_its_weights_is_damaged(endless: Path, copied: Copied) -> None:
    run = copied(endless)
    content = bytearray((run / LAST).read_bytes())
    weights = load_run(run).model.blocks[0].attention.query.weight.detach().numpy().tobytes()
    content[content.index(weights) + 100] ^= 1
    (run / LAST).write_bytes(content)
    torch.load(run / LAST, weights_only=True)  # as PyTorch sees it, all is well
    assert "has another checksum than when it was written" in refusal(run)


FOREIGN: dict[str, tuple[Any, str]] = {
    "a list": ([1, 2], "is no checkpoint of ours"),
    "no step": ({"state_dict": {}}, "is no checkpoint of ours"),
    "a word for a step": ({"state_dict": {}, "global_step": "x"}, "is no checkpoint of ours"),
    "numbers for names": ({"state_dict": {1: 2}, "global_step": 1}, "is no checkpoint of ours"),
    "other weights": ({"state_dict": {"a": torch.ones(2)}, "global_step": 1}, "does not fit the model"),
}


@pytest.mark.parametrize("case", FOREIGN)
def test_another_program_s_checkpoint_is_refused(case: str, endless: Path, copied: Copied) -> None:
    run = copied(endless)
    content, message = FOREIGN[case]
    torch.save(content, run / LAST)
    assert message in refusal(run)


def test_weights_of_another_shape_are_refused(endless: Path, copied: Copied) -> None:
    run = copied(endless)
    rewrite(run, lambda checkpoint: checkpoint["state_dict"].update({"model.norm.weight": torch.ones(3)}))
    assert "its checkpoint does not fit the model of its resolved.yaml, " in refusal(run)


def test_a_file_of_another_run_is_refused(endless: Path, learned: Path, copied: Copied) -> None:
    messages = {}
    for name in (str(LAST), "tokenizer.json", "resolved.yaml"):
        run = copied(endless)
        shutil.copy(learned / name, run / name)
        messages[name] = refusal(run)
        shutil.rmtree(run)
    assert "does not fit the model" in messages[str(LAST)]
    assert "tokenizer.json is not the one it was trained with; restore the file" in messages["tokenizer.json"]
    assert "does not fit the model" in messages["resolved.yaml"]


@pytest.mark.parametrize("status", ["running", "interrupted", "diverged", "failed"])
def test_an_unfinished_run_is_not_evaluated(status: Any, endless: Path, copied: Copied) -> None:
    run = copied(endless)
    RunFolder(run).write_status(status, "because")
    assert f"is {status} (because), and its losses would not be those of its budget" in refusal(run)
    assert load_run(run).step == 10
