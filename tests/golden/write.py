"""Make the golden files anew: `python -m tests.golden.write`, or some of them, with options of pytest (`-k recipe`)."""

import sys

import pytest

from tests.golden import files

if __name__ == "__main__":
    files.writing = True
    sys.exit(pytest.main([str(files.HERE), "-p", "no:cacheprovider", *sys.argv[1:]]))
