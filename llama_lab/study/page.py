"""report.html: a study's result as one file that needs no network, for a screen, a phone and paper."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from plotly import graph_objects as go
from plotly.offline import get_plotlyjs

from . import alt, charts, words
from .result import Result
from .tables import Table, tables

TEMPLATE = "page.html.j2"
MATCHES = {"params": "matched in parameters", "flops": "matched in FLOPs per token", "none": "not matched in size"}
MOST_NAMED = 8  # arms; of more, the line under the title tells the number alone


@dataclass(frozen=True)
class Chart:
    """A figure with what stands around it. alt: what it shows, in words. caption: how to read it."""

    figure: go.Figure
    alt: str
    caption: str
    wide: bool = False

    @property
    def json(self) -> Markup:
        """The figure for Plotly.js; Plotly escapes what would end a script element."""
        return Markup(self.figure.to_json())

    @property
    def arms(self) -> set[str]:
        """The arms that the legend switches."""
        return {trace.meta["arm"] for trace in self.figure.data if trace.meta}

    @property
    def has_points(self) -> bool:
        """Whether there is anything to draw."""
        return any(words.known(y) for trace in self.figure.data for y in trace.y)

    @property
    def has_lines(self) -> bool:
        """Whether arms are drawn as lines, and not as points alone."""
        return any("lines" in trace.mode for trace in self.figure.data if trace.meta)

    @property
    def choices(self) -> dict[str, list[str]]:
        """What a reader may choose: options by group; a group with one option is no choice."""
        groups = (self.figure.layout.meta or {}).get("choices", {})
        return {group: list(options) for group, options in groups.items() if len(options) > 1}


@dataclass(frozen=True)
class Section:
    """One section of the page; left out if it has nothing to say."""

    title: str
    text: tuple[str, ...] = ()
    charts: tuple[Chart, ...] = ()
    tables: tuple[Table, ...] = ()
    command: str = ""


def write_page(result: Result, path: Path) -> None:
    """Write the report of a study."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = environment.get_template(TEMPLATE).render(
        result=result,
        subtitle=_subtitle(result),
        sections=_sections(result),
        styles=charts.styles(result),
        plotly_js=Markup(get_plotlyjs()),
    )
    path.write_text(page, encoding="utf-8")


def _subtitle(result: Result) -> str:
    study = result.study
    names = [arm.name for arm in result.arms if arm.name != study.baseline]
    seeds = ", ".join(str(seed) for seed in result.provenance.seeds) or words.UNKNOWN
    parts = [
        study.design.replace("_", "-").capitalize(),
        f"baseline {study.baseline}",
        words.count(len(names), "other arm") + (f": {', '.join(names)}" if 0 < len(names) <= MOST_NAMED else ""),
        f"{'seed' if len(result.provenance.seeds) == 1 else 'seeds'} {seeds}",
        MATCHES.get(study.match, "matching not recorded"),
    ]
    return " · ".join(parts)


def _sections(result: Result) -> list[Section]:
    found = tables(result)
    sections = [
        _answer(result, found),
        _curves(result, found),
        _cost(result, found),
        _inference(result, found),
        _effects(result, found),
        _learning_rates(result, found),
        Section("Runs that did not finish", tables=_of(found, "unfinished")),
        _lengths(result, found),
        Section("How it was made", tables=_of(found, "environment", "settings"), command=result.study.command),
    ]
    drawn = [replace(one, charts=tuple(chart for chart in one.charts if chart.has_points)) for one in sections]
    return [section for section in drawn if section.text or section.charts or section.tables or section.command]


def _of(found: Mapping[str, Table], *slugs: str) -> tuple[Table, ...]:
    return tuple(found[slug] for slug in slugs if slug in found)


def _answer(result: Result, found: Mapping[str, Table]) -> Section:
    in_unit = f"change of validation loss, {words.UNITS[result.metric]}"
    kinds = (
        (charts.difference_rows(result, "previous"), "What each step was worth", "to the step before"),
        (charts.difference_rows(result, "baseline"), "Differences to the baseline", f"to {result.study.baseline}"),
    )
    caption = (
        "Mean over seeds of the paired difference {}, with its simultaneous 95% interval where it is tested. Left of "
        "zero is better. Filled: significant at 5% (max-t). Hollow: not."
    )
    drawn = tuple(_differences(rows, title, in_unit, caption.format(to)) for rows, title, to in kinds if rows)
    return Section("Answer", result.answer, drawn, _of(found, "arms", "seeds"))


