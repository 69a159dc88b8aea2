"""Designs that train on from one checkpoint: their arms, what they refuse, and whole tiny studies of them."""

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from llama_lab.analysis.analyse import analyse
from llama_lab.config.grammar import override_key
from llama_lab.report.tables import tables
from llama_lab.runs.folder import write_yaml
from llama_lab.runs.study import Study
from llama_lab.study.design.continued import Extend, Uptrain
from llama_lab.study.design.designs import Composer
from llama_lab.util.errors import ConfigError
from tests.conftest import Command, Ran
from tests.study.design.test_designs import CONFIGS
from tests.study.planning import Loader, planned_study, refusal

POSITIONS = ["rope", "rope_linear", "rope_ntk", "rope_yarn", "rope_llama3"]
STARTS = ["mean", "first", "random"]
uptrain = partial(Uptrain, "llama2", 0.05, None, STARTS)
extend = partial(Extend, "llama", 0.05, 4, POSITIONS)


def from_source(init_from: Path | None, *shared: str) -> Composer:
    """The checkout's configs at size=pico, with `init_from` and further overrides."""
    own = () if init_from is None else (f"init_from='{init_from}'",)
    return Composer(Loader(), ("size=pico", *own, *shared))


def source(folder: Path, *overrides: str) -> Path:
    """A folder with the config of a run, as far as designs read it."""
    cfg, _ = CONFIGS.compose("size=pico", *overrides)
    folder.mkdir()
    write_yaml(OmegaConf.to_container(cfg, resolve=True), folder / "resolved.yaml")
    return folder


def test_uptraining_has_every_start_of_every_smaller_number_of_heads_beside_all_heads(tmp_path: Path) -> None:
    llama = source(tmp_path / "llama", "arch=llama", "train.tokens=40000")
    arms = uptrain().variants(from_source(llama)).arms
    names = ["mha", *(f"gqa-2-{start}" for start in STARTS), *(f"mqa-{start}" for start in STARTS)]
    assert [arm.name for arm in arms] == names
    assert arms[0].overrides == ("arch=llama2", "train.tokens=2000", "model.n_kv_heads=4")
    mqa = ("arch=llama2", "train.tokens=2000", "model.n_kv_heads=1", "init_kv_heads=first")
    assert arms[-2].overrides == mqa
    assert {arm.reference for arm in arms} == {"mha"}


def test_uptraining_from_grouped_heads_goes_below_them(tmp_path: Path) -> None:
    gqa = source(tmp_path / "gqa", "arch=llama2", "model.n_kv_heads=2")
    arms = Uptrain("llama2", None, [1], ["mean"]).variants(from_source(gqa)).arms
    assert [arm.name for arm in arms] == ["gqa-2", "mqa-mean"]
    assert not any(override_key(o) == "train.tokens" for arm in arms for o in arm.overrides)


@pytest.mark.parametrize("design", [uptrain, extend])
def test_an_encoder_is_neither_uptrained_nor_extended(design: partial[Any], tmp_path: Path) -> None:
    own = ("family=encoder", "objective=masked")
    encoder = source(tmp_path / "encoder", "arch=llama", *own)
    with pytest.raises(ConfigError, match=r"^study.base=llama2?: an encoder has no cache"):
        design().variants(from_source(encoder, *own))


@pytest.mark.slow
def test_extending_gives_every_scaling_the_growth_and_the_context_and_base_of_the_source(tmp_path: Path) -> None:
    llama = source(tmp_path / "llama", "arch=llama", "train.tokens=40000")
    variants = extend().variants(from_source(llama))
    assert variants.lead == "Context length"  # of the report
    arms = {arm.name: {*arm.overrides} for arm in variants.arms}
    assert [*arms] == POSITIONS
    for name, overrides in arms.items():
        cfg, _ = from_source(llama).compose(*overrides)
        position = cfg.model.position
        assert (cfg.model.max_seq_len, position.theta, cfg.train.tokens) == (128, 10000.0, 2000)
        if name == "rope":
            assert position.scaling is None
        else:
            assert position.scaling.factor == 4
            assert position.scaling.get("original_max_seq_len", 32) == 32


