"""Print the results of an evaluation as tables, 80 columns wide."""

import math
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table
from rich.text import Text

from llama_lab.runs.evaluation import CacheSize, Evaluation, LengthLoss
from llama_lab.util.display import plain_table, print_sample
from llama_lab.util.formatting import in_bytes

QUARTER = 4


def print_evaluation(found: Evaluation, path: Path) -> None:
    """Print every part that was evaluated."""
    console = Console(highlight=False)
    trained = "" if found.step is None else f"after {found.step:,} steps, "
    console.print(Text(f"{path}, {trained}on {found.device} in {found.precision}"))
    for table in (losses(found), lengths(found), tasks(found), caches(found), speeds(found)):
        if table.rows:
            console.print(table)
    print_sample(console, found.sample)
    console.print(Text(f"everything is in {path / found.FILE} and {Path(found.FILE).stem}.png"), soft_wrap=True)


def losses(found: Evaluation) -> Table:
    """The validation loss, as nats, perplexity and bits."""
    table, metrics = plain_table("Validation"), found.metrics
    if "val/loss" in metrics:
        table.add_row("loss", f"{metrics['val/loss']:.4f} nats/{predicted(found)}")
        table.add_row("perplexity", f"{metrics['val/perplexity']:,.2f}" if "val/perplexity" in metrics else "-")
        if "val/bits_per_byte" in metrics:
            table.add_row("bits per byte", f"{metrics['val/bits_per_byte']:.4f}")
        if "val/accuracy" in metrics:
            table.add_row("accuracy", f"{metrics['val/accuracy']:.2%}")
        table.add_row(f"{predicted(found)}s", f"{metrics['val_tokens']:,}")
    return table


def predicted(found: Evaluation) -> str:
    """What a loss is the mean over: tokens, or the answers of a probe."""
    return found.unit or "token"


def lengths(found: Evaluation) -> Table:
    """The loss at each context length, and at its first and last positions."""
    with_accuracy = any(entry.accuracy is not None for entry in found.lengths)
    columns = ("tokens", "trained", "loss", "first quarter", "last quarter", *(("accuracy",) if with_accuracy else ()))
    table = plain_table(f"Loss by context length, nats/{predicted(found)}", right=columns)
    missing: dict[str, list[str]] = {}
    for entry in found.lengths:
        numbers = ["-"] * (len(columns) - 2)
        if entry.loss is None:
            missing.setdefault(entry.note.removeprefix("cannot: "), []).append(f"{entry.length:,}")
        else:
            means = (entry.loss, quarter_mean(entry, 0), quarter_mean(entry, QUARTER - 1))
            numbers = ["-" if math.isnan(x) else f"{x:.4f}" for x in means]
            numbers += [] if entry.accuracy is None else [f"{entry.accuracy:.2%}"]
        table.add_row(f"{entry.length:,}", f"{entry.length / found.lengths[0].length:.4g}x", *numbers)
    table.caption = "\n".join(f"cannot at {', '.join(lengths)}: {why}" for why, lengths in missing.items()) or None
    return table


def quarter_mean(entry: LengthLoss, quarter: int) -> float:
    """The mean loss over a quarter of the positions; NaN where nothing is predicted there."""
    low, high = (entry.length * q / QUARTER for q in (quarter, quarter + 1))
    buckets = zip(entry.positions, entry.losses, entry.tokens, strict=True)
    inside = [(loss, tokens) for position, loss, tokens in buckets if low <= position < high]
    weight = sum(tokens for _, tokens in inside)
    return sum(loss * tokens for loss, tokens in inside) / weight if weight else float("nan")


def tasks(found: Evaluation) -> Table:
    """The scores in the tasks of the lm-evaluation-harness."""
    harness = ", ".join(sorted({score.harness for score in found.tasks}))
    table = plain_table(f"Tasks, by lm-eval {harness}", ("task", "metric"), ("score", "±", "shots", "questions"))
    for score in found.tasks:
        shown = (f"{score.value:.4f}", "-" if score.stderr is None else f"{score.stderr:.4f}")
        asked = ("-" if n is None else f"{n:,}" for n in (score.fewshot, score.samples))
        table.add_row(score.task, score.metric, *shown, *asked)
    table.caption = "±: standard error"
    return table


def smallest_caches(found: Evaluation) -> list[CacheSize]:
    """The caches of the smallest batch: those of one sequence are as much smaller."""
    smallest = min((size.batch_size for size in found.cache), default=0)
    return [size for size in found.cache if size.batch_size == smallest]


def caches(found: Evaluation) -> Table:
    """Bytes of one sequence's KV cache, and what its rounding costs."""
    has_states, has_sources = (any(getattr(size, n) for size in found.cache) for n in ("state_bytes", "source_bytes"))
    parts = ["of state"] * has_states + ["of as long a source"] * has_sources
    columns = ("dtype", "tokens", *parts, "by formula", "measured", "loss through it")
    table = plain_table(f"KV cache{' and state' * has_states} of one sequence", right=columns)
    through = {one.dtype: "no number" if one.loss is None else f"{one.loss:.6f}" for one in found.cache_losses}
    for size in smallest_caches(found):
        each = (size.state_bytes, size.source_bytes, size.formula_bytes, size.measured_bytes)
        state, source, formula, measured = (in_bytes(n / size.batch_size) for n in each)
        equal = "equal" if size.measured_bytes == size.formula_bytes else measured
        cells = (*[state] * has_states, *[source] * has_sources, formula, equal)
        table.add_row(size.dtype, f"{size.context:,}", *cells, through.pop(size.dtype, ""))  # its loss once
    return table


def speeds(found: Evaluation) -> Table:
    """The speed of generation: medians, and the range of decoding's rounds."""
    columns = ("batch", "tokens", "prompt read", "tokens/s", "range", "no cache", "gain")
    table = plain_table("Generation; decoding in tokens/s, all sequences together", right=columns)
    for speed in found.speed:
        batch, decode, uncached = speed.batch_size, median(speed.decode), median(speed.uncached)
        table.add_row(
            str(batch),
            f"{speed.context:,}",
            f"{1000 * median(speed.prefill):,.1f} ms",
            f"{batch / decode:,.0f}",
            f"{batch / max(speed.decode):,.0f}-{batch / min(speed.decode):,.0f}",
            f"{batch / uncached:,.0f}",
            f"{uncached / decode:.1f}x",
        )
    return table
