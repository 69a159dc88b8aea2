"""The result of a study as a table: every number in summary.csv, the most important ones on the terminal."""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from rich import box
from rich.console import Console
from rich.table import Table

from llama_lab.analysis.result import BITS, ArmResult, Comparison, Inference, Loss, Ranking, Result
from llama_lab.analysis.scaling_gains import gain_of
from llama_lab.analysis.settings import MIXER_WIDTH, RATE, WIDTH
from llama_lab.analysis.statistics import Estimate
from llama_lab.runs.stored import FIXED_COSTS, MEASURED_COSTS, STATE
from llama_lab.runs.study import SUMMARY, StudySpeed
from llama_lab.util.display import plain_table
from llama_lab.util.formatting import break_name, cache_and_state, short, three_digits

from .guide import grid, guide
from .tables import conditions, effects_table, plus_minus

MANY = 20  # arms
SCREENS = 44  # lines on the terminal of more arms: two screens of 24, with what is said before and after
REACHED = ("tokens", "flops", "seconds")
ESTIMATE = ("mean", "sd", "low", "high")
INTERVAL = ("mean", "low", "high")
FORMULA = re.compile(r"[=@\t\r]|[+-](?!([\w.,=%\]]|[\[\s][+-]?)*$)")  # how one begins; names and intervals are none


def summary_rows(result: Result) -> list[dict[str, Any]]:
    """One row per arm, all with the same keys; None for an unknown value. Losses in nats per token, bits per byte."""
    axes = result.study.axes
    inference = {found.arm: found for found in result.inference}
    rows = [
        _row(arm, axes, result.seeds, result.nats)
        | (_rank_columns(result.ranks.get(arm.name)) if result.pairs else {})
        | _ranking_columns(result.rankings, arm.name)
        | _inference_columns(inference.get(arm.name))
        | _speed_columns(result.speed, arm.name)
        | (_columns("gain", gain_of(result.scaling, arm.arm), *INTERVAL) if result.scaling else {})
        for arm in result.arms
    ]
    return [{key: None if value != value else value for key, value in row.items()} for row in rows]  # nan != nan


def write_summary_csv(result: Result, path: Path) -> None:
    """Write the rows with every digit, so that two reports can be compared exactly; unknown values are empty."""
    write_csv(summary_rows(result), path)


def write_csv(rows: Iterable[Mapping[str, Any]], path: Path) -> None:
    """Write rows with a column for each key that any of them has; None is empty.

    A spreadsheet would compute a text such as `=1+1`; it gets a quote in front.
    """
    safe = [{key: as_text(value) for key, value in row.items()} for row in rows]
    pd.DataFrame(safe, dtype=object).to_csv(path, index=False, lineterminator="\r\n")


def as_text(value: Any) -> Any:
    """A value that no spreadsheet takes for a formula; `+rmsnorm` and `-0.1 [-0.2, +0.1]` stay."""
    return f"'{value}" if isinstance(value, str) and FORMULA.match(value) else value


def print_table(result: Result) -> None:
    """Print the arms, the findings and the warnings in 80 columns; of many arms two screens, the page has the rest."""
    console = Console(highlight=False, markup=False, emoji=False)
    with console.capture() as captured:
        print_all(result, console)
    lines = captured.get().splitlines(keepends=True)
    most = SCREENS if len(result.arms) > MANY else len(lines)
    console.out("".join(lines[:most]), end="")
    if len(lines) > most:
        console.print(f"... and {len(lines) - most} more lines, as in the report and {SUMMARY}")


