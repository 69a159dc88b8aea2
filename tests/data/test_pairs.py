"""Pairs: rows written out by hand, counts against the text, the same targets in all families, refusals."""

import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models

from llama_lab.data.open import open_dataset
from llama_lab.data.pairs import PairDataset
from llama_lab.data.windows import ValWindows
from llama_lab.model import Decoder
from llama_lab.model.loss import IGNORE
from llama_lab.util.errors import ConfigError
from tests.composing import compose_config, lively

EOT = 256  # of bytes
SOURCES = [f"{'na' * (n % 5)} {n}" for n in range(60)]
TARGETS = [f"{n}é" for n in range(60)]


def write(folder: Path, sources: list[str], targets: list[str], name: str = "") -> str:
    """Two files; returns their names as a list for the command line."""
    paths = [folder / f"{name}{side}.txt" for side in ("from", "to")]
    for path, lines in zip(paths, (sources, targets), strict=True):
        path.write_bytes("".join(f"{line}\n" for line in lines).encode())
    return f"[{paths[0]},{paths[1]}]"


def opened(folder: Path, *overrides: str, files: str | None = None) -> PairDataset:
    files = files or write(folder, SOURCES, TARGETS)
    cfg = compose_config(
        "data=pairs", f"data.files={files}", "tokenizer=byte", f"data.cache_dir={folder / 'cache'}", *overrides
    )
    data = open_dataset(cfg)
    assert isinstance(data, PairDataset)
    return data


def read(row: tuple[np.ndarray, np.ndarray]) -> tuple[bytes, bytes]:
    """The source and the target in a row."""
    inputs, targets = (side.tolist() for side in row)
    assert inputs[0] == EOT
    middle = inputs.index(EOT, 1)
    predicted = [i for i, target in enumerate(targets) if target != IGNORE]
    assert predicted == [*range(middle, predicted[-1] + 1)], "all from the separator on"
    assert targets[predicted[-1]] == EOT
    assert inputs[middle + 1 : predicted[-1] + 1] == targets[middle : predicted[-1]]
    assert not any(inputs[predicted[-1] + 1 :])
    return bytes(inputs[1:middle]), bytes(targets[middle : predicted[-1]])


def test_a_row_is_a_source_and_its_target_which_alone_is_predicted(tmp_path: Path) -> None:
    files = write(tmp_path, ["ab", "c\u2028d\r", ""], ["xyz", "e", "f"])
    data = opened(tmp_path, f"data.val_split={write(tmp_path, ['g'], ['h'], 'val')}", files=files)
    rows = data.train_windows(9, 1)
    assert [part.tolist() for part in rows[0]] == [
        [EOT, 97, 98, EOT, 120, 121, 122, 0, 0],
        [IGNORE, IGNORE, IGNORE, 120, 121, 122, EOT, IGNORE, IGNORE],
    ]
    assert [read(rows[i]) for i in range(3)] == [(b"ab", b"xyz"), ("c\u2028d".encode(), b"e"), (b"", b"f")]
    assert [read(row) for row in data.val_windows(9)] == [(b"g", b"h")]  # type: ignore[attr-defined]


@pytest.mark.parametrize("half", [None, "tuning"])
def test_held_out_pairs_are_counted_by_their_targets(half: str | None, tmp_path: Path) -> None:
    data = opened(tmp_path, "data.val_fraction=0.3").validated_on(half)
    val, train = data.val_windows(20), data.train_windows(20, 1)
    pairs = [read(rows[i]) for rows in (val, train) for i in range(len(rows))]
    expected = {(source.encode(), target.encode()) for source, target in zip(SOURCES, TARGETS, strict=True)}
    assert set(pairs) == expected if half is None else set(pairs) < expected
    assert len(set(pairs)) == len(pairs)
    held_out = [target for _, target in pairs[: len(val)]]
    assert len(held_out) == data.index.val.documents > 4
    assert data.index.val.bytes == sum(map(len, held_out))
    assert data.index.val.tokens == data.index.val.bytes + len(held_out)
    counts = Counter([*b"".join(held_out), *[EOT] * len(held_out)])
    total = counts.total()
    assert data.unigram_entropy() == pytest.approx(-sum(n / total * math.log(n / total) for n in counts.values()))


def test_bytes_of_pairs_are_those_of_the_text_whatever_the_tokenizer_keeps(tmp_path: Path) -> None:
    unknown = Tokenizer(models.WordLevel({"<unk>": 0, "<|endoftext|>": 1}, unk_token="<unk>"))
    unknown.add_special_tokens(["<|endoftext|>"])
    unknown.save(str(tmp_path / "lossy.json"))
    lossy = opened(tmp_path, "tokenizer=hf", f"tokenizer.path={tmp_path / 'lossy.json'}")
    assert lossy.index.val.bytes == opened(tmp_path).index.val.bytes


def test_every_pair_comes_once_in_an_epoch_in_an_order_of_its_own(tmp_path: Path) -> None:
    data = opened(tmp_path)
    count = data.index.train.documents
    rows = data.train_windows(20, seed=3)
    epochs = [[read(pair) for pair in zip(*rows.examples(epoch, count), strict=True)] for epoch in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1])
    assert len({*epochs[0]}) == count
    assert epochs[0] != epochs[1]
    again = data.train_windows(20, seed=3).examples(1, count, range(5, 9))
    assert [read(pair) for pair in zip(*again, strict=True)] == epochs[1][5:9]
    other = data.train_windows(20, seed=4).examples(1, count)
    assert [read(pair) for pair in zip(*other, strict=True)] != epochs[1]


