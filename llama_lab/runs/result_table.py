"""The table that a finished run ends with."""

from collections.abc import Mapping

from rich.console import Console
from rich.text import Text

from llama_lab.util.display import fact_table, print_sample
from llama_lab.util.formatting import duration, in_bytes

from .folder import SAMPLE, RunFolder
from .stored import SOURCE, STATE, Summary


def print_result(folder: RunFolder) -> None:
    """Print the result of a finished run: its name, a table, a sample of its text, and its folder."""
    console = Console(highlight=False)
    summary = Summary.load(folder.path)
    console.print(Text(f"{summary.label}/seed={summary.seed}", style="bold"))
    console.print(fact_table(summary_rows(summary)))
    print_sample(console, (folder.path / SAMPLE).read_text(encoding="utf-8"))
    console.print(Text(f"everything is in {folder.path}"), soft_wrap=True)


def summary_rows(summary: Summary) -> list[tuple[str, str]]:
    """The rows of the table, (label, value)."""
    metrics = summary.metrics
    active, speed = metrics["params_active"], metrics.get("perf/tokens_per_second")
    compiling, bits = metrics.get("perf/compile_seconds"), metrics.get("val/bits_per_byte")
    floor, accuracy, ema = summary.entropy_floor, metrics.get("val/accuracy"), metrics.get("val/ema_loss")
    unit = "nats/token" if floor is None else "nats/answer"
    return [
        ("parameters", f"{metrics['params']:,}"),
        ("  without embeddings", f"{metrics['params_non_embedding']:,}"),
        *([("  active per token", f"{active:,}")] if active < metrics["params"] else []),
        ("tokens seen", f"{metrics['tokens']:,.0f}"),
        ("val loss", f"{metrics['val/loss']:.4f} {unit}"),
        *([("  of the averaged weights", f"{ema:.4f} {unit}")] if ema is not None else []),
        ("  of unigram frequencies", f"{summary.unigram_entropy:.4f} {unit}"),
        *([("  of the best predictor", f"{floor:.4f} {unit}")] if floor is not None else []),
        *([("val accuracy", f"{accuracy:.2%}")] if accuracy is not None else []),
        *([("val bits per byte", f"{bits:.4f}")] if bits is not None else []),
        *([("training speed", f"{speed:,.0f} tokens/s")] if speed is not None else []),
        *([("  after compiling for", duration(compiling))] if compiling is not None else []),
        *([("model FLOPs utilisation", f"{metrics['perf/mfu']:.1%}")] if "perf/mfu" in metrics else []),
        ("peak memory", in_bytes(metrics["perf/peak_memory_bytes"])),
        *state_rows(metrics, metrics["seq_len"]),
    ]


def state_rows(metrics: Mapping[str, float], seq_len: float) -> list[tuple[str, str]]:
    """Rows on the decoding state; empty for a model without one."""
    if "kv_cache/bytes" not in metrics:
        return []
    state, source = metrics.get(STATE, 0), metrics.get(SOURCE, 0)
    whole, of = "KV cache and state" if state else "KV cache", "of a target" if source else f"at {seq_len:,} tokens"
    return [
        ("KV cache per token, 16-bit", in_bytes(metrics["kv_cache/bytes_per_token"])),
        *([("state per sequence", in_bytes(state))] if state else []),
        (f"{whole} {of}", in_bytes(metrics["kv_cache/bytes"])),
        *([("  and of its source", in_bytes(source))] if source else []),
    ]
