"""Norms of queries and keys: the model's norm, with gains and biases of other kinds."""

from functools import partial

from torch import nn

from .mixer import takes
from .norm import NoNorm, Norm


def check_qk_norm(qk_norm: str | None, qk_gain: str, qk_bias: bool | None, rotated: bool) -> None:
    """Raise ValueError for an unknown kind of norm, or a setting that it has no use for."""
    if qk_norm not in (None, "head", "projection"):
        raise ValueError(f"attention.qk_norm={qk_norm}: unknown; choose head, projection or null")
    if qk_gain not in ("shared", "heads", "none"):
        raise ValueError(f"attention.qk_gain={qk_gain}: unknown; choose shared, heads or none")
    if qk_norm is None and (qk_gain != "shared" or qk_bias is not None or rotated):
        raise ValueError(
            "attention.qk_norm=null: qk_gain, qk_bias and qk_norm_rotated need a norm; choose qk_norm=head, or leave "
            "them out"
        )
    if qk_norm == "projection" and (qk_gain == "heads" or rotated):
        raise ValueError(
            "attention.qk_norm=projection: has a gain per element, and is before the rotation; choose qk_norm=head, or "
            "leave out qk_gain=heads and qk_norm_rotated"
        )
    if qk_gain == "none" and qk_bias is not None:
        raise ValueError("attention.qk_gain=none: such a norm has no bias either; leave out qk_bias")


def norm_of_heads(
    norm: Norm, n_heads: int, head_dim: int, qk_norm: str, qk_gain: str, qk_bias: bool | None
) -> nn.Module:
    """The norm of the queries, or of the keys, of `n_heads` heads. Raises ValueError if the model's cannot be it."""
    factory = norm.func if isinstance(norm, partial) else norm
    if factory is NoNorm:
        raise ValueError(f"attention.qk_norm={qk_norm}: the model's norm does nothing; choose a norm, or null")
    kinds: dict[str, bool | int] = {}
    if qk_gain != "shared":
        kinds |= {"heads": n_heads} if qk_gain == "heads" else {"gain": False}
    if qk_bias is not None:
        kinds["bias"] = qk_bias
    for kind in kinds:
        if not takes(factory, kind):
            key = "qk_bias" if kind == "bias" else "qk_gain"
            raise ValueError(f"attention.{key}: the model's norm has no argument {kind}; choose another norm")
    if qk_gain == "none":  # nor what a gain comes with
        kinds |= dict.fromkeys((kind for kind in ("bias", "unit_offset") if takes(factory, kind)), False)
    return norm(head_dim if qk_norm == "head" else n_heads * head_dim, **kinds)
