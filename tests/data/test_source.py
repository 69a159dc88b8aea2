"""Sources: what they read, what they refuse, and that they stay local."""

import json
import os
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


def latin_rows() -> bytes:
    """A Parquet file whose text is not UTF-8, which a writer may make of bytes."""
    text = pa.Array.from_buffers(pa.string(), 1, [None, pa.py_buffer(b"\0\0\0\0\1\0\0\0"), pa.py_buffer(b"\xe9")])
    pq.write_table(pa.table({"text": text}), file := pa.BufferOutputStream())
    return bytes(file.getvalue())


def refusal(*files: str, **settings: Any) -> str:
    """The one-line error that reading these files raises."""
    with pytest.raises(ConfigError, match=r"^[^\n]*$") as caught:
        list(TextFiles(files, **settings).documents())
    return str(caught.value)


# The standard library


def test_standard_library_leaves_out_tests_caches_and_installed_packages_and_counts_what_it_skips(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kept, *left_out = ["a/b.py", "a/test/c.py", "site-packages/d.py", "idlelib/e.py", "__pycache__/f.py", "tests/g.py"]
    for name in [kept, *left_out]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "latin.py").write_bytes("ü".encode("latin-1"))
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    assert list(StandardLibrary().documents()) == [kept]
    assert StandardLibrary().total_bytes() == sum((tmp_path / name).stat().st_size for name in (kept, "latin.py"))
    assert "skipped 1 of 2 files" in caplog.text
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / "python311.zip"))
    with pytest.raises(ConfigError, match=r"data=stdlib: no \.py files .*python311\.zip.*data=text"):
        StandardLibrary().fingerprint()


# Files


@pytest.mark.parametrize("suffix", ROWS)
def test_rows_are_the_documents_that_text_files_would_be(suffix: str) -> None:
    for i, text in enumerate(TEXTS):
        Path(f"{i}.txt").write_bytes(text.encode())
    name = write_rows(f"rows{suffix}", [{"id": i, "body": text} for i, text in enumerate(TEXTS)])
    assert list(TextFiles([name], text_field="body").documents()) == TEXTS
    assert list(TextFiles(["?.txt"]).documents()) == TEXTS
    assert list(TextFiles(["?.txt", name], text_field="body").documents()) == [*TEXTS, *TEXTS]


def test_text_keeps_its_exact_bytes() -> None:
    data = "a\r\nb\rc\u2028\n\n\ufeffd".encode()
    Path("mixed.txt").write_bytes(data)
    assert "".join(TextFiles("mixed.txt").documents()).encode() == data


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "list.json", "lines.json"])
@pytest.mark.parametrize("document_chars", [None, 100])
def test_a_byte_order_mark_is_no_text_and_blank_lines_are_no_rows(name: str, document_chars: int | None) -> None:
    content = {"a.txt": "one", "list.json": '\n[{"text": "one"}]'}.get(name, '{"text": "one"}\r\n\n')
    Path(name).write_bytes(b"\xef\xbb\xbf" + content.encode())
    assert list(TextFiles(name, document_chars=document_chars).documents()) == ["one"]


def test_patterns_are_sorted_and_name_each_file_with_text_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["b/1.txt", "b/2.txt", "b/c/3.txt", ".hidden/a [1]*.txt"]
    for name in reversed(names):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(name)
    Path("b/empty.txt").touch()
    assert list(TextFiles(["b/**/*.txt", "b/1.txt", names[3]]).documents()) == names
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir("/")
    assert list(TextFiles(["~/b/1.txt"]).documents()) == names[:1]


def test_fingerprint_follows_files_and_settings() -> None:
    Path("a.txt").write_text("one")
    before = TextFiles("a.txt").fingerprint()
    assert TextFiles("a.txt").fingerprint() == before != TextFiles("a.txt", document_chars=5).fingerprint()
    both = ["a.txt", write_rows("b.jsonl", [{"text": "x", "body": "y"}])]
    assert TextFiles(both, text_field="body").fingerprint() != TextFiles(both).fingerprint()
    Path("a.txt").write_text("two")
    os.utime("a.txt", ns=(0, 1))
    assert TextFiles("a.txt").fingerprint() != before


