"""The pages of the book: one of each claim, and the table of all."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from llama_lab.analysis.power import LEVEL
from llama_lab.analysis.result import Result
from llama_lab.analysis.settings import TOKENS
from llama_lab.report.figures import figure, forest
from llama_lab.report.markup import markdown_table
from llama_lab.report.tables import tables
from llama_lab.util.chart import Spec, render
from llama_lab.util.files import replace_text
from llama_lab.util.formatting import UNKNOWN, count, short

from .claim import Claim, Figure, Statement
from .judging import WORDS, Verdict


@dataclass(frozen=True)
class Judged:
    """A claim's verdicts, by statement or figure, on one kind of device; figures are of none."""

    device: str
    verdicts: Sequence[tuple[Statement | Figure, Verdict]]
    result: Result | None = None
    hours: float = 0.0
    dates: str = ""
    stale: str = ""

    @property
    def scale(self) -> str:
        """How large the models and the text are that the verdicts are about; empty of what was not run."""
        run = next(iter(self.result.started), None) if self.result else None
        if run is None:
            return ""
        params, tokens = short(run.costs.get("params")), short(run.config.get(TOKENS))
        return f"{params} parameters, {tokens} tokens of {run.environment.choices.get('data', UNKNOWN)}"

    @cached_property
    def picture(self) -> tuple[Spec, str] | None:
        """How the loss changes at each step, or else from the baseline to each arm, with a caption."""
        charts = (forest("previous", self.result), forest("baseline", self.result)) if self.result else ()
        for chart in charts:
            if drawn := figure(chart):
                return drawn, f"{chart.caption.partition('. ')[0]}."
        return None


WIDTH = 400  # points
TABLES = ("losses", "lengths", "costs")
HEAD = (
    "# Claims\n\n`python -m llama_lab.claims` makes this page. Speeds on the pages of claims are tokens per second: "
    "means of rounds in turn, the lowest and the highest. Verdicts on speeds, averages and longer contexts rest on "
    "single paired t-tests. Each page says which arm is subtracted from which, and when its rules were stated.\n\n"
    "A verdict is about models of the scale that stands beside it. Losses of arms that share one learning rate hold at "
    "that rate, or decide nothing. What contradicts its source is listed as found once, until a study with other seeds "
    "and other text finds it again. [Figures](figures.md) that texts state, and that are computed, have a page of "
    "their own; [older results](older/README.md) are on another text and by older rules.\n\n"
)
Book = Mapping[str, tuple[Claim, Sequence[Judged]]]
"""Each claim by name, with what was found."""


def page(claim: Claim, judged: Sequence[Judged]) -> str:
    """The page of a claim, in Markdown."""
    lines = [f"# {claim.title}", ""]
    if claim.study:
        device = "  # on a GPU" if claim.device == "gpu" else ""
        lines += ["```bash", f"python -m llama_lab.claims {claim.name}{device}", "```", ""]
    lines += [claim.rules, ""] if claim.rules else []
    for one in judged:
        lines += [f"## On a {one.device.upper()}", ""] if one.device else []
        lines += [f"**Stale**: {one.stale}.", ""] if one.stale else []
        lines += ["| statement | source | expected | verdict | found |", "|---|---|---|---|---|"]
        lines += [
            f"| {said.text} | {said.source} | {expected(said)} | **{found.word}** | {found.why} |"
            for said, found in one.verdicts
        ]
        if one.picture:
            lines += ["", f"![{claim.title}: changes of the loss]({file(claim, one)})", "", one.picture[1]]
        lines += ["", *(study_lines(one, one.result) if one.result else [])]
    return "\n".join(lines).rstrip() + "\n"


def file(claim: Claim, judged: Judged) -> str:
    """The name of a picture."""
    return f"{claim.name}-{judged.device}.svg"


def expected(said: Statement | Figure) -> str:
    """What would hold, by the rule that was stated before."""
    if isinstance(said, Figure):
        return f"{said.says:g}"
    by = "" if said.size is None else f" by {abs(said.size):g}"
    return f"{said.arm} \u2212 {said.against}: {said.quantity} {said.expects}{by}, margin {said.margin:g}"


def study_lines(judged: Judged, result: Result) -> list[str]:
    """What was measured, and on what."""
    machine = ", ".join(dict.fromkeys(r.environment.cpu for r in result.started))
    tests = "" if result.tests == "none" else f"; intervals of losses are those of {result.tests}"
    shown = tables(result)
    return [
        f"Verdicts are about models of {judged.scale}.\n",
        *(markdown_table(replace(shown[slug], caption="")).rstrip() + "\n" for slug in TABLES if slug in shown),
        f"{machine}, {judged.dates}, {judged.hours:.1f} hours of training{tests}.",
        "",
        *(f"- {warning}" for warning in (*result.warnings, *result.notes)),
        "",
    ]


def table(book: Book, most: int | None = None, pages: str = "") -> str:
    """How many verdicts there are, and a table of them, in Markdown; what contradicts a source comes first.

    most: at most so many rows, of statements whose studies were run. pages: the folder of the pages that the table
    points to, with a slash.
    """
    rows = [
        (found, claim, said, one)
        for claim, judged in book.values()
        for one in judged
        for said, found in one.verdicts
        if isinstance(said, Statement)
    ]
    rows.sort(key=lambda row: WORDS.index(row[0].word))
    words = Counter(found.word for found, *_ in rows)
    ran = len(rows) - words["not run"]
    lines = [f"{count(len(rows), 'statement')} ({'; '.join(f'{word}: {n}' for word, n in words.items())}).", ""]
    if ran:
        lines[0] += (
            f" Each of the {ran} that were run is tested at 5%: if nothing differed, we would expect at most "
            f"{LEVEL * ran:.1f} false verdicts. A test at 5% covers noise between seeds, not a rate that one arm "
            "happens to like."
        )
    shown = rows if most is None else rows[: min(most, ran)]
    if not shown:
        return "\n".join(lines)
    lines += [
        "| verdict | statement | source | found | scale |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {' on a '.join(filter(None, (found.word, one.device.upper())))} | [{said.text}]({pages}{claim.name}.md) "
        f"| {said.source} | {found.why} | {one.scale} |"
        for found, claim, said, one in shown
    ]
    return "\n".join(lines) + "\n"


def write_pages(book: Book, folder: Path, front: Path) -> None:
    """Write a page for each claim, the table of all, and its beginning between two comments of a front page."""
    folder.mkdir(parents=True, exist_ok=True)
    for claim, judged in book.values():
        replace_text(folder / f"{claim.name}.md", page(claim, judged))
        for one in judged:
            if one.picture:
                render(one.picture[0], folder / file(claim, one), width=WIDTH)
    replace_text(folder / "README.md", f"{HEAD}{table(book)}")
    before, start, rest = front.read_text(encoding="utf-8").partition("<!-- the claims -->\n")
    _, end, after = rest.partition("<!-- their end -->\n")
    replace_text(front, before + start + table(book, 4, "docs/claims/") + end + after)
