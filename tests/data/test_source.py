"""Sources: what they read, what they refuse, and that they stay local."""

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llama_lab.data.source import StandardLibrary, TextFiles, cut
from llama_lab.util.errors import ConfigError

TEXTS = ["first\r\ndocument ", "zweites, mit Umlaut: ü\n", "troisième\u2028 𝄞"]


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


ROWS = (".jsonl", ".json", ".parquet")


def write_rows(path: str, rows: list[Any]) -> str:
    if path.endswith(".parquet"):
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=2)
    elif path.endswith(".jsonl"):
        Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    else:
        Path(path).write_text(json.dumps(rows), encoding="utf-8")
    return path


def refusal(*files: str, **settings: Any) -> str:
    """The one-line error that reading these files raises."""
    with pytest.raises(ConfigError) as caught:
        list(TextFiles(files, **settings).documents())
    assert "\n" not in str(caught.value)
    return str(caught.value)


# The standard library


def test_standard_library_holds_its_modules_but_no_tests_and_no_packages() -> None:
    documents = list(StandardLibrary().documents())
    root = Path(sysconfig.get_path("stdlib"))
    assert (root / "dataclasses.py").read_text(encoding="utf-8") in documents
    assert (root / "json" / "decoder.py").read_text(encoding="utf-8") in documents
    assert Path(pytest.__file__).read_text(encoding="utf-8") not in documents
    assert sum(len(text.encode()) for text in documents) == StandardLibrary().total_bytes()


def test_standard_library_leaves_out_tests_caches_and_installed_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, *left_out = ["a/b.py", "a/test/c.py", "site-packages/d.py", "idlelib/e.py", "__pycache__/f.py", "tests/g.py"]
    for name in [kept, *left_out]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    assert list(StandardLibrary().documents()) == [kept]


def test_standard_library_counts_the_files_it_skips(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "good.py").write_bytes("ü".encode())
    (tmp_path / "latin.py").write_bytes("ü".encode("latin-1"))
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    assert list(StandardLibrary().documents()) == ["ü"]
    assert "skipped 1 of 2 files" in caplog.text


def test_standard_library_that_is_not_on_disk_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / "python311.zip"))
    with pytest.raises(ConfigError, match=r"data=stdlib: no \.py files .*python311\.zip.*data=text"):
        StandardLibrary().fingerprint()


# Files


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.parquet"])
def test_rows_are_the_documents_that_text_files_would_be(name: str) -> None:
    for i, text in enumerate(TEXTS):
        Path(f"{i}.txt").write_bytes(text.encode())
    write_rows(name, [{"id": i, "body": text} for i, text in enumerate(TEXTS)])
    assert list(TextFiles([name], text_field="body").documents()) == TEXTS
    assert list(TextFiles(["?.txt"]).documents()) == TEXTS


def test_text_keeps_its_exact_bytes() -> None:
    data = "a\r\nb\rc\u2028\n\n\ufeffd".encode()
    Path("mixed.txt").write_bytes(data)
    assert "".join(TextFiles("mixed.txt").documents()).encode() == data


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "list.json", "lines.json"])
@pytest.mark.parametrize("document_chars", [None, 100])
def test_a_byte_order_mark_is_no_text(name: str, document_chars: int | None) -> None:
    content = {"a.txt": "one", "list.json": '\n[{"text": "one"}]'}.get(name, '{"text": "one"}\n')
    Path(name).write_bytes(b"\xef\xbb\xbf" + content.encode())
    assert list(TextFiles(name, document_chars=document_chars).documents()) == ["one"]


def test_blank_lines_between_rows_are_no_rows() -> None:
    Path("a.jsonl").write_text('{"text": "one"}\n\n{"text": "two"}\r\n\n')
    assert list(TextFiles("a.jsonl").documents()) == ["one", "two"]


def test_patterns_are_sorted_and_name_each_file_once() -> None:
    for name in ["b/2.txt", "b/c/3.txt", "b/1.txt"]:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(name)
    assert list(TextFiles(["b/**/*.txt", "b/1.txt"]).documents()) == ["b/1.txt", "b/2.txt", "b/c/3.txt"]


