"""Dry run: a table of the arms with width, parameters, FLOPs, KV-cache bytes, time."""

import time

import torch
import torch.nn.functional as F
from rich import box
from rich.console import Console
from rich.table import Table

from llama_lab.config.components import build_model
from llama_lab.devices.performance import synchronize
from llama_lab.training.assemble import build_module
from llama_lab.util.display import break_name
from llama_lab.util.formatting import count, duration, number, short

from .matching import AIM
from .plan import Plan

TIMED_STEPS = 3
LARGEST_TIMED = 300e6  # parameters; a larger model may not fit into memory


def print_plan(plan: Plan, timed: bool) -> None:
    """Print the arms with their costs, the residuals of matching and, if `timed`, times."""
    console = Console(highlight=False)
    elsewhere = plan.runs[0].run.hardware.elsewhere
    speed = flops_per_second(plan) if timed and not elsewhere else None
    if timed and elsewhere:
        console.print("no times: the runs are for another machine")
    elif timed and speed is None:
        console.print(f"no times: {plan.study.baseline} has more than {LARGEST_TIMED / 1e6:.0f} M parameters to try")
    total_to_tune = plan.expected_runs - len(plan.runs)
    tuning = f", {count(total_to_tune, 'run')} to tune them" if total_to_tune else ""
    tuning += " and more where the best rate is an end of the grid" if tuning and plan.command.extend_rates else ""
    title = f"{plan.study.name}: {len(plan.arms)} arms, {len(plan.runs)} runs{tuning}"
    console.print(title, style="italic", markup=False, soft_wrap=True)  # a table's own title wraps at its width
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("arm", overflow="fold")
    columns = ("width", "params", "without\nembed.", "residual", "FLOPs\n/token", "KV B\n/token", "time")
    for column in columns if speed else columns[:-1]:
        table.add_column(column, justify="right")
    total = 0.0
    for arm in plan.arms:
        cost, off = arm.cost, arm.arm.residual
        sizes = short(cost.params), short(cost.params_non_embedding), "-" if off is None else f"{off:+.2%}"
        state = number(cost.kv_bytes_per_token)
        cells = [break_name(arm.arm.name, 16), str(arm.width), *sizes, short(cost.flops_per_token), state]
        if speed:  # of the arm's runs, one after the other
            seconds = (len(arm.runs) + arm.expected_tuning) * arm.draft.flops(cost) / speed
            total += seconds
            cells.append(duration(seconds))
        table.add_row(*cells)
    console.print(table)
    matched = {
        "params": "widths match parameters without embeddings",
        "flops": "widths match FLOPs per token",
        "none": "textbook widths, nothing is matched (match=none)",
    }[plan.study.match]
    lines = [f"{matched}; KV bytes are for 16 bits; FLOPs are those of a forward pass"]
    if speed:
        lines.append(
            f"about {duration(total)} of training, one run after the other, without evaluation: from {TIMED_STEPS} "
            f"timed steps of {plan.study.baseline} here ({speed / 1e9:,.1f} GFLOP/s)"
        )
    lines += [*power(plan), *plan.study.notes]
    if far := [arm for arm in plan.study.arms if abs(arm.residual or 0) > AIM]:
        named = ", ".join(f"{arm.name} {arm.residual:+.2%}" for arm in far)
        lines.append(f"Widths are whole numbers, so {plan.study.match} are not equal to {AIM:.1%}: {named}.")
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)


def power(plan: Plan) -> list[str]:
    """The smallest difference that the study can detect; not for a factorial, which averages over arms."""
    seeds = len({run.member.seed for run in plan.runs})
    if seeds == 1:
        return ["one seed: nothing will be tested; study.seeds=[1,2,3] or more are"]
    if plan.study.is_factorial or len(plan.arms) == 1:
        return []
    from llama_lab.analysis.statistics import smallest_difference  # SciPy takes a second

    comparisons = len(plan.study.family) + len(plan.study.ends)
    smallest = smallest_difference(len(plan.arms), seeds, comparisons)
    unit = "token" if plan.dataset.entropy_floor is None else "answer"
    return [
        f"{seeds} seeds would find a difference of {smallest:.1f} standard deviations between seeds (80% "
        f"power): {0.005 * smallest:.3f} nats per {unit} if runs of an arm differ by 0.005 beyond what their seeds "
        f"share"
    ]


def flops_per_second(plan: Plan) -> float | None:
    """FLOP/s of training the baseline on this device, from a few steps; None if the model is too large to try."""
    arm = plan.arms[0]
    if arm.cost.params > LARGEST_TIMED:
        return None
    run = arm.runs[0].run
    device = run.hardware.torch_device
    batch = run.cfg.train.micro_batch_size or run.cfg.train.batch_size
    model = build_model(run.cfg, plan.dataset.index.vocab_size, plan.dataset.tokenizer.eot_id).to(device)
    if run.hardware.precision == "bf16-true":
        model.bfloat16()
    optimizer = build_module(run, model, plan.dataset.bytes_per_token).configure_optimizers()["optimizer"]
    tokens = torch.randint(model.vocab_size, (batch, model.max_seq_len + 1), device=device)
    times = []
    with torch.autocast(device.type, torch.bfloat16, enabled=run.hardware.precision == "bf16-mixed"):
        for _ in range(TIMED_STEPS + 1):  # the first is a warm-up
            synchronize(device)
            start = time.perf_counter()
            loss = F.cross_entropy(model(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten())
            torch.autograd.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            synchronize(device)
            times.append(time.perf_counter() - start)
    return float(batch * model.max_seq_len * arm.cost.train_flops_per_token / min(times))
