"""The README's first command: what a newcomer sees first."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import TRAIN, without_keys


@pytest.mark.process
@pytest.mark.matrix
@pytest.mark.timeout(1200)
def test_the_default_run_learns_far_more_of_the_standard_library_than_token_frequencies(tmp_path: Path) -> None:
    environment = without_keys(dict(os.environ), tmp_path)  # one thread: other tests have the other cores
    command = [sys.executable, str(TRAIN), "train.tokens=1e6", "train.evaluations=1"]  # of 1.6e6 and 4
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, stdin=subprocess.DEVNULL)
    summary = json.loads((tmp_path / "runs/llama/train.evaluations=1-train.tokens=1e6/seed=1/summary.json").read_text())
    assert summary["val/loss"] < summary["unigram_entropy"] - 2
    assert summary["tokens"] == 244 * 16 * 256
