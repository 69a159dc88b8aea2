"""The pictures of a report: every arm beside its reference, from what its runs have on disk."""

import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

from llama_lab.analysis.analyse import analyse
from llama_lab.analysis.result import Result
from llama_lab.drawing.picture import ACCENT
from llama_lab.report.page import drawing, page
from tests.analysis import results
from tests.analysis.synthetic import write_study

ARMS = {"base": 0.0, "heads": -0.1, "deep": -0.2}
CONFIG = {"heads": {"model.n_kv_heads": 2}, "deep": {"model.n_kv_heads": 2, "model.n_layers": 3}}


def drawings(result: Result) -> dict[str, str]:
    """The pictures by title, as the page has them."""
    return dict(drawing(*pair) for pair in result.architectures)


def drawn(folder: Path, design: str) -> dict[str, set[str]]:
    """What is marked in each picture."""
    result = analyse(write_study(folder, ARMS, design=design, match="none", config=CONFIG), folder)
    trees = {title: ElementTree.fromstring(svg) for title, svg in drawings(result).items()}
    return {
        title: {str(one.text).replace("\u00a0", " ") for one in tree.iter() if one.get("fill") == ACCENT}
        for title, tree in trees.items()
    }


def test_a_ladder_draws_each_arm_beside_the_one_before_and_others_beside_the_baseline(tmp_path: Path) -> None:
    ladder = drawn(tmp_path / "ladder", "ladder")
    assert list(ladder) == ["base and heads", "heads and deep"]
    assert {"3 \u00d7 Pre-norm block", "4 \u00d7 Pre-norm block"} <= ladder["heads and deep"]
    assert "4 heads, 2 kv heads of 32" in ladder["base and heads"]
    assert "4 heads, 2 kv heads of 32" not in ladder["heads and deep"]
    assert list(drawn(tmp_path / "apart", "add_one")) == ["base and heads", "base and deep"]


def test_arms_over_sizes_and_budgets_are_drawn_beside_those_of_their_own_size_once(tmp_path: Path) -> None:
    names = [f"{option}-{size}-{budget}" for size in "ab" for budget in (5, 10) for option in ("mha", "gqa")]
    sizes = {"a": {}, "b": {"model.n_layers": 3}}
    heads = {"mha": {}, "gqa": {"model.n_kv_heads": 2}}
    config = {name: heads[name[:3]] | sizes[name[4]] for name in names}
    study = write_study(tmp_path, dict.fromkeys(names, 0.0), design="depth", match="none", config=config)
    steps = [replace(arm, previous=arm.name.replace("gqa", "mha")) if "gqa" in arm.name else arm for arm in study.arms]
    found = analyse(replace(study, arms=tuple(steps)), tmp_path)
    assert list(drawings(found)) == ["mha-a-5 and gqa-a-5", "mha-a-5 and mha-b-5", "mha-b-5 and gqa-b-5"]


def test_arms_of_one_architecture_have_one_picture(tmp_path: Path) -> None:
    config = {"warm": {"schedule.warmup": 0.2}}
    found = analyse(write_study(tmp_path, {"base": 0.0, "warm": 0.1}, config=config), tmp_path)
    assert list(drawings(found)) == ["base"]


def test_a_model_that_cannot_be_rebuilt_has_none(tmp_path: Path) -> None:
    study = write_study(tmp_path, {"base": 0.0, "mine": 0.1, "deep": 0.2}, config={"deep": {"model.n_layers": 2}})
    for file in (tmp_path / "mine").rglob("resolved.yaml"):
        file.write_text(file.read_text().replace("llama_lab.model.norm.RMSNorm", "mylab.MaxNorm"))
    assert list(drawings(analyse(study, tmp_path))) == ["base and deep"]


def test_the_page_folds_pictures_and_leaves_their_section_out_without_any(tmp_path: Path) -> None:
    ((one, _),) = analyse(write_study(tmp_path, {"base": 0.0}), tmp_path).architectures
    shown = page(replace(results.ladder(), architectures=((replace(one, name="a<b"), None),)))
    assert "<summary>a&lt;b</summary>" in shown
    assert re.search(r'aria-label="a&lt;b"><svg .*</svg>\s*</div></details>', shown, re.DOTALL)
    assert "Architectures" not in page(results.ladder())
