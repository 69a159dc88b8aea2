"""The report's tables, one function each: from a Result to cells of text."""

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pandas as pd

from llama_lab.analysis.depth_profiles import names
from llama_lab.analysis.result import (
    SECOND_HALF,
    ArmResult,
    Inference,
    Reach,
    Result,
    Spread,
    common_losses,
    final_losses,
    first_losses,
    unit_of,
)
from llama_lab.analysis.scaling_law import Scaled
from llama_lab.analysis.settings import TOKENS
from llama_lab.analysis.statistics import Estimate, term_name
from llama_lab.config.grammar import to_override
from llama_lab.runs.record import Record, finished, started
from llama_lab.runs.stored import ACTIVE, STATE
from llama_lab.runs.study import BATCH, MATCHED
from llama_lab.util import formatting as fmt

from .guide import ranked, title

MOST_SEEDS = 8  # listed in one line
MOST_VALUES = 4  # of one condition: of so many the first and the last
ENDS = ((0, "First"), (-1, "Last"))
Columns = dict[str, Callable[[Any], str | Estimate | None]]  # what each shows of an item


@dataclass(frozen=True)
class Table:
    """Rows of cells of text; the lines after a cell's first are notes. words: columns that hold text, not numbers."""

    caption: str
    head: list[str]
    rows: list[list[str]]
    words: frozenset[str] = frozenset()

    def cells(self, *titles: str) -> list[str]:
        """Each row as text: its name and its cells in these columns (default: all)."""
        kept = [i for i, title in enumerate(self.head) if i == 0 or not titles or title in titles]
        return [" ".join(row[i] for i in kept).replace("\n", ", ") for row in self.rows]


def conditions(result: Result) -> str:
    """How the arms were made, in one line: seeds, matching, corpus, size, tokens, batch, schedule and device."""
    study, seeds, arms = result.study, result.seeds, result.arms
    listed = f"{'seed' if len(seeds) == 1 else 'seeds'} {', '.join(map(str, seeds)) or fmt.UNKNOWN}"
    runs = started(run for arm in arms for run in arm.records)
    facts = zip(*map(_conditions, runs), strict=True)
    known = [[text for text in dict.fromkeys(texts) if fmt.UNKNOWN not in text] for texts in facts]
    words = [" or ".join(texts) if len(texts) < MOST_VALUES else f"{texts[0]} to {texts[-1]}" for texts in known]
    numbers = (
        _between((run.costs.get("params") for run in runs), "parameters"),
        _between((run.config.get(TOKENS) for run in runs), "tokens"),
    )
    shared = (
        f"{study.design.replace('_', ' ')}, baseline {study.baseline}" if study.title else "",
        listed if len(seeds) <= MOST_SEEDS else fmt.count(len(seeds), "seed"),
        f"matched in {MATCHED.get(study.match, 'size')}" if _is_matched(result) else "sizes as they are",
        *(*words[:2], *numbers, *words[2:]),
    )
    return " \u00b7 ".join(filter(None, shared))


def _is_matched(result: Result) -> bool:
    return any(arm.arm.residual is not None for arm in result.arms)


def _conditions(run: Record) -> Sequence[str]:
    at = run.environment
    data, size, schedule = (at.choices.get(group, fmt.UNKNOWN) for group in ("data", "size", "schedule"))
    batch, context = (fmt.number(run.config.get(key)) for key in ("train.batch_size", "model.max_seq_len"))
    return (
        data,
        size,
        f"batches of {batch} {fmt.TIMES} {context}",
        f"{schedule} schedule",
        f"{at.devices} {fmt.TIMES} " * (at.devices > 1) + (at.device or fmt.UNKNOWN),
    )


def _between(found: Iterable[float | None], noun: str) -> str:
    """`1.31 to 1.32 M parameters`; empty if no number is known."""
    numbers = [*filter(fmt.known, found)]
    if not numbers:
        return ""
    low, high = fmt.short(min(numbers)), fmt.short(max(numbers))
    lowest, _, prefix = low.partition(" ")
    return f"{high} {noun}" if low == high else f"{lowest if high.endswith(prefix) else low} to {high} {noun}"


