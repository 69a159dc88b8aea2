"""Peers have our shape and do our work, one at a time; what is not installed is skipped by name."""

import sys
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks import side
from benchmarks.peer_tables import LOSS, RATIO, ROUNDS, SHARE, SPEED, markdown, rows_of, text_table
from benchmarks.peers import PRESETS, contenders, rotated, spec_of, train_flops
from benchmarks.side import SIDES, Spec, Work, batches
from benchmarks.side_process import Contender, Measured, skipped, started
from llama_lab.devices.memory import libc
from llama_lab.errors import ConfigError
from tests.conftest import Command

TINY = PRESETS["tiny"]
INSTALLED = ("ours", "transformers", "x-transformers")


@pytest.fixture(scope="module")
def spec() -> Spec:
    return spec_of(TINY, decode=False)


def parameters(side: str, spec: Spec) -> int:
    return sum(p.numel() for p in SIDES[side](replace(spec, side=side)).model.parameters())


@pytest.mark.parametrize("preset", ["small", "default", "tiny"])
def test_transformers_has_as_many_parameters_as_ours_and_x_transformers_only_its_bias_more(preset: str) -> None:
    spec = spec_of(PRESETS[preset], decode=False)
    ours = parameters("ours", spec)
    assert parameters("transformers", spec) == ours
    assert parameters("x-transformers", spec) == ours + 2 * spec.shape.hidden_dim * spec.shape.n_layers


def test_the_presets_are_the_shapes_that_they_are_said_to_be() -> None:
    small, default = (spec_of(PRESETS[name], decode=False) for name in ("small", "default"))
    shape = small.shape
    assert (shape.dim, shape.n_layers, shape.n_heads, shape.n_kv_heads) == (256, 6, 8, 4)
    assert (shape.hidden_dim, shape.vocab_size, small.batch_size, shape.max_seq_len) == (688, 4096, 8, 256)
    assert (small.grad_clip, default.batch_size, default.shape.max_seq_len) == (1.0, 16, 256)
    assert parameters("ours", default) == 1_840_256  # of the table in the README


def test_a_spec_survives_the_way_to_another_process(spec: Spec) -> None:
    assert Spec.loads(spec.dumps()).dumps() == spec.dumps()


