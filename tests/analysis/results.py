"""Synthetic results for the tests of the report: plain data that look like those of real studies."""

import math
import random
from dataclasses import fields, is_dataclass, replace
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from llama_lab.analysis.result import (
    ArmResult,
    CacheSize,
    Comparison,
    Curve,
    CurveMetric,
    DifferenceCurve,
    Inference,
    Interaction,
    LearningRates,
    Lengths,
    Result,
    Speed,
    Spread,
    Telemetry,
)
from llama_lab.analysis.scaling_law import Scaling, scale
from llama_lab.analysis.statistics import Effect, Estimate, PairedDifference
from llama_lab.runs.record import Record
from llama_lab.runs.stored import OF_SCORES, QUANTITIES, STATE
from llama_lab.runs.study import Arm, Member, Study
from tests.analysis.simulate_scaling import CONDITIONS, draw

TOKENS = 1_597_440
LADDER = {
    "vanilla": 3.9520,
    "norm=rmsnorm": 3.9491,
    "block=prenorm": 3.8230,
    "position=rope": 3.7420,
    "ffn=swiglu": 3.7161,
    "attention=gqa": 3.7304,
    "embedding=untied,init=normal": 3.7109,
}


def estimate(mean: float, sd: float = 0.004, n: int = 3) -> Estimate:
    """A mean of n seeds with its interval."""
    if n == 1:
        return Estimate(1, mean, math.nan, math.nan, math.nan)
    half = 4.3 * sd / math.sqrt(n)
    return Estimate(n, mean, sd, mean - half, mean + half)


def comparison(arm: str, against: str, nats: float, n: int = 3) -> Comparison:
    """A paired difference; significant where it is larger than its interval."""
    if n == 1:
        return Comparison(arm, against, (1,), PairedDifference(1, nats), PairedDifference(1, nats * 0.42))
    half = 0.008 + abs(nats) * 0.08
    found = PairedDifference(n, nats, half / 2.5, nats - half, nats + half, 0.6 if abs(nats) < half else 0.0008)
    bits = PairedDifference(n, nats * 0.42, half / 6, (nats - half) * 0.42, (nats + half) * 0.42, found.p)
    fewest = max(4, round(8 * (half / nats) ** 2)) if abs(nats) < half and nats else None
    return Comparison(arm, against, tuple(range(1, n + 1)), found, bits, (fewest, None) if fewest else None)


def curve(arm: str, metric: CurveMetric, final: float, points: int, speed: float) -> Curve:
    """A loss that falls from 8.3 to its final value; three seeds apart from each other."""
    noise = random.Random(f"{arm} {metric}")
    tokens = [TOKENS * (i + 1) / points for i in range(points)]
    mean = [final + (8.3 - final) * math.exp(-t / TOKENS * 9) + 0.5 * (1 - t / TOKENS) for t in tokens]
    if metric == "train/loss":
        mean = [value + noise.gauss(0, 0.02) for value in mean]
    spread = [0.01 + 0.03 * noise.random() for _ in tokens]
    return Curve(
        arm=arm,
        metric=metric,
        tokens=tokens,
        flops=[8.68e6 * t for t in tokens],
        seconds=[t / speed for t in tokens],
        mean=mean,
        low=[m - s for m, s in zip(mean, spread, strict=True)],
        high=[m + s for m, s in zip(mean, spread, strict=True)],
    )


def difference_curve(comparison: Comparison) -> DifferenceCurve:
    """A difference that grows from nothing to that of the comparison, with its interval all the way."""
    found = comparison.change
    shares = [(i + 1) / 12 for i in range(12)]
    mean, low, high = (
        [found.mean * share + end for share in shares] for end in (0, found.low - found.mean, found.high - found.mean)
    )
    return DifferenceCurve(comparison.arm, comparison.against, [TOKENS * share for share in shares], mean, low, high)


def records(arm: str, seeds: int, loss: float = 3.7) -> tuple[Record, ...]:
    """Finished runs, a little worse with every seed."""
    found = [{"val/loss": loss + seed / 100, "val/bits_per_byte": 0.42 * loss + seed / 100} for seed in range(seeds)]
    path = Path("runs") / arm
    return tuple(Record(path, arm, s + 1, "done", summary=summary) for s, summary in enumerate(found))


