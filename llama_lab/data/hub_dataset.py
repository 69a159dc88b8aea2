"""Datasets that the library `datasets` loads: by a name on the Hugging Face Hub, and files of its formats."""

import json
import logging
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock

from llama_lab.util.errors import ConfigError, first_line
from llama_lab.util.files import discard, replace_text

from .folders import json_hash
from .hub import is_hub_name, report_hub_errors
from .paths import FORMATS
from .source import ReportProgress, cut, read_blocks

if TYPE_CHECKING:
    import datasets

log = logging.getLogger(__name__)

DataFiles = str | Iterable[str] | Mapping[str, str | Iterable[str]]

_LOCALLY = "point at files on this machine, as data=hub data.path=parquet 'data.data_files=[...]'"
_SAVED = ("dataset_dict.json", "state.json")  # in a folder that `save_to_disk` wrote: of several splits, of one


@dataclass(frozen=True)
class HubDataset:
    """The documents of a dataset: on the Hub, in a folder, or files of a format.

    path: a name on the Hub, a folder (of files, or from `save_to_disk`), or one of `FORMATS` for `data_files`. name:
    its configuration. val_split: its own validation split, which becomes `validation`. text_field: the column with the
    text, a document per row; with `document_start`, rows are joined, and one that this regular expression matches
    begins a document. Plain text is cut as by `TextFiles`, at `document_chars`. max_bytes: of UTF-8 to train on, the
    first documents; None for all. revision: of a name on the Hub; its commit is looked up once, and kept in
    `cache_dir`, as is the text that is not on this machine.

    Raises ConfigError, on first use, for what cannot be read.
    """

    path: str
    name: str | None = None
    split: str = "train"
    val_split: str | None = None
    text_field: str = "text"
    document_start: str | None = None
    document_chars: int | None = 16384
    max_bytes: int | None = None
    revision: str | None = None
    data_files: DataFiles | None = None
    cache_dir: str = field(default="~/.cache/llama_lab", repr=False)

    def __post_init__(self) -> None:
        for key in ("max_bytes", "document_chars"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise ConfigError(f"data.{key}={value}: must be at least 1, or null")
        if self.split == self.val_split:
            raise ConfigError(f"data.val_split={self.val_split}: is the split to train on; name another, or null")
        if self.document_start is not None:
            try:
                re.compile(self.document_start)
            except re.error as error:
                raise ConfigError(
                    f"data.document_start={self.document_start}: is no regular expression, {error}"
                ) from None
        if os.path.isfile(self.path):
            kind = "text" if self.path.endswith(".txt") else Path(self.path).suffix.lstrip(".") or "parquet"
            raise ConfigError(
                f"data.path={self.path}: is a file; name its format, data.path={kind} 'data.data_files=[{self.path}]'"
            )
        if not (self._is_format or self._is_folder or is_hub_name(self.path)):
            raise ConfigError(f"data.path={self.path}: no such folder, and no name on the Hub; {_LOCALLY}")
        if self._is_format and self.data_files is None:
            raise ConfigError(
                f"data.path={self.path}: is a format; name its files, as 'data.data_files=[a.{self.path}]'"
            )
        for key, has_use in {"revision": self._is_on_hub, "name": not (self._is_format or self._saved)}.items():
            if getattr(self, key) is not None and not has_use:
                raise ConfigError(f"data.{key}={getattr(self, key)}: data.path={self.path} has none; leave it out")

    def documents(self) -> Iterator[str]:
        """Iterate over the documents to train on."""
        return self._read(self.split)

    @property
    def validation(self) -> Iterator[str] | None:
        """Iterate over the documents of the official validation split; None if there is none."""
        return None if self.val_split is None else self._read(self.val_split)

    def fingerprint(self) -> str:
        """Return a hash of what determines the documents: the settings and the commit, or the files' state."""
        text = [self.path, self.name, self.split, self.val_split, self.text_field, self.document_start]
        settings = [*text, self.document_chars, self.max_bytes, _plain(self.data_files)]
        state = self.commit if self._is_remote else [(f, s.st_size, s.st_mtime_ns) for f, s in self._local_files]
        return json_hash([settings, state], 16)

    def total_bytes(self) -> int:
        """Return the bytes on disk that one pass reads, after `prepare`."""
        if self._is_remote:
            return sum(file.stat().st_size for file in self._folder.glob("*.jsonl"))
        return sum(state.st_size for _, state in self._local_files)

    def prepare(self, progress: ReportProgress) -> None:
        """Download the text that is not on this machine, once for every tokenizer and run."""
        if not self._is_remote or self._folder.exists():
            return
        self._folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(self._folder.with_suffix(".lock")):
            if self._folder.exists():  # another process was faster
                return
            unfinished = self._folder.with_suffix(".downloading")
            discard(unfinished)
            unfinished.mkdir()
            try:
                done = 0
                for split in self._splits:
                    done = self._download(split, unfinished / f"{split}.jsonl", progress, done)
                unfinished.rename(self._folder)
            finally:
                discard(unfinished)

    @cached_property
    def commit(self) -> str:
        """The commit of a name on the Hub, as found when it was first used; empty for what has none."""
        if not self._is_on_hub:
            return ""
        if self.revision and re.fullmatch("[0-9a-f]{40}", self.revision):
            return self.revision
        known = self._texts / f"revision-{json_hash([self.path, self.revision])}.json"
        if known.exists():
            return str(json.loads(known.read_text(encoding="utf-8"))["commit"])
        from huggingface_hub import HfApi

        with report_hub_errors(f"data.path={self.path}", _LOCALLY):
            commit = str(HfApi().dataset_info(self.path, revision=self.revision).sha)
        self._texts.mkdir(parents=True, exist_ok=True)
        replace_text(known, json.dumps({"path": self.path, "revision": self.revision, "commit": commit}, indent=1))
        return commit

    @property
    def revisions(self) -> dict[str, str]:
        """The commit of each name on the Hub that the documents come from."""
        return {self.path: self.commit} if self._is_on_hub else {}

    @property
    def _splits(self) -> list[str]:
        return [split for split in (self.split, self.val_split) if split is not None]

    @property
    def _is_format(self) -> bool:
        return self.path in FORMATS

    @property
    def _is_folder(self) -> bool:
        return not self._is_format and os.path.isdir(os.path.expanduser(self.path))

    @property
    def _is_on_hub(self) -> bool:
        return not (self._is_format or self._is_folder)

    @property
    def _is_remote(self) -> bool:
        return self._is_on_hub or "://" in json.dumps(_plain(self.data_files))

    @property
    def _saved(self) -> Path | None:
        """The file that marks a folder from `save_to_disk`."""
        if not self._is_folder:
            return None
        files = (Path(self.path).expanduser() / name for name in _SAVED)
        return next((file for file in files if file.is_file()), None)

    @property
    def _texts(self) -> Path:
        return Path(self.cache_dir).expanduser() / "texts"

    @property
    def _folder(self) -> Path:
        """Where downloaded text is kept."""
        return self._texts / self.fingerprint()[:16]

    def _read(self, split: str) -> Iterator[str]:
        """The documents of a split, from this machine."""
        if not self._is_remote:
            yield from self._bounded(split)
            return
        with (self._folder / f"{split}.jsonl").open(encoding="utf-8") as file:
            for line in file:
                yield json.loads(line)["text"]

    def _download(self, split: str, file: Path, progress: ReportProgress, done: int) -> int:
        """Write a split's documents into `file`, a JSON object per line; return the bytes of text so far."""
        sizes = getattr(self._builder.info, "splits", None) or {}
        expected = done + min((sizes[split].num_bytes or 0) if split in sizes else 0, self.max_bytes or 1 << 62)
        progress(done, expected, "downloading")
        reported = done
        with file.open("w", encoding="utf-8") as out:
            for text in self._bounded(split):
                out.write(json.dumps({"text": text}) + "\n")
                done += len(text.encode())
                if done - reported >= 1 << 20:
                    reported = done
                    progress(done, max(done, expected), "downloading")
        return done

    def _bounded(self, split: str) -> Iterator[str]:
        """The documents of a split from their source; of the one to train on, those within `max_bytes`."""
        size = 0
        for document in self._documents(split):
            yield document
            size += len(document.encode())
            if split == self.split and self.max_bytes is not None and size >= self.max_bytes:
                return

    def _documents(self, split: str) -> Iterator[str]:
        if self._files_of_text is not None:
            if self.document_start is not None:
                raise ConfigError(
                    f"data.document_start={self.document_start}: joins rows, and plain text has none; leave it out"
                )
            self._check_split(split, self._files_of_text)
            with self._reporting():
                for file in self._files_of_text[split]:
                    blocks = _read_text(file)
                    yield from ("".join(blocks),) if self.document_chars is None else cut(blocks, self.document_chars)
            return
        rows = self._rows(split)
        yield from rows if self.document_start is None else join_rows(rows, re.compile(self.document_start))

    def _rows(self, split: str) -> Iterator[str]:
        """The text of each row; empty for a row without."""
        key = f"data.text_field={self.text_field}"
        number = 0
        with self._reporting():
            for number, row in enumerate(self._stream(split), 1):
                if self.text_field not in row:
                    columns = ", ".join(row)
                    raise ConfigError(f"{key}: data.path={self.path} has no such column; choose one of [{columns}]")
                text = row[self.text_field]
                if not isinstance(text, str | None):
                    raise ConfigError(
                        f"{key}: row {number} of data.path={self.path} holds {type(text).__name__} there, not text; "
                        "choose another column"
                    )
                yield text or ""
        if number == 0:
            raise ConfigError(f"data.split={split}: has no rows in data.path={self.path}; choose another")

    def _stream(self, split: str) -> Iterable[dict[str, Any]]:
        datasets = _library()
        if self._saved is None:
            self._check_split(split, self._builder.config.data_files or {split: None})
            rows: Iterable[dict[str, Any]] = self._builder.as_streaming_dataset(split=split)
            return rows
        saved = datasets.load_from_disk(str(self._saved.parent))
        if isinstance(saved, datasets.DatasetDict):
            self._check_split(split, saved)
            saved = saved[split]
        elif split != self.split or str(saved.split or split) != split:
            self._check_split(split, {str(saved.split or self.split): None})
        rows = saved.to_iterable_dataset()
        return rows

    def _check_split(self, split: str, known: Mapping[Any, Any]) -> None:
        names = [str(name) for name in known]
        if split not in names:
            key = "split" if split == self.split else "val_split"
            raise ConfigError(
                f"data.{key}={split}: data.path={self.path} has the splits [{', '.join(names)}]; choose one"
            )

    @cached_property
    def _builder(self) -> "datasets.DatasetBuilder":
        """What reads the dataset's files."""
        datasets = _library()
        with self._reporting(), tempfile.TemporaryDirectory() as scratch:  # a stream caches nothing but a lock file
            return datasets.load_dataset_builder(
                os.path.expanduser(self.path),
                self.name,
                data_files=_plain(self.data_files),
                revision=self.commit or None,
                cache_dir=scratch,
            )

    @cached_property
    def _files_of_text(self) -> Mapping[str, list[str]] | None:
        """The files of each split of a dataset of plain text; None for other datasets."""
        if self._saved is not None:
            return None
        _library()
        from datasets.packaged_modules.text.text import Text

        return self._builder.config.data_files if isinstance(self._builder, Text) else None

    @cached_property
    def _local_files(self) -> list[tuple[str, os.stat_result]]:
        if self._saved is not None:
            files = [str(file) for file in sorted(self._saved.parent.rglob("*")) if file.is_file()]
        else:
            by_split = self._builder.config.data_files or {}
            files = sorted({str(file) for file in chain.from_iterable(by_split.values())})
        return [(file, os.stat(file)) for file in files]

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        """Turn what `datasets` raises into a ConfigError."""
        datasets = _library()
        from datasets.data_files import EmptyDatasetError

        path = f"data.path={self.path}"
        files = f" data.data_files={_plain(self.data_files)}" if self.data_files is not None else ""
        with report_hub_errors(path, _LOCALLY):
            try:
                yield
            except (FileNotFoundError, EmptyDatasetError) as error:
                if self._is_on_hub and not isinstance(error, EmptyDatasetError):
                    raise
                problem = "cannot be reached, or is not there" if self._is_remote else "no such files"
                remedy = _LOCALLY if self._is_remote else "correct it"
                raise ConfigError(f"{path}{files}: {problem} ({first_line(error)}); {remedy}") from error
            except UnicodeDecodeError as error:
                raise ConfigError(f"{path}{files}: not UTF-8 text ({error.reason}); convert it") from error
            except (ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
                if isinstance(error, ConfigError):
                    raise
                raise ConfigError(f"{path}{files}: cannot be read, {first_line(error)}; correct it") from error


def join_rows(rows: Iterable[str], start: re.Pattern[str]) -> Iterator[str]:
    """Join rows to documents; a row that `start` matches at its beginning begins one."""
    parts: list[str] = []
    for row in rows:
        if parts and start.match(row):
            yield "".join(parts)
            parts = []
        parts.append(row)
    yield "".join(parts)


def _read_text(file: str) -> Iterator[str]:
    """A text file in blocks, wherever it is, and unpacked if its name says so."""
    import fsspec

    with fsspec.open(file, "rt", encoding="utf-8-sig", newline="", compression="infer") as opened:
        yield from read_blocks(opened, f"data.data_files=[{file}]")


def _library() -> Any:
    """The library `datasets`, which takes a second to import, without its progress bars and reports of use."""
    import datasets

    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # it logs what it raises
    datasets.disable_progress_bars()
    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False
    return datasets


def _plain(data_files: DataFiles | None) -> Any:
    """Lists and mappings of OmegaConf as Python's."""
    if data_files is None or isinstance(data_files, str):
        return data_files
    if isinstance(data_files, Mapping):
        return {str(split): _plain(files) for split, files in data_files.items()}
    return [str(file) for file in data_files]
