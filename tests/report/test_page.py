"""The report: a self-contained file, with texts for everything that it draws."""

import math
import re
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from llama_lab.analysis.analyse import analyse
from llama_lab.analysis.result import Comparison, Reach, Result
from llama_lab.analysis.statistics import Estimate, PairedDifference
from llama_lab.report.charts import costs, differences, style, training
from llama_lab.report.charts.base import LATE, LOSS, label_ends
from llama_lab.report.figures import FIGURES
from llama_lab.report.figures import figure as chart_figure
from llama_lab.report.page import write_page
from llama_lab.report.tables import conditions, tables
from llama_lab.runs.study import Study
from llama_lab.study.design import Context, KVHeads, Ladder, LearningRate
from llama_lab.util import formatting as fmt
from llama_lab.util.chart import svg
from tests.analysis import results
from tests.analysis.synthetic import plant_end, remove_run, run_folder, write_study
from tests.browser import in_browser
from tests.study.design.test_designs import CONFIGS

HOSTILE = "<script>window.hacked = 1</script><img src=x onerror='hacked=1'>\"&amp;%{x}</title>"
OF = "((i, key) => rows.filter(row => row.arm === arms.at(i)).map(row => row[key]))"
NUMBER = re.compile(r"\d[.\d]\d?")


@dataclass
class Opened:
    """A report in a browser, with its console messages and network requests."""

    page: Page
    file: Path
    seconds: float = 0.0
    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def charts(self) -> int:
        """The number of charts with at least one mark in a visible drawing."""
        self.settle()
        return self.page.evaluate(
            """[...document.querySelectorAll("figure .plot")].filter(plot => {
                const box = plot.querySelector("svg")?.getBoundingClientRect();
                const marks = ".mark-line.role-mark path, .mark-symbol.role-mark path, .mark-rule.role-mark line";
                return box && box.width > 100 && box.height > 100 && plot.querySelector(marks);
            }).length"""
        )

    def figures(self) -> int:
        """The number of charts."""
        return self.page.locator("figure").count()

    def figure(self, title: str) -> Locator:
        """The figure with this title."""
        return self.page.locator("figure").filter(has=self.page.get_by_role("heading", name=title, exact=True))

    def settle(self) -> None:
        """Wait until all charts are drawn."""
        expect(self.page.locator(".plot[aria-busy=true]")).to_have_count(0)

    def plot(self, title: str, expression: str) -> Any:
        """The value of a JavaScript expression over what a figure shows.

        rows: its data, by arm in `arms`. x, y: the ends of the axes, `titles`: their titles. lines: their number.
        """
        self.settle()
        return self.figure(title).evaluate(
            f"""figure => {{
                const plot = figure.querySelector(".plot"), rows = plot.view.data("rows");
                const arms = [...new Set(rows.map(row => row.arm))];
                const [x, y] = ["x", "y"].map(name => plot.view.scale(name).domain());
                const titles = [...plot.querySelectorAll(".role-axis-title text")].map(text => text.textContent);
                const lines = plot.querySelectorAll(".mark-line.role-mark path").length;
                return {expression};
            }}"""
        )


Open = Callable[..., Opened]


@pytest.fixture
def opened(browser: Browser, tmp_path: Path) -> Iterator[Open]:
    """Write the report of a result, and open it as a file."""
    pages: list[Page] = []

    def run(result: Result, width: int = 1200, height: int = 900) -> Opened:
        file = tmp_path / "report.html"
        write_page(result, file)
        page = browser.new_page(viewport={"width": width, "height": height})
        pages.append(page)
        report = Opened(page, file)
        page.on("console", lambda message: report.complaints.append(message.text))
        page.on("pageerror", lambda error: report.complaints.append(str(error)))
        page.on("request", lambda request: report.requests.append(request.url))
        begin = time.perf_counter()
        page.goto(file.as_uri())
        report.settle()
        report.seconds = time.perf_counter() - begin
        return report

    yield run
    for page in pages:
        page.close()


def renamed(value: Any, old: str, new: str) -> Any:
    """The same with another name in place of an arm's."""
    return changed(value, lambda leaf: new if isinstance(leaf, str) and leaf == old else leaf)


def changed(value: Any, change: Callable[[Any], Any]) -> Any:
    """The same with whatever stands in its lists, dicts and dataclasses changed."""
    if isinstance(value, list | tuple):
        return type(value)(changed(one, change) for one in value)
    if isinstance(value, dict):
        return {changed(key, change): changed(one, change) for key, one in value.items()}
    if is_dataclass(value):
        return replace(value, **{part.name: changed(getattr(value, part.name), change) for part in fields(value)})
    return change(value)


def own_text(file: Path) -> str:
    """A report's source without Vega."""
    text = file.read_text(encoding="utf-8")
    scripts = re.findall(r"<script>.*?</script>", text, flags=re.DOTALL)
    return text.replace(max(scripts, key=len), "").replace("<wbr>", "")


@in_browser
def test_a_report_draws_every_chart_and_neither_complains_nor_asks_the_network(opened: Open) -> None:
    report = opened(results.everything())
    assert report.charts() == report.figures() == 15
    assert report.complaints == []
    assert report.requests == [report.file.as_uri()]


@in_browser
def test_every_chart_says_in_words_what_it_shows_with_numbers(opened: Open) -> None:
    report = opened(results.everything())
    texts = report.page.eval_on_selector_all("figure [role=img]", "all => all.map(one => one.ariaLabel)")
    assert len(texts) == report.figures()
    assert all(len(text) > 60 and NUMBER.search(text) for text in texts), texts
    assert any("norm \u22120.0040 [\u22120.0120,\u00a0+0.0040], not significant" in text for text in texts)
    first = opened(results.ladder()).page.locator("figure [role=img]").first.get_attribute("aria-label")
    assert "block=prenorm \u22120.126 [\u22120.144,\u00a0\u22120.108] against norm=rmsnorm, lower" in first
    assert all(len(text) > 20 for text in report.page.locator("figcaption").all_inner_texts())


