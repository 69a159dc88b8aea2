"""Objectives: which tokens of a training window are predicted."""

from collections import Counter
from itertools import combinations, pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from llama_lab.api import load_config
from llama_lab.config.components import build_model
from llama_lab.data.data_module import open_data_module
from llama_lab.data.dataset import Examples
from llama_lab.data.objectives import Masked, Objective, Prefix, Span
from llama_lab.data.open import open_dataset
from llama_lab.data.probes import ProbeDataset, Reverse
from llama_lab.data.tokenizer import ByteTokenizer, TextTokenizer
from llama_lab.data.windows import ValWindows
from llama_lab.model import measure_cost
from llama_lab.model.cost import random_batch
from llama_lab.model.loss import IGNORE
from llama_lab.runs.stored import Summary
from llama_lab.util.errors import ConfigError
from tests.training.tiny import planned, trained

T, BATCH = 16, 64
BYTE = ByteTokenizer().train(iter(())).with_tokens(Span.extra_tokens)
MASKS = ByteTokenizer().train(iter(())).with_tokens(Masked.extra_tokens)
END, FIRST, MASK = 256, 257, 257  # the end of a text, the first sentinel, and the mask


WINDOWS = np.arange(BATCH * T).reshape(BATCH, T) % 200
NEXT = (WINDOWS + 1) % 200


def examples(objective: Objective, seed: int = 1, step: int = 0, rows: range = range(BATCH)) -> list[np.ndarray]:
    """What an objective makes of rows of a batch."""
    return [*objective.examples(Examples(WINDOWS[rows], NEXT[rows]), seed, step, BATCH, rows)]


def test_prefixes_are_uniform_and_alone_not_predicted() -> None:
    counts = np.zeros(T)
    for step in range(100):
        inputs, targets = examples(Prefix(BYTE, 3), step=step)
        prefix = (targets == IGNORE).sum(1) + 1
        predicted = np.arange(T) >= prefix[:, None] - 1
        assert (inputs == WINDOWS).all()
        assert (targets == np.where(predicted, NEXT, IGNORE)).all()
        counts += np.bincount(prefix, minlength=T)
    assert counts[:3].tolist() == [0, 0, 0]
    assert counts[3:] / counts.sum() == pytest.approx(np.full(T - 3, 1 / (T - 3)), rel=0.2)


@pytest.mark.parametrize("objective", [Prefix(BYTE, 2), Span(BYTE, 0.4, 2.0), Masked(MASKS, 0.15)])
def test_what_is_predicted_depends_on_seed_and_step_alone(objective: Objective) -> None:
    whole = examples(objective)
    for part, of_all in zip(examples(objective, rows=range(16, 32)), whole, strict=True):
        assert (part == of_all[16:32]).all()
    assert (examples(objective, seed=2)[1] != whole[1]).any()
    assert (examples(objective, step=1)[1] != whole[1]).any()


def test_a_window_that_begins_with_a_source_keeps_it_as_its_prefix() -> None:
    whole = ProbeDataset(Reverse(symbols=6, noise=0.0), T, 1).train_windows(T, seed=1).examples(0, BATCH)
    (_, targets) = Prefix(BYTE, 2).examples(whole, 1, 0, BATCH, range(BATCH))
    assert (targets == whole.targets).all()


PREFIX, SPAN, MASKED = (
    "objective=prefix",
    "objective=span family=encoder_decoder",
    "objective=masked family=encoder",
)


@pytest.mark.parametrize(
    ("objective", "overrides", "key"),
    [
        (PREFIX, "objective.least=1", "objective.least=1"),
        (PREFIX, "model.max_seq_len=3", "model.max_seq_len=3"),
        (PREFIX, "model.attention.prefix=4", "model.attention.prefix=4"),
        (PREFIX, "attention=linear position=none", "model.attention=llama_lab.model.recurrent.LinearAttention"),
        (PREFIX, "data.document_mask=true", "model.document_start_id=9"),
        (MASKED, "objective.share=0", "objective.share=0"),
        (MASKED, "model.max_seq_len=1", "model.max_seq_len=1"),
        (SPAN, "objective.density=1", "objective.density=1"),
        (SPAN, "objective.density=0.75", "objective.mean_span=3.0"),
        (SPAN, "model.max_seq_len=5", "objective.mean_span=3.0"),
        (SPAN, "model.max_seq_len=1024 objective.density=0.3", "objective.mean_span=3.0"),
        (SPAN, "model.vocab_size=100", "model.vocab_size=100"),
    ],
)
def test_what_cannot_have_an_objective_is_refused(objective: str, overrides: str, key: str, tiny: list[str]) -> None:
    cfg = planned(*tiny, *objective.split(), *overrides.split()).cfg

    def prepare() -> None:
        dataset = open_dataset(cfg)
        build_model(cfg, dataset.index.vocab_size, 9)
        open_data_module(cfg, dataset)

    with pytest.raises(ConfigError, match=f"^{key}: [^\n]*$"):
        prepare()


