"""The table fits a terminal, and summary.csv holds every number to its last digit."""

import csv
import re
from pathlib import Path

import pytest

from llama_lab.analysis.analyse import analyse
from llama_lab.analysis.result import Result
from llama_lab.report.summary import print_table, summary_rows, write_csv, write_summary_csv
from tests.analysis import results
from tests.analysis.synthetic import plant_end, run_folder, write_study

AXES = {"vanilla": {"norm": "layernorm"}, "rmsnorm": {"norm": "rmsnorm"}, "olmo": {"norm": "rmsnorm"}}


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """A ladder with a step that helps and one that is not tested; one run diverged."""
    folder = tmp_path_factory.mktemp("study")
    config = {name: {"model.hidden_dim": 344} for name in AXES}
    study = write_study(folder, {"vanilla": 0.0, "rmsnorm": -0.2, "olmo": -0.2}, axes=AXES, config=config)
    plant_end(run_folder(folder, study, "olmo", 3), "diverged", "nan", 5)
    return analyse(study, folder)


def read(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_there_is_a_row_per_arm_and_every_row_has_the_same_columns(result: Result) -> None:
    rows = summary_rows(result)
    assert [row["arm"] for row in rows] == ["vanilla", "rmsnorm", "olmo"]
    assert len({tuple(row) for row in rows}) == 1
    assert [row["axis:norm"] for row in rows] == ["layernorm", "rmsnorm", "rmsnorm"]
    assert [(row["seeds"], row["diverged"]) for row in rows] == [(3, 0), (3, 0), (2, 1)]
    assert [row["width"] for row in rows] == [344, 344, 344]
    assert [row["residual"] for row in rows] == [None, 0.001, 0.001]


def test_a_row_holds_the_results_own_numbers(result: Result) -> None:
    _, row, last = summary_rows(result)
    step = result.arms[1].to_previous
    assert row["previous_arm"] == "vanilla"
    assert (row["to_previous_nats_mean"], row["to_previous_nats_low"]) == (step.nats.mean, step.nats.low)
    assert (row["to_previous_bits_high"], row["to_previous_bits_p"]) == (step.bits.high, step.bits.p)
    assert row["tokens_to_reach_baseline"] == result.arms[1].to_reach["tokens"]
    assert row["kv_cache/bytes_per_token"] == 2048
    assert row["learning_rate"] == 2e-3
    assert last["tokens_to_reach_baseline"] is None


def test_the_csv_holds_every_digit_and_nothing_where_nothing_is_known(result: Result, tmp_path: Path) -> None:
    write_summary_csv(result, tmp_path / "summary.csv")
    for written, row in zip(read(tmp_path / "summary.csv"), summary_rows(result), strict=True):
        for key, value in row.items():
            assert written[key] == ("" if value is None else repr(value) if isinstance(value, float) else str(value))


def test_what_one_seed_does_not_show_is_left_empty(tmp_path: Path) -> None:
    write_summary_csv(
        analyse(write_study(tmp_path, {"base": 0.0, "arm": -0.1}, seeds=(1,)), tmp_path), tmp_path / "s.csv"
    )
    row = read(tmp_path / "s.csv")[1]
    assert float(row["to_baseline_nats_mean"]) < 0
    assert [row[key] for key in ("val_loss_sd", "to_baseline_nats_p", "to_baseline_nats_low")] == ["", "", ""]


def printed(result: Result, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> str:
    """What a terminal of 80 columns shows."""
    monkeypatch.setenv("COLUMNS", "80")
    print_table(result)
    return capsys.readouterr().out


def test_the_table_fits_80_columns_with_all_of_its_numbers(
    result: Result, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = printed(result, capsys, monkeypatch)
    assert max(map(len, out.splitlines())) <= 80
    loss, step = result.arms[1].loss, result.arms[1].to_previous
    (line,) = [line for line in out.splitlines() if line.strip().startswith("rmsnorm ") and "1.84 M" in line]
    assert 0.02 < loss.high - loss.low < 0.2, "three decimals"
    assert f"{loss.mean:.3f} ±{(loss.high - loss.low) / 2:.3f}" in line
    assert re.search(rf"{abs(step.nats.mean):.3f} ±{(step.nats.high - step.nats.low) / 2:.3f} +lower ", line)
    assert line.split()[-2:] == ["2,048", "12,000"]
    assert "…" not in out


def test_the_table_has_states_below_the_cache_per_token(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [line.split() for line in printed(results.with_states(), capsys, monkeypatch).splitlines()]
    assert ["+", "66", "KiB"] in [line[-3:] for line in lines]
    assert max(len(" ".join(line)) for line in lines) <= 80
    assert "+ state" not in printed(results.ladder(), capsys, monkeypatch)


def test_the_answer_and_the_warnings_follow_the_table(
    result: Result, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = " ".join(printed(result, capsys, monkeypatch).split())
    for sentence in (*result.answer, *result.warnings):
        assert " ".join(sentence.split()) in words


def test_long_names_of_arms_are_folded_and_never_cut(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "vanilla+prenorm+rmsnorm+rope+swiglu[1]"
    study = write_study(tmp_path, {"vanilla": 0.0, name: -0.1}, design="factorial")
    _, _, below = printed(analyse(study, tmp_path), capsys, monkeypatch).partition("tokens/s")
    table, _, _ = below.partition("nats per token")
    folded = [line.split("  ")[0].strip() for line in table.splitlines()]
    assert max(map(len, table.splitlines())) <= 80
    assert {"prenorm+", "rmsnorm+", "swiglu[1]"} <= {*folded}, "broken at its signs"
    assert name in "".join(folded)


def test_a_study_in_bits_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = {"byte": {"tokenizer_hash": "byte", "bytes_per_token": 1.0}}
    result = analyse(write_study(tmp_path, {"bpe": 0.0, "byte": -2.0}, facts=facts), tmp_path)
    out = printed(result, capsys, monkeypatch)
    assert "bits/byte" in out
    assert "val loss" not in out
    assert f"{result.arms[1].bits.mean:.3f} ±" in out


def test_a_name_that_a_spreadsheet_would_compute_is_text(tmp_path: Path) -> None:
    write_csv(
        [
            {"arm": name, "loss": -1.5}
            for name in ("=1+1", "+1+1", "-A1*2", "@a", "a=1", "+rmsnorm", "-0.1 [-0.2, +0.1]")
        ],
        tmp_path / "a.csv",
    )
    rows = read(tmp_path / "a.csv")
    assert [row["arm"] for row in rows] == ["'=1+1", "'+1+1", "'-A1*2", "'@a", "a=1", "+rmsnorm", "-0.1 [-0.2, +0.1]"]
    assert rows[0]["loss"] == "-1.5"


def test_however_many_arms_there_are_two_screens_are_enough(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    names = [f"arm{i}" for i in range(60)]
    print_table(results.result(dict.fromkeys(names, 3.7), seeds=1, points=2))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 45
    assert lines[-1].endswith("more lines, as in the report and summary.csv")
