"""Latent attention: DeepSeek's, with a cache of one latent and one rotated key per token."""

import pytest
import torch
from torch import Tensor

from llama_lab.hf import llama_families
from llama_lab.model import Decoder, measure_cost
from llama_lab.model.latent_attention import LatentAttention
from tests.composing import decoder, lively, options
from tests.model import test_parity as parity

RANK, QUERY_RANK, NOPE, ROPE, VALUE = 20, 28, 12, 8, 10
LENGTH = 24
TOKENS = torch.randint(97, (2, LENGTH), generator=torch.Generator().manual_seed(1))


def deepseek(query_rank: int | None) -> parity.Family:
    """DeepSeek-V3 without experts; V2 has the same attention."""
    sizes = {"kv_rank": RANK, "query_rank": query_rank or "null", "nope_dim": NOPE, "value_dim": VALUE}
    return parity.Family(
        parity.theirs(
            "deepseek_v3",
            parity.GATED_ALL_HEADS | {"num_key_value_heads": parity.HEADS},
            first_k_dense_replace=parity.LAYERS,
            kv_lora_rank=RANK,
            q_lora_rank=query_rank,
            qk_nope_head_dim=NOPE,
            qk_rope_head_dim=ROPE,
            v_head_dim=VALUE,
            rms_norm_eps=1e-3,
        ),
        [
            *("arch=llama", "attention=mla", "norm=rmsnorm", "model.norm.eps=1e-3"),
            *(f"model.attention.{key}={size}" for key, size in sizes.items()),
            *(f"model.head_dim={ROPE}", "model.attention.latent_eps=1e-6", "model.position.interleaved=true"),
        ],
        llama_families.DEEPSEEK_V3,
        near_misses=["model.position.interleaved=false", "model.attention.latent_eps=null"],
    )


@pytest.mark.parametrize("query_rank", [None, QUERY_RANK])
def test_logits_gradients_and_cached_decoding_are_deepseeks(query_rank: int | None) -> None:
    family = deepseek(query_rank)
    expected = parity.their_logits(family, TOKENS)
    assert expected.std() > 0.5
    for kernel in ("sdpa", "reference"):
        model = parity.our_model(family, f"model.attention.kernel={kernel}")
        logits = model(TOKENS)
        assert parity.largest_difference(logits, expected) <= parity.TOLERANCE
        assert parity.largest_difference(in_pieces(model, [10, 3]), expected) <= parity.TOLERANCE
    parity.assert_same_gradients(family, model, logits, expected, TOKENS)
    missed = parity.our_model(family, "model.position.interleaved=false")(TOKENS)
    assert parity.largest_difference(missed, expected) > parity.NOTICED


@torch.no_grad()
def in_pieces(model: Decoder, sizes: list[int], dtype: torch.dtype | None = None) -> Tensor:
    """Logits of the tokens, read in pieces of these sizes and then one by one."""
    cache = model.new_state(len(TOKENS), LENGTH, dtype)
    ends = [1] * (LENGTH - sum(sizes))
    return torch.cat([model(piece, cache) for piece in TOKENS.split([*sizes, *ends], 1)], 1)


@pytest.mark.parametrize("kernel", ["sdpa", "reference"])
@pytest.mark.parametrize("position", [option for option in options("position") if option != "shaw"])
@torch.no_grad()
def test_cached_decoding_equals_the_full_forward(position: str, kernel: str) -> None:
    sizes = ("model.attention.value_dim=20", "model.attention.kv_rank=12", "model.attention.scale=0.5")
    steps = ("attention=mla_step_temperature", "model.attention.temperature.step=4")
    model = lively(*steps, *sizes, f"position={position}", f"model.attention.kernel={kernel}")
    torch.testing.assert_close(in_pieces(model, [7, 1, 5]), model(TOKENS), rtol=1e-4, atol=1e-4)


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


@torch.no_grad()
def test_a_cache_in_bfloat16_rounds_little() -> None:
    model = lively("attention=mla")
    full = model(TOKENS)
    assert (in_pieces(model, [9], torch.bfloat16) - full).abs().max() < 0.1 * full.std()


def test_published_sizes_have_the_published_cache_and_parameters() -> None:
    """DeepSeek-V2 (section 3.1.2): of each layer, 512 + 64 elements per token; its attention has 187 M parameters."""
    sizes = {"dim": 5120, "n_heads": 128, "n_kv_heads": 128, "head_dim": 64, "norm": torch.nn.RMSNorm}
    with torch.device("meta"):
        mixer = LatentAttention(**sizes, kv_rank=512, query_rank=1536, nope_dim=128, value_dim=128)
    assert mixer.state_bytes_per_token(torch.bfloat16) == 2 * 576
    down, up = 5120 * (1536 + 512 + 64), 1536 * 128 * 192 + 512 * 128 * 256
    assert sum(p.numel() for p in mixer.parameters()) == down + up + 128 * 128 * 5120 + 1536 + 512
