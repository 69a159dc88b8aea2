"""`python -m llama_lab.claims [NAME ...] [OVERRIDE ...]`: run what is missing, judge, and write the pages."""

import argparse
import re
import shlex
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import yaml

from llama_lab.analysis.analyse import analyse
from llama_lab.analysis.result import Result
from llama_lab.config.grammar import override_key
from llama_lab.config.messages import exit_with
from llama_lab.config.schema import CHANGEABLE, belongs
from llama_lab.runs.study import FILE, Study
from llama_lab.study.design.plan import Plan
from llama_lab.util.errors import ConfigError
from llama_lab.util.formatting import duration

from .archive import ENDED, beside, changed_arms, pack, rows_of, unpack
from .book import Judged, write_pages
from .claim import Claim, all_claims
from .judging import confirmed, judge, recompute, verdict
from .planning import changed_loss, is_of_other_data, plan_of, seconds, too_large

CLAIMS, PAGES, FRONT = Path("claims"), Path("docs/claims"), Path("README.md")
DEVICES = ("cpu", "gpu")
# Keys that change no verdict, and neither where the results are.
FREE = [*({*CHANGEABLE} - {"runs_dir"}), "hydra/launcher", "hydra", "trainer.compile", "study.measure_speed"]


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m llama_lab.claims", description=__doc__)
    about = "claims, default: all; and settings of train.py that change no result, such as hydra/launcher=slurm"
    parser.add_argument("words", nargs="*", metavar="NAME|OVERRIDE", help=about)
    parser.add_argument("--list", action="store_true", help="say which stand, are partial or stale, and their cost")
    parser.add_argument("--check", action="store_true", help="the same, with the first steps of one arm run again")
    parser.add_argument("--judge", action="store_true", help="run nothing: judge what the CSV has, and write the pages")
    given = parser.parse_args()
    overrides = [word for word in given.words if "=" in word]
    names = [word for word in given.words if "=" not in word]
    try:
        claims = all_claims(CLAIMS)
        if unknown := [name for name in names if name not in claims]:
            raise ConfigError(f"{unknown[0]}: is no claim; choose from {', '.join(claims)}")
        if fixed := bare(overrides):
            raise ConfigError(f"{min(fixed)}: is for the claim to say; use train.py for another study")
        chosen = [claims[name] for name in names or claims]
        if not (given.list or given.check or given.judge):
            for claim in chosen:
                run(claim, overrides)
        if given.list or given.check:
            for claim in chosen:
                print(state(claim, judged(claim), given.check), flush=True)
        else:
            write_pages({name: (claim, judged(claim)) for name, claim in claims.items()}, PAGES, FRONT)
            print(f"the pages are in {PAGES}")
    except ConfigError as error:
        exit_with(error)


def run(claim: Claim, overrides: Sequence[str]) -> None:
    """Train what is missing of a claim's study here, and keep what has ended, also after Ctrl-C or a failed run."""
    if not claim.study:
        return
    device = device_of([*claim.study, *overrides])
    if device not in devices(claim):
        print(f"{claim.name}: is for a GPU, and left out here")
        return
    archive = archive_of(claim, device)
    name = f"claims-{claim.name}-{device}"
    folder = Path("runs") / name
    if claim.lacks_source:
        train(claim, "source", claim.source)
    plan = plan_of(claim)
    if archive.exists():
        if problem := stale(claim, archive, plan):
            raise ConfigError(f"{archive}: is stale, {problem}; delete it and {folder} to run the claim again")
        unpack(archive, folder, claim.config_dir)
    if not any(one.startswith("hydra/launcher=") for one in overrides) and (large := too_large(plan)):
        raise ConfigError(f"{claim.name}: this device is too small for {large[0]} by the estimate; use another")
    try:
        train(claim, "study", [*claim.study, f"name={name}", *overrides])
    finally:
        if (folder / FILE).exists():
            pack(folder, archive)


def train(claim: Claim, what: str, words: Sequence[str]) -> None:
    """Run `train.py`. Ctrl-C is left to it, which saves what trains. Raises ConfigError unless it ends well."""
    options = ["--config-dir", claim.config_dir] if claim.config_dir else []
    before = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        code = subprocess.run([sys.executable, "train.py", *options, *words], check=False).returncode
    finally:
        signal.signal(signal.SIGINT, before)
    if code:
        raise ConfigError(f"{claim.name}: its {what} ended with status {code}, see above; the same command goes on")


def devices(claim: Claim) -> tuple[str, ...]:
    """The kinds of device that it is for."""
    return DEVICES if claim.device == "cpu" else DEVICES[1:]


