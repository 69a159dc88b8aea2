"""From configs to objects: resolvers, instantiation, errors in users' components."""

import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import product
from pathlib import Path
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any

from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException, InstantiationException
from hydra.utils import get_method, instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from llama_lab.util.errors import ConfigError, RunFailedError, first_line, require_positive, suggestion

from . import CONF_DIR as CONF_DIR
from .composing import options_of, with_options
from .layers import check_depth, different_layers, resolved, written

if TYPE_CHECKING:
    import torch

    from llama_lab.model import Cost, Decoder

TARGET = re.compile(r"\b_target_:\s*['\"]?([\w.]+)")  # in a YAML file
COMMENT = re.compile(r"(^|\s)#.*", re.MULTILINE)
REPORTED = (ConfigError, RunFailedError, HydraException, OmegaConfBaseException)  # cli.py prints these
ROPE, ROPE_ALIBI = "llama_lab.model.position.Rope", "llama_lab.model.position.RopeAlibi"
CONV = "llama_lab.model.convolution.GatedConv"
# Top-level packages of the user's components that were built in this process. By name, since a path would not
# distinguish a user's package from a library.
_components: set[str] = set()


def head_dim(dim: int, n_heads: int) -> int:
    """dim / n_heads; raises ConfigError unless it is whole."""
    for key, value in (("dim", dim), ("n_heads", n_heads)):
        require_positive(f"model.{key}", value, or_null=False)
    if dim % n_heads:
        raise ConfigError(
            f"model.n_heads={n_heads}: does not divide model.dim={dim}; choose a divisor or model.head_dim"
        )
    return dim // n_heads


def ungated_width(dim: int, mlp_ratio: float, share: float = 1.0) -> int:
    """A share of mlp_ratio times dim, to the nearest multiple of 8. Raises ConfigError unless the ratio is positive."""
    if not isinstance(mlp_ratio, int | float) or mlp_ratio <= 0:
        raise ConfigError(f"size.mlp_ratio={mlp_ratio}: must be a positive number")
    return max(8, 8 * round(share * mlp_ratio * dim / 8))


def gated_width(dim: int, mlp_ratio: float) -> int:
    """Two thirds of the ungated width, so that parameters stay equal (Shazeer 2020)."""
    return ungated_width(dim, mlp_ratio, 2 / 3)


def expert_option(own: str, root: DictConfig) -> Any:
    """The part `model` of the config with the option of ffn that the config's key `expert` names, or with `own`.

    Raises ConfigError for one that cannot be an expert.
    """
    option, options = str(root.get("expert") or own), options_of("ffn")
    if option not in options:
        raise ConfigError(f"expert={option}: ffn has no such option{suggestion(option, options)}; choose another")
    cfg = with_options({"ffn": option})
    if "expert" in cfg.model.ffn:
        raise ConfigError(f"expert={option}: has experts itself; choose another option of ffn")
    return written(cfg.model)


def expert(own: str, *, _root_: DictConfig) -> DictConfig:
    """The feed-forward that is an expert of a mixture: that of an option of ffn."""
    node: DictConfig = OmegaConf.create(expert_option(own, _root_)["ffn"], parent=_root_.model)
    return node


def expert_width(own: str, top_k: int, n_shared: int, *, _root_: DictConfig) -> int:
    """The width of experts of which a token uses so many, so that together they are as wide as one of the option."""
    require_positive("model.ffn.top_k", top_k, or_null=False)
    if type(n_shared) is not int or n_shared < 0:
        raise ConfigError(f"model.ffn.n_shared={n_shared}: must be a whole number of at least 0")
    width: int = resolved({"width": expert_option(own, _root_)["hidden_dim"]}, _root_.model)["width"]
    return max(8, 8 * round(width / (top_k + n_shared) / 8))


def first(n: int, n_layers: int) -> str:
    """The first n layers, as a slice; of a model with fewer, all but the last."""
    return f":{min(n, n_layers - 1)}"


def token_signal(std: float, scale: float, norm_input: bool) -> float:
    """Standard deviation of the token embeddings at step 0, to which added position encodings are scaled."""
    return 1.0 if norm_input else std * scale


def deepnorm_scale(n_layers: int) -> float:
    """1 / alpha of DeepNorm's norm(alpha x + f(x)), for decoders (Wang et al. 2022, figure 2)."""
    return float((2 * n_layers) ** -0.25)


def learning_rate(dim: int) -> float:
    """The peak rate of AdamW at the lab's sizes, to two digits; docs/measurements.md says how it was chosen."""
    return float(f"{min(0.012, 0.77 / dim):.2g}")


def unless(setting: object, otherwise: Any) -> Any:
    """`otherwise`, or null if `setting`, which replaces it, is given."""
    return otherwise if setting is None else None


