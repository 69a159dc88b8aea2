"""What the runs of an arm logged of every layer, over depth and training."""

from collections.abc import Sequence

import pandas as pd

from llama_lab.runs.record import Record
from llama_lab.runs.stored import OF_PARTS, parse_layer_metric

from .result import Telemetry

TIMES = 4  # that are shown of a run
TITLES = {
    "grad_norm": "gradient norm",
    "update_ratio": "update-to-weight ratio",
    "activation_rms": "activation RMS",
    "activation_max": "largest activation",
    "entropy": "attention entropy, nats",
    "logit_max": "largest attention logit",
    "load_entropy": "entropy of the experts' load, nats",
    "load_max": "largest share of an expert",
    "dead_experts": "dead experts",
    "z": "squared log-partition of the router",
}
PARTS = {"block": "blocks", "attention": "attention", "ffn": "feed-forwards"}
LINEAR = tuple(TITLES[kind] for kind in TITLES if kind not in OF_PARTS)  # the others differ by orders of magnitude


def names(quantity: str) -> list[str]:
    """What a reader calls a quantity: its title, and the part that it is of if there are several."""
    part, _, kind = quantity.partition("_")
    return [TITLES[kind], *([PARTS[part]] if kind in OF_PARTS else [])]


def telemetry(arm: str, records: Sequence[Record]) -> Telemetry | None:
    """The means over the runs that logged it, at steps that all of them did; None without any."""
    known = [table for table in map(_table, records) if len(table)]
    rows = pd.concat(known or [pd.DataFrame()]).groupby(level=0)
    means = rows.mean()[rows.size() == len(known)]
    if means.empty:
        return None
    last = len(means) - 1
    means = means.iloc[sorted({round(i * last / (TIMES - 1)) for i in range(TIMES)})]
    layers = range(1 + max(layer for _, layer in means.columns))
    values = {
        quantity: means[quantity].reindex(columns=layers).to_numpy().tolist()
        for quantity in dict.fromkeys(quantity for quantity, _ in means.columns)
    }
    return Telemetry(arm, means.index.tolist(), values)


def _table(record: Record) -> pd.DataFrame:
    """A row for each step that logged telemetry, by tokens; columns are pairs of quantity and layer."""
    rows = {
        row["tokens"]: places
        for row in record.metrics
        if (places := {place: value for name, value in row.items() if (place := parse_layer_metric(name))})
    }
    return pd.DataFrame.from_dict(rows, orient="index")
