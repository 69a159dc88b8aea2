"""The commands: Hydra composes the config, we train or evaluate, and user errors are printed in one line."""

import os
import shlex
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from llama_lab.config.components import CONF_DIR, register_resolvers, report_component_errors
from llama_lab.config.composing import compose, run_config
from llama_lab.config.explain import HELP, explain, read_help
from llama_lab.config.grammar import is_launched, override_key, to_hydra
from llama_lab.config.messages import USER_ERRORS, exit_with, is_unreadable, one_line
from llama_lab.config.schema import check_kinds, default_settings, groups
from llama_lab.config.trust import Trust
from llama_lab.launching.process import first_rank_first, follow_launcher, starts_over
from llama_lab.training.prepare import (
    OF_MODES,
    check_complete,
    check_devices,
    check_effects,
    check_run,
    check_single,
    requested_run,
    with_recorded,
)
from llama_lab.util.errors import (
    FAILED,
    INTERRUPTED,
    ConfigError,
    FinishedRunError,
    RunFailedError,
    first_line,
    suggestion,
)
from llama_lab.util.files import report_disk_errors

if TYPE_CHECKING:
    from llama_lab.training.run import Run

Choices = Mapping[str, str | None]  # the option of every config group


def main() -> None:
    """`llama-lab COMMAND ...`."""
    name = sys.argv[1] if len(sys.argv) > 1 else HELP[0]
    if name in HELP:
        print("usage: llama-lab COMMAND ...; for more on one, llama-lab COMMAND --help\n")
        print("\n".join(f"  {name:13}{about}" for name, (_, about) in COMMANDS.items()))
    elif name not in COMMANDS:
        exit_with(ConfigError(f"{name}: no such command{suggestion(name, COMMANDS)}; see llama-lab --help"))
    else:
        sys.argv[:2] = [f"{sys.argv[0]}-{name}"]
        COMMANDS[name][0]()


def train_command() -> None:
    """`python train.py`, or `llama-lab-train` if the package is installed. HYDRA_FULL_ERROR=1 shows tracebacks."""
    follow_launcher()
    anew = " without overwrite=true" if any(map(starts_over, sys.argv)) else ""
    on_interrupt = f"run the same command{anew} to resume from the last checkpoint, if there is one"
    hydra_command(train_task, "config", on_interrupt)


def eval_command() -> None:
    """`python eval.py run=RUN`, or `llama-lab-eval` if the package is installed."""
    for before, argument in pairwise(sys.argv):
        # A flag may take a folder. Path.is_dir raises for names that are too long.
        if not before.startswith("-") and os.path.isdir(argument):
            exit_with(ConfigError(f"{argument}: is a folder; write run={argument}"))
    hydra_command(eval_task, "eval", "what was finished is kept")


def mode_command(mode: str, value: str | None = None) -> None:
    """`llama-lab-train MODE=VALUE ...`. value: of the mode; None: the first word of the command."""
    script, *words = sys.argv
    for word in words:
        if "=" in word and (key := override_key(word)) in MODES:
            exit_with(ConfigError(f"{word}: asks for llama-lab {key}; leave it out of llama-lab {mode}"))
    if {*HELP} & {*words}:
        value = None
        if {*words} <= {*HELP}:
            words += [mode, *(key for key, (asking, _) in OF_MODES.items() if asking == mode)]
    elif value is None:
        if not words or words[0].startswith("-"):
            exit_with(ConfigError(f"llama-lab {mode}: misses what to {mode}, which comes first; see llama-lab --help"))
        value, *words = words
    sys.argv[:] = [f"{script.removesuffix(mode)}train", *words, *([f"{mode}={value}"] if value else [])]
    train_command()


def hydra_command(task: Callable[[DictConfig], object], config: str, on_interrupt: str) -> None:
    """Run `task` with the config of this name, composed with the command line, and print errors in one line."""
    register_resolvers()
    os.environ.setdefault("LLAMA_LAB_TRACEBACK", os.environ.get("HYDRA_FULL_ERROR", "0"))
    os.environ["HYDRA_FULL_ERROR"] = "1"  # so that Hydra raises errors instead of printing them
    try:
        with user_errors(config), report_disk_errors("the working directory or a folder of the command"):
            sys.argv[1:] = with_recorded(to_hydra(sys.argv[1:]))
            asked: list[str] = []
            if {*HELP} & {*sys.argv[1:]}:
                asked, sys.argv[1:] = read_help(sys.argv[1:])
            if asked:

                def task(cfg: DictConfig) -> None:
                    with user_errors():
                        explain(cfg, config, asked)

            hydra.main(str(CONF_DIR), config, version_base="1.3")(task)()
    except RunFailedError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(FAILED)
    except Exception as error:  # of Hydra and YAML, some without the name of the group or the file
        emptied = [o for o in sys.argv[1:] if o.endswith("=null") and o.removesuffix("=null") in groups()]
        if wants_traceback() or not is_unreadable(error):
            raise
        if not emptied or not str(error).startswith("Config group override"):
            exit_with(ConfigError(f"the config cannot be read, {first_line(error)}; mend the file, or leave it out"))
        exit_with(ConfigError(f"{emptied[0]}: a run needs one; leave it out for the default, or see --help"))
    except KeyboardInterrupt:
        sys.stderr.write(f"\nstopped; {on_interrupt}\n")
        sys.exit(INTERRUPTED)


