"""report.html: a study's result as one file that needs no network, for a screen, a phone and paper."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from plotly import graph_objects as go
from plotly.offline import get_plotlyjs

from . import alt, charts, words
from .result import (
    ArmResult,
    CacheSize,
    Comparison,
    Divergence,
    Inference,
    LearningRates,
    Lengths,
    Reach,
    Result,
    Speed,
    Spread,
)
from .statistics import Estimate, PairedDifference

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
class Table:
    """Cells of text, in rows; the lines after a cell's first are notes. words: columns that hold no numbers."""

    caption: str
    head: list[str]
    rows: list[list[str]]
    words: frozenset[str] = frozenset()


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
    found = [
        _answer(result),
        _curves(result),
        _cost(result),
        _inference(result),
        _effects(result),
        _learning_rates(result),
        _divergences(result),
        _lengths(result),
        _provenance(result),
    ]
    told = map(_without_void, found)
    return [section for section in told if section.text or section.charts or section.tables or section.command]


def _without_void(section: Section) -> Section:
    """The section without charts that have no point and tables that have nothing but names."""
    drawn = tuple(chart for chart in section.charts if chart.has_points)
    return replace(section, charts=drawn, tables=tuple(table for table in section.tables if len(table.head) > 1))


def _answer(result: Result) -> Section:
    in_unit = f"change of validation loss, {words.UNITS[result.metric]}"
    kinds = (
        (charts.difference_rows(result, "previous"), "What each step was worth", "to the step before"),
        (charts.difference_rows(result, "baseline"), "Differences to the baseline", f"to {result.study.baseline}"),
    )
    caption = (
        "Mean over seeds of the paired difference {}, with its simultaneous 95% interval where it is tested. Left of "
        "zero is better. Filled: significant at 5% (max-t). Hollow: not."
    )
    found = tuple(_differences(rows, title, in_unit, caption.format(to)) for rows, title, to in kinds if rows)
    return Section("Answer", result.answer, found, (_loss_table(result), _seed_table(result)) if result.arms else ())


def _differences(rows: list[charts.Row], title: str, axis: str, caption: str, wide: bool = False) -> Chart:
    return Chart(charts.differences(rows, title, axis), alt.differences(rows, f"{title}, {axis}"), caption, wide)


def _loss_table(result: Result) -> Table:
    return _arm_table(
        result,
        "Final validation loss with its 95% interval over seeds, and paired differences; negative is better. "
        f"Differences are in {words.UNITS[result.metric]}; intervals and p are simultaneous ({result.tests}). "
        "Seeds needed: for 80% power, if the difference is within its own 80% interval.",
        {
            "Loss, nats per token": lambda arm: _estimate(arm.loss),
            "Loss, bits per byte": lambda arm: _estimate(arm.bits),
            "Difference to the step before": lambda arm: _comparison(arm.to_previous),
            "Difference to the baseline": lambda arm: _comparison(arm.to_baseline),
            "Seeds": lambda arm: _seeds(arm),
            "Learning rate": lambda arm: ", ".join(map(words.learning_rate, arm.learning_rates)) or words.UNKNOWN,
        },
    )


def _seed_table(result: Result) -> Table:
    """What the means and intervals are made of."""
    against = {c.arm: c.against for arm in result.arms if (c := arm.to_previous or arm.to_baseline)}
    losses = {arm.name: {t.seed: t.summary[result.metric] for t in arm.trials if t.done} for arm in result.arms}

    def cell(seed: int, arm: ArmResult) -> str:
        loss = losses[arm.name].get(seed)
        reference = losses.get(against.get(arm.name, ""), {}).get(seed)
        if loss is None:
            return words.UNKNOWN
        shown = words.number(loss, 4)
        return shown if reference is None else f"{shown}\n{words.signed(loss - reference)}"

    caption = (
        f"Every seed: final validation loss, {words.UNITS[result.metric]}, and below it the difference to the step "
        "before, or else to the baseline, at the same seed."
    )
    seeds = result.provenance.seeds
    return _arm_table(result, caption, {f"Seed {seed}": partial(cell, seed) for seed in seeds})