def bias(own: bool, *, _root_: DictConfig) -> bool:
    """Whether there is a bias: what the config's key `bias` says, or an option's own choice where that is null."""
    everywhere: bool | None = _root_.get("bias")
    return own if everywhere is None else everywhere


def every(n: int, n_layers: int) -> str:
    """Every n-th layer, as a slice; of a model with fewer layers, the last one."""
    period = min(n, n_layers)
    return f"{period - 1}::{period}"


RESOLVERS: dict[str, Callable[..., Any]] = {
    "lab.head_dim": head_dim,
    "lab.gated_width": gated_width,
    "lab.ungated_width": ungated_width,
    "lab.expert": expert,
    "lab.expert_width": expert_width,
    "lab.token_signal": token_signal,
    "lab.deepnorm_scale": deepnorm_scale,
    "lab.rate": learning_rate,
    "lab.power": lambda base, exponent: base**exponent,
    "lab.unless": unless,
    "lab.bias": bias,
    "lab.parts": lambda *args: get_method("llama_lab.data.mix.mixture_parts")(*args),  # of a room that builds on this
    "lab.layers": different_layers,
    "lab.every": every,
    "lab.first": first,
    "lab.half": lambda n: n // 2,
    "lab.times": lambda factor, n: factor * n,
}


def register_resolvers() -> None:
    """Register the functions that the configs call. Idempotent."""
    for name, function in RESOLVERS.items():
        OmegaConf.register_new_resolver(name, function, replace=True)


def build(node: DictConfig, path: str, **overrides: Any) -> Any:
    """Instantiate a config node. Raises ConfigError, which begins with the key at fault below `path`."""
    _components.update(package_of(target) for target in users_targets(OmegaConf.to_container(node)).values())
    try:
        return instantiate(node, **overrides)
    except InstantiationException as error:
        cause = error.__cause__
        if isinstance(cause, ConfigError):
            raise cause from None
        place = users_frame(error)
        if isinstance(cause, ValueError) and (place is None or re.match(r"[\w.]+=", str(cause))):
            raise ConfigError(f"{path}.{cause}") from None
        message = " ".join(str(cause or error).split())
        if place:
            message = f"{type(cause).__name__}: {message} ({place})"
        raise ConfigError(f"{path}: cannot be built, {message}; HYDRA_FULL_ERROR=1 shows where") from cause


def build_model(cfg: DictConfig, vocab_size: int, eot_id: int | None = None) -> Any:
    """The decoder that `cfg.model` describes, for a tokenizer of `vocab_size` ids. Raises ConfigError.

    eot_id: the tokenizer's end-of-text token, with which documents start, as `data.document_mask` needs to know, and
    the decoder of an objective that gives it a source.
    """
    wanted = cfg.model.vocab_size
    if wanted is not None and wanted < vocab_size:
        advice = "raise it to at least that, or leave it null to follow the tokenizer"
        raise ConfigError(f"model.vocab_size={wanted}: the tokenizer has {vocab_size} ids; {advice}")
    for key, attention in product(("window", "chunk"), of_layers(cfg.model, "attention")):
        size = attention.get(key)
        if size is not None and size >= cfg.model.max_seq_len:
            length = f"model.max_seq_len={cfg.model.max_seq_len}"
            raise ConfigError(f"model.attention.{key}={size}: hides nothing at {length}; make it smaller, or null")
    masked = "data" in cfg and cfg.data.get("document_mask", False)  # probes have no documents
    if masked and eot_id is None:
        raise ConfigError("data.document_mask=true: documents start with the end-of-text token; give its eot_id")
    start = {"document_start_id": eot_id} if masked else {}
    objective = build(cfg.objective, "objective", tokenizer=None) if cfg.get("objective") else None
    lengths = objective.lengths(cfg.model.max_seq_len) if objective else None
    if lengths and cfg.model.start_id is None:
        start["start_id"] = eot_id
    model = build(cfg.model, "model", vocab_size=wanted or vocab_size, **start)
    if lengths:
        model.divide(*lengths)
    return model


def model_cost(model: "Decoder") -> "Cost":
    """The cost of a model at its context. Raises ConfigError for a component that does not report its own."""
    from llama_lab.model import measure_cost  # torch takes seconds to import

    try:
        return measure_cost(model)
    except ValueError as error:
        raise ConfigError(f"model.{error}") from error


def check_decodes(model: "Decoder", setting: str, otherwise: str, dtype: "torch.dtype | None" = None) -> None:
    """Raise ConfigError unless `model` can decode with a state in `dtype`, as `setting` asks.

    otherwise: what the user can do instead of changing the model.
    """
    try:
        model.new_state(1, 1, dtype)
    except ValueError as error:
        raise ConfigError(f"{setting}: model.{error}, or {otherwise}") from error


