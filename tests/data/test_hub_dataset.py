"""Datasets that `datasets` loads: files of each of its formats here, and what stands in for the Hub on this machine."""

import gzip
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path
from threading import Thread
from time import sleep
from types import SimpleNamespace
from typing import Any

import pytest
from datasets import Dataset, DatasetDict

from llama_lab.data.build import HoldOut
from llama_lab.data.hub_dataset import HubDataset, join_rows
from llama_lab.data.open import _source, open_dataset
from llama_lab.data.tokenizer import BPETokenizer, ByteTokenizer, CharTokenizer
from llama_lab.data.tokens import TokenDataset
from llama_lab.util.errors import ConfigError
from tests.composing import compose_config
from tests.data.hub_stand_in import serve
from tests.data.texts import sentences

TEXTS = [*sentences(60), "", "e\u0301 ﷽ 漢字 🙂 \u202e\x00 \ufeff", None, "two\nlines\r\n"]
EXPECTED = [text or "" for text in TEXTS]


def rows(texts: list[str | None] = TEXTS, column: str = "text") -> Dataset:
    return Dataset.from_dict({"id": [*range(len(texts))], column: texts})


def read(**settings: Any) -> None:
    source = HubDataset(**settings)
    source.fingerprint()
    source.prepare(lambda *_: None)
    list(source.documents())
    list(source.validation or ())


def opened(cache: Path, **settings: Any) -> TokenDataset:
    source = HubDataset(**settings, cache_dir=str(cache))
    hold_out = HoldOut(None if "val_split" in settings else 0.2)
    return TokenDataset.open_or_build(source, ByteTokenizer(), hold_out, cache)


def documents(tokens: Any) -> list[str]:
    return bytes(token if token < 256 else 0 for token in tokens.tolist()).decode().strip("\0").split("\0")


@pytest.mark.parametrize("format", ["parquet", "json", "arrow"])
def test_each_format_gives_every_text_of_any_unicode_in_order_again_and_again(format: str, tmp_path: Path) -> None:
    {"parquet": rows().to_parquet, "json": rows().to_json, "arrow": rows().save_to_disk}[format](
        tmp_path / f"a.{format}"
    )
    found = next(file for file in tmp_path.rglob(f"*.{format}") if file.is_file())
    source = HubDataset(format, data_files=str(found))
    assert list(source.documents()) == list(source.documents()) == EXPECTED
    assert source.total_bytes() == found.stat().st_size


@pytest.mark.parametrize("saved", [True, False])
def test_a_folder_gives_its_splits(saved: bool, tmp_path: Path) -> None:
    splits = DatasetDict({"train": rows(), "test": rows(["held out"])})
    if saved:
        splits.save_to_disk(tmp_path)
    else:
        for split, data in splits.items():
            data.to_parquet(tmp_path / f"{split}-00000-of-00001.parquet")
    source = HubDataset(str(tmp_path), val_split="test")
    assert list(source.documents()) == EXPECTED
    assert list(source.validation or ()) == ["held out"]


def test_a_saved_dataset_without_splits_is_read(tmp_path: Path) -> None:
    rows().save_to_disk(tmp_path)
    assert list(HubDataset(str(tmp_path)).documents()) == EXPECTED


