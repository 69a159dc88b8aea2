"""The documentation: its commands compose, its links and paths exist, its examples run, its tables are what is so."""

import argparse
import ast
import re
import shlex
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from hydra import compose
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path, get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override

import llama_lab
from benchmarks.__main__ import parser as bench_parser
from llama_lab.cli import MODES, compare_command, convert_command, main, tensorboard_command
from llama_lab.config.components import CONF_DIR
from llama_lab.config.composing import without
from llama_lab.config.explain import HELP, read_help
from llama_lab.config.grammar import override_key, to_hydra
from llama_lab.config.schema import check_kinds, default_settings
from llama_lab.hf.families import FAMILIES
from llama_lab.model import measure_cost
from llama_lab.runs.folder import OVERRIDES, write_yaml
from llama_lab.runs.stored import METRICS
from llama_lab.study.design.command import read_command
from llama_lab.study.design.designs import Composer
from llama_lab.training.prepare import check_run, check_single, with_recorded
from llama_lab.util.formatting import in_bytes
from tests.composing import decoder, options
from tests.conftest import Command, last_of_each

ROOT = Path(__file__).parents[1]
PAGES = {path.name: path.read_text(encoding="utf-8") for path in (*ROOT.glob("*.md"), *sorted(ROOT.glob("docs/*.md")))}
FOLDERS = (".ci", "benchmarks", "conf", "docs", "hydra_plugins", "llama_lab", "tests")
OURS = (*FOLDERS, "eval.py", "pyproject.toml", "train.py", *PAGES)
Check = Callable[[Sequence[str], pytest.MonkeyPatch], None]  # of the arguments of a command
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"`(my\w+/[\w./]+)`:\n\n```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)  # of an example
COMMAND = re.compile(r"^(?:\S+=\S+ )*(?:python (?:train|eval)\.py|python -m benchmarks|llama-lab[-\w]*)\s+(?=\S)")


def blocks(text: str, kind: str) -> list[str]:
    """The fenced blocks of one language."""
    return [body for language, body in BLOCK.findall(text) if language == kind]


def spans(text: str) -> list[str]:
    """What stands between backticks within a line or paragraph."""
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", BLOCK.sub("", text))]


def commands(text: str) -> Iterator[list[str]]:
    """The words of each command of ours, from blocks of shell and from paragraphs; `torchrun ... train.py` is one."""
    shell = [line for body in blocks(text, "bash") for line in body.replace("\\\n", " ").splitlines()]
    for line in (*shell, *(span for span in spans(text) if COMMAND.match(span))):
        for part in line.split("&&"):
            words = shlex.split(part, comments=True)
            names = [i for i, word in enumerate(words) if word in PROGRAMS]
            if names and not part.startswith("pip "):
                yield words[names[0] :]


def jobs(overrides: Sequence[str]) -> Iterator[list[str]]:
    """The overrides of as many runs of a sweep as have each of its values."""
    parsed = OverridesParser.create().parse_overrides(list(overrides))
    values = [
        [f"{o.get_key_element()}={value}" for value in values_of(o)] if o.is_sweep_override() else [text]
        for o, text in zip(parsed, overrides, strict=True)
    ]
    return ([own[i % len(own)] for own in values] for i in range(max(map(len, values), default=1)))


def values_of(override: Override) -> list[Any]:
    """What a sweep may set: all values, or the ends of an interval."""
    sweep = override.value()
    return [sweep.start, sweep.end] if isinstance(sweep, IntervalSweep) else list(override.sweep_string_iterator())


def check_train(arguments: Sequence[str], _: pytest.MonkeyPatch) -> None:
    """Compose every run, and check its settings as the program does before it trains."""
    words = with_recorded(to_hydra(arguments))
    given = get_args_parser().parse_args(read_help(words)[1] if HELP[0] in words else words)
    for overrides in jobs(given.overrides) if given.multirun else [given.overrides]:
        cfg = compose("config", overrides=overrides, return_hydra_config=True)
        choices = dict(cfg.hydra.runtime.choices)
        if choices["study"]:
            _, defaults = Composer().compose()
            read_command(cfg, [o for o in overrides if not override_key(o).startswith("hydra")], defaults["arch"])
        else:
            check_run(without(cfg, "hydra"), choices)
            if not given.multirun and not given.cfg:  # which shows settings, and trains nothing
                check_single(choices)


def check_eval(arguments: Sequence[str], _: pytest.MonkeyPatch) -> None:
    """Compose the settings, and check them."""
    given = get_args_parser().parse_args(to_hydra(arguments))
    overrides = given.overrides or ["run=here"]  # `--help`
    chosen = [override.removeprefix("data=") for override in overrides if override.startswith("data=")]
    choices = {"data": chosen[0] if chosen else None}  # for imported models
    check_kinds(compose("eval", overrides=overrides), default_settings(choices, "eval"))


