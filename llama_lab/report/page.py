"""report.html: a study's result as one self-contained file for a screen, a phone and paper."""

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import vl_convert
from markupsafe import Markup, escape

from llama_lab.analysis.result import Finding, Result
from llama_lab.drawing.anatomy import Anatomy
from llama_lab.drawing.picture import picture
from llama_lab.runs.study import FILE, SUMMARY, StudySpeed
from llama_lab.util import chart as vega
from llama_lab.util import formatting as fmt
from llama_lab.util.files import replace_text
from llama_lab.util.templates import template

from .charts import compute, costs, differences, training
from .charts.base import Chart, change_axis, label_ends
from .charts.style import foremost, foremost_curves
from .guide import guide
from .tables import Table, conditions, tables

TEMPLATE = Path(__file__).with_name("page.html.j2")
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
BESIDE = (SUMMARY, FILE, StudySpeed.FILE, "export/")  # files that the page links if they are in its folder
PAGE = vega.config("var(--ink)", "var(--line)", FONT, "var(--paper)") | {"legend": {"disable": True}}
MOST_MARGIN = 110  # pixels for the names of arms beside a chart
MOST_IN_ALT = 12  # arms in a chart's alternative text; the tables have all
ZOOM = "Drag over the chart to zoom, double-click to go back."


@dataclass(frozen=True)
class Section:
    """A section of the page; left out if empty."""

    title: str
    text: tuple[str, ...] = ()
    charts: tuple[Chart, ...] = ()
    tables: tuple[Table, ...] = ()
    command: str = ""
    drawings: Mapping[str, Markup] = field(default_factory=dict)
    folds: bool = True  # whether long tables are collapsed


def write_page(result: Result, path: Path) -> None:
    """Write the report of a study, with links to the files of BESIDE that exist in its folder."""
    path.write_text(page(result, [name for name in BESIDE if (path.parent / name).exists()]), encoding="utf-8")


def drawing(one: Anatomy, other: Anatomy | None) -> tuple[str, Markup]:
    """The title and the picture of an architecture, or of a second one with what differs from it."""
    if other is None:
        return one.name, Markup(picture(one))
    return f"{one.name} and {other.name}", Markup(picture(other, one))


def page(result: Result, files: Sequence[str] = ()) -> str:
    """The report of a study as HTML, with links to these files beside it."""
    return template(TEMPLATE).render(
        result=result,
        conditions=conditions(result),
        breakable=breakable,
        files=files,
        sections=_sections(result),
        data_of=data_of,
        vega_js=Markup(_vega_js()),
        config=Markup(json.dumps(PAGE)),
    )


def breakable(text: str) -> Markup:
    """Text in which long names, such as lists of settings, may be broken."""
    return Markup(fmt.BREAK.sub("<wbr>", str(escape(text))))


@cache
def _vega_js() -> str:
    """Vega, Vega-Lite and Vega-Embed; kept in the user's cache, since they take seconds to bundle."""
    folder = Path(os.environ.get("LLAMA_LAB_CACHE", "~/.cache/llama_lab")).expanduser()
    kept = folder / f"vega-{version('vl-convert-python')}.js"
    with suppress(OSError):
        return kept.read_text(encoding="utf-8")
    bundle = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
    with suppress(OSError):  # of a home that cannot be written: the next report bundles them again
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=folder) as own:  # since other reports may be written now
            fresh = Path(own, kept.name)
            replace_text(fresh, bundle)
            fresh.replace(kept)
    return bundle


