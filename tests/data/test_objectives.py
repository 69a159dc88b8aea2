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
from llama_lab.data.dataset import Examples, Ids
from llama_lab.data.objectives import Masked, Prefix, Span
from llama_lab.data.open import open_dataset
from llama_lab.data.probes import ProbeDataset, Reverse
from llama_lab.data.tokenizer import ByteTokenizer, TextTokenizer
from llama_lab.data.windows import ValWindows
from llama_lab.evaluation.evaluate import evaluate
from llama_lab.model import measure_cost
from llama_lab.model.cost import random_batch
from llama_lab.model.loss import IGNORE
from llama_lab.model.recompute import recomputed_flops
from llama_lab.runs.stored import Summary
from llama_lab.util.errors import ConfigError
from tests.composing import eval_settings
from tests.conftest import Command
from tests.training.tiny import planned, trained

T, BATCH = 16, 64
BYTE = ByteTokenizer().train(iter(())).with_tokens(Span.extra_tokens)
END, FIRST = 256, 257  # the end of a text, and the first sentinel


def drawn(seed: int = 1, step: int = 0, rows: range = range(BATCH), least: int = 2) -> np.ndarray:
    """The tokens of each prefix; the windows are numbered."""
    windows = np.arange(BATCH * T).reshape(BATCH, T)
    inputs, targets = Prefix(BYTE, least).examples(Examples(windows[rows], windows[rows] + 1), seed, step, BATCH, rows)
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
    (_, targets) = Prefix(BYTE, 2).examples(whole, 1, 0, BATCH, range(BATCH))
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
        ("family=encoder objective=masked objective.share=0", "objective.share=0: must be more than 0 and less than 1"),
        ("family=encoder objective=masked objective.share=1", "objective.share=1: must be more than 0 and less than 1"),
        ("family=encoder objective=masked model.max_seq_len=1", "model.max_seq_len=1: its only token would be masked"),
    ],
)
def test_what_cannot_have_an_objective_is_refused(overrides: str, message: str, tiny: list[str]) -> None:
    cfg = planned(*tiny, *["objective=prefix"] * ("masked" not in overrides), *overrides.split()).cfg

    def prepare() -> None:
        build_model(cfg, 10, 9)
        open_data_module(cfg, open_dataset(cfg))

    with pytest.raises(ConfigError, match=f"^{message}"):
        prepare()


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


def span(step: int = 0, seed: int = 1, rows: range = range(BATCH)) -> tuple[Ids, ...]:
    windows = np.arange(BATCH * T).reshape(BATCH, T)[rows] % 256
    return Span(BYTE, 0.4, 2.0).examples(Examples(windows, windows), seed, step, BATCH, rows)


def test_spans_depend_on_seed_and_step_alone_and_in_validation_on_the_window_s_number() -> None:
    for one, all_rows in zip(span(rows=range(16, 32)), span(), strict=True):
        assert (one == all_rows[16:32]).all()
    assert (span()[2] != span(step=1)[2]).any()
    assert (span()[2] != span(seed=2)[2]).any()
    windows = np.arange(4 * T).reshape(4, T)
    windows[3, 5:] = IGNORE
    together = Span(BYTE, 0.4, 2.0).val_examples(Examples(windows, windows), [0, 2, 4, 6])
    again = Span(BYTE, 0.4, 2.0).val_examples(Examples(windows[1:3], windows[1:3]), [2, 4])
    assert all((a[1:3] == b).all() for a, b in zip(together, again, strict=True))
    assert len({tuple(row) for row in (together[1][:3] >= FIRST).tolist()}) == 3, "each window has its own"
    assert (together[1][3] == IGNORE).all(), "a window that is not whole predicts nothing"
    assert (together[1][:3] != IGNORE).all()


def test_a_vocabulary_that_has_the_sentinels_keeps_their_ids() -> None:
    """As that of T5, in which they descend."""
    descending = ByteTokenizer().train(iter(())).with_tokens(Span.extra_tokens[::-1])
    assert descending.with_tokens(Span.extra_tokens).hash == descending.hash
    source = Span(descending, 0.15, 2.0).divide(np.array([[1, 2, 3]]), np.array([[False, True, True]]))[2]
    assert source.tolist() == [[1, 356, END]]


