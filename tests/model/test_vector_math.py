"""The first call of a vectorised function must not be made by several threads at once."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from llama_lab.model import VECTOR_MATH

# Imports each argument in a fork of a process that has imported PyTorch, which takes seconds, and has computed nothing.
# Prints every operation that PyTorch carries out meanwhile, with its elements.
RECORD = """
import importlib, os, sys, torch
from torch.utils._python_dispatch import TorchDispatchMode

class Record(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        print(module, func.overloadpacket.__name__, out.dtype, out.numel())
        return out

for module in sys.argv[1:]:
    fork = os.fork()
    if not fork:
        with Record():
            importlib.import_module(module)
        sys.exit()
    assert os.waitpid(fork, 0)[1] == 0
"""

MODULES = ["llama_lab.model", "llama_lab.training.command"]


@pytest.mark.process
def test_the_first_operations_of_a_process_choose_kernels_one_element_at_a_time() -> None:
    command = [sys.executable, "-c", RECORD, *MODULES]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=250)
    recorded = [line.split() for line in done.stdout.splitlines()]
    for module in MODULES:
        operations = [operation for importing, *operation in recorded if importing == module]
        assert {elements for _, _, elements in operations} == {"1"}, module
        for dtype in ("torch.float32", "torch.float64"):
            assert {*VECTOR_MATH.split()} <= {name for name, found, _ in operations if found == dtype}


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="this PyTorch has no oneMKL")
@pytest.mark.slow
def test_every_function_that_pytorch_hands_to_mkl_is_called() -> None:
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    compiled = library.read_bytes()
    mkl = {"Acos", "Asin", "Atan", "Cos", "Erf", "Erfc", "ErfInv", "Exp", "Ln", "Log10", "Log2", "Sin", "Sqrt", "Tan"}
    mkl |= {"Tanh", "Trunc", "Log1p", "Expm1", "Sinh", "Cosh", "Pow", "CdfNorm", "TGamma", "LGamma", "Asinh", "Acosh"}
    used = {name for name in mkl if f"\0vms{name}\0".encode() in compiled}
    assert {name.lower().replace("ln", "log") for name in used} == {*VECTOR_MATH.split()}
