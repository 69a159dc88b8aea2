"""Plots of measurements."""

from collections.abc import Callable, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from llama_lab.plots import MARKERS, PALETTE, new_figure, style

from .floor import Floor
from .growth import Growth
from .measurement import Measurement

Value = Callable[[Measurement, float], float]  # from a measurement and seconds per call to the plotted value

SPREAD = "median; whiskers: lowest and highest round"


def milliseconds(_: Measurement, seconds: float) -> float:
    """The time in ms."""
    return seconds * 1e3


def speed(m: Measurement, seconds: float) -> float:
    """Tokens per second."""
    return (m.tokens_per_second or 0.0) * m.timing.median / seconds


def token_speed(_: Measurement, seconds: float) -> float:
    """Tokens per second, from seconds per token."""
    return 1 / seconds


def peak_mebibytes(m: Measurement, _: float) -> float:
    """Peak memory in MiB."""
    return (m.peak_bytes or 0) / 2**20


def with_whiskers(m: Measurement, value: Value) -> tuple[float, float, float]:
    """The value at the median time, and the distances to the lowest and the highest value of all rounds."""
    middle = value(m, m.timing.median)
    ends = sorted(value(m, seconds) for seconds in (m.timing.low, m.timing.high))
    return middle, middle - ends[0], ends[1] - middle


def draw_lines(axes: Axes, measurements: Sequence[Measurement], value: Value) -> None:
    """Draw a line for each contender over the sizes, on a logarithmic scale."""
    for i, what in enumerate(dict.fromkeys(m.what for m in measurements)):
        ours = [m for m in measurements if m.what == what]
        middle, below, above = zip(*(with_whiskers(m, value) for m in ours), strict=True)
        axes.errorbar(
            [m.size for m in ours],
            middle,
            (below, above),
            label=what,
            color=PALETTE[i],
            marker=MARKERS[i],
            markersize=4,
            linewidth=1.4,
            capsize=2,
        )
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.legend(fontsize=8, frameon=False)


def draw_bars(axes: Axes, measurements: Sequence[Measurement], value: Value) -> None:
    """Draw a labelled bar for each contender, the first at the top."""
    middle, below, above = zip(*(with_whiskers(m, value) for m in measurements), strict=True)
    names = [m.what for m in measurements]
    whiskers = (below, above) if any(below + above) else None
    axes.barh(names, middle, xerr=whiskers, color=PALETTE[0], height=0.65, capsize=2, ecolor=PALETTE[1])
    for name, length, whisker in zip(names, middle, above, strict=True):
        axes.annotate(
            f"{length:.3g}" if length < 1000 else f"{length:,.0f}",
            (length + whisker, name),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},  # to cover grid lines
        )
    axes.invert_yaxis()
    axes.margins(x=0.2)
    axes.set_xlim(left=0)


def norm_chart(measurements: Sequence[Measurement]) -> Figure:
    """Time over the width, forward and backward."""
    figure, axes = new_figure(2, f"LayerNorm and RMSNorm ({SPREAD})")
    for panel, direction in zip(axes, ("forward", "backward"), strict=True):
        draw_lines(panel, [m for m in measurements if m.direction == direction], milliseconds)
        style(panel, direction, "width", "ms, logarithmic")
    return figure


def feedforward_chart(measurements: Sequence[Measurement]) -> Figure:
    """Time of every option, forward and backward."""
    figure, axes = new_figure(2, f"Feed-forwards at equal parameters ({SPREAD})", height=4.4)
    for panel, direction in zip(axes, ("forward", "backward"), strict=True):
        draw_bars(panel, [m for m in measurements if m.direction == direction], milliseconds)
        style(panel, direction, "ms", "")
    return figure


def attention_chart(measurements: Sequence[Measurement]) -> Figure:
    """Time and, if measured, peak memory over the length, for the forward pass and for both."""
    titles = {"forward": "forward", "both": "forward and backward"}
    quantities: list[tuple[str, str, Value]] = [("time", "ms, logarithmic", milliseconds)]
    if all(m.peak_bytes is not None for m in measurements):
        quantities.append(("peak memory", "MiB, logarithmic", peak_mebibytes))
    panels = [(*quantity, direction) for quantity in quantities for direction in titles]
    figure, axes = new_figure(len(panels), f"Causal attention ({SPREAD})", width=3.6)
    for panel, (quantity, unit, value, direction) in zip(axes, panels, strict=True):
        draw_lines(panel, [m for m in measurements if m.direction == direction], value)
        style(panel, f"{quantity}, {titles[direction]}", "tokens", unit)
    return figure


def decoding_chart(measurements: Sequence[Measurement]) -> Figure:
    """Tokens per second of every variant, by batch size and context."""
    sizes = list(dict.fromkeys(m.size for m in measurements))
    figure, axes = new_figure(len(sizes), f"Decoding with a KV cache ({SPREAD})", width=3.4, height=2.4)
    for panel, size in zip(axes, sizes, strict=True):
        draw_bars(panel, [m for m in measurements if m.size == size], speed)
        style(panel, "batch {}, context {}".format(*size.split(" x ")), "tokens per second", "")
    return figure


def caching_chart(measurements: Sequence[Measurement]) -> Figure:
    """Time and number of key and value computations, with and without the cache."""
    new_tokens = measurements[0].size
    figure, axes = new_figure(2, f"Greedy text of {new_tokens} tokens ({SPREAD})", height=2.2)
    draw_bars(axes[0], measurements, milliseconds)
    style(axes[0], "time", "ms", "")
    draw_bars(axes[1], measurements, lambda m, _: m.kv_computations or 0)
    style(axes[1], "key and value computations", "tokens, in each layer", "")
    return figure


def decode_chart(measurements: Sequence[Measurement], floors: Sequence[Floor], growths: Sequence[Growth]) -> Figure:
    """Tokens per second with the floors, and the time per token over the context."""
    figure, axes = new_figure(2, f"Greedy text, batch 1 ({SPREAD})", height=3.2)
    draw_bars(axes[0], measurements, token_speed)
    for floor, colour, dashes in zip(floors, PALETTE[2:], ("--", ":"), strict=False):
        label = f"at the {floor.name}: {1 / floor.seconds:,.0f}"
        axes[0].axvline(1 / floor.seconds, color=colour, linestyle=dashes, linewidth=2, label=label)
    fastest = [*(floor.seconds for floor in floors), *(m.timing.low for m in measurements)]
    axes[0].set_xlim(0, 1.2 / min(fastest))
    style(axes[0], "speed", "tokens per second", "")
    timed = [(growth, growth.attention) for growth in growths if growth.attention is not None]
    names = [growth.where for growth, _ in timed]
    alone = [attention.median * 1e3 for _, attention in timed]
    rest = [growth.step.median * 1e3 - below for (growth, _), below in zip(timed, alone, strict=True)]
    axes[1].bar(names, alone, width=0.6, color=PALETTE[1], label="attention alone")
    axes[1].bar(names, rest, width=0.6, bottom=alone, color=PALETTE[0], label="the rest")
    style(axes[1], "time of a token, eager (medians)", "", "ms")
    for panel in axes:
        panel.legend(fontsize=8, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2)
    return figure
