"""`python -m benchmarks gpu`: its record, its refusals, and every part's way, at tiny sizes on a CPU."""

import json
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from rich.console import Console

from benchmarks import __main__ as command
from benchmarks import gpu, gpu_decoding, gpu_kernels, gpu_training
from benchmarks.decoders import TINY, build_decoder, compose
from benchmarks.findings import Finding, Findings, failure, skipped
from benchmarks.gpu import PARTS, Part, measure_parts
from llama_lab.errors import INTERRUPTED, ConfigError
from llama_lab.runs.stored import Summary

CPU = torch.device("cpu")
QUIET = Console(quiet=True)


@pytest.mark.parametrize(
    ("finding", "outcome", "text"),
    [
        (Finding("MFU", 51.23, "%", goal=50), "met", "MFU: 51.2%, goal at least 50%, met"),
        (Finding("MFU", 49.9, "%", goal=50), "not met", "MFU: 49.9%, goal at least 50%, not met"),
        (Finding("ratio", 1.01, goal=1.01, at_most=True), "met", "ratio: 1.01, goal at most 1.01, met"),
        (Finding("ratio", 2.0, goal=1.01, at_most=True), "not met", "ratio: 2, goal at most 1.01, not met"),
        (Finding("report", True, goal=True), "met", "report: yes, goal yes, met"),
        (Finding("report", False, goal=True), "not met", "report: no, goal yes, not met"),
        (Finding("speed", 12345.6, "tokens/s", note="1B"), "measured", "speed: 12,346 tokens/s, measured (1B)"),
        (skipped("NCCL", "one GPU"), "skipped", "NCCL, skipped (one GPU)"),
        (failure(ValueError("a\nb")), "failed", "the rest of this part, failed (ValueError: a b)"),
    ],
)
def test_a_finding_says_whether_it_meets_its_goal(finding: Finding, outcome: str, text: str) -> None:
    assert (finding.outcome, str(finding)) == (outcome, text)


def test_findings_are_on_disk_as_json_and_as_a_table_after_each(tmp_path: Path) -> None:
    findings = Findings(tmp_path / "out", "gpu", {"device": "H100", "torch": "2.13"})
    findings.add("training", Finding("MFU", 51.0, "%", goal=50))
    findings.took("training", 12.34)
    content = json.loads((tmp_path / "out" / "gpu.json").read_text())
    (row,) = content["findings"]
    assert (row["part"], row["name"], row["value"], row["goal"], row["outcome"]) == ("training", "MFU", 51.0, 50, "met")
    assert (content["where"], content["seconds"]) == ({"device": "H100", "torch": "2.13"}, {"training": 12.3})
    assert (tmp_path / "out" / "gpu.md").read_text() == (
        "device H100, torch 2.13\n\n"
        "| part | finding | measured | goal | outcome |\n| --- | --- | --- | --- | --- |\n"
        "| training | MFU | 51% | at least 50% | met |\n"
    )


def parts_of(**measures: Callable[[torch.device], Iterator[Finding]]) -> dict[str, Part]:
    """Parts of a command by name."""
    return {name: Part(f"about {name}", measure) for name, measure in measures.items()}


def good(_: torch.device) -> Iterator[Finding]:
    yield Finding("good", 1.0)


def broken(_: torch.device) -> Iterator[Finding]:
    yield Finding("before", 1.0)
    raise RuntimeError("CUDA is upset\nmore")


def interrupted(_: torch.device) -> Iterator[Finding]:
    yield Finding("before", 1.0)
    raise KeyboardInterrupt


def names(findings: Findings) -> list[tuple[str, str, str]]:
    """Part, name and outcome of every finding on disk."""
    return [(row["part"], row["name"], row["outcome"]) for row in json.loads(findings.json.read_text())["findings"]]


def test_a_part_that_fails_is_recorded_and_the_others_go_on(tmp_path: Path) -> None:
    findings = Findings(tmp_path, "gpu", {})
    measure_parts(["bad", "good"], CPU, findings, QUIET, 1, parts_of(bad=broken, good=good))
    assert names(findings) == [
        ("bad", "before", "measured"),
        ("bad", "the rest of this part", "failed"),
        ("good", "good", "measured"),
    ]
    assert "CUDA is upset" in findings.table.read_text()


def test_no_part_begins_when_the_time_is_over(tmp_path: Path) -> None:
    findings = Findings(tmp_path, "gpu", {})
    measure_parts(["good"], CPU, findings, QUIET, -1, parts_of(good=good))
    assert names(findings) == [("good", "about good", "skipped")]
    assert "--only=good" in findings.table.read_text()


def test_ctrl_c_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(gpu, "start", lambda wanted: (CPU, {}, Console(width=400)))
    parts = parts_of(first=interrupted, second=good)
    monkeypatch.setattr(gpu, "measure_parts", partial(measure_parts, parts=parts))
    with pytest.raises(SystemExit) as stop:
        gpu.run("first,second", 1, tmp_path)
    assert stop.value.code == INTERRUPTED
    assert f"what was found is in {tmp_path / 'gpu.json'}" in capsys.readouterr().out
    assert [row["name"] for row in json.loads((tmp_path / "gpu.json").read_text())["findings"]] == ["before"]


