"""`python -m benchmarks gpu`: its record, and every part's way, at tiny sizes on a CPU."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from benchmarks import __main__ as command
from benchmarks import gpu, gpu_decoding, gpu_kernels, gpu_training
from benchmarks.decoders import TINY
from benchmarks.findings import Finding
from benchmarks.gpu import PARTS, findings

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("finding", "outcome", "text"),
    [
        (Finding("MFU", 51.23, "%", goal=50), "met", "MFU: 51.2 %, goal at least 50, met"),
        (Finding("ratio", 2.0, goal=1.01, at_most=True), "not met", "ratio: 2.00, goal at most 1.01, not met"),
        (Finding("speed", 12345.6, "tokens/s", note="1B"), "measured", "speed: 12,346 tokens/s, measured (1B)"),
        (Finding("NCCL", None, note="one GPU"), "not measured", "NCCL: not measured (one GPU)"),
    ],
)
def test_a_finding_says_whether_it_meets_its_goal(finding: Finding, outcome: str, text: str) -> None:
    assert (finding.outcome, str(finding)) == (outcome, text)


def part(error: BaseException | None = None) -> Callable[[torch.device], Iterator[Finding]]:
    """A part that finds something, and then fails."""

    def found(_: torch.device) -> Iterator[Finding]:
        yield Finding("before", 1.0)
        if error:
            raise error

    return found


def test_a_part_that_fails_is_recorded_and_the_others_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    parts = {"bad": part(RuntimeError("CUDA is upset\nmore")), "good": part()}
    found = list(findings(["bad", "good"], CPU, 1, parts))
    assert [(name, finding.name) for name, finding in found] == [
        ("bad", "before"),
        ("bad", "the rest"),
        ("good", "before"),
    ]
    assert found[1][1].note == "failed, RuntimeError: CUDA is upset more"
    assert "Traceback" in capsys.readouterr().err


def test_no_part_begins_when_the_time_is_over() -> None:
    ((name, finding),) = findings(["good"], CPU, -1, {"good": part()})
    assert (name, finding.outcome) == ("good", "not measured")
    assert "--only good" in finding.note


def test_ctrl_c_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(gpu, "start", lambda wanted: (CPU, {"device": "H100"}))
    monkeypatch.setitem(PARTS, "loss", part(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        gpu.run(["loss"], 1, tmp_path / "out")
    (row,) = pd.read_csv(tmp_path / "out" / "gpu.csv").itertuples()
    assert (row.part, row.name, row.value, row.outcome, row.device) == ("loss", "before", 1.0, "measured", "H100")


def test_the_command_line_knows_the_parts() -> None:
    assert list(PARTS) == list(command.GPU_PARTS)


# Every part, on a CPU: what it finds means nothing, but what it calls exists


@pytest.mark.slow
def test_training_is_measured_by_our_own_loop(tiny: list[str]) -> None:
    overrides = [*tiny, "model.vocab_size=512"]
    found = list(gpu_training.measure_small(CPU, overrides, steps=6, modes=(False, False)))
    by_name = {finding.name: finding for finding in found}
    assert by_name["bf16-mixed by default"].outcome == "not met"  # a CPU's default is float32
    assert by_name["MFU, eager"].outcome == "not measured"
    assert by_name["training, eager"].value
    assert by_name["error of the estimated memory"].note.endswith("GB")
    assert by_name["speed of the last over the first"].value


def test_mfu_is_the_share_of_the_peak_that_the_models_flops_need() -> None:
    trained = gpu_training.Trained("bf16-mixed", 10, 1000.0, 6e9, 1.0, 10e12)
    assert trained.mfu("MFU", 50) == Finding("MFU", pytest.approx(60), "%", 50)


def test_the_loss_is_compared_with_its_logits() -> None:
    overrides = ("arch=llama3", "size=pico", "model.vocab_size=64000")
    peak, over = gpu_kernels.measure_loss(CPU, overrides, sequences=2, length=128)
    assert peak.note == "float32 logits are 0.0655 GB"
    assert over.value is not None
    assert 0.1 < over.value < 20


@pytest.mark.slow
def test_flex_attention_gives_what_our_masked_path_gives() -> None:
    found = list(gpu_kernels.measure_attention(CPU, (1, 4, 128, 16), window=32, compiled=False, rounds=1))
    assert sum("written-out" in finding.name for finding in found) == len(gpu_kernels.FUSED)
    assert [finding.outcome for finding in found if "difference" in finding.name] == ["met"] * 4


def test_decoding_is_measured_with_its_share_of_the_bandwidth() -> None:
    sizes: dict[str, Any] = {"context": 16, "new_tokens": 4, "buffer_bytes": 2**20, "modes": [False], "rounds": 1}
    found = {finding.name: finding.value for finding in gpu_decoding.measure_decoding(CPU, TINY, **sizes)}
    assert found["KV cache in torch.bfloat16, allocated over formula"] == 1
    assert found["KV cache in torch.int8, allocated over formula"] == 1
    assert 0 < (found["of the bandwidth, eager"] or 0) < 100
    assert found["CUDA graphs launched per token, eager"] == 0


@pytest.mark.matrix
@pytest.mark.process
def test_sharded_runs_of_train_py_are_compared_with_one_device(tiny: list[str]) -> None:
    found = {finding.name: finding.outcome for finding in gpu_training.measure_sharding(CPU, tiny)}
    assert found["FSDP2 on one device: validation loss beside one device's"] == "met"
    assert found["ddp on two devices"] == "not measured"


@pytest.mark.matrix
@pytest.mark.process
def test_a_ladder_runs_in_slots(tiny: list[str]) -> None:
    found = list(gpu_training.measure_ladder(CPU, {"tiny": [*tiny, "study.axes=[norm]"]}, slots=2))
    values = {finding.name: finding.value for finding in found}
    assert values["ladder at tiny: runs that are done"] == 2
    assert values["ladder at tiny: reports"] == 1


@pytest.mark.process
def test_a_run_that_fails_is_named_with_its_last_line(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"train\.py size=huge ended with 2: .*huge"):
        gpu_training.train(tmp_path, "size=huge")
