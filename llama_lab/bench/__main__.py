"""The command line of the benchmarks: `python -m llama_lab.bench {components,decode,training,tokens}`."""

import argparse
from pathlib import Path
from typing import NoReturn

from llama_lab.config.messages import exit_with
from llama_lab.errors import ConfigError, suggestion

COMPONENTS = ("norm", "ffn", "attention", "decoding", "caching")


class Parser(argparse.ArgumentParser):
    """Prints errors in one line, as our other commands do."""

    def error(self, message: str) -> NoReturn:
        """Print `message` and exit."""
        exit_with(ConfigError(f"{message}; see {self.prog} --help"))


def main() -> None:
    """Run the command line."""
    args = parser().parse_args()
    try:
        args.run(args)
    except ConfigError as error:
        exit_with(error)


def parser() -> Parser:
    """The parser of all commands."""
    top = Parser(prog="python -m llama_lab.bench", description="Benchmark parts and whole decoders on this machine.")
    commands = top.add_subparsers(required=True, metavar="COMMAND")
    components = add_command(
        commands,
        "components",
        "norms, feed-forwards, attention, decoding and caching, with the claims of textbooks",
        "Time the parts of a decoder: prints a table of each, and writes components.csv and a plot of each.",
    )
    components.add_argument(
        "--only", default=",".join(COMPONENTS), metavar="NAME,NAME", help="which of them (default: %(default)s)"
    )
    components.add_argument(
        "--preset",
        choices=("full", "tiny"),
        default="full",
        help="sizes; tiny shows the output within seconds, but measures nothing (default: %(default)s)",
    )
    components.set_defaults(run=run_components)
    decode = add_command(
        commands,
        "decode",
        "greedy decoding of a whole decoder, against transformers and the limit of memory bandwidth",
        "Time greedy decoding, batch 1, by ours and by transformers: prints two tables, writes decode.csv, decode.png.",
    )
    decode.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="also ours with its step compiled (default: --compile)",
    )
    decode.add_argument(
        "--preset",
        choices=("small", "tiny", "1b"),
        default="small",
        help="small: 6 layers of width 256, float32; tiny: shows the output, but measures nothing; "
        "1b: Llama 3.2 1B in bfloat16, for a GPU (default: %(default)s)",
    )
    decode.set_defaults(run=run_decode)
    about = "Lightning's training loop with our callbacks against a bare one, on the default model and data"
    commands.add_parser("training", help=about, description=f"Time {about}.").set_defaults(run=run_training)
    about = "tokenising your text against datasets.map, with the same tokenizer and as many processes as cores"
    tokens = commands.add_parser("tokens", help=about, description=f"Time {about}.")
    tokens.add_argument("files", nargs="+", metavar="FILE", help="text, .jsonl, .json or .parquet files, or patterns")
    tokens.set_defaults(run=run_tokens)
    return top


def add_command(commands: "argparse._SubParsersAction[Parser]", name: str, about: str, description: str) -> Parser:
    """Add a command with the options that `components` and `decode` share."""
    command = commands.add_parser(name, help=about, description=description)
    command.add_argument(
        "--device",
        choices=("auto", "cpu", "gpu"),
        default="auto",
        help="auto: the GPU if there is one (default: %(default)s)",
    )
    command.add_argument(
        "--out", type=Path, default=Path("bench"), metavar="FOLDER", help="output folder (default: %(default)s)"
    )
    command.add_argument(
        "--rounds", type=int, default=5, metavar="N", help="measurements of each (default: %(default)s)"
    )
    return command


def run_components(args: argparse.Namespace) -> None:
    """Run the command `components`."""
    names = args.only.split(",")
    for name in names:
        if name not in COMPONENTS:
            near = suggestion(name, COMPONENTS)
            raise ConfigError(
                f"--only={args.only}: {name or 'nothing'} is no component{near}; choose from {','.join(COMPONENTS)}"
            )
    check(args)
    from .components import PRESETS, run  # takes seconds to import
    from .subjects import choose_device

    run(names, PRESETS[args.preset], args.rounds, choose_device(args.device), args.out)


def run_decode(args: argparse.Namespace) -> None:
    """Run the command `decode`."""
    check(args)
    from .decode import run  # takes seconds to import
    from .subjects import PRESETS, choose_device

    run(PRESETS[args.preset], args.compile, args.rounds, choose_device(args.device), args.out)


def run_training(_: argparse.Namespace) -> None:
    """Run the command `training`."""
    from .training import main as run  # takes seconds to import

    run()


def run_tokens(args: argparse.Namespace) -> None:
    """Run the command `tokens`."""
    from .tokens import run  # takes a second to import

    run(args.files)


def check(args: argparse.Namespace) -> None:
    """Raise ConfigError unless `rounds` is positive and `out` can be a folder."""
    if args.rounds < 1:
        raise ConfigError(f"--rounds={args.rounds}: must be a positive whole number")
    if blocked := next((path for path in (args.out, *args.out.parents) if path.is_file()), None):
        raise ConfigError(f"--out={args.out}: {blocked} is a file; choose a folder")


if __name__ == "__main__":
    main()
