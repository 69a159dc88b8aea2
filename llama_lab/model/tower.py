"""A tower of blocks with its positions: what decoders are, and encoders."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

from torch import Tensor, nn

from .attention_context import AttentionContext
from .block import Block
from .encoding import Position
from .mixer import Mixer, class_name, takes
from .norm import Norm
from .state import State


class Tower(nn.Module):
    """Positions, blocks and final norm: embedded tokens to hidden states, both `(B, T, D)`.

    Subclasses first make what comes before the blocks, then call `make_blocks`.
    """

    def make_blocks(
        self,
        sizes: Mapping[str, Any],
        *,
        norm: Norm,
        position: Callable[..., Position],
        attention: Callable[..., Mixer],
        ffn: Callable[..., nn.Module] | None,
        block: Callable[..., Block],
        layers: Sequence[Mapping[str, Any]],
        dropout: float,
        causal: bool = True,
    ) -> None:
        """Make all parts from `sizes`, by name, and the factories; see `Decoder`.

        causal: whether tokens see only earlier ones; position and attention are called with it.
        """
        self.dropout, self.causal = nn.Dropout(dropout), causal
        n_layers, max_seq_len = sizes["n_layers"], sizes["max_seq_len"]
        of_positions = {**sizes, "norm": norm, "causal": causal}
        others = [
            (one["at"], call(one["position"], **of_positions, layers=one["at"])) for one in layers if "position" in one
        ]
        self._positions: dict[int, Position] = {layer: other for at, other in others for layer in at}
        usual = [layer for layer in range(n_layers) if layer not in self._positions]
        self.position: Position = call(position, **of_positions, layers=usual)
        check_positions(self.position, *(other for _, other in others))
        self.other_positions = nn.ModuleList(other for _, other in others)
        self.blocks = nn.ModuleList()
        for layer in range(n_layers):
            own: dict[str, Any] = {"attention": attention, "ffn": ffn, "norm": norm, "block": block, **sizes}
            for one in layers:
                own |= dict(one) if layer in one["at"] else {}
            check_feedforward(layer, own)
            given = {name: own[name] for name in (*sizes, "norm")} | {"layer": layer}
            parts = {"attention": call(own["attention"], **given, causal=causal)}
            parts |= {} if own["ffn"] is None else {"ffn": call(own["ffn"], **given)}
            if not causal and not takes(own["attention"], "causal"):
                raise ValueError(
                    f"attention={class_name(parts['attention'])}: its tokens see only earlier ones, but an encoder's "
                    f"see all; choose softmax attention, such as attention=gqa"
                )
            parts |= {"dim": sizes["dim"], "norm": own["norm"], "dropout": dropout}
            self.blocks.append(self.make_block(own["block"], given, **parts))
        for i, mixer in enumerate(self.mixers):
            if not isinstance(mixer, Mixer):
                raise ValueError(f"attention={class_name(mixer)}: must be a subclass of llama_lab.model.mixer.Mixer")
            mixer.bind_position(self.position_at(i))
        if ended := self.length_error(max_seq_len):
            raise ValueError(f"max_seq_len={max_seq_len}: {ended}; make it smaller, or choose another position")
        for mixer in self.mixers[1:]:
            mixer.bind_first_layer(self.mixers[0])
        self.norm = norm(sizes["dim"]) if self.blocks[-1].final_norm else None

    def make_block(self, block: Callable[..., Block], sizes: Mapping[str, Any], **parts: Any) -> Block:
        """A block of `parts`, by a factory; `sizes` are those of the layer."""
        return block(**parts)

    def transform(self, x: Tensor, context: AttentionContext, states: Sequence[State] | None = None) -> Tensor:
        """Positions, blocks and final norm on embedded tokens `x (B, T, D)`; updates the mixers' `states` in place."""
        x = self.dropout(self.with_positions(x, context.positions))
        for i, block in enumerate(self.blocks):
            x = block(x, context.of(self.position_at(i)), None if states is None else states[i])
        return x if self.norm is None else self.norm(x)

    def with_positions(self, x: Tensor, positions: Tensor) -> Tensor:
        """Embedded tokens `x (B, T, D)` with the encoding of their positions, where it is added."""
        return self.position.embed(x, positions)

    def position_at(self, layer: int) -> Position:
        """The position encoding that acts in a layer, counted from 0."""
        return self.encoding_of(layer).at_layer(layer)

    def encoding_of(self, layer: int) -> Position:
        """The encoding module of a layer, counted from 0; other layers may share it."""
        return self._positions.get(layer, self.position)

    def length_error(self, length: int) -> str:
        """Error message if a position encoding supports fewer than `length` positions; empty if none does."""
        for one in self.encodings:
            if one.max_positions is not None and length > one.max_positions:
                return f"{type(one).__name__.lower()} positions end at {one.max_positions}"
        return ""

    @property
    def encodings(self) -> list[Position]:
        """All position encodings, the default one first."""
        return [self.position, *cast(Iterable[Position], self.other_positions)]

    @property
    def towers(self) -> "list[Tower]":
        """Those of the model, from the first; see `readers`."""
        return [tower for tower, _ in self.readers(0)]

    def readers(self, length: int) -> "list[tuple[Tower, int]]":
        """The towers of the model, each with the tokens that it reads of a window of `length`; this one alone."""
        return [(self, length)]

    @property
    def all_blocks(self) -> list[Block]:
        """The blocks of all towers, from the first."""
        return [cast(Block, block) for tower in self.towers for block in tower.blocks]

    @property
    def mixers(self) -> list[Mixer]:
        """The mixer of each block, from the first."""
        return [cast(Block, block).attention for block in self.blocks]

    @property
    def feedforwards(self) -> list[nn.Module | None]:
        """The feed-forward of each block, from the first; None where there is none."""
        return [cast(Block, block).ffn for block in self.blocks]


def check_feedforward(layer: int, own: Mapping[str, Any]) -> None:
    """Raise ValueError unless a layer has a feed-forward and its width if its block takes one, and else neither."""
    needed = takes(own["block"], "ffn")
    for name in ("ffn", "hidden_dim"):
        if needed and own[name] is None:
            raise ValueError(f"{name}=null: the block of layer {layer} has a feed-forward; give the layer {name}, too")
        if not needed and own[name] is not None:
            raise ValueError(f"{name}: the block of layer {layer} has no feed-forward; leave {name} out")


def call(factory: Callable[..., Any], **sizes: Any) -> Any:
    """Call `factory` with those of `sizes` that it accepts and that are not set already."""
    return factory(**{name: size for name, size in sizes.items() if takes(factory, name)})


def check_positions(usual: Position, *others: Position) -> None:
    """Raise ValueError if layers have different encodings and one of them is added to the embeddings."""
    for one in (usual, *others) if others else ():
        if type(one).embed is not Position.embed:
            raise ValueError(
                f"layers: {type(one).__name__} positions are added to the embeddings, before all layers, which cannot "
                f"differ in them; choose rope, alibi, relative, shaw or none"
            )