def device_of(words: Sequence[str]) -> str:
    """The kind of device that a study trains on: the one that overrides name, since a cluster has it, or this one's."""
    asked = [word.partition("=")[2] for word in words if override_key(word) in ("trainer", "trainer.accelerator")]
    here = "gpu" if torch.cuda.is_available() else "cpu"
    return [here, *(one for one in asked if one in DEVICES)][-1]


def archive_of(claim: Claim, device: str) -> Path:
    """Where the results of a kind of device are kept."""
    return CLAIMS / claim.name / f"{device}.csv"


def judged(claim: Claim) -> list[Judged]:
    """The verdicts on a claim by what is kept: on each kind of device, or on its figures."""
    found = [Judged("", [(figure, recompute(figure)) for figure in claim.figures])] if claim.figures else []
    archives = sorted((CLAIMS / claim.name).glob("*.csv"))
    results = [result_of(claim, archive) for archive in archives]
    by_statement = [confirmed([verdict(said, result) for result in results], results) for said in claim.statements]
    for place, (archive, result) in enumerate(zip(archives, results, strict=True)):
        verdicts = [(said, of_studies[place]) for said, of_studies in zip(claim.statements, by_statement, strict=True)]
        rows = rows_of(archive)
        spent, dates = sum(row.get("summary.seconds", 0.0) for row in rows), sorted({row["date"] for row in rows})
        span = " to ".join(dict.fromkeys((dates[0], dates[-1])))
        found.append(Judged(archive.stem, verdicts, result, spent / 3600, span, stale(claim, archive)))
    if claim.study and not any(one.device for one in found):
        found.append(Judged("", [(said, judge(said, None)) for said in claim.statements]))
    return found


def result_of(claim: Claim, archive: Path) -> Result:
    """The analysis of the study that an archive holds."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        unpack(archive, folder, claim.config_dir)
        return analyse(Study.load(folder), folder)


def stale(claim: Claim, archive: Path, plan: Plan | None = None) -> str:
    """Why the results of an archive are not those of the claim now; empty if they are. plan: to compare the data."""
    command = yaml.safe_load(beside(archive, FILE).read_text(encoding="utf-8"))["command"]
    ran = bare(word for word in shlex.split(command) if "=" in word and not word.startswith("name="))
    for words, how in ((bare(claim.study) - ran, "without"), (ran - bare(claim.study), "with")):
        if words:
            return f"its study was run {how} {min(words)}"
    if changed := changed_arms(archive, claim.config_dir):
        return f"the settings of {', '.join(changed)} are others now"
    return "its results are of other data than is here" if plan and is_of_other_data(archive, plan) else ""


def bare(words: Iterable[str]) -> set[str]:
    """Overrides that decide results, without spaces and quotes."""
    decisive = (word for word in words if not (word.startswith("trainer=") or belongs(override_key(word), FREE)))
    return {re.sub(r"[\s\"']", "", word) for word in decisive}


def state(claim: Claim, found: Sequence[Judged], check: bool) -> str:
    """A line on a claim: its verdicts by device, whether they are stale, and what it costs.

    check: whether to train the first steps again of what was run on such a device as this.
    """
    plan = plan_of(claim) if claim.study and not claim.lacks_source else None
    parts = []
    for one in found:
        words = ", ".join(f"{n} {word}" for word, n in Counter(verdict.word for _, verdict in one.verdicts).items())
        parts.append(f"{one.device}, {one.hours:.1f} hours: {words}" if one.device else words)
        judged_runs = [run for member, run in one.result.members if member.tunes is None] if one.result else []
        if missing := sum(run.status not in ENDED for run in judged_runs):
            parts.append(f"partial, {missing} of {len(judged_runs)} judged runs are missing")
        archive = archive_of(claim, one.device)
        problem = stale(claim, archive, plan) if one.device else ""
        if check and not problem and one.device == device_of(claim.study):
            parts += ["its first steps are of trained weights, and not run again"] if claim.source else []
            problem = "" if claim.source else changed_loss(archive, claim.config_dir)
        parts += [f"stale, {problem}"] if problem else []
    for device in devices(claim):
        if claim.study and device not in [one.device for one in found]:
            cost = f", would take {duration(seconds(plan))} here" if plan and device == device_of(claim.study) else ""
            parts.append(f"not run on a {device.upper()}{cost}")
    return f"{claim.name}: {claim.title}\n    " + "; ".join(parts)


if __name__ == "__main__":
    main()
