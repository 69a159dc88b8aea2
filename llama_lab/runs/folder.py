"""A run's folder, `runs/<name>/<arm>/seed=<n>/`: its files, and what may change in them."""

import hashlib
import math
import re
import sys
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock, Timeout
from omegaconf import DictConfig, OmegaConf

from llama_lab.config.grammar import escape, override_key
from llama_lab.config.schema import (
    CHANGEABLE,
    COMPONENTS,
    EXTENDABLE,
    INDIRECT,
    UNNAMED,
    belongs,
    flatten,
    keys_of,
    option_file,
)
from llama_lab.config.trust import stored_config, unescape, with_text
from llama_lab.data.hub import make_absolute
from llama_lab.util.errors import ConfigError, FinishedRunError
from llama_lab.util.files import discard, read_stamped, replace_text, stamped

from .checkpoint import checkpoint_step, existing, go_back_to, newest_whole, stable
from .json_file import as_type, reading
from .stored import Environment, Status, StatusName, Summary

LOCK = ".lock"
OUTPUT = "output.log"  # of the run's processes, if a launcher started them; exists before the run starts
PLACE = ".place"  # where Ray has put the run's process, if a launcher started it
PRUNE = ".prune"  # by which a search asks the run to stop
SAMPLE = "sample.txt"
TOKENIZER = "tokenizer.json"
WANDB_ID = "wandb_id"
TRACKIO_ID = "trackio_id"
OVERRIDES = "overrides.yaml"
RESOLVED = "resolved.yaml"  # the last file that is written as a run starts

AS_BEGUN = ("trainer.compile", "trainer.precision")  # with `auto`, a run goes on as it began


def arm_name(overrides: list[str], settled: Collection[str] = ()) -> str:
    """A short folder name from the command line's overrides: `norm=layernorm-position=sinusoidal`, or `base` for none.

    Keys that are settled, the same in all runs of a sweep, come last. Characters unfit for file names are replaced, and
    long names end in a hash.
    """
    has_name = any(o.startswith("name=") for o in overrides)
    unnamed = UNNAMED if has_name else (*UNNAMED, "arch")  # without a name of its own, the run has the recipe's
    keys = {o.lstrip("+"): override_key(o) for o in overrides}
    named = [o for o, key in keys.items() if key != "trainer" and not belongs(key, unnamed)]
    full = "-".join(sorted(named, key=lambda o: (keys[o] in settled, o)))
    short = re.sub(r"[^A-Za-z0-9=.+_-]+", "_", full)
    if short != full or len(short) > 100:
        short = f"{short[:90]}-{hashlib.blake2b(full.encode(), digest_size=3).hexdigest()}"
    return short if full else "base"


