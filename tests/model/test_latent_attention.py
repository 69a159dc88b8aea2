"""Latent attention, which is DeepSeek's by test_parity.py: a cache of one latent and one rotated key per token."""

import pytest
import torch

from llama_lab.model import measure_cost
from llama_lab.model.latent_attention import LatentAttention
from tests.composing import decoder
from tests.model.cases import LENGTH

TOKENS = torch.randint(97, (2, LENGTH), generator=torch.Generator().manual_seed(1))


def test_no_key_crosses_a_border_of_documents() -> None:
    model = decoder("attention=mla", "data.document_mask=true")
    tokens = torch.tensor([[3, 4, 5, 0, 6, 7]])  # 0 starts a document
    torch.testing.assert_close(model(tokens)[:, 3:], model(tokens[:, 3:]))


def test_the_cache_holds_a_latent_and_a_rotated_key_per_token_and_layer() -> None:
    model = decoder("attention=mla", "model.attention.kv_rank=12", "model.head_dim=8", "model.n_layers=3")
    cost = measure_cost(model, LENGTH, torch.bfloat16)
    assert cost.kv_bytes_per_token == 3 * (12 + 8) * 2
    assert cost.kv_bytes == LENGTH * cost.kv_bytes_per_token == model.new_state(1, LENGTH, torch.bfloat16).nbytes
    with pytest.raises(ValueError, match="LatentAttention cannot keep its state in int8"):
        model.new_state(1, LENGTH, torch.int8)


def test_published_sizes_have_the_published_cache_and_parameters() -> None:
    """DeepSeek-V2 (section 3.1.2): of each layer, 512 + 64 elements per token; its attention has 187 M parameters."""
    sizes = {"dim": 5120, "n_heads": 128, "n_kv_heads": 128, "head_dim": 64, "norm": torch.nn.RMSNorm}
    with torch.device("meta"):
        mixer = LatentAttention(**sizes, kv_rank=512, query_rank=1536, nope_dim=128, value_dim=128)
    assert mixer.state_bytes_per_token(torch.bfloat16) == 2 * 576
    down, up = 5120 * (1536 + 512 + 64), 1536 * 128 * 192 + 512 * 128 * 256
    assert sum(p.numel() for p in mixer.parameters()) == down + up + 128 * 128 * 5120 + 1536 + 512
