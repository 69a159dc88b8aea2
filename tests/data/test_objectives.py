"""Objectives: which tokens of a training window are predicted."""

import numpy as np
import pytest

from llama_lab.config.components import build_model
from llama_lab.data.data_module import open_data_module
from llama_lab.data.dataset import Examples
from llama_lab.data.objectives import Prefix
from llama_lab.data.open import open_dataset
from llama_lab.data.probes import ProbeDataset, Reverse
from llama_lab.model.loss import IGNORE
from llama_lab.util.errors import ConfigError
from tests.training.tiny import planned

T, BATCH = 16, 64


def drawn(seed: int = 1, step: int = 0, rows: range = range(BATCH), least: int = 2) -> np.ndarray:
    """The tokens of each prefix; the windows are numbered."""
    windows = np.arange(BATCH * T).reshape(BATCH, T)
    inputs, targets = Prefix(least).examples(Examples(windows[rows], windows[rows] + 1), seed, step, BATCH, rows)
    prefix = (targets == IGNORE).sum(1) + 1
    assert (inputs == windows[rows]).all()
    for i, window in enumerate(windows[rows]):
        assert targets[i, : prefix[i] - 1].tolist() == [IGNORE] * (prefix[i] - 1)
        assert targets[i, prefix[i] - 1 :].tolist() == (window + 1)[prefix[i] - 1 :].tolist()
    return prefix


def test_prefixes_are_uniform_and_depend_on_seed_and_step_alone() -> None:
    assert (drawn(rows=range(16, 32)) == drawn()[16:32]).all()
    assert (drawn() != drawn(seed=2)).any()
    assert (drawn() != drawn(step=1)).any()
    counts = np.bincount(np.concatenate([drawn(step=step, least=3) for step in range(100)]), minlength=T)
    assert counts[:3].tolist() == [0, 0, 0]
    assert counts[3:T] / counts.sum() == pytest.approx(np.full(T - 3, 1 / (T - 3)), rel=0.2)


def test_a_window_that_begins_with_a_source_keeps_it_as_its_prefix() -> None:
    whole = ProbeDataset(Reverse(symbols=6, noise=0.0), T, 1).train_windows(T, seed=1).examples(0, BATCH)
    (_, targets) = Prefix(2).examples(whole, 1, 0, BATCH, range(BATCH))
    assert (targets == whole.targets).all()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("objective.least=1", "objective.least=1: a prefix of 1 tokens has nothing to read both ways"),
        ("objective.least=0", "objective.least=0: a prefix of 0 tokens has nothing to read both ways"),
        ("objective.least=32", "objective.least=32: model.max_seq_len=32 leaves nothing to predict"),
        ("model.max_seq_len=3", "model.max_seq_len=3: half of it is a prefix; make it at least 4"),
        ("model.attention.prefix=4", "model.attention.prefix=4: objective=prefix has its own prefixes"),
        (
            "attention=linear position=none",
            "model.attention=llama_lab.model.recurrent.LinearAttention: its tokens see only",
        ),
        ("data.document_mask=true", "model.document_start_id=9: a prefix holds several documents"),
    ],
)
def test_what_cannot_have_a_prefix_is_refused(overrides: str, message: str, tiny: list[str]) -> None:
    cfg = planned(*tiny, "objective=prefix", *overrides.split()).cfg

    def prepare() -> None:
        build_model(cfg, 10, 9)
        open_data_module(cfg, open_dataset(cfg))

    with pytest.raises(ConfigError, match=f"^{message}"):
        prepare()
