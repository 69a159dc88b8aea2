"""Train one model, or sweep over many: `python train.py --help`."""

from llama_lab.cli import train_command

if __name__ == "__main__":
    train_command()