def _differences(rows: list[charts.Row], title: str, axis: str, caption: str, wide: bool = False) -> Chart:
    return Chart(charts.differences(rows, title, axis), alt.differences(rows, f"{title}, {axis}"), caption, wide)


def _curves(result: Result, found: Mapping[str, Table]) -> Section:
    if not result.curves:
        return Section("Curves")
    chart = Chart(
        charts.curves(result),
        alt.curves(result),
        "Lines: mean over seeds. Bands: from the lowest to the highest seed. Press an arm's name to hide it; "
        "drag over the chart to magnify, double-click to go back.",
        wide=True,
    )
    return Section("Curves", charts=(chart,), tables=_of(found, "reach"))


def _cost(result: Result, found: Mapping[str, Table]) -> Section:
    fronts = (
        ("kv_cache/bytes_per_token", result.front.kv_cache, charts.kv_cache_front, "KV-cache size per token"),
        ("perf/tokens_per_second", result.front.throughput, charts.throughput_front, "training speed"),
    )
    caption = (
        "Dotted: the arms that no other one beats in both mean loss and {}; their intervals play no part in it. Means "
        "for it are over the seeds that all arms have finished. Bars: 95% intervals over seeds."
    )
    drawn = tuple(
        Chart(draw(result), alt.front(result, cost, front, name), caption.format(name))
        for cost, front, draw, name in fronts
        if any(arm.judged(result.metric) and words.known(arm.costs.get(cost)) for arm in result.arms)
    )
    return Section("Cost", charts=drawn, tables=_of(found, "costs"))


def _inference(result: Result, found: Mapping[str, Table]) -> Section:
    drawn = []
    if any(arm.speeds for arm in result.inference):
        caption = (
            "At the end of a context, all sequences of a batch together. Bars: from the lowest to the highest seed."
        )
        drawn.append(Chart(charts.decoding_speeds(result), alt.decoding_speeds(result.inference), caption))
    if any(arm.caches for arm in result.inference):
        caption = "Of the cache's tensors as they are when generating; a window's stops growing at its length."
        drawn.append(Chart(charts.cache_sizes(result), alt.cache_sizes(result.inference), caption))
    return Section("Inference", charts=tuple(drawn), tables=_of(found, "decoding", "caches"))


def _effects(result: Result, found: Mapping[str, Table]) -> Section:
    title = "Main effects and interactions"
    rows = charts.effect_rows(result)
    if not rows:
        return Section(title)
    in_unit = f"change of validation loss, {words.UNITS[result.metric]}"
    chart = _differences(
        rows,
        "What each axis changes",
        in_unit,
        "A main effect: the change as this axis alone goes to its other level, averaged over all settings of the "
        "others. An interaction: half the change of one effect as the other axis goes over. Bars: simultaneous 95% "
        "intervals. Hollow: not significant at 5% (max-t).",
        wide=True,
    )
    return Section(title, charts=(chart,), tables=_of(found, "effects"))


def _learning_rates(result: Result, found: Mapping[str, Table]) -> Section:
    if not result.learning_rates:
        return Section("Learning rate")
    chart = Chart(
        charts.learning_rates(result),
        alt.learning_rates(result.learning_rates),
        "Rings: each arm's best learning rate. Crosses above: runs that diverged. Bars: 95% intervals over seeds.",
        wide=True,
    )
    return Section("Learning rate", charts=(chart,), tables=_of(found, "learning_rates"))


def _lengths(result: Result, found: Mapping[str, Table]) -> Section:
    if not result.lengths:
        return Section("Context length")
    drawn = [
        Chart(
            charts.context_lengths(result),
            alt.context_lengths(result.lengths),
            "A line ends where the arm's position encoding does. Bars: 95% intervals over seeds.",
        )
    ]
    if any(arm.by_position for arm in result.lengths):
        caption = (
            "Mean over seeds. Dotted: the last position that the arms were trained on. An arm is missing where its "
            "position encoding ends before the chosen context does."
        )
        drawn.append(Chart(charts.positions(result), alt.positions(result.lengths), caption))
    return Section("Context length", charts=tuple(drawn), tables=_of(found, "lengths"))