def test_plain_text_is_cut_as_by_text_files_and_its_bytes_are_kept(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("\ufeffone two three\r\nfour".encode())
    source = HubDataset("text", data_files=str(tmp_path / "*.txt"), document_chars=8)
    assert list(source.documents()) == ["one two ", "three\r\n", "four"]


def test_the_fingerprint_follows_the_files_and_every_setting(tmp_path: Path) -> None:
    rows().to_parquet(tmp_path / "a.parquet")
    settings: dict[str, Any] = {"path": "parquet", "data_files": str(tmp_path / "*.parquet")}
    found = {HubDataset(**settings).fingerprint()}
    assert found == {HubDataset(**settings).fingerprint()}
    changed = {"max_bytes": 9, "text_field": "id", "document_start": "a", "val_split": "x", "split": "y"}
    found |= {HubDataset(**{**settings, key: value}).fingerprint() for key, value in changed.items()}
    rows(TEXTS[:3]).to_parquet(tmp_path / "a.parquet")
    found.add(HubDataset(**settings).fingerprint())
    assert len(found) == 2 + len(changed)


def test_max_bytes_takes_the_first_documents_to_train_on_and_all_to_validate_on(tmp_path: Path) -> None:
    data = DatasetDict({"train": rows(["aaaa", "bbbb", "cccc"]), "validation": rows(["dddd", "eeee", "ffff"])})
    data.save_to_disk(tmp_path)
    source = HubDataset(str(tmp_path), val_split="validation", max_bytes=5)
    assert list(source.documents()) == ["aaaa", "bbbb"]
    assert list(source.validation or ()) == ["dddd", "eeee", "ffff"]


def test_the_official_validation_split_stays_whole_and_its_copies_are_not_trained_on(tmp_path: Path) -> None:
    data = DatasetDict({"train": rows(["a", "b", "c", "b", ""]), "validation": rows(["b", "x", "x", "", "y"])})
    data.save_to_disk(tmp_path / "data")
    built = opened(tmp_path / "cache", path=str(tmp_path / "data"), val_split="validation")
    assert documents(built.train[:]) == ["a", "c"]
    assert documents(built.val) == ["b", "x", "y"]
    assert (built.index.duplicates, built.index.empty) == (3, 2)
    assert "documents left out: 3 copies and 2 empty" in built.builds[0]


def test_rows_are_joined_to_articles_as_of_wikitext() -> None:
    lines = ["", " = One = \n", "", " Text . \n", " = = Part = = \n", " More = text = \n", " = Two = \n", " End . \n"]
    start = compose_config("data=wikitext103").data.document_start
    assert [*join_rows(lines, re.compile(start))] == ["", "".join(lines[1:6]), "".join(lines[6:])]


LAYOUTS: dict[str, dict[str, dict[str, list[str]]]] = {  # the published columns and splits, without what is not read
    "tinystories": {"train": {"text": sentences(40)}, "validation": {"text": sentences(5)}},
    "wikitext103": {
        split: {"text": [line for i, text in enumerate(sentences(n)) for line in ("", f" = {i} = \n", f" {text} \n")]}
        for split, n in {"train": 40, "validation": 5, "test": 5}.items()
    },
    "fineweb_edu": {"train": {"text": sentences(40), "id": ["x"] * 40, "url": ["y"] * 40}},
    "openwebtext": {"train": {"text": sentences(40)}},
    "c4": {s: {"text": sentences(n), "url": ["u"] * n} for s, n in {"train": 40, "validation": 8}.items()},
}


@pytest.mark.parametrize("corpus", LAYOUTS)
def test_each_published_corpus_is_read_from_local_files_of_its_layout(corpus: str, tmp_path: Path) -> None:
    for split, columns in LAYOUTS[corpus].items():
        Dataset.from_dict(columns).to_parquet(tmp_path / f"{split}.parquet")
    local = [f"data.path={tmp_path}", "data.name=null", "data.revision=null", "data.data_files=null"]
    cfg = compose_config(f"data={corpus}", *local, f"data.cache_dir={tmp_path / 'cache'}", "tokenizer=byte")
    built = open_dataset(cfg)
    read = len(documents(built.train[:])) + len(documents(built.val))
    assert read == len({text for s in LAYOUTS[corpus].values() for text in s["text"]}) or corpus == "wikitext103"
    assert built.index.train.documents > built.index.val.documents > 0
    assert (built.index.val_fraction is None) == ("validation" in LAYOUTS[corpus])


# Mistakes


JSON = {"path": "json", "data_files": "{here}/good.json"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (JSON | {"text_field": "other"}, "data.text_field=other: row 1 of data.path=json has no such field"),
        (JSON | {"text_field": "id"}, "data.text_field=id: row 1 of data.path=json holds int there"),
        ({"path": "./nowhere/at/all"}, "data.path=./nowhere/at/all: no such folder, and no name on the Hub"),
        ({"path": "parquet"}, "data.path=parquet: is a format; name its files"),
        ({"path": "parquet", "data_files": "{here}/none.parquet"}, "none.parquet: not found, or out of reach"),
        ({"path": "parquet", "data_files": "{here}/good.json"}, "good.json: cannot be read, "),
        ({"path": "text", "data_files": "{here}/binary.txt"}, "a binary file (it has NUL bytes)"),
        ({"path": "text", "data_files": "{here}/cut.txt.gz"}, "cut.txt.gz: cannot be read, EOFError"),
        (JSON | {"split": "dev"}, "data.split=dev: data.path=json has the"),
        (JSON | {"revision": "main"}, "data.revision=main: data.path=json"),
        (JSON | {"name": "en"}, "data.name=en: data.path=json has none"),
        ({"path": "a/b", "max_bytes": 0}, "data.max_bytes=0: "),
        ({"path": "a/b", "document_start": "("}, "data.document_start=(: "),
        ({"path": "a/b", "val_split": "train"}, "data.val_split=train: "),
        (
            {"path": "text", "data_files": "{here}/good.json", "document_start": "a"},
            "data.document_start=a: joins rows",
        ),
        ({"path": "a/b"}, "data.path=a/b: the Hugging Face Hub cannot be reached"),
    ],
)
def test_a_mistake_is_told_in_one_line(
    settings: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (tmp_path / "good.json").write_text('{"id": 1, "text": "a"}\n')
    (tmp_path / "binary.txt").write_bytes(b"a\0b")
    (tmp_path / "cut.txt.gz").write_bytes(gzip.compress(b"text")[:-9])
    filled = {k: v.format(here=tmp_path) if isinstance(v, str) else v for k, v in settings.items()}
    with pytest.raises(ConfigError, match=rf"^[^\n]*{re.escape(message)}[^\n]*$"):
        read(cache_dir=str(tmp_path), **filled)


LONG_LINE = """
import resource, sys
from llama_lab.data.hub_dataset import HubDataset

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

source = HubDataset("text", data_files=sys.argv[1])
source.fingerprint()
before = peak()
assert sum(map(len, source.documents())) == 80_000_000
print(peak() - before)
"""


@pytest.mark.process
def test_a_line_of_plain_text_is_never_in_memory_whole(tmp_path: Path) -> None:
    with (tmp_path / "line.txt").open("w") as file:
        for _ in range(80):
            file.write("word " * 200_000)
    ran = subprocess.run(
        [sys.executable, "-c", LONG_LINE, str(tmp_path / "line.txt")], check=True, capture_output=True, text=True
    )
    assert int(ran.stdout) < 40_000, "kilobytes, of a line of 80 MB"


# From elsewhere


ON_THE_HUB = """
import json, sys
from pathlib import Path
from llama_lab.data.build import HoldOut
from llama_lab.data.tokens import TokenDataset
from llama_lab.data.tokenizer import BPETokenizer, ByteTokenizer
from llama_lab.data.hub_dataset import HubDataset
from llama_lab.data.hf_tokenizer import HFTokenizer
from llama_lab.util.errors import ConfigError

def opened(**settings):
    source = HubDataset("org/stories", val_split="validation", cache_dir=sys.argv[1], **settings)
    data = TokenDataset.open_or_build(source, tokenizer, HoldOut(None), sys.argv[1])
    return [data.index.train.documents, data.index.val.documents, data.index.revisions]

def refused(what):
    try:
        what()
    except ConfigError as error:
        return str(error)

commit = Path(sys.argv[2]) / "org" / "stories" / "commit"
tokenizer = ByteTokenizer()
found = {"first": opened()}
commit.write_text("b" * 40)
tokenizer = BPETokenizer(260)
found["later"] = opened()
found["newer"] = opened(revision="b" * 40)
found["gated"] = refused(HubDataset("gated/stories", cache_dir=sys.argv[1]).fingerprint)
found["missing"] = refused(HubDataset("org/nothing", cache_dir=sys.argv[1]).fingerprint)
found["tokenizer"] = HFTokenizer("org/tokenizer").hash
print(json.dumps(found))
"""


@pytest.mark.process
def test_a_name_on_the_hub_stays_at_the_commit_of_its_first_use_and_its_text_is_downloaded_once(tmp_path: Path) -> None:
    root = tmp_path / "hub"
    for name in ("org/stories/data", "gated/stories", "org/tokenizer"):
        (root / name).mkdir(parents=True)
        (root / name.removesuffix("/data") / "commit").write_text("a" * 40)
    for split, texts in {"train": ["one", "two", "three"], "validation": ["two", "x"]}.items():
        rows([*texts]).to_parquet(root / "org" / "stories" / "data" / f"{split}-00000-of-00001.parquet")
    own = BPETokenizer(300).train(iter(sentences(20)))
    own.save(root / "org" / "tokenizer" / "tokenizer.json")
    log: list[str] = []
    hub = serve(root, log)
    Thread(target=hub.serve_forever, daemon=True).start()
    variables = {"HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}", "HF_HOME": str(tmp_path / "home")}
    ran = subprocess.run(
        [sys.executable, "-c", ON_THE_HUB, str(tmp_path / "cache"), str(root)],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
    )
    hub.shutdown()
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert found["first"] == found["later"] == [2, 2, {"org/stories": "a" * 40}]
    assert found["newer"] == [2, 2, {"org/stories": "b" * 40}]
    for commit in "ab":  # the train split, with its headers
        assert 1 <= sum(f"resolve/{commit * 40}/data/train" in path for path in log) <= 2
    assert found["gated"].startswith("data.path=gated/stories: its owner must let you in;")
    assert "data.path=org/nothing: the Hugging Face Hub has none of this name" in found["missing"]
    assert found["tokenizer"] == own.hash


def test_a_run_goes_on_with_the_commit_that_it_has_recorded(tmp_path: Path) -> None:
    cfg = compose_config("data=hub", "data.path=org/stories", f"data.cache_dir={tmp_path}")
    source = _source(cfg.data, "data", {"org/stories": "c" * 40}, cfg)
    assert isinstance(source, HubDataset)
    assert source.revisions == {"org/stories": "c" * 40}


@pytest.fixture
def commit_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """The commit of a name, on a Hub that has another one whenever it is asked."""
    commits = map("{:040x}".format, count())

    def info(*_: object, revision: str | None) -> SimpleNamespace:
        sleep(0.1)
        return SimpleNamespace(sha=next(commits))

    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", info)
    look_up = HubDataset.__dict__["commit"].func  # the cached property of Python 3.11 makes threads wait
    return lambda *_: look_up(HubDataset("org/stories", cache_dir=str(tmp_path)))


def test_runs_that_start_together_have_one_commit(commit_of: Callable[..., str]) -> None:
    with ThreadPoolExecutor() as threads:
        assert len({*threads.map(commit_of, range(4))}) == 1


def test_a_damaged_commit_is_named(commit_of: Callable[..., str], tmp_path: Path) -> None:
    commit = commit_of()
    (file,) = tmp_path.glob("texts/revision-*.json")
    whole = file.read_text()
    for damaged in (whole[:-20], whole.replace("00", "01", 1), ""):
        file.write_text(damaged)
        with pytest.raises(
            ConfigError, match=rf"^data\.path=org/stories: {re.escape(str(file))} is damaged, .*; restore"
        ):
            commit_of()
    file.write_text(whole.partition("\n")[2])  # as version 0.4.0 wrote it
    assert commit_of() == commit


def test_text_from_elsewhere_is_downloaded_once_and_kept_for_every_tokenizer(tmp_path: Path) -> None:
    served, cache, text = tmp_path / "served", tmp_path / "cache", "\n\n".join(sentences(300))
    served.mkdir()
    (served / "input.txt").write_text(text)
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=str(served))) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        with pytest.raises(ConfigError, match=r"none\.txt: not found, or out of reach .* point at files on"):
            opened(cache, path="text", data_files=f"{address}/none.txt")
        assert not [file for file in cache.rglob("*") if file.suffix != ".lock" and file.is_file()]
        settings = {"path": "text", "data_files": f"{address}/input.txt", "document_chars": 500}
        first = opened(cache, **settings)
        server.shutdown()
    source = HubDataset(**settings, cache_dir=str(cache))
    assert "".join(source.documents()) == text
    again = TokenDataset.open_or_build(source, CharTokenizer(), HoldOut(0.2), cache)
    assert again.index.train.documents == first.index.train.documents
