"""The Hugging Face Hub: names on it, and its errors as messages for the user."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from llama_lab.util.errors import ConfigError, first_line


def is_hub_name(path: str) -> bool:
    """Whether a repository of the Hub may have this name: `gpt2`, or `owner/name`."""
    return re.fullmatch(r"[\w.-]+(/[\w.-]+)?", path) is not None


@contextmanager
def report_hub_errors(setting: str, local: str) -> Iterator[None]:
    """Turn errors of the Hub into a ConfigError that begins with `setting`, which names what was looked for.

    local: what to do without the Hub.
    """
    from datasets.exceptions import DatasetNotFoundError  # half a second to import
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        chain = list(_causes(error))
        if any(isinstance(e, GatedRepoError) for e in chain) or "gated dataset" in str(error):
            raise ConfigError(
                f"{setting}: its owner must let you in; ask on its page of the Hugging Face Hub, and then run "
                "`hf auth login`"
            ) from error
        if any(isinstance(e, RepositoryNotFoundError) for e in chain):
            raise ConfigError(
                f"{setting}: the Hugging Face Hub has none of this name that you may see; correct it, run "
                f"`hf auth login` if it is private, or {local}"
            ) from error
        network_errors = (ConnectionError, HfHubHTTPError, HfHubHTTPError.__bases__[0])  # the last is its client's
        if any(isinstance(e, network_errors) for e in chain):
            raise ConfigError(
                f"{setting}: the Hugging Face Hub cannot be reached ({first_line(chain[-1])}); {local}"
            ) from error
        if isinstance(error, DatasetNotFoundError):
            raise ConfigError(f"{setting}: {' '.join(str(error).split())}; correct it, or {local}") from error
        raise


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
