"""Configs of older versions are read as the same models."""

from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from llama_lab.config.older import ADDED
from llama_lab.config.trust import read_stored
from tests.composing import compose_config, options


def older(node: Any) -> Any:
    """A config without what was added."""
    if not isinstance(node, dict):
        return node
    added = ADDED.get(str(node.get("_target_")), {})
    return {key: older(value) for key, value in node.items() if key not in added}


NEWER = ("cohere", "granite", "nanochat", "olmo")  # recipes of the settings that were added: older configs hold none
OLDER = [[f"arch={arch}"] for arch in options("arch") if arch not in NEWER]


@pytest.mark.parametrize("overrides", [*OLDER, ["position=rope_yarn"]], ids=str)
def test_a_config_without_later_settings_is_read_with_those_of_its_recipe(overrides: list[str], tmp_path: Path) -> None:
    now = OmegaConf.to_container(compose_config("size=pico", *overrides).model, resolve=True)
    before = older(now)
    assert before != now
    OmegaConf.save({"model": before}, tmp_path / "resolved.yaml")
    assert OmegaConf.to_container(read_stored(tmp_path / "resolved.yaml").model) == now


def test_a_setting_that_a_config_has_is_kept(tmp_path: Path) -> None:
    now = OmegaConf.to_container(compose_config("size=pico", "norm=rmsnorm_plain").model, resolve=True)
    OmegaConf.save({"model": now}, tmp_path / "resolved.yaml")
    assert OmegaConf.to_container(read_stored(tmp_path / "resolved.yaml").model) == now