def locked(folder: Path) -> AbstractContextManager[object]:
    """Create a folder and lock it; the lock is released at the end of the context that this returns.

    Raises ConfigError if another process has locked it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        return FileLock(folder / LOCK).acquire(blocking=False)
    except Timeout:
        raise ConfigError(f"name: another process is training in {folder}; wait, or choose another name") from None


def write_yaml(content: Any, file: Path) -> None:
    """Replace a YAML file atomically, with its checksum. `${` in a text is escaped."""
    replace_text(file, stamped(OmegaConf.to_yaml(OmegaConf.create(with_text(content, escape)))))


def check_no_file(path: Path, runs_dir: str) -> None:
    """Raise ConfigError if `path` or one of its parents is a file."""
    if blocked := next((p for p in (path, *path.parents) if p.is_file()), None):
        raise ConfigError(f"runs_dir={runs_dir}: {blocked} is a file; choose a folder")


def is_run(path: Path) -> bool:
    """Whether `path` is the folder of a run that has started.

    Raises ConfigError if it has a checkpoint, and not all files that are written before the first one.
    """
    missing = [name for name in (Status.FILE, RESOLVED, Environment.FILE) if not (path / name).is_file()]
    if missing and existing(RunFolder(path).checkpoint):
        raise ConfigError(f"{path / missing[0]}: is missing; restore it, or delete {path} and train the run again")
    return not missing


def read_overrides(path: Path) -> list[str]:
    """The overrides that started a run; empty if not recorded."""
    file = path / OVERRIDES
    with reading(path, OVERRIDES):
        overrides = as_type(list[str], yaml.safe_load(read_stamped(file))) if file.exists() else []
        return [unescape(override) for override in overrides]


class RunFolder:
    """The files of one run. Reading never writes; `begin` makes the folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoint = path / "checkpoints" / "last.ckpt"
        self.metrics = path / "metrics.csv"
        self.prune_request = path / PRUNE

    @property
    def status(self) -> Status | None:
        """The status of the run; None before it starts."""
        return Status.load(self.path) if (self.path / Status.FILE).exists() else None

    @property
    def environment(self) -> Environment:
        """The environment of its last session; empty before it starts."""
        return Environment.load(self.path) if (self.path / Environment.FILE).exists() else Environment()

    @property
    def final_loss(self) -> float | None:
        """The final validation loss; infinity if the run diverged, None if it has not ended."""
        if (status := self.status) is None or status.status not in ("done", "diverged"):
            return None
        return math.inf if status.status == "diverged" else Summary.load(self.path).metrics["val/loss"]

    def config(self) -> DictConfig:
        """The run's config. Raises ConfigError for a file that holds none."""
        return stored_config(self.path / RESOLVED)

    @property
    def compiled(self) -> bool | None:
        """Whether the run began compiled, which a resumed run repeats; None before it starts."""
        if not (self.path / RESOLVED).exists():
            return None
        return OmegaConf.select(self.config(), "trainer.compile") is True

    def write_status(self, status: StatusName, message: str = "") -> None:
        """Replace the status; `message` says why, in one line."""
        Status(status, message).save(self.path)

    def check(self, cfg: DictConfig, choices: Mapping[str, str]) -> None:
        """Raise ConfigError unless `cfg` of these choices per group may start or resume here. Writes nothing."""
        if cfg.resume and cfg.overwrite:
            problem = f"would delete the run that resume={cfg.resume} is to train further; leave one of the two out"
            raise ConfigError(f"overwrite=true: {problem}")
        check_no_file(self.path, cfg.runs_dir)
        if not cfg.overwrite:
            is_run(self.path)
        if not (self.path / Status.FILE).exists():
            if cfg.resume:
                raise ConfigError(f"resume={cfg.resume}: holds no run; name a run's folder, or leave resume out")
            ours = (LOCK, OUTPUT, PLACE, f"{Status.FILE}.tmp")
            if self.path.exists() and any(file.name not in ours for file in self.path.iterdir()):
                raise ConfigError(f"name: {self.path} holds files that are no run; choose another name or runs_dir")
            return
        if cfg.overwrite or not (self.path / RESOLVED).exists():  # without it: killed as it started, or cleared
            return
        read_overrides(self.path)  # as training will, after it has begun
        before = Environment.load(self.path)
        finished = Status.load(self.path).status == "done"
        changed = self.changed_keys(cfg, EXTENDABLE if cfg.resume else CHANGEABLE)
        if finished and not cfg.resume:
            raise (ConfigError if changed else FinishedRunError)(
                f"name: {self.path} already holds a finished run; choose another name or seed, start over with "
                f"overwrite=true, or train it further with resume={self.path} train.tokens=<more>"
            )
        if changed:
            key, old, new = self.changed_group(changed[0][0], before.choices, choices) or changed[0]
            raise ConfigError(
                f"{key}={new}: the run in {self.path} has {key}={old}; give the same settings to go on, "
                f"choose another name, or start over with overwrite=true"
            )
        if not finished and cfg.train.tokens < (begun := self.config().train.tokens):  # to which its schedule leads
            raise ConfigError(
                f"train.tokens={cfg.train.tokens}: the run in {self.path} was begun with train.tokens={begun}; "
                f"give that, or more"
            )

    def changed_group(
        self, key: str, before: Mapping[str, str], choices: Mapping[str, str]
    ) -> tuple[str, Any, Any] | None:
        """(group, option before, option now) of the choice that has changed a key; None if none has."""
        differ = [group for group in before.keys() & choices.keys() if before[group] != choices[group]]
        for group in sorted(differ, key=lambda group: (group != "arch", group)):  # which chooses other groups
            chosen = {group, *COMPONENTS} & {*differ} if group == "arch" else {group}
            files = [option_file(g, option) for g in chosen for option in (before[g], choices[g])]
            if any(key in keys_of(file) for file in files if file.exists()):
                return group, before[group], choices[group]
        return None

    def changed_keys(self, cfg: DictConfig, changeable: tuple[str, ...]) -> list[tuple[str, Any, Any]]:
        """(key, old value, new value) of every setting that differs from the run's own and may not."""
        before: Any = OmegaConf.to_container(self.config(), resolve=True)
        if before["trainer"]["precision"] == "auto":  # decided when the run began
            before["trainer"]["precision"] = self.environment.precision or "auto"
        return changes(before, resolved(cfg), changeable)

    def begin(self, cfg: DictConfig, overrides: list[str], environment: Environment) -> Path | None:
        """Create the folder for a run of `cfg`; return the checkpoint to resume from, None to start.

        environment.json describes this session, and under `earlier_sessions` those before it. Raises ConfigError,
        and writes nothing, if the checkpoint comes from other data or another precision, or none is whole.
        """
        if cfg.overwrite or not (self.path / RESOLVED).exists():
            self.clear()
        checkpoint = self.checkpoint_for(cfg)
        sessions = [] if checkpoint is None else self._earlier_sessions(environment)
        if checkpoint == stable(self.checkpoint):
            (self.path / WANDB_ID).unlink(missing_ok=True)  # W&B would not forget the decay
            go_back_to(checkpoint, self.checkpoint)
            checkpoint = self.checkpoint
        elif checkpoint is not None and checkpoint != self.checkpoint:
            discard(self.checkpoint)  # torn: it must not become the one before the next
        discard(self.prune_request)  # of an earlier session
        self.write_status("running")
        self.checkpoint.parent.mkdir(exist_ok=True)
        replace(environment, earlier_sessions=sessions).save(self.path)
        write_yaml(overrides, self.path / OVERRIDES)
        write_yaml(resolved(cfg), self.path / RESOLVED)
        return checkpoint

    def checkpoint_for(self, cfg: DictConfig) -> Path | None:
        """The checkpoint that `cfg` resumes from: the last, or with a larger budget than before the stable one.

        The latter only if the last is further, and so in the decay, which comes later with a larger budget. None if
        there is none; raises ConfigError if none is whole. Changes nothing.
        """
        last = newest_whole(self.checkpoint)
        earlier = stable(self.checkpoint)
        if last is None or not earlier.exists():
            return last
        grows = cfg.train.tokens > self.config().train.tokens
        return newest_whole(earlier) if grows and checkpoint_step(earlier) < checkpoint_step(last) else last

    def _earlier_sessions(self, environment: Environment) -> list[Environment]:
        """The environments of the sessions that led to the checkpoint."""
        last = Environment.load(self.path)
        for key in ("data_hash", "tokenizer_hash", "precision"):
            before, now = getattr(last, key), getattr(environment, key)
            if before and before != now:
                raise ConfigError(
                    f"{key}={now}: the checkpoint in {self.path} was trained with {before}; "
                    f"restore that, choose another name, or start over with overwrite=true"
                )
        for name in ("llama-lab", "torch"):
            before, now = last.versions.get(name), environment.versions.get(name)
            if before and before != now:
                print(
                    f"{name} {now} goes on with a run of {before}: its kernels may differ, and so the last digits of "
                    "the losses from here on",
                    file=sys.stderr,
                )
        return [*last.earlier_sessions, replace(last, earlier_sessions=[])]

    def clear(self) -> None:
        """Delete everything but the lock, which is this process's, and the output, which it may be writing.

        The checkpoints go first, then the config, and the status last: a kill in between leaves no damaged run, but
        what is cleared again.
        """
        order = {self.checkpoint.parent.name: 0, RESOLVED: 1, Status.FILE: 3}
        for file in sorted(self.path.iterdir(), key=lambda file: order.get(file.name, 2)):
            if file.name not in (LOCK, OUTPUT, PLACE):
                discard(file)


def resolved(cfg: DictConfig) -> dict[str, Any]:
    """The config without interpolations, and with absolute paths of data, tokenizer and `init_from`."""
    config: Any = OmegaConf.to_container(cfg, resolve=True)
    if config.get("init_from"):
        config["init_from"] = str(Path(config["init_from"]).absolute())
    make_absolute(config["data"])
    make_absolute(config["tokenizer"])
    return config  # type: ignore[no-any-return]


def changes(before: Any, now: Any, changeable: tuple[str, ...]) -> list[tuple[str, Any, Any]]:
    """(key, value before, value now) of every setting in which two `resolved` configs differ and may not."""
    old, new = flatten(before), flatten(now)
    ignored = (*changeable, *INDIRECT)
    keys = [key for key in sorted(old.keys() | new.keys()) if not belongs(key, ignored)]
    return [
        (key, old.get(key), new.get(key))
        for key in keys
        if old.get(key) != new.get(key) and not (key in AS_BEGUN and new.get(key) == "auto")
    ]
