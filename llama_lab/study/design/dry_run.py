"""Dry run: a table of the arms with width, parameters, FLOPs, KV-cache bytes, time."""

import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product

import torch
import torch.nn.functional as F
from omegaconf import DictConfig
from rich import box
from rich.console import Console
from rich.table import Table

from llama_lab.config.components import build_model
from llama_lab.data.open import read_by
from llama_lab.devices.performance import synchronize
from llama_lab.estimate.estimate import check_mfu, find_device
from llama_lab.model.cost import random_batch
from llama_lab.model.recompute import recompute, recomputed_flops
from llama_lab.runs.study import MATCHED, MOST_RESIDUAL
from llama_lab.training.assemble import build_optimizer
from llama_lab.util.formatting import break_name, cache_and_state, count, duration, short, three_digits

from .plan import Plan, PlannedArm, meta_model

TIMED_STEPS = 3
LARGEST_TIMED = 300e6  # parameters; a larger model may not fit into memory
DAY = 86400.0  # seconds


@dataclass(frozen=True)
class TrainingSpeed:
    """FLOP/s of training on one device, and where they are from.

    flops: None if unknown; `source` says why. devices: of a run. priced: whether to print device-hours.
    """

    flops: float | None
    source: str
    devices: int = 1
    priced: bool = False


def speed_of(plan: Plan, cfg: DictConfig) -> TrainingSpeed:
    """The speed on the command's `device`, which need not be here, or as it is measured here. Raises ConfigError."""
    hardware = plan.runs[0].run.hardware
    if cfg.device is not None:
        source = f"{check_mfu(cfg.estimate_mfu):.0%} of the peak of {hardware.world_size} x {cfg.device}, estimate_mfu"
        return TrainingSpeed(find_device(cfg.device)[1].peak * cfg.estimate_mfu, source, hardware.world_size, True)
    if hardware.elsewhere:
        return TrainingSpeed(None, "the runs are for another machine; name its device, such as device=h100")
    if (flops := flops_per_second(plan)) is None:
        many = f"{plan.study.baseline} has more than {LARGEST_TIMED / 1e6:.0f} M parameters to try"
        return TrainingSpeed(None, f"{many}; name a device, such as device=h100")
    return TrainingSpeed(flops, f"{TIMED_STEPS} timed steps of {plan.study.baseline} here ({flops / 1e9:,.1f} GFLOP/s)")


def print_plan(plan: Plan, speed: TrainingSpeed | None) -> None:
    """Print the arms with their costs, the residuals of matching and, if there is a speed, times."""
    console = Console(highlight=False)
    per_run: dict[str, float] = {}  # device-seconds by arm
    if speed and speed.flops:
        per_run = {arm.arm.name: training_flops(plan, arm) / speed.flops for arm in plan.arms}
    elif speed:
        console.print(f"no times: {speed.source}", markup=False)
    total_to_tune = plan.expected_runs - len(plan.runs)
    tuning = f", {count(total_to_tune, 'run')} to tune them" if total_to_tune else ""
    tuning += " and more where the best rate is an end of the grid" if tuning and plan.command.extend_rates else ""
    title = f"{plan.study.name}: {len(plan.arms)} arms, {len(plan.runs)} runs{tuning}"
    console.print(title, style="italic", markup=False, soft_wrap=True)  # a table's own title wraps at its width
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("arm", overflow="fold")
    has_experts = any(arm.cost.params_active < arm.cost.params for arm in plan.arms)
    columns = ["width", "params", "without\nembed.", *["active"] * has_experts]
    has_states = any(arm.cost.state_bytes_per_sequence for arm in plan.arms)
    columns += ["residual", "FLOPs\n/token", "KV B\n/token" + "\n+ state" * has_states]
    if speed and per_run:
        columns.append("device\nhours" if speed.priced else "time")
    for column in columns:
        table.add_column(column, justify="right")
    total = tuning_total = 0.0
    for arm in plan.arms:
        cost, off = arm.cost, arm.arm.residual
        sizes = [short(cost.params), short(cost.params_non_embedding)]
        sizes += [short(cost.params_active_non_embedding)] * has_experts + ["-" if off is None else f"{off:+.2%}"]
        states = cache_and_state(cost.kv_bytes_per_token, cost.state_bytes_per_sequence)
        name = "\n".join(break_name(arm.arm.name, max(10, console.width - 70)))
        cells = [name, str(arm.width or "-"), *sizes, short(cost.flops_per_token), states]
        if per_run:  # of the arm's runs, one after the other
            to_tune = arm.expected_tuning * per_run[arm.arm.name]
            seconds = len(arm.runs) * per_run[arm.arm.name] + to_tune
            total, tuning_total = total + seconds, tuning_total + to_tune
            cells.append(three_digits(seconds / 3600) if speed and speed.priced else duration(seconds))
        table.add_row(*cells)
    console.print(table)
    matched = MATCHED.get(plan.study.match)
    widths = f"widths match {matched}" if matched else "textbook widths, nothing is matched (match=none)"
    if any(arm.draft.cfg.model.ffn is None for arm in plan.arms):
        widths += "; without a feed-forward, that of a head's values"
    lines = [f"{widths}; KV bytes are for 16 bits; FLOPs are those of a forward pass"]
    lines += filter(None, [plan.runs[0].run.hardware.why])
    if speed and per_run:
        lines.append(total_time(total, tuning_total, speed))
        if total > DAY * speed.devices:
            lines.append(f"That is more than a day. {largest_in_a_day(plan, per_run, total, speed.devices)}")
    lines += [*power(plan), *plan.study.notes]
    if far := [arm for arm in plan.study.arms if abs(arm.residual or 0) > MOST_RESIDUAL]:
        named = ", ".join(f"{arm.name} {arm.residual:+.2%}" for arm in far)
        lines.append(f"Widths are whole numbers, so {matched} are not equal to {MOST_RESIDUAL:.1%}: {named}.")
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)


