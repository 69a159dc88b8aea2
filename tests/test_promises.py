"""The inventory of promises in `promises.md`, and that of faults in `.ci/mutants`, name what there is."""

import ast
import re
import runpy
from pathlib import Path

TESTS = Path(__file__).parent


def test_every_promise_names_a_test_that_there_is() -> None:
    promised, _, given_up = (TESTS / "promises.md").read_text(encoding="utf-8").partition("## Given up")
    lines = [line for line in promised.splitlines() if line.startswith("- ")]
    named = [re.fullmatch(r"- .+: `tests/(\S+)::(\w+)`", line) for line in lines]
    assert len(named) > 200
    assert not [line for line, name in zip(lines, named, strict=True) if name is None]
    functions = {file: defined(TESTS / file) for file in {name[1] for name in named if name}}
    assert not [name[0] for name in named if name and name[2] not in functions[name[1]]]
    assert given_up.count("\n- ") >= 6


def test_every_fault_has_a_place_in_the_code_and_tests_that_there_are() -> None:
    root = TESTS.parent
    for name, fault in runpy.run_path(str(root / ".ci" / "mutants"))["MUTANTS"].items():
        assert (root / "llama_lab" / fault.file).read_text(encoding="utf-8").count(fault.old) == 1, name
        for file, _, test in (named.partition("::") for named in fault.tests.split()):
            assert test in defined(TESTS / file) if test else (TESTS / file).exists(), f"{name}: {file}::{test}"


def defined(file: Path) -> set[str]:
    """The names of the functions at the top of a file."""
    body = ast.parse(file.read_text(encoding="utf-8")).body if file.exists() else []
    return {node.name for node in body if isinstance(node, ast.FunctionDef)}
