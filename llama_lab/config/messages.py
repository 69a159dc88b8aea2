"""User errors as one line that names the key, the value and the fix."""

import re
import sys
import traceback
from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher
from typing import NoReturn

from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from llama_lab.util.errors import USER_ERROR, ConfigError, suggestion

from .components import package_of
from .composing import read_file, with_options
from .grammar import override_key
from .schema import COMPONENTS, flatten, groups, keys_of, option_file, options

USER_ERRORS = (ConfigError, HydraException, OmegaConfBaseException)
CLOSE = 0.6  # difflib's default cutoff
# What other programs and earlier versions call a key of ours: whole names, or their last parts.
ELSEWHERE = {
    "train.micro_batch_size": "grad_accum gradient_accumulation gradient_accumulation_steps accumulate_grad_batches",
    "train.tokens": "epochs max_epochs max_steps max_iters num_train_epochs",
    "optim.lr": "learning_rate",
    "model.max_seq_len": "context_length context_size block_size seq_length n_ctx max_position_embeddings",
    "model.hidden_dim": "ffn.hidden_dim ffn.hidden_size ffn.dim intermediate_size ffn_dim d_ff",
    "model.dim": "hidden_size d_model n_embd",
    "bias": "model.bias use_bias",
    "estimate": "plan",
    "estimate_mfu": "plan_mfu",
}
OF_ELSEWHERE = {name: key for key, names in ELSEWHERE.items() for name in names.split()}


def exit_with(error: BaseException, config: str = "config") -> NoReturn:
    """Print a user error in one line and exit with status 2. config: the name of the config being composed."""
    sys.stderr.write(f"error: {one_line(error, config)}\n")
    sys.exit(USER_ERROR)


def one_line(error: BaseException, config: str = "config", typed: Sequence[str] | None = None) -> str:
    """A user error as one line, with key, value and fix where Hydra's error contains them.

    typed: the overrides; default: those of the command line.
    """
    typed = sys.argv[1:] if typed is None else typed
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options:
        group, _, option = error.missing_cfg_file.rpartition("/")
        if group.partition("/")[0] == "data" and (group != "data" or "." in option):  # no option has a dot
            file = error.missing_cfg_file.partition("/")[2]
            return f"data={file}: no such option; a file of your own is data=text data.files=[{file}]"
        return (
            f"{group}={option}: no such option{suggestion(option, error.options)}; choose {' | '.join(error.options)}"
        )
    message = str(error)
    if config == "eval" and message.startswith("In 'data/"):  # which chooses its tokenizer
        return f"data={typed_value('data', typed)}: is a probe, and an imported model has other tokens; choose a text"
    if isinstance(error, OverrideParseException):
        reason = message.splitlines()[0]
        return f"{error.override}: cannot be read, {reason}; write key=value, and quote what is special: 'key=[a,b]'"
    if match := re.match(r"Ambiguous value for argument '(.+?)'\s", message):
        return f"{match[1]}: is several values; add --multirun to sweep over them, or write a list as key=[a,b]"
    if match := re.match(r"Could not override '([^'@]+)", message.removeprefix(f"In '{config}': ")):
        if (key := match[1]) != "experiment":
            return unknown_key(key, config, typed)
        return f"{key}={typed_value(key, typed)}: no such option; name the folder that holds {key}/ with --config-dir"
    return " ".join(message.split()) or f"the config cannot be read, {type(error).__name__}"


def is_unreadable(error: BaseException) -> bool:
    """Whether the error comes from Hydra or its parsers, for an unreadable or endlessly nested config file."""
    packages = [package_of(frame.f_globals.get("__name__", "")) for frame, _ in traceback.walk_tb(error.__traceback__)]
    innermost = packages[-100 if isinstance(error, RecursionError) else -1 :]
    return not {"hydra", "omegaconf", "yaml", "codecs"}.isdisjoint(innermost)


