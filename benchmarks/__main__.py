"""The command line: `python -m benchmarks {components,decode,peers,gpu}`, from a checkout."""

from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, BooleanOptionalAction
from importlib import import_module
from pathlib import Path

from llama_lab.config.messages import exit_with
from llama_lab.util.errors import ConfigError

COMPONENTS = ("norm", "ffn", "attention", "recurrence", "decoding", "states", "caching")
GPU_PARTS = ("training", "loss", "attention", "decoding", "billion", "sharding", "ladder")


def main() -> None:
    """Run the command line: a command is the function `run` of its module, with the options as arguments."""
    options = vars(parser().parse_args())
    try:
        import_module(f"benchmarks.{options.pop('command')}").run(**options)
    except ConfigError as error:
        exit_with(error)


def parser() -> ArgumentParser:
    """The parser of all commands."""
    out = ArgumentParser(add_help=False)
    out.add_argument("--out", type=Path, default=Path("bench"), metavar="FOLDER", help="where the CSV file goes")
    shared = ArgumentParser(add_help=False, parents=[out])
    shared.add_argument("--rounds", type=positive, default=5, metavar="N", help="measurements of each")
    device = ArgumentParser(add_help=False, parents=[shared])
    device.add_argument("--device", choices=("auto", "cpu", "gpu"), default="auto", help="auto: the GPU, if any")
    top = ArgumentParser(prog="python -m benchmarks", description="Measure parts and whole decoders on this machine.")
    commands = top.add_subparsers(dest="command", required=True)

    def add(name: str, about: str, parent: ArgumentParser) -> ArgumentParser:
        shown = ArgumentDefaultsHelpFormatter
        return commands.add_parser(name, parents=[parent], help=about, description=about, formatter_class=shown)

    tiny = "tiny: within seconds, but measures nothing"
    components = add("components", "the parts of a decoder, beside what textbooks claim", device)
    components.add_argument("--only", nargs="+", choices=COMPONENTS, default=COMPONENTS, help="which of them")
    components.add_argument("--preset", choices=("full", "tiny"), default="full", help=tiny)
    decode = add("decode", "greedy text, against transformers and the memory's bandwidth", device)
    decode.add_argument("--compile", action=BooleanOptionalAction, default=True, help="also ours, compiled")
    sizes = f"small: 6 layers of width 256; 1b: Llama 3.2 1B in bfloat16, for a GPU; {tiny}"
    decode.add_argument("--preset", choices=("small", "1b", "tiny"), default="small", help=sizes)
    peers = add("peers", "training or greedy text beside transformers and x-transformers, on the CPU", shared)
    sizes = f"small: 6 layers of width 256; default: the model and batch of `python train.py`; {tiny}"
    peers.add_argument("--preset", choices=("small", "default", "tiny"), default="small", help=sizes)
    peers.add_argument("--decode", action="store_true", help="batch 1 with a KV cache, instead of training")
    peers.add_argument("--compile", action="store_true", help="torch.compile every contender's model, in training")
    precisions = "bf16: autocast in training, weights in decoding"
    peers.add_argument("--precision", choices=("float32", "bf16"), default="float32", help=precisions)
    gpu = add("gpu", "what only a GPU can show, beside its goals; Ctrl-C keeps what was found", out)
    gpu.add_argument("--only", nargs="+", choices=GPU_PARTS, default=GPU_PARTS, help="which parts")
    gpu.add_argument("--minutes", type=float, default=9.0, metavar="N", help="no part begins after so many")
    return top


def positive(text: str) -> int:
    """A positive whole number. Raises ValueError."""
    if int(text) < 1:
        raise ValueError(text)
    return int(text)


if __name__ == "__main__":
    main()