def test_all_sides_read_the_same_tokens_of_a_law_that_can_be_learnt(spec: Spec) -> None:
    first, second = (list(islice(batches(spec), 3)) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not torch.equal(first[0], first[1])
    counts = torch.stack(first).flatten().bincount(minlength=spec.shape.vocab_size)
    assert counts[0] > counts[32:].max() > 0


@pytest.mark.parametrize("side", INSTALLED)
@pytest.mark.parametrize("bf16", [False, True])
def test_every_side_starts_at_the_loss_of_guessing_and_learns(side: str, bf16: bool, spec: Spec) -> None:
    found = Work(replace(spec, side=side, bf16=bf16)).train(40)
    assert 0 < found["update_seconds"] < found["seconds"]
    assert found["losses"][0] == pytest.approx(torch.tensor(64).log().item(), abs=0.05)
    assert found["losses"][-1] < found["losses"][0] - 0.3


def test_our_side_takes_the_very_steps_of_a_bare_loop(spec: Spec) -> None:
    work = Work(spec)
    twin = SIDES["ours"](spec)
    losses = []
    for tokens in islice(batches(spec), 3):
        loss = nn.functional.cross_entropy(twin.model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        losses.append(loss.item())
        twin.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(twin.model.parameters(), 1.0)
        twin.optimizer.step()
    assert work.train(2)["losses"] + work.train(1)["losses"] == pytest.approx(losses, rel=1e-5)


@pytest.mark.parametrize("side", INSTALLED)
@pytest.mark.parametrize("bf16", [False, True])
def test_every_side_makes_a_whole_text(side: str, bf16: bool) -> None:
    spec = replace(spec_of(TINY, decode=True), side=side, bf16=bf16)
    work = Work(spec)
    assert work.decode(2)["seconds"] > 0
    ended = work.side._replace(generate=lambda prompt, new_tokens: new_tokens - 1)
    work.side = ended
    with pytest.raises(RuntimeError, match=f"{side}: the text ended after 7 tokens"):
        work.decode(1)


def measured(side: str, speeds: list[float], spec: Spec, kept: bool = False) -> Measured:
    return Measured(Contender(replace(spec, side=side), kept), 1000, "1.0", "2.0", speeds, [4.2, 3.9, 3.5])


def test_ratios_are_those_of_each_round_and_shares_those_of_its_ceiling(spec: Spec) -> None:
    ours = measured("ours", [100.0, 200.0, 50.0], spec)
    theirs = measured("transformers", [50.0, 300.0, 40.0], spec)
    first, second = rows_of([ours, theirs], 10.0, [2000.0, 4000.0, 1000.0])
    assert first[RATIO] == "1.00 (1.00 to 1.00)"
    assert second[RATIO] == "0.80 (0.50 to 1.50)"  # the ratio of the medians would be 0.50
    assert second[ROUNDS] == "0.50 1.50 0.80"
    assert second[SPEED] == "50 (40 to 300)"
    assert (first[SHARE], second[SHARE]) == ("50%", "40%")
    assert second[LOSS] == "4.200, 3.500"


def test_decoding_has_neither_a_ceiling_nor_a_loss(spec: Spec) -> None:
    rows = rows_of([replace(measured("ours", [1.0], spec), losses=[])], 10.0, [])
    assert not {SHARE, LOSS} & rows[0].keys()
    assert text_table(rows, (SPEED, SHARE)).columns[-1].header == SPEED


def test_the_markdown_table_has_all_columns_of_every_side(spec: Spec) -> None:
    rows = rows_of([measured("ours", [1.0], spec), measured("ours", [2.0], spec, kept=True)], 10.0, [100.0])
    head, rule, first, second = markdown(rows).splitlines()
    assert len({line.count("|") for line in (head, rule, first, second)}) == 1
    assert first.startswith("| ours | returned |")
    assert second.startswith("| ours, memory kept | kept |")


def test_the_order_of_a_round_rotates() -> None:
    assert ["".join(rotated("abc", number)) for number in range(4)] == ["abc", "bca", "cab", "abc"]


def test_memory_is_as_free_for_all_and_ours_is_also_measured_as_a_run_keeps_it(spec: Spec) -> None:
    names = [contender.name for contender in contenders(spec, False, None)]
    assert names == ["ours", "ours, memory kept", "transformers", "x-transformers"]
    assert [c.kept for c in contenders(spec, True, Path("python"))] == [True] * 4
    assert len(contenders(replace(spec, new_tokens=8), False, None)) == 3


@pytest.mark.skipif(not hasattr(libc, "mallopt"), reason="this C library is not glibc")
def test_a_process_keeps_freed_memory_as_a_run_of_ours_does(
    spec: Spec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "churn.py"
    script.write_text(CHURN)
    monkeypatch.setattr(side, "__file__", str(script))
    faults = {}
    for kept in (False, True):
        with started(Contender(spec, kept)) as process:
            found = process.ready()
            assert found is not None
            faults[kept] = found.params
    assert faults[True] < faults[False] / 4


CHURN = """
import json, resource, torch

def page_faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(3):
        torch.ones(2**24)  # larger than what glibc ever keeps by itself
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

print(json.dumps({"params": min(page_faults() for _ in range(5)), "version": "", "torch": ""}))
"""


def test_a_peer_that_is_not_installed_is_skipped_by_name_with_how_to_install_it(
    spec: Spec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    contender = Contender(replace(spec, side="litgpt"), False, sys.executable)
    (tmp_path / "litgpt.py").write_text("raise ModuleNotFoundError(name='litgpt')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with started(contender) as process:
        assert process.ready() is None
        assert skipped(process) == "litgpt is skipped: litgpt is not installed; pip install litgpt"
        process.contender, process.missing = replace(contender, python="there/python"), "psutil"
        assert skipped(process).startswith("litgpt is skipped: psutil is not installed for there/python; pip")


def test_a_peer_that_breaks_is_reported_with_its_last_words(spec: Spec) -> None:
    broken = replace(spec, side="transformers", shape=replace(spec.shape, n_heads=3))
    with started(Contender(broken, False)) as process, pytest.raises(ConfigError) as error:
        process.ready()
    assert str(error.value).startswith("transformers: its process ended, ValueError: The hidden size (32)")


def test_a_python_that_is_not_there_is_named(spec: Spec) -> None:
    message = "--litgpt=no/python: No such file or directory; give the path of a Python"
    with (
        pytest.raises(ConfigError, match=message),
        started(Contender(replace(spec, side="litgpt"), False, "no/python")),
    ):
        pass


def test_flops_are_counted_at_the_context_of_the_batches(spec: Spec) -> None:
    longer = replace(spec, overrides=(*spec.overrides, "model.max_seq_len=64"))
    assert train_flops(longer) > train_flops(spec) > 6 * 20_000


@pytest.mark.slow
def test_peers_prints_all_sides_as_text_and_as_markdown(bench: Command) -> None:
    ran = bench("peers", "--preset", "tiny", "--rounds", "2")
    assert (ran.code, ran.err) == (0, "")
    table = [line for line in ran.out.splitlines() if line.startswith("| ")]
    sides = [line.split(" | ")[0] for line in table[2:]]
    assert sides == [
        "| ours",
        "| ours, memory kept",
        "| transformers",
        "| x-transformers",
    ]
    assert "of ceiling" in table[0]
    assert "round 2 of 2, tokens/s: ours " in ran.out
    assert "python -m benchmarks peers --preset tiny --rounds 2" in ran.out
    assert max(len(line) for line in ran.out.splitlines() if line.startswith(" ")) <= 80
