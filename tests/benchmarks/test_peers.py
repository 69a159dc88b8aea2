"""Peers have our shape and do our work, one at a time."""

import os
from dataclasses import replace
from itertools import islice

import pandas as pd
import pytest
import torch
from torch import nn

from benchmarks.contenders import CONTENDERS, Ours, Spec, batches, begin
from benchmarks.peers import CEILING, PRESETS, compared, train_flops
from benchmarks.processes import process

SPEC = Spec(PRESETS["tiny"].overrides)
TEXT = replace(SPEC, prompt=4, new_tokens=8)


@pytest.mark.parametrize("preset", PRESETS)
def test_transformers_has_as_many_parameters_as_ours_and_x_transformers_only_its_bias_more(preset: str) -> None:
    spec = Spec(PRESETS[preset].overrides)
    ours, transformers, x_transformers = (begin(contender, spec) for contender in CONTENDERS)
    assert transformers == ours
    assert x_transformers == ours + 2 * spec.config.model.hidden_dim * spec.config.model.n_layers


def test_the_preset_of_the_readme_has_the_parameters_of_its_table() -> None:
    assert begin("ours", Spec(PRESETS["default"].overrides)) == 1_840_256


def test_all_sides_read_the_same_tokens_of_a_law_that_can_be_learnt() -> None:
    first, second = (list(islice(batches(SPEC.config), 3)) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not torch.equal(first[0], first[1])
    counts = torch.stack(first).flatten().bincount(minlength=64)
    assert counts[0] > counts[32:].max() > 0


@pytest.mark.parametrize(("contender", "bf16"), [("ours", False), ("transformers", True), ("x-transformers", False)])
def test_every_side_starts_at_the_loss_of_guessing_and_learns(contender: str, bf16: bool) -> None:
    seconds, losses = CONTENDERS[contender](replace(SPEC, bf16=bf16)).train(40)
    assert seconds > 0
    assert losses[0] == pytest.approx(torch.tensor(64).log().item(), abs=0.05)
    assert losses[-1] < losses[0] - 0.3


def test_our_side_takes_the_very_steps_of_a_bare_loop() -> None:
    ours, twin = Ours(SPEC), Ours(SPEC)
    losses = []
    for tokens in islice(batches(SPEC.config), 3):
        loss = nn.functional.cross_entropy(twin.model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        losses.append(loss.item())
        twin.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(twin.model.parameters(), 1.0)
        twin.optimizer.step()
    assert ours.train(2)[1] + ours.train(1)[1] == pytest.approx(losses, rel=1e-5)


@pytest.mark.parametrize(("contender", "bf16"), [("ours", True), ("transformers", False), ("x-transformers", True)])
def test_every_side_makes_a_whole_text(contender: str, bf16: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    at_work = CONTENDERS[contender](replace(TEXT, bf16=bf16))
    assert at_work.decode(2)[0] > 0
    monkeypatch.setattr(at_work, "generate", lambda prompt, new_tokens: new_tokens - 1)
    with pytest.raises(RuntimeError, match="ended after 7 tokens"):
        at_work.decode(1)


def test_ratios_are_those_of_each_round_and_shares_those_of_its_ceiling() -> None:
    speeds = {"ours": [100.0, 200.0, 50.0], "transformers": [50.0, 300.0, 40.0], CEILING: [2000.0, 4000.0, 1000.0]}
    ours, theirs = compared(pd.DataFrame(speeds), 10.0).itertuples()
    assert (ours.ratio_min, ours.ratio_max) == (1.0, 1.0)
    assert (theirs.ratio_median, theirs.ratio_min, theirs.ratio_max) == (0.8, 0.5, 1.5)  # not that of the medians, 0.5
    assert (theirs.tokens_per_s_median, theirs.tokens_per_s_min, theirs.tokens_per_s_max) == (50, 40, 300)
    assert (ours.of_ceiling_median, theirs.of_ceiling_median) == (0.5, 0.4)


def test_flops_are_counted_at_the_context_of_the_batches_and_decoding_has_no_ceiling() -> None:
    assert train_flops(Spec((*SPEC.overrides, "model.max_seq_len=64"))) > train_flops(SPEC) > 6 * 20_000
    assert train_flops(TEXT) == 0
    assert not compared(pd.DataFrame({"ours": [1.0], CEILING: [1.0]}), 0.0).columns.str.startswith("of_ceiling").any()


@pytest.mark.process
@pytest.mark.slow
def test_a_process_has_its_variables_alone_and_reports_what_fails() -> None:
    with process(MINE="1") as executor:
        assert executor.submit(os.getenv, "MINE").result() == "1"
        assert "MINE" not in os.environ
        with pytest.raises(ValueError, match=r"model\.n_heads=3: does not divide"):
            executor.submit(begin, "transformers", Spec((*SPEC.overrides, "model.n_heads=3"))).result()
