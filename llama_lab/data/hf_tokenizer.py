"""Tokenizers trained elsewhere, from a file, a folder or the Hugging Face Hub."""

import logging
from pathlib import Path

from llama_lab.util.errors import ConfigError, first_line

from .hub import is_hub_name, report_hub_errors
from .tokenizer import SPECIAL_TOKENS_MAP, TOKENIZER_CONFIG, TOKENIZER_NAME, TextTokenizer, read_tokenizer

log = logging.getLogger(__name__)

# What many tokenizers change in a text or have no id for, each with a text that shows it.
PROBES = {
    "capital letters": "Aa",
    "a leading space": " a",
    "repeated spaces": "a  b",
    "line breaks": "a\nb\r\n",
    "tabs": "a\tb",
    "decomposed accents": "e\u0301",
    "full-width letters": "\uff21",
    "Chinese": "漢字",
    "emoji": "🙂",
    "control characters": "a\x00b",
}


class HFTokenizer(TextTokenizer):
    """Any `tokenizer.json`, used as it is, without the tokens that its post-processor would put around a text.

    path: the file, a folder with one, or a name on the Hub. end_of_text: see `TextTokenizer.load`.
    Raises ConfigError unless there is such a file, with an end-of-text token; warns of text that it does not keep.
    """

    def __init__(self, path: str, end_of_text: str | None = None) -> None:
        file = find_tokenizer(path)
        try:
            super().__init__(*read_tokenizer(file, end_of_text))
            lost = [name for name, text in PROBES.items() if self.decode(self.encode(text)) != text]
        except ConfigError:
            raise
        except Exception as error:  # tokenizers raises nothing more specific
            raise ConfigError(f"tokenizer.path={path}: {file} cannot be used, {first_line(error)}") from error
        if lost:
            log.warning(
                "tokenizer.path=%s: does not keep %s; bits per byte is then the loss on the text as it is encoded, "
                "over the bytes of the text as it was: do not compare it with that of other tokenizers",
                path,
                ", ".join(lost),
            )


def find_tokenizer(path: str) -> Path:
    """The tokenizer.json at `path`, downloaded if that is a name on the Hub. Raises ConfigError if there is none.

    If the Hub is out of reach, that of the last download is used.
    """
    here = Path(path).expanduser()
    if here.is_file():
        return here
    if not here.is_dir():
        if not is_hub_name(path) or path.endswith(".json"):
            raise ConfigError(f"tokenizer.path={path}: no such file or folder; paths are relative to {Path.cwd()}")
        from huggingface_hub import snapshot_download

        files = [TOKENIZER_NAME, TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP]
        with report_hub_errors(f"tokenizer.path={path}", "name a tokenizer.json, or a folder that holds one"):
            here = Path(snapshot_download(path, allow_patterns=files))
    if not (here / TOKENIZER_NAME).is_file():
        raise ConfigError(
            f"tokenizer.path={path}: has no {TOKENIZER_NAME}; write one with "
            f"transformers.AutoTokenizer.from_pretrained({path!r}).save_pretrained(FOLDER), and name that folder"
        )
    return here / TOKENIZER_NAME
