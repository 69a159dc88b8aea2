"""The parts of a decoder with settings, shapes and costs, for its picture."""

import inspect
from collections import ChainMap, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from string import ascii_uppercase
from typing import Any

import torch
from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn

from llama_lab.config.components import model_cost
from llama_lab.model import Cost, Decoder
from llama_lab.model.cost import ask, cost_units, count, flops_per_token, reports_cost
from llama_lab.model.encoder import Bert
from llama_lab.model.encoder_decoder import CrossAttention
from llama_lab.model.encoding import Position
from llama_lab.model.init import StackedLinear
from llama_lab.model.mixer import Mixer
from llama_lab.model.tower import Tower
from llama_lab.util import formatting as fmt

from .wiring import UNSEEN, Stage, wiring

# What people call our classes; others go by their own name.
NAMES = {
    "MultiHeadAttention": "Multi-head attention",
    "GroupedQueryAttention": "Grouped-query attention",
    "MultiQueryAttention": "Multi-query attention",
    "LatentAttention": "Latent attention",
    "CrossAttention": "Cross-attention",
    "LinearAttention": "Linear attention",
    "GatedDelta": "Gated delta rule",
    "Mamba2": "Mamba 2",
    "GatedConv": "Gated convolution",
    "FeedForward": "Feed-forward",
    "GatedFeedForward": "Gated feed-forward",
    "ClampedFeedForward": "Clamped feed-forward",
    "MixtureOfExperts": "Mixture of experts",
    "SquaredReLU": "ReLU\u00b2",
    "Identity": "no activation",
    "Rope": "RoPE",
    "Alibi": "ALiBi",
    "RopeAlibi": "RoPE and ALiBi",
    "Learned": "Learned positions",
    "Sinusoidal": "Sinusoids",
    "Relative": "Relative positions",
    "Shaw": "Relative vectors",
    "Embedding": "Token embedding",
    "PreNorm": "Pre-norm block",
    "PostNorm": "Post-norm block",
    "MixerOnly": "Pre-norm block, mixer only",
    "Sandwich": "Sandwich-norm block",
    "Reordered": "Reordered-norm block",
    "Parallel": "Parallel block",
    "ParallelSharedNorm": "Parallel block, shared norm",
}
INITIAL = ("std",)  # settings of the initial weights
MOST_MATRICES = 6  # lines of them in a part


@dataclass(frozen=True)
class Part:
    """A part of a decoder. kind: embedding, position, norm, mixer or ffn, by which it is coloured.

    settings: those that differ from the defaults of its class. shapes: of its matrices. active: parameters that a token
    uses. flops: of one token's forward pass. state: bytes at the context; None if it cannot decode.
    """

    kind: str
    title: str
    settings: str = ""
    shapes: tuple[str, ...] = ()
    params: int = 0
    active: int = 0
    flops: float = 0.0
    state: int | None = 0


@dataclass(frozen=True)
class Layer:
    """A kind of block. parts: by their names in it. own: what belongs to none of them. stages: see `wiring`."""

    title: str
    parts: Mapping[str, Part]
    own: Part
    stages: tuple[Stage, ...] | None


@dataclass(frozen=True)
class Anatomy:
    """A decoder's parts. added: whether the position encoding is added to the embeddings; others act in the mixers.

    layers: each kind of block once, with the numbers of its layers, counted from 1; first the `n_encoder` kinds of an
    encoder, which ends with `encoder_norm`. segments, input_norm, head_transform: of BERT, see `Bert`.
    """

    name: str
    sizes: Mapping[str, int]
    cost: Cost
    embedding: Part
    position: Part | None
    added: bool
    layers: tuple[tuple[Layer, tuple[int, ...]], ...]
    norm: Part | None
    head: Part
    n_encoder: int = 0
    encoder_norm: Part | None = None
    segments: Part | None = None
    input_norm: Part | None = None
    head_transform: Part | None = None

    def differs(self, other: "Anatomy") -> bool:
        """Whether a picture beside another one would mark anything."""
        return replace(self, name="") != replace(other, name="")

    @property
    def order(self) -> str:
        """The kinds of layers in their order: `(A B) × 13`; empty if there is one kind."""
        own = [*enumerate(self.layers)][self.n_encoder :]
        kinds = {n: ascii_uppercase[i % 26] for i, (_, numbers) in own for n in numbers}
        return pattern([kinds[n] for n in sorted(kinds)]) if len(own) > 1 else ""