def tables(result: Result) -> dict[str, Table]:
    """The tables that are not empty, by slug, in the page's order."""
    found = {
        "scaling": _scaling(result),
        "laws": _laws(result),
        "effects": effects_table(result),
        "interactions": _interactions(result),
        "arms": _arms(result),
        "rankings": _rankings(result),
        "differences": _differences(result),
        "pairs": _pairs(result),
        "losses": _losses(result),
        "seeds": _seed_losses(result),
        "starts": _starts(result),
        "reach": _to_reach(result),
        "modules": _modules(result),
        "telemetry": _telemetry(result),
        "costs": _costs(result),
        "decoding": _decoding(result.inference),
        "caches": _caches(result.inference),
        "learning_rates": _learning_rates(result),
        "lengths": _lengths(result),
        "unfinished": _unfinished(result),
        "settings": _settings(result),
        "environment": _environment(result),
    }
    return {slug: table for slug, table in found.items() if table.rows and len(table.head) > 1}


def _arms(result: Result) -> Table:
    reference = result.study.before if any(arm.to_previous for arm in result.arms) else result.study.baseline
    losses = iter(plus_minus([arm.judged(result.metric) for arm in result.arms]))
    columns: Columns = {
        f"Difference to {reference}": lambda arm: arm.comparison and arm.comparison.change,
        "Verdict": lambda arm: arm.verdict,
        "Loss": lambda _: next(losses),
        "Parameters": lambda arm: fmt.number(arm.costs.get("params")),
        "FLOPs per token": lambda arm: fmt.short(arm.costs.get("train_flops_per_token")),
        "Tokens per second": lambda arm: fmt.three_digits(arm.costs.get("perf/tokens_per_second")),
        "KV cache per token": lambda arm: fmt.in_bytes(arm.costs.get("kv_cache/bytes_per_token")),
    }
    if result.has_states:
        columns["State per sequence"] = lambda arm: fmt.in_bytes(arm.costs.get(STATE))
    caption = (
        f"Loss: final validation loss, {result.unit}, \u00b1 half its 95% interval over seeds. "
        "Difference: mean over seeds of the paired difference with its simultaneous 95% interval where it is tested; "
        "negative is better. FLOPs: of matrix products, in training. KV cache: with 16-bit elements."
    )
    return _arm_table(result, caption, columns, "Verdict")


def _differences(result: Result) -> Table:
    compared = [c for arm in result.arms for c in (arm.to_previous, arm.to_baseline) if c]
    distinct = {(c.arm, c.against): (c.arm, c) for c in compared if fmt.known(c.change.mean)}
    columns: Columns = {
        "Compared with": lambda c: c.against,
        "Difference": lambda c: c.change,
        "p": lambda c: fmt.bare_p(c.change.p),
        "Plain p": lambda c: fmt.bare_p(c.change.plain_p),
        "Verdict": lambda c: c.change.verdict,
        "Over documents": lambda c: c.over_documents,
        "Seeds": lambda c: str(c.change.n),
        "Seeds needed": lambda c: fmt.seed_range(c.seeds_needed) if c.seeds_needed else fmt.UNKNOWN,
        "In bits per byte": lambda c: c.bits if c.nats else None,
        "Why not tested": lambda c: c.untested or fmt.UNKNOWN,
    }
    caption = (
        f"Differences in {result.unit}; intervals and p are simultaneous ({result.tests}). "
        "Plain p: of paired t-tests with Holm's correction. "
        "Over documents: the difference's 95% interval over other held-out documents, by bootstrap. "
        "Seeds needed: for 80% power, if the difference is within its own 80% interval."
    )
    return _table(caption, distinct.values(), columns, ("Compared with", "Verdict", "Why not tested"))