@in_browser
def test_choices_change_the_axis_and_the_loss_and_the_range(opened: Open) -> None:
    report = opened(results.ladder())
    title = "Loss over training"
    last = "[x[1], titles[0], lines]"
    assert report.plot(title, last) == [results.TOKENS, "tokens", 7]
    report.page.get_by_text("training FLOPs", exact=True).click()
    most = max(curve.flops[-1] for curve in results.ladder().curves)
    assert report.plot(title, last) == [pytest.approx(most, rel=1e-4), "training FLOPs", 7]
    report.page.get_by_label("seconds").focus()
    report.page.keyboard.press("Space")
    most = max(curve.seconds[-1] for curve in results.ladder().curves)
    assert report.plot(title, last) == [pytest.approx(most, rel=1e-4), "seconds of training", 7]
    report.page.get_by_text("training loss", exact=True).click()
    assert report.plot(title, "rows.every(row => row.view.includes('training loss'))")
    assert report.plot(title, "titles[1]") == "training loss, nats per token"
    assert report.plot(title, "y[1]") < 6
    report.figure(title).get_by_text("from the start", exact=True).click()
    assert report.plot(title, "y[1]") > 8
    late = report.plot("Difference over training", "y")
    for option in ("from the start", "without the first fifth"):
        report.figure("Difference over training").get_by_text(option).click()
    assert report.plot("Difference over training", "y") == late


