"""`python -m benchmarks` as a user meets it: what it prints and writes, and how it refuses."""

import os
import sys
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path

import pandas as pd
import pytest

from benchmarks import __main__ as command
from tests.conftest import MISSING

TIMES = ["what", "size", "pass", "median_ms", "low_ms", "high_ms", "ratio"]
CONDITIONS = ["device", "torch", "threads", "date"]
Run = Callable[..., None]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run the command in a fresh folder, as on a machine without a GPU."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)

    def main(*arguments: str) -> None:
        monkeypatch.setattr(sys, "argv", ["benchmarks", *arguments])
        command.main()

    return main


@pytest.mark.slow
def test_components_prints_claims_and_writes_rows(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    components = ["norm", "decoding", "caching"]
    run("components", "--preset", "tiny", "--rounds", "1", "--only", *components)
    shown = capsys.readouterr().out
    assert shown.count("textbooks: ") == len(components)
    assert "50 times fewer key and value computations" in shown
    found = pd.read_csv(tmp_path / "bench" / "components.csv")
    assert {*TIMES, *CONDITIONS, "kv_cache_bytes", "tokens_per_s"} < {*found}
    assert list(found.component.unique()) == components
    assert ((found.low_ms > 0) & (found.low_ms <= found.median_ms) & (found.median_ms <= found.high_ms)).all()
    assert list(found.kv_computations.dropna()) == [55, 10]


@pytest.mark.slow
def test_decode_prints_speeds_beside_the_floors_and_writes_rows(run: Run, tmp_path: Path) -> None:
    run("decode", "--preset", "tiny", "--rounds", "1", "--out", "here/there", *(["--no-compile"] if MISSING else []))
    found = pd.read_csv(tmp_path / "here" / "there" / "decode.csv")
    assert {*TIMES, *CONDITIONS, "tokens_per_s", "of_memory", "of_cache"} < {*found}
    sides = ["transformers", "ours, eager", *([] if MISSING else ["ours, compiled"])]
    assert list(found.what[found["pass"] == "generate"]) == sides


@pytest.mark.slow
def test_peers_prints_and_writes_all_sides(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    context = get_context("forkserver")  # whose server imports PyTorch once, as that of launchers does
    context.set_forkserver_preload(["llama_lab.launching.preload"])
    monkeypatch.setattr("benchmarks.processes.get_context", lambda _: context)
    run("peers", "--preset", "tiny", "--rounds", "1")
    assert "round 1 of 1" in capsys.readouterr().out
    found = pd.read_csv(tmp_path / "bench" / "peers.csv")
    assert list(found.contender) == ["ours", "ours, memory kept", "transformers", "x-transformers"]
    assert (found.last_loss < found.first_loss).all()
    assert found.precision.unique() == ["float32"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["components", "--only", "norm", "atention"], "argument --only: invalid choice: 'atention'"),
        (["gpu", "--only", "trainin"], "argument --only: invalid choice: 'trainin'"),
        (["components", "--device", "gpu"], "error: --device=gpu: not on this machine; choose auto or cpu\n"),
        (["components", "--rounds", "0"], "argument --rounds: invalid positive value: '0'"),
        (["decode", "--rounds", "many"], "argument --rounds: invalid positive value: 'many'"),
        (["peers", "--decode", "--compile"], "error: --compile: peers decode eagerly; leave it out, or --decode\n"),
        (["gpu"], "error: gpu: PyTorch finds no CUDA device here; run it on a machine that has one\n"),
        ([], "the following arguments are required: command"),
    ],
)
def test_what_a_person_did_wrong_is_reported_before_anything_is_written(
    arguments: list[str],
    expected: str,
    run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: False)
    with pytest.raises(SystemExit) as stop:
        run(*arguments)
    printed = capsys.readouterr()
    assert (stop.value.code, printed.out) == (2, "")
    assert expected in printed.err
    assert os.listdir(tmp_path) == []