def _pairs(result: Result) -> Table:
    """A row and a column per arm; empty unless all pairs are compared."""
    found = {(c.arm, c.against): c.change for c in result.pairs}
    digits = fmt.shared_decimals((change.low, change.high) for change in found.values())

    def cell(against: str, arm: ArmResult) -> str:
        change = found.get((arm.name, against))
        return f"{change.shown(digits)}\n{fmt.p_value(change.p) or change.verdict}" if change else fmt.UNKNOWN

    caption = (
        f"The arm of the row minus that of the column, {result.unit}: negative is better. Intervals and p "
        f"are simultaneous ({result.tests}). Rank: by loss, as far as the significant differences determine it."
    )
    against = [arm.name for arm in result.arms if result.pairs]
    columns: Columns = {
        "Rank": lambda arm: fmt.rank(result.ranks.get(arm.name)),
        **{name: partial(cell, name) for name in against},
    }
    return _arm_table(result, caption, columns)


def _rankings(result: Result) -> Table:
    columns: Columns = {title(found): partial(ranked, found) for found in result.rankings if found.is_known}
    caption = (
        f"Loss in {result.unit}, with 95% intervals over seeds. Speeds: geometric means over rounds, each "
        "of which measured every arm, with their 95% intervals; of decoding and prefill for one sequence that fills "
        "the context. Training memory: the most that PyTorch allocates on a GPU. KV cache: with 16-bit elements, and "
        "recurrent states. Rank: 1 is the best; its interval is as narrow as the significant differences of all pairs "
        "make it (each column on its own), or the numbers of bytes, which are exact. Arms are tested within seeds or "
        "rounds, so that they may differ though their intervals overlap."
    )
    return _arm_table(result, caption, columns)


def _losses(result: Result) -> Table:
    columns: Columns = {
        unit_of(result.arms, result.nats).capitalize(): lambda arm: arm.loss,
        "Of averaged weights": lambda arm: arm.ema,
        "Of the best predictor": lambda arm: fmt.number(arm.entropy_floor, 4),
        "Accuracy": lambda arm: arm.accuracy,
        "Bits per byte": lambda arm: arm.bits,
        "SD over seeds": lambda arm: fmt.three_digits(getattr(arm.judged(result.metric), "sd", None)),
        "Seeds": _seeds,
        "Learning rate": lambda arm: ", ".join(map(fmt.learning_rate, arm.learning_rates)) or fmt.UNKNOWN,
    }
    caption = f"Final validation loss with its 95% interval over seeds; SD in {result.unit}."
    if result.metric == SECOND_HALF and any(arm.ema for arm in result.arms):
        caption += " Of averaged weights: of all that an arm predicts."
    return _arm_table(result, caption, columns)


def _seed_losses(result: Result) -> Table:
    against = {c.arm: c.against for arm in result.arms if (c := arm.comparison)}
    losses = final_losses({arm.name: arm.records for arm in result.arms}, result.metric)

    def cell(seed: int, arm: ArmResult) -> str:
        loss = losses[arm.name].get(seed)
        reference = losses[against[arm.name]].get(seed) if against.get(arm.name) in losses else None
        shown = fmt.number(loss, 4)
        return f"{shown}\n{fmt.signed(loss - reference)}" if fmt.known(loss) and fmt.known(reference) else shown

    caption = (
        f"Every seed: final validation loss, {result.unit}, and below it the difference to "
        f"{result.study.before}, or else to the baseline, at the same seed."
    )
    seeds = result.seeds
    return _arm_table(result, caption, {f"Seed {seed}": partial(cell, seed) for seed in seeds})


def _to_reach(result: Result) -> Table:
    baseline = next((arm.to_reach for arm in result.arms if arm.name == result.study.baseline), {})
    columns: Columns = {
        "Tokens": lambda arm: _reached(arm.to_reach, baseline, "tokens", fmt.number),
        "Tokens over the baseline's": lambda arm: _reach(arm.reach),
        "Training FLOPs": lambda arm: _reached(arm.to_reach, baseline, "flops", fmt.short),
        "Seconds": lambda arm: _reached(arm.to_reach, baseline, "seconds", fmt.number),
    }
    caption = (
        f"Cost of reaching the final loss of {result.study.baseline}, mean over seeds, and as a multiple of the "
        f"baseline's cost; {fmt.UNKNOWN} if not every seed reached it. Tokens over the baseline's: the geometric mean "
        "of the ratios at each seed with its 95% interval, and the ratios; > if a run ended before reaching it. "
        "Interpolated linearly between evaluations; with a decaying learning rate, a loss on the way is not what a "
        "shorter budget would give."
    )
    return _arm_table(result, caption, columns)