def check_idle(model: DictConfig) -> None:
    """Raise ConfigError for settings without an effect, in new runs only."""
    attentions, positions = of_layers(model, "attention"), of_layers(model, "position")
    rotary = any(position.get("_target_") in (ROPE, ROPE_ALIBI) for position in positions)
    is_ours = all(str(position.get("_target_")).startswith("llama_lab.") for position in positions)
    if not rotary and is_ours and any(attention.get("qk_norm_rotated") for attention in attentions):
        problem = "the position encoding rotates nothing; set it to false, or choose position=rope"
        raise ConfigError(f"model.attention.qk_norm_rotated=true: {problem}")
    mixing = [attention.get("value_residual") for attention in attentions]
    if mixing[0] is not None and not any(share is not None for share in mixing[1:]):
        problem = "acts in layers after the first, and none of them has it; set it to null, or add layers that have it"
        raise ConfigError(f"model.attention.value_residual={mixing[0]}: {problem}")


def of_layers(model: DictConfig, part: str) -> list[DictConfig]:
    """A component's node in each layer that has one. Raises ConfigError for more layers than are built."""
    check_depth(model.n_layers)
    nodes = [model[part]] * model.n_layers
    for one in model.get("layers", ()):
        for layer in one["at"] if part in one else ():
            nodes[layer] = one[part]
    return [node for node in nodes if node is not None]  # a block may leave out the feed-forward


def targets(node: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Every `_target_` in a plain container, at any depth, after the key of what it builds."""
    if not isinstance(node, dict | list):
        return
    if isinstance(node, dict) and "_target_" in node:
        yield key, str(node["_target_"])
    for name, child in node.items() if isinstance(node, dict) else enumerate(node):
        yield from targets(child, f"{key}.{name}".lstrip("."))


def users_targets(node: Any) -> dict[str, str]:
    """The `_target_`s of users' packages in a plain container, by key."""
    ours = {package_of(target) for target in packaged_targets()}
    return {key: target for key, target in targets(node) if package_of(target) not in ours}


def package_of(name: str) -> str:
    """The top-level package of a dotted name."""
    return name.partition(".")[0]


@cache
def packaged_targets() -> frozenset[str]:
    """The targets in the packaged configs, and in those of version 0.4.0."""
    return targets_below(CONF_DIR) | {"llama_lab.data.source.StandardLibrary"}


def check_own_options() -> None:
    """Raise ConfigError for an option in a folder of the user's that has the name of a packaged one."""
    hydra = GlobalHydra.instance().hydra
    for source in hydra.config_loader.get_sources() if hydra else []:
        if source.scheme() != "file" or (folder := Path(source.path)) == CONF_DIR:
            continue
        for packaged in CONF_DIR.glob("*/**/*.yaml"):
            if (own := folder / packaged.relative_to(CONF_DIR)).exists():
                raise ConfigError(f"--config-dir: {own} has the name of a packaged option, which is read; rename it")


def targets_below(folder: Path) -> frozenset[str]:
    """The targets in the YAML files below a folder."""
    texts = (COMMENT.sub("", file.read_text(encoding="utf-8")) for file in folder.rglob("*.yaml"))
    return frozenset(target for text in texts for target in TARGET.findall(text))


def users_frame(error: BaseException) -> str | None:
    """The innermost frame of a user's component, `mylab/norm.py:14, in forward`; None if there is none.

    Searches the traceback of `error`, then those of its causes.
    """
    place = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        package = package_of(str(frame.f_globals.get("__name__", "")))
        if package in _components:
            place = place_of(frame.f_code, package, line)
    cause = error.__cause__ or error.__context__
    return place or (users_frame(cause) if cause else None)


def place_of(code: CodeType, package: str, line: int) -> str:
    """The place of code in a package: `mylab/norm.py:14, in forward`."""
    parts = Path(code.co_filename).parts
    begin = len(parts) - 1 - parts[::-1].index(package) if package in parts else -1
    return f"{'/'.join(parts[begin:])}:{line}, in {code.co_name}"


def users_method(component: object, *names: str) -> str | None:
    """The place of the first of these methods that the user defines; None if there is none."""
    for method in (getattr(type(component), name, None) for name in names):
        package = package_of(str(getattr(method, "__module__", "")))
        if package in _components and isinstance(method, FunctionType):
            return place_of(method.__code__, package, method.__code__.co_firstlineno)
    return None


@contextmanager
def report_component_errors() -> Iterator[None]:
    """Context manager: turn an exception in a user's component into a ConfigError with its place; re-raise others."""
    try:
        yield
    except REPORTED:
        raise
    except Exception as error:
        if (place := users_frame(error)) is None:
            raise
        raise ConfigError(f"{place}: {first_line(error)}; fix it, HYDRA_FULL_ERROR=1 shows the traceback") from error