def arm_result(index: int, name: str, loss: float, previous: str | None, base: str, seeds: int) -> ArmResult:
    """An arm with everything known."""
    members = tuple(Member(f"{name}/seed={seed + 1}", seed + 1) for seed in range(seeds))
    faster = 0.92**index
    few_heads = "gqa" in name or "untied" in name
    return ArmResult(
        arm=Arm(name, {}, members, previous, 0.0012 * index - 0.003),
        learning_rates=(),
        records=records(name, seeds, loss),
        loss=estimate(loss, n=seeds),
        bits=estimate(loss * 0.4196, 0.002, n=seeds),
        to_reach={"tokens": TOKENS * faster, "flops": 1.39e13 * faster, "seconds": 128.4 * faster}
        if index != 1
        else {},
        costs={
            "params": 1_840_256 + 512 * index,
            "params_non_embedding": 791_680 + 512 * index,
            "flops_per_token": 2_892_800,
            "train_flops_per_token": 8_678_400,
            "kv_cache/bytes_per_token": 1024 if few_heads else 2048,
            "kv_cache/bytes": 262_144 if few_heads else 524_288,
            "seq_len": 256,
            "perf/tokens_per_second": 12_409 - 700 * math.sin(index) + 90 * index,
            "perf/mfu": 0.412,
            "perf/peak_memory_bytes": 1_049_706_496 + 2e6 * index,
        },
        difference={"model.norm._target_": ("llama_lab.model.norm.LayerNorm", "llama_lab.model.norm.RMSNorm")}
        if index
        else {},
    )


def result(losses: dict[str, float], seeds: int = 3, points: int = 195) -> Result:
    """A ladder whose rungs have these losses, each compared with the rung before and the first."""
    names = list(losses)
    base = names[0]
    arms = []
    for index, (name, loss) in enumerate(losses.items()):
        previous = names[index - 1] if index else None
        arm = arm_result(index, name, loss, previous, base, seeds)
        if previous:
            steps = comparison(name, previous, loss - losses[previous], seeds)
            whole = comparison(name, base, loss - losses[base], seeds)
            arm = replace(arm, to_previous=steps, to_baseline=whole)
        arms.append(arm)
    curves = [
        one
        for index, (name, loss) in enumerate(losses.items())
        for one in (
            curve(name, "val/loss", loss, 12, 12_000 + 90 * index),
            curve(name, "train/loss", loss + 0.2, points, 12_000 + 90 * index),
        )
    ]
    return Result(
        study=Study(
            "vanilla-to-llama",
            "ladder",
            base,
            tuple(arm.arm for arm in arms),
            "params",
            "python study.py design=ladder from=vanilla to=llama seeds=3 match=params",
        ),
        metric="val/loss",
        tests="moderated paired tests of the 6 steps",
        answer=(
            f"{names[-1]} ends at {losses[names[-1]]:.4f} nats per token, {base} at {losses[base]:.4f}.",
            "Pre-norm was worth most of it.",
        ),
        arms=tuple(arms),
        curves=tuple(curves),
        seeds=tuple(range(1, seeds + 1)),
        environment={
            "torch": {"2.13.0+cpu": len(names) * seeds},
            "device": {"cpu": len(names) * seeds},
            "git commit": {"0c6e11a": len(names) * seeds - 1, "0c6e11a with changes": 1},
            "data": {"9f4fcfe12c2f4bd836102f96fb390e1e": len(names) * seeds},
        },
        baseline_config="name: null\nseed: 1\ntrain:\n  tokens: 1600000.0\n  batch_size: 16\n"
        + "  long_key: "
        + "x" * 150
        + "\n",
        verdict="Of 6 steps, 4 lowered the loss.",
        difference_curves=tuple(difference_curve(arm.to_previous) for arm in arms if arm.to_previous),
    )


def ladder() -> Result:
    """From vanilla to LLaMA in six steps, over three seeds."""
    return result(LADDER)


def without_cache(name: str) -> Result:
    """The ladder, with one arm that keeps no state."""
    found = ladder()
    nothing = {"kv_cache/bytes_per_token": 0, "kv_cache/bytes": 0}
    arms = (replace(arm, costs=arm.costs | nothing) if arm.name == name else arm for arm in found.arms)
    return replace(found, arms=tuple(arms))


def warned() -> Result:
    """The ladder, with things to be warned of."""
    found = ladder()
    warnings = (
        "The runs saw different data: 2 values of data_hash. Their losses cannot be compared.",
        "3 of 21 runs were made from a checkout with changes that no commit holds.",
    )
    return replace(found, warnings=warnings, notes=("Matched by ffn width.",))


def with_states() -> Result:
    """The ladder, with one arm of recurrences alone and one hybrid."""
    found = ladder()
    costs: dict[str, dict[str, float]] = {
        "ffn=swiglu": {"kv_cache/bytes_per_token": 0, "kv_cache/bytes": 67_584, STATE: 67_584},
        "position=rope": {"kv_cache/bytes_per_token": 512, "kv_cache/bytes": 182_272, STATE: 51_200},
    }
    arms = (replace(arm, costs=arm.costs | {STATE: 0} | costs.get(arm.name, {})) for arm in found.arms)
    return replace(found, arms=tuple(arms))


