"""Draw the figures of docs/statistics.md from the table beside it: `python -m tests.analysis.draw_simulated`."""

from pathlib import Path

import pandas as pd

from llama_lab.util.chart import COLOURS, Spec, render

DOCS = Path(__file__).parents[2] / "docs"
SHOWN = (
    "equal noise",
    "an arm 10 times as noisy",
    "half of the arms 10 times as noisy",
    "seed effects that change midway",
    "two in five seeds of an arm 8 sd higher",
)
FIGURES = {"level": ("false", "false reports, %"), "power": ("found", "steps of 5 sd found, %")}


def drawn(table: pd.DataFrame, column: str, title: str) -> Spec:
    """A column over the number of seeds, with its 95% intervals, a line for each condition."""
    names = {column: "y", f"{column}_low": "low", f"{column}_high": "high"}
    rows = table[["condition", "seeds", *names]].rename(columns=names).to_dict("records")
    value = {"type": "quantitative", "title": title}
    seeds = {"field": "seeds", "type": "ordinal", "title": "seeds", "axis": {"labelAngle": 0}}
    return {
        "data": {"values": rows},
        "width": 320,
        "height": 180,
        "encoding": {
            "x": seeds,
            "color": {
                "field": "condition",
                "type": "nominal",
                "scale": {"domain": list(SHOWN), "range": list(COLOURS)},
                "legend": {"title": None, "orient": "right", "columns": 1, "labelLimit": 300},
            },
        },
        "layer": [
            {"mark": {"type": "line", "point": True}, "encoding": {"y": value | {"field": "y"}}},
            {"mark": "rule", "encoding": {"y": value | {"field": "low"}, "y2": {"field": "high"}}},
        ],
    }


if __name__ == "__main__":
    simulated = pd.read_csv(DOCS / "statistics.csv")
    shown = simulated[simulated["condition"].isin(SHOWN)]
    for name, (column, title) in FIGURES.items():
        render(drawn(shown, column, title), DOCS / f"statistics-{name}.svg")
