"""Check that the requested dashboards can start. Imports little, as one of the first checks."""

import netrc
import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from omegaconf import DictConfig

from llama_lab.util.errors import ConfigError

MODES: tuple[str, ...] = ("auto", "online", "offline")  # of W&B
WANDB_MODES = ("online", "offline", "disabled", "dryrun", "run", "shared")  # that W&B reads from the environment
NOT_IN_PROJECTS = r"/\#?%:"  # W&B's rule
KEYS = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")  # with one of them set, it does not ask
LONGEST_TAG = 64  # W&B's limit
OF_WANDB = ("mode", "entity", "tags", "notes", "artifacts")  # settings


def check_logger(logger: DictConfig, defaults: Mapping[str, Any]) -> None:
    """Raise ConfigError for a setting of a disabled dashboard, and for a dashboard that cannot start."""
    dashboards = {"project": logger.wandb or logger.trackio} | dict.fromkeys(OF_WANDB, logger.wandb)
    for key, is_on in dashboards.items():
        if not is_on and logger[key] != defaults[f"logger.{key}"]:
            raise ConfigError(f"logger.{key}={logger[key]}: is for W&B; add logger.wandb=true, or leave it out")
    if refused := [str(tag) for tag in logger.tags if not 0 < len(str(tag)) <= LONGEST_TAG]:
        raise ConfigError(f"logger.tags=[{refused[0]}]: W&B takes tags of 1 to {LONGEST_TAG} letters; choose another")
    if logger.wandb and set(logger.project) & set(NOT_IN_PROJECTS):
        raise ConfigError(f"logger.project={logger.project}: W&B takes none of {NOT_IN_PROJECTS} there; choose another")
    if logger.wandb and (logger.mode != "auto" or os.environ.get("WANDB_MODE")):
        wandb_mode(logger.mode)
    if logger.trackio and find_spec("trackio") is None:
        raise ConfigError("logger.trackio=true: needs Trackio; pip install 'llama-lab[trackio]'")


def wandb_mode(asked: str = "auto") -> str:
    """The mode that is `asked` for; of auto, WANDB_MODE if set, else online with a key, and offline without.

    Raises ConfigError for another one, and for online without a key, where W&B would ask for it.
    """
    setting, mode, known = "logger.mode", asked, MODES
    if asked == "auto" and (from_environment := os.environ.get("WANDB_MODE")):
        setting, mode, known = "WANDB_MODE", from_environment, WANDB_MODES
    if mode not in known:
        raise ConfigError(f"{setting}={mode}: unknown; choose {' | '.join(known)}, or turn W&B off, logger.wandb=false")
    if mode not in ("auto", "online"):
        return mode
    has_key = any(map(os.environ.get, KEYS)) or _has_netrc_entry()
    if mode == "online" and not has_key:
        raise ConfigError(f"{setting}=online: needs W&B's key; run `wandb login`, set WANDB_API_KEY, or choose offline")
    return "online" if has_key else "offline"


def _has_netrc_entry() -> bool:
    """Whether `wandb login` has stored a key for the server in use."""
    path = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname
    if not path.exists() or host is None:
        return False
    try:
        entry = netrc.netrc(path).authenticators(host)
        return entry is not None and bool(entry[2])
    except netrc.NetrcParseError as error:
        print(f"W&B stays offline: {error}")
        return False