SPAN = ("objective=span", "family=encoder_decoder")


def test_the_tokenizer_of_a_run_gains_the_sentinels(tiny: list[str], tmp_path: Path) -> None:
    cfg = planned(*tiny, *SPAN).cfg
    dataset, plain = open_dataset(cfg), open_dataset(planned(*tiny).cfg)
    own = plain.index.vocab_size
    assert dataset.index.vocab_size == own + 100
    assert dataset.index.tokenizer_hash == dataset.tokenizer.hash != plain.index.tokenizer_hash
    assert (dataset.index.data_hash, plain.index.train) == (plain.index.data_hash, dataset.index.train)
    path = trained(*tiny, *SPAN, "train.tokens=2560", f"runs_dir={tmp_path}")
    saved = TextTokenizer.load(path / "tokenizer.json")
    assert saved.ids_of(["<extra_id_0>", "<extra_id_99>"]) == [own, own + 99]
    metrics = Summary.load(path).metrics
    assert metrics.keys().isdisjoint({"val/second_half_loss", "val/bits_per_byte"})
    found = evaluate(path, eval_settings("eval.parts=[loss]"))
    assert found.metrics["val/loss"] == pytest.approx(metrics["val/loss"], rel=1e-5)
    assert "val/bits_per_byte" not in found.metrics


@torch.no_grad()
def test_costs_are_of_what_either_tower_reads_of_a_window_of_spans(tiny: list[str]) -> None:
    """As PyTorch counts them on a batch that the objective makes; most of a window is source."""
    cfg = planned(*tiny, *SPAN, "model.encoder_layers=3").cfg
    dataset, length = open_dataset(cfg), cfg.model.max_seq_len
    model, data = build_model(cfg, dataset.index.vocab_size), open_data_module(cfg, dataset)
    whole = dataset.train_windows(length, 1).examples(0, 4)
    batch = [torch.from_numpy(ids) for ids in data.objective.examples(whole, 1, 0, 4, range(4))]
    inputs, _, source = batch
    assert (source.shape, inputs.shape) == ((4, 30), (4, 8))
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counted:  # it counts no fused kernel of a CPU
        model(inputs, None, source)
    cost = measure_cost(model)
    assert counted.get_total_flops() == pytest.approx(cost.flops_per_token_dense * 4 * length)
    state = model.new_state(1, 30, torch.bfloat16)
    assert cost.kv_bytes_source == sum(layer.source.nbytes for layer in state.layers)
    assert cost.kv_bytes == 8 * cost.kv_bytes_per_token
    assert [ids.shape for ids in random_batch(model, 4, length)] == [ids.shape for ids in batch]
    assert recomputed_flops(model, "block") < cost.flops_per_token


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("objective.density=1", "objective.density=1: must be between 0 and 1, such as 0.15"),
        ("objective.density=0", "objective.density=0: must be between 0 and 1"),
        ("objective.mean_span=0.5", "objective.mean_span=0.5: must be at least 1 token"),
        ("objective.mean_span=1", "objective.mean_span=1: a window of model.max_seq_len=32 has 5 spans, of 5"),
        ("objective.density=0.95", "objective.mean_span=3.0: a window of model.max_seq_len=32 has 10 spans"),
        ("objective.density=0.75", "objective.mean_span=3.0: .* has 8 spans, of 24 tokens in all, where at most 7 fit"),
        ("model.max_seq_len=5", "objective.mean_span=3.0: a window of model.max_seq_len=5 has 1 spans"),
        (
            "model.max_seq_len=1024 objective.density=0.3",
            "objective.mean_span=3.0: .* has 102 spans, of 307 tokens in all, where at most 100 fit",
        ),
        ("model.vocab_size=100", "model.vocab_size=100: the tokenizer has 357 ids"),
    ],
)
def test_windows_without_room_for_spans_are_refused(overrides: str, message: str, tiny: list[str]) -> None:
    cfg = planned(*tiny, *SPAN, *overrides.split()).cfg

    def prepare() -> None:
        dataset = open_dataset(cfg)
        build_model(cfg, dataset.index.vocab_size, 9)
        open_data_module(cfg, dataset)

    with pytest.raises(ConfigError, match=f"^{message}"):
        prepare()