def test_without_a_gpu_the_command_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(
        ConfigError, match=r"^gpu: PyTorch finds no CUDA device here; run it on a machine that has one$"
    ):
        gpu.run("training", 1, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_the_command_line_knows_the_parts() -> None:
    assert list(PARTS) == list(command.GPU_PARTS)


# Every part, on a CPU: what it finds means nothing, but what it calls exists


@pytest.fixture
def trainable(tiny: list[str]) -> list[str]:
    """The overrides of a tiny model that trains on the tests' text."""
    return [*tiny, "model.vocab_size=512"]


def outcomes(found: Iterator[Finding]) -> dict[str, str]:
    """The outcome of every finding."""
    return {finding.name: finding.outcome for finding in found}


def test_training_is_measured_by_our_own_loop(trainable: list[str]) -> None:
    found = list(gpu_training.measure_small(CPU, trainable, steps=6, modes=(False, False)))
    by_name = {finding.name: finding for finding in found}
    assert by_name["bf16-mixed by default"].outcome == "not met"  # a CPU's default is float32
    assert by_name["MFU, eager"].outcome == "skipped"
    assert by_name["training, eager"].value
    assert by_name["error of the estimated memory"].note.endswith("GB")
    assert by_name["speed of compiled over eager"].value


def test_mfu_is_the_share_of_the_peak_that_the_models_flops_need() -> None:
    trained = gpu_training.Trained("bf16-mixed", 10, 1000.0, 6e9, 1.0, 10e12)
    assert trained.mfu("MFU", 50).cells == ("MFU", "60%", "at least 50%", "met")


def test_the_loss_is_compared_with_its_logits() -> None:
    overrides = ("arch=llama3", "size=pico", "model.vocab_size=64000")
    peak, over = gpu_kernels.measure_loss(CPU, overrides, sequences=2, length=128)
    assert peak.note == "float32 logits are 0.0655 GB"
    assert over.value is not None
    assert 0.1 < over.value < 20


def test_flex_attention_gives_what_our_masked_path_gives() -> None:
    found = outcomes(gpu_kernels.measure_attention(CPU, (1, 4, 128, 16), window=32, compiled=False, rounds=1))
    fused = {name for name in found if "no written-out" in name}
    assert len(fused) == len(gpu_kernels.FUSED)
    differences = {name: outcome for name, outcome in found.items() if "difference" in name}
    assert len(differences) == 4
    assert set(differences.values()) == {"met"}
    assert {name for name, outcome in found.items() if outcome == "measured"} == {
        f"{variant}: masked, of the causal fused rate"
        for variant in ("window of 32", "ALiBi", "relative bias", "soft-cap")
    }


def test_decoding_is_measured_with_its_share_of_the_bandwidth() -> None:
    found = {
        finding.name: finding
        for finding in gpu_decoding.measure_decoding(
            CPU, TINY, context=16, new_tokens=4, buffer_bytes=2**20, compiled=False, rounds=1
        )
    }
    assert found["KV cache in bf16, allocated over formula"].value == 1
    assert found["KV cache in int8, allocated over formula"].value == 1
    share = found["of the bandwidth, eager"].value
    assert share is not None
    assert 0 < share < 100
    assert found["CUDA graphs launched per token, eager"].outcome == "skipped"


@pytest.mark.slow
def test_the_step_without_graphs_gives_the_logits_of_the_eager_one() -> None:
    model = build_decoder(compose(*TINY, "model.max_seq_len=8"), CPU)
    logits = []
    with torch.inference_mode():
        for new_step in (gpu_decoding.eager_step, gpu_decoding.step_without_graphs):
            step = new_step(model, model.new_state(1, 8))
            logits.append(torch.cat([step(torch.tensor([[token]])) for token in (3, 1, 4)]))
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-4, atol=1e-4)


def test_the_profiler_counts_calls() -> None:
    x = torch.ones(3)
    assert gpu_decoding.calls(lambda: [x.sin() for _ in range(5)])["aten::sin"] == 5


def test_launches_of_graphs_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    class Graph:
        def replay(self) -> None:
            pass

    monkeypatch.setattr(gpu_decoding, "CUDAGraph", Graph)
    assert gpu_decoding.graphs_launched(lambda: [Graph().replay() for _ in range(3)]) == 3


@pytest.mark.slow
def test_sharded_runs_of_train_py_are_compared_with_one_device(tiny: list[str]) -> None:
    found = outcomes(gpu_training.measure_sharding(CPU, tiny))
    assert found["FSDP2 on one device: validation loss beside one device's"] == "met"
    assert found["ddp on two devices"] == "skipped"


@pytest.mark.slow
def test_a_ladder_runs_in_slots(tiny: list[str]) -> None:
    found = list(gpu_training.measure_ladder(CPU, {"tiny": [*tiny, "study.axes=[norm]"]}, slots=2))
    values = {finding.name: finding.value for finding in found}
    assert values["ladder at tiny: runs that are done"] == 2
    assert values["ladder at tiny: has its report"] is True


def test_a_run_that_fails_is_named_with_its_last_line(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"train\.py size=huge ended with 2: .*huge"):
        gpu_training.train(tmp_path, "size=huge")


def test_runs_at_once_are_those_whose_times_overlap(tmp_path: Path) -> None:
    for name, begun, ended in (("a", 0, 10), ("b", 5, 15), ("c", 10, 20)):
        (tmp_path / name).mkdir()
        for file, moment in (("environment.json", begun), (Summary.FILE, ended)):
            (tmp_path / name / file).touch()
            os.utime(tmp_path / name / file, (moment, moment))
    assert gpu_training.runs_at_once(sorted(tmp_path.iterdir())) == 2
