"""report.html: a study's result as one self-contained file for a screen, a phone and paper."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from plotly import graph_objects as go
from plotly.offline import get_plotlyjs

from llama_lab import formatting as fmt
from llama_lab.study.speed import FILE as SPEED
from llama_lab.study.study import FILE, SUMMARY

from . import charts
from .result import Result
from .tables import Table, tables

TEMPLATE = "page.html.j2"
BESIDE = (SUMMARY, FILE, SPEED, "export/")  # files that the page links if they are in its folder
MATCHES = {"params": "matched in parameters", "flops": "matched in FLOPs per token", "none": "not matched in size"}
MOST_SEEDS = 8  # listed in one line
SIGNIFICANT = (
    "Bars: 95% intervals. Filled: significant at 5% (max-t): the simultaneous interval excludes zero. Left is better."
)
MOST_IN_ALT = 12  # arms in a chart's alternative text; the tables have all


@dataclass(frozen=True)
class Chart:
    """A figure with its texts and its legend.

    alt: the alternative text. caption: how to read it. looks: the style of each line in the legend. shown: the lines
    that are visible at first; None for all.
    """

    figure: go.Figure
    alt: str
    caption: str
    looks: Mapping[str, charts.Style] = field(default_factory=dict)
    shown: Collection[str] | None = None
    wide: bool = False

    @property
    def json(self) -> Markup:
        """The figure for Plotly.js, safe inside a script element."""
        hidden = self.hidden
        for trace in self.figure.data:
            if trace.meta and trace.meta["arm"] in hidden:
                trace.visible = False
        return Markup(self.figure.to_json())

    @property
    def legend(self) -> dict[str, charts.Style]:
        """The drawn lines, with their styles."""
        drawn = {trace.meta["arm"] for trace in self.figure.data if trace.meta}
        return {name: style for name, style in self.looks.items() if name in drawn}

    @property
    def hidden(self) -> set[str]:
        """The lines that are switched off at first."""
        return set() if self.shown is None else set(self.legend) - set(self.shown)

    @property
    def full_caption(self) -> str:
        """The caption, with a note on hidden lines."""
        shown = len(self.legend) - len(self.hidden)
        note = f" Of {len(self.legend)} the {shown} that differ most are shown; press a name to show another."
        return self.caption + (note if self.hidden else "")

    @property
    def has_points(self) -> bool:
        """Whether there is anything to draw."""
        return any(fmt.known(y) for trace in self.figure.data for y in trace.y)

    @property
    def has_lines(self) -> bool:
        """Whether arms are drawn as lines, not only as points."""
        return any("lines" in trace.mode for trace in self.figure.data if trace.meta)

    @property
    def choices(self) -> dict[str, list[str]]:
        """The options of each group that has more than one."""
        groups = (self.figure.layout.meta or {}).get("choices", {})
        return {group: list(options) for group, options in groups.items() if len(options) > 1}


@dataclass(frozen=True)
class Section:
    """A section of the page; left out if empty."""

    title: str
    text: tuple[str, ...] = ()
    charts: tuple[Chart, ...] = ()
    tables: tuple[Table, ...] = ()
    command: str = ""
    folds: bool = True  # whether long tables are collapsed


def write_page(result: Result, path: Path) -> None:
    """Write the report of a study, with links to the files of BESIDE that exist in its folder."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = environment.get_template(TEMPLATE).render(
        result=result,
        facts=_facts(result),
        files=[name for name in BESIDE if (path.parent / name).exists()],
        sections=_sections(result),
        plotly_js=Markup(get_plotlyjs()),
    )
    path.write_text(page, encoding="utf-8")


def _facts(result: Result) -> str:
    """The subtitle: design, arms, baseline, seeds and matching."""
    study, seeds = result.study, result.provenance.seeds
    listed = f"{'seed' if len(seeds) == 1 else 'seeds'} {', '.join(map(str, seeds)) or fmt.UNKNOWN}"
    parts = [
        study.design.replace("_", "-").capitalize(),
        fmt.count(len(result.arms), "arm"),
        f"baseline {study.baseline}",
        listed if len(seeds) <= MOST_SEEDS else fmt.count(len(seeds), "seed"),
        MATCHES.get(study.match, "matching not recorded"),
    ]
    return " · ".join(parts)