@in_browser
def test_a_point_says_its_numbers_a_drag_zooms_and_a_double_click_goes_back(opened: Open) -> None:
    report = opened(results.ladder())
    title, mouse = "Loss over training", report.page.mouse
    figure = report.figure(title)
    figure.scroll_into_view_if_needed()
    figure.locator(".plot .mark-symbol path").last.hover(force=True)
    tip = report.page.locator("#vg-tooltip-element.visible").inner_text()
    assert re.fullmatch(r"[\w=,]+\n\d\.\d{4} at \d\S+ tokens", tip)
    whole = report.plot(title, "[x, y]")
    box = figure.locator(".plot .background").first.bounding_box()
    mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    mouse.down()
    mouse.move(box["x"] + box["width"] * 3 / 4, box["y"] + box["height"] * 3 / 4, steps=4)
    mouse.up()
    for now, before in zip(report.plot(title, "[x, y]"), whole, strict=True):
        assert now[1] - now[0] == pytest.approx((before[1] - before[0]) / 4, rel=0.05)
    mouse.dblclick(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    assert report.plot(title, "[x, y]") == whole


@in_browser
def test_a_context_length_can_be_chosen(opened: Open) -> None:
    report = opened(results.long())
    assert report.plot("Loss by position", "arms") == ["position=rope", "ffn=swiglu"]
    report.page.locator("fieldset").get_by_text("256 tokens").click()
    assert report.plot("Loss by position", "arms") == ["vanilla", "position=rope", "ffn=swiglu"]


@in_browser
def test_a_batch_size_and_decoding_without_the_cache_can_be_chosen_together(opened: Open) -> None:
    report = opened(results.measured())
    figure = report.figure("Decoding speed")
    first, *_, last = results.measured().inference

    def shown() -> Any:
        return report.plot("Decoding speed", f"[lines, {OF}(0, 'y'), {OF}(-1, 'x')]")

    def speeds(batch_size: int, part: str = "decode") -> Any:
        return pytest.approx([getattr(s, part).mean for s in first.speeds if s.batch_size == batch_size], rel=1e-5)

    arms = len(results.measured().inference)
    assert shown() == [arms, speeds(1), [64, 128, 256, 512]]
    figure.get_by_text("8 sequences", exact=True).click()
    assert shown() == [arms, speeds(8), [64, 128, 256, 512]]
    figure.get_by_text("not used", exact=True).click()
    uncached = [s.uncached.mean for s in first.speeds if s.batch_size == 8]
    assert shown() == [arms, speeds(8, "uncached"), [64, 128, 256, 512]]
    assert max(uncached) < report.plot("Decoding speed", "y[1]") < 2 * max(uncached)
    report.page.get_by_text("int8", exact=True).first.click()
    sizes = [cache.measured.mean for cache in last.caches if cache.dtype == "int8"]
    assert report.plot("KV cache of one sequence", f"{OF}(-1, 'y')") == pytest.approx(sizes, rel=1e-5)


@in_browser
def test_of_telemetry_a_quantity_and_a_part_can_be_chosen_where_there_are_parts(opened: Open) -> None:
    report = opened(results.watched())
    title = "Layers over training"
    shown = f"[arms, lines, Math.max(...{OF}(-1, 'x')), plot.view.scale('y').type]"
    assert report.plot(title, shown) == [["vanilla", "ffn=swiglu"], 8, 3, "log"]
    figure = report.figure(title)
    figure.get_by_text("feed-forwards", exact=True).click()
    assert report.plot(title, "rows.every(row => row.view.includes('feed-forwards'))")
    figure.get_by_text("attention entropy, nats", exact=True).click()
    assert report.plot(title, shown) == [["vanilla"], 4, 5, "linear"]
    assert report.plot(title, "titles[1]") == "attention entropy, nats"


@in_browser
def test_where_there_is_no_choice_the_legend_hides_one_arm_and_no_other(opened: Open) -> None:
    arms = tuple(
        replace(arm, speeds=tuple(replace(s, uncached=None, gain=None) for s in arm.speeds if s.batch_size == 1))
        for arm in results.measured().inference
    )
    report = opened(replace(results.measured(), inference=arms))
    figure = report.figure("Decoding speed")
    assert figure.locator("fieldset").count() == 0
    figure.get_by_role("button", name="vanilla").click()
    assert report.plot("Decoding speed", "arms") == [arm.arm for arm in arms if arm.arm != "vanilla"]


@in_browser
@pytest.mark.parametrize(
    ("part", "drawn", "missing"),
    [
        ("speeds", "KV cache of one sequence", "Tokens per second"),
        ("caches", "Decoding speed", "By the formula"),
    ],
)
def test_of_inference_a_page_shows_what_was_measured(opened: Open, part: str, drawn: str, missing: str) -> None:
    arms = tuple(replace(arm, **{part: ()}) for arm in results.measured().inference)
    report = opened(replace(results.measured(), inference=arms))
    section = report.page.locator("section", has=report.page.get_by_role("heading", name="Inference"))
    assert section.locator("figure").count() == section.locator("table").count() == 1
    assert report.figure(drawn).is_visible()
    assert section.get_by_role("columnheader", name=missing, exact=True).count() == 0
    assert report.charts() == report.figures() == 7
    assert report.complaints == []


def test_inference_is_shown_up_to_the_contexts_measured_with_the_lowest_and_the_highest_seed(tmp_path: Path) -> None:
    write_page(results.measured(), tmp_path / "report.html")
    text = re.sub(r"[ \n]+", " ", own_text(tmp_path / "report.html"))
    for arm, context in (("vanilla", "256"), ("norm=rmsnorm", "512")):
        assert f"<span>{arm}</span></th> <td><span>1</span></td> <td><span>{context}</span></td>" in text
    ends = {row["arm"]: row["x"] for row in costs.decoding_speeds(results.measured()).rows}
    assert (ends["vanilla"], ends["norm=rmsnorm"]) == (256, 512)
    assert "<span>695</span><span>681\u00a0to\u00a0709</span>" in text
    assert 'aria-label="Decoding speed: vanilla 1 256 695, 681\u00a0to\u00a0709 5.93\u00d7, ' in text
    assert 'aria-label="KV cache of one sequence: vanilla bfloat16 256 512 KiB 512 KiB; ' in text


@in_browser
def test_the_legend_hides_an_arm_and_shows_it_again_whatever_is_chosen(opened: Open) -> None:
    report = opened(results.ladder())
    title = "Loss over training"
    is_there = "arms.includes('block=prenorm')"
    button = report.figure(title).get_by_role("button", name="block=prenorm")
    assert report.plot(title, is_there)
    button.click()
    assert button.get_attribute("aria-pressed") == "false"
    assert not report.plot(title, is_there)
    report.page.get_by_text("training loss", exact=True).click()
    assert not report.plot(title, is_there), "a choice brought it back"
    assert report.plot("Loss against speed", is_there)
    button.focus()
    report.page.keyboard.press("Enter")
    assert report.plot(title, is_there)


@in_browser
def test_of_many_arms_one_can_be_seen_alone(opened: Open) -> None:
    report = opened(results.many())
    title = "Loss over training"
    legend = report.figure(title).locator(".legend")
    switch = legend.get_by_role("button", name="All / none")
    switch.click()
    assert report.plot(title, "arms.length") == 40
    switch.click()
    assert report.plot(title, "arms.length") == 0
    legend.locator("[data-arm]").nth(5).click()
    assert report.plot(title, "arms.length") == 1
    switch.click()
    assert report.plot(title, "arms.length") == 40


@in_browser
@pytest.mark.parametrize("make", [results.everything, results.many])
def test_a_phone_scrolls_tables_but_never_the_page_sideways(opened: Open, make: Callable[[], Result]) -> None:
    report = opened(make(), 390, 844)
    assert report.page.evaluate("document.documentElement.scrollWidth") <= 390
    assert report.charts() == report.figures()
    inside = "traces => traces.every(svg => svg.getBoundingClientRect().right <= 390)"
    assert report.page.eval_on_selector_all(".plot svg", inside)
    wide = "[...document.querySelectorAll('.table')].find(table => table.scrollWidth > table.clientWidth)"
    shadow = report.page.evaluate(f"getComputedStyle({wide}).backgroundAttachment")
    assert "local, scroll" in shadow, "a shadow where it goes on"


@in_browser
def test_print_keeps_all_charts_within_the_paper_and_opens_the_config(opened: Open) -> None:
    report = opened(results.everything())
    report.page.emulate_media(media="print")
    report.page.set_viewport_size({"width": 680, "height": 1000})
    assert report.charts() == report.figures() == 15
    assert report.page.evaluate("document.documentElement.scrollWidth") <= 680
    widest = "all => Math.max(...all.map(svg => svg.getBoundingClientRect().right))"
    assert report.page.eval_on_selector_all(".plot svg", widest) <= 680
    assert not report.page.locator("fieldset").first.is_visible()
    assert len(report.page.pdf(format="A4")) > 50_000
    assert report.page.locator("details").count() > 0
    assert report.page.locator("details:not([open])").count() == 0


@in_browser
@pytest.mark.parametrize("arm", ["vanilla", "position=rope", "ffn=swiglu"])
def test_hostile_names_of_arms_and_kinds_of_elements_are_shown_and_do_nothing(opened: Open, arm: str) -> None:
    result = renamed(results.everything(), arm, HOSTILE)
    inference = [
        replace(one, caches=tuple(replace(cache, dtype=HOSTILE + cache.dtype) for cache in one.caches))
        for one in result.inference
    ]
    result = replace(result, inference=tuple(inference))
    report = opened(replace(result, answer=(HOSTILE,), warnings=(HOSTILE,)))
    assert report.page.evaluate("window.hacked") is None
    assert report.page.locator("img").count() == 0
    assert report.complaints == []
    assert report.requests == [report.file.as_uri()]
    assert report.charts() == report.figures() == 15
    assert report.page.locator("tbody th", has_text="<script>").count() > 3
    assert report.page.locator(".legend button", has_text="<script>").count() > 3
    figure = report.figure("Loss over training")
    figure.locator(".legend button", has_text="<script>").click()
    assert report.plot("Loss over training", "arms.some(arm => arm.includes('script'))") is False
    report.page.locator("fieldset[data-group=Elements] label").last.click()
    assert report.plot("KV cache of one sequence", "rows.every(row => row.view[0].endsWith('int8'))") is True
    assert report.plot("KV cache of one sequence", "lines") == len(inference)
    assert report.page.evaluate("window.hacked") is None


@in_browser
def test_200_runs_open_within_5_seconds_from_a_file_below_20_megabytes(opened: Open) -> None:
    many = results.many()
    assert sum(len(arm.records) for arm in many.arms) == 200
    openings = (opened(many) for _ in range(4))  # other tests load the machine
    report = next((opening for opening in openings if opening.seconds < 5), None)
    assert report, "each took longer"
    assert report.file.stat().st_size < 20e6
    assert report.charts() == report.figures() == 6
    assert report.complaints == []
    seeds = report.page.locator("details", has_text="Every seed: final")
    assert seeds.locator("tbody tr").count() == 40
    assert not seeds.locator("table").is_visible()
    seeds.locator("summary").click()
    assert seeds.locator("table").is_visible()


def only(count: int, seeds: int = 3) -> Result:
    """The ladder's first arms."""
    losses = dict(list(results.LADDER.items())[:count])
    return results.result(losses, seeds)


@in_browser
@pytest.mark.parametrize(
    ("make", "drawn"),
    [
        (lambda: only(1), 3),
        (lambda: only(1, seeds=1), 3),
        (lambda: only(3, seeds=1), 6),
        (results.unfinished, 0),
        (results.unknown, 0),
        (lambda: replace(only(3), arms=(), curves=(), difference_curves=()), 0),
        (results.in_bits, 6),
    ],
    ids=["one arm", "one run", "one seed", "no finished run", "nan everywhere", "no arms", "bits per byte"],
)
def test_a_result_with_little_in_it_still_makes_a_page(opened: Open, make: Callable[[], Result], drawn: int) -> None:
    report = opened(make())
    assert report.charts() == report.figures() == drawn
    assert report.complaints == []
    assert report.page.get_by_role("heading", name="How it was made").is_visible()


@pytest.mark.parametrize("make", [results.unknown, results.unfinished, lambda: only(2, seeds=1)])
def test_what_is_not_known_is_never_shown_as_nan_or_none(tmp_path: Path, make: Callable[[], Result]) -> None:
    result = replace(make(), unfinished=())
    write_page(result, tmp_path / "report.html")
    _, _, body = own_text(tmp_path / "report.html").partition("<body>")
    visible = re.sub(r"<script.*?</script>", "", body, flags=re.DOTALL)
    assert not re.search(r"\b(nan|None|inf)\b", visible, flags=re.IGNORECASE)


@pytest.mark.slow
def test_a_section_without_data_is_left_out(tmp_path: Path) -> None:
    titles = {"Main effects and interactions", "Learning rate", "Runs that did not finish", "Context length"}
    titles |= {"Inference", "Telemetry"}

    def shown(result: Result) -> set[str]:
        write_page(result, tmp_path / "report.html")
        text = own_text(tmp_path / "report.html")
        return {title for title in titles if f">{title}</h2>" in text}

    assert shown(results.ladder()) == set()
    assert shown(results.factorial()) == {"Main effects and interactions"}
    assert shown(results.swept()) == {"Learning rate", "Runs that did not finish"}
    assert shown(results.long()) == {"Context length"}
    assert shown(results.measured()) == {"Inference"}
    assert shown(results.watched()) == {"Telemetry"}
    assert shown(results.everything()) == titles


def test_warnings_stand_above_the_answer_and_notes_below_everything(tmp_path: Path) -> None:
    result = results.warned()
    write_page(result, tmp_path / "report.html")
    text = own_text(tmp_path / "report.html")
    body = text[text.index("<body>") :]
    for sentence in result.warnings:
        assert body.index(result.verdict) < body.index(sentence) < body.index(result.answer[0])
    for note in result.notes:
        assert body.index(note) > body.index("How it was made")
    write_page(results.ladder(), tmp_path / "report.html")
    assert "Not controlled" not in own_text(tmp_path / "report.html")


def test_the_table_says_what_is_not_significant_how_many_seeds_it_takes_and_the_tests(tmp_path: Path) -> None:
    write_page(results.ladder(), tmp_path / "report.html")
    text = own_text(tmp_path / "report.html")
    cells = re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", text))
    interval = "\u22120.003 [\u22120.011, +0.005]"
    assert f"norm=rmsnorm vanilla {interval} 0.60 not significant 3 64 or more seeds" in cells
    assert re.search(r"block=prenorm norm=rmsnorm \S+ \S+ \S+ &lt; 0.001 lower 3", cells)
    assert "intervals and p are simultaneous (moderated paired tests of the 6 steps)" in text


def body(result: Result, folder: Path) -> str:
    """What a report shows, without the data of its charts and their alternative texts."""
    write_page(result, folder / "report.html")
    _, _, text = own_text(folder / "report.html").partition("<body>")
    return re.sub(r"<script.*?</script>|aria-label=\".*?\"", "", text, flags=re.DOTALL)


def test_the_edge_of_a_learning_rate_grid_is_reported_once_beside_the_arm_that_is_there(
    tmp_path: Path,
) -> None:
    text = body(results.swept(), tmp_path)
    assert text.count("edge of the grid") == 1
    assert re.search(r"0\.03</span><span>edge of the grid</span>", text)


def test_the_residual_of_matching_is_reported_once_beside_the_costs(tmp_path: Path) -> None:
    assert body(results.ladder(), tmp_path).count(fmt.residual(results.ladder().arms[1].arm.residual)) == 1


def test_curves_of_arms_that_are_judged_in_bits_are_in_bits(tmp_path: Path) -> None:
    chart = training.curves(results.in_bits())
    assert chart.encoding["y"]["title"] == "validation loss, bits per byte"
    assert list(chart.choices["Loss"]) == ["validation loss"]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (results.ladder, "for 80% power, if the difference is within its own 80% interval"),
        (results.ladder, "Interpolated linearly between evaluations"),
        (results.ladder, "not what a shorter budget would give"),
        (results.ladder, "both mean loss and training speed, regardless of their intervals"),
        (results.factorial, "intervals and p are simultaneous"),
    ],
)
def test_captions_say_what_their_numbers_rest_on(tmp_path: Path, make: Callable[[], Result], said: str) -> None:
    assert said in body(make(), tmp_path)