REFUSED: dict[str, tuple[Any, list[str], str]] = {
    "other size": (
        uptrain(),
        ["model.n_layers=3"],
        "model.n_layers=3: .* has 2, .*; give the study the settings of its source",
    ),
    "other norm": (extend(), ["norm=layernorm"], "model.norm=LayerNorm: .* has RMSNorm"),
    "fixed heads": (Uptrain("llama", 0.05, None, STARTS), [], "study.base=llama: its attention has a fixed number"),
    "no fewer": (Uptrain("llama2", 0.05, [4], STARTS), [], "study.kv_heads: none divides the 4 of the source"),
    "start": (Uptrain("llama2", 0.05, None, ["last"]), [], "study.starts: last is unknown; choose among mean, first"),
    "share": (Uptrain("llama2", 0.0, None, STARTS), [], "study.share=0.0: must be positive"),
    "growth": (Extend("llama", 0.05, 1, POSITIONS), [], "study.growth=1: must be a whole number from 2"),
    "position": (Extend("llama", 0.05, 4, ["alibi"]), [], "study.positions: alibi is not rotary"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_compare_something_else_is_refused(case: str, tmp_path: Path) -> None:
    design, overrides, message = REFUSED[case]
    llama = source(tmp_path / "llama", "arch=llama")
    with pytest.raises(ConfigError, match=f"^{message}"):
        design.variants(from_source(llama, *overrides))


@pytest.mark.parametrize("design", [uptrain(), extend()], ids=["uptrain", "extend"])
def test_without_a_source_there_is_nothing_to_train_on(design: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^init_from=null: this study trains on from a run"):
        design.variants(from_source(None))
    with pytest.raises(ConfigError, match=r"^init_from=.*nowhere: is no folder"):
        design.variants(from_source(tmp_path / "nowhere"))


def test_scaled_or_other_positions_are_not_extended(tmp_path: Path) -> None:
    for position in ("rope_linear", "alibi"):
        other = source(tmp_path / position, "arch=llama", f"position={position}")
        with pytest.raises(ConfigError, match=r"^init_from: has no rotary positions, or scaled ones"):
            extend().variants(from_source(other, f"position={position}"))


@pytest.mark.parametrize("attention", ["linear", "conv", "mla"])
def test_there_is_nothing_to_uptrain_without_key_and_value_heads(attention: str, tmp_path: Path) -> None:
    other = source(tmp_path / "other", "arch=llama", f"attention={attention}", "position=none")
    with pytest.raises(ConfigError, match=r"^init_from: its \w+ has no key and value heads to share; name a run of "):
        uptrain().variants(from_source(other, "position=none"))


QUICK = ("study.seeds=[1]", "study.measure_speed=false", "train.evaluations=2")


@pytest.fixture
def ours(tiny: list[str]) -> list[str]:
    """`tiny` without a budget, which these studies set."""
    return [o for o in tiny if override_key(o) != "train.tokens"]


@pytest.fixture
def begun(ours: list[str], command: Command) -> Ran:
    """A run of 20 steps in this folder."""
    return command(*ours, "train.tokens=5120", "name=source", "arm=base")


FROM = "init_from=runs/source/base/seed=1"


@pytest.mark.slow
def test_every_arm_is_planned_and_those_that_cannot_take_the_weights_are_refused(begun: Ran, ours: list[str]) -> None:
    extending = (*ours, "study=extend", FROM, "study.share=1", "study.positions=[rope,rope_yarn]", *QUICK)
    assert [arm.arm.name for arm in planned_study(*extending).arms] == ["rope", "rope_yarn"]
    assert refusal(*ours, "study=uptrain", FROM, "match=params") == (
        "match=params: gives arms other widths than the weights of init_from have; use match=none"
    )
    assert "has another tokenizer than this run" in refusal(*extending, "tokenizer=char")


@pytest.mark.slow
def test_an_uptraining_study_reports_what_each_start_recovers(begun: Ran, ours: list[str], command: Command) -> None:
    study = (*ours, "study=uptrain", FROM, "study.share=1", "study.kv_heads=[1]", "name=up", *QUICK)
    ran = command(*study)
    assert (ran.code, ran.err) == (0, "")
    folder = ran.cwd / "runs" / "up"
    result = analyse(Study.load(folder), folder)
    assert not [warning for warning in result.warnings if re.search(r"init_|start from|settings|Arms", warning)]
    table = tables(result)["starts"]
    cells = {row[0]: dict(zip(table.head, row, strict=True)) for row in table.rows}
    losses = {arm: [float(row[f"Loss at the {at}"]) for at in ("start", "end")] for arm, row in cells.items()}
    for i, at in enumerate(("start", "end")):
        fresh, mean, kept = (losses[arm][i] for arm in ("mqa-random", "mqa-mean", "mha"))
        expected = f"{100 * (fresh - mean) / (fresh - kept):.1f}%" if fresh > kept else "\u2013"
        shown = cells["mqa-mean"][f"Recovered at the {at}"]
        assert shown == expected or abs(float(shown[:-1]) - float(expected[:-1])) < 2, "of rounded losses"
    assert cells["mha"]["Parameters taken"] == "100.0%"
    assert cells["mqa-random"]["Recovered at the end"] == "\u2013"
    assert "Loss at the start" in (folder / "report.html").read_text(encoding="utf-8")

    other = (*ours, "train.tokens=5120", "name=source", "arm=base", "optim.lr=1e-3", "overwrite=true")
    assert command(*other).code == 0
    ran = command(*study)
    assert ran.code == 2
    assert "init_from's weights" in ran.err