def data_of(chart: Chart) -> Markup:
    """A chart for the page's script, safe inside a script element."""
    tip = f"datum.arm + '\\n' + ({chart.tip})" if chart.styles else chart.tip
    mark = {"type": "circle", "style": "hover", "clip": True}
    hover = {"mark": mark, "encoding": {"tooltip": {"value": {"expr": tip}}}}
    spec = {**chart.spec, "layer": [*chart.spec["layer"], hover], "height": chart.height}
    data = {"spec": spec, "rows": chart.rows, "choices": chart.choices}
    return Markup(json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"))


def pictures(result: Result) -> dict[str, str]:
    """The page's charts by title as SVG, as they open, each with a legend if it has one on the page."""
    return {chart.title: vega.svg(_opened(chart)) for section in _sections(result) for chart in section.charts}


def _opened(chart: Chart) -> vega.Spec:
    """The view that the page opens with."""
    shown = replace(chart, rows=[row for row in chart.rows if row.get("arm") not in chart.hidden])
    sizes = {"title": chart.title, "width": 700, "height": chart.height}
    return shown.view([next(iter(options)) for options in chart.choices.values() if options]) | sizes


def _sections(result: Result) -> list[Section]:
    found, shown = tables(result), foremost(result)

    def section(title: str, drawn: Iterable[Chart], *slugs: str, **settings: Any) -> Section:
        charts = tuple(label_ends(chart, MOST_MARGIN, is_fixed=False) for chart in drawn if chart.is_drawn)
        return Section(title, charts=charts, tables=tuple(found[slug] for slug in slugs if slug in found), **settings)

    def chart(drawn: Chart, slug: str, *columns: str, wide: bool = False) -> Chart:
        """With a line or a point for each arm; its alternative text has these columns of a table (default: all)."""
        table = found.get(slug)
        alt = _alt(drawn.title, table.cells(*columns) if table else ())
        return replace(drawn, alt=alt, shown=shown, wide=wide)

    curves = chart(training.curves(result), "losses", wide=True)
    curves = replace(curves, caption=f"{curves.caption} {ZOOM}")
    layers = chart(training.telemetry(result), "telemetry", wide=True)
    states = ["KV cache per token", *["State per sequence"] * result.has_states]
    by_cache = chart(costs.kv_cache_front(result), "arms", "Loss", *states)
    by_speed = chart(costs.throughput_front(result), "arms", "Loss", "Tokens per second")
    columns = "Sequences", "Context", "Tokens per second", "Gain"
    decoding = chart(costs.decoding_speeds(result), "decoding", *columns)
    caches = chart(costs.cache_sizes(result), "caches")
    rates = chart(training.learning_rates(result), "learning_rates", wide=True)
    lengths = chart(training.context_lengths(result), "lengths")
    positions = chart(training.positions(result), "lengths")
    sections = [
        section("Scaling", _scaling(result, found), "laws", "scaling", folds=False),
        section("Main effects and interactions", _effects(result), "effects", "interactions", folds=False),
        section("Arms", _differences(result), "arms", folds=False),
        section("Which to choose", (), "rankings", text=guide(result), folds=False),
        section("Findings", (), "differences", "pairs", "losses", "seeds", text=result.answer),
        section("Training", (*_difference_curves(result), curves), "starts", "reach", "modules"),
        section("Telemetry", [layers], "telemetry"),
        section("Architectures", (), drawings=dict(drawing(*pair) for pair in result.architectures)),
        section("Cost", [by_cache, by_speed], "costs"),
        section("Inference", [decoding, caches], "decoding", "caches"),
        section("Learning rate", [rates], "learning_rates"),
        section("Context length", [lengths, positions], "lengths"),
        section("Runs that did not finish", (), "unfinished"),
        section("How it was made", (), "settings", "environment", command=result.study.command),
    ]
    sections.sort(key=lambda one: one.title != result.study.lead)
    return [one for one in sections if one.text or one.charts or one.tables or one.command or one.drawings]


def _alt(what: str, found: Iterable[str]) -> str:
    """A chart's alternative text."""
    return f"{what}: {fmt.enumerate_some(list(found), MOST_IN_ALT, '; ')}."


def _scaling(result: Result, found: Mapping[str, Table]) -> Iterator[Chart]:
    scaling = result.scaling
    if scaling is None or "scaling" not in found:  # no study of sizes, or no finished run
        return
    points = partial(found["scaling"].cells, "Size", "Tokens per parameter")
    yield replace(compute.losses(result), alt=_alt("Loss over compute", points("Loss")), wide=True)
    if any(option.gains for option in scaling.options):
        yield replace(compute.gains(result), alt=_alt("Compute-equivalent gain", points("Gain")), wide=True)
    if not scaling.not_fittable:
        alt = _alt("Loss at equal compute", found["laws"].cells())
        yield replace(compute.iso_flop(result), alt=alt, wide=True)


def _effects(result: Result) -> Iterator[Chart]:
    if rows := differences.effect_rows(result):
        yield _described(differences.effects(result), rows, result)
    drawn, known = differences.interactions(result), len(result.interactions)
    some = f" The {len(drawn)} largest of {known} interactions; the table has all." if len(drawn) < known else ""
    for i, chart in enumerate(drawn):
        alt = _alt(f"{chart.title}, mean loss", (row["text"] for row in chart.rows))
        yield replace(chart, alt=alt, caption="" if i else chart.caption + some)


def _described(chart: Chart, rows: Sequence[Finding], result: Result) -> Chart:
    """A chart of differences with its alternative text."""
    return replace(chart, alt=_alt(f"{chart.title}, {change_axis(result)}", map(differences.in_words, rows)))


def _differences(result: Result) -> Iterator[Chart]:
    ends = "; only the first step and the last arm are tested" if result.study.ends else ""
    note, shown = differences.INTERVALS, list[Finding]()  # below the first chart, and in it
    steps = ("Change at each step", "Each arm against the one before. ")
    if not result.study.is_chain:
        steps = ("Change from its reference", "Each arm against the first option at otherwise equal settings. ")
    kinds: tuple[tuple[differences.Against, str, str], ...] = (
        ("previous", *steps),
        ("baseline", f"Change from {result.study.baseline}", f"Each arm against {result.study.baseline}{ends}. "),
    )
    for against, title, caption in kinds if not result.effects else ():
        rows = [
            row for row in differences.difference_rows(result, against) if result.study.is_chain or row not in shown
        ]
        if rows:
            drawn = differences.differences(rows, title, change_axis(result), caption + note)
            yield _described(drawn, rows, result)
            note, shown = "", rows


def _difference_curves(result: Result) -> Iterator[Chart]:
    if result.difference_curves:
        ends = (
            f"{curve.name} {fmt.with_interval(curve.mean[-1], curve.low[-1], curve.high[-1], is_difference=True)}"
            for curve in result.difference_curves
        )
        alt, shown = _alt("Difference over training, at its end", ends), foremost_curves(result)
        yield replace(differences.difference_curves(result), alt=alt, shown=shown, wide=True)
