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
from tests.conftest import Command, Ran
from tests.refusals import check_line, check_refused, refusing
from tests.study.design.test_designs import CONFIGS
from tests.study.planning import planned_study, refusal

POSITIONS = ["rope", "rope_linear", "rope_ntk", "rope_yarn", "rope_llama3"]
STARTS = ["mean", "first", "random"]
uptrain = partial(Uptrain, "llama2", 0.05, None, STARTS)
extend = partial(Extend, "llama", 0.05, 4, POSITIONS)


def from_source(init_from: Path | None, *shared: str) -> Composer:
    """The checkout's configs at size=pico, with `init_from` and further overrides."""
    own = () if init_from is None else (f"init_from='{init_from}'",)
    return Composer(("size=pico", *own, *shared))


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


def test_an_encoder_is_neither_uptrained_nor_extended(tmp_path: Path) -> None:
    own = ("family=encoder", "objective=masked")
    encoder = source(tmp_path / "encoder", "arch=llama", *own)
    for design in (uptrain(), extend()):
        with refusing("study.base=llama"):
            design.variants(from_source(encoder, *own))


@pytest.mark.slow
def test_extending_gives_every_scaling_the_growth_and_the_context_and_base_of_the_source(tmp_path: Path) -> None:
    llama = source(tmp_path / "llama", "arch=llama", "train.tokens=40000")
    arms = extend().variants(from_source(llama)).arms
    assert [arm.name for arm in arms] == POSITIONS
    for arm in arms:
        cfg, _ = from_source(llama).compose(*arm.overrides)
        position = cfg.model.position
        assert (cfg.model.max_seq_len, position.theta, cfg.train.tokens) == (128, 10000.0, 2000)
        if arm.name == "rope":
            assert position.scaling is None
        else:
            assert position.scaling.factor == 4
            assert position.scaling.get("original_max_seq_len", 32) == 32


@pytest.mark.parametrize(
    ("design", "overrides", "fault"),
    [
        (uptrain(), ["model.n_layers=3"], "model.n_layers=3"),
        (extend(), ["norm=layernorm"], "model.norm=LayerNorm"),
        (Uptrain("llama", 0.05, None, STARTS), [], "study.base=llama"),
        (Uptrain("llama2", 0.05, [4], STARTS), [], "study.kv_heads"),
        (Uptrain("llama2", 0.05, None, ["last"]), [], "study.starts: last"),
        (Uptrain("llama2", 0.0, None, STARTS), [], "study.share=0.0"),
        (Extend("llama", 0.05, 1, POSITIONS), [], "study.growth=1"),
        (Extend("llama", 0.05, 4, ["alibi"]), [], "study.positions: alibi"),
    ],
)
def test_what_would_compare_something_else_is_refused(
    design: Any, overrides: list[str], fault: str, tmp_path: Path
) -> None:
    llama = source(tmp_path / "llama", "arch=llama")
    with refusing(fault):
        design.variants(from_source(llama, *overrides))


@pytest.mark.parametrize("design", [uptrain(), extend()], ids=["uptrain", "extend"])
def test_without_a_source_there_is_nothing_to_train_on(design: Any, tmp_path: Path) -> None:
    for folder in (None, tmp_path / "nowhere"):
        with refusing("init_from="):
            design.variants(from_source(folder))


@pytest.mark.parametrize(
    ("design", "overrides"),
    [
        (extend(), ["position=rope_linear"]),
        (extend(), ["position=alibi"]),
        (uptrain(), ["position=none", "attention=linear"]),
        (uptrain(), ["position=none", "attention=mla"]),
    ],
)
def test_a_source_without_rotary_positions_or_without_heads_is_neither_extended_nor_uptrained(
    design: Any, overrides: list[str], tmp_path: Path
) -> None:
    other = source(tmp_path / "other", "arch=llama", *overrides)
    with refusing("init_from: "):
        design.variants(from_source(other, overrides[0]))


QUICK = ("study.seeds=[1]", "study.measure_speed=false", "train.evaluations=2")


@pytest.fixture
def ours(tiny: list[str]) -> list[str]:
    """`tiny` without a budget, which these studies set."""
    return [o for o in tiny if override_key(o) != "train.tokens"]


@pytest.fixture
def begun(ours: list[str], command: Command) -> Ran:
    """A run of 10 steps in this folder."""
    return command(*ours, "train.tokens=2560", "name=source", "arm=base")


FROM = "init_from=runs/source/base/seed=1"


@pytest.mark.slow
def test_every_arm_is_planned_and_those_that_cannot_take_the_weights_are_refused(begun: Ran, ours: list[str]) -> None:
    extending = (*ours, "study=extend", FROM, "study.share=1", "study.positions=[rope,rope_yarn]", *QUICK)
    assert [arm.arm.name for arm in planned_study(*extending).arms] == ["rope", "rope_yarn"]
    check_line(refusal(*ours, "study=uptrain", FROM, "match=params"), "match=params")
    check_line(refusal(*extending, "tokenizer=char"), "init_from")


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
    fresh, mean, kept = (float(cells[arm]["Loss at the start"]) for arm in ("mqa-random", "mqa-mean", "mha"))
    recovered = float(cells["mqa-mean"]["Recovered at the start"].removesuffix("%"))
    assert recovered == pytest.approx(100 * (fresh - mean) / (fresh - kept), abs=2), "of rounded losses"
    assert cells["mha"]["Parameters taken"] == "100.0%"
    assert cells["mqa-random"]["Recovered at the end"] == "\u2013"
    assert "Loss at the start" in (folder / "report.html").read_text(encoding="utf-8")

    other = (*ours, "train.tokens=2560", "name=source", "arm=base", "optim.lr=1e-3", "overwrite=true")
    assert command(*other).code == 0
    check_refused(command(*study), "data, tokenizer, precision or init_from's weights")