def test_tilde_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    Path("at_home.txt").write_text("x")
    monkeypatch.chdir("/")
    assert list(TextFiles(["~/at_home.txt"]).documents()) == ["x"]


def test_names_with_special_characters_are_read() -> None:
    Path(".hidden").mkdir()
    name = write_rows(".hidden/a [1]*.jsonl", [{"text": "x"}])
    assert list(TextFiles([name]).documents()) == ["x"]


def test_fingerprint_follows_files_and_settings() -> None:
    Path("a.txt").write_text("one")
    before = TextFiles("a.txt").fingerprint()
    assert TextFiles("a.txt").fingerprint() == before
    assert TextFiles("a.txt", document_chars=5).fingerprint() != before
    both = ["a.txt", write_rows("b.jsonl", [{"text": "x", "body": "y"}])]
    assert TextFiles(both, text_field="body").fingerprint() != TextFiles(both).fingerprint()
    Path("a.txt").write_text("two")
    os.utime("a.txt", ns=(0, 1))
    assert TextFiles("a.txt").fingerprint() != before


@given(st.lists(st.sampled_from(["word", "longer" * 5, " ", "\n", "\n\n"])), st.integers(1, 50))
def test_acut_text_is_whole_again_when_joined(blocks: list[str], size: int) -> None:
    pieces = list(cut(blocks, size))
    assert "".join(pieces) == "".join(blocks)
    assert pieces == list(cut(["".join(blocks)], size))  # the blocks that it was read in leave no trace
    assert all(len(piece) <= size for piece in pieces)
    assert all(len(piece) >= size // 2 for piece in pieces[:-1])


def test_a_long_text_iscut_at_a_paragraph_else_line_else_word() -> None:
    Path("book.txt").write_text("one two\n\nthree on\nfour five six seven")
    assert list(TextFiles("book.txt", document_chars=12).documents()) == [
        "one two\n\n",
        "three on\n",
        "four five ",
        "six seven",
    ]
    assert len(list(TextFiles("book.txt", document_chars=None).documents())) == 1


@pytest.mark.process
def test_reading_rows_touches_neither_network_nor_home_and_prints_nothing(tmp_path: Path) -> None:
    write_rows("a.jsonl", [{"text": "x"}])
    write_rows("b.parquet", [{"text": "y"}])
    Path("broken.jsonl").write_text("{")
    home = tmp_path / "home"
    home.mkdir()
    script = """
import socket, sys
def refuse(*args): sys.exit("network used")
socket.socket.connect = socket.getaddrinfo = refuse
from llama_lab.data.source import TextFiles
print(*TextFiles(["a.jsonl", "b.parquet"]).documents())
try: list(TextFiles("broken.jsonl").documents())
except ValueError: print("refused")
"""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "XDG_"))} | {"HOME": str(home)}
    env["PYTHONPATH"] = os.pathsep.join(sys.path)
    result = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True)
    assert (result.stdout, result.stderr) == ("x y\nrefused\n", "")
    assert not [path for path in home.rglob("*") if path.is_file()]


# Refusals


def test_a_field_of_rows_is_refused_where_no_file_has_rows() -> None:
    Path("a.txt").write_text("one")
    assert refusal("a.txt", text_field="body").startswith("data.text_field=body: names a field of rows, and none of ")
    rows = write_rows("b.jsonl", [{"body": "two"}])
    assert list(TextFiles(["a.txt", rows], text_field="body").documents()) == ["one", "two"]


MISSING = [
    ("nope.txt", "data.files=[nope.txt]: no such file; paths are relative to "),
    ("b/*.txt", "data.files=[b/*.txt]: the pattern matches no file"),
    ("books", "data.files=[books]: is a folder; name the files in it, such as books/**/*.txt"),
    (None, "data.files=[]: no files given"),
]