def unknown_key(key: str, config: str, typed: Sequence[str]) -> str:
    """The message for an unknown key or group, with an option that has it or the closest key."""
    problem = f"{key}={typed_value(key, typed)}: no such key"
    if config != "config":
        return f"{problem}{suggestion(key, known_keys(config, typed))}; `--cfg job` shows them all, `--help` the groups"
    if key.startswith("model.ffn.expert."):
        return f"{problem}; experts have the settings of their option of ffn; choose one with expert=, or add your own"
    if having := options_defining(key):
        return f"{problem} here, it belongs to {' and '.join(having)}; choose that, or leave this out"
    if near := nearest(key, known_keys(config, typed)):
        explained = (near.partition(", of ")[2] or near).split()[0]
        return f"{problem} (did you mean {near}?); `--help {explained}` explains it"
    return f"{problem}; `--cfg job` shows them all, `--help` the groups"


def typed_value(key: str, typed: Sequence[str]) -> str:
    """The value of a key among overrides; empty if it is not there."""
    return next((o.partition("=")[2] for o in typed if override_key(o) == key), "")


def known_keys(config: str, typed: Sequence[str]) -> list[str]:
    """Every key of the config with the group choices among overrides, and every group."""
    parts = (o.partition("=") for o in typed)
    ours = [(group, option) for group, _, option in parts if group in groups() and option in options(group)]
    is_run = config == "config"
    cfg = with_options(dict(ours) if is_run else {}, config)
    return [*(groups() if is_run else []), *flatten(OmegaConf.to_container(cfg))]


def options_defining(key: str) -> list[str]:
    """The options that set a key, by group: `position=rope | sinusoidal`; those that inherit it are left out."""
    found = []
    for group in groups():
        having = [option for option in options(group) if key in keys_of(option_file(group, option))]
        extended = {option: read_file(option_file(group, option)).extends for option in having}
        first = [option for option in having if not {f"{group}/{one}" for one in having} & set(extended[option])]
        if first:
            found.append(f"{group}={' | '.join(first)}")
    return found


def nearest(wrong: str, known: Iterable[str]) -> str | None:
    """The best guess for a mistyped key: one of `known`, a key of another option, or an option; None if none is close.

    The last part counts as much as the whole: `heads` matches model.n_heads, and `model.tied` embedding=tied.
    """
    parts = wrong.split(".")
    last = parts[-1]
    for name in (".".join(parts[start:]) for start in range(len(parts))):  # the longest first
        if name in OF_ELSEWHERE:
            return OF_ELSEWHERE[name]
    if wrong in (last, f"model.{last}"):
        for group in COMPONENTS:
            if last in options(group):
                return f"{group}={last}"
    known = set(known)
    others = [group for group in groups() if group != "study" or wrong.startswith("study.")]
    elsewhere = {key for group in others for option in options(group) for key in keys_of(option_file(group, option))}
    scores = {key: likeness(wrong, key) - (0 if key in known else 0.15) for key in sorted(known | elsewhere)}
    best = max(scores, key=lambda key: (scores[key], whole_likeness(wrong, key)))
    if scores[best] < CLOSE:
        return None
    return best if best in known else f"{best}, of {options_defining(best)[0]}"


def likeness(a: str, b: str) -> float:
    """Similarity of two keys, from 0 to 1: of the whole keys, of their last parts, or by words that these share."""
    whole = whole_likeness(a, b)
    last_a, last_b = (key.rpartition(".")[2] for key in (a, b))
    last = whole_likeness(last_a, last_b)
    words_a, words_b = (set(last.split("_")) for last in (last_a, last_b))
    shared = 0.7 + 0.2 * whole if words_a <= words_b or words_b <= words_a else 0.0  # theta of rope_theta
    return max(whole, last if last >= 0.8 else 0.0, shared)


def whole_likeness(a: str, b: str) -> float:
    """difflib's similarity ratio."""
    return SequenceMatcher(None, a, b).ratio()
