"""A run's folder may be anybody's: it names nothing that is built before it is known, and reads no environment."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from llama_lab.config.components import packaged_targets
from llama_lab.evaluation.load import load_run
from llama_lab.util.errors import ConfigError
from tests.conftest import Command

Copied = Callable[[Path], Path]


def with_target(run: Path, key: str, node: Any) -> Path:
    """Put a component into a run's config."""
    cfg = OmegaConf.load(run / "resolved.yaml")
    OmegaConf.update(cfg, key, node, merge=False, force_add=True)
    OmegaConf.save(cfg, run / "resolved.yaml")
    return run


@pytest.mark.parametrize(
    ("key", "node"),
    [
        ("model.norm", '{"_target_": "torch.utils.collect_env.run", "command": "touch {harm}"}'),
        ("data.source", '{"_target_": "pathlib.Path.write_text", "self": "{harm}", "data": "x"}'),
        ("model.extra", '[{"deep": [{"_target_": "os.mkdir", "path": "{harm}"}]}]'),
        ("model.norm", '{"_target_": ["os.mkdir"]}'),
        ("model.norm", '{"_target_": "llama_lab.util.files.threading.Thread"}'),
        ("model.norm", '{"_target_": "${oc.env:HARM}", "path": "{harm}"}'),
    ],
)
def test_a_config_that_names_foreign_code_is_refused_before_anything_is_built(
    key: str, node: str, endless: Path, copied: Copied, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    harm = tmp_path / "harm"
    monkeypatch.setenv("HARM", "os.mkdir")
    run = with_target(copied(endless), key, json.loads(node.replace("{harm}", str(harm))))
    with pytest.raises(ConfigError, match=r"^.*resolved\.yaml names .* could run any code; .* add trust=\[.*$"):
        load_run(run)
    assert not harm.exists()


def test_a_stored_config_reads_no_environment(endless: Path, copied: Copied, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "hunter2")
    run = with_target(copied(endless), "train.prompt", "${oc.env:SECRET}")
    assert load_run(run).cfg.train.prompt == "${oc.env:SECRET}"


def test_eval_py_says_what_to_add_and_takes_it(
    endless: Path, copied: Copied, tmp_path: Path, evaluating: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "trusted_lab"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "norm.py").write_text("import os\nfrom llama_lab.model.norm import RMSNorm\nclass Mine(RMSNorm): pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    run = with_target(copied(endless), "model.norm._target_", "trusted_lab.norm.Mine")
    refused = evaluating(f"run={run}", "prompt=", "max_new_tokens=3")
    assert refused.code == 2
    assert "names trusted_lab.norm.Mine, " in refused.err
    assert refused.err.rstrip().endswith("add trust=[trusted_lab]")
    assert "trusted_lab" not in sys.modules
    assert evaluating(f"run={run}", "prompt=", "max_new_tokens=3", "trust=[trusted_lab]").code == 0
    for target in ("trusted_lab.norm.os.system", "trusted_lab.norm.RMSNorm"):
        with_target(run, "model.norm._target_", target)
        assert target not in packaged_targets()
        refused = evaluating(f"run={run}", "prompt=", "max_new_tokens=3", "trust=[trusted_lab]")
        assert f"names {target}, " in refused.err


def test_the_components_of_this_command_s_config_dir_are_known(
    endless: Path, copied: Copied, tmp_path: Path, evaluating: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lab_of_yaml.py").write_text("from llama_lab.model.norm import RMSNorm\nclass Mine(RMSNorm): pass\n")
    (tmp_path / "mine" / "norm").mkdir(parents=True)
    (tmp_path / "mine" / "norm" / "mine.yaml").write_text("# @package model.norm\n_target_: lab_of_yaml.Mine\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    run = with_target(copied(endless), "model.norm._target_", "lab_of_yaml.Mine")
    assert evaluating(f"run={run}", "prompt=", "max_new_tokens=3").code == 2
    assert evaluating("--config-dir", str(tmp_path / "mine"), f"run={run}", "prompt=", "max_new_tokens=3").code == 0
