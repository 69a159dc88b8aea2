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


def write_rows(path: str, rows: list[dict[str, Any]]) -> str:
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


def test_a_missing_file_is_named() -> None:
    assert refusal("nope.txt").startswith("data.files=[nope.txt]: no such file; paths are relative to ")


def test_a_pattern_without_match_is_named() -> None:
    assert refusal("b/*.txt").startswith("data.files=[b/*.txt]: the pattern matches no file")


def test_a_field_of_rows_is_refused_where_no_file_has_rows() -> None:
    Path("a.txt").write_text("one")
    assert refusal("a.txt", text_field="body").startswith("data.text_field=body: names a field of rows, and none of ")
    rows = write_rows("b.jsonl", [{"body": "two"}])
    assert list(TextFiles(["a.txt", rows], text_field="body").documents()) == ["one", "two"]


def test_a_folder_is_answered_with_a_pattern() -> None:
    Path("books").mkdir()
    assert "data.files=[books]: is a folder; name the files in it, such as books/**/*.txt" in refusal("books")


def test_no_files_at_all_are_refused() -> None:
    assert refusal().startswith("data.files=[]: no files given")


def test_an_empty_file_is_named() -> None:
    Path("empty.txt").touch()
    assert refusal("empty.txt").endswith("empty.txt]: the file is empty; leave it out")


def test_a_file_without_rows_is_named() -> None:
    assert "none.json]: the file has no rows" in refusal(write_rows("none.json", []))


@pytest.mark.parametrize(("data", "problem"), [(b"abc\0def", "it has NUL bytes"), (b"abc\xff", "not UTF-8 text")])
@pytest.mark.parametrize("lead", [b"", b"a" * 3_000_000], ids=["at its start", "far into it"])
def test_a_binary_file_is_named(lead: bytes, data: bytes, problem: str) -> None:
    Path("image.bin").write_bytes(lead + data)
    message = refusal("image.bin")
    assert message.startswith("data.files=[")
    assert "image.bin]" in message
    assert problem in message


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_a_missing_field_is_answered_with_the_fields_present(name: str) -> None:
    write_rows(name, [{"id": 1, "body": "x"}])
    message = refusal(name)
    assert message.startswith("data.text_field=text: ")
    assert f"{name} has no such field; choose one of [id, body]" in message


PLACES = {"rows.jsonl": "line 2", "rows.json": "row 2", "rows.parquet": "row 2"}


@pytest.mark.parametrize("name", PLACES)
def test_a_field_that_is_no_text_is_named(name: str) -> None:
    write_rows(name, [{"text": "a", "id": 3}, {"text": "b", "id": None}])
    message = refusal(name, text_field="id")
    assert message.startswith(f"data.text_field=id: {PLACES[name].replace('2', '1')} of ")
    assert f"{name} holds int there, not text" in message


@pytest.mark.parametrize("name", PLACES)
def test_a_row_with_null_for_its_text_is_named(name: str) -> None:
    write_rows(name, [{"text": "a"}, {"text": None}])
    message = refusal(name)
    assert message.startswith(f"data.text_field=text: {PLACES[name]} of ")
    assert f"{name} holds null there, not text" in message


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
def test_a_row_without_the_field_is_named(name: str) -> None:
    write_rows(name, [{"text": "a"}, {"id": 1, "body": "b"}])
    message = refusal(name)
    assert message.startswith(f"data.text_field=text: {PLACES[name]} of ")
    assert f"{name} has no such field; choose one of [id, body]" in message


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
def test_a_row_that_is_no_object_is_named(name: str) -> None:
    write_rows(name, [{"text": "a"}, "b"])  # type: ignore[list-item]
    assert f"{name}]: {PLACES[name]} is str rather than an object" in refusal(name)


@pytest.mark.parametrize("name", ["broken.jsonl", "broken.json", "broken.parquet"])
def test_a_file_that_cannot_be_parsed_is_named(name: str) -> None:
    Path(name).write_text('{"text": "a"}\n{"text": "b"')
    assert f"{name}]: not a valid {Path(name).suffix} file (" in refusal(name)


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"], ids=["plain", "byte-order mark"])
@pytest.mark.parametrize("fault", [b'{"text": "b"', b'{"text": "\xff"}', b"nonsense"])
@pytest.mark.parametrize("line", [1, 3, 60_001])
def test_the_line_at_fault_of_a_broken_file_is_named(line: int, fault: bytes, mark: bytes) -> None:
    lines = [b'{"text": "one row of some length, so that the file has many blocks"}'] * 60_000
    lines.insert(line - 1, fault)
    Path("broken.jsonl").write_bytes(mark + b"\n".join(lines) + b"\n")
    assert f"broken.jsonl]: not a valid .jsonl file (line {line}: " in refusal("broken.jsonl")


def test_the_line_at_fault_of_a_broken_list_is_named() -> None:
    Path("broken.json").write_text('[\n {"text": "a"},\n {"text": "b"\n}, oops]')
    assert "broken.json]: not a valid .json file (line 4: " in refusal("broken.json")


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
def test_half_of_a_surrogate_pair_is_named(name: str) -> None:
    write_rows(name, [{"text": "\U0001d11e"}, {"text": "a\ud834"}])
    message = refusal(name)
    assert message.startswith(f"data.text_field=text: {PLACES[name]} of ")
    assert "'\\ud834', half a character" in message


def test_a_document_of_no_characters_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"data\.document_chars=0: must be at least 1"):
        TextFiles("a.txt", document_chars=0)
