"""`python eval.py run=...`: evaluates one or several runs, or those of a study."""

import glob
import sys
from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from llama_lab.analysis.grouping import runs_below
from llama_lab.analysis.unequal_settings import predicted
from llama_lab.config.schema import flatten
from llama_lab.config.trust import Trust
from llama_lab.data.objectives import predicts_text
from llama_lab.evaluation.evaluate import READ_TEXT, evaluate, prompts_of
from llama_lab.evaluation.load import TrainedRun
from llama_lab.evaluation.plot import plot_evaluation
from llama_lab.evaluation.printing import print_evaluation
from llama_lab.hf.loading import as_run, load
from llama_lab.hf.tensors import has_weights
from llama_lab.runs.evaluation import Evaluation
from llama_lab.runs.folder import is_run
from llama_lab.runs.record import finished, read_record
from llama_lab.runs.study import FILE, Study
from llama_lab.util.display import plain_table
from llama_lab.util.errors import ConfigError


def evaluate_all(runs: Sequence[Path], settings: DictConfig) -> int:
    """Evaluate runs; how many failed.

    The error of a run is printed, and the others are evaluated. Raises ConfigError if it is the only run.
    """
    beside = [] if settings.beside is None else found_runs(settings.beside, "beside")
    failed = 0
    for number, run in enumerate(runs, 1):
        if len(runs) > 1:
            print(f"run {number} of {len(runs)}")
        try:
            imported = opened(run, settings)
            if imported and beside and not predicts_text(imported.cfg):
                problem = f"compares bits per byte of next tokens, which {run} does not predict; leave it out"
                raise ConfigError(f"beside={settings.beside}: {problem}")
            found = evaluate(run, settings, imported)
        except ConfigError as error:
            if len(runs) == 1:
                raise
            failed += 1
            print(f"error: {error}", file=sys.stderr)
            continue
        plot_evaluation(found, run)
        print_evaluation(found, run)
        if imported and beside:
            print_beside(found, imported, beside)
    return failed


def opened(path: Path, settings: DictConfig) -> TrainedRun | None:
    """The model in a folder that holds no run but weights, on the text of the settings; None for a run."""
    if not has_weights(path):
        return None
    writes = bool(prompts_of(settings))
    parts = [] if writes else [part for part in settings.eval.parts if part in READ_TEXT]
    data = settings.get("data")
    if parts and not data:
        raise ConfigError(
            f"data: the parts {', '.join(parts)} need a text, and run={path} was imported without one; add data=stdlib "
            f"or data=text data.files=[book.txt], or choose others, eval.parts=[speed,sample]"
        )
    return as_run(load(path, Trust.of_command(tuple(settings.trust)), settings.weights), data or OmegaConf.create())


def print_beside(found: Evaluation, model: TrainedRun, runs: Sequence[Path]) -> None:
    """Print the bits per byte of an imported model, and of those runs that predict the same tokens of the same text."""
    ours = predicted(flatten(OmegaConf.to_container(model.cfg)))
    records = [r for r in finished(read_record(run) for run in runs if is_run(run)) if predicted(r.config) == ours]
    same = [r for r in records if r.environment.data_hash == found.data_hash and "val/bits_per_byte" in r.summary]
    table = plain_table("Bits per byte of the same text", ("model",), ("parameters", "context", "bits per byte"))
    rows = [(r.path, r.costs["params"], r.config["model.max_seq_len"], r.summary["val/bits_per_byte"]) for r in same]
    params = sum(p.numel() for p in model.model.parameters())
    rows.append((model.folder.path, params, model.model.max_seq_len, found.metrics["val/bits_per_byte"]))
    for path, *sizes, bits in sorted(rows, key=lambda row: row[-1]):
        table.add_row(str(path), *(f"{size:,.0f}" for size in sizes), f"{bits:.4f}")
    if len(same) < len(runs):
        reasons = "another text, other tokens of it, or unfinished"
        table.caption = f"{len(runs) - len(same)} of {len(runs)} runs are left out: {reasons}"
    Console(highlight=False).print(table)


def found_runs(wanted: str, key: str = "run") -> list[Path]:
    """The runs of a folder, a pattern or a study; those of a study by seed, so that arms take turns.

    Raises ConfigError if there are none.
    """
    if not wanted:  # perhaps an unset shell variable; run=. is the working directory
        raise ConfigError(f"{key}=: names nothing; name a run's folder, such as runs/llama/base/seed=1")
    path = Path(wanted)
    if (path / FILE).exists():
        members = [member for arm in Study.load(path).arms for member in arm.judged]
        listed = [path / member.folder for member in sorted(members, key=lambda member: member.seed)]
        started = [run for run in listed if is_run(run)]
        if len(started) < len(listed):
            print(f"{wanted}: {len(listed) - len(started)} of its {len(listed)} runs never began", file=sys.stderr)
        if started:
            return started
    matches = [path] if path.exists() else sorted(map(Path, glob.glob(wanted, recursive=True)))
    folders = [match for match in matches if match.is_dir()]
    runs = [run for folder in folders for run in ([folder] if has_weights(folder) else runs_below(folder))]
    if not runs:
        raise ConfigError(
            f"{key}={wanted}: holds no run; name folders of runs or studies, such as runs/llama/base/seed=1"
        )
    return list(dict.fromkeys(runs))
