"""Probes: answers against a brute-force reader of the sequences, the floor against an oracle, and fixed data."""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from llama_lab.config.schema import flatten
from llama_lab.data.open import open_dataset
from llama_lab.data.probes import Copy, Induction, Probe, ProbeDataset, Recall, Reverse
from llama_lab.model.loss import IGNORE
from llama_lab.util.errors import ConfigError
from tests.composing import compose_config
from tests.training.tiny import planned

PROBES: dict[str, Probe] = {
    "recall": Recall(keys=9, values=7, pairs=3, queries=5, noise=0.0),
    "copy": Copy(symbols=6, noise=0.0),
    "reverse": Reverse(symbols=6, noise=0.0),
    "induction": Induction(symbols=11, period=6, noise=0.0),
}
LENGTHS = (24, 25, 61)


def recalled(before: Sequence[str]) -> str:
    """What followed the last symbol where it first stood."""
    return before[before.index(before[-1]) + 1]


def copied(before: Sequence[str]) -> str:
    """The symbol as far after the start as the present one is after the border."""
    return before[len(before) - 1 - before.index("|")]


def turned(before: Sequence[str]) -> str:
    """The symbol as far before the border as the present one is after it."""
    return before[2 * before.index("|") - len(before)]


def induced(before: Sequence[str]) -> str:
    """What followed the last symbol where it last stood before."""
    return before[len(before) - 1 - before[-2::-1].index(before[-1])]


ANSWER = {"recall": recalled, "copy": copied, "reverse": turned, "induction": induced}


def drawn(probe: Probe, length: int, sequences: int = 200, step: int = 3) -> tuple[np.ndarray, np.ndarray]:
    return ProbeDataset(probe, length, 1).train_windows(length, seed=1).examples(step, sequences)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", PROBES)
def test_every_answer_follows_from_what_stands_before_it(name: str, length: int) -> None:
    probe = PROBES[name]
    inputs, targets = drawn(probe, length)
    assert inputs.shape == targets.shape == (200, length)
    assert (inputs[:, 0] == len(probe.names)).all(), "a sequence begins with the end-of-text token"
    for row, answers in zip(inputs.tolist(), targets.tolist(), strict=True):
        symbols = [probe.names[i] for i in row[1:]]
        for position, target in enumerate(answers):
            if target != IGNORE:
                assert probe.names[target] == ANSWER[name](symbols[:position])
                assert position + 1 == length or row[position + 1] == target, "the next input is the answer"
    assert ((targets != IGNORE).sum(1) == probe.answered(length)).all(), "every sequence has equally many answers"


@pytest.mark.parametrize("name", PROBES)
def test_all_answers_are_equally_frequent(name: str) -> None:
    probe = PROBES[name]
    targets = drawn(probe, 40, 4000)[1]
    counts = np.bincount(targets[targets != IGNORE], minlength=probe.answers.stop)[probe.answers.start :]
    assert len(counts) == len(probe.answers)
    # Answers of one sequence may be equal, so that their counts vary more than those of independent draws.
    assert counts / counts.sum() == pytest.approx(np.full(len(counts), 1 / len(counts)), rel=0.06)
    assert ProbeDataset(probe, 40, 1).unigram_entropy() == pytest.approx(math.log(len(counts)))


def test_recall_repeats_no_key_among_its_pairs_and_asks_at_any_distance() -> None:
    probe = PROBES["recall"]
    inputs, targets = drawn(probe, 40, 2000)
    keys = inputs[:, 1:7:2]
    assert all(len(set(row)) == 3 for row in keys.tolist())
    assert set(np.flatnonzero((targets != IGNORE).any(0))) == set(range(7, 40, 2)), "every place holds some query"


def test_induction_has_no_fixed_distance() -> None:
    probe = PROBES["induction"]
    inputs, _ = drawn(probe, 30)
    symbols = inputs[:, 1:]
    periods = [next(p for p in range(1, 20) if (row[p:] == row[:-p]).all()) for row in symbols]
    assert set(periods) == {3, 4, 5, 6}


@pytest.mark.parametrize("noise", [0.0, 0.3, 0.9])
@pytest.mark.parametrize(
    "name", ["recall", "copy", "reverse"]
)  # what stands before determines an answer in spite of it
def test_the_floor_is_what_an_oracle_pays(name: str, noise: float) -> None:
    noisy = replace(PROBES[name], noise=noise)
    count = len(noisy.answers)
    inputs, targets = drawn(noisy, 32, 2000)
    paid, right = [], []
    for row, answers in zip(inputs.tolist(), targets.tolist(), strict=True):
        symbols = [noisy.names[i] for i in row[1:]]
        for position, target in enumerate(answers):
            if target != IGNORE:
                likely = noisy.names[target] == ANSWER[name](symbols[:position])
                paid.append(-math.log(noise / count + (1 - noise) * likely) if noise or likely else math.inf)
                right.append(likely)
    assert np.mean(paid) == pytest.approx(noisy.entropy_floor, abs=0.02)
    assert np.mean(right) == pytest.approx(noisy.best_accuracy, abs=0.015)
    exact = sum(-p * math.log(p) for i in range(count) if (p := noise / count + (1 - noise) * (i == 0)))
    assert noisy.entropy_floor == pytest.approx(exact, abs=1e-12)