def in_bits() -> Result:
    """The ladder, its arms with tokenizers of their own: judged in bits per byte, without curves in nats."""
    found = ladder()

    def without_nats(comparison: Comparison | None) -> Comparison | None:
        return comparison and replace(comparison, nats=None)

    arms = tuple(
        replace(arm, to_previous=without_nats(arm.to_previous), to_baseline=without_nats(arm.to_baseline))
        for arm in found.arms
    )
    curves = tuple(replace(c, metric="val/bits_per_byte") for c in found.curves if c.metric == "val/loss")
    return replace(found, metric="val/bits_per_byte", arms=arms, curves=curves)


def factorial() -> Result:
    """Main effects of three axes and their interactions, one of them aliased."""
    effects = (
        Effect(("norm",), PairedDifference(3, -0.004, 0.003, -0.012, 0.004, 0.62)),
        Effect(("position",), PairedDifference(3, -0.083, 0.003, -0.091, -0.075, 6e-6)),
        Effect(("ffn",), PairedDifference(3, -0.026, 0.003, -0.034, -0.018, 5e-4), (("norm", "position"),)),
        Effect(("norm", "ffn"), PairedDifference(3, 0.012, 0.003, 0.004, 0.02, 0.02)),
    )
    return replace(
        ladder(),
        effects=effects,
        interactions=(
            Interaction(
                ("norm", "ffn"),
                (("layernorm", "rmsnorm"), ("relu", "swiglu")),
                ((3.9, 3.862), (3.884, 3.87)),
                ((None, None), (None, effects[-1].change)),
            ),
        ),
    )


def ended(
    arm: str, seed: int, status: str, message: str, rate: float | None = None, tokens: float = 0
) -> tuple[Member, Record]:
    """A run that did not finish."""
    metrics = [{"tokens": tokens}]
    return Member(arm, seed, rate), Record(Path(arm), arm, seed, status, message, metrics=metrics)


def swept() -> Result:
    """Learning rates: one arm at the edge of its grid, one that diverges at the highest."""
    rates = [3e-4, 1e-3, 3e-3, 1e-2, 3e-2]
    fine = [estimate(value) for value in (3.95, 3.80, 3.72, 3.74, 3.91)]
    return replace(
        ladder(),
        learning_rates=(
            LearningRates("vanilla", rates, [*fine[:3], None, None], [0, 0, 1, 3, 3], 3e-3, False, 0.8123),
            LearningRates("position=rope", rates, [*fine[:4], None], [0, 0, 0, 0, 3], 3e-3, False, 0.31),
            LearningRates("ffn=swiglu", rates, [estimate(4.0 - 0.07 * i) for i in range(5)], [0] * 5, 3e-2, True, 0.14),
        ),
        unfinished=(
            ended("vanilla", 1, "diverged", "loss is nan at step 50", 1e-2, 204_800),
            ended("vanilla", 2, "failed", "CUDA out of memory", 1e-2),
        ),
    )


def long() -> Result:
    """Losses at several context lengths; one position encoding ends at the trained one."""
    lengths = [128, 256, 512, 1024]

    def positions(at: int, worse: float) -> dict[int, tuple[list[float], list[float]]]:
        places = {length: [length * (i + 0.5) / 16 for i in range(16)] for length in lengths if length <= at}
        return {n: (xs, [3.6 + 3 / x**0.5 + worse * max(0, x / 256 - 1) for x in xs]) for n, xs in places.items()}

    def losses(*values: float | None) -> dict[int, Estimate | None]:
        return {n: value and estimate(value) for n, value in zip(lengths, values, strict=True)}

    return replace(
        ladder(),
        lengths=(
            Lengths("vanilla", 256, losses(3.99, 3.95, None, None), positions(256, 0)),
            Lengths("position=rope", 256, losses(3.8, 3.74, 4.3, 5.2), positions(1024, 0.6)),
            Lengths("ffn=swiglu", 256, losses(3.77, 3.71, 3.7, 3.72), positions(1024, 0)),
        ),
    )


def spread(mean: float) -> Spread:
    """Of seeds 4% apart."""
    return Spread(mean, 0.98 * mean, 1.02 * mean)