def _starts(result: Result) -> Table:
    """What the weights of `init_from` gave each arm, over the seeds that all have finished."""
    if not any(record.start for arm in result.arms for record in arm.records):
        return Table("", [], [])
    ends = common_losses(result.arms, result.metric)
    starts = pd.DataFrame({arm.name: first_losses(arm.records, result.metric) for arm in result.arms}, dtype=float)
    begin, end = (losses.reindex(ends.index).mean() for losses in (starts, ends))

    def share(arm: ArmResult) -> str:
        shares = [record.start.share for record in arm.records if record.start]
        return fmt.percent(min(shares)) if shares else fmt.UNKNOWN

    def recovered(losses: pd.Series, arm: ArmResult) -> str:
        """The share of the loss between fresh heads and all heads that the arm does not lose."""
        fresh = [one.name for one in result.arms if one.arm.axes == arm.arm.axes | {"init_kv_heads": "random"}]
        if not fresh or arm.name in fresh:
            return fmt.UNKNOWN
        worst, own, best = (losses.get(name, math.nan) for name in (*fresh, arm.name, result.study.baseline))
        return fmt.percent((worst - own) / (worst - best)) if worst > best else fmt.UNKNOWN

    columns: Columns = {
        "Parameters taken": share,
        "Loss at the start": lambda arm: fmt.number(begin.get(arm.name), 4),
        "Loss at the end": lambda arm: fmt.number(end.get(arm.name), 4),
        "Recovered at the start": partial(recovered, begin),
        "Recovered at the end": partial(recovered, end),
    }
    caption = (
        f"Weights from init_from. Losses: in validation, {result.unit}, before the first step and after "
        "the last, means over the seeds that all arms have finished. Recovered: of the loss between fresh key and "
        f"value heads and those of {result.study.baseline}, the share that an arm's way to start them makes up for."
    )
    return _arm_table(result, caption, columns)


def _costs(result: Result) -> Table:
    active: Columns = {"Active of them": lambda arm: fmt.number(arm.costs.get(ACTIVE))}
    has_experts = any(arm.costs.get(ACTIVE) != arm.costs.get("params_non_embedding") for arm in result.arms)
    columns: Columns = {
        "Parameters without embeddings": lambda arm: fmt.number(arm.costs.get("params_non_embedding")),
        **(active if has_experts else {}),
        "FLOPs per token, forward": lambda arm: fmt.short(arm.costs.get("flops_per_token")),
        "Tokens per second, training": lambda arm: _speed(result, arm, "train", "perf/tokens_per_second"),
        "Decoding": lambda arm: _speed(result, arm, "decode", "decode_tokens_per_second"),
        f"Decoding of {BATCH}": lambda arm: _speed(result, arm, "decode_batch", "decode_batch_tokens_per_second"),
        "Prefill": lambda arm: _speed(result, arm, "prefill", "prefill_tokens_per_second"),
        "MFU": lambda arm: fmt.percent(arm.costs.get("perf/mfu")),
        "Peak memory": _peak_memory,
        "KV cache, full context": _full_cache,
        "Matching residual": lambda arm: fmt.residual(arm.arm.residual),
    }
    residual = "Matching residual: how far the arm's size is from the one it was matched to. " * _is_matched(result)
    caption = residual + _speed_note(result)
    return _arm_table(result, caption, columns)


def _speed(result: Result, arm: ArmResult, kind: str, cost: str) -> str:
    """The geometric mean and range of the rounds if speeds were measured side by side, else what the runs logged."""
    found = result.speed.arms.get(arm.name) if result.speed else None
    rounds = getattr(found, kind, [])
    if not rounds:
        return fmt.number(arm.costs.get(cost))
    return _spread(Spread(arm.costs[cost], min(rounds), max(rounds)), fmt.number)


