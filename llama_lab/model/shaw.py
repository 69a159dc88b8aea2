"""Trained vectors for distances, added to keys and values: the first relative positions (Shaw et al. 2018)."""

from collections.abc import Sequence

from torch import Tensor, nn

from .encoding import Position, Relation
from .init import Table, check_positive


class Shaw(Position):
    """A vector for every distance up to `clip`, which is also that of all beyond, added to the key that a query sees.

    Another is added to its value (Shaw et al. 2018, eq. 3 and 4). Each layer has its own, and each head with `per_head`
    (section 4.1); `values=False` leaves those of the values out (section 4.3). Attention must be written out. An
    encoder, which is not `causal`, has more vectors, for keys after the query.
    """

    def __init__(
        self,
        n_heads: int,
        head_dim: int,
        layers: Sequence[int],
        clip: int = 16,
        per_head: bool = True,
        values: bool = True,
        std: float = 0.02,
        causal: bool = True,
    ) -> None:
        super().__init__()
        check_positive("position.clip", clip)
        check_positive("position.std", std)
        self.layers = nn.ModuleDict(
            {str(layer): ShawVectors(n_heads, head_dim, clip, per_head, values, std, causal) for layer in layers}
        )

    def at_layer(self, layer: int) -> Position:
        """The vectors of a layer."""
        return self.layers[str(layer)]  # type: ignore[return-value]


class ShawVectors(Position):
    """Those of one layer, R = clip + 1, or 2 clip + 1 in an encoder; arguments as of `Shaw`."""

    def __init__(
        self, n_heads: int, head_dim: int, clip: int, per_head: bool, values: bool, std: float, causal: bool
    ) -> None:
        super().__init__()
        self.n_heads, self.n_tables = n_heads, n_heads if per_head else 1
        self.reach = (0 if causal else -clip, clip)
        rows = 1 + clip - self.reach[0]
        self.keys = Table(rows, self.n_tables * head_dim, std)
        self.values = Table(rows, self.n_tables * head_dim, std) if values else None

    def relation(self, query_positions: Tensor, key_positions: Tensor) -> Relation:
        """The vectors, `(H or 1, R, Dh)`; keys after the query, if masked or in a prefix, have row 0, else the last."""
        distance = query_positions[..., :, None] - key_positions[..., None, :]
        rows = distance.clamp(*self.reach) % self.keys.num_embeddings
        return Relation(rows, self.of_heads(self.keys), None if self.values is None else self.of_heads(self.values))

    def of_heads(self, table: Table) -> Tensor:
        """A table as `(H or 1, R, Dh)`."""
        return table.weight.view(table.num_embeddings, self.n_tables, -1).transpose(0, 1)

    def flops_per_token(self, seq_len: int) -> float:
        """Forward FLOPs per token: every head's query times all vectors, and its weights of all, as in section 3.3."""
        return 2 * self.active_params() * self.n_heads // self.n_tables

    def active_params(self) -> int:
        """All parameters."""
        return sum(p.numel() for p in self.parameters())
