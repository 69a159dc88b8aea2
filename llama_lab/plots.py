"""Plots as PNG files: colours that colour-blind readers can distinguish, and one style of axes."""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from llama_lab.files import replacing

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # Okabe & Ito 2008
INK, GRID = "#222222", "#E4E4E4"


def style(axes: Axes, title: str, x: str, y: str) -> None:
    """Set the title and the axis labels, draw a light grid, and hide the frame at the top and on the right."""
    axes.set_title(title, fontsize=10, color=INK)
    axes.set_xlabel(x, fontsize=9)
    axes.set_ylabel(y, fontsize=9)
    axes.tick_params(which="both", labelsize=8, colors=INK)
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def save(figure: Figure, path: Path) -> None:
    """Write a PNG atomically, creating its folder if needed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as fresh:
        figure.savefig(fresh, format="png")