@given(st.lists(st.sampled_from(["word", "longer" * 5, " ", "\n", "\n\n"])), st.integers(1, 50))
def test_a_cut_text_is_whole_again_when_joined(blocks: list[str], size: int) -> None:
    pieces = list(cut(blocks, size))
    assert "".join(pieces) == "".join(blocks)
    assert pieces == list(cut(["".join(blocks)], size))  # the blocks that it was read in leave no trace
    assert all(len(piece) <= size for piece in pieces)
    assert all(len(piece) >= size // 2 for piece in pieces[:-1])


def test_a_long_text_is_cut_at_a_paragraph_else_line_else_word() -> None:
    parts = ["one two\n\n", "three on\n", "four five ", "six seven"]
    Path("book.txt").write_text("".join(parts))
    assert list(TextFiles("book.txt", document_chars=12).documents()) == parts
    assert len(list(TextFiles("book.txt", document_chars=None).documents())) == 1


# Refusals


JSONL = b'{"text": "a"}\n{"text": "b"'
LONG = b"a" * 3_000_000


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("nope.txt", None, "nope.txt]: no such file; paths are relative to "),
        ("b/*.txt", None, "b/*.txt]: the pattern matches no file with text"),
        ("empty.txt", b"", "empty.txt]: the file is empty; leave it out"),
        (".", None, ".]: is a folder; name the files in it, such as ./**/*.txt"),
        *((f"broken{suffix}", JSONL, f"broken{suffix}]: not a valid {suffix} file (") for suffix in ROWS),
        ("latin.parquet", latin_rows(), "latin.parquet]: not a valid .parquet file ('utf-8' codec"),
        ("rows.json", b'[{"text": "a"}, "b"]', "rows.json]: row 2 is str rather than an object"),
        *(("a.bin", lead + b"abc\0def", "a.bin]: a binary file (it has NUL bytes)") for lead in (b"", LONG)),
        *(("a.bin", lead + b"abc\xff", "a.bin]: not UTF-8 text") for lead in (b"", LONG)),
    ],
)
def test_a_file_that_cannot_be_read_is_named(name: str, content: bytes | None, message: str) -> None:
    if content is not None:
        Path(name).write_bytes(content)
    told = refusal(name)
    assert told.startswith("data.files=[")
    assert message in told


def test_settings_that_do_nothing_or_hold_nothing_are_refused() -> None:
    assert refusal().startswith("data.files=[]: no files given")
    assert refusal("a.txt", document_chars=0).startswith("data.document_chars=0: must be a positive whole number")
    Path("a.txt").write_text("one")
    assert refusal("a.txt", text_field="body").startswith("data.text_field=body: names a field of rows, and none of ")


@pytest.mark.parametrize("suffix", ROWS)
@pytest.mark.parametrize(
    ("row", "rows", "field", "message"),
    [
        (1, [{"text": "a", "id": 3}, {"text": "b", "id": None}], "id", "holds int there, not text"),
        (1, [{"id": 1, "body": "x"}], "other", "has no such field; choose one of [id, body]"),
        (2, [{"text": "a"}, {"text": None}], "text", "holds null there, not text"),
    ],
)
def test_a_row_whose_text_is_none_is_named(row: int, rows: list[Any], field: str, message: str, suffix: str) -> None:
    told = refusal(write_rows(f"rows{suffix}", rows), text_field=field)
    assert told.startswith(f"data.text_field={field}: {'line' if suffix == '.jsonl' else 'row'} {row} of ")
    assert f"rows{suffix}" in told
    assert message in told


def test_half_a_character_is_named() -> None:
    assert "'\\ud834', half a character" in refusal(write_rows("rows.json", [{"text": "a\ud834"}]))


LINES = [b'{"text": "one row of some length, so that the file has many blocks"}'] * 60_000
BOM = b"\xef\xbb\xbf"
FAULTS = [b'{"text": "b"', b'{"text": "\xff"}', b"nonsense"]


@pytest.mark.parametrize(
    ("line", "fault", "mark"), [(1, FAULTS[0], BOM), (3, FAULTS[1], b""), (60_001, FAULTS[2], BOM)]
)
def test_the_line_at_fault_of_a_broken_file_is_named(line: int, fault: bytes, mark: bytes) -> None:
    lines = [*LINES[: line - 1], fault, *LINES[line - 1 :]]
    Path("broken.jsonl").write_bytes(mark + b"\n".join(lines) + b"\n")
    assert f"broken.jsonl]: not a valid .jsonl file (line {line}: " in refusal("broken.jsonl")