def _sections(result: Result) -> list[Section]:
    found = tables(result)
    sections = [
        _effects(result, found),
        _differences(result, found),
        Section("Findings", result.answer, tables=_of(found, "differences", "losses", "seeds")),
        _training(result, found),
        _cost(result, found),
        _inference(result, found),
        _learning_rates(result, found),
        _lengths(result, found),
        Section("Runs that did not finish", tables=_of(found, "unfinished")),
        Section("How it was made", tables=_of(found, "settings", "environment"), command=result.study.command),
    ]
    drawn = [replace(one, charts=tuple(chart for chart in one.charts if chart.has_points)) for one in sections]
    return [section for section in drawn if section.text or section.charts or section.tables or section.command]


def _of(found: Mapping[str, Table], *slugs: str) -> tuple[Table, ...]:
    return tuple(found[slug] for slug in slugs if slug in found)


def _alt(what: str, found: Iterable[str]) -> str:
    """A chart's alternative text."""
    return f"{what}: {fmt.enumerate_some(list(found), MOST_IN_ALT, '; ')}."


def _lines(
    result: Result, figure: go.Figure, table: Table | None, columns: Iterable[str], caption: str, wide: bool = False
) -> Chart:
    """A chart with a line or a point for each arm; its alternative text has these columns of a table (default: all)."""
    alt = _alt(figure.layout.title.text, table.cells(*columns) if table else ())
    chart = Chart(figure, alt, caption, charts.styles(result), charts.foremost(result), wide)
    return chart if chart.has_lines else replace(chart, shown=None)


def _effects(result: Result, found: Mapping[str, Table]) -> Section:
    rows = charts.effect_rows(result)
    drawn = []
    if rows:
        caption = (
            "Main effect: the change of the loss from the baseline's option of one axis to the other option, averaged "
            "over all settings of the other axes. Interaction: half the change of one axis's effect when the other "
            f"axis changes. {SIGNIFICANT}"
        )
        drawn.append(_forest(result, rows, "Main effects and interactions", caption))
    if result.interactions:
        shown, known = len(charts.shown_interactions(result)), len(result.interactions)
        some = f" The {shown} largest of {known} interactions; the table has all." if shown < known else ""
        caption = f"Lines that are not parallel show an interaction. Over the seeds that all arms have finished.{some}"
        alt = _alt("Mean loss at each combination of two axes", found["interactions"].cells())
        drawn.append(Chart(charts.interactions(result), alt, caption))
    title, shown_tables = "Main effects and interactions", _of(found, "effects", "interactions")
    return Section(title, charts=tuple(drawn), tables=shown_tables, folds=False)


def _differences(result: Result, found: Mapping[str, Table]) -> Section:
    is_long = result.study.is_chain and len(result.arms) > 2
    ends = "; only the first step and, by a separate paired t-test, the last arm are tested" if is_long else ""
    kinds: tuple[tuple[charts.Against, str, str], ...] = (
        ("previous", "Change at each step", "Each arm against the one before. "),
        ("baseline", f"Change from {result.study.baseline}", f"Each arm against {result.study.baseline}{ends}. "),
    )
    drawn: list[Chart] = []
    for against, title, caption in kinds:
        rows = charts.difference_rows(result, against)
        if rows and not result.effects:
            drawn.append(_forest(result, rows, title, caption + ("" if drawn else SIGNIFICANT)))
    return Section("Arms", charts=tuple(drawn), tables=_of(found, "arms"), folds=False)


def _forest(result: Result, rows: list[charts.Row], title: str, caption: str) -> Chart:
    axis = charts.change_axis(result.metric)
    alt = _alt(f"{title}, {axis}", (row.text for row in rows))
    return Chart(charts.differences(rows, title, axis), alt, caption)