@contextmanager
def user_errors(config: str = "config") -> Iterator[None]:
    """Print a user error in one line, and exit. config: the name of the config being composed."""
    try:
        with report_component_errors():
            yield
    except USER_ERRORS as error:
        if wants_traceback():
            raise
        exit_with(error, config)


@contextmanager
def stoppable() -> Iterator[None]:
    """Let Ctrl-C end a command in one line."""
    try:
        yield
    except KeyboardInterrupt:
        sys.stderr.write("\nstopped\n")
        sys.exit(INTERRUPTED)


def wants_traceback() -> bool:
    """Whether the user set HYDRA_FULL_ERROR=1, which `hydra_command` overwrites."""
    return os.environ.get("LLAMA_LAB_TRACEBACK") == "1"


def of_runs(name: str, description: str) -> ArgumentParser:
    """The parser of a command on runs and studies."""
    parser = ArgumentParser(prog=f"llama-lab-{name}", description=description)
    parser.add_argument("paths", type=Path, nargs="+", metavar="RUN_OR_STUDY", help="folders of runs, studies, or both")
    return parser


def names(text: str) -> tuple[str, ...]:
    """The items of a list of names, such as `mylab,theirs`."""
    return tuple(one for one in text.split(",") if one)


@stoppable()
def compare_command() -> None:
    """`llama-lab-compare RUN_OR_STUDY...`."""
    parser = of_runs("compare", "Compare any runs and studies: writes report.html and summary.csv, and prints a table.")
    by = "groups or settings that define the arms, such as norm,model.dim (default: the runs' own arms)"
    parser.add_argument("--group-by", default="", metavar="KEY,KEY", help=by)
    parser.add_argument("--baseline", metavar="ARM", help="the arm to compare with (default: the first)")
    parser.add_argument("--title", metavar="TEXT", help="of the report (default: design and baseline)")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="folder of the report (default: ./comparison)")
    trusting = "packages whose components the runs use, to rebuild their models and check their sizes"
    parser.add_argument("--trust", type=names, default=(), metavar="PACKAGE,PACKAGE", help=trusting)
    exporting = "also write figures, tables and runs for a paper into this folder"
    parser.add_argument("--export", type=Path, metavar="FOLDER", help=exporting)
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier export in the folder of --export")
    args = parser.parse_args()
    with user_errors():
        group_by = names(args.group_by)
        if args.overwrite and not args.export:
            raise ConfigError("--overwrite: replaces an earlier export; name its folder with --export")
        if args.group_by and not group_by:
            raise ConfigError(f"--group-by {args.group_by}: names no key; write KEY,KEY, or leave it out")
        from llama_lab.report.write import compare  # takes seconds to import

        with report_disk_errors(f"--out {args.out or 'comparison'}"):
            trust = Trust(args.trust)
            compare(args.paths, group_by, args.baseline, args.out, args.title, trust, args.export, args.overwrite)


@stoppable()
def tensorboard_command() -> None:
    """`llama-lab-tensorboard RUN_OR_STUDY...`."""
    about = "Open TensorBoard on runs and studies, with short names. Any flag of TensorBoard's may follow."
    args, flags = of_runs("tensorboard", about).parse_known_args()
    from llama_lab.runs.tensorboard import open_tensorboard  # takes seconds to import

    with user_errors():
        open_tensorboard(args.paths, flags)


