"""Configs that are merged from their files: as Hydra composes them."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from hydra import initialize_config_dir
from hydra.core.config_loader import ConfigLoader
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from llama_lab.api import composing
from llama_lab.config import CONF_DIR
from llama_lab.config import composing as module
from llama_lab.config.composing import compose, without
from llama_lab.config.schema import groups, options

CHOICES = [f"{group}={option}" for group in groups() for option in options(group)]
MIXED = [
    ["arch=mamba2", "data=copy", "norm=layernorm"],
    ["data=recall", "tokenizer=byte", "callbacks={a: 1}"],
    ["arch=qwen3_next", "pattern=none", "size=small", "model.dim=256", "model.ffn.top_k=1", "optim.lr=1e-3"],
    ["train.eval_lengths=[1,2]", "train.prompt='a b'", "model.hidden_dim=${model.dim}", "name=null"],
    ["ffn=moe", "expert=gelu"],
]


def by_hydra(overrides: Sequence[str], loader: ConfigLoader) -> tuple[DictConfig, dict[str, str | None]]:
    """The config and its choices, without Hydra's node and groups."""
    cfg = loader.load_configuration("config", [*overrides], RunMode.RUN)
    choices = {group: option for group, option in cfg.hydra.runtime.choices.items() if not group.startswith("hydra/")}
    return without(cfg, "hydra"), choices


def assert_composed_as_by_hydra(overrides: Sequence[str], loader: ConfigLoader) -> None:
    wanted, choices = by_hydra(overrides, loader)
    cfg, own_choices = compose(overrides)
    assert OmegaConf.to_container(cfg) == OmegaConf.to_container(wanted)
    assert {group: option for group, option in own_choices.items() if not group.startswith("hydra/")} == choices
    assert OmegaConf.is_struct(cfg)


@pytest.fixture(scope="module")
def loader() -> ConfigLoader:
    with composing([], None) as found:
        return found


@pytest.mark.parametrize("overrides", [*([choice] for choice in CHOICES[::20]), *MIXED], ids=" ".join)
def test_a_config_is_what_hydra_composes(
    overrides: list[str], loader: ConfigLoader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "composing", None)  # Hydra is not asked
    assert_composed_as_by_hydra(overrides, loader)


@pytest.mark.matrix
@pytest.mark.parametrize("choice", CHOICES)
def test_every_option_is_composed_as_hydra_does(choice: str, loader: ConfigLoader) -> None:
    assert_composed_as_by_hydra([choice], loader)


@pytest.mark.parametrize(
    "overrides",
    [
        ["~logger"],
        ["+more=1"],
        ["++train.more=1"],
        ["seed=1"],
        ["norm=mine"],
        ["arch=mine"],
        ["experiment=mine"],
        ["hydra/launcher=slurm"],
    ],
    ids=" ".join,
)
def test_options_of_the_user_and_what_only_hydra_composes_are_too(tmp_path: Path, overrides: list[str]) -> None:
    write(tmp_path / "norm/mine.yaml", "# @package model.norm\ndefaults: [rmsnorm, _self_]\neps: 0.5\n")
    write(tmp_path / "arch/mine.yaml", "# @package _global_\ndefaults:\n  - llama\n  - override /norm: mine\n")
    mine = "defaults:\n  - override /arch: mine\n  - override /size: pico\ntrain:\n  tokens: 5\n"
    write(tmp_path / "experiment/mine.yaml", f"# @package _global_\n{mine}")
    with composing([], tmp_path) as loader:
        assert_composed_as_by_hydra(overrides, loader)


def test_yaml_is_read_as_omegaconf_reads_it(tmp_path: Path) -> None:
    values = "[1e6, 1.5e3, -2E-4, 1_000, .5, 2024-11-05, 2024_11_05, off, 0x1f, 12:30, .inf, '1e6', ~, a b, 1.e5, 010]"
    write(tmp_path / "norm/mine.yaml", f"# @package model.norm\nvalues: {values}\neps: 1e-3  # a comment\n")
    with composing([], tmp_path) as loader:
        assert_composed_as_by_hydra(["norm=mine"], loader)


@pytest.mark.parametrize("text", ["eps: 1\neps: 2", "eps: [", "- eps", "", "a: {b: 1, b: 2}"])
def test_a_file_that_is_no_config_is_refused_or_empty_as_by_hydra(text: str, tmp_path: Path) -> None:
    write(tmp_path / "norm/mine.yaml", text)
    with composing([], tmp_path) as loader:
        try:
            by_hydra(["norm=mine"], loader)
        except Exception as error:
            with pytest.raises(type(error)):
                compose(["norm=mine"])
        else:
            assert_composed_as_by_hydra(["norm=mine"], loader)


def test_a_file_that_has_changed_is_read_again(tmp_path: Path) -> None:
    for eps in (0.25, 0.5):
        write(tmp_path / "norm/mine.yaml", f"# @package model.norm\neps: {eps}\n")
        with composing([], tmp_path):
            assert compose(["norm=mine"])[0].model.norm.eps == eps


@pytest.mark.parametrize("override", ["norm=nothing", "model.nothing=1", "seed=1,2", "nothing=1", "hydra.nothing=1"])
def test_what_hydra_refuses_it_refuses_in_its_words(override: str) -> None:
    with initialize_config_dir(str(CONF_DIR), version_base="1.3"), pytest.raises(HydraException):
        compose([override])


def write(file: Path, text: str) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text(text)
