"""The losses of a run on each held-out document, which a report's interval over documents rests on."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from llama_lab.data.objectives import open_objective
from llama_lab.data.open import open_dataset
from llama_lab.data.windows import ValWindows
from llama_lab.devices.hardware import choose_hardware
from llama_lab.evaluation import documents
from llama_lab.evaluation.documents import document_losses
from llama_lab.evaluation.lengths import evaluating_on, sums_by_position
from llama_lab.evaluation.load import load_run
from llama_lab.runs.evaluation import DocumentLosses
from llama_lab.runs.stored import Summary

SETTINGS = {
    "text": [],
    "masked": ["data.document_mask=true", "data.document_chars=200"],
    "judging": ["data.val_half=judging", "data.val_block_chars=100"],
    "averaged": ["train.ema=0.9"],
    "prefix": ["objective=prefix"],
}


@pytest.mark.parametrize("kind", SETTINGS)
def test_losses_by_document_add_up_to_the_loss_and_are_those_of_their_tokens(
    kind: str, trained: Callable[..., Path]
) -> None:
    folder = trained(*SETTINGS[kind])
    found = DocumentLosses.load(folder)
    assert len(found.tokens) > 3
    assert sum(found.nats) / sum(found.tokens) == pytest.approx(Summary.load(folder).metrics["val/loss"], abs=1e-5)
    run = load_run(folder)
    dataset, length = open_dataset(run.cfg), run.model.max_seq_len
    owners = dataset.val_documents
    objective = open_objective(run.cfg, dataset)
    with evaluating_on(run.model, torch.device("cpu")):
        for number in (0, len(found.tokens) // 2, len(found.tokens) - 1):
            first, *_, last = np.flatnonzero(owners == number)
            windows = ValWindows(dataset.val, length, range(first, last + 1))
            nats, counts, _ = sums_by_position(run.model, [windows], length, 4 * length, objective)
            assert (float(nats.sum()), int(counts.sum())) == pytest.approx(
                (found.nats[number], found.tokens[number]), abs=2e-3
            )


def test_many_documents_are_taken_together(trained: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    run = load_run(trained())
    dataset, hardware = open_dataset(run.cfg), choose_hardware(run.cfg.trainer, run.cfg.model.dim, 1)
    alone = document_losses(run.cfg, dataset, run.model, hardware)
    monkeypatch.setattr(documents, "MOST_GROUPS", 2)
    pair = document_losses(run.cfg, dataset, run.model, hardware)
    assert len(pair.tokens) == 2
    assert sum(pair.tokens) == sum(alone.tokens)
    first = next(n for n in range(len(alone.tokens)) if sum(alone.tokens[:n]) == pair.tokens[0])
    assert pair.nats[0] == pytest.approx(sum(alone.nats[:first]), abs=0.01)


@pytest.mark.parametrize(
    "without", [["data.val_half=tuning"], ["objective=masked", "family=encoder", "train.sample_tokens=0"]], ids=str
)
def test_runs_that_nothing_is_judged_by_have_none(without: list[str], trained: Callable[..., Path]) -> None:
    assert not (trained(*without) / DocumentLosses.FILE).exists()
