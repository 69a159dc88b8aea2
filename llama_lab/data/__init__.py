"""From text to windows of tokens: sources, tokenizers, token folders, windows. `data.module` is for Lightning."""

from llama_lab.data.hf_tokenizer import HFTokenizer
from llama_lab.data.hub_dataset import HubDataset
from llama_lab.data.source import Source, StandardLibrary, TextFiles
from llama_lab.data.tokenizer import BPETokenizer, ByteTokenizer, CharTokenizer, TextTokenizer, TokenizerFactory
from llama_lab.data.tokens import TokenDataset
from llama_lab.data.windows import IGNORE, TrainWindows, ValWindows

__all__ = [
    "IGNORE",
    "BPETokenizer",
    "ByteTokenizer",
    "CharTokenizer",
    "HFTokenizer",
    "HubDataset",
    "Source",
    "StandardLibrary",
    "TextFiles",
    "TextTokenizer",
    "TokenDataset",
    "TokenizerFactory",
    "TrainWindows",
    "ValWindows",
]
