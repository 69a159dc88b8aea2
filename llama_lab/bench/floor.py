"""The floor of the time per token: the bytes that must be read for it, divided by the bandwidth.

There are two floors: one at the bandwidth of a buffer far larger than the processor's caches, and one at that of a
buffer as large as the weights, since a small model may stay in a cache. A program may be faster than the first.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from llama_lab.model import Decoder, measure_cost
from llama_lab.timing import Timing

from .subjects import Preset


@dataclass(frozen=True)
class Floor:
    """The least time per token. reading: the timing of a buffer of `buffer_bytes`, which gives the bandwidth."""

    name: str
    bytes_per_token: float
    buffer_bytes: int
    reading: Timing

    @property
    def bytes_per_second(self) -> float:
        """The bandwidth in the fastest round."""
        return self.buffer_bytes / self.reading.low

    @property
    def seconds(self) -> float:
        """Seconds per token."""
        return self.bytes_per_token / self.bytes_per_second

    def share(self, seconds: float) -> float:
        """The speed at `seconds` per token as a fraction of the floor's."""
        return self.seconds / seconds


def buffers(model: Decoder, preset: Preset) -> dict[str, int]:
    """Bytes of the buffers that measure the bandwidth, by the names of their floors."""
    return {"memory floor": preset.buffer_bytes, "cache floor": weight_bytes(model)}


def reading(n_bytes: int, device: torch.device) -> Callable[[], object]:
    """A function that reads a float32 buffer of `n_bytes` by summing it with all of PyTorch's threads."""
    return torch.ones(n_bytes // 4, device=device).sum


def floors_of(model: Decoder, preset: Preset, readings: Mapping[str, Timing]) -> list[Floor]:
    """The floors. readings: the timing of reading each of `buffers`."""
    per_token = weight_bytes(model) + cache_bytes(model, preset.prompt, preset.new_tokens)
    return [Floor(name, per_token, n, readings[name]) for name, n in buffers(model, preset).items()]


def weight_bytes(model: Decoder) -> int:
    """Bytes of the weights read for a token: all of blocks, norms and head, and one row of the token table.

    A tied table is the head, and read as a whole. Assumes position encodings without a table, such as RoPE.
    """
    table, head = model.embedding.tokens.weight, model.embedding.head.weight
    whole = sum(p.nbytes for p in model.parameters() if p is not table or p is head)
    return whole + table[0].nbytes


def cache_bytes(model: Decoder, prompt: int, new_tokens: int) -> float:
    """Bytes of keys and values read for a token, averaged over `new_tokens` after `prompt` tokens.

    The i-th new token, from 0, attends to the keys and values of `prompt + i` tokens.
    """
    cost = measure_cost(model, kv_dtype=model.embedding.tokens.weight.dtype)
    assert cost.kv_bytes_per_token is not None  # the peers are all of attention
    return cost.kv_bytes_per_token * (prompt + (new_tokens - 1) / 2)
