"""Names on the Hugging Face Hub, its errors as messages for users, and paths of data."""

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from gzip import BadGzipFile
from pathlib import Path
from re import fullmatch
from typing import Any

from llama_lab.util.errors import ConfigError, first_line

FORMATS = ("parquet", "json", "arrow", "csv", "text")  # that `data.path` may name, for `data.data_files`


def is_hub_name(path: str) -> bool:
    """Whether a repository of the Hub may have this name: `gpt2`, or `owner/name`."""
    return fullmatch(r"[\w.-]+(/[\w.-]+)?", path) is not None


@contextmanager
def report_hub_errors(setting: str, local: str) -> Iterator[None]:
    """Turn errors of the Hub, or of reading a dataset, into a ConfigError that begins with `setting`, which names it.

    local: what to do without the Hub.
    """
    from datasets.exceptions import DatasetsError  # half a second to import
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        chain: list[BaseException] = [error]
        while cause := chain[-1].__cause__ or chain[-1].__context__:
            chain.append(cause)

        def is_any(*kinds: type[BaseException]) -> bool:
            return any(isinstance(one, kinds) for one in chain)

        if is_any(GatedRepoError) or "gated dataset" in str(error):
            problem = "its owner must let you in; ask on its page of the Hugging Face Hub, and then run `hf auth login`"
        elif is_any(RepositoryNotFoundError):
            problem = "the Hugging Face Hub has none of this name that you may see; correct it, run `hf auth login` if "
            problem += f"it is private, or {local}"
        elif is_any(ConnectionError, HfHubHTTPError, HfHubHTTPError.__bases__[0]):  # the last is its client's
            problem = f"the Hugging Face Hub cannot be reached ({first_line(chain[-1])}); {local}"
        elif isinstance(error, FileNotFoundError):
            problem = f"not found, or out of reach ({first_line(error)}); correct it, or {local}"
        elif isinstance(error, ValueError | RuntimeError | DatasetsError | EOFError | zlib.error | BadGzipFile):
            problem = f"cannot be read, {first_line(error)}; correct it"
        else:
            raise
        raise ConfigError(f"{setting}: {problem}") from error


def make_absolute(node: dict[str, Any]) -> None:
    """Make the paths in a resolved config of data or tokenizer absolute, also those in sources and parts."""
    is_format = node.get("path") in FORMATS
    for key, value in node.items():
        if key == "files" or (key == "val_split" and isinstance(value, list)):
            node[key] = _absolute([value] if isinstance(value, str) else value)
        elif (key == "data_files" and is_format) or (
            key == "path" and not is_format and Path(value).expanduser().exists()
        ):
            node[key] = _absolute(value)
        elif isinstance(value, dict):
            make_absolute(value)


def _absolute(files: Any) -> Any:
    """Paths made absolute, in a list, by split, or alone; addresses stay as they are."""
    if isinstance(files, dict):
        return {split: _absolute(of_split) for split, of_split in files.items()}
    if isinstance(files, list):
        return [_absolute(file) for file in files]
    return files if files is None or "://" in files else str(Path(files).expanduser().absolute())