def test_no_two_of_200_arms_look_alike_and_the_baseline_is_solid_black() -> None:
    result = results.result({f"arm {i}": 3.9 for i in range(200)}, points=2)
    looks = style.arm_styles(replace(result, study=replace(result.study, baseline="arm 7")))
    assert len(set(looks.values())) == 200
    assert looks["arm 7"] == style.Style("#000000", (1, 0), "circle")


def test_a_difference_is_hollow_exactly_where_it_is_not_significant() -> None:
    rows = differences.difference_rows(results.ladder(), "previous")
    drawn = differences.differences(rows, "", "").rows
    assert [row["hollow"] for row in drawn] == [not row.change.significant for row in rows]
    assert [row.change.significant for row in rows] == [False, True, True, True, True, True]


def test_pictures_do_not_depend_on_the_last_digits_of_losses_which_another_cpu_may_round_otherwise() -> None:
    for result in (results.factorial(), results.ladder()):
        other = changed(result, lambda leaf: leaf * (1 + 1e-14) if isinstance(leaf, float) and leaf % 1 else leaf)
        assert result != other
        for draw in FIGURES.values():
            ours, theirs = (chart_figure(draw(one)) for one in (result, other))
            assert ours == theirs


def test_an_arm_without_a_cache_is_at_the_left_edge_of_the_chart_of_caches() -> None:
    chart = costs.kv_cache_front(results.without_cache("ffn=swiglu"))
    places = {row["arm"]: (row["x"], row["text"].splitlines()[0]) for row in chart.rows}
    assert places.pop("ffn=swiglu") == (512, "KV cache: 0 B")
    assert {shown for _, shown in places.values()} == {"KV cache: 1 KiB", "KV cache: 2 KiB"}
    ticks = re.findall(r">(\d+ K?i?B)</text>", svg(chart.view(())))
    assert ticks == ["0 B", "1 KiB", "2 KiB"]


