"""Paths in the config of a corpus."""

from pathlib import Path
from typing import Any

FORMATS = ("parquet", "json", "arrow", "csv", "text")  # that `data.path` may name, for `data.data_files`


def make_absolute(data: dict[str, Any]) -> None:
    """Make the paths in a resolved config of `data` absolute, also those of its source and of a mixture's parts."""
    for value in data.values():
        if isinstance(value, dict):
            make_absolute(value)
    if "files" in data:
        data["files"] = _absolute([data["files"]] if isinstance(data["files"], str) else data["files"])
    if "path" in data:
        here = Path(data["path"]).expanduser()
        if data["path"] in FORMATS and "data_files" in data:
            data["data_files"] = _absolute(data["data_files"])
        elif here.exists():
            data["path"] = str(here.absolute())


def _absolute(files: Any) -> Any:
    """Paths made absolute, in a list, by split, or alone; addresses stay as they are."""
    if isinstance(files, dict):
        return {split: _absolute(of_split) for split, of_split in files.items()}
    if isinstance(files, list):
        return [_absolute(file) for file in files]
    return files if files is None or "://" in files else str(Path(files).expanduser().absolute())