def anatomy(name: str, model: Decoder, settings: DictConfig) -> Anatomy:
    """The parts of a model that was built, on any device, from the settings `cfg.model`. Raises ConfigError."""
    cost = model_cost(model)
    reader = Reader(model, settings)
    tokens, head = model.embedding.tokens, model.embedding.head
    tied = head.weight is tokens.weight
    embedding = reader.part("embedding", model.embedding, "embedding", without=head)
    position = None
    encodings = [one for tower in reversed(model.towers) for one in tower.encodings]
    if acting := [one for one in encodings if type(one) is not Position]:
        position = reader.part("position", acting[0], "position", *acting[1:])
    *encoders, (layers, norm) = map(reader.tower, model.towers)
    of_encoder, encoder_norm = encoders[0] if encoders else ((), None)
    out = reader.part("embedding.head", head, "embedding")
    found = Anatomy(
        name=name,
        sizes={"dim": model.dim, "context": model.max_seq_len, "vocabulary": model.vocab_size},
        cost=cost,
        embedding=embedding,
        position=position,
        added=type(model.position).embed is not Position.embed,
        layers=(*of_encoder, *layers),
        norm=norm,
        head=replace(out, title="Head, tied to the token table" if tied else "Head"),
        n_encoder=len(of_encoder),
        encoder_norm=encoder_norm,
    )
    if isinstance(model, Bert):
        segments = reader.part("segments", model.segments, "embedding")
        transform, shape = reader.part("head_transform", model.head_transform, "ffn"), f"{model.dim:,} → {model.dim:,}"
        found = replace(
            found,
            segments=replace(segments, title="Segments"),
            input_norm=reader.part("input_norm", model.input_norm, "norm"),
            head_transform=replace(transform, title="Linear, GELU and norm", shapes=(shape,)),
        )
    return found