def _speed_note(result: Result) -> str:
    speed = result.speed
    if speed is None:
        return "Training speed: as logged by the runs, mean over seeds; it was not measured side by side."
    rounds = max(len(arm.train) for arm in speed.arms.values())
    hardware = f"{speed.devices} x {speed.device} in {speed.precision} with {speed.threads} CPU threads"
    return (
        f"Speeds: geometric mean, lowest and highest of {rounds} rounds after the runs, each of which measured every "
        f"arm, on {hardware}. Decoding and prefill: tokens per second of one sequence, or {BATCH}, on one device, at "
        "the end of the context with the KV cache, and reading all of it; not compiled."
    )


def _decoding(arms: Sequence[Inference]) -> Table:
    columns: Columns = {
        "Sequences": lambda speed: fmt.number(speed.batch_size),
        "Context": lambda speed: fmt.number(speed.context),
        "Seeds": lambda speed: fmt.number(speed.runs),
        "Tokens per second": lambda speed: _spread(speed.decode, fmt.three_digits),
        "Without KV cache": lambda speed: _spread(speed.uncached, fmt.three_digits),
        "Gain": lambda speed: _spread(speed.gain, lambda gain: f"{fmt.three_digits(gain)}{fmt.TIMES}"),
        "Prefill, ms": lambda speed: _spread(speed.prefill, lambda seconds: fmt.three_digits(1e3 * seconds)),
    }
    caption = (
        "Decoding at the end of the largest context that an arm was measured at, over all sequences of a batch, with "
        "and without the KV cache, and the ratio of the two. Prefill: reading prompts that fill the context. Means "
        "over seeds of the median round, and, below them, the lowest and the highest seed."
    )
    sizes = [(arm, size) for arm in arms for size in sorted({speed.batch_size for speed in arm.speeds})]
    found = [(arm.arm, speed) for arm, size in sizes if (speed := arm.speed(size))]
    return _table(caption, found, columns)


def _caches(arms: Sequence[Inference]) -> Table:
    columns: Columns = {
        "Elements": lambda cache: cache.dtype,
        "Context": lambda cache: fmt.number(cache.context),
        "Measured": lambda cache: _spread(cache.measured, fmt.in_bytes),
        "By the formula": lambda cache: _spread(cache.formula, fmt.in_bytes),
    }
    caption = (
        "KV cache, and recurrent states, of one sequence at the largest measured context: from its tensors, and from "
        "the cost model."
    )
    dtypes = [(arm, dtype) for arm in arms for dtype in dict.fromkeys(cache.dtype for cache in arm.caches)]
    found = [(arm.arm, cache) for arm, dtype in dtypes if (cache := arm.cache(dtype))]
    return _table(caption, found, columns, ["Elements"])


def effects_table(result: Result) -> Table:
    """The main effects and interactions of a factorial; empty for other designs."""
    columns: Columns = {
        "Change of loss": lambda effect: effect.change,
        "p": lambda effect: fmt.bare_p(effect.change.p),
        "Plain p": lambda effect: fmt.bare_p(effect.change.plain_p),
        "Verdict": lambda effect: effect.change.verdict,
        "Aliased with": lambda effect: ", ".join(map(term_name, effect.aliases)) or fmt.UNKNOWN,
    }
    known = [(effect.name, effect) for effect in result.effects if fmt.known(effect.change.mean)]
    caption = (
        f"In {result.unit}; negative is better. Intervals and p are simultaneous ({result.tests}). "
        "Plain p: of paired t-tests with Holm's correction. "
        "Aliased: effects that a fraction of the combinations cannot separate."
    )
    return _table(caption, known, columns, ("Verdict", "Aliased with"), head="Effect")