def test_arms_with_states_are_drawn_by_cache_and_state_together_at_their_context() -> None:
    chart = costs.kv_cache_front(results.with_states())
    places = {row["arm"]: (row["x"], row["text"].splitlines()[0]) for row in chart.rows}
    assert places["ffn=swiglu"] == (67_584, "KV cache and state: 66 KiB")
    assert places["position=rope"] == (182_272, "KV cache and state: 178 KiB")
    assert places["vanilla"] == (524_288, "KV cache and state: 512 KiB")
    assert chart.title == "Loss against KV cache and state"
    drawn = svg(chart.view(()))
    assert ">size of KV cache and state at 256 tokens, 16-bit cache</text>" in drawn
    assert {*re.findall(r">(\d+ K?i?B)</text>", drawn)} == {"64 KiB", "128 KiB", "256 KiB", "512 KiB"}


def test_a_page_tells_states_per_sequence_beside_the_cache_per_token(tmp_path: Path) -> None:
    text, arms = body(results.with_states(), tmp_path), tables(results.with_states())["arms"]
    assert arms.cells("KV cache per token", "State per sequence")[3:5] == [
        "position=rope 512 B 50 KiB",
        "ffn=swiglu 0 B 66 KiB",
    ]
    assert "both mean loss and size of KV cache and state at 256 tokens, regardless" in text
    whole = own_text(tmp_path / "report.html")
    assert 'aria-label="Loss against KV cache and state: vanilla 3.9520 \u00b10.0099 2 KiB 0 B; ' in whole
    assert "State per sequence" not in body(results.ladder(), tmp_path)


def test_long_names_keep_in_charts_what_sets_them_apart() -> None:
    rows = differences.difference_rows(results.many(), "previous")
    labels = [row["label"].split(" (")[0] for row in differences.differences(rows, "", "").rows]
    assert labels[:2] == ["model.n_kv_heads=1", "model.n_kv_heads=2"]
    assert len(set(labels)) == 39


@pytest.mark.parametrize(
    ("shown", "wanted"),
    [
        (fmt.number(-1234.56, 1), "\u22121,234.6"),
        (fmt.signed(0.01234), "+0.0123"),
        (fmt.number(math.nan), "\u2013"),
        (fmt.number(None), "\u2013"),
        (fmt.with_interval(3.71, 3.7, 3.72), "3.710 [3.700,\u00a03.720]"),
        (fmt.with_interval(3.71, 3.6, 3.82), "3.71 [3.60,\u00a03.82]"),
        (fmt.with_interval(120.4, 80, 160.8), "120 [80,\u00a0161]"),
        (fmt.with_interval(-0.00123, -0.0015, -0.00096, True), "\u22120.00123 [\u22120.00150,\u00a0\u22120.00096]"),
        (fmt.plus_minus(3.71, 3.6, 3.82), "3.71 \u00b10.11"),
        (fmt.plus_minus(3.71, math.nan, math.nan), "3.7100"),
        (fmt.with_interval(3.71, 3.71, 3.71), "3.7100 [3.7100,\u00a03.7100]"),
        (fmt.with_interval(3.71, math.nan, math.nan), "3.7100"),
        (fmt.p_value(0.00099), "p < 0.001"),
        (fmt.p_value(0.0312), "p = 0.031"),
        (fmt.p_value(0.312), "p = 0.31"),
        (fmt.p_value(math.nan), ""),
        (fmt.short(2_892_800), "2.89 M"),
        (fmt.short(1.39e13), "13.9 T"),
        (fmt.short(12), "12"),
        (fmt.short(999.4), "999"),
        (fmt.short(999.9), "1 k"),
        (fmt.short(-999_700), "\u22121 M"),
        (fmt.short(0), "0"),
        (fmt.three_digits(12_409.3), "12,409"),
        (fmt.three_digits(69.71), "69.7"),
        (fmt.three_digits(0.05123), "0.0512"),
        (fmt.three_digits(0), "0"),
        (fmt.three_digits(math.nan), "\u2013"),
        (fmt.in_bytes(2048), "2 KiB"),
        (fmt.in_bytes(1_049_706_496), "1,001 MiB"),
        (fmt.in_bytes(100), "100 B"),
        (fmt.percent(0.412), "41.2%"),
        (fmt.residual(-0.003), "\u22120.30%"),
        (fmt.learning_rate(3e-5), "3e\u22125"),
        (fmt.count(1, "seed"), "1 seed"),
        (fmt.enumerate_some(["a", "b", "c"], 2), "a, b, and 1 more"),
    ],
)
def test_numbers_are_written_as_a_reader_wants_them(shown: str, wanted: str) -> None:
    assert shown == wanted


def test_every_seed_is_shown_with_its_own_difference(tmp_path: Path) -> None:
    result = results.ladder()
    write_page(result, tmp_path / "report.html")
    _, _, table = own_text(tmp_path / "report.html").partition("Every seed: final validation loss, nats per token")
    first, second = ([t.summary["val/loss"] for t in arm.records] for arm in result.arms[:2])
    for loss, reference in zip(second, first, strict=True):
        assert f"<span>{loss:.4f}</span><span>{fmt.signed(loss - reference)}</span>" in table