def test_a_probe_has_no_spans(command: Command) -> None:
    ran = command(*SPAN, "data=recall")
    problem = "error: objective=span: a probe has targets of its own; leave it out, or choose a text\n"
    assert (ran.code, ran.err) == (2, problem)


MASK = 257
MASKS = ByteTokenizer().train(iter(())).with_tokens(Masked.extra_tokens)


def masked(share: float = 0.15, seed: int = 1, step: int = 0, rows: range = range(BATCH)) -> tuple[np.ndarray, ...]:
    """Inputs and targets of rows of a batch, and the tokens themselves, which are numbered."""
    numbers = np.arange(BATCH * T).reshape(BATCH, T)
    whole = Examples(*(side[rows] % 200 for side in (numbers, numbers + 1)))
    return *Masked(MASKS, share).examples(whole, seed, step, BATCH, rows), whole.targets


def test_a_fixed_number_of_tokens_is_chosen_and_80_10_and_10_percent_of_them_masked_random_and_left() -> None:
    fates, places = np.zeros(3), np.zeros(T)
    for step in range(200):
        inputs, targets, tokens = masked(step=step)
        chosen = targets != IGNORE
        assert (chosen.sum(1) == 2).all()  # 0.15 * 16, rounded
        assert (targets[chosen] == tokens[chosen]).all()
        assert (inputs[~chosen] == tokens[~chosen]).all()
        is_mask, stays = inputs[chosen] == MASK, inputs[chosen] == tokens[chosen]
        fates += is_mask.sum(), (~is_mask & ~stays).sum(), stays.sum()
        places += chosen.sum(0)
    assert fates / fates.sum() == pytest.approx([0.8, 0.1, 0.1], abs=0.01)  # 4 standard deviations and more
    assert places / places.sum() == pytest.approx(np.full(T, 1 / T), rel=0.1)


def test_masks_depend_on_seed_and_step_alone() -> None:
    for ours, whole in zip(masked(rows=range(16, 32)), masked(), strict=True):
        assert (ours == whole[16:32]).all()
    assert (masked()[1] != masked(seed=2)[1]).any()
    assert (masked()[1] != masked(step=1)[1]).any()
    assert ((masked(share=0.01)[1] != IGNORE).sum(1) == 1).all(), "at least one"


def test_masks_of_validation_are_those_of_each_window_and_padding_is_no_token() -> None:
    tokens = (np.arange(2 * T + 6) % 200).astype(np.uint16)
    windows, objective = ValWindows(tokens, T), Masked(MASKS, 0.5)
    whole = Examples(*(np.stack(side) for side in zip(*(windows[i] for i in range(3)), strict=True)))
    inputs, targets, lengths = objective.val_examples(whole, range(3))
    assert lengths.tolist() == [T, T, 5]
    assert ((targets != IGNORE).sum(1)).tolist() == [8, 8, 2]
    assert (targets[2, 5:] == IGNORE).all()
    for number in range(3):
        alone = objective.val_examples(Examples(*(side[[number]] for side in whole)), [number])
        assert len(alone) == (3 if number == 2 else 2)
        assert all(
            (ours[0] == theirs[number]).all() for ours, theirs in zip(alone, (inputs, targets, lengths), strict=False)
        )
    nothing = Examples(*(side[None] for side in windows.nothing()))
    assert (objective.val_examples(nothing, [0])[1] == IGNORE).all()


def test_only_what_a_window_predicts_is_masked() -> None:
    whole = Examples(np.arange(T)[None], np.where(np.arange(T) < 6, IGNORE, np.arange(T) + 1)[None])
    inputs, targets = Masked(MASKS, 0.9).val_examples(whole, [0])
    assert targets[0, :6].tolist() == [IGNORE] * 6
    assert (targets != IGNORE).sum() == 9
    assert inputs[0, :6].tolist() == [1, 2, 3, 4, 5, 6]


def test_a_probe_is_not_masked() -> None:
    with pytest.raises(ConfigError, match=r"^objective=masked: a probe has targets of its own; leave it out, or"):
        load_config(["family=encoder", "objective=masked", "data=reverse"])
    with pytest.raises(ConfigError, match=r"^objective=span: a pair has targets of its own; leave it out, or choose"):
        load_config(["family=encoder_decoder", "objective=span", "data=pairs", "data.files=[a,b]"])