def _scaling(result: Result) -> Table:
    """A row per point, with the gain where the reference reached its loss."""
    if not result.scaling:
        return Table("", [], [])
    rows = []
    reference = result.scaling.options[0]
    for option in result.scaling.options:
        for point in option.points:
            cells = [point.size, f"{point.budget:g}", fmt.short(point.params), fmt.short(point.tokens)]
            cells += [fmt.short(point.flops), fmt.number(math.exp(point.log_loss), 4)]
            if gain := option.gains and option.gains.at(point.cell):
                cells += [gain.alone.text, gain.line.text, fmt.number(gain.line.mean * gain.speed, 2)]
            rows.append([option.option, *cells, *[fmt.UNKNOWN] * (9 - len(cells))])
    caption = f"Loss: mean over seeds, {result.unit}."
    head = ["Option", "Size", "Tokens per parameter", "Parameters", "Tokens", "Training FLOPs", "Loss"]
    if any(option.gains for option in result.scaling.options):
        head += ["Gain", "By the fit", "In time"]
        caption += (
            f" Gain: the training FLOPs that {reference.option} would need for the same loss at as many tokens per "
            "parameter, over those spent, where it reached such a loss: by the differences at this size and budget "
            "alone, by the laws of both, and so in time, at measured speeds. Intervals are pointwise: each holds for "
            "one size and budget."
        )
    if result.scaling.loose:
        caption += f" Without gains: the law of {reference.option} is not identified ({result.scaling.loose})."
    return Table(caption, head, [row[: len(head)] for row in rows], frozenset({"Size"}))


def _laws(result: Result) -> Table:
    options = result.scaling.options if result.scaling else ()
    titles = {"\u03b1": "alpha", "\u03b2": "beta"} | {key: key for key in ("E", "A", "B")} | {"\u03b3": "gamma"}

    def coefficient(key: str, option: Scaled) -> str:
        if not option.law:
            return fmt.UNKNOWN
        found = option.law.estimate(key)
        if key in ("A", "B"):  # of any order of magnitude
            return f"{found.mean:.3g} [{found.low:.2g},\u00a0{found.high:.2g}]"
        return found.text

    columns: Columns = {title: partial(coefficient, key) for title, key in titles.items()}
    columns["Gain changes by, per tenfold compute"] = lambda option: (
        option.gains.growth.text if option.gains else fmt.UNKNOWN
    )
    caption = (
        "L = E + A / N^\u03b1 + B / D^\u03b2, of N parameters and D tokens. With compute C that is spent best, the "
        "loss above E falls as 1 / C^\u03b3. 95% intervals by bootstrap. The gain changes by a straight line through "
        "log gain over log compute; the report says where the gain does not follow it."
    )
    return _table(caption, [(option.option, option) for option in options if option.law], columns, head="Option")


def _interactions(result: Result) -> Table:
    digits = min((fmt.decimals(e.change.low, e.change.high) for e in result.effects), default=4)
    caption = (
        f"Mean loss, {result.unit}, over the seeds that all arms have finished, at each combination of "
        "the options of two axes, averaged over the others. Interaction: as above, of the changes from the first "
        "options."
    )
    columns: Columns = {
        "First": lambda cell: cell[0],
        "Second": lambda cell: cell[1],
        "Loss": lambda cell: fmt.number(cell[2], digits),
        "Interaction": lambda cell: cell[3],
        "Verdict": lambda cell: cell[3].verdict if cell[3] else fmt.UNKNOWN,
    }
    rows = [
        (term_name(found.axes), (first, second, mean, change))
        for found in result.interactions
        for first, means, changes in zip(found.levels[0], found.means, found.changes, strict=True)
        for second, mean, change in zip(found.levels[1], means, changes, strict=True)
    ]
    return _table(caption, rows, columns, ("First", "Second", "Verdict"), head="Axes")