def test_tokens_to_the_baselines_loss_are_censored_where_a_run_ended_before(tmp_path: Path) -> None:
    found = results.ladder()
    reaches = (
        Reach({1: 1.0, 2: 0.92, 3: 1.0}, frozenset({1, 3}), None),
        Reach({1: 0.41, 2: 0.43, 3: 0.45}, frozenset(), Estimate(3, 0.4297, 0.05, 0.38, 0.49)),
    )
    arms = [replace(arm, reach=reach) for arm, reach in zip(found.arms[1:3], reaches, strict=True)]
    text = body(replace(found, arms=(found.arms[0], *arms, *found.arms[3:])), tmp_path)
    assert "not reached in 2 of 3 seeds" in text
    assert "&gt;1.00\u00d7, 0.92\u00d7, &gt;1.00\u00d7" in text
    assert "0.430 [0.380,\u00a00.490]" in text


def shown_in(report: Opened, selector: str) -> dict[str, float]:
    """The bounding box of the first such element."""
    return report.page.eval_on_selector(selector, "one => one.getBoundingClientRect().toJSON()")


@in_browser
def test_the_first_screen_has_title_verdict_warnings_and_the_whole_figure(opened: Open) -> None:
    warning = "Runs differ in commit: 0c6e11a in norm=rmsnorm; 1c6e11a in vanilla; their code may differ." * 2
    report = opened(replace(results.ladder(), warnings=(warning,) * 9))
    bottoms = [shown_in(report, selector)["bottom"] for selector in ("h1", ".verdict", ".warnings", ".plot")]
    assert bottoms == sorted(bottoms)
    assert bottoms[-1] <= 900
    summary = report.page.locator(".warnings summary")
    assert summary.inner_text() == "7 more warnings"
    summary.click()
    assert report.page.locator(".warnings li").last.is_visible()


@in_browser
def test_a_reader_s_dark_setting_gives_dark_paper(opened: Open) -> None:
    report = opened(results.ladder())
    paper = "getComputedStyle(document.body).backgroundColor"
    assert report.page.evaluate(paper) == "rgb(255, 255, 255)"
    report.page.emulate_media(color_scheme="dark")
    assert report.page.evaluate(paper) == "rgb(22, 24, 27)"


def test_the_conditions_are_one_line_and_only_arms_that_were_matched_are_said_to_be(tmp_path: Path) -> None:
    study = write_study(tmp_path, {"a": 0.0, "b": 0.1}, facts={"b": {"choices": {"size": "nano"}}})
    size, batches = "nano · 1.84 M parameters · 1.6 M tokens", "batches of 16 \u00d7 256"
    said = f"seeds 1, 2, 3 · matched in parameters without embeddings · {size} · {batches} · cpu"
    assert conditions(analyse(study, tmp_path)) == said
    arms = tuple(replace(arm, residual=None) for arm in study.arms)
    text = body(analyse(replace(study, arms=arms), tmp_path), tmp_path)
    assert "matched" not in text
    assert "sizes as they are" in text


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ((1_321_000, 1_312_000), "1.31 to 1.32 M parameters"),
        ((1_320_100, 1_320_200), "1.32 M parameters"),
        ((987_000, 1_310_000), "987 k to 1.31 M parameters"),
    ],
)
def test_unequal_sizes_are_a_range_in_the_conditions(params: tuple[int, int], said: str, tmp_path: Path) -> None:
    facts = {arm: {"params": n} for arm, n in zip("ab", params, strict=True)}
    study = write_study(tmp_path, {"a": 0.0, "b": 0.1}, facts=facts)
    assert said in conditions(analyse(study, tmp_path)).split(" \u00b7 ")


def test_the_chart_that_a_design_is_about_comes_first(tmp_path: Path) -> None:
    result = results.everything()
    designs = {
        "Learning rate": LearningRate(["vanilla", "llama2"]),
        "Cost": KVHeads("llama2"),
        "Context length": Context("llama", ["rope", "alibi"], [1, 2]),
        "Scaling": Ladder("vanilla", "llama2"),  # in its place: a ladder names no section
    }
    for title, design in designs.items():
        study = replace(result.study, lead=design.variants(CONFIGS).lead)
        study.save(tmp_path)
        text = body(replace(result, study=Study.load(tmp_path)), tmp_path)
        assert re.search(r"<h2 id=\"section-1\">(.*?)</h2>", text)[1] == title


def test_estimates_of_a_column_have_one_number_of_decimals(tmp_path: Path) -> None:
    found = results.ladder()
    wide = replace(found.arms[2].to_previous.nats, low=-0.9, high=0.6)
    arm = replace(found.arms[2], to_previous=replace(found.arms[2].to_previous, nats=wide))
    shown = tables(replace(found, arms=(*found.arms[:2], arm, *found.arms[3:])))["arms"].rows
    assert {len(row[1].split(" ")[0].partition(".")[2]) for row in shown[1:]} == {4}


def test_the_memory_of_a_process_on_a_cpu_is_no_cost_of_its_arm(tmp_path: Path) -> None:
    facts = {"perf/peak_memory_bytes": 1 << 30}
    for device, is_cost in (("cpu", False), ("cuda", True)):
        folder = tmp_path / device
        study = write_study(folder, {"a": 0.0, "b": 0.1}, facts=dict.fromkeys("ab", facts | {"device": device}))
        assert ("Peak memory" in tables(analyse(study, folder))["costs"].head) == is_cost


def test_the_title_is_the_study_s_own_and_else_of_design_and_baseline(tmp_path: Path) -> None:
    found = results.ladder()
    assert "<h1>Ladder: vanilla and 6 other arms</h1>" in body(found, tmp_path)
    titled = replace(found, study=replace(found.study, title="Norms <b>"))
    assert "<h1>Norms &lt;b&gt;</h1>" in body(titled, tmp_path)
    assert found.study.name not in body(replace(titled, study=replace(titled.study, command="")), tmp_path)