@stoppable()
def convert_command() -> None:
    """`llama-lab-convert import MODEL DEST` and `llama-lab-convert export RUN DEST`."""
    about = "Exchange models with Hugging Face's transformers, as safetensors."
    parser = ArgumentParser(prog="llama-lab-convert", description=about)
    directions = parser.add_subparsers(dest="direction", required=True, metavar="import | export")
    importing = directions.add_parser("import", help="a model of transformers, and what composes it here")
    importing.add_argument("source", metavar="PATH_OR_REPO", help="folder, or name of a repository: owner/name")
    exporting = directions.add_parser("export", help="a run into the layout of transformers")
    exporting.add_argument("source", type=Path, metavar="RUN", help="folder of a run, or of an imported model")
    trusting = "packages whose components the run uses"
    exporting.add_argument("--trust", type=names, default=(), metavar="PACKAGE,PACKAGE", help=trusting)
    averaged = "ema: the average that a run with train.ema keeps"
    exporting.add_argument("--weights", default="last", choices=("last", "ema"), help=averaged)
    dtypes = ("float32", "bfloat16", "float16")
    largest = "largest file of weights, such as 5GB (default: one file for all)"
    for direction in (importing, exporting):
        direction.add_argument("dest", type=Path, metavar="DEST", help="folder to write")
        direction.add_argument("--dtype", choices=dtypes, help="of the weights (default: as they are)")
        direction.add_argument("--max-shard-size", metavar="SIZE", help=largest)
    args = parser.parse_args()
    import torch  # takes seconds to import

    from llama_lab.hf.convert import export_model, import_model
    from llama_lab.hf.tensors import parse_size

    with user_errors(), report_disk_errors(f"DEST {args.dest}"):
        dtype = None if args.dtype is None else getattr(torch, args.dtype)
        limit = None if args.max_shard_size is None else parse_size("--max-shard-size", args.max_shard_size)
        if args.direction == "import":
            print(import_model(args.source, args.dest, dtype, limit))
        else:
            print(export_model(args.source, args.dest, dtype, limit, Trust(args.trust), args.weights))


def train_task(cfg: DictConfig) -> float | None:
    """The task function of `train.py`: what a mode asks for, a run, or one of a sweep's. Returns what `train` does.

    A run may have been started by a launcher.
    """
    command = HydraConfig.get()
    in_sweep, choices = command.mode == RunMode.MULTIRUN, dict(command.runtime.choices)
    try:
        with report_component_errors(), first_rank_first():
            if is_launched():  # an experiment may choose the study that this run belongs to
                cfg, choices = run_config(cfg, choices)
            elif not in_sweep:
                check_single(choices)
            asked = (run for mode, run in MODES.items() if cfg[mode] and not (mode == "draw" and in_sweep))
            return next(asked, train_and_report)(cfg, choices)
    except USER_ERRORS as error:
        if not in_sweep and not wants_traceback():
            exit_with(error)
        # Hydra continues a sweep, and reports only the first failure at the end.
        sys.stderr.write(f"error: {' '.join(command.overrides.task)}: {one_line(error)}\n")
        raise


def prepared(cfg: DictConfig, choices: Choices) -> "Run":
    """The run that a command asks for, or one of its sweep's."""
    command = HydraConfig.get()
    if command.mode == RunMode.MULTIRUN:
        check_devices(cfg, str(choices["hydra/launcher"]))
    run = requested_run(cfg, choices, list(command.overrides.task))
    if not is_launched():
        check_effects([cfg], run.overrides)
    return run


def train_and_report(cfg: DictConfig, choices: Choices) -> float | None:
    """Train one run, print how it ended, and return its final validation loss, infinite if it diverged.

    None if it was pruned. Exits with a nonzero status if it was interrupted, or diverged alone.
    """
    run = prepared(cfg, choices)
    command = HydraConfig.get()
    is_alone = not (command.mode == RunMode.MULTIRUN or is_launched())
    from llama_lab.devices.hardware import current_rank
    from llama_lab.runs.result_table import print_result
    from llama_lab.runs.stored import Status
    from llama_lab.training.command import train_run  # after the checks: torch and lightning take seconds to import
    from llama_lab.training.profile import profile_message

    try:
        outcome = train_run(run)
    except FinishedRunError:
        if is_alone:
            raise
        print(f"{' '.join(command.overrides.task)}: done before, passed over")
        return run.folder.final_loss
    if current_rank() == 0:
        if outcome == "done":
            print_result(run.folder)
        elif outcome == "pruned":
            print(f"pruned: {Status.load(run.folder.path).message}; the run's own command would train it further")
        elif outcome == "interrupted":
            sys.stderr.write(f"{Status.load(run.folder.path).message}\n")
            again = [word for word in sys.argv if not starts_over(word)]  # what has just been saved
            sys.stderr.write(f"stopped; go on with the same command:\n  {shlex.join(['python', *again])}\n")
        else:
            sys.stderr.write(
                f"diverged: {Status.load(run.folder.path).message}; try a lower optim.lr, a longer schedule.warmup, or "
                f"train.grad_clip=1.0; the record is in {run.folder.path}\n"
            )
        if cfg.trainer.profile:
            print(profile_message(run.folder.path))
    if outcome == "interrupted":
        sys.exit(INTERRUPTED)
    if outcome == "diverged" and is_alone:
        sys.exit(FAILED)
    return run.folder.final_loss if current_rank() == 0 else None


