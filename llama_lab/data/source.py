"""Sources of text: iterators over documents, with size and fingerprint."""

import glob
import hashlib
import json
import logging
import os
import re
import sysconfig
from codecs import BOM_UTF8
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any, Protocol

from llama_lab.util.errors import ConfigError, require_positive

log = logging.getLogger(__name__)


ReportProgress = Callable[[int, int, str], None]
"""Called as `progress(done_bytes, total_bytes, phase)`; phases: "downloading", "reading", "training tokenizer",
"tokenising"."""


class Source(Protocol):
    """A finite sequence of documents that can be read repeatedly, always in the same order.

    It may also have `validation`, an iterator over its own validation documents; `prepare(progress)`, called before it
    is read; `revisions`, the commit of each published dataset that it reads; and `separator`, at which each document is
    cut into two parts, encoded apart and with an end-of-text token between them.
    """

    def documents(self) -> Iterator[str]:
        """Iterate over all documents from the start."""
        ...

    def fingerprint(self) -> str:
        """Return a hash that changes when the documents do, without reading them."""
        ...

    def total_bytes(self) -> int:
        """Return the bytes on disk that one pass over the documents reads."""
        ...


def encoded(texts: Iterable[str], total: int, progress: ReportProgress, phase: str) -> Iterator[bytes]:
    """The UTF-8 bytes of each text, reporting progress after every megabyte or so."""
    done = reported = 0
    progress(0, total, phase)
    for text in texts:
        data = text.encode()
        yield data
        done += len(data)
        if done - reported >= 1 << 20:
            reported = done
            progress(done, max(done, total), phase)  # compressed files have more text than bytes
    total = max(done, total)
    progress(total, total, phase)


class Files(Protocol):
    """A source that reads files. `_paths` names them, `_settings` is all else that determines the documents."""

    _settings: str

    @property
    def _paths(self) -> list[Path]: ...

    def states(self) -> list[tuple[str, int, int]]:
        """The path, size in bytes and modification time of every file."""
        return [(str(path), stat.st_size, stat.st_mtime_ns) for path in self._paths for stat in [path.stat()]]

    def fingerprint(self) -> str:
        """Return a hash of the settings and the states of the files."""
        text = self._settings + "".join(f"\0{path}\0{size}\0{time}" for path, size, time in self.states())
        return hashlib.blake2b(text.encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()

    def total_bytes(self) -> int:
        """Return the size of all files."""
        return sum(size for _, size, _ in self.states())


class StandardLibrary(Files):
    """The source code of Python's standard library: one document per `.py` file, on every machine, no download.

    What `data=stdlib` was in version 0.4.0. Tests, idlelib and installed packages are left out.
    """

    _settings = "stdlib"
    _left_out = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "idlelib", "__pycache__"})

    def documents(self) -> Iterator[str]:
        """Read every file; skip files that are not UTF-8, and log their number.

        Raises ConfigError if this Python's standard library is a zip file or byte code.
        """
        skipped = 0
        for path in self._paths:
            try:
                yield path.read_bytes().decode("utf-8")
            except UnicodeDecodeError:
                skipped += 1
        if skipped:
            log.warning("data=stdlib: skipped %d of %d files, which are not UTF-8", skipped, len(self._paths))

    @cached_property
    def _paths(self) -> list[Path]:
        root = sysconfig.get_path("stdlib")
        paths = []
        for folder, subfolders, names in os.walk(root):
            subfolders[:] = [name for name in subfolders if name not in self._left_out]  # os.walk does not enter these
            paths += [Path(folder, name) for name in names if name.endswith(".py")]
        if not paths:
            problem = "this Python keeps its library zipped or compiled"
            raise ConfigError(f"data=stdlib: no .py files under {root}, {problem}; use data=text data.files=[...]")
        return sorted(paths)


class HandWrittenLibrary(StandardLibrary):
    """The standard library without files that say at their start that a program has written them.

    Most of these are tables of codecs, near copies of each other.
    """

    _settings = "stdlib without generated files"

    def documents(self) -> Iterator[str]:
        """Read the files, as a `StandardLibrary` does."""
        return (text for text in super().documents() if not _GENERATED.search(text[:_HEAD_CHARS]))


_GENERATED = re.compile(r"Python Character Mapping Codec|[Aa]uto-?generated|is (automatically )?generated")
_HEAD_CHARS = 200
TEXT_FIELD = "text"


@dataclass(eq=False)
class TextFiles(Files):
    """Local files: `.parquet` and `.json`/`.jsonl` hold one document per row, any other file is UTF-8 text.

    A byte-order mark at the start of a file is not part of its text.

    `files` are paths or glob patterns (with `**` and `~`), relative to the working directory. `text_field` is
    the column with a row's text. A text file longer than `document_chars` characters is cut into several documents,
    at the end of a paragraph, line or word, so that a single book can be split into training and validation; None
    keeps each text file whole.

    Raises ConfigError, on first use, for a file that cannot be read as text, and for a `text_field` that no file has.
    """

    files: str | Iterable[str]
    text_field: str = TEXT_FIELD
    document_chars: int | None = 16384

    def __post_init__(self) -> None:
        require_positive("data.document_chars", self.document_chars)
        self._settings = f"text {self.text_field} {self.document_chars}"

    def documents(self) -> Iterator[str]:
        """Read every document of every file, in the order of `files`; a pattern's own files are sorted."""
        for path in self._paths:
            if read_rows := _ROW_READERS.get(path.suffix.lower()):
                yield from row_texts(read_rows(path), self.text_field, str(path))
            else:  # without newline translation, so that the model sees the file's bytes
                with path.open(encoding="utf-8-sig", newline="") as file:
                    yield from cut(read_blocks(file, f"data.files=[{path}]"), self.document_chars)

    @cached_property
    def _paths(self) -> list[Path]:
        patterns = [self.files] if isinstance(self.files, str) else self.files
        paths = list(dict.fromkeys(path for pattern in patterns for path in _expand(pattern)))
        if not paths:
            raise ConfigError("data.files=[]: no files given; name at least one, such as data.files=[book.txt]")
        for path in paths:
            if path.stat().st_size == 0:
                raise ConfigError(f"data.files=[{path}]: the file is empty; leave it out")
        if self.text_field != TEXT_FIELD and not any(path.suffix.lower() in _ROW_READERS for path in paths):
            problem = "names a field of rows, and none of data.files is a .jsonl, .json or .parquet file"
            raise ConfigError(f"data.text_field={self.text_field}: {problem}; leave it out")
        return paths