def training_flops(plan: Plan, arm: PlannedArm) -> float:
    """FLOPs of one run of an arm over all devices, what `train.recompute` computes again included."""
    run = arm.runs[0].run
    again = recomputed_flops(meta_model(run.cfg, read_by(run.cfg, plan.dataset)), run.cfg.train.recompute)
    return run.flops(arm.cost) + run.steps * run.tokens_per_step * again


def total_time(seconds: float, tuning: float, speed: TrainingSpeed) -> str:
    """A sentence on the device-seconds of all runs, `tuning` of them of those that tune learning rates."""
    share = f", {tuning / seconds:.0%} of it to tune" if tuning else ""
    wall = f"about {duration(seconds / speed.devices)} of training"
    if speed.priced:
        wall = f"about {three_digits(seconds / 3600)} device-hours in all{share}: {duration(seconds / speed.devices)}"
        share = ""
    return f"{wall}{share}, one run after the other, without evaluation: from {speed.source}"


def largest_in_a_day(plan: Plan, per_run: Mapping[str, float], total: float, devices: int) -> str:
    """The largest design of this kind whose training takes at most a day. per_run, total: device-seconds."""
    cells: defaultdict[tuple[str, str], float] = defaultdict(float)  # of a run of every option, by size and budget
    for arm in plan.arms:
        if "tokens_per_parameter" not in arm.arm.axes:
            tokens = plan.arms[0].draft.cfg.train.tokens * devices * DAY / total
            return f"train.tokens={tokens:.1e} takes about one."
        cells[arm.arm.axes["size"], arm.arm.axes["tokens_per_parameter"]] += per_run[arm.arm.name]
    sizes, budgets = list(dict.fromkeys(size for size, _ in cells)), sorted({budget for _, budget in cells}, key=float)
    sizes.sort(key=lambda size: cells[size, budgets[0]])
    seeds, tuning = len(plan.arms[0].runs), max(arm.expected_tuning for arm in plan.arms)
    best, longest = "So do two of its sizes at one budget; choose smaller study.sizes or study.budgets.", 0.0
    for n, m in product(range(2, len(sizes) + 1), range(1, len(budgets) + 1)):
        tuned = budgets[(m - 1) // 2]
        seconds = sum(cells[cell] * (seeds + tuning * (cell[1] == tuned)) for cell in product(sizes[:n], budgets[:m]))
        if longest < seconds <= devices * DAY:
            longest, chosen = seconds, f"study.sizes=[{','.join(sizes[:n])}] study.budgets=[{','.join(budgets[:m])}]"
            best = f"The largest design that fits one: {chosen}, {duration(seconds / devices)}."
    return best


def power(plan: Plan) -> list[str]:
    """The smallest difference that the study can detect; not for a factorial, which averages over arms."""
    seeds = len({run.member.seed for run in plan.runs})
    if seeds == 1:
        return ["one seed: nothing will be tested; study.seeds=[1,2,3] or more are"]
    if plan.study.is_factorial or len(plan.arms) == 1:
        return []
    from llama_lab.analysis.power import smallest_difference  # SciPy takes a second

    comparisons = (len(plan.study.family) + len(plan.study.ends)) / plan.study.level_share(seeds)
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
    recompute(model, run.cfg.train.recompute)
    optimizer = build_optimizer(run, model)
    inputs, targets, *given = model.cut(*random_batch(model, batch, model.max_seq_len, device))
    times = []
    with torch.autocast(device.type, torch.bfloat16, enabled=run.hardware.precision == "bf16-mixed"):
        for _ in range(TIMED_STEPS + 1):  # the first is a warm-up
            synchronize(device)
            start = time.perf_counter()
            loss = F.cross_entropy(model(inputs, None, *given).float().flatten(0, 1), targets.flatten())
            torch.autograd.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            synchronize(device)
            times.append(time.perf_counter() - start)
    flops = arm.cost.train_flops_per_token + recomputed_flops(model, run.cfg.train.recompute)
    return float(batch * model.max_seq_len * flops / min(times))
