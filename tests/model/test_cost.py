"""Costs: published parameter counts, FLOPs as PyTorch counts them, and KV-cache bytes, all read off the modules."""

import resource
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode
from transformers import Gemma2Config, Gemma2ForCausalLM, Olmo2Config, Olmo2ForCausalLM, PreTrainedModel

from llama_lab.model import measure_cost
from llama_lab.model.cost import mean_visible_keys
from tests.composing import decoder

PUBLISHED = {
    ("llama", "llama_7b"): 6_738_415_616,
    ("llama2", "llama_7b"): 6_738_415_616,
    ("llama", "llama_13b"): 13_015_864_320,
    ("llama", "llama_33b"): 32_528_943_616,
    ("llama", "llama_65b"): 65_285_660_672,
    ("llama2", "llama2_70b"): 68_976_648_192,
    ("llama3", "llama3_8b"): 8_030_261_248,
    ("llama3", "llama3_70b"): 70_553_706_496,
    ("llama3", "llama3_405b"): 405_853_388_800,
    ("llama3", "llama3_1b", "embedding=tied"): 1_235_814_400,
    ("mistral", "mistral_7b"): 7_241_732_096,
    ("llama2", "tinyllama_1b"): 1_100_048_384,
    ("falcon", "falcon_7b"): 6_921_720_704,
    ("bloom", "bloom_7b"): 7_069_016_064,
    ("gpt2", "gpt2"): 124_439_808,
    ("gpt2", "gpt2_medium"): 354_823_168,
    ("gpt2", "gpt2_large"): 774_030_080,
    ("gpt2", "gpt2_xl"): 1_557_611_200,
    ("gpt_neox", "pythia_70m"): 70_426_624,
    ("gpt_neox", "pythia_160m"): 162_322_944,
    ("gpt_neox", "pythia_410m"): 405_334_016,
    ("gpt_neox", "pythia_1b"): 1_011_781_632,
    ("gpt_neox", "pythia_1b4"): 1_414_647_808,
    ("gpt_neox", "pythia_6b9"): 6_857_302_016,
}


@pytest.mark.parametrize("choice", PUBLISHED, ids="-".join)
def test_published_models_have_their_published_parameters_on_meta(choice: tuple[str, ...]) -> None:
    arch, size, *others = choice
    peak, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    model = decoder(f"arch={arch}", f"size={size}", *others, vocab_size=1, device="meta")
    cost = measure_cost(model)
    assert time.process_time() - start < 2
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 100_000  # KiB
    assert all(t.is_meta for t in (*model.parameters(), *model.buffers()))
    assert cost.params == PUBLISHED[choice]


THEIRS: dict[tuple[str, str], tuple[type[PreTrainedModel], object]] = {
    ("olmo2", "olmo2_7b"): (
        Olmo2ForCausalLM,
        Olmo2Config(
            vocab_size=100352,
            hidden_size=4096,
            intermediate_size=11008,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=32,
        ),
    ),
    ("gemma2", "gemma2_2b"): (
        Gemma2ForCausalLM,
        Gemma2Config(
            vocab_size=256000,
            hidden_size=2304,
            intermediate_size=9216,
            num_hidden_layers=26,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=256,
        ),
    ),
    ("gemma2", "gemma2_9b"): (
        Gemma2ForCausalLM,
        Gemma2Config(
            vocab_size=256000,
            hidden_size=3584,
            intermediate_size=14336,
            num_hidden_layers=42,
            num_attention_heads=16,
            num_key_value_heads=8,
            head_dim=256,
        ),
    ),
}


@pytest.mark.parametrize("choice", THEIRS, ids="-".join)
def test_parameters_equal_transformers(choice: tuple[str, str]) -> None:
    arch, size = choice
    kind, config = THEIRS[choice]
    with torch.device("meta"):
        theirs = kind(config)
    ours = decoder(f"arch={arch}", f"size={size}", vocab_size=1, device="meta")
    assert measure_cost(ours).params == sum(p.numel() for p in theirs.parameters())


