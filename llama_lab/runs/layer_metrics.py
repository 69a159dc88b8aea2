"""The names of what is logged of each layer: `telemetry/ffn_grad_norm/layer_03`, layers counted from 0 at the input."""

import re
from itertools import product

# Of a block as a whole, and of its two parts.
PARTS = ("block", "attention", "ffn")
OF_PARTS = ("grad_norm", "update_ratio", "activation_rms", "activation_max")
OF_SCORES = ("attention_entropy", "attention_logit_max")
QUANTITIES = (*(f"{part}_{quantity}" for quantity, part in product(OF_PARTS, PARTS)), *OF_SCORES)


def layer_metric(quantity: str, layer: int) -> str:
    """The name of one of QUANTITIES in a layer."""
    return f"telemetry/{quantity}/layer_{layer:02d}"


def layer_metrics(layers: int) -> list[str]:
    """All names of a model with so many layers."""
    return [layer_metric(quantity, layer) for quantity, layer in product(QUANTITIES, range(layers))]


def parse_layer_metric(name: str) -> tuple[str, int] | None:
    """The quantity and the layer of a metric's name; None for another metric."""
    found = re.fullmatch(r"telemetry/(\w+)/layer_(\d+)", name)
    return (found[1], int(found[2])) if found and found[1] in QUANTITIES else None
