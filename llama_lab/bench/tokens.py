"""Building a token folder against `datasets.map`: `python -m llama_lab.bench tokens FILE...`.

Both encode the same documents with the same tokenizer, one after the other, each in a process of its own, so that peak
memory is measured separately.
"""

import os
import resource
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from llama_lab.data import BPETokenizer, TextFiles, TokenDataset
from llama_lab.data.index import TOKENIZER_NAME
from llama_lab.formatting import in_bytes

SAMPLE_BYTES, VAL_TOKENS = 33_554_432, 2_000_000  # the configs' own bounds


@dataclass(frozen=True)
class Encoding:
    """Size and cost of an encoding. peak_memory: bytes of the process, and of the largest process that it started."""

    text_bytes: int
    seconds: float
    peak_memory: tuple[int, int]

    @property
    def megabytes_per_second(self) -> float:
        """The speed."""
        return self.text_bytes / 1e6 / self.seconds

    def __str__(self) -> str:
        own, started = map(in_bytes, self.peak_memory)
        largest = f", {started} in the largest of its processes" if self.peak_memory[1] else ""
        size = f"{self.text_bytes / 1e6:,.0f} MB in {self.seconds:.1f} s"
        return f"{size}, {self.megabytes_per_second:.2f} MB/s; peak {own}{largest}"


def build(files: Sequence[str], folder: Path) -> tuple[Encoding, str]:
    """Build a token folder with the default settings, with its description; the tokenizer is left in `folder`."""
    dataset = TokenDataset.open_or_build(
        TextFiles(files), BPETokenizer(sample_bytes=SAMPLE_BYTES), 0.05, folder / "cache", val_tokens=VAL_TOKENS
    )
    assert dataset.times is not None
    (dataset.folder / TOKENIZER_NAME).rename(folder / TOKENIZER_NAME)
    return Encoding(dataset.times.tokenised_bytes, dataset.times.tokenising, peak_memory()), dataset.describe_build()


def map_with_datasets(files: Sequence[str], folder: Path) -> Encoding:
    """`datasets.map` over the documents as Arrow, in a process for each core."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # otherwise each process would use all cores
    import datasets
    from tokenizers import Tokenizer

    datasets.disable_progress_bars()
    text_bytes = sum(len(text.encode()) for text in TextFiles(files).documents())
    documents = ({"text": text} for text in TextFiles(files).documents())
    rows = datasets.Dataset.from_generator(lambda: documents, cache_dir=str(folder / "arrow"), fingerprint="documents")
    tokenizer = Tokenizer.from_file(str(folder / TOKENIZER_NAME))

    def encode(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        encodings = tokenizer.encode_batch_fast(batch["text"], add_special_tokens=False)
        return {"ids": [encoding.ids for encoding in encodings]}

    start = time.monotonic()
    rows.map(encode, batched=True, num_proc=os.cpu_count(), remove_columns=["text"], new_fingerprint="ids")
    return Encoding(text_bytes, time.monotonic() - start, peak_memory())


def peak_memory() -> tuple[int, int]:
    """Peak bytes of this process, and of the largest child process that has exited."""
    own, started = (resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return own * 1024, started * 1024  # Linux counts in KiB


def apart(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call the function in a new process and return its result."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def run(files: Sequence[str]) -> None:
    """Measure both and print them."""
    with tempfile.TemporaryDirectory() as folder:
        ours, description = apart(build, files, Path(folder))
        print(f"{description}\nours:         {ours}", flush=True)
        theirs = apart(map_with_datasets, files, Path(folder))
    print(f"datasets.map: {theirs}")
    print(f"ours encodes {ours.megabytes_per_second / theirs.megabytes_per_second:.2f} times as fast")