def inference(arm: str, longest: int, heads: int, slower: float) -> Inference:
    """An arm measured up to its longest context, its KV cache with so many heads, in 16 bits and in 8."""
    contexts = [n for n in (64, 128, 256, 512) if n <= longest]

    def speed(batch_size: int, context: int) -> Speed:
        cached, uncached = (900 * batch_size**0.8 - context * heads / 5) / slower, 30_000 / context / slower
        gain, prefill = spread(cached / uncached), spread(context * batch_size / 4e5)
        return Speed(batch_size, context, 3, spread(cached), spread(uncached), gain, prefill)

    def cache(dtype: str, context: int, size: int) -> CacheSize:
        content = float(context * heads * size * 256)
        return CacheSize(dtype, context, Spread(content, content, content), Spread(content, content, content))

    return Inference(
        arm,
        tuple(speed(batch_size, context) for batch_size in (1, 8) for context in contexts),
        tuple(cache(dtype, n, size) for dtype, size in (("bfloat16", 2), ("int8", 1)) for n in contexts),
    )


def watched() -> Result:
    """Telemetry of two arms: one of six layers, and one of four without attention scores."""

    def rows(layers: int) -> list[list[float]]:
        return [[(1 + layer) / (1 + step) for layer in range(layers)] for step in range(4)]

    tokens = [TOKENS * share for share in (0.01, 0.34, 0.67, 1)]
    of_scores = dict.fromkeys(OF_SCORES, rows(6))
    of_parts = [name for name in QUANTITIES if name not in OF_SCORES]
    return replace(
        ladder(),
        telemetry=(
            Telemetry("vanilla", tokens, dict.fromkeys(of_parts, rows(6)) | of_scores),
            Telemetry("ffn=swiglu", tokens, dict.fromkeys(of_parts, rows(4))),
        ),
    )


def measured() -> Result:
    """Inference, measured in most arms: one of them at shorter contexts, one with smaller caches."""
    arms = tuple(
        inference(name, 256 if name == "vanilla" else 512, 1 if "gqa" in name else 4, 1 + index / 10)
        for index, name in enumerate(list(LADDER)[:-1])
    )
    return replace(ladder(), inference=arms)


def everything() -> Result:
    """Every section in one."""
    arms = warned().arms
    return replace(
        warned(),
        pairs=tuple(comparison(a.name, b.name, a.loss.mean - b.loss.mean) for b, a in combinations(arms, 2)),
        ranks={arm.name: (1, len(arms)) for arm in arms},
        inference=measured().inference,
        effects=factorial().effects,
        interactions=factorial().interactions,
        learning_rates=swept().learning_rates,
        unfinished=swept().unfinished,
        lengths=long().lengths,
        scaling=scaling(),
        telemetry=watched().telemetry,
    )


@cache
def scaling() -> Scaling:
    """Two options at four sizes and three budgets, the second worth 1.5 times the compute."""
    reference, option = draw(CONDITIONS[0], np.random.default_rng(0))
    return scale({"relu": reference, "swiglu": option})


def many() -> Result:
    """200 runs: 40 arms over five seeds."""
    names = [f"attention=gqa,model.n_kv_heads={i},position=rope_yarn" for i in range(40)]
    return result({name: 3.95 - 0.006 * i + 0.004 * math.sin(i) for i, name in enumerate(names)}, seeds=5, points=200)


def unfinished() -> Result:
    """No run came to its end."""
    found = ladder()
    arms = tuple(
        ArmResult(arm.arm, (), tuple(replace(record, status="failed") for record in arm.records), None, None)
        for arm in found.arms
    )
    runs = tuple(ended(arm.name, 1, "failed", "killed", tokens=math.nan) for arm in arms)
    nothing = {"curves": (), "difference_curves": (), "answer": ()}
    return replace(found, arms=arms, unfinished=runs, **nothing)


def nans(value: Any, *only: str) -> Any:
    """The same with nan in place of every float, of a dataclass in these fields alone if some are named."""
    if isinstance(value, float):
        return math.nan
    if isinstance(value, list | tuple):
        return type(value)(nans(one, *only) for one in value)
    if isinstance(value, dict):
        return {key: nans(one) for key, one in value.items()}
    if is_dataclass(value):
        names = only or [field.name for field in fields(value)]
        return replace(value, **{name: nans(getattr(value, name)) for name in names})
    return value


def unknown() -> Result:
    """Every number is nan."""
    found = everything()
    arms = tuple(
        replace(
            nans(arm, "loss", "bits", "to_previous", "to_baseline", "to_reach"),
            arm=replace(arm.arm, residual=math.nan),
            costs=dict.fromkeys(arm.costs, math.nan),
        )
        for arm in found.arms
    )
    parts = {name: nans(getattr(found, name)) for name in ("inference", "effects", "lengths")}
    parts["learning_rates"] = tuple(replace(nans(one), diverged=[0] * 5) for one in found.learning_rates)
    parts |= {name: nans(getattr(found, name), "mean", "low", "high") for name in ("curves", "difference_curves")}
    return replace(found, arms=arms, scaling=None, interactions=(), telemetry=nans(found.telemetry, "values"), **parts)
