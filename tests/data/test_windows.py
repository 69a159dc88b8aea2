"""Windows: training ones are a pure function of (seed, step), validation ones predict each token once."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from llama_lab.data.windows import TrainWindows, ValWindows, count_train_windows
from llama_lab.model.loss import IGNORE
from tests.data.texts import batch_of

seq_lens = st.integers(1, 20)


@st.composite
def streams(draw: st.DrawFn) -> tuple[np.ndarray, int]:
    """A stream whose token i is i, long enough for one window, and the window's length."""
    seq_len = draw(seq_lens)
    return np.arange(draw(st.integers(seq_len + 1, 40 * seq_len)), dtype=np.uint16), seq_len


def epoch(windows: TrainWindows, i: int) -> np.ndarray:
    return np.concatenate([batch_of(windows, g, 1) for g in range(i * len(windows), (i + 1) * len(windows))])


@given(streams(), st.integers(0, 5), st.integers(0, 3))
def test_each_epoch_visits_each_of_its_windows_once(stream: tuple[np.ndarray, int], seed: int, i: int) -> None:
    tokens, seq_len = stream
    visited = epoch(TrainWindows(tokens, seq_len, seed), i)
    starts = np.sort(visited[:, 0])
    assert (np.diff(visited, axis=1) == 1).all()  # contiguous text
    assert visited.shape[1] == seq_len + 1
    assert (np.diff(starts) == seq_len).all()  # neither overlap nor gap
    assert starts[0] < seq_len  # and no more left out than a random start asks for
    assert len(tokens) - 1 - (starts[-1] + seq_len) < 2 * seq_len


@given(streams())
def test_the_number_of_windows_needs_no_stream(stream: tuple[np.ndarray, int]) -> None:
    tokens, seq_len = stream
    assert count_train_windows(len(tokens) - 1, seq_len) == len(TrainWindows(tokens, seq_len, 0)) >= 1
    assert count_train_windows(seq_len - 1, seq_len) == 0


@given(streams(), st.integers(1, 7), st.lists(st.integers(0, 60), max_size=8))
def test_a_batch_does_not_depend_on_others(stream: tuple[np.ndarray, int], batch_size: int, steps: list[int]) -> None:
    used, alone = TrainWindows(*stream, seed=3), TrainWindows(*stream, seed=3)
    for step in steps:
        one_by_one = [batch_of(alone, i, 1) for i in range(step * batch_size, (step + 1) * batch_size)]
        assert np.array_equal(batch_of(used, step, batch_size), np.concatenate(one_by_one))


def test_seeds_and_epochs_differ_in_order_and_start() -> None:
    tokens = np.arange(2000, dtype=np.uint16)
    windows = TrainWindows(tokens, 10, seed=0)
    first, second = epoch(windows, 0)[:, 0], epoch(windows, 1)[:, 0]
    other = epoch(TrainWindows(tokens, 10, seed=1), 0)[:, 0]
    assert not np.array_equal(first // 10, second // 10)
    assert not np.array_equal(first // 10, other // 10)
    starts = {int(epoch(windows, i)[:, 0].min()) for i in range(60)}
    assert starts == set(range(10))


@given(st.integers(2, 200), seq_lens)
@settings(max_examples=200)
def test_validation_predicts_every_token_but_the_first_exactly_once(length: int, seq_len: int) -> None:
    tokens = np.arange(length, dtype=np.uint16)
    windows = list(ValWindows(tokens, seq_len))
    assert len(windows) == len(ValWindows(tokens, seq_len))
    inputs, targets = (np.stack(arrays) for arrays in zip(*windows, strict=True))
    predicted = targets != IGNORE
    assert np.array_equal(targets[predicted], tokens[1:])
    assert np.array_equal(inputs[predicted], tokens[:-1])
    assert inputs.dtype == targets.dtype == np.int64
    assert inputs.shape[1] == seq_len