def _curves(result: Result) -> Section:
    if not result.curves:
        return Section("Curves")
    chart = Chart(
        charts.curves(result),
        alt.curves(result),
        "Lines: mean over seeds. Bands: from the lowest to the highest seed. Press an arm's name to hide it; "
        "drag over the chart to magnify, double-click to go back.",
        wide=True,
    )
    baseline = next((arm.to_reach for arm in result.arms if arm.name == result.study.baseline), {})
    columns: dict[str, Callable[[ArmResult], str]] = {
        "Tokens": lambda arm: _reached(arm.to_reach, baseline, "tokens", words.number),
        "Tokens over the baseline's": lambda arm: _reach(arm.reach),
        "Training FLOPs": lambda arm: _reached(arm.to_reach, baseline, "flops", words.short),
        "Seconds": lambda arm: _reached(arm.to_reach, baseline, "seconds", words.number),
    }
    caption = (
        f"What it took to reach the final loss of {result.study.baseline}, mean over seeds, and as a multiple of what "
        f"the baseline took; {words.UNKNOWN} where not every seed reached it. Tokens over the baseline's: the "
        "geometric mean of the ratios at each seed with its 95% interval, and the ratios; > where a run ended before. "
        "Interpolated linearly between evaluations; with a learning rate that decays, a loss on the way is not what a "
        "shorter budget would "
        "give."
    )
    return Section("Curves", charts=(chart,), tables=(_arm_table(result, caption, columns),))


def _cost(result: Result) -> Section:
    fronts = (
        ("kv_cache/bytes_per_token", result.front.kv_cache, charts.kv_cache_front, "KV-cache size per token"),
        ("perf/tokens_per_second", result.front.throughput, charts.throughput_front, "training speed"),
    )
    caption = (
        "Dotted: the arms that no other one beats in both mean loss and {}; their intervals play no part in it. Means "
        "for it are over the seeds that all arms have finished. Bars: 95% intervals over seeds."
    )
    found = tuple(
        Chart(draw(result), alt.front(result, cost, front, name), caption.format(name))
        for cost, front, draw, name in fronts
        if any(arm.judged(result.metric) and words.known(arm.costs.get(cost)) for arm in result.arms)
    )
    columns: dict[str, Callable[[ArmResult], str]] = {
        "Parameters": lambda arm: words.number(arm.costs.get("params")),
        "Without embeddings": lambda arm: words.number(arm.costs.get("params_non_embedding")),
        "FLOPs per token": lambda arm: words.short(arm.costs.get("flops_per_token")),
        "FLOPs, training": lambda arm: words.short(arm.costs.get("train_flops_per_token")),
        "Tokens per second, training": lambda arm: _speed(result, arm, "train", "perf/tokens_per_second"),
        "Decoding": lambda arm: _speed(result, arm, "decode", "decode_tokens_per_second"),
        "MFU": lambda arm: words.percent(arm.costs.get("perf/mfu")),
        "Peak memory": lambda arm: words.size(arm.costs.get("perf/peak_memory_bytes")),
        "KV cache per token": lambda arm: words.size(arm.costs.get("kv_cache/bytes_per_token")),
        "KV cache, full context": _full_cache,
        "Matching residual": lambda arm: words.residual(arm.arm.residual),
    }
    caption = (
        "FLOPs are those of matrix products, per token, of the forward pass and of training. KV cache: 16-bit "
        f"elements. Matching residual: how far the arm's size is from the one it was matched to. {_speed_note(result)}"
    )
    return Section("Cost", charts=found, tables=(_arm_table(result, caption, columns),) if result.arms else ())


