"""Evaluate a trained run: `python eval.py runs/llama/base/seed=1`."""

from llama_lab.cli import eval_command

if __name__ == "__main__":
    eval_command()
