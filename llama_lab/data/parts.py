"""The parts of a mixture: options of the group `data`, composed as Hydra composes the option of a run."""

import json
from collections.abc import Mapping
from fractions import Fraction
from functools import lru_cache
from math import lcm
from typing import Any

import hydra
from hydra.core.config_loader import ConfigLoader
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from llama_lab.config.composing import composing, last_loader
from llama_lab.config.value_types import check_kinds, default_settings
from llama_lab.util.errors import ConfigError, first_line, suggestion

LARGEST_DENOMINATOR = 10_000  # of a share: four decimals, or a simple fraction such as 1/3
LONGEST_PERIOD = 100_000  # windows after which the order of the parts repeats
OF_THE_MIX = ("seed", "cache_dir", "val_tokens", "document_mask")


def mixture_parts(mix: Any, parts: Any) -> DictConfig | None:
    """The config of each part of `data.mix`, with the settings in `data.parts`; None without a mixture.

    Raises ConfigError for shares that do not add up to 1, and parts or settings that do not exist.
    """
    if mix is None:
        return None
    shares = exact_shares(mix)
    settings = {} if parts is None else OmegaConf.to_container(parts, resolve=True)
    if not isinstance(settings, dict) or not all(isinstance(own, dict) for own in settings.values()):
        raise ConfigError(f"data.parts={settings}: must be settings by part, such as {{mine: {{files: [a.txt]}}}}")
    if unknown := [str(name) for name in settings if name not in shares]:
        raise ConfigError(f"data.parts.{unknown[0]}: is no part of data.mix, which has {', '.join(shares)}")
    own = {name: json.dumps(settings.get(name, {})) for name in shares}
    return OmegaConf.create({name: json.loads(_part(name, own[name], last_loader())) for name in shares})


def exact_shares(mix: Any) -> dict[str, Fraction]:
    """The shares in `data.mix` as fractions. Raises ConfigError unless they are positive and add up to 1."""
    if not isinstance(mix, Mapping):
        given = "null" if mix is None else mix
        raise ConfigError(f"data.mix={given}: must be shares by name, such as {{stdlib: 0.7, shakespeare: 0.3}}")
    shown = ", ".join(f"{name}: {share}" for name, share in mix.items())
    shares = {}
    for name, share in mix.items():
        if not isinstance(share, int | float) or isinstance(share, bool) or not 0 < share <= 1:
            raise ConfigError(
                f"data.mix.{name}={share}: a share is above 0 and at most 1; leave a part without one out"
            )
        shares[str(name)] = fraction = Fraction(share).limit_denominator(LARGEST_DENOMINATOR)
        if fraction == 0:
            raise ConfigError(f"data.mix.{name}={share}: is 0 once rounded to four decimals; raise it, or leave it out")
    total = sum(mix.values())
    if sum(shares.values()) != 1:
        raise ConfigError(
            f"data.mix={{{shown}}}: the shares add up to {total:.6g} rather than 1"
            f"{'' if abs(total - 1) > 1e-6 else ' once rounded to four decimals'}; correct them"
        )
    if (period := lcm(*(share.denominator for share in shares.values()))) > LONGEST_PERIOD:
        raise ConfigError(f"data.mix={{{shown}}}: repeats only after {period:,} windows; use at most four decimals")
    return shares


@lru_cache(maxsize=256)
def _part(name: str, settings: str, loader: ConfigLoader | None) -> str:
    """The resolved config of a part, as JSON; another `loader` may find other files."""
    own = json.loads(settings)
    option = own.pop("data", name)
    with composing() as found:
        known = [one for one in found.get_group_options("data") if one != "mix"]
        if option not in known:
            raise ConfigError(
                f"data.mix.{name}: {option} is no data that can be mixed{suggestion(str(option), known)}; choose of "
                f"{', '.join(known)}, or name one of them, data.parts={{{name}: {{data: text, files: [a.txt]}}}}"
            )
        data = hydra.compose("config", overrides=[f"data={option}"]).data
        if "source" not in data:
            raise ConfigError(f"data.mix.{name}: {option} is a probe, and only text can be mixed; leave it out")
        possible = [str(setting) for setting in data if setting not in (*OF_THE_MIX, "source")]
        for setting, value in own.items():
            if setting not in possible:
                is_joint = setting in OF_THE_MIX
                where = "belongs to the whole mixture" if is_joint else f"is no setting of data={option}"
                raise ConfigError(f"data.parts.{name}.{setting}={value}: {where}; choose of {', '.join(possible)}")
        try:
            check_kinds(OmegaConf.create({"data": own}), default_settings({"data": option}))
        except ConfigError as error:
            raise ConfigError(f"data.parts.{name}: {error}") from None
        try:
            data.merge_with(own)
            if missing := [setting for setting in possible if OmegaConf.is_missing(data, setting)]:
                example = f"data.parts={{{name}: {{{missing[0]}: ...}}}}"
                raise ConfigError(f"data.parts.{name}.{missing[0]}=???: needs a value; set it, {example}")
            composed = OmegaConf.to_container(data, resolve=True)
        except OmegaConfBaseException as error:
            raise ConfigError(f"data.parts.{name}: {first_line(error)}") from None
    assert isinstance(composed, dict)
    return json.dumps({setting: value for setting, value in composed.items() if setting not in OF_THE_MIX})
