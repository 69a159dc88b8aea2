"""What an evaluation found, as tables for a terminal of 80 columns."""

from pathlib import Path
from statistics import median

from rich import box
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from llama_lab.display import VISIBLE
from llama_lab.formatting import in_bytes
from llama_lab.runs.evaluation import Evaluation, LengthLoss

QUARTER = 4


def print_evaluation(found: Evaluation, path: Path) -> None:
    """Print every part that was evaluated."""
    console = Console(highlight=False)
    console.print(Text(f"{path}, after {found.step:,} steps, on {found.device} in {found.precision}"))
    for table in (losses(found), lengths(found), caches(found), speeds(found)):
        if table.rows:
            console.print(table)
    if found.sample:
        console.print(Panel(Text(found.sample.translate(VISIBLE)), title="sample", title_align="left"))
    console.print(Text(f"everything is in {path / found.FILE} and eval.png"), soft_wrap=True)


def new_table(title: str, *columns: str) -> Table:
    """A table of numbers."""
    table = Table(
        title=title,
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        show_header=bool(columns),
    )
    for column in columns:
        table.add_column(column, justify="right")
    return table


def losses(found: Evaluation) -> Table:
    """The validation loss, as nats, perplexity and bits."""
    table = new_table("Validation")
    metrics = found.metrics
    if "val/loss" not in metrics:
        return table
    table.add_row("loss", f"{metrics['val/loss']:.4f} nats/token")
    table.add_row("perplexity", f"{metrics['val/perplexity']:,.2f}" if "val/perplexity" in metrics else "-")
    table.add_row("bits per byte", f"{metrics['val/bits_per_byte']:.4f}")
    table.add_row("tokens", f"{metrics['val_tokens']:,}")
    return table


def lengths(found: Evaluation) -> Table:
    """The loss at each context length, and at its first and last positions."""
    table = new_table(
        "Loss by context length, nats/token", "tokens", "trained", "loss", "first quarter", "last quarter"
    )
    missing: dict[str, list[str]] = {}
    for entry in found.lengths:
        times = f"{entry.length / found.lengths[0].length:.4g}x"
        if entry.loss is None:
            table.add_row(f"{entry.length:,}", times, "-", "-", "-")
            missing.setdefault(entry.note.removeprefix("cannot: "), []).append(f"{entry.length:,}")
            continue
        quarters = [f"{quarter_mean(entry, quarter):.4f}" for quarter in (0, QUARTER - 1)]
        table.add_row(f"{entry.length:,}", times, f"{entry.loss:.4f}", *quarters)
    table.caption = "\n".join(f"cannot at {', '.join(lengths)}: {why}" for why, lengths in missing.items()) or None
    return table


def quarter_mean(entry: LengthLoss, quarter: int) -> float:
    """The mean loss over a quarter of the positions."""
    low, high = (entry.length * q / QUARTER for q in (quarter, quarter + 1))
    buckets = zip(entry.positions, entry.losses, entry.tokens, strict=True)
    inside = [(loss, tokens) for position, loss, tokens in buckets if low <= position < high]
    weight = sum(tokens for _, tokens in inside)
    return sum(loss * tokens for loss, tokens in inside) / weight if weight else float("nan")


def caches(found: Evaluation) -> Table:
    """Bytes of one sequence's KV cache, and what its rounding costs."""
    table = new_table("KV cache of one sequence", "dtype", "tokens", "by formula", "measured", "loss through it")
    through = {one.dtype: "no number" if one.loss is None else f"{one.loss:.6f}" for one in found.cache_losses}
    smallest = min((size.batch_size for size in found.cache), default=0)
    for size in found.cache:
        if size.batch_size != smallest:
            continue
        equal = "equal" if size.measured_bytes == size.formula_bytes else in_bytes(size.measured_bytes / smallest)
        loss = through.pop(size.dtype, "")  # told once
        table.add_row(size.dtype, f"{size.context:,}", in_bytes(size.formula_bytes / smallest), equal, loss)
    return table


def speeds(found: Evaluation) -> Table:
    """The speed of generation: medians, and the range of decoding's rounds."""
    columns = ("batch", "tokens", "prompt read", "tokens/s", "range", "no cache", "gain")
    table = new_table("Generation; decoding in tokens/s, all sequences together", *columns)
    for speed in found.speed:
        batch = speed.batch_size
        decode, uncached = median(speed.decode), median(speed.uncached)
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
