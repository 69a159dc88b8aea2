"""Parameters, FLOPs and state bytes of a decoder, as its modules report them.

`nn.Linear` is counted as used once per token. A module that uses its matrices in another way (conditionally, more than
once, without `nn.Linear`) reports its cost, children included, or is an error:

    flops_per_token(seq_len) -> float   FLOPs of one token's forward pass, averaged over a sequence of seq_len tokens
    active_params() -> int              parameters that one token uses
    flops_per_token_dense(seq_len)      optional: if kernels compute more

A decoder of any size, built under `torch.device("meta")`, is measured in seconds, without memory.
"""

import math
from collections import Counter
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from .decoder import Decoder
from .mixer import class_name

HOOKS = "flops_per_token(seq_len) and active_params()"
STATES = {  # the metrics of Cost's fields
    "kv_bytes_per_token": "kv_cache/bytes_per_token",
    "kv_bytes": "kv_cache/bytes",
    "kv_bytes_source": "kv_cache/source_bytes",
    "state_bytes_per_sequence": "state/bytes_per_sequence",
}
OURS = ("llama_lab", "torch")  # packages whose modules use every nn.Linear once per token, or say what they cost


@dataclass(frozen=True)
class Cost:
    """Costs of one decoder at one sequence length.

    params: parameters, tied ones once. params_active: those that one token uses; fewer in a mixture of experts.
    params_non_embedding, params_active_non_embedding: without the token, position and bias tables and the head.
    flops_per_token: twice the multiply-adds of one forward pass's matrix products, averaged over a sequence; attention
        counts only the keys that a query sees (causal, and within the window).
    flops_per_token_dense: the same with every key counted for every query, as kernels may compute it.
    train_flops_per_token: forward and backward, three times `flops_per_token`; recomputation is not counted.
    kv_bytes_per_token: what one more token adds to the mixers' states, attention's KV cache, before any window is full.
    kv_bytes: the states of one sequence of `seq_len` tokens, windowed layers holding their window.
    state_bytes_per_sequence: what of them is there before any token, of recurrences and convolutions. All three are
        None for a model that cannot decode without reading the whole text again.
    kv_bytes_source: what cross-attention keeps of a source; None without one. In an encoder-decoder, each tower reads
        its part of the `seq_len` tokens: half of them, or what the objective makes of a window.
    """

    seq_len: int
    params: int
    params_active: int
    params_non_embedding: int
    params_active_non_embedding: int
    flops_per_token: float
    flops_per_token_dense: float
    train_flops_per_token: float
    kv_bytes_per_token: int | None
    kv_bytes: int | None
    state_bytes_per_sequence: int | None
    kv_bytes_source: int | None = None


def measure_cost(model: Decoder, seq_len: int | None = None, kv_dtype: torch.dtype = torch.bfloat16) -> Cost:
    """The costs of `model` on sequences of `seq_len` tokens (default: `max_seq_len`), with states in `kv_dtype`.

    Raises ValueError for a module that does not report its cost, or reports an impossible one. Source: Kaplan et al.
    2020, table 1, with attention exact: only visible keys, and grouped heads.
    """
    seq_len = seq_len or model.max_seq_len
    for name, module in model.named_modules():
        if reports_cost(module) and not hasattr(module, "active_params"):
            raise ValueError(f"{name}: {class_name(module)} has flops_per_token(seq_len) alone; give it {HOOKS}")
    units = cost_units(model)
    check_uses(model)
    params = count(model)
    flops, lengths = flops_per_token(model, units, seq_len), [length for _, length in model.readers(seq_len)]
    reporting = {unit: name for name, unit in units if reports_cost(unit)}  # shared ones once
    encodings = [encoding for tower in model.towers for encoding in tower.encodings]
    tables = [m for end in (model.embedding, *encodings) for m in end.modules() if isinstance(m, nn.Embedding)]
    ends = {p for module in (*tables, model.embedding.head) for p in module.parameters()}
    idle = sum(count(unit) - ask(name, unit, "active_params", most=count(unit)) for unit, name in reporting.items())
    without = params - sum(p.numel() for p in ends)
    return Cost(
        seq_len=seq_len,
        params=params,
        params_active=params - idle,
        params_non_embedding=without,
        params_active_non_embedding=without - idle,
        flops_per_token=flops,
        flops_per_token_dense=flops_per_token(model, units, seq_len, dense=True),
        train_flops_per_token=3 * flops,
        kv_bytes=ask_mixers(model, "state_bytes", lengths[-1], kv_dtype) if model.decodes else None,
        kv_bytes_source=model.source_bytes(lengths[0], kv_dtype),
        kv_bytes_per_token=ask_mixers(model, "state_bytes_per_token", kv_dtype) if model.decodes else None,
        state_bytes_per_sequence=ask_mixers(model, "state_bytes", 0, kv_dtype) if model.decodes else None,
    )


def count(module: nn.Module) -> int:
    """Parameters, tied ones once."""
    return sum(p.numel() for p in module.parameters())


def ask_mixers(model: Decoder, hook: str, *args: object) -> int:
    """Sum of a hook's results over all mixers."""
    return sum(ask(f"blocks.{i}.attention", mixer, hook, *args) for i, mixer in enumerate(model.mixers))


