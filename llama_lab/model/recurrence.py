"""Linear recurrences with a matrix `S` as state, computed in chunks: state spaces, linear attention, the delta rule.

    S_t = diag(exp g_t) S_{t-1} + k_t v_t^T                                 (Mamba 2: Dao & Gu 2024, eq. 16)
    S_t = (1 - b_t k_t k_t^T) diag(exp g_t) S_{t-1} + b_t k_t v_t^T          (with the delta rule)
    o_t = S_t^T q_t

g is a number per head (gated DeltaNet: Yang et al. 2024, eq. 10) or per channel of the key (Kimi Linear, eq. 1). Within
a chunk all pairs of tokens are computed at once, and the state is carried from chunk to chunk. Decays are multiplied
as exp(g_j+1 + ... + g_i), never divided by each other, so that strong ones stay finite.
"""

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor


def recur(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor | None,
    state: Tensor,
    starts: Tensor | None = None,
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor]:
    """The outputs `(B, H, T, Dv)` and the last state `(B, H, Dk, Dv)`, in float32 or better.

    `query` and `key (B, H, T, Dk)`, `value (B, H, T, Dv)`, `decay` g `(B, H, T, Dk)` or `(B, H, T, 1)`, `state` S_0.
    `beta (B, H, T, 1)`: of the delta rule; None: without. `starts (B, T)` or `(1, T)`: where documents start, before
    which the state is emptied; None: nowhere.
    """
    kind = torch.promote_types(value.dtype, torch.float32)
    with nullcontext() if value.is_meta else torch.autocast(value.device.type, enabled=False):
        T = value.shape[2]
        size = min(chunk_size, T)
        query, key, value, decay = (in_chunks(x.to(kind), size) for x in (query, key, value, decay))
        age = decay.cumsum(-2)  # (B, H, N, C, Dk or 1): log of what is left of the state before the chunk
        document = torch.zeros(1, 1, *age.shape[2:4], dtype=torch.long, device=age.device)
        if starts is not None:
            document = in_chunks(starts[:, None, :, None].long(), size)[..., 0].cumsum(-1)
        carried = age.exp() * (document == 0)[..., None]
        kept = (age[..., -1:, :] - age).exp() * (document == document[..., -1:])[..., None]
        is_seen = (document[..., None] == document[..., None, :]).tril()
        pairs = age[..., :, None, :] - age[..., None, :, :]
        left = pairs.masked_fill(~is_seen[..., None], -torch.inf).exp()  # (B, H, N, C, C, Dk or 1)
        scores = decayed_products(query, key, left)
        writes, corrections = value.unbind(2), None
        if beta is not None:
            beta = in_chunks(beta.to(kind), size)
            weighted = beta * key
            ties = decayed_products(weighted, key, left)  # of which only what is below the diagonal is read
            right = torch.cat((beta * value, weighted * carried), -1)
            # transposed, as LAPACK has matrices, or else each would be copied
            solved = torch.linalg.solve_triangular(ties.mT, right.mT, upper=True, left=False, unitriangular=True).mT
            writes, corrections = (x.unbind(2) for x in solved.split((value.shape[-1], key.shape[-1]), -1))
        outputs, state = [], state.to(kind)
        parts = (x.unbind(2) for x in (query * carried, scores, key * kept, carried[..., -1, :, None]))
        for n, (read, score, end, share) in enumerate(zip(*parts, strict=True)):
            write = writes[n] if corrections is None else writes[n] - corrections[n] @ state
            outputs.append(read @ state + score @ write)
            state = share * state + end.mT @ write
        return torch.cat(outputs, 2)[:, :, :T], state


def in_chunks(x: Tensor, size: int) -> Tensor:
    """Cut `x (B, H, T, D)` to `(B, H, N, size, D)`, filled up with zeros, which leave a state as it is."""
    if missing := -x.shape[2] % size:  # or else it would be copied for nothing
        x = F.pad(x, (0, 0, 0, missing))
    return x.reshape(*x.shape[:2], -1, size, x.shape[3])


def decayed_products(rows: Tensor, columns: Tensor, left: Tensor) -> Tensor:
    """The products `(..., C, C)` of `rows` and `columns (..., C, D)`, of which `(..., C, C, D or 1)` is left."""
    if left.shape[-1] == 1:
        return rows @ columns.mT * left[..., 0]
    return (rows[..., :, None, :] * columns[..., None, :, :] * left).sum(-1)


def recurrence_flops(key_dim: int, value_dim: int, delta: bool) -> int:
    """FLOPs per token and head of the recurrence: a write, a read, and with the delta rule one more read."""
    return (6 if delta else 4) * key_dim * value_dim


def chunked_flops(key_dim: int, value_dim: int, delta: bool, seq_len: int, chunk_size: int) -> float:
    """FLOPs per token and head of `recur`, for `seq_len` tokens."""
    size = min(chunk_size, seq_len)
    padded = -(-seq_len // size) * size / seq_len
    pairs = 2 * size * (key_dim + value_dim)
    solve = size * (key_dim + value_dim) + 2 * size * key_dim if delta else 0
    return padded * (pairs + solve + recurrence_flops(key_dim, value_dim, delta))
