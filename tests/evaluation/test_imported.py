"""Imported models are evaluated as runs are, on a text that the command names, and stand beside runs on the same."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from llama_lab.data.tokenizer import ByteTokenizer
from llama_lab.hf.convert import import_model
from llama_lab.study.evaluate_all import opened
from tests.composing import eval_settings
from tests.conftest import Command
from tests.selection import first

QUICK = ("eval.rounds=1", "eval.contexts=[0.25]", "eval.batch_sizes=[1]", "eval.lengths=[2]")


@pytest.fixture(scope="module")
def theirs() -> GPTNeoXForCausalLM:
    """A Pythia with a few ids more than its tokenizer, as published ones have."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    model = GPTNeoXForCausalLM(GPTNeoXConfig(vocab_size=264, max_position_embeddings=32, **sizes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


@pytest.fixture(scope="module")
def converted(theirs: GPTNeoXForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `llama-lab-convert import` makes of it, in bfloat16."""
    folder = tmp_path_factory.mktemp("models")
    theirs.save_pretrained(folder / "pythia")
    ByteTokenizer().train(iter(())).save(folder / "pythia" / "tokenizer.json")
    import_model(str(folder / "pythia"), folder / "imported")
    return folder / "imported"


@pytest.fixture
def imported(converted: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return shutil.copytree(converted, tmp_path / "imported")


@pytest.fixture
def text(tiny: list[str]) -> list[str]:
    """The text that tiny runs are trained on."""
    return [override for override in tiny if override.partition(".")[0].partition("=")[0] == "data"]


def found(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "eval.json").read_text()))


@pytest.mark.slow
def test_an_imported_model_has_transformers_loss(
    theirs: GPTNeoXForCausalLM, imported: Path, text: list[str], evaluating: Command
) -> None:
    ran = evaluating(f"run={imported}", *text, *QUICK)
    assert (ran.code, ran.err) == (0, "")
    result = found(imported)
    assert result.keys() >= {"val/loss", "val/bits_per_byte", "lengths", "cache", "cache_losses", "speed", "sample"}
    assert (imported / "eval.png").exists()
    model = opened(imported, eval_settings(f"run={imported}", *text))
    dataset = model.open_dataset()
    for entry in result["lengths"]:
        windows = dataset.val_windows(entry["length"])
        sides = zip(*(windows[i] for i in range(len(windows))), strict=True)
        inputs, targets = (torch.tensor([ids.tolist() for ids in side]) for side in sides)
        with torch.no_grad():
            logits = theirs(inputs).logits
        expected = cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
        assert entry["loss"] == pytest.approx(expected.item(), abs=1e-5)
    size = dataset.index.val
    assert result["val/loss"] == result["lengths"][0]["loss"]
    assert result["val/bits_per_byte"] == pytest.approx(result["val/loss"] * size.tokens / size.bytes / math.log(2))


@pytest.mark.slow
def test_it_stands_beside_runs_on_the_same_text(
    imported: Path, text: list[str], evaluating: Command, trained: Callable[..., Path]
) -> None:
    run = trained()
    ran = evaluating(f"run={imported}", *text, "eval.parts=[loss]", f"beside={run}")
    assert (ran.code, ran.err) == (0, "")
    summary = json.loads((run / "summary.json").read_text())
    assert found(imported)["data_hash"] == summary["data_hash"]
    _, table = ran.out.split("Bits per byte of the same text")
    assert f"{summary['val/bits_per_byte']:.4f}" in table
    assert f"{found(imported)['val/bits_per_byte']:.4f}" in table
    other = evaluating(f"run={imported}", *text, "data.val_fraction=0.5", "eval.parts=[loss]", f"beside={run}")
    assert "was found with data_hash" in other.err
    assert "1 of 1 runs are left out: another text" in other.out.split("Bits per byte")[1]


@pytest.mark.slow
def test_an_imported_model_needs_a_tokenizer_but_no_text_to_write(imported: Path, evaluating: Command) -> None:
    ran = evaluating(f"run={imported}", "prompt=def", "max_new_tokens=5")
    assert ran.code == 0
    assert ran.out.startswith("def")
    timed = evaluating(f"run={imported}", "eval.parts=[speed,sample]", *QUICK[:3])
    assert (timed.code, timed.err) == (0, "")
    assert "data_hash" not in found(imported)
    (imported / "tokenizer.json").unlink()
    refused = evaluating(f"run={imported}", "eval.parts=[speed]")
    assert refused.err == f"error: run={imported}: has no tokenizer; put its tokenizer.json into the folder\n"


REFUSED = {
    "": "data: ",
    "data=text": "data.files=???: ",
    "data=stdlib beside=nowhere": "beside=nowhere: ",
    "data=stdlib weights=ema": "weights=ema: ",
    "data=shakespear": "data=shakespear: ",
    "beside=nowhere eval.parts=[speed]": "beside=nowhere: ",
    "data=stdlib eval.parts=[speed]": "data=",
    "data=stdlib data.document_mask=true": "data.document_mask=true: ",
    "data=copy": "data=copy: ",
}


@pytest.mark.parametrize("overrides", first(4, REFUSED))
def test_what_cannot_be_evaluated_is_one_line(overrides: str, converted: Path, evaluating: Command) -> None:
    ran = evaluating(f"run={converted}", *overrides.split())
    assert (ran.code, ran.err.count("\n")) == (2, 1)
    assert ran.err.startswith(f"error: {REFUSED[overrides]}")