def test_the_hash_is_of_pairs_and_of_their_order(tmp_path: Path) -> None:
    data = opened(tmp_path)
    assert data.index.data_hash != data._whole.data_hash, "that of a text with the same documents"
    assert data.index.data_hash != opened(tmp_path, files=write(tmp_path, TARGETS, SOURCES)).index.data_hash


MODELS = {"decoder": (), "prefix": ("objective=prefix",), "encoder_decoder": ("family=encoder_decoder",)}


@pytest.mark.parametrize("family", MODELS)
@torch.no_grad()
def test_all_families_predict_the_same_targets_and_padding_changes_nothing(family: str, tmp_path: Path) -> None:
    """Against each pair alone, as its model reads it: a text, a prefix and the rest, a source and a text."""
    model: Decoder = lively("attention=mha", *MODELS[family])
    ids = np.random.default_rng(0).integers(1, 90, 40).tolist()
    lengths = [(3, 4), (6, 1), (2, 9), (5, 5)]
    rows, alone = [], []
    for source, target in lengths:
        pair = [0, *ids[:source], 0, *ids[source : source + target], 0]
        inputs, targets = torch.zeros(14, dtype=torch.long), torch.full((14,), IGNORE)
        inputs[: len(pair) - 1] = torch.tensor(pair[:-1])
        targets[source + 1 : len(pair) - 1] = torch.tensor(pair[source + 2 :])
        rows.append((inputs, targets))
        tokens, start, given = torch.tensor([pair]), source + 1, ()
        if family == "prefix":
            given = (torch.tensor([start + 1]),)
        elif family == "encoder_decoder":
            given, tokens, start = (tokens[:, : start + 1],), tokens[:, start:], 0
        logits = model(tokens[:, :-1], None, *given)[0, start:].log_softmax(-1)
        alone.append(-logits.gather(-1, tokens[0, start + 1 :, None]).sum())
    inputs, targets = map(torch.stack, zip(*rows, strict=True))
    arguments = model.cut(inputs, targets)
    losses = model.loss(*arguments)[-1].sum(1)
    torch.testing.assert_close(losses, torch.stack(alone), rtol=1e-4, atol=1e-4)
    kept = [row[row != IGNORE].tolist() for row in arguments[1]]
    assert kept == [row[row != IGNORE].tolist() for row in targets]


def test_an_encoder_decoder_halves_windows_without_a_target() -> None:
    row = torch.tensor([IGNORE, IGNORE, 5, 6])
    both = torch.stack([row, torch.full((4,), IGNORE)])
    inputs, targets, source, lengths = lively("family=encoder_decoder").cut(torch.arange(8).view(2, 4), both)
    assert (lengths.tolist(), source.tolist()) == ([3, 2], [[0, 1, 2], [4, 5, 6]])
    assert targets.tolist() == [[5, 6, IGNORE], [IGNORE] * 3]
    assert inputs[:, :2].tolist() == [[2, 3], [5, 6]]


@pytest.mark.parametrize("family", ["family=encoder_decoder", "objective=prefix", "family=decoder"])
def test_a_window_that_begins_with_another_part_of_a_mixture_has_no_source_for_it(family: str) -> None:
    """Its targets are those of the whole window that belong to the part."""
    model, tokens = lively(family), np.arange(30, dtype=np.uint16)
    of_part, whole = (
        model.cut(*(torch.from_numpy(side)[None] for side in ValWindows(tokens, 8, predicted)[0]))
        for predicted in (range(6, 29), None)
    )
    assert all(ours.equal(theirs) for ours, theirs in zip(of_part[2:], whole[2:], strict=True))
    assert of_part[0].equal(whole[0])
    assert of_part[1].equal(whole[1].masked_fill(whole[1] < 7, IGNORE))


REFUSED = {  # the key at fault
    "data.files=[{a}]": "data.files=",
    "data.files=[{a},{short}]": "data.files: {short}",
    "data.files=[{short},{a}]": "data.files: {short}",
    "data.files=[{a},{empty}]": "data.files: {empty}",
    "data.files=[{a},gone.txt]": "data.files: {here}/gone.txt",
    "data.files=[{a},{binary}]": "data.files=[{a},{binary}]: not UTF-8 text",
    "data.val_split=[{a},{short}]": "data.val_split: {short}",
    "data.val_split=[{a},{a}] data.val_fraction=0.1": "data.val_fraction=0.1",
    "data.val_split=[{a},{a}]": "data.split, or data.files",
    "model.max_seq_len=4": "model.max_seq_len=4",
    "train.batch_size=3": "train.batch_size=3",
    "train.prompt=a": "train.prompt=a",
    "tokenizer=symbols": "tokenizer=symbols",
}


@pytest.mark.parametrize("overrides", REFUSED)
def test_what_are_no_pairs_is_one_line(overrides: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    files = {"a": b"a\nbcd\ne\n", "short": b"f\ng\n", "empty": b"", "binary": b"\xff\xfe\n" * 3}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    names = {name: str(tmp_path / name) for name in files} | {"here": str(tmp_path)}
    whole = "data=pairs data.files=[{a},{a}] tokenizer=byte data.cache_dir={here}/c"
    if "val_split" not in overrides:
        whole += " data.val_fraction=0.4"
    cfg = compose_config(*f"{whole} {overrides}".format(**names).split())

    def prepare() -> None:
        open_dataset(cfg).require_windows(cfg.model.max_seq_len, cfg.train.batch_size)

    with pytest.raises(ConfigError, match=r"^[^\n]*$") as refused:
        prepare()
    assert str(refused.value).startswith(REFUSED[overrides].format(**names))
