"""The tables of an evaluation fit a terminal of 80 columns, and tell what was found."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llama_lab.evaluation.plot import plot_evaluation
from llama_lab.evaluation.printing import print_evaluation, quarter_mean
from llama_lab.runs.evaluation import Evaluation, LengthLoss
from llama_lab.runs.json_file import from_json

Found = dict[str, Any]
SMALL = {"context": 32, "bytes": 4096, "step": 0.0003, "loss": 5.875, "tokens": 113_567}
LARGE = {"context": 32_768, "bytes": 2**22, "step": 0.25, "loss": 12.3456, "tokens": 1_234_567_890}


def length_entry(length: int, loss: float | None, note: str = "") -> Found:
    """What is found at one context length."""
    if loss is None:
        return {"length": length, "loss": None, "positions": [], "losses": [], "tokens": [], "note": note}
    buckets = [length * (i + 0.5) / 8 for i in range(8)]
    return {"length": length, "loss": loss, "positions": buckets, "losses": [loss] * 8, "tokens": [9] * 8, "note": ""}


def everything(size: dict[str, Any], note: str = "cannot: learned positions end at 32768") -> Found:
    """An eval.json with every part, of a model of this size."""
    context, loss, step = size["context"], size["loss"], size["step"]
    contexts, batches = [context // 4, context // 2, context], [1, 8]
    lengths = [length_entry(round(m * context), loss) for m in (1, 1.5, 2)]
    return {
        "step": 195_000,
        "device": "NVIDIA H100 80GB HBM3",
        "precision": "bf16-mixed",
        "val/loss": loss,
        "val/perplexity": 2.718281828**loss,
        "val/bits_per_byte": loss / 3,
        "val_tokens": size["tokens"],
        "lengths": [*lengths, *(length_entry(m * context, None, note) for m in (4, 8))],
        "cache": [
            {
                "batch_size": batch,
                "context": n,
                "dtype": dtype,
                "formula_bytes": batch * n * size["bytes"],
                "measured_bytes": batch * n * size["bytes"] + (dtype == "int8"),
                "allocated_bytes": None,
            }
            for dtype in ("bfloat16", "float32", "int8")
            for batch in batches
            for n in contexts
        ],
        "cache_losses": [{"dtype": "bfloat16", "loss": loss}, {"dtype": "int8", "loss": None}],
        "speed": [
            {
                "batch_size": batch,
                "context": n,
                "prefill": [8 * step] * 3,
                "decode": [step / 10 * f for f in (0.9, 1, 1.1)],
                "uncached": [50 * step] * 3,
            }
            for batch in batches
            for n in contexts
        ],
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
    size: dict[str, Any], printed: Callable[[Found], list[str]]
) -> None:
    lines = printed(everything(size))
    assert max(map(len, lines)) <= 80
    assert "…" not in "".join(lines)
    rows = cells(lines)
    for header in (
        ["tokens", "trained", "loss", "first quarter", "last quarter"],
        ["dtype", "tokens", "by formula", "measured", "loss through it"],
        ["batch", "tokens", "prompt read", "tokens/s", "range", "no cache", "gain"],
    ):
        assert header in rows
    assert sum(len(row) == 7 and row[0] in "18" for row in rows) == 6
    assert sum(row[0] in ("bfloat16", "float32", "int8") for row in rows) == 9


def test_the_numbers_are_those_that_were_found(printed: Callable[[Found], list[str]]) -> None:
    rows = cells(printed(everything(LARGE)))
    assert ["loss", "12.3456 nats/token"] in rows
    assert ["49,152", "1.5x", "12.3456", "12.3456", "12.3456"] in rows
    assert ["131,072", "4x", "-", "-", "-"] in rows
    assert ["cannot at 131,072, 262,144: learned positions end at 32768"] in rows
    assert ["bfloat16", "8,192", "32 GiB", "equal", "12.345600"] in rows
    assert ["int8", "8,192", "32 GiB", "32 GiB", "no number"] in rows
    assert ["8", "32,768", "2,000.0 ms", "320", "291-356", "1", "500.0x"] in rows


def test_a_loss_too_large_for_a_perplexity_has_none(printed: Callable[[Found], list[str]]) -> None:
    assert ["perplexity", "-"] in cells(printed(everything(SMALL) | {"val/perplexity": None}))


def test_the_loss_of_a_probe_is_that_of_its_answers(printed: Callable[[Found], list[str]]) -> None:
    lines = [" ".join(line.split()) for line in printed(everything(SMALL) | {"val/accuracy": 0.25})]
    assert {"loss 5.8750 nats/answer", "answers 113,567", "Loss by context length, nats/answer"} <= {*lines}


def test_a_quarter_in_which_nothing_is_predicted_has_no_loss(printed: Callable[[Found], list[str]]) -> None:
    late = {"length": 8, "loss": 3.0, "positions": [6.0, 7.0], "losses": [3.0, 3.0], "tokens": [9, 9], "note": ""}
    (row,) = (line.split() for line in printed(everything(SMALL) | {"lengths": [late]}) if " 1x " in line)
    assert row == ["8", "1x", "3.0000", "-", "3.0000"]


def test_a_sample_does_not_steer_the_terminal(printed: Callable[[Found], list[str]]) -> None:
    text = "\n".join(printed(everything(SMALL)))
    assert "\x1b" not in text
    assert "def f():␛[2J" in text


@pytest.mark.parametrize("part", ["val/loss", "lengths", "cache", "speed", "sample"])
def test_only_what_was_found_is_shown(part: str, printed: Callable[[Found], list[str]], tmp_path: Path) -> None:
    whole = everything(SMALL)
    kept = {
        "step",
        "device",
        "precision",
        *([k for k in whole if k.startswith("val")] if part == "val/loss" else [part]),
    }
    found = {key: value for key, value in whole.items() if key in kept}
    titles = {
        "val/loss": "Validation",
        "lengths": "Loss by context length",
        "cache": "KV cache",
        "speed": "Generation",
        "sample": "─ sample ─",
    }
    text = "\n".join(printed(found))
    assert [name for name, title in titles.items() if title in text] == [part]
    plot_evaluation(from_json(Evaluation, found), tmp_path)
    assert (tmp_path / "eval.png").exists() == (part in ("lengths", "cache", "speed"))


def test_a_picture_of_everything_is_written_where_lengths_have_no_loss(tmp_path: Path) -> None:
    plot_evaluation(from_json(Evaluation, everything(LARGE)), tmp_path)
    assert (tmp_path / "eval.png").read_bytes().startswith(b"\x89PNG")


@given(losses=st.lists(st.floats(0, 20), min_size=4, max_size=64))
def test_the_quarters_of_unbucketed_losses_are_their_means(losses: list[float]) -> None:
    n = len(losses)
    entry = LengthLoss(n, positions=[float(p) for p in range(n)], losses=losses, tokens=[3] * n)
    for quarter in (0, 3):
        inside = [loss for p, loss in enumerate(losses) if quarter * n <= 4 * p < (quarter + 1) * n]
        assert quarter_mean(entry, quarter) == pytest.approx(sum(inside) / len(inside))
