"""Evaluate a trained run, or let it write: `python eval.py --help`."""

from llama_lab.cli import eval_command

if __name__ == "__main__":
    eval_command()