@pytest.mark.parametrize(
    ("objective", "data"), [(SPAN, "data=recall"), (MASKED, "data=reverse"), (SPAN, "data=pairs data.files=[a,b]")]
)
def test_what_has_targets_of_its_own_has_no_objective(objective: str, data: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{objective.split()[0]}: [^\n]* leave it out"):
        load_config([*objective.split(), *data.split()])


def test_spans_are_as_in_a_table_written_by_hand() -> None:
    tokens = np.array([[10, 11, 12, 13, 14, 15, 16, 17], [20, 21, 22, 23, 24, 25, 26, 27]])
    is_noise = np.array([[0, 0, 1, 1, 1, 0, 0, 1], [0, 1, 0, 0, 0, 1, 1, 1]], dtype=bool)
    inputs, targets, source = Span(BYTE, 0.5, 2.0).divide(tokens, is_noise)
    assert source.tolist() == [[10, 11, 257, 15, 16, 258, 256], [20, 257, 22, 23, 24, 258, 256]]
    assert targets.tolist() == [[257, 12, 13, 14, 258, 17, 256], [257, 21, 258, 25, 26, 27, 256]]
    assert inputs.tolist() == [[256, 257, 12, 13, 14, 258, 17], [256, 257, 21, 258, 25, 26, 27]]


def published_masks(length: int, density: float, mean_span: float) -> list[tuple[bool, ...]]:
    """All results of T5's `random_spans_noise_mask`, which are equally likely."""
    noise = min(max(round(length * density), 1), length - 1)
    spans = max(1, round(noise / mean_span))

    def segmentations(items: int) -> list[list[int]]:
        cuts = combinations(range(1, items), spans - 1)
        return [[b - a for a, b in pairwise([0, *inner, items])] for inner in cuts]

    return [
        tuple(flag for pair in zip(kept, lost, strict=True) for flag in [False] * pair[0] + [True] * pair[1])
        for kept in segmentations(length - noise)
        for lost in segmentations(noise)
    ]


def test_masks_are_those_of_t5_s_procedure_and_equally_likely() -> None:
    rows, expected = 21_000, published_masks(12, 0.33, 2.0)
    drawn = Span(BYTE, 0.33, 2.0).draw(np.random.default_rng(0), rows, 12)
    counts = Counter(map(tuple, drawn.tolist()))
    assert (len(expected), counts.keys()) == (21, set(expected))
    assert [*counts.values()] == pytest.approx([rows / 21] * 21, rel=0.15)


@given(st.integers(10, 300), st.floats(0.05, 0.5), st.floats(2.0, 5.0), st.integers(0, 99))
def test_spans_put_into_the_source_give_the_window_back(length: int, density: float, mean: float, step: int) -> None:
    objective, tokens = Span(BYTE, density, mean), np.arange(3 * length).reshape(3, length) % 256
    inputs, targets, source = objective.examples(Examples(tokens, tokens), 1, step, 3, range(3))
    noise, spans = objective.counts(length)
    assert (source.shape, targets.shape) == ((3, length - noise + spans + 1), (3, noise + spans + 1))
    assert (inputs[:, 0] == source[:, -1]).all()
    assert (inputs[:, 1:] == targets[:, :-1]).all()
    for window, read, predicted in zip(tokens, source.tolist(), targets.tolist(), strict=True):
        assert read.pop() == predicted.pop() == END
        starts = [i for i, token in enumerate(predicted) if token > END]
        assert [predicted[i] for i in starts] == [FIRST + i for i in range(spans)]
        of_sentinel = dict(zip(range(FIRST, FIRST + spans), np.split(predicted, starts)[1:], strict=True))
        assert [x for token in read for x in (of_sentinel[token][1:] if token > END else [token])] == window.tolist()


def test_spans_of_validation_are_those_of_each_window_and_padding_is_no_token() -> None:
    windows = np.arange(4 * T).reshape(4, T)
    windows[3, 5:] = IGNORE
    objective = Span(BYTE, 0.4, 2.0)
    _, targets, source = objective.val_examples(Examples(windows, windows), [0, 2, 4, 6])
    again = objective.val_examples(Examples(windows[1:3], windows[1:3]), [2, 4])
    assert (again[2] == source[1:3]).all()
    assert len({tuple(row) for row in (targets[:3] >= FIRST).tolist()}) == 3, "each window has its own"
    assert (targets[3] == IGNORE).all(), "a window that is not whole predicts nothing"
    assert (targets[:3] != IGNORE).all()


def test_a_vocabulary_that_has_the_sentinels_keeps_their_ids() -> None:
    """As that of T5, in which they descend."""
    descending = ByteTokenizer().train(iter(())).with_tokens(Span.extra_tokens[::-1])
    assert descending.with_tokens(Span.extra_tokens).hash == descending.hash
    source = Span(descending, 0.15, 2.0).divide(np.array([[1, 2, 3]]), np.array([[False, True, True]]))[2]
    assert source.tolist() == [[1, 356, END]]


def test_the_tokenizer_of_a_run_gains_the_sentinels(tiny: list[str], tmp_path: Path) -> None:
    cfg = planned(*tiny, *SPAN.split()).cfg
    dataset, plain = open_dataset(cfg), open_dataset(planned(*tiny).cfg)
    own = plain.index.vocab_size
    assert dataset.index.vocab_size == own + 100
    assert dataset.index.tokenizer_hash == dataset.tokenizer.hash != plain.index.tokenizer_hash
    path = trained(*tiny, *SPAN.split(), "train.tokens=2560", f"runs_dir={tmp_path}")
    saved = TextTokenizer.load(path / "tokenizer.json")
    assert saved.ids_of(["<extra_id_0>", "<extra_id_99>"]) == [own, own + 99]
    assert Summary.load(path).metrics.keys().isdisjoint({"val/second_half_loss", "val/bits_per_byte"})


@torch.no_grad()
def test_costs_are_of_what_either_tower_reads_of_a_window_of_spans(tiny: list[str]) -> None:
    """As PyTorch counts them on a batch that the objective makes; most of a window is source."""
    cfg = planned(*tiny, *SPAN.split(), "model.encoder_layers=3").cfg
    dataset, length = open_dataset(cfg), cfg.model.max_seq_len
    model, data = build_model(cfg, dataset.index.vocab_size), open_data_module(cfg, dataset)
    whole = dataset.train_windows(length, 1).examples(0, 4)
    batch = [torch.from_numpy(ids) for ids in data.objective.examples(whole, 1, 0, 4, range(4))]
    inputs, _, source = batch
    assert (source.shape, inputs.shape) == ((4, 30), (4, 8))
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counted:  # it counts no fused kernel of a CPU
        model(inputs, None, source)
    assert counted.get_total_flops() == pytest.approx(measure_cost(model).flops_per_token_dense * 4 * length)
    assert [ids.shape for ids in random_batch(model, 4, length)] == [ids.shape for ids in batch]


def test_a_fixed_number_of_tokens_is_chosen_and_80_10_and_10_percent_of_them_masked_random_and_left() -> None:
    fates, places = np.zeros(3), np.zeros(T)
    for step in range(200):
        inputs, targets = examples(Masked(MASKS, 0.15), step=step)
        chosen = targets != IGNORE
        assert (chosen.sum(1) == 2).all()  # 0.15 * 16, rounded
        assert (targets[chosen] == NEXT[chosen]).all()
        assert (inputs[~chosen] == NEXT[~chosen]).all()
        is_mask, stays = inputs[chosen] == MASK, inputs[chosen] == NEXT[chosen]
        fates += is_mask.sum(), (~is_mask & ~stays).sum(), stays.sum()
        places += chosen.sum(0)
    assert fates / fates.sum() == pytest.approx([0.8, 0.1, 0.1], abs=0.01)  # 4 standard deviations and more
    assert places / places.sum() == pytest.approx(np.full(T, 1 / T), rel=0.1)


def test_masks_of_validation_are_those_of_each_window_and_padding_is_no_token() -> None:
    tokens = (np.arange(2 * T + 6) % 200).astype(np.uint16)
    windows, objective = ValWindows(tokens, T), Masked(MASKS, 0.5)
    whole = Examples(*(np.stack(side) for side in zip(*(windows[i] for i in range(3)), strict=True)))
    inputs, targets, lengths = objective.val_examples(whole, range(3))
    assert lengths.tolist() == [T, T, 5]
    assert ((targets != IGNORE).sum(1)).tolist() == [8, 8, 2]
    assert (targets[2, 5:] == IGNORE).all()
    alone = objective.val_examples(Examples(*(side[[1]] for side in whole)), [1])
    assert (alone[0] == inputs[1]).all()
    assert (alone[1] == targets[1]).all()


def test_only_what_a_window_predicts_is_masked() -> None:
    whole = Examples(np.arange(T)[None], np.where(np.arange(T) < 6, IGNORE, np.arange(T) + 1)[None])
    inputs, targets = Masked(MASKS, 0.9).val_examples(whole, [0])
    assert targets[0, :6].tolist() == [IGNORE] * 6
    assert (targets != IGNORE).sum() == 9
    assert inputs[0, :6].tolist() == [1, 2, 3, 4, 5, 6]
