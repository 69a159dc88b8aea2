"""The data and tokenizer groups build what they name."""

from pathlib import Path
from typing import Any

import pytest
from hydra.utils import instantiate

from llama_lab.config.schema import check_kinds, flat_defaults
from llama_lab.data.hub import make_absolute
from llama_lab.data.source import StandardLibrary
from llama_lab.data.tokenizer import BPETokenizer, ByteTokenizer, CharTokenizer
from tests.composing import compose_config


def test_data_is_the_standard_library_by_default() -> None:
    data = compose_config().data
    assert isinstance(instantiate(data.source), StandardLibrary)
    assert data.val_fraction == 0.13
    assert data.val_tokens == 2_000_000


@pytest.mark.parametrize("option", ["stdlib", "recall", "mix"])
def test_the_order_of_data_follows_the_seed_of_the_run_by_default(option: str) -> None:
    assert compose_config(f"data={option}", "seed=5").data.seed == 5
    assert compose_config(f"data={option}", "seed=5", "data.seed=6").data.seed == 6


def test_the_cache_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LLAMA_LAB_CACHE", raising=False)
    assert compose_config().data.cache_dir == "~/.cache/llama_lab"
    monkeypatch.setenv("LLAMA_LAB_CACHE", "/elsewhere")
    assert compose_config("data=text", "data.files=[a]").data.cache_dir == "/elsewhere"


@pytest.mark.parametrize("option", ["data=c4", "data=mix data.mix={stdlib:0.5,c4:0.5}"])
def test_settings_that_hold_others_are_checked_where_they_are_set(option: str) -> None:
    cfg = compose_config(*option.split())
    check_kinds(cfg, flat_defaults(cfg))


@pytest.mark.parametrize("files", ["{a}/a.txt", "['{a}/*.txt']"])
def test_every_key_of_text_reaches_the_source(files: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one two three")
    keys = [f"data.files={files.format(a=tmp_path)}", "data.document_chars=8"]
    assert list(instantiate(compose_config("data=text", *keys).data.source).documents()) == ["one two ", "three"]
    assert compose_config("data=text", *keys, "data.text_field=body").data.source.text_field == "body"


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("tokenizer=byte", ByteTokenizer()),
        ("tokenizer=char", CharTokenizer()),
        ("tokenizer=bpe", BPETokenizer(4096, sample_bytes=2**25)),
        ("tokenizer.vocab_size=999", BPETokenizer(999, sample_bytes=2**25)),
        ("tokenizer.sample_bytes=null", BPETokenizer(4096)),
    ],
)
def test_tokenizers_are_chosen_by_name(override: str, expected: Any) -> None:
    assert instantiate(compose_config(override).tokenizer) == expected


def test_a_stored_config_has_absolute_paths_and_its_own_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()

    def config(files: Any, below: str) -> dict[str, Any]:
        json = {"train": [f"{below}c.json", "https://d/e.json"], "test": f"{below}f.json"}
        sources = {
            "b": {"source": {"path": f"{below}here", "data_files": "x/*"}},
            "c": {"path": "json", "data_files": json},
            "d": {"path": "org/name", "data_files": None},
        }
        return {"files": files, "sources": sources}

    data = config("a.txt", "")
    make_absolute(data)
    assert data == config([f"{tmp_path}/a.txt"], f"{tmp_path}/")