def test_embeddings_positions_and_the_head_are_not_counted_as_non_embedding() -> None:
    model = decoder("arch=bloom", "position=learned")  # with a norm on the embeddings, which is
    blocks = sum(p.numel() for p in (*model.blocks.parameters(), *model.norm.parameters()))
    cost = measure_cost(model)
    assert cost.params_non_embedding == blocks + 2 * 32
    assert cost.params == cost.params_non_embedding + 97 * 32 + 32 * 32


COUNTED = {
    "mha": ["attention=mha"],
    "gqa": ["attention=gqa", "model.head_dim=12"],
    "mqa": ["attention=mqa"],
    "ungated, tied": ["ffn=relu", "embedding=tied"],
    "window": ["attention=gqa_window"],
    "gemma2": ["arch=gemma2"],
    "vanilla": ["arch=vanilla"],
    "bloom": ["arch=bloom"],
    "gpt_neox": ["arch=gpt_neox"],
    "olmo2": ["arch=olmo2"],
    "relative": ["position=relative", "attention=gqa"],
    "falcon": ["arch=falcon", "model.n_layers=3"],
}


@pytest.mark.parametrize("case", COUNTED)
def test_dense_flops_are_those_that_pytorch_counts_forward_and_backward(case: str) -> None:
    B, T = 2, 20
    model = decoder(*COUNTED[case], "model.attention.kernel=reference")
    tokens = torch.arange(B * T).view(B, T)
    with FlopCounterMode(display=False) as forward:
        logits = model(tokens)
    dense = measure_cost(model, T).flops_per_token_dense
    assert forward.get_total_flops() == dense * B * T
    # Every product of two matrices has two more in the backward pass, one for either factor: since the embeddings
    # train, no factor is a constant, and training is exactly three forward passes.
    with FlopCounterMode(display=False) as backward:
        logits.sum().backward()
    assert backward.get_total_flops() == 2 * dense * B * T


@pytest.mark.parametrize("window", [None, 5])
def test_flops_count_only_the_keys_that_a_query_sees(window: int | None) -> None:
    T = 20
    model = decoder("attention=gqa", "model.n_layers=3", f"model.attention.window={window or 'null'}")
    cost, width = measure_cost(model, T), 4 * 8
    seen = sum(min(t + 1, window or T) for t in range(T)) / T
    assert cost.flops_per_token_dense - cost.flops_per_token == pytest.approx(3 * 4 * width * (T - seen))
    assert cost.train_flops_per_token == 3 * cost.flops_per_token


@given(st.integers(1, 300), st.integers(1, 300))
def test_mean_visible_keys_equals_brute_force(length: int, window: int) -> None:
    window = min(window, length)  # as `context` has it
    visible = [key for query in range(length) for key in range(length) if 0 <= query - key < window]
    assert mean_visible_keys(length, window) == pytest.approx(len(visible) / length)


@pytest.mark.parametrize(
    ("overrides", "per_token"),
    [
        (["arch=llama", "size=llama_7b"], 524_288),
        (["arch=llama2", "size=llama2_70b"], 327_680),
        (["arch=llama", "size=llama2_70b"], 8 * 327_680),
    ],
)
def test_kv_cache_bytes_are_the_published_ones(overrides: list[str], per_token: int) -> None:
    cost = measure_cost(decoder(*overrides, vocab_size=1, device="meta"), 2048)
    assert cost.kv_bytes_per_token == per_token
    assert cost.kv_bytes == 2048 * per_token
    assert (per_token == 524_288) == (cost.kv_bytes == 2**30)


def test_windows_bound_the_kv_cache_of_their_layers() -> None:
    model = decoder("arch=gemma2", "model.n_layers=4")  # a window of 16 on two of four layers
    cost = measure_cost(model, 32, kv_dtype=torch.float32)
    assert cost.kv_bytes_per_token == 4 * 2 * 2 * 8 * 4
    assert cost.kv_bytes == (2 * 32 + 2 * 16) * 2 * 2 * 8 * 4


def test_costs_are_at_max_seq_len_unless_told() -> None:
    model = decoder()
    assert measure_cost(model) == measure_cost(model, 32)
