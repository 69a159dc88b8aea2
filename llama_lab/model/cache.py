"""Key-value caches for generation: preallocated, one per layer, a ring where attention has a window."""

import torch
from torch import Tensor


class LayerCache:
    """Keys and values of one layer: two tensors `(B, n_kv_heads, S, Dh)`, where S slots hold the last S positions.

    Without a window S is the whole context; with one S is the window, and position p lives in slot p mod S.
    """

    def __init__(
        self,
        batch_size: int,
        n_kv_heads: int,
        slots: int,
        head_dim: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        shape = (batch_size, n_kv_heads, slots, head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self.positions = torch.full((slots,), -1, device=device)

    @property
    def nbytes(self) -> int:
        """Bytes that keys and values take."""
        return self.keys.nbytes + self.values.nbytes

    def update(self, keys: Tensor, values: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Add `keys, values (B, Hkv, T, Dh)` at `positions (T,)`; return all that a query may look at, and where it is.

        The returned keys and values are `(B, Hkv, S + T, Dh)` and their positions `(S + T,)`, -1 marking empty slots:
        the slots as they were before, then the new tokens, since a ring would overwrite what the first of them may see.
        """
        seen = (
            torch.cat((self.keys, keys.type_as(self.keys)), 2),
            torch.cat((self.values, values.type_as(self.values)), 2),
            torch.cat((self.positions, positions)),
        )
        kept = positions[-self.positions.shape[0] :]
        slots = kept % self.positions.shape[0]
        self.keys[:, :, slots] = keys[:, :, -kept.shape[0] :].type_as(self.keys)
        self.values[:, :, slots] = values[:, :, -kept.shape[0] :].type_as(self.values)
        self.positions[slots] = kept
        return seen


class KVCache:
    """The caches of all layers, how many tokens they have seen, and how many they are for."""

    def __init__(self, layers: list[LayerCache], context: int) -> None:
        self.layers = layers
        self.context = context
        self.length = 0

    @property
    def nbytes(self) -> int:
        """Bytes that all keys and values take."""
        return sum(layer.nbytes for layer in self.layers)
