"""Processes of their own, for what depends on the environment that a process starts with."""

import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from unittest.mock import patch


@contextmanager
def process(**variables: str) -> Iterator[ProcessPoolExecutor]:
    """A fresh process with these variables in its environment, that does what is submitted; it ends with the block."""
    with ProcessPoolExecutor(1, get_context("spawn")) as executor:
        with patch.dict(os.environ, variables):
            executor.submit(os.getpid).result()  # starts it
        yield executor