def print_all(result: Result, console: Console) -> None:
    """Print the verdict, what may overturn it, how it was made, and then every arm and finding."""
    console.print(result.study.heading, style="bold")
    console.print(f"\n{result.verdict}")
    _print_list("Not controlled", result.warnings, console)
    console.print(f"\n{conditions(result)}")
    if (effects := effects_table(result)).rows:
        found = plain_table("", effects.head[:1], effects.head[1:])
        for row in effects.rows:
            found.add_row(*row)
        console.print(found)
    reference = result.study.before.split(maxsplit=1)[1] if any(arm.to_previous for arm in result.arms) else "baseline"
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("arm", overflow="fold")
    loss_unit = "bits/byte" if result.metric == BITS else "val loss"
    for title in (loss_unit, f"to {reference}"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("verdict", width=11)  # "not significant" in two lines
    speeds = [arm.costs.get("perf/tokens_per_second") for arm in result.arms]
    measured = ["tokens/s"] if any(speeds) else []
    for title in ("params", "KV B/\ntoken" + "\n+ state" * result.has_states, *measured):
        table.add_column(title, justify="right", no_wrap=True)
    room = max(10, console.width - 60 - 10 * len(measured) - 6 * result.has_states)  # by usual widths of the others
    losses = plus_minus([arm.judged(result.metric) for arm in result.arms])
    changes = plus_minus([arm.comparison.change if arm.comparison else None for arm in result.arms], "")
    for arm, loss, change, speed in zip(result.arms, losses, changes, speeds, strict=True):
        table.add_row(
            "\n".join(break_name(arm.name, room)),
            loss,
            change,
            arm.verdict,
            short(arm.costs.get("params")),
            cache_and_state(arm.costs.get("kv_cache/bytes_per_token"), arm.costs.get(STATE)),
            *[three_digits(speed)] * len(measured),
        )
    console.print(table)
    console.print(f"{result.unit}, ± half the 95% interval; lower and higher: significant at 5% (adjusted)\n")
    for sentence in result.answer:
        if sentence != result.verdict:
            console.print(sentence)
    if result.rankings:
        console.print("", grid(result))
    _print_list("Which to choose", guide(result), console)
    _print_list("Notes", result.notes, console)


def _print_list(title: str, sentences: Sequence[str], console: Console) -> None:
    if sentences:
        console.print(f"\n{title}:")
    for sentence in sentences:
        console.print(f"- {sentence}")


def _row(arm: ArmResult, axes: Sequence[str], seeds: Sequence[int], nats: Loss) -> dict[str, Any]:
    loss, losses = nats.replace("/", "_"), {record.seed: record.summary[nats] for record in arm.records if record.done}
    rates = {record.seed: record.config.get(RATE) for record in arm.records}
    return {
        "arm": arm.name,
        **{f"axis:{axis}": arm.arm.axes.get(axis) for axis in axes},
        "seeds": sum(record.done for record in arm.records),
        "diverged": sum(record.status == "diverged" for record in arm.records),
        "learning_rate": arm.learning_rates[0] if len(arm.learning_rates) == 1 else None,
        **_columns(loss, arm.loss, *ESTIMATE),
        **_columns("val_bits_per_byte", arm.bits, *ESTIMATE),
        **_columns("val_accuracy", arm.accuracy, *ESTIMATE),
        **_columns("val_ema_loss", arm.ema, *ESTIMATE),
        "entropy_floor": arm.entropy_floor,
        **_comparison_columns("previous", arm.to_previous),
        **_comparison_columns("baseline", arm.to_baseline),
        **{f"{name}_to_reach_baseline": arm.to_reach.get(name) for name in REACHED},
        **{name: arm.costs.get(name) for name in (*FIXED_COSTS, *MEASURED_COSTS)},
        "residual": arm.arm.residual,
        **{f"{loss}:seed={seed}": losses.get(seed) for seed in seeds},
        **{f"learning_rate:seed={seed}": rates.get(seed) for seed in seeds},
        "width": next((r.config.get(WIDTH) or r.config.get(MIXER_WIDTH) for r in arm.records if r.config), None),
    }


def _columns(name: str, found: Estimate | None, *parts: str) -> dict[str, Any]:
    return {f"{name}_{part}": getattr(found, part, None) for part in parts}


def _comparison_columns(name: str, c: Comparison | None) -> dict[str, Any]:
    against, nats, bits, needed = (c.against, c.nats, c.bits, c.seeds_needed) if c else (None,) * 4
    fewest, most = needed or (None, None)
    return {
        f"{name}_arm": against,
        **_columns(f"to_{name}_nats", nats, "n", *ESTIMATE, "p", "plain_p"),
        **_columns(f"to_{name}_bits", bits, "n", *ESTIMATE, "p", "plain_p"),
        f"to_{name}_seeds_needed_from": fewest,
        f"to_{name}_seeds_needed_to": most,
        **_columns(f"to_{name}_over_documents", c.over_documents if c else None, "n", "low", "high"),
    }


def _rank_columns(ranks: tuple[int, int] | None) -> dict[str, int | None]:
    best, worst = ranks or (None, None)
    return {"rank_from": best, "rank_to": worst}


def _ranking_columns(rankings: Sequence[Ranking], arm: str) -> dict[str, float | None]:
    """The value and the rank by everything but the loss, which has its columns, with their intervals."""
    columns: dict[str, float | None] = {}
    for ranking in (one for one in rankings if one.quantity != "loss"):
        standing = ranking.standing(arm)
        own = _columns("value", standing.value, *INTERVAL) | _rank_columns(standing.ranks)
        columns |= {f"{ranking.quantity}:{name}": value for name, value in own.items()}
    return columns


def _inference_columns(inference: Inference | None) -> dict[str, float | None]:
    """For one sequence at the largest context; the cache has the first element type that was measured."""
    speed = inference.speed(1) if inference else None
    cache = inference.cache(inference.caches[0].dtype) if inference and inference.caches else None
    columns = {
        "decode_tokens_per_second": speed.decode if speed else None,
        "decode_tokens_per_second_uncached": speed.uncached if speed else None,
        "prefill_seconds": speed.prefill if speed else None,
        "kv_cache_measured_bytes": cache.measured if cache else None,
    }
    return {name: spread.mean if spread else None for name, spread in columns.items()}


def _speed_columns(speed: StudySpeed | None, arm: str) -> dict[str, float | None]:
    """From the speeds that were measured side by side: the range of the training rounds, and the decoding speed."""
    found = speed.arms.get(arm) if speed else None
    low, high = (min(found.train), max(found.train)) if found else (None, None)
    columns = {"perf/tokens_per_second_low": low, "perf/tokens_per_second_high": high}
    generation = [f"{kind}_tokens_per_second" for kind in ("decode", "decode_batch", "prefill")]
    return columns | {name: found.costs[name] for name in generation if found and name in found.costs}
