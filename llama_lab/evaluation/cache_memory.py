"""Memory of a model's KV cache, by formula and measured, and the loss that its rounding costs."""

import itertools
import math
from collections.abc import Iterable, Sequence

import torch

from llama_lab.data.dataset import Validation
from llama_lab.data.objectives import Objective
from llama_lab.model import Decoder
from llama_lab.model.cost import ask_mixers
from llama_lab.runs.evaluation import CacheLoss, CacheSize

from .lengths import sums_by_position


def cache_dtypes(model: Decoder) -> list[torch.dtype]:
    """bfloat16, in which costs are given everywhere; the model's dtype; and int8 if all mixers support it."""
    dtypes = dict.fromkeys((torch.bfloat16, model.embedding.tokens.weight.dtype, torch.int8))
    has_int8 = len(model.towers) == 1 and all(mixer.int8_state for mixer in model.mixers)
    return [d for d in dtypes if d != torch.int8 or has_int8]


def cache_sizes(model: Decoder, batch_sizes: Sequence[int], contexts: Sequence[int]) -> list[CacheSize]:
    """The bytes of a cache of each dtype for each batch and context, measured once it holds so many tokens.

    Of an encoder-decoder, and as many of a source.
    """
    device, sizes = model.embedding.tokens.weight.device, []
    on_cuda = device.type == "cuda"
    for dtype, batch_size, context in itertools.product(cache_dtypes(model), batch_sizes, contexts):
        before = torch.cuda.memory_allocated(device) if on_cuda else 0
        cache = model.new_state(batch_size, context, dtype)
        allocated = torch.cuda.memory_allocated(device) - before if on_cuda else None
        tokens = torch.zeros(batch_size, context, dtype=torch.int64, device=device)
        model.hidden_states(tokens, cache, *(tokens for _ in model.towers[1:]))
        storages = {x.untyped_storage() for layer in cache.layers for x in layer.tensors}
        state, formula = (batch_size * ask_mixers(model, "state_bytes", tokens, dtype) for tokens in (0, context))
        source = batch_size * (model.source_bytes(context, dtype) or 0)
        measured = sum(storage.nbytes() for storage in storages)
        sizes.append(
            CacheSize(batch_size, context, name_of(dtype), formula + source, measured, allocated, state, source)
        )
        del cache  # before the next one is allocated
    return sizes


def cache_losses(
    model: Decoder, parts: Iterable[Validation], batch_tokens: int, objective: Objective
) -> list[CacheLoss]:
    """The loss in windows of the trained length through a cache of each dtype."""
    found = []
    for dtype in cache_dtypes(model):
        nll, counts, _ = sums_by_position(model, parts, model.max_seq_len, batch_tokens, objective, dtype)
        loss = float(nll.sum() / counts.sum())
        found.append(CacheLoss(name_of(dtype), loss if math.isfinite(loss) else None))
    return found


def name_of(dtype: torch.dtype) -> str:
    """`bfloat16` of torch.bfloat16."""
    return str(dtype).removeprefix("torch.")
