"""The command line: `python -m benchmarks {components,decode,training,peers,gpu}`."""

import argparse
from argparse import SUPPRESS as UNSET
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from llama_lab.config.messages import exit_with
from llama_lab.errors import ConfigError, suggestion

COMPONENTS = ("norm", "ffn", "attention", "decoding", "caching")
GPU_PARTS = ("training", "loss", "attention", "decoding", "billion", "sharding", "ladder")


class Parser(argparse.ArgumentParser):
    """Shows defaults, and prints errors in one line, as our other commands do."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, formatter_class=argparse.ArgumentDefaultsHelpFormatter)

    def error(self, message: str) -> NoReturn:
        """Print `message` and exit."""
        exit_with(ConfigError(f"{message}; see {self.prog} --help"))


def main() -> None:
    """Run the command line: a command is the function `run` of its module, with the options as arguments."""
    options = vars(parser().parse_args())
    try:
        check(options)
        command = import_module(f"benchmarks.{options.pop('command')}")  # takes seconds
        command.run(**options)
    except ConfigError as error:
        exit_with(error)


def parser() -> Parser:
    """The parser of all commands."""
    shared = Parser(add_help=False)  # options of components and decode
    shared.add_argument(
        "--device", choices=("auto", "cpu", "gpu"), default="auto", help="auto: the GPU if there is one"
    )
    shared.add_argument("--out", type=Path, default=Path("bench"), metavar="FOLDER", help="output folder")
    shared.add_argument("--rounds", type=int, default=5, metavar="N", help="measurements of each")
    top = Parser(prog="python -m benchmarks", description="Benchmark parts and whole decoders on this machine.")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    about = "norms, feed-forwards, attention, decoding and caching, with the claims of textbooks"
    description = "Time the parts of a decoder: prints a table of each, and writes components.csv and a plot of each."
    components = commands.add_parser("components", parents=[shared], help=about, description=description)
    components.add_argument("--only", default=",".join(COMPONENTS), metavar="NAME,NAME", help="which of them")
    about = "sizes; tiny shows the output within seconds, but measures nothing"
    components.add_argument("--preset", choices=("full", "tiny"), default="full", help=about)
    about = "greedy decoding of a whole decoder, against transformers and the limit of memory bandwidth"
    description = (
        "Time greedy decoding, batch 1, by ours and by transformers: prints two tables, writes decode.csv, decode.png."
    )
    decode = commands.add_parser("decode", parents=[shared], help=about, description=description)
    about = "also ours with its step compiled"
    decode.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True, help=about)
    about = (
        "small: 6 layers of width 256, float32; tiny: shows the output, but measures nothing; 1b: Llama 3.2 1B in "
        "bfloat16, for a GPU"
    )
    decode.add_argument("--preset", choices=("small", "tiny", "1b"), default="small", help=about)
    about = "Lightning's training loop with our callbacks against a bare one, on the default model and data"
    commands.add_parser("training", help=about, description=f"Time {about}.")
    about = "training, or greedy decoding, against transformers, x-transformers and LitGPT, in alternating processes"
    peers = commands.add_parser("peers", help=about, description=f"Time {about}, on the CPU.")
    about = "small: 6 layers of width 256; default: the model and batch of `python train.py`; tiny: measures nothing"
    peers.add_argument("--preset", choices=("small", "default", "tiny"), default="small", help=about)
    peers.add_argument("--decode", action="store_true", help="batch 1 with a KV cache, instead of training")
    peers.add_argument("--compile", action="store_true", help="torch.compile every side's model")
    about = "bf16: autocast in training, weights in decoding"
    peers.add_argument("--precision", choices=("float32", "bf16"), default="float32", help=about)
    peers.add_argument("--rounds", type=int, default=5, metavar="N", help="measurements of each")
    peers.add_argument(
        "--threads", type=int, default=UNSET, metavar="N", help="of each side; PyTorch's choice otherwise"
    )
    about = "of all sides, as our runs do; without it, our training is measured both ways"
    peers.add_argument("--keep-freed-memory", action="store_true", help=about)
    about = "also LitGPT, by the Python of an environment that holds it"
    peers.add_argument("--litgpt", type=Path, default=UNSET, metavar="PYTHON", help=about)
    about = "what only a GPU can show, beside its goals: speeds, memory, kernels, and runs side by side"
    description = f"Measure {about}: prints each finding, and writes gpu.json and gpu.md. Ctrl-C keeps what was found."
    gpu = commands.add_parser("gpu", help=about, description=description)
    gpu.add_argument("--only", default=",".join(GPU_PARTS), metavar="NAME,NAME", help="which of them")
    gpu.add_argument("--minutes", type=float, default=9.0, metavar="N", help="no part begins after so many")
    gpu.add_argument("--out", type=Path, default=Path("bench"), metavar="FOLDER", help="output folder")
    return top


def check(options: dict[str, Any]) -> None:
    """Raise ConfigError unless components or parts exist, `rounds` is positive and `out` can be a folder."""
    known, kind = (GPU_PARTS, "part") if options["command"] == "gpu" else (COMPONENTS, "component")
    for name in options.get("only", known[0]).split(","):
        if name not in known:
            raise ConfigError(
                f"--only={options['only']}: {name or 'nothing'} is no {kind}{suggestion(name, known)}; "
                f"choose from {','.join(known)}"
            )
    for name in ("rounds", "threads"):
        if options.get(name, 1) < 1:
            raise ConfigError(f"--{name}={options[name]}: must be a positive whole number")
    if options.get("decode") and options["compile"]:
        raise ConfigError("--compile: peers decode eagerly; leave it out, or --decode")
    out = options.get("out", Path())
    if blocked := next((path for path in (out, *out.parents) if path.is_file()), None):
        raise ConfigError(f"--out={out}: {blocked} is a file; choose a folder")


if __name__ == "__main__":
    main()
