"""What a person types at a shell reaches Hydra as it was meant."""

from collections.abc import Callable

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from llama_lab.cli import eval_command, train_command
from llama_lab.config.grammar import quote_argument, to_hydra, to_override
from tests.conftest import Command, exit_code
from tests.refusals import refusing


def read(override: str) -> object:
    """The value that Hydra reads."""
    return OverridesParser.create().parse_override(override).value()


@pytest.mark.parametrize(
    "path",
    ["my runs", "été", "日本", "a&b", "runs (2)", "a=b", "a'b", 'a"b', "a;b#c!", "2024", "1e3", "true", "../x/y"],
)
def test_a_path_needs_no_quotes_beyond_the_shell_s(path: str) -> None:
    assert read(quote_argument(f"runs_dir={path}")) == path


@pytest.mark.parametrize(
    ("typed", "files"),
    [
        ("[mon été.txt,b c.txt]", ["mon été.txt", "b c.txt"]),
        ("[été.txt, b.txt]", ["été.txt", "b.txt"]),
        ("['a,b.txt',b.txt]", ["a,b.txt", "b.txt"]),
        ("[books/x[0-9].txt]", ["books/x[0-9].txt"]),
        ("[l'été.txt]", ["l'été.txt"]),
        ("mon été.txt", "mon été.txt"),
    ],
)
def test_a_list_of_paths_needs_none_either(typed: str, files: object) -> None:
    assert read(quote_argument(f"data.files={typed}")) == files


@pytest.mark.parametrize(
    "value", ["climb", "it's", 'a "b"', "", "null", "2024", "a,b", 3, 1e-5, True, None, ["a", ""], {"a": ["1", 1]}]
)
def test_a_value_in_hydra_s_grammar_is_read_as_it_was(value: object) -> None:
    assert read(f"+extra={to_override(value)}") == value


def test_the_home_folder_is_what_the_shell_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert quote_argument("runs_dir=~/runs") == "runs_dir=/home/me/runs"
    assert quote_argument("resume=~/runs/a") == 'resume="/home/me/runs/a"'


@pytest.mark.parametrize(
    "argument",
    [
        "norm=rmsnorm,layernorm",
        "data.files=[book.txt]",
        "data.files=['books/**/*.txt','more.parquet']",
        "runs_dir=a,b",
        "runs_dir=${oc.env:HOME}/runs",
        "model.position.scaling={_target_: a.B, factor: 2}",
        "train.tokens=[1",
        "data.files=???",
        "~optim",
        "--multirun",
        "--config-dir=/tmp/été=1",
    ],
)
def test_what_hydra_reads_or_a_person_has_to_mend_is_left_as_it_is(argument: str) -> None:
    assert quote_argument(argument) == argument


def test_flags_come_first_wherever_they_were_typed(command: Command) -> None:
    typed = ["norm=a,b", "--multirun", "seed=1,2", "--config-dir", "my conf", "name=x", "-c", "job"]
    assert to_hydra(typed) == ["--multirun", "--config-dir", "my conf", "-c", "job", "norm=a,b", "seed=1,2", "name=x"]
    ran = command("model.dim=64", "--cfg", "job", "seed=7", "--resolve")
    assert (ran.code, ran.err) == (0, "")
    cfg = OmegaConf.create(ran.out)
    assert (cfg.model.dim, cfg.model.seed) == (64, 7)


@pytest.mark.parametrize(
    ("typed", "fault"),
    [
        ("norm=rmsnorm seed=1 norm=layernorm", "norm=layernorm: norm=rmsnorm"),
        ("seed=1 seed=1", "seed=1"),
        ("tokens=1 ++tokens=2", "++tokens=2: tokens=1"),
        ("optim=adamw --multirun ~optim", "~optim: optim=adamw"),
        ("=5", "=5"),
        ("++=5", "++=5"),
    ],
)
def test_a_key_given_twice_or_not_at_all_is_refused(typed: str, fault: str) -> None:
    with refusing(fault):
        to_hydra(typed.split())


@pytest.mark.parametrize(
    ("function", "first", "second"), [(train_command, "norm=none", "norm=rmsnorm"), (eval_command, "run=a", "run=b")]
)
def test_every_command_refuses_a_key_given_twice(
    function: Callable[[], None],
    first: str,
    second: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert exit_code(function, ["command", first, second], monkeypatch) == 2
    assert capsys.readouterr().err.startswith(f"error: {second}: {first}")