def ask(name: str, module: nn.Module, hook: str, *args: object, most: float = math.inf) -> Any:
    """Call a module's hook. Raises ValueError unless the result is a finite number from 0 to `most`."""
    answer: Any = getattr(module, hook)(*args)
    if not (isinstance(answer, Real) and math.isfinite(answer) and 0 <= float(answer) <= most):
        bounds = "a number, at least 0" if most == math.inf else f"a number from 0 to {most:,}"
        asked = f"{type(module).__name__}.{hook}({', '.join(map(str, args))})"
        raise ValueError(f"{name}: {asked} is {answer}; it must be {bounds}")
    return answer


def cost_units(module: nn.Module, name: str = "") -> list[tuple[str, nn.Module]]:
    """The modules by which FLOPs are counted, with their names: those that report their cost, and nn.Linear.

    Raises ValueError for a module with matrices that no module counts.
    """
    own = {name for name, _ in module.named_parameters()}
    is_linear = isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward
    if (is_linear and own <= {"weight", "bias"}) or covers_own_matrices(module):
        return [(name, module)]
    if not isinstance(module, nn.Embedding) and any(p.ndim > 1 for p in module.parameters(recurse=False)):
        raise ValueError(
            f"{name}: {class_name(module)} has matrices outside of nn.Linear, and nothing says what they cost; "
            f"give it, or the module that uses it, {HOOKS}"
        )
    children = [(f"{name}.{key}".lstrip("."), child) for key, child in module.named_children()]
    units = [unit for key, child in children for unit in cost_units(child, key)]
    return [(name, module)] if reports_cost(module) else units


def flops_per_token(model: Decoder, units: list[tuple[str, nn.Module]], seq_len: int, dense: bool = False) -> float:
    """Forward FLOPs of `units` of `model` per token of a window of `seq_len`, of which each tower reads its part.

    They are what modules report, plus two per weight of every other nn.Linear.
    """
    readers = reversed(model.readers(seq_len))  # a decoder holds its encoder
    length_of = {module: length for tower, length in readers for module in tower.modules()}
    total: float = 0
    for name, unit in units:
        if isinstance(unit, nn.Linear) and not reports_cost(unit):
            flops = 2 * unit.weight.numel()
        else:
            has_dense = dense and hasattr(unit, "flops_per_token_dense")
            flops = ask(name, unit, "flops_per_token_dense" if has_dense else "flops_per_token", length_of[unit])
        total += length_of[unit] / seq_len * flops
    return total


def random_batch(model: Decoder, rows: int, seq_len: int, device: torch.device | None = None) -> list[Tensor]:
    """What `Decoder.cut` takes of windows of `seq_len` tokens: inputs, targets, and a source where there is one."""
    *source, target = (length for _, length in model.readers(seq_len))
    return [torch.randint(model.vocab_size, (rows, n), device=device) for n in (target, target, *source)]


def reports_cost(module: nn.Module) -> bool:
    """Whether a module reports its own cost."""
    return hasattr(module, "flops_per_token")


def covers_own_matrices(module: nn.Module) -> bool:
    """Whether a module's reported cost covers all its matrices; a cost inherited by a user's subclass may not."""
    author = next((kind for kind in type(module).__mro__ if "flops_per_token" in vars(kind)), None)
    return author is not None and (is_foreign(author) or not is_foreign(type(module)))


def is_foreign(kind: type) -> bool:
    """Whether a class is the user's, neither ours nor PyTorch's."""
    return kind.__module__.partition(".")[0] not in OURS


@torch.no_grad()
def check_uses(model: Decoder) -> None:
    """Raise ValueError for a foreign module that does not use each of its `cost_units` once per token.

    Runs a forward pass over a few tokens, unless there are no foreign modules; their errors propagate.
    """
    users = {
        unit: (name, module)
        for name, module in model.named_modules()  # from the outermost, so that the innermost stays
        if is_foreign(type(module)) and not covers_own_matrices(module)
        for child in module.children()
        for _, unit in cost_units(child)
    }
    if not users:
        return
    rows: Counter[nn.Module] = Counter()

    def add_rows(unit: nn.Module, args: tuple[object, ...], kwargs: dict[str, object], _: object) -> None:
        x = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        rows[unit] += math.prod(x.shape[:-1])

    device = next(model.parameters()).device
    tokens, _, *given = model.cut(*random_batch(model, 2, min(4, model.max_seq_len), device))
    with ExitStack() as restored:
        restored.callback(model.train, model.training)
        for unit in users:
            restored.enter_context(unit.register_forward_hook(add_rows, with_kwargs=True))
        try:
            model.eval()(tokens, None, *given)
        except Exception as error:
            if not tokens.is_meta:
                raise
            name, user = next(iter(users.values()))
            raise ValueError(
                f"{name}: how often {class_name(user)} uses its matrices cannot be found out without data "
                f"({type(error).__name__}: {error}); give it {HOOKS}"
            ) from error
    for unit, (name, user) in users.items():
        if rows[unit] != tokens.numel():
            raise ValueError(
                f"{name}: {class_name(user)} uses a {type(unit).__name__} {rows[unit] / tokens.numel():g} times per "
                f"token, where once is counted; give it {HOOKS}"
            )


def cost_metrics(cost: Cost) -> dict[str, float]:
    """A model's costs under the names that summaries and dashboards use, without states for one that has none."""
    return {STATES.get(name, name): value for name, value in asdict(cost).items() if value is not None}


def state_metrics(cost: Cost) -> dict[str, float]:
    """Bytes of the KV cache and all states; empty for a model that cannot decode with them."""
    return {name: value for name, value in cost_metrics(cost).items() if name.startswith("kv_cache/")}