def _expand(pattern: str) -> list[Path]:
    """The files that match a path or glob pattern, of a pattern without empty ones.

    An existing path is never read as a pattern.
    """
    expanded = os.path.abspath(os.path.expanduser(pattern))
    if os.path.isdir(expanded):
        raise ConfigError(f"data.files=[{pattern}]: is a folder; name the files in it, such as {pattern}/**/*.txt")
    if os.path.isfile(expanded):
        return [Path(expanded)]
    matching = map(Path, sorted(glob.glob(expanded, recursive=True)))
    found = [path for path in matching if path.is_file() and path.stat().st_size]
    if not found:
        problem = "the pattern matches no file with text" if glob.has_magic(pattern) else "no such file"
        raise ConfigError(f"data.files=[{pattern}]: {problem}; paths are relative to {os.getcwd()}")
    return found


def read_blocks(file: IO[str], setting: str) -> Iterator[str]:
    """An open file's text in blocks. Raises ConfigError, which begins with `setting`, for a file that is no text."""
    readable = "give UTF-8 text, .jsonl, .json or .parquet files"
    try:
        while block := file.read(_BLOCK_CHARS):
            if "\0" in block:
                raise ConfigError(f"{setting}: a binary file (it has NUL bytes); {readable}")
            yield block
    except UnicodeDecodeError as error:
        raise ConfigError(f"{setting}: not UTF-8 text ({error.reason}); {readable}") from error


_BLOCK_CHARS = 1 << 20


def cut(blocks: Iterable[str], size: int | None) -> Iterator[str]:
    """Cut a text into pieces of at most `size` characters; their concatenation is the text. None: leave it whole.

    Each ends at the last end of a paragraph, else of a line, else of a word in its second half.
    """
    rest = ""
    for block in ["".join(blocks)] if size is None else blocks:
        rest += block
        start = 0
        while size is not None and len(rest) - start > size:
            first, last = start + (size + 1) // 2, start + size
            breaks = ((rest.rfind(mark, first, last), mark) for mark in ("\n\n", "\n", " "))
            end = next((place + len(mark) for place, mark in breaks if place >= 0), last)
            yield rest[start:end]
            start = end
        rest = rest[start:]
    yield rest


def row_texts(rows: Iterable[tuple[str, Any]], text_field: str, where: str, may_be_null: bool = False) -> Iterator[str]:
    """The text of every row; null as an empty one, if it may be that. A row comes after its place in `where`.

    Raises ConfigError for a row without text.
    """
    for place, fields in rows:
        if not isinstance(fields, dict):
            advice = 'write rows such as {"text": "..."}'
            raise ConfigError(f"data.files=[{where}]: {place} is {_kind(fields)} rather than an object; {advice}")
        text = fields.get(text_field)
        if text is None and may_be_null:
            text = ""
        if text_field not in fields:
            problem = f"has no such field; choose one of [{', '.join(fields)}]"
        elif not isinstance(text, str):
            problem = f"holds {_kind(text)} there, not text; fix it or choose another field"
        elif half := re.search("[\ud800-\udfff]", text):
            problem = f"holds {half[0]!r}, half a character; fix the row"
        else:
            yield text
            continue
        raise ConfigError(f"data.text_field={text_field}: {place} of {where} {problem}")


def numbered(rows: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    """Each row after its place."""
    return ((f"row {number}", row) for number, row in enumerate(rows, 1))


def _kind(value: Any) -> str:
    return "null" if value is None else type(value).__name__


def _json_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """The values of a JSON list, which is read at once, or of a file with one per line, each after its place."""
    with path.open("rb") as file:
        is_list = file.read(_BLOCK_CHARS).removeprefix(BOM_UTF8).lstrip().startswith(b"[")
        file.seek(0)
        for number, text in enumerate([file.read()] if is_list else file, 1):
            if text.isspace():
                continue
            try:
                value = json.loads(text.rstrip())
            except UnicodeDecodeError as error:
                line, reason = 1 + text.count(b"\n", 0, error.start), error.reason
            except json.JSONDecodeError as error:
                line, reason = error.lineno, error.msg
            else:
                yield from numbered(value) if is_list else [(f"line {number}", value)]
                continue
            place = f"line {number - 1 + line}"
            raise ConfigError(f"data.files=[{path}]: not a valid {path.suffix} file ({place}: {reason}); fix it")


def _parquet_rows(path: Path) -> Iterator[tuple[str, Any]]:
    from pyarrow import ArrowException, parquet  # takes long to import, and only needed for these files

    try:
        with parquet.ParquetFile(path) as file:
            yield from numbered(row for batch in file.iter_batches(1000) for row in batch.to_pylist())
    except (ArrowException, UnicodeDecodeError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"data.files=[{path}]: not a valid {path.suffix} file ({reason}); fix it") from error


_ROW_READERS = {".json": _json_rows, ".jsonl": _json_rows, ".parquet": _parquet_rows}
