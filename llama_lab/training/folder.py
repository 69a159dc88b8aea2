"""A run's folder: `runs/<name>/<arm>/seed=<n>/`, and what may be done to it."""

import hashlib
import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from filelock import FileLock, Timeout
from omegaconf import DictConfig, OmegaConf

from llama_lab.config import flatten
from llama_lab.errors import ConfigError

Status = Literal["running", "interrupted", "done", "diverged", "failed"]

LOCK = ".lock"

# Settings of where and how a run is watched, not of what it computes: they make no arm of their own.
UNNAMED = ("name", "seed", "runs_dir", "overwrite", "resume", "logger", "trainer", "data.cache_dir", "hydra")
# Settings that may change when an unfinished run goes on, and those that may also change when a finished one does.
CHANGEABLE = (
    "overwrite",
    "resume",
    "runs_dir",
    "data.cache_dir",
    "logger",
    "trainer.accelerator",
    "trainer.devices",
    "trainer.num_nodes",
)
EXTENDABLE = (*CHANGEABLE, "train.tokens", "train.evaluations")


def arm_name(overrides: list[str]) -> str:
    """A short folder name from the command line's overrides: `norm=layernorm-position=sinusoidal`, or `base` for none.

    Values that no file name should hold are rewritten, and what would be too long ends in a hash.
    """
    has_name = any(o.startswith("name=") for o in overrides)
    unnamed = UNNAMED if has_name else (*UNNAMED, "arch")  # without a name of its own, the run has the recipe's
    named = sorted(o.lstrip("+") for o in overrides if not _belongs(o.lstrip("+~").split("=")[0], unnamed))
    full = "-".join(named)
    short = re.sub(r"[^A-Za-z0-9=.+_-]+", "_", full)
    if short != full or len(short) > 100:
        short = f"{short[:90]}-{hashlib.blake2b(full.encode(), digest_size=3).hexdigest()}"
    return short if full else "base"


def _belongs(key: str, roots: tuple[str, ...]) -> bool:
    """Whether `key` is one of `roots` or below one."""
    return any(key == root or key.startswith(f"{root}.") for root in roots)


class RunFolder:
    """The files of one run. Reading never writes; `begin` makes the folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoint = path / "checkpoints" / "last.ckpt"
        self.metrics = path / "metrics.csv"

    def read_status(self) -> dict[str, Any] | None:
        """status.json, None if there is none."""
        return self.read_json("status.json") if (self.path / "status.json").exists() else None

    def read_json(self, name: str) -> dict[str, Any]:
        """A JSON file of the run."""
        return json.loads((self.path / name).read_text())  # type: ignore[no-any-return]

    def write_status(self, status: Status, message: str = "") -> None:
        """Replace status.json; `message` says why, in one line."""
        self.write_json("status.json", {"status": status, "message": message})

    def write_json(self, name: str, content: dict[str, Any]) -> None:
        """Replace a JSON file in one move."""
        fresh = self.path / f"{name}.tmp"
        fresh.write_text(json.dumps(content, indent=2) + "\n")
        fresh.replace(self.path / name)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep other processes out of the folder. Raises ConfigError if one is at work in it."""
        self.path.mkdir(parents=True, exist_ok=True)
        lock = FileLock(self.path / LOCK)
        try:
            lock.acquire(blocking=False)
        except Timeout:
            raise ConfigError(
                f"name: another process is training in {self.path}; wait, or choose another name"
            ) from None
        try:
            yield
        finally:
            lock.release()

    def check(self, cfg: DictConfig) -> None:
        """Raise ConfigError unless `cfg` may start or go on here. Writes nothing."""
        blocked = next((p for p in (self.path, *self.path.parents) if p.is_file()), None)
        if blocked:
            raise ConfigError(f"runs_dir={cfg.runs_dir}: {blocked} is a file; choose a folder")
        status = self.read_status()
        if status is None:
            if self.path.exists() and any(file.name != LOCK for file in self.path.iterdir()):
                raise ConfigError(f"name: {self.path} holds files that are no run; choose another name or runs_dir")
            return
        if cfg.overwrite:
            return
        finished = status["status"] == "done"
        if finished and not cfg.resume:
            raise ConfigError(
                f"name: {self.path} already holds a finished run; choose another name or seed, start over with "
                f"overwrite=true, or train it further with resume=true train.tokens=<more>"
            )
        changed = self.changed_keys(cfg, EXTENDABLE if cfg.resume else CHANGEABLE)
        if changed:
            key, old, new = changed[0]
            raise ConfigError(
                f"{key}={new}: the unfinished run in {self.path} has {key}={old}; give the same settings to go on, "
                f"choose another name, or start over with overwrite=true"
            )

    def changed_keys(self, cfg: DictConfig, changeable: tuple[str, ...]) -> list[tuple[str, Any, Any]]:
        """(key, old value, new value) of every setting that differs from the run's own and may not."""
        old = flatten(OmegaConf.to_container(OmegaConf.load(self.path / "resolved.yaml")))
        new = flatten(OmegaConf.to_container(cfg, resolve=True))
        keys = [key for key in sorted(old.keys() | new.keys()) if not _belongs(key, changeable)]
        return [(key, old.get(key), new.get(key)) for key in keys if old.get(key) != new.get(key)]

    def begin(self, cfg: DictConfig, overrides: list[str], environment: dict[str, Any]) -> Path | None:
        """Make the folder for a run of `cfg`; return the checkpoint to go on from, None to start."""
        if cfg.overwrite:
            self.clear()
        self.checkpoint.parent.mkdir(parents=True, exist_ok=True)
        self.write_status("running")
        OmegaConf.save(cfg, self.path / "resolved.yaml", resolve=True)
        OmegaConf.save(OmegaConf.create(overrides), self.path / "overrides.yaml")
        self.write_json("environment.json", environment)
        return self.checkpoint if self.checkpoint.exists() else None

    def clear(self) -> None:
        """Delete everything but the lock, which this process holds."""
        for file in self.path.iterdir():
            if file.is_dir():
                shutil.rmtree(file)
            elif file.name != LOCK:
                file.unlink()
