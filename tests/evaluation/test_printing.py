"""The tables of an evaluation fit a terminal of 80 columns, and tell what was found."""

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llama_lab.evaluation.plot import plot_evaluation
from llama_lab.evaluation.printing import print_evaluation, quarter_mean
from llama_lab.runs.evaluation import Evaluation, LengthLoss
from llama_lab.runs.json_file import from_json

Found = dict[str, Any]
SMALL = {"context": 32, "bytes": 4096, "step": 0.0003, "loss": 5.875, "tokens": 113_567}
LARGE = {"context": 32_768, "bytes": 2**22, "step": 0.25, "loss": 12.3456, "tokens": 1_234_567_890}


def length_entry(length: int, loss: float | None, note: str = "") -> Found:
    """What is found at one context length."""
    buckets = [length * (i + 0.5) / 8 for i in range(8 if loss else 0)]
    losses, tokens = [loss] * len(buckets), [9] * len(buckets)
    return {"length": length, "loss": loss, "positions": buckets, "losses": losses, "tokens": tokens, "note": note}


def everything(size: dict[str, Any]) -> Found:
    """An eval.json with every part, of a model of this size."""
    context, loss, step, note = size["context"], size["loss"], size["step"], "cannot: learned positions end at 32768"
    cases = [{"batch_size": batch, "context": n} for batch in (1, 8) for n in (context // 4, context // 2, context)]
    cache = []
    for dtype in ("bfloat16", "float32", "int8"):
        for case in cases:
            formula = case["batch_size"] * case["context"] * size["bytes"]
            measured = {"formula_bytes": formula, "measured_bytes": formula + (dtype == "int8")}
            cache.append(
                case | measured | {"dtype": dtype, "allocated_bytes": None, "state_bytes": 2048 * case["batch_size"]}
            )
    times = {"prefill": [8 * step] * 3, "decode": [step / 10 * f for f in (0.9, 1, 1.1)], "uncached": [50 * step] * 3}
    return {
        "step": 195_000,
        "device": "NVIDIA H100 80GB HBM3",
        "precision": "bf16-mixed",
        "val/loss": loss,
        "val/perplexity": 2.718281828**loss,
        "val/bits_per_byte": loss / 3,
        "val_tokens": size["tokens"],
        "lengths": [length_entry(round(m * context), loss if m <= 2 else None, note) for m in (1, 1.5, 2, 4, 8)],
        "cache": cache,
        "cache_losses": [{"dtype": "bfloat16", "loss": loss}, {"dtype": "int8", "loss": None}],
        "speed": [case | times for case in cases],
        "sample": "def f():\x1b[2J\n    return 1  # €\n" + 100 * "x",
    }


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[[Found], list[str]]:
    """The lines that a terminal of 80 columns shows."""
    monkeypatch.setenv("COLUMNS", "80")

    def show(found: Found) -> list[str]:
        print_evaluation(from_json(Evaluation, found), Path("runs/a"))
        return capsys.readouterr().out.splitlines()

    return show


def cells(lines: list[str]) -> list[list[str]]:
    """Every line by its columns."""
    return [re.split(r"  +", line.strip()) for line in lines]


@pytest.mark.parametrize("size", [SMALL, LARGE], ids=["small", "large"])
def test_no_table_is_wider_than_80_columns_and_no_cell_is_wrapped_or_cut(
    size: dict[str, Any], printed: Callable[[Found], list[str]], tmp_path: Path
) -> None:
    lines = printed(everything(size))
    assert max(map(len, lines)) <= 80
    assert "…" not in "".join(lines)
    assert "\x1b" not in "".join(lines), "a sample does not steer the terminal"
    assert "def f():␛[2J" in "\n".join(lines)
    rows = cells(lines)
    for row in (
        ["tokens", "trained", "loss", "first quarter", "last quarter"],
        ["dtype", "tokens", "of state", "by formula", "measured", "loss through it"],
        ["batch", "tokens", "prompt read", "tokens/s", "range", "no cache", "gain"],
    ):
        assert row in rows
    assert sum(len(row) == 7 and row[0] in "18" for row in rows) == 6
    assert sum(row[0] in ("bfloat16", "float32", "int8") for row in rows) == 9
    plot_evaluation(from_json(Evaluation, everything(size)), tmp_path)
    assert (tmp_path / "eval.png").read_bytes().startswith(b"\x89PNG")


def test_a_quarter_of_a_context_has_the_mean_of_its_losses_or_none() -> None:
    late = LengthLoss(8, positions=[4.0, 5.0, 6.0, 7.0], losses=[1.0, 2.0, 3.0, 5.0], tokens=[1, 3, 9, 9])
    assert math.isnan(quarter_mean(late, 0))
    assert [quarter_mean(late, quarter) for quarter in (2, 3)] == [1.75, 4.0]


TITLES = {
    "val/loss": "Validation",
    "lengths": "Loss by context length",
    "cache": "KV cache",
    "speed": "Generation",
    "sample": "─ sample ─",
}


@pytest.mark.parametrize("part", TITLES)
def test_only_what_was_found_is_shown(part: str, printed: Callable[[Found], list[str]], tmp_path: Path) -> None:
    kept = {
        "step",
        "device",
        "precision",
        part,
        *(["val_tokens", "val/bits_per_byte", "val/perplexity"] if part == "val/loss" else []),
    }
    found = {key: value for key, value in everything(SMALL).items() if key in kept}
    text = "\n".join(printed(found))
    assert [name for name, title in TITLES.items() if title in text] == [part]
    plot_evaluation(from_json(Evaluation, found), tmp_path)
    assert (tmp_path / "eval.png").exists() == (part in ("lengths", "cache", "speed"))
