"""What tests do to Hydra and OmegaConf makes them faster, and nothing else."""

import subprocess
import sys
from pathlib import Path

import pytest

COMPARE = """
from copy import deepcopy

from omegaconf import OmegaConf
from omegaconf.base import Metadata

from tests.composing import compose_config, composed
from tests.faster import work_faster


def made(*overrides):
    composed.cache_clear()
    cfg = compose_config(*overrides)
    merged = OmegaConf.merge(cfg, {"model": {"dim": 96}})
    copied = deepcopy(cfg)
    OmegaConf.set_struct(copied.model, False)
    copied.model.own = [cfg.model.attention]
    parents = [one._get_parent() for one in (merged.model.block, copied.model, copied.model._get_node("dim"))]
    assert [parent is one for parent, one in zip(parents, (merged.model, copied, copied.model))] == [True] * 3
    flags = [OmegaConf.is_struct(one.model) for one in (cfg, merged, copied)]
    return flags, [OmegaConf.to_yaml(one, resolve=how) for one in (cfg, merged, copied) for how in (False, True)]


def replace(owner, name, value):
    assert hasattr(owner, name) or owner is Metadata, f"{owner} has no {name} that could be replaced"
    setattr(owner, name, value)


CASES = ((), ("arch=gemma2", "size=pico"), ("study=ladder", "pattern=global_every_2nd", "+model.mine={a: [1, {b: 2}]}"))
before = [made(*overrides) for overrides in CASES]
work_faster(replace)
assert [made(*overrides) for overrides in CASES] == before
"""


@pytest.mark.slow
@pytest.mark.process
def test_configs_are_composed_merged_and_copied_as_without() -> None:
    subprocess.run([sys.executable, "-c", COMPARE], cwd=Path(__file__).parents[1], check=True)