def _speed(result: Result, arm: ArmResult, kind: Literal["train", "decode"], cost: str) -> str:
    """A median with its rounds' range where speeds were measured side by side, else what the runs logged."""
    if result.speed is None or arm.name not in result.speed.arms:
        return words.number(arm.costs.get(cost))
    rounds = getattr(result.speed.arms[arm.name], kind)
    return _spread(Spread(arm.costs[cost], min(rounds), max(rounds)), words.number)


def _speed_note(result: Result) -> str:
    """How speeds were measured."""
    speed = result.speed
    if speed is None:
        return "Speed of training: as the runs logged it, mean over seeds; it was not measured side by side."
    rounds = max(len(arm.train) for arm in speed.arms.values())
    hardware = f"{speed.devices} x {speed.device} in {speed.precision} with {speed.threads} CPU threads"
    return (
        f"Speeds: medians of {rounds} rounds after the runs, in each of which every arm had its turn, with the lowest "
        f"and the highest, on {hardware}. Decoding: tokens per second of one sequence on one device, at the end of the "
        "context, with the KV cache, not compiled."
    )


def _inference(result: Result) -> Section:
    found = []
    if any(arm.speeds for arm in result.inference):
        caption = (
            "At the end of a context, all sequences of a batch together. Bars: from the lowest to the highest seed."
        )
        found.append(Chart(charts.decoding_speeds(result), alt.decoding_speeds(result.inference), caption))
    if any(arm.caches for arm in result.inference):
        caption = "Of the cache's tensors as they are when generating; a window's stops growing at its length."
        found.append(Chart(charts.cache_sizes(result), alt.cache_sizes(result.inference), caption))
    return Section(
        "Inference", charts=tuple(found), tables=(_speed_table(result.inference), _cache_table(result.inference))
    )


def _speed_table(arms: Sequence[Inference]) -> Table:
    columns: dict[str, Callable[[Speed], str]] = {
        "Sequences": lambda speed: words.number(speed.batch_size),
        "Context": lambda speed: words.number(speed.context),
        "Seeds": lambda speed: words.number(speed.runs),
        "Tokens per second": lambda speed: _spread(speed.decode, words.three_digits),
        "Without KV cache": lambda speed: _spread(speed.uncached, words.three_digits),
        "Gain": lambda speed: _spread(speed.gain, lambda gain: f"{words.three_digits(gain)}{words.TIMES}"),
        "Prefill, ms": lambda speed: _spread(speed.prefill, lambda seconds: words.three_digits(1e3 * seconds)),
    }
    caption = (
        "Decoding at the end of the largest context that an arm was measured at, all sequences of a batch together, "
        "with the KV cache and without it, and the former over the latter. Prefill: reading prompts that fill the "
        "context. Of each run the median of its rounds; means over seeds and, below them, the lowest and the highest."
    )
    rows = [
        [arm.arm, *(show(speed) for show in columns.values())]
        for arm in arms
        for batch_size in sorted({speed.batch_size for speed in arm.speeds})
        if (speed := arm.speed(batch_size))
    ]
    return _without_empty(Table(caption, ["Arm", *columns], rows))


def _cache_table(arms: Sequence[Inference]) -> Table:
    columns: dict[str, Callable[[CacheSize], str]] = {
        "Elements": lambda cache: cache.dtype,
        "Context": lambda cache: words.number(cache.context),
        "Measured": lambda cache: _spread(cache.measured, words.size),
        "By the formula": lambda cache: _spread(cache.formula, words.size),
    }
    rows = [
        [arm.arm, *(show(cache) for show in columns.values())]
        for arm in arms
        for dtype in dict.fromkeys(cache.dtype for cache in arm.caches)
        if (cache := arm.cache(dtype))
    ]
    caption = (
        "KV cache of one sequence at the largest context that was measured: of its tensors, and by the cost model."
    )
    return _without_empty(Table(caption, ["Arm", *columns], rows, frozenset({"Elements"})))