def test_sequences_of_a_tiny_probe_are_equally_likely() -> None:
    """By enumeration: 2 keys in either order, 2 values for each, one query for one of them."""
    probe = Recall(keys=2, values=2, pairs=2, queries=1, noise=0.0)
    inputs, targets = drawn(probe, 6, 16_000)
    expected = set()
    for (a, b), (x, y), asked in product([(0, 1), (1, 0)], product([2, 3], repeat=2), [0, 1]):
        expected.add((5, a, x, b, y, (a, b)[asked], (x, y)[asked]))
    rows = [(*row, answers[-1]) for row, answers in zip(inputs.tolist(), targets.tolist(), strict=True)]
    counts = {row: rows.count(row) for row in set(rows)}
    assert counts.keys() == expected
    assert all(850 < count < 1150 for count in counts.values())  # 1000 each, with a standard deviation of 31


@pytest.mark.parametrize("name", PROBES)
def test_a_step_depends_on_seed_and_step_alone(name: str) -> None:
    windows = ProbeDataset(PROBES[name], 40, 8).train_windows
    whole = windows(40, seed=1).examples(5, 12)
    part = windows(40, seed=1).examples(5, 12, range(4, 8))
    assert (part.inputs == whole.inputs[4:8]).all()
    assert (part.targets == whole.targets[4:8]).all()
    assert (windows(40, seed=2).examples(5, 12).inputs != whole.inputs).any()
    assert (windows(40, seed=1).examples(6, 12).inputs != whole.inputs).any()


@pytest.mark.parametrize("name", PROBES)
def test_validation_is_fixed_and_no_part_of_training(name: str) -> None:
    dataset = ProbeDataset(PROBES[name], 40, 8)
    windows, again = ([tuple(inputs.tolist()) for inputs, _ in dataset.val_windows(40)] for _ in range(2))
    assert len(windows) == 8
    assert windows == again
    seen = {tuple(row) for seed in range(20) for row in dataset.train_windows(40, seed).examples(0, 8).inputs.tolist()}
    assert seen.isdisjoint(windows)
    assert dataset.index.val.tokens == 8 * PROBES[name].answered(40)


@pytest.mark.parametrize("name", PROBES)
def test_symbols_survive_their_tokenizer(name: str) -> None:
    dataset = ProbeDataset(PROBES[name], 40, 8)
    ids = list(range(dataset.tokenizer.eot_id))
    text = dataset.tokenizer.decode(ids)
    assert text.split() == PROBES[name].names
    assert dataset.tokenizer.encode(text) == ids
    with pytest.raises(ConfigError, match="tokenizer=symbols: no id for 'hello'"):
        dataset.tokenizer.encode("hello")


@pytest.mark.parametrize("name", PROBES)
def test_every_key_of_a_probe_changes_its_data_and_halves_of_validation_are_other_sequences(name: str) -> None:
    cfg = compose_config(f"data={name}", "size=pico")
    whole = open_dataset(cfg)
    leaves = flatten(dict(cfg.data))
    keys = [key for key in leaves if not key.startswith("probe") and key != "seed"]
    assert len(keys) >= 3
    for key in keys:
        value = {"noise": 0.5, "val_half": "tuning"}.get(key) or leaves[key] - 1
        assert open_dataset(compose_config(f"data={name}", "size=pico", f"data.{key}={value}")).index != whole.index
    found = [whole, whole.validated_on("tuning"), whole.validated_on("judging")]
    assert len({one.val_windows(64)[0][0].tobytes() for one in found}) == 3
    assert len({one.index.data_hash for one in found}) == 3


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        ("data=recall data.pairs=40", "data.pairs=40"),
        ("data=recall data.pairs=12", "data.pairs=12"),
        ("data=recall data.keys=0", "data.keys=0"),
        ("data=copy data.noise=1.0", "data.noise=1.0"),
        ("data=copy model.max_seq_len=2", "model.max_seq_len=2"),
        ("data=induction data.period=64", "data.period=64"),
        ("data=copy data.val_sequences=0", "data.val_sequences=0"),
        ("data=copy tokenizer=byte", "tokenizer"),
        ("tokenizer=symbols", "tokenizer=symbols"),
        ("data=copy train.prompt=hello", "train.prompt=hello"),
    ],
)
def test_what_cannot_work_is_refused(overrides: str, key: str) -> None:
    with pytest.raises(ConfigError, match=f"^{key}: [^\\n]*$"):
        open_dataset(planned("size=pico", *overrides.split()).cfg)
