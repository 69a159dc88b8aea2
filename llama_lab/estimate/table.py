"""An estimate as tables for a terminal of 80 columns."""

from dataclasses import fields

from rich import box
from rich.console import Console
from rich.table import Table

from llama_lab.devices.hardware import asked_counts
from llama_lab.model.cost import cost_metrics
from llama_lab.runs.result_table import state_rows
from llama_lab.util.display import fact_table, plain_table
from llama_lab.util.formatting import duration, scale, three_digits

from .estimate import USABLE, Column, Estimate, Memory

ROWS = {
    "weights": "weights",
    "ema": "  and their average",
    "gradients": "gradients",
    "buckets": "  and DDP's buckets of them",
    "optimizer": "optimizer",
    "working": "bf16 copies; gathered blocks",
    "activations": "activations",
}


def print_estimate(estimate: Estimate) -> None:
    """Print the tables, what would fit, and the assumptions."""
    console, peak, parts = Console(highlight=False), estimate.device.peak / 1e12, estimate.cfg.train.recompute
    console.print(facts_table(estimate))
    console.print(memory_table(estimate))
    again = f"train.recompute={parts}" if estimate.recomputed_per_token else "without recomputation"
    assumed = (
        f"Assumed: {estimate.vocab_size:,} ids ({estimate.vocabulary}); trainer.precision={estimate.precision}; "
        f"estimate_mfu={estimate.mfu:g} of {three_digits(peak)} TFLOP/s; GB are 1e9 bytes; eager, {again}."
    )
    left_out = "Not counted: CUDA context, NCCL, fragmentation (the room left); evaluation, checkpoints, stops."
    for line in (*verdicts(estimate), assumed, left_out):
        console.print(line, markup=False)


def facts_table(estimate: Estimate) -> Table:
    """The run and its total cost."""
    setup, cost = estimate.setup, estimate.cost
    again = estimate.tokens * estimate.recomputed_per_token
    facts = [
        ("parameters", f"{cost.params:,}"),
        ("  without embeddings", f"{cost.params_non_embedding:,}"),
        *([("  active per token", f"{cost.params_active:,}")] if cost.params_active < cost.params else []),
        ("tokens", f"{estimate.tokens:,}"),
        ("batch", f"{setup.batch_size:,} sequences of {setup.seq_len:,} tokens"),
        ("training FLOPs per token", f"{cost.train_flops_per_token:.3g}"),
        ("training FLOPs", f"{estimate.tokens * cost.train_flops_per_token:.3g}"),
        *([("  recomputed, beside them", f"{again:.3g}")] if again else []),
        ("devices", f"{setup.devices:,} x {estimate.device_name}"),
        (f"time at {estimate.reached_mfu:.0%} MFU", duration(estimate.seconds)),
        ("tokens/s per device", f"{estimate.tokens_per_second:,.0f}"),
        *state_rows(cost_metrics(cost), setup.seq_len),
    ]
    return fact_table(facts, frame=box.SIMPLE)


def memory_table(estimate: Estimate) -> Table:
    """The memory of one device by part, for each setup."""
    title = f"memory per device, {estimate.setup.micro_batch:,} x {estimate.setup.seq_len:,} tokens at once"
    table = plain_table(title, [""], [column.setup.layout for column in estimate.columns])
    for field in fields(Memory):
        parts = [getattr(column.memory, field.name) for column in estimate.columns]
        if any(parts):
            table.add_row(ROWS[field.name], *map(gigabytes, parts))
    table.add_section()
    table.add_row("all", *(gigabytes(column.memory.total) for column in estimate.columns))
    room = f"of {gigabytes(estimate.usable)}, {USABLE:.0%} of one {estimate.device_name}"
    table.add_row(room, *("fits" if column.fits else "does not fit" for column in estimate.columns))
    return table


def verdicts(estimate: Estimate) -> list[str]:
    """A line for everything that does not fit, with the nearest setting that does."""
    lines = []
    asked = estimate.cfg.train.batch_size
    if estimate.setup.batch_size != asked:
        lines.append(
            f"train.batch_size={asked} cannot be shared by {estimate.setup.devices:,} devices; "
            f"estimated with the nearest that can, train.batch_size={estimate.setup.batch_size}"
        )
    for column in (column for column in estimate.columns if not column.fits):
        lines.append(verdict(estimate, column))
        if column.recomputing is not None:
            fits = "fits" if column.recomputing <= estimate.usable else "does not fit either"
            lines.append(
                f"{column.setup.layout} with train.recompute=block takes {gigabytes(column.recomputing)}, which {fits}"
            )
    return lines


def verdict(estimate: Estimate, column: Column) -> str:
    """What would fit instead of a column that does not."""
    asked = column.setup
    if column.nearest is None:
        return (
            f"{asked.layout} does not fit, and nothing does on any number of them, at any micro-batch or context: "
            f"choose a device of more memory"
        )
    near, (per_node, _) = column.nearest, asked_counts(estimate.cfg.trainer, "an estimate")
    one_node = asked.devices == per_node
    world = f"trainer.devices={near.devices}" if one_node else f"trainer.num_nodes={near.devices // per_node}"
    typed = {
        "sharded": near.layout,
        "devices": world,
        "batch_size": f"train.batch_size={near.batch_size}",
        "micro_batch": f"train.micro_batch_size={near.micro_batch}",
        "seq_len": f"model.max_seq_len={near.seq_len}",
    }
    settings = " ".join(text for name, text in typed.items() if getattr(near, name) != getattr(asked, name))
    return f"{asked.layout} does not fit; the nearest that does: {settings}"


def gigabytes(count: float) -> str:
    """Bytes with a decimal prefix: 12.3 GB."""
    scaled, prefix = scale(count, {"G": 1e9, "M": 1e6, "k": 1e3})
    return f"{scaled:,.{1 if prefix else 0}f} {prefix}B" if count else "-"