@in_browser
@pytest.mark.parametrize("arms", [7, 20])
def test_the_table_of_arms_is_whole_at_1200_pixels_with_a_line_or_two_for_each_arm(opened: Open, arms: int) -> None:
    result = results.ladder() if arms == 7 else of_many(20)
    report = opened(result)
    heads = report.page.locator("table").first.locator("thead th").all_inner_texts()
    assert heads == [
        "Arm",
        "Difference to the step before",
        "Verdict",
        "Loss",
        "Parameters",
        "FLOPs per token",
        "Tokens per second",
        "KV cache per token",
    ]
    assert report.page.eval_on_selector(".table", "one => one.scrollWidth <= one.clientWidth")
    heights = "rows => Math.max(...rows.map(row => row.getBoundingClientRect().height))"
    assert report.page.locator("table").first.locator("tbody tr").evaluate_all(heights) < 60


def of_many(arms: int, seeds: int = 3) -> Result:
    """A ladder of `arms` arms with long names."""
    names = [f"attention=gqa,model.n_kv_heads={i},position=rope_yarn" for i in range(arms)]
    return results.result({name: 3.95 - 0.006 * i + 0.02 * math.sin(i) for i, name in enumerate(names)}, seeds, 20)


@in_browser
def test_of_20_arms_curves_open_with_those_that_differ_most_and_say_so(opened: Open) -> None:
    result = of_many(20)
    report = opened(result)
    steps = sorted((arm.to_previous for arm in result.arms[1:]), key=lambda c: -abs(c.change.mean))
    assert set(report.plot("Difference over training", "arms")) == {step.arm for step in steps[:4]}
    drawn = {result.study.baseline, *(step.arm for step in steps[:5])}
    assert set(report.plot("Loss over training", "arms")) == drawn
    figure = report.figure("Loss over training")
    assert "Of 20 the 6 that differ most are shown; press a name to show another." in figure.inner_text()
    figure.locator("[aria-pressed=false]").first.click()
    assert len(report.plot("Loss over training", "arms")) == 7


def row(name: str, mean: float, half: float) -> Comparison:
    found = PairedDifference(3, mean, 0.01, mean - half, mean + half, 0.5 if abs(mean) < half else 0.001)
    return Comparison(name, "base", (1, 2, 3), found, found)


def test_an_interval_that_would_squeeze_all_others_ends_in_an_arrow_with_its_end() -> None:
    rows = [row("a", 0.01, 0.02), row("b", -0.03, 0.02), row("c", 0.02, 0.02), row("wide", 0.01, 0.9)]
    least, most = differences.axis_range(rows)
    assert (least, most) == pytest.approx((-0.0625, 0.0625))
    drawn = differences.differences(rows, "", "").rows
    assert drawn[3]["label"].startswith("\u25c4 \u22120.89 wide")
    assert [row["end"] for row in drawn] == ["", "", "", "+0.91 \u25ba"]
    assert (drawn[3]["low"], drawn[3]["high"]) == (least, most)
    assert not any(row["outside"] for row in drawn)


def test_a_difference_far_beyond_all_others_is_written_beside_its_arrow() -> None:
    rows = [row("a", 0.01, 0.02), row("b", -0.03, 0.02), row("c", 0.02, 0.02), row("far", 0.6, 0.02)]
    *_, far = differences.differences(rows, "", "").rows
    assert far["end"] == "+0.600 [+0.580,\u00a0+0.620] \u25ba"
    assert (far["outside"], far["beyond_high"]) == (True, True)


@pytest.mark.parametrize("side", [-1, 1])
def test_of_a_difference_far_beyond_all_others_nothing_is_drawn_beyond_the_axis(side: int) -> None:
    rows = [row("a", 0.01, 0.02), row("b", -0.03, 0.02), row("c", 0.02, 0.02), row("far", side * 0.6, 0.02)]
    least, most = differences.axis_range(rows)
    drawn = differences.differences(rows, "", "").rows
    assert all(least <= row[end] <= most for row in drawn for end in ("x", "low", "high"))
    assert {drawn[3][end] for end in ("x", "low", "high")} == {most if side > 0 else least}


def test_an_axis_covers_all_intervals_where_none_is_much_longer() -> None:
    rows = [row("a", 0.01, 0.02), row("b", -0.12, 0.02), row("c", 0.02, 0.05)]
    assert differences.axis_range(rows) == pytest.approx((-0.14, 0.07))
    assert differences.axis_range(rows[:1]) == pytest.approx((-0.01, 0.03))
    assert differences.axis_range([]) == (0, 0)


@in_browser
def test_a_factorial_begins_with_its_effects_and_interactions(opened: Open) -> None:
    report = opened(results.factorial())
    assert report.page.locator("figure h3").all_inner_texts()[:2] == [
        "Main effects and interactions",
        "Interaction of norm and ffn",
    ]
    heads = [table.locator("th").first.inner_text() for table in report.page.locator("table").all()[:3]]
    assert heads == ["Effect", "Axes", "Arm"]
    assert "aliased" in report.page.locator("section").first.inner_text().lower()
    assert report.complaints == []


THREE = {"vanilla": 3.95, "+prenorm": 3.9, "+swiglu": 3.84}


def label_heights(drawn: str, names: Collection[str]) -> list[float]:
    """Where the names of arms stand in a drawing, in pixels from above."""
    found = {name: float(at) for at, name in re.findall(r'translate\([\d.]+,([\d.]+)\)"[^>]*>([^<]+)</text>', drawn)}
    return [found[name] for name in names]


@pytest.mark.parametrize("show", LATE)
def test_names_stand_apart_at_the_ends_of_few_curves_instead_of_a_legend(show: str) -> None:
    chart = label_ends(training.curves(results.result(THREE)), 110, is_fixed=False)
    assert chart.margin
    drawn = svg({**chart.view([LOSS["val/loss"], show]), "width": 700, "height": chart.height})
    assert "role-legend" not in drawn
    heights = label_heights(drawn, THREE)
    assert heights == sorted(heights)
    assert min(np.diff(heights)) > 12


