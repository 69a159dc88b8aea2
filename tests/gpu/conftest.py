"""Every test here needs a GPU, and is skipped where there is none."""

import os
from collections.abc import Iterator

import pytest
import torch

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts; deterministic products need it


@pytest.fixture(autouse=True)
def gpu() -> torch.device:
    """The device."""
    if not torch.cuda.is_available():
        pytest.skip("PyTorch finds no CUDA device here")
    return torch.device("cuda")


@pytest.fixture
def deterministic() -> Iterator[None]:
    """Backward passes of attention add in a fixed order, which they do not by default."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    """No test meets the compiled code of another."""
    yield
    torch.compiler.reset()