def _effects(result: Result) -> Section:
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
    table = Table(
        f"In {words.UNITS[result.metric]}; negative is better. intervals and p are simultaneous ({result.tests}).",
        ["Effect", "Change of loss", "Cannot be told from"],
        [
            [
                charts.effect_name(effect.axes),
                _sure(effect.change),
                ", ".join(map(charts.effect_name, effect.aliases)) or words.UNKNOWN,
            ]
            for effect in result.effects
            if words.known(effect.change.mean)
        ],
        frozenset({"Cannot be told from"}),
    )
    return Section(title, charts=(chart,), tables=(table,))


def _learning_rates(result: Result) -> Section:
    if not result.learning_rates:
        return Section("Learning rate")
    chart = Chart(
        charts.learning_rates(result),
        alt.learning_rates(result.learning_rates),
        "Rings: each arm's best learning rate. Crosses above: runs that diverged. Bars: 95% intervals over seeds.",
        wide=True,
    )
    table = Table(
        "Sensitivity: by how much the loss is above the best one, averaged over the grid, a diverged run counted with "
        "the loss of unigram frequencies; 0 is insensitive (Wortsman et al. 2023).",
        ["Arm", "Best learning rate", "Loss there", "Sensitivity", "Diverged runs"],
        [_sweep(sweep) for sweep in result.learning_rates],
    )
    return Section("Learning rate", charts=(chart,), tables=(table,))


def _divergences(result: Result) -> Section:
    title = "Runs that did not finish"
    if not result.divergences:
        return Section(title)
    columns: dict[str, Callable[[Divergence], str]] = {
        "Arm": lambda run: run.arm,
        "Seed": lambda run: str(run.seed),
        "Learning rate": lambda run: words.learning_rate(run.learning_rate),
        "Status": lambda run: run.status,
        "Tokens seen": lambda run: words.number(run.tokens),
        "Why": lambda run: run.message,
    }
    rows = [[show(run) for show in columns.values()] for run in result.divergences]
    table = Table("With the tokens they had seen by then.", list(columns), rows, frozenset({"Status", "Why"}))
    return Section(title, tables=(_without_empty(table),))


