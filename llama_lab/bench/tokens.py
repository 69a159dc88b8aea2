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
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

from llama_lab.data import BPETokenizer, TextFiles, TokenDataset
from llama_lab.data.index import TOKENIZER_NAME
from llama_lab.formatting import in_bytes

SAMPLE_BYTES, VAL_TOKENS = 33_554_432, 2_000_000  # the configs' own bounds


class Encoding(NamedTuple):
    """What an encoding took. peak_memory: bytes of the process, and of the largest process that it started."""

    megabytes: float
    seconds: float
    peak_memory: tuple[int, int]

    def __str__(self) -> str:
        own, started = map(in_bytes, self.peak_memory)
        largest = f", {started} in the largest of its processes" if self.peak_memory[1] else ""
        speed = f"{self.megabytes / self.seconds:.2f} MB/s"
        return f"{self.megabytes:,.0f} MB in {self.seconds:.1f} s, {speed}; peak {own}{largest}"


def build(files: Sequence[str], folder: Path) -> tuple[Encoding, str]:
    """Build a token folder with the default settings, with its description; the tokenizer is left in `folder`."""
    dataset = TokenDataset.open_or_build(
        TextFiles(files), BPETokenizer(sample_bytes=SAMPLE_BYTES), 0.05, folder / "cache", val_tokens=VAL_TOKENS
    )
    assert dataset.times is not None
    (dataset.folder / TOKENIZER_NAME).rename(folder / TOKENIZER_NAME)
    took = Encoding(dataset.times.tokenised_bytes / 1e6, dataset.times.tokenising, peak_memory())
    return took, dataset.describe_build()


def map_with_datasets(files: Sequence[str], folder: Path) -> Encoding:
    """`datasets.map` over the documents as Arrow, in a process for each core."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # otherwise each process would use all cores
    import datasets
    from tokenizers import Tokenizer

    datasets.disable_progress_bars()
    megabytes = sum(len(text.encode()) for text in TextFiles(files).documents()) / 1e6
    documents = ({"text": text} for text in TextFiles(files).documents())
    rows = datasets.Dataset.from_generator(lambda: documents, cache_dir=str(folder / "arrow"), fingerprint="documents")
    tokenizer = Tokenizer.from_file(str(folder / TOKENIZER_NAME))

    def encode(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        encodings = tokenizer.encode_batch_fast(batch["text"], add_special_tokens=False)
        return {"ids": [encoding.ids for encoding in encodings]}

    start = time.monotonic()
    rows.map(encode, batched=True, num_proc=os.cpu_count(), remove_columns=["text"], new_fingerprint="ids")
    return Encoding(megabytes, time.monotonic() - start, peak_memory())


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
    ratio = ours.megabytes / ours.seconds / (theirs.megabytes / theirs.seconds)
    print(f"ours encodes {ratio:.2f} times as fast")
