"""Tokenizers trained elsewhere: any tokenizer.json, from a file, a folder or a name."""

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from llama_lab.data.hf_tokenizer import HFTokenizer
from llama_lab.data.tokenizer import TOKENIZER_CONFIG, BPETokenizer, TextTokenizer
from llama_lab.evaluation.load import load_run
from llama_lab.util.errors import ConfigError
from tests.conftest import Command
from tests.data.texts import sentences
from tests.hf.test_loading import edit_json

TEXT = sentences(50)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder as `save_pretrained` leaves it, of a lossless tokenizer with two special tokens that adds one."""
    file = tmp_path / "trained.json"
    BPETokenizer(vocab_size=350).train(iter(TEXT)).save(file)
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 350)])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(tmp_path)
    return tmp_path


def load(path: Path | str, end_of_text: str | None = None) -> TextTokenizer:
    return HFTokenizer(str(path), end_of_text).train(iter([]))


def test_a_folder_of_transformers_gives_its_ids_without_what_it_adds_and_its_end_of_text(folder: Path) -> None:
    theirs, ours = AutoTokenizer.from_pretrained(folder), load(folder)
    assert theirs.encode(TEXT[0])[0] == theirs.bos_token_id
    assert ours.encode(TEXT[0]) == theirs.encode(TEXT[0], add_special_tokens=False)
    assert (ours.eot_id, ours.vocab_size) == (theirs.eos_token_id, len(theirs))
    other = load(folder, "<s>")
    assert (other.eot_id, other.hash != ours.hash) == (theirs.bos_token_id, True)
    elsewhere = shutil.copytree(folder, folder / "elsewhere")
    assert load(elsewhere).hash == load(folder / "tokenizer.json").hash == ours.hash


def test_a_lossy_tokenizer_is_warned_of(folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        HFTokenizer(str(folder))
        assert not caplog.records
        lossy = Tokenizer(models.WordLevel({"<unk>": 0, "</s>": 1, "a": 2}, unk_token="<unk>"))
        lossy.normalizer = normalizers.Lowercase()
        lossy.pre_tokenizer = pre_tokenizers.Whitespace()
        lossy.add_special_tokens(["</s>"])
        lossy.save(str(tmp_path / "lossy.json"))
        HFTokenizer(str(tmp_path / "lossy.json"))
    assert "does not keep capital letters, a leading space, repeated spaces" in caplog.text
    assert "bits per byte" in caplog.text


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing/tokenizer.json", r"tokenizer\.path=missing/tokenizer\.json: no such file or folder"),
        ("{folder}/empty", r"has no tokenizer\.json; write one with transformers\.AutoTokenizer"),
        ("{folder}/text.json", r"tokenizer\.path=.*text\.json cannot be used"),
        ("{folder}/tokenizer.json", r"tokenizer\.end_of_text=null: .*name one of \['<s>', '</s>'\]"),
        ("no/such", r"tokenizer\.path=no/such: the Hugging Face Hub cannot be reached.*a folder"),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(
    name: str, message: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (folder / "empty").mkdir()
    (folder / "text.json").write_text("{}")
    (folder / TOKENIZER_CONFIG).unlink()
    file = folder / "tokenizer.json"
    text = file.read_text().replace("<|endoftext|>", "<|other|>")
    file.write_text(text.replace('"special": true', '"special": false', 1))
    with pytest.raises(ConfigError, match=message):
        HFTokenizer(name.format(folder=folder))


@pytest.mark.slow
def test_a_run_keeps_its_tokenizer_without_the_file_of_it(folder: Path, tiny: list[str], command: Command) -> None:
    ran = command(*tiny, "tokenizer=hf", f"tokenizer.path={folder}", "train.tokens=4000")
    assert ran.code == 0, ran.err
    theirs = AutoTokenizer.from_pretrained(folder)
    (folder / "tokenizer.json").unlink()
    run = load_run(ran.run)
    assert run.model.vocab_size == len(theirs)
    assert run.tokenizer.encode(TEXT[0]) == theirs.encode(TEXT[0], add_special_tokens=False)
    assert run.open_dataset().tokenizer.hash == run.tokenizer.hash
    kept = AutoTokenizer.from_pretrained(ran.run)
    assert kept.eos_token == "</s>"
    assert kept.encode(TEXT[0], add_special_tokens=False) == run.tokenizer.encode(TEXT[0])


WORDS = {"type": "WordLevel", "vocab": {"a": 2**31 + 5}, "unk_token": "a"}
PIECE = {"type": "WordPiece", "vocab": {"a": 0}, "unk_token": "a", "max_input_chars_per_word": 10**12}
REPLACE = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 40}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": WORDS}, "id: 2147483653 is more than"),
        ({"model": PIECE}, "max_input_chars_per_word: 1000000000000 is more than 1000; "),
        ({"normalizer": {"type": "Prepend", "prepend": "b" * 5000}}, "makes of one: 5000 is more than 1000; "),
        ({"normalizer": {"type": "Sequence", "normalizers": [REPLACE] * 2}}, "makes of one: 1600 is more than"),
    ],
)
def test_numbers_beyond_the_memory_are_refused(change: dict[str, Any], message: str, folder: Path) -> None:
    edit_json(folder / "tokenizer.json", **change)
    with pytest.raises(ConfigError, match=rf"tokenizer.json.*{message}"):
        HFTokenizer(str(folder))
