"""What a run records of where it trained."""

import subprocess
from pathlib import Path
from unittest.mock import patch

import pytest

from llama_lab.runs import environment


@pytest.mark.parametrize(
    "error", [FileNotFoundError("git"), subprocess.CalledProcessError(128, "git"), subprocess.TimeoutExpired("git", 10)]
)
def test_a_run_without_an_answer_of_git_records_no_commit(error: Exception) -> None:
    with patch.object(subprocess, "run", side_effect=error):
        assert environment.git_state(Path(environment.__file__).parent) is None