def parsing(command: Callable[[], None], *deeds: str) -> Check:
    """Parse, and do none of these deeds."""

    def check(arguments: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> None:
        for deed in deeds:
            monkeypatch.setattr(f"llama_lab.{deed}", lambda *_: "")
        monkeypatch.setattr(sys, "argv", ["the command", *arguments])
        command()

    return check


def check_bench(arguments: Sequence[str], _: pytest.MonkeyPatch) -> None:
    """Parse."""
    assert isinstance(bench_parser().parse_args(arguments), argparse.Namespace)


def check_command(arguments: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """As the script of the command, or as the command that a mode stands for."""
    monkeypatch.setattr(sys, "argv", ["llama-lab", *arguments])
    monkeypatch.setattr("llama_lab.cli.train_command", lambda: check_train(sys.argv[1:], monkeypatch))
    name, *rest = arguments
    main() if name in MODES else PROGRAMS[f"llama-lab-{name}"](rest, monkeypatch)


PROGRAMS: dict[str, Check] = {
    "train.py": check_train,
    "llama-lab": check_command,
    "llama-lab-train": check_train,
    "eval.py": check_eval,
    "llama-lab-eval": check_eval,
    "llama-lab-compare": parsing(compare_command, "report.write.compare"),
    "llama-lab-convert": parsing(convert_command, "hf.convert.import_model", "hf.convert.export_model"),
    "llama-lab-tensorboard": parsing(tensorboard_command, "runs.tensorboard.open_tensorboard"),
    "benchmarks": check_bench,
}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that a reader of these pages has at their end."""
    folder = tmp_path_factory.mktemp("project")
    for name, content in FILE.findall(PAGES["extending.md"] + PAGES["switches.md"]):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content, encoding="utf-8")
    run = folder / "runs" / "llama" / "norm=layernorm" / "seed=1"
    run.mkdir(parents=True)
    write_yaml(["norm=layernorm"], run / OVERRIDES)
    return folder


COMMANDS = {shlex.join(words): words for text in PAGES.values() for words in commands(text)}  # each once


@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS)
@pytest.mark.matrix
def test_a_command_is_one_of_the_program_s(words: list[str], project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)
    path = create_config_search_path(str(CONF_DIR))
    if "--config-dir" in words:
        path.prepend("own", f"file://{project / words[words.index('--config-dir') + 1]}", anchor="schema")
    GlobalHydra.instance().clear()
    Hydra.create_main_hydra2("docs", path)
    try:
        PROGRAMS[words[0]](words[1:], monkeypatch)
    finally:
        GlobalHydra.instance().clear()


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_somewhere(page: str) -> None:
    folder = ROOT if (ROOT / page).exists() else ROOT / "docs"
    for target in re.findall(r"\]\(([^)\s]+)\)", BLOCK.sub("", PAGES[page])):
        name, _, heading = target.partition("#")
        if name.startswith("https://"):
            continue
        assert not name or (folder / name).exists(), target
        headings = re.findall(r"^#+ (.+)$", BLOCK.sub("", PAGES[Path(name or page).name]) if heading else "", re.M)
        assert not heading or heading in [anchor(text) for text in headings], target


def anchor(heading: str) -> str:
    """What GitHub calls a heading."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES)
def test_every_path_that_is_named_exists_and_defines_what_a_page_says_to_be_there(page: str) -> None:
    for span in spans(PAGES[page]):
        if re.fullmatch(r"[\w./*-]+", span) and span.partition("/")[0] in OURS:
            assert list(ROOT.glob(span.rstrip("/"))), span
    for name, file in re.findall(r"`([\w.]+)`(?:\s+in\s+|\s+\()`((?:llama_lab|benchmarks)/[\w/]+\.py)`", PAGES[page]):
        source = (ROOT / file).read_text(encoding="utf-8")
        assert re.search(rf"\b(def|class) {name.rpartition('.')[2]}\b", source), f"{name} in {file}"


@pytest.mark.parametrize("page", PAGES)
def test_what_examples_import_of_ours_exists(page: str) -> None:
    for body in blocks(PAGES[page], "python"):
        for node in ast.walk(ast.parse(body)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "llama_lab":
                assert node.attr in llama_lab.__all__
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("llama_lab"):
                assert {alias.name for alias in node.names} <= {*dir(import_module(str(node.module)))}


TRAINED = [
    pytest.param(words, id=shlex.join(words[3:]))
    for words in commands(PAGES["extending.md"])
    if words[0] == "llama-lab-train"
]


@pytest.mark.parametrize("words", TRAINED)
@pytest.mark.slow
def test_every_example_of_extending_trains(
    words: list[str], project: Path, tiny: list[str], command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(project)
    arguments = [word.replace("my_conf", str(project / "my_conf")) for word in words[1:]]
    keys = {override_key(word) for word in arguments}
    of_text = ("data=", "data.files", "data.document_chars") if "data" in keys else ()
    ours = [o for o in tiny if not o.startswith(("data", "tokenizer") if "data=backwards" in words else of_text)]
    if "study" not in keys:
        ours += ["train.tokens=256", "train.evaluations=1"]
    ran = command(*last_of_each([*ours, *arguments]))
    assert (ran.code, ran.err) == (0, "")


LLAMA3 = ["arch=llama3", "size=llama3_8b"]
DELTA = [*LLAMA3, "attention=gated_delta", "position=none"]
MODELS = {
    "LLaMA 7B": ["arch=llama", "size=llama_7b"],
    "Llama 3 8B, `attention=gated_delta` in three": [*DELTA, "pattern=attention_every_4th"],
    "Llama 3 8B, `attention=mamba2` |": [*LLAMA3, "attention=mamba2", "position=none"],
    "Mistral 7B": ["arch=mistral", "size=mistral_7b"],
}
OTHERS = {
    "Llama 2 70B": ["arch=llama2", "size=llama2_70b"],
    "Llama 3 8B, 8 key and value heads": LLAMA3,
    "Llama 3 8B, `attention=gated_delta` |": DELTA,
    "Falcon 7B": ["arch=falcon", "size=falcon_7b"],
}
LATER = [pytest.param(*row, marks=pytest.mark.matrix) for row in OTHERS.items()]


@pytest.mark.parametrize(("model", "overrides"), [*MODELS.items(), *LATER])
def test_the_table_of_kv_caches_holds_the_bytes_that_the_modules_take(model: str, overrides: list[str]) -> None:
    (row,) = (line for line in PAGES["evaluating.md"].splitlines() if line.startswith(f"| {model}"))
    built = decoder(*overrides, vocab_size=1, device="meta")
    costs = [measure_cost(built, length) for length in (256, 4096, 32_768, 131_072)]
    states = [costs[0].state_bytes_per_sequence, *(cost.kv_bytes for cost in costs)]
    assert row.strip("| ").split(" | ")[1:] == [f"{costs[0].kv_bytes_per_token:,}", *map(in_bytes, states)]


def test_the_table_of_families_holds_every_one_of_them() -> None:
    _, *rows = re.findall(r"^\| `([\w-]+)` \| (\w+) \|", PAGES["exchange.md"], re.MULTILINE)
    assert rows == list(dict.fromkeys((family.model_type, family.architecture) for family in FAMILIES))
    assert f"{len(rows)} families" in PAGES["README.md"]


# Options that the table of the README leaves to --help: variants of one that it names.
VARIANTS = re.compile(
    r"_bias|_temperature|_1e-6|_1e-12|_offset|_window|_gemma2|_qk_norm|_tanh|_500k|_2m|_quarter|_half|_mup|_scaled|_concatenated"
    r"|_1m|_150k|_interleaved|_olmoe|_qwen3|_deepseek_v3|_gpt_oss|_olmo_hybrid|_bamba|_kimi_linear"
)


@pytest.mark.parametrize(
    "group", ["arch", "norm", "block", "position", "attention", "ffn", "init", "study", "schedule"]
)
def test_the_readme_lists_the_options_of_every_group(group: str) -> None:
    (row,) = re.findall(rf"^\| .*`{group}`.* \| (.*) \|$", PAGES["README.md"], re.MULTILINE)
    missing = [o for o in options(group) if not re.search(rf"\b{o}\b", row) and not VARIANTS.search(o)]
    assert missing == []


def test_the_design_page_lists_the_rooms_in_the_order_that_is_checked() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    layers = settings["tool"]["importlinter"]["contracts"][0]["layers"]
    rooms = re.findall(r"^\| `llama_lab/(\w+)/` \|", PAGES["design.md"], re.MULTILINE)
    assert [*rooms[:-1], "api", "cli", rooms[-1]] == layers[::-1]


def test_the_design_page_lists_every_metric_as_it_is_declared() -> None:
    rows = re.findall(r"^\| `(.+)` \| (.+) \| (yes|no) \|$", PAGES["design.md"], re.MULTILINE)
    declared = [(m.name, m.means + f", in {m.unit}" * bool(m.unit), "yes" if m.logged else "no") for m in METRICS]
    assert rows == declared