@pytest.mark.parametrize(("name", "message"), MISSING)
def test_what_is_no_file_is_named(name: str | None, message: str) -> None:
    Path("books").mkdir()
    assert refusal(*[name] if name else []).startswith(message)


UNREADABLE = [
    ("empty.txt", b"", "the file is empty; leave it out"),
    ("none.json", b"[]", "the file has no rows"),
    *((f"broken{suffix}", b'{"text": "a"}\n{"text": "b"', f"not a valid {suffix} file (") for suffix in ROWS),
    ("list.json", b'[\n {"text": "a"},\n {"text": "b"\n}, oops]', "not a valid .json file (line 4: "),
    *(
        ("image.bin", lead + data, problem)
        for lead in (b"", b"a" * 3_000_000)
        for data, problem in ((b"abc\0def", "a binary file (it has NUL bytes)"), (b"abc\xff", "not UTF-8 text"))
    ),
]


@pytest.mark.parametrize(("name", "content", "message"), UNREADABLE)
def test_a_file_that_cannot_be_read_is_named(name: str, content: bytes, message: str) -> None:
    Path(name).write_bytes(content)
    told = refusal(name)
    assert told.startswith("data.files=[")
    assert f"{name}]: " in told
    assert message in told


LACKING = "has no such field; choose one of [id, body]"
WRONG_ROWS: list[tuple[list[Any], str, str, tuple[str, ...]]] = [  # the last row, but for the first of the first
    ([{"text": "a", "id": 3}, {"text": "b", "id": None}], "id", "holds int there, not text", ROWS),
    ([{"id": 1, "body": "x"}], "other", LACKING, ROWS),
    ([{"text": "a"}, {"text": None}], "text", "holds null there, not text", ROWS),
    ([{"text": "a"}, {"id": 1, "body": "b"}], "text", LACKING, ROWS[:2]),
    ([{"text": "\U0001d11e"}, {"text": "a\ud834"}], "text", "'\\ud834', half a character", ROWS[:2]),
]


@pytest.mark.parametrize(
    ("suffix", "rows", "field", "message"), [(suffix, *case) for *case, suffixes in WRONG_ROWS for suffix in suffixes]
)
def test_a_row_whose_text_is_none_is_named(suffix: str, rows: list[Any], field: str, message: str) -> None:
    name = write_rows(f"rows{suffix}", rows)
    told = refusal(name, text_field=field)
    place = f"{'line' if suffix == '.jsonl' else 'row'} {1 if field == 'id' else len(rows)}"
    assert told.startswith(f"data.text_field={field}: {place} of ")
    assert name in told
    assert message in told


@pytest.mark.parametrize(("name", "place"), [("rows.jsonl", "line 2"), ("rows.json", "row 2")])
def test_a_row_that_is_no_object_is_named(name: str, place: str) -> None:
    assert f"{name}]: {place} is str rather than an object" in refusal(write_rows(name, [{"text": "a"}, "b"]))


LINES = [b'{"text": "one row of some length, so that the file has many blocks"}'] * 60_000
FAULTS = [b'{"text": "b"', b'{"text": "\xff"}', b"nonsense"]


@pytest.mark.parametrize(
    ("line", "fault", "mark"),
    [
        pytest.param(line, fault, mark, marks=[] if (i + j) % 2 == k else pytest.mark.matrix)
        for i, line in enumerate((1, 3, 60_001))
        for j, fault in enumerate(FAULTS)
        for k, mark in enumerate((b"", b"\xef\xbb\xbf"))
    ],
)
def test_the_line_at_fault_of_a_broken_file_is_named(line: int, fault: bytes, mark: bytes) -> None:
    lines = [*LINES[: line - 1], fault, *LINES[line - 1 :]]
    Path("broken.jsonl").write_bytes(mark + b"\n".join(lines) + b"\n")
    assert f"broken.jsonl]: not a valid .jsonl file (line {line}: " in refusal("broken.jsonl")


def test_a_document_of_no_characters_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"data\.document_chars=0: must be at least 1"):
        TextFiles("a.txt", document_chars=0)