def _lengths(result: Result) -> Section:
    if not result.lengths:
        return Section("Context length")
    found = [
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
        found.append(Chart(charts.positions(result), alt.positions(result.lengths), caption))
    lengths = sorted({length for arm in result.lengths for length in arm.lengths})
    table = Table(
        f"Validation loss in nats per token; {words.UNKNOWN} where the position encoding ends before.",
        ["Arm", "Trained at", *(f"{length:,} tokens" for length in lengths)],
        [[arm.arm, f"{arm.trained:,}", *_losses_at(arm, lengths)] for arm in result.lengths],
    )
    return Section("Context length", charts=tuple(found), tables=(table,))


def _provenance(result: Result) -> Section:
    environment = [
        [fact, "\n".join(f"{value} ({words.count(n, 'run')})" for value, n in values.items())]
        for fact, values in result.provenance.environment.items()
    ]
    changed = [
        [arm.name, key, _setting(base), _setting(own)]
        for arm in result.arms
        for key, (base, own) in arm.difference.items()
    ]
    tables = (
        Table("What the runs ran on", ["Fact", "Value"], environment, frozenset({"Value"})),
        Table(
            f"Settings in which an arm differs from {result.study.baseline}",
            ["Arm", "Setting", "Baseline", "Arm's value"],
            changed,
            frozenset({"Setting", "Baseline", "Arm's value"}),
        ),
    )
    found = tuple(table for table in tables if table.rows)
    return Section("How it was made", tables=found, command=result.study.command)


def _arm_table(result: Result, caption: str, columns: dict[str, Callable[[ArmResult], str]]) -> Table:
    """A row per arm."""
    rows = [[arm.name, *(show(arm) for show in columns.values())] for arm in result.arms]
    return _without_empty(Table(caption, ["Arm", *columns], rows))


def _without_empty(table: Table) -> Table:
    """The table without the columns in which nothing is known."""
    kept = [i for i in range(len(table.head)) if any(row[i] != words.UNKNOWN for row in table.rows)]
    rows = [[row[i] for i in kept] for row in table.rows]
    return Table(table.caption, [table.head[i] for i in kept], rows, table.words)


def _estimate(estimate: Estimate | None) -> str:
    return words.with_interval(estimate.mean, estimate.low, estimate.high) if estimate else words.UNKNOWN


def _comparison(comparison: Comparison | None) -> str:
    """A difference, and below it how sure it is."""
    if not comparison or not words.known(comparison.difference.mean):
        return words.UNKNOWN
    needed = f"{words.seed_range(comparison.seeds_needed)} needed" if comparison.seeds_needed else ""
    return _sure(comparison.difference, needed or comparison.untested)


def _sure(found: PairedDifference, note: str = "") -> str:
    p = words.p_value(found.p)
    notes = [told for told in (p, "not significant" if p and not found.significant else "", note) if told]
    interval = words.with_interval(found.mean, found.low, found.high, is_difference=True)
    return f"{interval}\n{'; '.join(notes) or 'not tested'}"


def _spread(spread: Spread | None, show: Callable[[float], str]) -> str:
    """A mean and, below it, the lowest and the highest seed, where they can be told apart."""
    if not spread or not words.known(spread.mean):
        return words.UNKNOWN
    low, high = show(spread.low), show(spread.high)
    # No line may break inside a range.
    return show(spread.mean) if low == high else f"{show(spread.mean)}\n{low}\u00a0to\u00a0{high}"


def _seeds(arm: ArmResult) -> str:
    finished = sum(trial.done for trial in arm.trials)
    return f"{finished}" if finished == len(arm.trials) else f"{finished} of {len(arm.trials)}"


def _reach(reach: Reach | None) -> str:
    """The mean ratio, or in how many seeds it is above what is known, and below it every seed's."""
    if not reach:
        return words.UNKNOWN
    found = reach.ratio
    whole = (
        f"{words.with_interval(found.mean, found.low, found.high)}"
        if found
        else f"not reached in {len(reach.censored)} of {words.count(len(reach.ratios), 'seed')}"
    )
    each = (f"{'>' if seed in reach.censored else ''}{ratio:.2f}{words.TIMES}" for seed, ratio in reach.ratios.items())
    return f"{whole}\n{', '.join(each)}"


def _reached(own: dict[str, float], baseline: dict[str, float], key: str, show: Callable[[float], str]) -> str:
    """What it took and, below it, as a multiple of what the baseline took."""
    value, reference = own.get(key), baseline.get(key)
    if not words.known(value):
        return words.UNKNOWN
    if not words.known(reference) or reference <= 0:
        return show(value)
    return f"{show(value)}\n{value / reference:.2f}{words.TIMES}"


def _full_cache(arm: ArmResult) -> str:
    shown = words.size(arm.costs.get("kv_cache/bytes"))
    context = arm.costs.get("seq_len")
    return f"{shown}\n{words.number(context)} tokens" if words.known(context) and shown != words.UNKNOWN else shown


def _sweep(sweep: LearningRates) -> list[str]:
    at_best = dict(zip(sweep.rates, sweep.loss, strict=True)).get(sweep.best)
    best = words.learning_rate(sweep.best) + ("\nedge of the grid" if sweep.on_edge else "")
    return [sweep.arm, best, _estimate(at_best), words.number(sweep.sensitivity, 4), str(sum(sweep.diverged))]


def _losses_at(arm: Lengths, lengths: list[int]) -> list[str]:
    found = dict(zip(arm.lengths, arm.loss, strict=True))
    return [_estimate(found.get(length)) for length in lengths]


def _setting(value: Any) -> str:
    """As a config file writes it."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
