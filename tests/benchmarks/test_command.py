"""`python -m benchmarks` as a user meets it: what it prints and writes, and how it refuses."""

import csv
import os
import sys
from pathlib import Path

import pytest

from benchmarks import __main__ as command
from tests.conftest import Command, Ran

COLUMNS = ["component", "what", "size", "pass", "median_s", "low_s", "high_s", "ratio"]
CONDITIONS = ["device", "torch", "threads", "date"]


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def check_printed(ran: Ran) -> None:
    """It went well, and nothing was cut or broken to fit 80 columns."""
    assert (ran.code, ran.err) == (0, "")
    tables = [line for line in ran.out.splitlines() if line.startswith(" ")]
    assert len(tables) > 10
    assert max(map(len, ran.out.splitlines())) <= 80
    assert "…" not in ran.out


@pytest.mark.slow
def test_components_prints_tables_beside_the_claims_and_writes_rows_and_pictures(
    bench: Command, tmp_path: Path
) -> None:
    ran = bench("components", "--preset", "tiny", "--rounds", "2")
    check_printed(ran)
    assert ran.out.count("textbooks: ") == ran.out.count("\nhere: ") == 5
    assert "50 times fewer key and value computations" in ran.out
    found = rows(tmp_path / "bench" / "components.csv")
    counts = ["peak_bytes", "kv_cache_bytes", "kv_computations", "tokens_per_s"]
    assert list(found[0]) == [*COLUMNS, *counts, *CONDITIONS]
    assert list(dict.fromkeys(row["component"] for row in found)) == list(command.COMPONENTS)
    for row in found:
        assert 0 < float(row["low_s"]) <= float(row["median_s"]) <= float(row["high_s"])
        assert (row["device"], row["threads"]) == ("cpu", "1")
    assert [row["kv_computations"] for row in found if row["component"] == "caching"] == ["55", "10"]
    pictures = {f"{name}.png" for name in command.COMPONENTS}
    assert {path.name for path in (tmp_path / "bench").iterdir()} == {"components.csv", *pictures}
    for name in pictures:
        assert (tmp_path / "bench" / name).read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_decode_prints_speeds_beside_the_floors_and_writes_rows_and_a_picture(bench: Command, tmp_path: Path) -> None:
    arguments = ("decode", "--preset", "tiny", "--rounds", "1", "--no-compile", "--out", "here/there")
    ran = bench(*arguments)
    check_printed(ran)
    assert "the best of reading 1 MiB" in " ".join(ran.out.split())
    found = rows(tmp_path / "here" / "there" / "decode.csv")
    counts = ["tokens_per_s", "bytes_read", "of_memory_floor", "of_cache_floor"]
    assert list(found[0]) == [*COLUMNS, *counts, *CONDITIONS]
    assert [row["what"] for row in found[:2]] == ["transformers", "ours, eager"]
    (floor,) = (row for row in found if row["what"] == "memory floor")
    for row in found[:2]:
        share = float(floor["median_s"]) / float(row["median_s"])
        assert float(row["of_memory_floor"]) == pytest.approx(share)
    assert {path.name for path in (tmp_path / "here" / "there").iterdir()} == {"decode.csv", "decode.png"}


@pytest.mark.slow
def test_decode_times_the_compiled_step_by_default(bench: Command, tmp_path: Path) -> None:
    ran = bench("decode", "--preset", "tiny", "--rounds", "1")
    assert ran.code == 0, ran.err
    timed = [row["what"] for row in rows(tmp_path / "bench" / "decode.csv") if row["pass"] == "generate"]
    assert timed == ["transformers", "ours, eager", "ours, compiled"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ["components", "--only", "norm,atention"],
            "--only=norm,atention: atention is no component (did you mean attention?); "
            "choose from norm,ffn,attention,decoding,caching",
        ),
        (
            ["components", "--only", ""],
            "--only=: nothing is no component; choose from norm,ffn,attention,decoding,caching",
        ),
        (["components", "--device", "gpu"], "--device=gpu: not on this machine; choose auto or cpu"),
        (["decode", "--device", "gpu"], "--device=gpu: not on this machine; choose auto or cpu"),
        (["components", "--rounds", "0"], "--rounds=0: must be a positive whole number"),
        (["decode", "--out", "file"], "--out=file: file is a file; choose a folder"),
        (["decode", "--out", "file/below"], "--out=file/below: file is a file; choose a folder"),
        (
            ["decode", "--rounds", "many"],
            "argument --rounds: invalid int value: 'many'; see python -m benchmarks decode --help",
        ),
        (["peers", "--threads", "0"], "--threads=0: must be a positive whole number"),
        (["peers", "--decode", "--compile"], "--compile: peers decode eagerly; leave it out, or --decode"),
        (["gpu"], "gpu: PyTorch finds no CUDA device here; run it on a machine that has one"),
        (
            ["gpu", "--only", "trainin"],
            "--only=trainin: trainin is no part (did you mean training?); "
            "choose from training,loss,attention,decoding,billion,sharding,ladder",
        ),
        ([], "the following arguments are required: COMMAND; see python -m benchmarks --help"),
    ],
)
def test_what_a_person_did_wrong_is_reported_in_one_line(
    arguments: list[str],
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["bench", *arguments])
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit) as stop:
        command.main()
    printed = capsys.readouterr()
    assert (stop.value.code, printed.out, printed.err) == (2, "", f"error: {expected}\n")
    assert os.listdir(tmp_path) == ["file"]


def test_training_runs_the_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []
    monkeypatch.setattr("benchmarks.training.run", lambda: ran.append(True))
    monkeypatch.setattr(sys, "argv", ["bench", "training"])
    command.main()
    assert ran == [True]


@pytest.mark.parametrize("name", ["components", "decode"])
def test_the_help_tells_the_defaults(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", name, "--help"])
    with pytest.raises(SystemExit):
        command.main()
    shown = " ".join(capsys.readouterr().out.split())
    for default in ("(default: auto)", "(default: bench)", "(default: 5)"):
        assert default in shown