def _training(result: Result, found: Mapping[str, Table]) -> Section:
    drawn = []
    if any(len(curve.tokens) > 1 for curve in result.difference_curves):
        ends = (
            f"{curve.name} {fmt.with_interval(curve.mean[-1], curve.low[-1], curve.high[-1], is_difference=True)}"
            for curve in result.difference_curves
        )
        caption = (
            "Mean of the paired differences at every evaluation that all runs share. Bands: the simultaneous 95% "
            "intervals of the same test at that evaluation; the last one is the reported interval. A band that "
            "excludes zero before the end is not a finding: each evaluation is one more look."
        )
        drawn.append(
            Chart(
                charts.difference_curves(result),
                _alt("Difference over training, at its end", ends),
                caption,
                charts.curve_styles(result),
                charts.foremost_curves(result),
                wide=True,
            )
        )
    if result.curves:
        caption = (
            "Lines: mean over seeds. Bands: from the lowest to the highest seed. Press an arm's name to hide it; "
            "drag over the chart to zoom, double-click to go back."
        )
        drawn.append(_lines(result, charts.curves(result), found.get("losses"), (), caption, wide=True))
    return Section("Training", charts=tuple(drawn), tables=_of(found, "reach"))


def _cost(result: Result, found: Mapping[str, Table]) -> Section:
    caption = (
        "Dotted: the arms that no other one beats in both mean loss and {}, regardless of their intervals, with means "
        "over the seeds that all arms have finished. Bars: 95% intervals over seeds."
    )
    fronts = (
        ("kv_cache/bytes_per_token", charts.kv_cache_front, "KV-cache size per token", "KV cache per token"),
        ("perf/tokens_per_second", charts.throughput_front, "training speed", "Tokens per second"),
    )
    drawn = tuple(
        _lines(result, draw(result), found.get("arms"), ("Loss", column), caption.format(name))
        for cost, draw, name, column in fronts
        if any(arm.judged(result.metric) and fmt.known(arm.costs.get(cost)) for arm in result.arms)
    )
    return Section("Cost", charts=drawn, tables=_of(found, "costs"))


def _inference(result: Result, found: Mapping[str, Table]) -> Section:
    drawn = []
    if any(arm.speeds for arm in result.inference):
        caption = "At the end of a context, over all sequences of a batch. Bars: from the lowest to the highest seed."
        columns = ("Sequences", "Context", "Tokens per second", "Gain")
        drawn.append(_lines(result, charts.decoding_speeds(result), found.get("decoding"), columns, caption))
    if any(arm.caches for arm in result.inference):
        caption = "The size of the cache's tensors during generation; a sliding window's cache is at most its length."
        drawn.append(_lines(result, charts.cache_sizes(result), found.get("caches"), (), caption))
    return Section("Inference", charts=tuple(drawn), tables=_of(found, "decoding", "caches"))


def _learning_rates(result: Result, found: Mapping[str, Table]) -> Section:
    if not result.learning_rates:
        return Section("Learning rate")
    caption = "Rings: each arm's best learning rate. Crosses above: runs that diverged. Bars: 95% intervals over seeds."
    chart = _lines(result, charts.learning_rates(result), found.get("learning_rates"), (), caption, wide=True)
    return Section("Learning rate", charts=(chart,), tables=_of(found, "learning_rates"))


def _lengths(result: Result, found: Mapping[str, Table]) -> Section:
    if not result.lengths:
        return Section("Context length")
    table = found.get("lengths")
    caption = "A line ends where the arm's position encoding ends. Bars: 95% intervals over seeds."
    drawn = [_lines(result, charts.context_lengths(result), table, (), caption)]
    if any(arm.by_position for arm in result.lengths):
        caption = (
            "Mean over seeds. Dotted: the last position that the arms were trained on. An arm is missing if its "
            "position encoding ends before the chosen context."
        )
        drawn.append(_lines(result, charts.positions(result), table, (), caption))
    return Section("Context length", charts=tuple(drawn), tables=_of(found, "lengths"))