def _learning_rates(result: Result) -> Table:
    caption = (
        "Sensitivity: how far the loss is above the best one, averaged over the grid, where a diverged run counts with "
        "the entropy of token frequencies; 0 is insensitive (Wortsman et al. 2023)."
    )
    if any(sweep.chosen for sweep in result.learning_rates):
        caption += " All of this is of the tuning runs: the judged ones have other seeds, and so other losses."
    if result.metric != "val/loss":
        caption += f" Losses: in {unit_of(result.arms, 'val/loss')}, of all that an arm predicts."
    rows = []
    for sweep in result.learning_rates:
        at_best = dict(zip(sweep.rates, sweep.loss, strict=True)).get(sweep.best)
        rates = ", ".join(map(fmt.learning_rate, sorted({*sweep.chosen.values()} or {sweep.best})))
        best = rates + ("\nedge of the grid" if sweep.at_edge else "")
        diverged = str(sum(sweep.diverged))
        rows.append(
            [sweep.arm, best, at_best.text if at_best else fmt.UNKNOWN, fmt.number(sweep.sensitivity, 4), diverged]
        )
    return Table(caption, ["Arm", "Best learning rate", "Lowest mean loss", "Sensitivity", "Diverged runs"], rows)


def _unfinished(result: Result) -> Table:
    columns: Columns = {
        "Seed": lambda run: str(run[1].seed),
        "Learning rate": lambda run: fmt.learning_rate(run[0].learning_rate),
        "Status": lambda run: run[1].status,
        "Tokens seen": lambda run: fmt.number(max((row["tokens"] for row in run[1].metrics), default=0)),
        "Why": lambda run: run[1].message,
    }
    unfinished = [(record.arm, (member, record)) for member, record in result.unfinished]
    return _table("Tokens seen: at the last logged step.", unfinished, columns, ("Status", "Why"))


def _lengths(result: Result) -> Table:
    caption = (
        f"Validation loss in {unit_of(result.arms, 'val/loss')}; {fmt.UNKNOWN} beyond the end of the position encoding."
    )
    lengths = sorted({length for arm in result.lengths for length in arm.loss})
    columns: Columns = {"Trained at": lambda arm: f"{arm.trained:,}"}
    for length in lengths:
        columns[f"{length:,} tokens"] = partial(lambda length, arm: arm.loss.get(length), length)
    return _table(caption, [(arm.arm, arm) for arm in result.lengths], columns)


def _telemetry(result: Result) -> Table:
    places = {f"{step} step, {layer.lower()} layer": (t, i) for t, step in ENDS for i, layer in ENDS}
    rows = [
        [arm.arm, ", ".join(names(quantity)), *(fmt.three_digits(values[t][i]) for t, i in places.values())]
        for arm in result.telemetry
        for quantity, values in arm.values.items()
    ]
    caption = "Means over seeds; gradients before clipping, updates of the optimizer step after it."
    return Table(caption, ["Arm", "Quantity", *places], rows, frozenset({"Quantity"}))


def _modules(result: Result) -> Table:
    """What modules have added to training, see `add_term` and `add_metric`."""
    rows = {arm.name: [_last_logged(record) for record in finished(arm.records)] for arm in result.arms}
    means = {arm: pd.DataFrame(own).filter(regex="^train/(?!loss$)").mean() for arm, own in rows.items()}

    def cell(name: str, arm: ArmResult) -> str:
        return fmt.three_digits(means[arm.name].get(name))

    logged = sorted({name for own in means.values() for name in own.index})
    columns: Columns = {name: partial(cell, name) for name in logged}
    return _arm_table(result, "Means over layers at the last logged step, and over seeds.", columns)


def _last_logged(record: Record) -> dict[str, float]:
    return next((row for row in reversed(record.metrics) if "train/loss" in row), {})


def _environment(result: Result) -> Table:
    rows = [
        [fact, "\n".join(f"{value} ({fmt.count(n, 'run')})" for value, n in values.items())]
        for fact, values in result.environment.items()
    ]
    return Table("Hardware, software and data of the runs", ["Fact", "Value"], rows, frozenset({"Value"}))


def _settings(result: Result) -> Table:
    head = ["Arm", "Compared with", "Setting", "Reference", "This arm"]
    rows = [
        [arm.name, arm.arm.previous or result.study.baseline, key, to_override(theirs), to_override(own)]
        for arm in result.arms
        for key, (theirs, own) in arm.difference.items()
    ]
    return Table("Settings in which an arm differs from the arm it is compared with", head, rows, frozenset(head))


