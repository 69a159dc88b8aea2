"""Studies of any size, to time their planning and their reports: the runs are made up, and nothing is trained."""

import io
import math
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path

import hydra
import numpy as np
from hydra.core.global_hydra import GlobalHydra

from llama_lab.config.components import CONF_DIR, build_model, register_resolvers
from llama_lab.runs.environment import environment
from llama_lab.runs.metrics import MetricsCSV
from llama_lab.runs.stored import Environment, Facts, Summary
from llama_lab.study.design.command import Composer, read_command
from llama_lab.study.design.plan import Plan, PlannedArm, PlannedRun, plan_study
from llama_lab.study.report.write import write_report
from llama_lab.training.train import run_facts

EVALUATIONS = 10  # rows of metrics.csv that a made-up run has
LINES = 3000


class Workshop:
    """Plans studies of two blocks at several warm-ups, and reports on made-up runs of them, within `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._text = folder / "text.txt"
        self._text.write_text("".join(f"def f{n}(x): return {n * n} * x\n\n" for n in range(LINES)))

    def plan(self, arms: int, seeds: int = 3) -> Plan:
        """The plan of a study with an even number of arms, as a dry run makes it."""
        overrides = [
            "study=depth",
            "study.depths=[2]",
            f"study.warmups=[{','.join(f'{n / 1000:g}' for n in range(arms // 2))}]",
            f"study.seeds=[{','.join(map(str, range(1, seeds + 1)))}]",
            f"name={arms}-{seeds}",
            f"runs_dir={self.folder / 'runs'}",
            "size=pico",
            "data=text",
            f"data.files=[{self._text}]",
            "data.document_chars=200",
            f"data.cache_dir={self.folder / 'cache'}",
            "tokenizer=byte",
            "train.tokens=1e5",
            "trainer=cpu",
            "logger=none",
        ]
        register_resolvers()
        with hydra.initialize_config_dir(str(CONF_DIR), version_base="1.3"), redirect_stdout(io.StringIO()):
            loader = GlobalHydra.instance().config_loader()
            cfg = hydra.compose("config", overrides, return_hydra_config=True)
            command = read_command(cfg, overrides, Composer(loader, ()).compose()[1]["arch"])
            return plan_study(command, Composer(loader, command.shared))

    def report_of(self, runs: int) -> Callable[[], object]:
        """A function that builds the report of a study with an even number of made-up runs, half of each arm."""
        plan = self.plan(2, runs // 2)
        random = np.random.default_rng(0)
        for arm in plan.arms:
            described = environment(facts_of(arm, plan))
            for run in arm.runs:
                leave(run, replace(described, seed=run.member.seed), 2 + 0.01 * random.standard_normal())
        plan.study.save(plan.folder)

        def report() -> None:
            with redirect_stdout(io.StringIO()):
                write_report(plan.folder)

        return report


def facts_of(arm: PlannedArm, plan: Plan) -> Facts:
    """What the runs of an arm have in common on record."""
    run, dataset = arm.runs[0].run, plan.dataset
    return run_facts(run, dataset, build_model(run.cfg, dataset.index.vocab_size), arm.cost)


def leave(planned: PlannedRun, described: Environment, loss: float) -> None:
    """Write the folder of a finished run that ended at `loss`, in nats per token, without a checkpoint."""
    run = planned.run
    run.folder.path.mkdir(parents=True)
    run.folder.begin(run.cfg, run.overrides, described)
    log, metrics = MetricsCSV(run.folder.metrics), dict(described.metrics)
    for n in range(1, EVALUATIONS + 1):
        step, now = run.steps * n // EVALUATIONS, loss + 4 * math.exp(-5 * n / EVALUATIONS)
        row = {"tokens": step * run.tokens_per_step, "seconds": step / 100, "train/loss": now, "val/loss": now}
        row |= {"val/bits_per_byte": now / math.log(2), "perf/tokens_per_second": 1e4}
        log.log_metrics(row, step)
        metrics |= {"step": step, **row}
    facts = {name: value for name, value in vars(described).items() if name in Facts.__dataclass_fields__}
    Summary(**facts | {"metrics": metrics}).save(run.folder.path)
    run.folder.write_status("done")
