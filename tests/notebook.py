"""Runs docs/library.ipynb in a fresh kernel; `python -m tests.notebook` writes its outputs into the file."""

import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "docs" / "library.ipynb"
LARGEST = 50_000  # characters of an output that is committed: a report is left to its text
COMMAND = f"#!{sys.executable}\nfrom llama_lab.cli import train_command\n\ntrain_command()\n"


def executed(notebook: NotebookNode, cwd: Path, environment: dict[str, str]) -> NotebookNode:
    """The notebook with the outputs that it has in an empty folder. Raises CellExecutionError."""
    command = cwd / "bin" / "llama-lab-train"
    command.parent.mkdir()
    command.write_text(COMMAND)
    command.chmod(0o755)
    paths = {"PATH": os.pathsep.join([str(command.parent), environment["PATH"]]), "PYTHONPATH": str(ROOT)}
    settings = {"timeout": 200, "kernel_name": "python3", "record_timing": False}
    client = NotebookClient(notebook, resources={"metadata": {"path": str(cwd)}}, **settings)
    client.execute(env={**environment, **paths})
    return notebook


def without_large_outputs(notebook: NotebookNode) -> NotebookNode:
    """The notebook, and of each large output only its text."""
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if len(output.get("data", {}).get("text/html", "")) > LARGEST:
                del output.data["text/html"]
    return notebook


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        done = executed(nbformat.read(NOTEBOOK, as_version=4), Path(folder), dict(os.environ))
        nbformat.write(without_large_outputs(done), NOTEBOOK)
