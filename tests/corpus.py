"""A tiny corpus, the overrides of a run on it, and files that are no text to train on."""

import random
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where this session keeps its corpus and its token cache."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="session")
def corpus(home: Path) -> Path:
    """66 kB of text that looks like code; some characters have more than one byte."""
    draw = random.Random(0)
    lines = (f"def f{i}(x): return {draw.randrange(10**3)} * x  # {draw.choice('aé€')}\n\n" for i in range(1500))
    file = home / "corpus.txt"
    file.write_text("".join(lines), encoding="utf-8")
    return file


@pytest.fixture(scope="session")
def tiny(corpus: Path, home: Path) -> list[str]:
    """The overrides of a run of 78 steps that takes a second or two."""
    return [
        "size=pico",
        "data=text",
        f"data.files=[{corpus}]",
        "data.document_chars=500",
        f"data.cache_dir={home / 'cache'}",
        "tokenizer=byte",
        "train.batch_size=8",
        "train.tokens=20000",
        "train.sample_tokens=10",
        "logger=none",
    ]


@pytest.fixture
def bad_files(tmp_path: Path) -> Path:
    """The folder of a command, with files in it that are no text to train on."""
    (tmp_path / "empty.txt").touch()
    (tmp_path / "binary.txt").write_bytes(bytes(range(256)))
    (tmp_path / "latin.txt").write_bytes("façade ".encode("latin-1") * 100)
    (tmp_path / "short.txt").write_text("too short\n")
    (tmp_path / "lines.txt").write_text("".join(f"line number {i}\n\n" for i in range(1000)))
    return tmp_path