def measure_speeds(cfg: DictConfig, choices: Choices) -> None:
    """Measure the speeds of a study's arms and rewrite its report."""
    run = prepared(cfg, choices)
    from llama_lab.devices.hardware import current_rank
    from llama_lab.report.write import write_report
    from llama_lab.study.measure import measure_study

    measure_study(run)
    if current_rank() == 0:
        write_report(run.folder.path, Trust.of_command(tuple(cfg.trust)))


def draw_model(cfg: DictConfig, choices: Choices) -> None:
    """Draw the model, beside that of the same command with the overrides of `draw_against` if there are any."""
    check_run(cfg, choices)
    overrides, against = list(HydraConfig.get().overrides.task), None
    check_effects([cfg], overrides)
    from llama_lab.drawing.command import draw  # after the checks: torch takes seconds to import

    def name(overrides: list[str], choices: Choices) -> str:
        named = [f"{group}={choices[group]}" for group in ("arch", "size")]
        ours = [o for o in overrides if override_key(o) not in ("arch", "size", "draw", "draw_against")]
        return " ".join([*named, *ours])

    if cfg.draw_against:
        theirs = to_hydra(shlex.split(cfg.draw_against))
        keys = {override_key(o) for o in theirs} | {"draw", "draw_against"}
        both = [*(o for o in overrides if override_key(o) not in keys), *theirs]
        other, other_choices = compose(both)
        check_run(other, other_choices)
        against = (other, name(both, other_choices))
    print(f"the picture is {draw(cfg, name(overrides, choices), against)}")


def estimate_run(cfg: DictConfig, choices: Choices) -> None:
    """Print an estimate of a run's memory and time, and train nothing."""
    check_run(cfg, choices)
    check_effects([cfg], HydraConfig.get().overrides.task)
    from llama_lab.estimate.estimate import estimate_training  # after the checks: torch takes seconds to import
    from llama_lab.estimate.table import print_estimate
    from llama_lab.util.display import quiet_libraries

    quiet_libraries()
    print_estimate(estimate_training(cfg))


def eval_task(cfg: DictConfig) -> None:
    """The task function of `eval.py`: evaluate a run, those of a pattern or a study; with prompts, one run writes."""
    try:
        with user_errors():
            evaluate_or_write(cfg)
    except BrokenPipeError:  # a reader such as `head` has exited; discard the rest
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(FAILED)


def evaluate_or_write(cfg: DictConfig) -> None:
    """See `eval_task`."""
    command = HydraConfig.get()
    if command.mode == RunMode.MULTIRUN:
        raise ConfigError("--multirun: there is nothing to sweep here; name several runs by a pattern, run='runs/*'")
    check_single(command.runtime.choices)
    if removed := [override for override in command.overrides.task if override.startswith("~")]:
        raise ConfigError(f"{removed[0]}: takes a setting away; leave this out, and it has its default")
    check_complete(cfg)
    check_kinds(cfg, default_settings({"data": command.runtime.choices["data"]}, "eval"))
    from llama_lab.evaluation.evaluate import check_settings, prompts_of, write  # they take seconds to import
    from llama_lab.runs.study import FILE as STUDY
    from llama_lab.study.evaluate_all import evaluate_all, found_runs, opened

    check_settings(cfg, [override_key(o) for o in command.overrides.task])
    runs = found_runs(cfg.run)
    if prompts_of(cfg):
        if len(runs) > 1:
            raise ConfigError(f"run={cfg.run}: names {len(runs)} runs, and prompts are for one; name it")
        write(runs[0], cfg, opened(runs[0], cfg))
        return
    failed = evaluate_all(runs, cfg)
    if (Path(cfg.run) / STUDY).exists():
        from llama_lab.report.write import write_report  # SciPy takes a second to import

        write_report(Path(cfg.run), Trust.of_command(tuple(cfg.trust)))
    if failed:
        sys.stderr.write(f"{failed} of {len(runs)} runs could not be evaluated, see above\n")
        sys.exit(FAILED)


MODES: dict[str, Callable[[DictConfig, Choices], float | None]] = {
    "estimate": estimate_run,
    "draw": draw_model,
    "measure": measure_speeds,
}
COMMANDS: dict[str, tuple[Callable[[], None], str]] = {
    "train": (train_command, "a model, many in a sweep, or a study"),
    "evaluate": (eval_command, "runs, or have one write: run=RUN"),
    "estimate": (partial(mode_command, "estimate", "true"), "memory and days of a run: device=h100 size=llama2_70b"),
    "draw": (partial(mode_command, "draw"), "an architecture: FILE.svg arch=llama2"),
    "measure": (partial(mode_command, "measure"), "the speeds of a study's arms again: STUDY"),
    "compare": (compare_command, "runs and studies, in a report: RUN_OR_STUDY..."),
    "convert": (convert_command, "models from and to transformers: import MODEL DEST | export RUN DEST"),
    "tensorboard": (tensorboard_command, "of runs and studies, with short names: RUN_OR_STUDY..."),
}
