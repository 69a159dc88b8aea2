"""The shipped sweep of W&B's: the command that its agent makes of it, by the agent's own code, without a server."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import TRAIN, enter

SWEEP = TRAIN.parent / "docs" / "wandb_sweep.yaml"
DRAWN = {"optim.lr": 0.0021, "norm": "layernorm", "model.n_layers": 4}


@pytest.mark.process
@pytest.mark.slow
def test_the_agent_of_wandb_starts_a_run_that_belongs_to_its_sweep(
    environment: dict[str, str],
    tiny: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from wandb.sdk.launch.sweeps.utils import load_sweep_config  # takes two seconds to import
    from wandb.wandb_agent import Agent

    sweep = load_sweep_config(str(SWEEP))
    assert sweep["parameters"].keys() == DRAWN.keys()
    assert sweep["metric"] == {"name": "val/loss", "goal": "minimize"}
    enter(tmp_path, environment, monkeypatch)
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    monkeypatch.setenv("WANDB_SWEEP_ID", "s1")
    for name in ("WANDB_RUN_ID", "WANDB_SWEEP_PARAM_PATH"):  # which the agent sets
        monkeypatch.setenv(name, "")

    agent: Any = Agent.__new__(Agent)  # which would ask W&B's server who it is
    agent._in_jupyter, agent._function, agent._forward_signals, agent._run_processes = False, None, False, {}
    ours = [one for one in tiny if not one.startswith("logger")]
    agent._sweep_command = [*sweep["command"], *ours, "logger=wandb"]
    args = {name: {"value": value} for name, value in DRAWN.items()}
    agent._command_run({"run_id": "abcd1234", "program": str(TRAIN), "args": args})
    assert agent._run_processes["abcd1234"].wait() == 0

    (folder,) = {file.parent for file in tmp_path.glob("runs/wandb_sweep/*/seed=1/summary.json")}
    config = yaml.safe_load((folder / "resolved.yaml").read_text())
    assert (config["optim"]["lr"], config["model"]["n_layers"]) == (0.0021, 4)
    assert config["model"]["norm"]["_target_"].endswith("LayerNorm")
    assert list(folder.glob("wandb/offline-run-*-abcd1234")), "W&B finds the result under the id that it gave"