def _table(
    caption: str, named: Iterable[tuple[str, Any]], columns: Columns, words: Collection[str] = (), head: str = "Arm"
) -> Table:
    """A row per item with its name, without the columns of unknown values; the estimates of a column share decimals.

    columns: what they show of an item. words: those that hold text. head: the title of the names.
    """
    named = list(named)
    cells = {head: [name for name, _ in named]}
    cells |= {title: _shown([show(item) for _, item in named]) for title, show in columns.items()}
    known = {title: column for title, column in cells.items() if any(cell != fmt.UNKNOWN for cell in column)}
    return Table(caption, [*known], [list(row) for row in zip(*known.values(), strict=True)], frozenset(words))


def _arm_table(result: Result, caption: str, columns: Columns, *words: str) -> Table:
    """A row per arm. words: columns that hold text."""
    return _table(caption, [(arm.name, arm) for arm in result.arms], columns, words)


def plus_minus(found: Sequence[Estimate | None], unknown: str = fmt.UNKNOWN) -> list[str]:
    """A column of means with half their intervals."""
    digits = fmt.shared_decimals((one.low, one.high) for one in found if one)
    return [fmt.plus_minus(one.mean, one.low, one.high, one.is_difference, digits) if one else unknown for one in found]


def _shown(cells: Sequence[str | Estimate | None]) -> list[str]:
    digits = fmt.shared_decimals((one.low, one.high) for one in cells if isinstance(one, Estimate))
    return [one.shown(digits) if isinstance(one, Estimate) else one or fmt.UNKNOWN for one in cells]


def _spread(spread: Spread | None, show: Callable[[float], str]) -> str:
    """A mean and, below it, the lowest and the highest value if they are shown differently."""
    if not spread or not fmt.known(spread.mean):
        return fmt.UNKNOWN
    low, high = show(spread.low), show(spread.high)
    # No line may break inside a range.
    return show(spread.mean) if low == high else f"{show(spread.mean)}\n{low}\u00a0to\u00a0{high}"


def _seeds(arm: ArmResult) -> str:
    finished = sum(record.done for record in arm.records)
    return f"{finished}" if finished == len(arm.records) else f"{finished} of {len(arm.records)}"


def _reach(reach: Reach | None) -> str:
    """The mean ratio, or how many seeds are censored, and below it the ratio of each seed."""
    if not reach:
        return fmt.UNKNOWN
    found = reach.ratio
    whole = found.text if found else f"not reached in {len(reach.censored)} of {fmt.count(len(reach.ratios), 'seed')}"
    each = (f"{'>' if seed in reach.censored else ''}{ratio:.2f}{fmt.TIMES}" for seed, ratio in reach.ratios.items())
    return f"{whole}\n{', '.join(each)}"


def _reached(own: dict[str, float], baseline: dict[str, float], key: str, show: Callable[[float], str]) -> str:
    """A cost and, below it, the multiple of the baseline's cost."""
    value, reference = own.get(key), baseline.get(key)
    if not fmt.known(value):
        return fmt.UNKNOWN
    if not fmt.known(reference) or reference <= 0:
        return show(value)
    return f"{show(value)}\n{value / reference:.2f}{fmt.TIMES}"


def _peak_memory(arm: ArmResult) -> str:
    """Of a GPU: that of a CPU's process holds much else."""
    on_cpu = any(record.environment.device == "cpu" for record in arm.records)
    return fmt.UNKNOWN if on_cpu else fmt.in_bytes(arm.costs.get("perf/peak_memory_bytes"))


def _full_cache(arm: ArmResult) -> str:
    shown = fmt.in_bytes(arm.costs.get("kv_cache/bytes"))
    context = arm.costs.get("seq_len")
    return f"{shown}\n{fmt.number(context)} tokens" if fmt.known(context) and shown != fmt.UNKNOWN else shown
