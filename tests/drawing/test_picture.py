"""The picture as a file: valid SVG with all texts in it, what differs marked, and bad input refused."""

from pathlib import Path
from xml.etree import ElementTree

import pytest

from llama_lab.drawing.anatomy import anatomy
from llama_lab.drawing.picture import ACCENT, WIDTH, picture
from tests.composing import compose_config, decoder
from tests.conftest import Command
from tests.selection import first

SVG = "{http://www.w3.org/2000/svg}"


def texts(file: Path | str) -> list[ElementTree.Element]:
    root = ElementTree.fromstring(file if isinstance(file, str) else file.read_text(encoding="utf-8"))
    return list(root.iter(f"{SVG}text"))


def marked(file: Path | str) -> set[str]:
    return {str(one.text).replace("\u00a0", " ") for one in texts(file) if one.get("fill") == ACCENT}


def test_a_command_draws_shapes_and_costs_and_trains_nothing(command: Command) -> None:
    ran = command("arch=llama2", "size=nano", "draw=one.svg")
    assert (ran.code, ran.out, ran.err) == (0, "the picture is one.svg\n", "")
    assert [path.name for path in ran.cwd.iterdir()] == ["one.svg"]
    found = {str(one.text).replace("\u00a0", " ") for one in texts(ran.cwd / "one.svg")}
    assert found >= {"arch=llama2 size=nano", "4 \u00d7 Pre-norm block", "Grouped-query attention", "down 344 → 128"}
    assert found >= {"4 heads, 2 kv heads of 32", "49.2 k params", "164 kFLOPs/token", "state 64 KiB"}
    assert marked(ran.cwd / "one.svg") == set()


@pytest.mark.slow
def test_two_stand_side_by_side_and_only_what_differs_is_marked(command: Command) -> None:
    ran = command("norm=layernorm", "draw=two.svg", "draw_against=norm=rmsnorm", "model.n_layers=2")
    assert (ran.code, ran.err) == (0, "")
    found = marked(ran.cwd / "two.svg")
    assert found >= {"LayerNorm", "RMSNorm", "256 params", "128 params"}
    assert not found & {"Multi-head attention", "2 \u00d7 Pre-norm block", "SiLU", "T \u00d7 128"}
    root = ElementTree.parse(ran.cwd / "two.svg").getroot()
    assert root.get("width") == str(2 * WIDTH)
    names = [str(one.text) for one in texts(ran.cwd / "two.svg") if "norm=" in str(one.text)]
    assert names == ["norm=rmsnorm", "arch=llama size=nano norm=layernorm"]  # on two lines, and on one of two


def test_nothing_is_drawn_outside_of_the_picture() -> None:
    for overrides in (["arch=gpt_neox"], ["arch=gemma2", "model.n_layers=4"], ["arch=bloom"]):
        root = ElementTree.fromstring(
            picture(anatomy("x", decoder(*overrides, device="meta"), compose_config("size=pico", *overrides).model))
        )
        left, top, width, height = map(float, str(root.get("viewBox")).split())
        assert (left, width) == (0, WIDTH)
        for one in (*root.iter(f"{SVG}rect"), *root.iter(f"{SVG}text")):
            assert 0 <= float(str(one.get("x"))) < width
            assert top <= float(str(one.get("y"))) <= top + height


def test_a_hostile_name_is_text() -> None:
    one = anatomy("<script>&", decoder(device="meta"), compose_config("size=pico").model)
    assert "<script>&" in [text.text for text in texts(picture(one))]


@pytest.mark.parametrize(
    ("overrides", "told"),
    first(
        4,
        [
            ("draw=one.png", "draw=one.png: the picture is an SVG file"),
            ("draw=arch=gpt2", "is a setting"),
            ("draw=gone/one.svg", "draw=gone/one.svg: there is no folder gone"),
            ("draw=one.svg estimate=true", "draw=one.svg: estimate=true"),
            ("draw=one.svg measure=runs", "draw=one.svg: measure=runs"),
            ("draw_against=arch=gpt2", "draw_against=arch=gpt2: "),
            ("draw=one.svg draw_against=seed=3", "draw_against=seed=3: has the same parts"),
            ("draw=one.svg draw_against=norm=foo", "norm=foo: "),
            ("draw=one.svg draw_against=model.dim=x", "model.dim=x: "),
            ("draw=one.svg tokenizer=char", "model.vocab_size=null: "),
            ("draw=one.svg study=kv_heads", "draw=one.svg: "),
        ],
    ),
)
def test_bad_input_is_refused_in_one_line(overrides: str, told: str, command: Command) -> None:
    ran = command(*overrides.split())
    assert (ran.code, len(ran.err.splitlines())) == (2, 1)
    assert told in ran.err
    assert not (ran.cwd / "one.svg").exists()