class Reader:
    """Reads parts off a decoder, and counts every parameter once."""

    def __init__(self, model: Decoder, settings: DictConfig) -> None:
        self.model = model
        self.seen: set[Tensor] = set()
        self.units = cost_units(model)
        config: Any = OmegaConf.to_container(settings, resolve=True)
        self.config: dict[str, Any] = config
        self.settings: Mapping[str, Mapping[str, Any]] = by_class(config)

    def part(
        self, name: str, module: nn.Module, kind: str, *others: nn.Module, without: nn.Module | None = None
    ) -> Part:
        """A module as a part. name: of the module in the decoder. others: whose parameters are the same part's.

        without: a module in it that is a part of its own.
        """
        apart = {} if without is None else dict.fromkeys(without.parameters())
        tables = {p for m in module.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
        found = {p for one in (module, *others) for p in one.parameters() if p not in apart or p in tables}
        fresh = found - self.seen
        self.seen |= fresh
        params = sum(p.numel() for p in fresh)
        inner = "" if without is None else next(f"{name}.{key}" for key, m in module.named_modules() if m is without)
        units = [(key, unit) for key, unit in self.units if belongs(key, name) and not (inner and belongs(key, inner))]
        idle = sum(count(unit) - ask(key, unit, "active_params") for key, unit in units if reports_cost(unit))
        context, state = self.model.max_seq_len, None if isinstance(module, Mixer) else 0
        if isinstance(module, Mixer) and module.has_state and self.model.decodes:
            _, length = self.model.readers(context)[0 if isinstance(module, CrossAttention) else -1]
            state = ask(type(module).__name__, module, "state_bytes", length, torch.bfloat16)
        return Part(
            kind=kind,
            title=NAMES.get(type(module).__name__, type(module).__name__),
            settings=described(module, self.settings.get(type(module).__name__, {})),
            shapes=shapes(module, without),
            params=params,
            active=params - idle,
            flops=flops_per_token(self.model, units, context),
            state=state,
        )

    def tower(self, tower: Tower) -> tuple[Sequence[tuple[Layer, tuple[int, ...]]], Part | None]:
        """Each kind of block of a tower, with the numbers of its layers, and the norm with which it ends."""
        prefix, norm = "" if tower is self.model else "encoder.", tower.norm
        found: dict[str, tuple[Layer, tuple[int, ...]]] = {}
        for i, block in enumerate(tower.blocks):
            layer = self.layer(prefix, tower, i, block)
            _, numbers = found.get(str(layer), (layer, ()))
            found[str(layer)] = (layer, (*numbers, i + 1))
        end = None if norm is None or isinstance(norm, UNSEEN) else self.part(f"{prefix}norm", norm, "norm")
        return [*found.values()], end

    def layer(self, prefix: str, tower: Tower, index: int, block: nn.Module) -> Layer:
        """A block with its children as parts, and what is left of its cost."""
        name = f"{prefix}blocks.{index}"
        others = [by_class(one) for one in self.config.get("layers") or () if index in one["at"]]
        self.settings = ChainMap(*others[::-1], by_class(self.config))
        parts = {}
        for key, child in block.named_children():
            if not isinstance(child, UNSEEN):
                kind = "mixer" if isinstance(child, Mixer) else "norm" if "norm" in key else "ffn"
                parts[key] = self.part(f"{name}.{key}", child, kind)
                if tower is not self.model:  # an encoder reads its text once
                    parts[key] = replace(parts[key], state=0)
                position = tower.encoding_of(index)
                if kind == "mixer" and position is not tower.position:  # as other layers have
                    title = type(position).__name__
                    which = f"{NAMES.get(title, title)} {described(position, self.settings.get(title, {}))}".strip()
                    which = "no positions" if type(position) is Position else which
                    settings = ", ".join(filter(None, (parts[key].settings, which)))
                    parts[key] = replace(parts[key], settings=settings)
        whole, inside = self.part(name, block, "block"), parts.values()
        active = whole.active + sum(part.params - part.active for part in inside)
        own = replace(whole, shapes=(), active=active, flops=whole.flops - sum(part.flops for part in inside))
        return Layer(whole.title, parts, own, wiring(block))


def by_class(config: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The components of a config by the names of their classes."""
    found = [node for node in config.values() if isinstance(node, dict) and "_target_" in node]
    return {str(node["_target_"]).rpartition(".")[2]: node for node in found}


def belongs(name: str, parent: str) -> bool:
    """Whether a module is another one, or in it."""
    return name == parent or name.startswith(f"{parent}.")


def described(module: nn.Module, node: Mapping[str, Any]) -> str:
    """A module's heads, and its settings that are not the defaults of its class: `8 heads of 64, window 128`."""
    heads, kv_heads, width = (getattr(module, key, None) for key in ("n_heads", "n_kv_heads", "head_dim"))
    shared = f", {fmt.count(kv_heads, 'kv head')}" if kv_heads not in (None, heads) else ""
    first = [f"{fmt.count(heads, 'head')}{shared} of {width}"] if heads and width else []
    # No line may break inside a setting.
    return ", ".join(one.replace(" ", "\u00a0") for one in (*first, *changed(node, type(module))))


def changed(node: Mapping[str, Any], kind: Any) -> Iterator[str]:
    """The settings in a node of a config that are not the defaults of its class."""
    bases = reversed(getattr(kind, "__mro__", (kind,)))  # whose settings a class may pass on as **settings
    defaults = {key: one.default for base in bases for key, one in inspect.signature(base).parameters.items()}
    for key, value in node.items():
        if key[0] == "_" or key in INITIAL or value == defaults.get(key, inspect.Parameter.empty):
            continue
        if isinstance(value, dict) and "_target_" in value:
            name = str(value["_target_"]).rpartition(".")[2]
            found = ", ".join(changed(value, get_object(value["_target_"])))
            yield NAMES.get(name, name) + (f" ({found})" if found else "")
        elif isinstance(value, bool):
            yield key if value else f"no {key}"
        else:
            yield f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"


def shapes(module: nn.Module, without: nn.Module | None) -> tuple[str, ...]:
    """The matrices of a module, those of one shape in one line: `key, value 512 → 128`."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for name, p in module.named_parameters():
        owner = module.get_submodule(name.rpartition(".")[0])
        if p.ndim > 1 and owner is not without:
            sizes = [f"{size:,}" for size in p.shape]
            shape = " → ".join(sizes[:-3:-1]) if isinstance(owner, nn.Linear) else f" {fmt.TIMES} ".join(sizes)
            stacked = f"{sizes[0]} {fmt.TIMES} " if isinstance(owner, StackedLinear) else ""
            found[stacked + shape].append(name.removesuffix("weight").removesuffix("."))
    lines = [f"{', '.join(names)} {shape}".strip() for shape, names in found.items()]
    more = [f"and {len(lines) - MOST_MATRICES} more shapes"] if len(lines) > MOST_MATRICES else []
    return (*lines[:MOST_MATRICES], *more)


def pattern(letters: Sequence[str]) -> str:
    """A sequence in short: `(A×5 B) × 4, A×2`."""
    n = len(letters)
    period = next(p for p in range(1, n + 1) if all(letters[i] == letters[i - p] for i in range(p, n)))
    times, rest = divmod(n, period)
    if times == 1:
        return runs(letters)
    return ", ".join([f"({runs(letters[:period])}) {fmt.TIMES} {times}", *([runs(letters[-rest:])] if rest else [])])


def runs(letters: Sequence[str]) -> str:
    """`A×5 B`."""
    counted = [(letter, len([*group])) for letter, group in groupby(letters)]
    return " ".join(letter if n == 1 else f"{letter}{fmt.TIMES}{n}" for letter, n in counted)
