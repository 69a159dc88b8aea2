"""Sources loaded by the library `datasets`: from the Hugging Face Hub, or files of its formats."""

import json
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml
from filelock import FileLock

from llama_lab.util.errors import ConfigError, first_line, require_positive
from llama_lab.util.files import read_stamped, replace_text, stamped

from .folders import check_seal, json_hash, open_or_build, seal
from .hub import FORMATS, is_hub_name, report_hub_errors
from .source import Files, ReportProgress, TextFiles, cut, encoded, numbered, read_blocks, row_texts

_LOCALLY = "point at files on this machine, as data=hub data.path=parquet 'data.data_files=[...]'"
_SAVED = ("dataset_dict.json", "state.json")  # in a folder that `save_to_disk` wrote: of several splits, of one


@dataclass
class HubDataset(Files):
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
    data_files: str | list[str] | dict[str, Any] | None = None
    cache_dir: str = field(default="~/.cache/llama_lab", repr=False)

    def __post_init__(self) -> None:
        here, files = Path(self.path).expanduser(), self.data_files
        is_format = self.path in FORMATS
        self._is_on_hub = not (is_format or here.is_dir())
        self._is_remote = self._is_on_hub or "://" in json.dumps(files)
        self._is_saved = not is_format and any((here / name).is_file() for name in _SAVED)
        self._texts = Path(self.cache_dir).expanduser() / "texts"
        self._path = path = f"data.path={self.path}"
        self._named = path + (f" data.data_files={files}" if files is not None else "")
        require_positive("data.max_bytes", self.max_bytes)
        require_positive("data.document_chars", self.document_chars)
        if self.split == self.val_split:
            raise ConfigError(f"data.val_split={self.val_split}: is the split to train on; name another, or null")
        try:
            self._start = re.compile(self.document_start or "")
        except re.error as error:
            raise ConfigError(f"data.document_start={self.document_start}: is no regular expression, {error}") from None
        if self._is_on_hub and (here.is_file() or not is_hub_name(self.path)):
            raise ConfigError(f"{path}: no such folder, and no name on the Hub; {_LOCALLY}")
        if is_format and files is None:
            raise ConfigError(f"{path}: is a format; name its files, as 'data.data_files=[a.{self.path}]'")
        for key, has_use in {"revision": self._is_on_hub, "name": not (is_format or self._is_saved)}.items():
            if getattr(self, key) is not None and not has_use:
                raise ConfigError(f"data.{key}={getattr(self, key)}: {path} has none; leave it out")

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
        settings = [*text, self.document_chars, self.max_bytes, self.data_files]
        return json_hash([settings, self.commit if self._is_remote else self.states()], 16)

    def prepare(self, progress: ReportProgress) -> None:
        """Download the text that is not on this machine, once for every tokenizer and run."""
        if self._is_remote:
            open_or_build(self._folder, partial(check_seal, self._folder), partial(self._download, progress=progress))

    @cached_property
    def commit(self) -> str:
        """The commit of a name on the Hub, as found when it was first used; empty for what has none."""
        if not self._is_on_hub:
            return ""
        if self.revision and re.fullmatch("[0-9a-f]{40}", self.revision):
            return self.revision
        known = self._texts / f"revision-{json_hash([self.path, self.revision])}.json"
        if not known.exists():
            self._texts.mkdir(parents=True, exist_ok=True)
            with FileLock(known.with_suffix(".lock")):  # of runs that start together, one looks it up
                if not known.exists():
                    self._look_up(known)
        try:
            return str(yaml.safe_load(read_stamped(known))["commit"])
        except (OSError, ValueError, TypeError, KeyError, yaml.YAMLError) as error:
            remedy = "restore it, or delete it for the newest commit"
            raise ConfigError(f"{self._path}: {known} is damaged, {first_line(error)}; {remedy}") from error

    def _look_up(self, known: Path) -> None:
        """Write the commit of a name on the Hub, as it is now, into a file."""
        from huggingface_hub import HfApi

        with report_hub_errors(self._path, _LOCALLY):
            commit = str(HfApi().dataset_info(self.path, revision=self.revision).sha)
        found = {"path": self.path, "revision": self.revision, "commit": commit}
        replace_text(known, stamped(json.dumps(found, indent=1)))

    @property
    def revisions(self) -> dict[str, str]:
        """The commit of each name on the Hub that the documents come from."""
        return {self.path: self.commit} if self._is_on_hub else {}

    @property
    def _folder(self) -> Path:
        """Where downloaded text is kept."""
        return self._texts / self.fingerprint()[:16]

    def _read(self, split: str) -> Iterator[str]:
        """The documents of a split, from this machine."""
        downloaded = TextFiles(str(self._folder / f"{split}.jsonl")) if self._is_remote else None
        return downloaded.documents() if downloaded else self._bounded(split)

    def _download(self, folder: Path, progress: ReportProgress) -> None:
        """Write the documents of each split into a file in `folder`, a JSON object per line."""
        splits = [split for split in (self.split, self.val_split) if split is not None]

        def written() -> Iterator[str]:
            for split in splits:
                with (folder / f"{split}.jsonl").open("w", encoding="utf-8") as file:
                    for text in self._bounded(split):
                        file.write(json.dumps({"text": text}) + "\n")
                        yield text

        published = self._builder.info.splits or {}
        total = self.max_bytes or sum(published[split].num_bytes for split in splits if split in published)
        for _ in encoded(written(), total, progress, "downloading"):
            pass
        seal(folder)

    def _bounded(self, split: str) -> Iterator[str]:
        """The documents of a split from their source; of the one to train on, those within `max_bytes`."""
        size = 0
        with report_hub_errors(self._named, _LOCALLY):
            for document in self._documents(split):
                yield document
                size += len(document.encode())
                if split == self.split and self.max_bytes is not None and size >= self.max_bytes:
                    return

    def _documents(self, split: str) -> Iterator[str]:
        import fsspec
        from datasets.packaged_modules.text.text import Text

        if self._is_saved:
            saved = _library().load_from_disk(os.path.expanduser(self.path))
            known = saved if isinstance(saved, dict) else {str(saved.split or self.split): saved}
        else:
            known = self._builder.config.data_files or {split: None}
        if split not in map(str, known):
            key, names = "split" if split == self.split else "val_split", ", ".join(map(str, known))
            raise ConfigError(f"data.{key}={split}: {self._path} has the splits [{names}]; choose one")
        if not self._is_saved and isinstance(self._builder, Text):
            if self.document_start is not None:
                key = f"data.document_start={self.document_start}"
                raise ConfigError(f"{key}: joins rows, and plain text has none; leave it out")
            for file in known[split]:
                with fsspec.open(file, "rt", encoding="utf-8-sig", newline="", compression="infer") as opened:
                    yield from cut(read_blocks(opened, f"data.data_files=[{file}]"), self.document_chars)
            return
        stream = known[split].to_iterable_dataset() if self._is_saved else self._builder.as_streaming_dataset(split)
        rows = row_texts(numbered(stream), self.text_field, self._path, may_be_null=True)
        yield from rows if self.document_start is None else join_rows(rows, self._start)

    @cached_property
    def _builder(self) -> Any:
        """What reads the dataset's files."""
        datasets = _library()
        with report_hub_errors(self._named, _LOCALLY), TemporaryDirectory() as scratch:  # for a lock file alone
            return datasets.load_dataset_builder(
                os.path.expanduser(self.path),
                self.name,
                data_files=self.data_files,
                revision=self.commit or None,
                cache_dir=scratch,
            )

    @property
    def _paths(self) -> list[Path]:
        """The files that are read, after `prepare`."""
        if self._is_remote:
            return [*self._folder.glob("*.jsonl")]
        if self._is_saved:
            return [file for file in sorted(Path(self.path).expanduser().rglob("*")) if file.is_file()]
        return [Path(file) for file in sorted({*chain(*(self._builder.config.data_files or {}).values())})]


def join_rows(rows: Iterable[str], start: re.Pattern[str]) -> Iterator[str]:
    """Join rows to documents; a row that `start` matches at its beginning begins one."""
    parts: list[str] = []
    for row in rows:
        if parts and start.match(row):
            yield "".join(parts)
            parts = []
        parts.append(row)
    yield "".join(parts)


def _library() -> Any:
    """The library `datasets`, which takes a second to import, without its progress bars and reports of use."""
    import datasets

    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # it logs what it raises
    datasets.disable_progress_bars()
    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False
    return datasets