@pytest.mark.parametrize(
    "losses",
    [
        pytest.param({"vanilla": 3.95, "+prenorm": 3.9495, "+swiglu": 3.949, "+gqa": 3.9489}, id="close"),
        pytest.param({"vanilla": 3.95, "embedding=untied": 3.6}, id="long names"),
    ],
)
def test_curves_whose_names_would_not_fit_keep_their_legend(losses: dict[str, float]) -> None:
    chart = training.curves(results.result(losses))
    assert label_ends(chart, 110, is_fixed=False) is chart
    assert "role-legend" in svg(chart.view([LOSS["val/loss"]]))


def test_a_line_that_ends_before_the_others_is_named_in_the_legend() -> None:
    chart = training.context_lengths(results.long())
    assert len({max(row["x"] for row in chart.rows if row["arm"] == name) for name in chart.legend}) > 1
    assert label_ends(chart, 1000, is_fixed=False) is chart


@in_browser
def test_names_of_curves_follow_the_zoom(opened: Open) -> None:
    report, title = opened(results.result(THREE)), "Loss over training"
    figure = report.figure(title)
    assert figure.locator(".legend").count() == 0
    ends = figure.locator(".mark-text.role-mark text")
    assert {*ends.all_text_contents()} == {*THREE}
    figure.scroll_into_view_if_needed()
    box = figure.locator(".plot .background").first.bounding_box()
    assert box
    report.page.mouse.move(box["x"] + 0.3 * box["width"], box["y"])
    report.page.mouse.down()
    report.page.mouse.move(box["x"] + 0.6 * box["width"], box["y"] + box["height"], steps=4)
    report.page.mouse.up()
    assert report.plot(title, "x[1]") < 0.8 * results.TOKENS
    assert {*ends.all_text_contents()} == {*THREE}
    for text in ends.all():
        assert 0 < text.evaluate("text => text.getBoundingClientRect().x") - box["x"] < box["width"]
    assert report.complaints == []


def test_an_interaction_has_its_interval_in_its_chart_and_its_table() -> None:
    result, interval = results.factorial(), results.factorial().effects[-1].change.text
    (chart,) = differences.interactions(result)
    assert interval in svg(chart.view([]))
    assert chart.rows[-1]["text"] == f"rmsnorm, swiglu: 3.8700, interaction {interval}, higher"
    cells = [row[4:] for row in tables(result)["interactions"].rows]
    assert cells == [[fmt.UNKNOWN] * 2] * 3 + [[interval, "higher"]]


def test_of_many_interactions_the_largest_are_drawn_and_the_page_says_so(tmp_path: Path) -> None:
    (one,) = results.factorial().interactions
    assert one.largest
    pairs, sizes = [(f"a{i}", f"b{i}") for i in range(10)], [replace(one.largest, mean=-0.01 * i) for i in range(10)]
    changes = [((None, None), (None, size)) for size in sizes]
    many = tuple(replace(one, axes=pair, changes=of_pair) for pair, of_pair in zip(pairs, changes, strict=True))
    result = replace(results.factorial(), interactions=many)
    assert [found.axes for found in differences.shown_interactions(result)] == pairs[4:]
    assert "The 6 largest of 10 interactions; the table has all." in body(result, tmp_path)


def test_bands_are_drawn_where_differences_are_tested() -> None:
    result = results.ladder()
    curve = result.difference_curves[0]
    last = [row for row in differences.difference_curves(result).rows if row["arm"] == curve.name][-1]
    ends = [curve.low[-1], curve.mean[-1], curve.high[-1]]
    assert [last[end] for end in ("low", "y", "high")] == pytest.approx(ends, rel=1e-5)
    assert not any("low" in row for row in differences.difference_curves(only(3, seeds=1)).rows)


def test_the_page_links_the_files_beside_it(tmp_path: Path) -> None:
    assert "Files:" not in body(results.ladder(), tmp_path)
    for name in ("summary.csv", "study.yaml", "speed.json"):
        (tmp_path / name).touch()
    (tmp_path / "export").mkdir()
    text = body(results.ladder(), tmp_path)
    assert re.findall(r'<a href="([^"#]+)">', text) == ["summary.csv", "study.yaml", "speed.json", "export/"]


def from_disk(folder: Path, seeds: tuple[int, ...] = (1, 2, 3), **settings: Any) -> tuple[Path, Study]:
    return folder, write_study(folder, {"base": 0.0, "near": 0.0, "better": -0.2}, seeds, **settings)


def lacking(folder: Path) -> tuple[Path, Study]:
    folder, study = from_disk(folder)
    for name, seed in (("near", 1), ("better", 3)):
        remove_run(run_folder(folder, study, name, seed))
    return folder, study


def without_one(folder: Path) -> tuple[Path, Study]:
    folder, study = from_disk(folder)
    for seed in (1, 2, 3):
        plant_end(run_folder(folder, study, "better", seed), "failed", "CUDA out of memory", 5)
    return folder, study


def all_diverged(folder: Path) -> tuple[Path, Study]:
    folder, study = from_disk(folder, seeds=(1, 2), rates=(1e-3, 2e-3), design="learning_rate")
    for arm in study.arms:
        for member in arm.members:
            plant_end(folder / member.folder, "diverged", "the training loss is nan at step 60", 5)
    return folder, study


@in_browser
@pytest.mark.parametrize(
    ("make", "verdict"),
    [
        (lambda folder: from_disk(folder, seeds=(1,)), "Nothing can be concluded from one seed."),
        (lambda folder: from_disk(folder, seeds=(1, 2)), "Of 2 steps, "),
        (lacking, "No step changed the loss significantly."),
        (without_one, "near did not change the loss significantly: "),
        (all_diverged, "Nothing can be compared: "),
    ],
    ids=["one seed", "two seeds", "seeds missing", "no finished run", "all rates diverge"],
)
def test_a_study_that_went_badly_has_a_readable_page(
    opened: Open, tmp_path: Path, make: Callable[[Path], tuple[Path, Study]], verdict: str
) -> None:
    folder, study = make(tmp_path / "study")
    report = opened(analyse(study, folder))
    assert report.page.locator(".verdict").inner_text().startswith(verdict)
    assert report.charts() == report.figures()
    assert report.complaints == []
    assert report.page.evaluate("document.documentElement.scrollWidth") <= 1200
    assert report.page.locator("table").first.locator("tbody tr").count() == 3
