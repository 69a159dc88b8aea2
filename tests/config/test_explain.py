"""`--help NAME`: groups, options and keys, explained by the comments of the YAML files."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from llama_lab.cli import main
from llama_lab.config.components import CONF_DIR
from llama_lab.config.explain import comment, nodes
from llama_lab.config.schema import groups, keys_of, option_file, options
from tests.conftest import Command, Ran
from tests.refusals import check_refused

REPEATED = ("data.source", "data.probe", "model.ffn.activation")  # hold what other keys say


def comments(text: str) -> dict[str, str]:
    return {key: comment(text.splitlines(), name, value) for key, name, value in nodes(yaml.compose(text), "")}


def words(text: str) -> str:
    """Text without its columns, whose width depends on the longest name."""
    return " ".join(text.split())


@pytest.mark.slow
def test_a_group_shows_its_options_and_the_keys_of_the_chosen_one(command: Command) -> None:
    ran = command("--help", "attention", "arch=llama2")
    assert (ran.code, ran.err) == (0, "")
    assert "attention=mqa Multi-query: one key and value head for all" in words(ran.out)
    assert "Of attention=gqa, which is chosen:" in words(ran.out)
    assert "model.attention.window=null a query sees itself" in words(ran.out)
    assert "arch=llama2: Llama 2" in words(ran.out)
    assert max(map(len, ran.out.splitlines())) <= 80


@pytest.mark.parametrize(
    ("name", "lines"),
    {
        "optim=muon": ["optim.momentum=0.95          decay of the average of gradients"],
        "arch=gpt2": ["norm=layernorm", "position=learned"],  # a recipe's choices
        "study=ladder": ["study.base=vanilla", "study.dry_run=false", "match=params"],  # which is not run
        "position=rope_yarn": ["model.position.scaling.factor=2.0", "by which the context grows"],
        "size=llama_7b": ["model.dim=4096          width of the residual stream"],  # which only another option says
    }.items(),
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.slow
def test_an_option_or_a_key_shows_values_and_comments(name: str, lines: list[str], command: Command) -> None:
    ran = command(name, "--help")
    assert (ran.code, ran.err) == (0, "")
    for line in lines:
        assert words(line) in words(ran.out)
    assert "_partial_" not in ran.out
    assert "data.source.path" not in ran.out, "it only repeats another key"
    assert not list(ran.cwd.iterdir())


@pytest.mark.slow
def test_the_user_s_own_options_are_explained_like_ours(command: Command, tmp_path: Path) -> None:
    for group, text in {
        "norm": "# @package model.norm\n# The largest becomes one\n_target_: mylab.MaxNorm\n_partial_: true\n"
        "# Added to\n# the largest\neps: 1e-6\n",
        "experiment": "# @package _global_\n# A longer run\ntrain:\n  tokens: 7e6  # twice\n",
    }.items():
        (tmp_path / group).mkdir()
        (tmp_path / group / "mine.yaml").write_text(text)
    folder = ["--config-dir", str(tmp_path)]
    assert "norm=mine The largest becomes one" in words(command(*folder, "--help", "norm").out)
    assert "model.norm.eps=1e-06 Added to the largest" in words(command(*folder, "--help", "norm=mine").out)
    assert "train.tokens=7000000.0 twice" in words(command(*folder, "--help", "experiment=mine").out)
    searched = command("--help", "norm", f"hydra.searchpath=[file://{tmp_path}]")
    assert "norm=mine" in words(searched.out)


def test_a_command_that_does_not_train_explains_its_own_keys(in_process: Callable[..., Ran]) -> None:
    for command, keys in {"estimate": ["estimate", "device", "estimate_mfu"], "measure": ["measure"]}.items():
        ran = in_process(main, "llama-lab", command, "--help")
        assert (ran.code, ran.err) == (0, "")
        assert re.findall(r"^  (\w+)=", ran.out, re.MULTILINE) == keys


def test_the_settings_of_an_evaluation_are_explained(evaluating: Command) -> None:
    assert "eval.rounds=5 of measuring speed" in words(evaluating("--help", "eval").out)
    assert "top_k=null keep the k likeliest tokens" in words(evaluating("--help", "top_k").out)


@pytest.mark.parametrize(
    ("name", "fault"),
    {
        "atention": "--help atention: no such group, option or key (did you mean attention?)",
        "rope_theta": "--help rope_theta: no such group, option or key (did you mean model.position.theta?)",
        "norm=rms": "norm=rms",
    }.items(),
)
def test_an_unknown_name_is_one_line_with_a_suggestion(name: str, fault: str, command: Command) -> None:
    check_refused(command("--help", name), fault)


def test_comments_are_read_behind_a_value_and_above_a_key() -> None:
    text = """\
# The head of the file
a: 1  # behind
# above,
# two lines
b: "# no comment"
c: {d: 2}  # of a flow mapping
e:  # of a block
  # inside
  f: [1, 2]
g: |-  # of a text
  # no comment
h: ~
"""
    assert comments(text) == {
        "a": "behind",
        "b": "above, two lines",
        "c": "of a flow mapping",
        "c.d": "",
        "e": "of a block",
        "e.f": "inside",
        "g": "of a text",
        "h": "",
    }


def test_every_key_of_a_group_has_a_comment_in_one_of_its_options() -> None:
    """Write one behind the key, `lr: 2e-3  # peak learning rate`: `--help` prints it."""
    for group in groups():
        said: set[str] = set()
        base = {"study": "any_study.yaml", "size": "lab_size.yaml"}.get(group)
        inherited = (CONF_DIR / base).read_text(encoding="utf-8") if base else ""
        for option in options(group):
            text = option_file(group, option).read_text(encoding="utf-8")
            said |= {key.rpartition(".")[2] for key, what in comments(text + inherited).items() if what}
        keys = {key for option in options(group) for key in keys_of(option_file(group, option))}
        ours = {key for key in keys if not key.startswith((*REPEATED, "hydra.")) and "._" not in key}
        assert {key for key in ours if not {*key.split(".")[-2:]} & said} == set()
