"""Costs: published parameter counts, FLOPs as PyTorch counts them, and KV-cache bytes, all read off the modules."""

import resource
import time
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from llama_lab.model import measure_cost
from llama_lab.model.attention import GroupedQueryAttention
from tests.composing import decoder
from tests.model.cases import PATTERNS, VARIANTS, model_with

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
    ("bert", "bert_base"): 109_514_298,
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
    ("olmo2", "olmo2_7b"): 7_298_617_344,
    ("gemma2", "gemma2_2b"): 2_614_341_888,
    ("gemma2", "gemma2_9b"): 9_241_705_984,
    ("mixtral", "mixtral_8x7b"): 46_702_792_704,
    ("olmoe", "olmoe_7b"): 6_919_161_856,
    ("qwen3_moe", "qwen3_30b"): 30_532_122_624,
    ("deepseek_v3", "deepseek_v3_671b"): 671_026_404_352,
    ("gpt_oss", "gpt_oss_20b"): 20_914_757_184,
    ("qwen3_5", "qwen3_5_9b"): 8_953_803_264,
    ("olmo_hybrid", "olmo_hybrid_7b"): 7_430_870_688,
    ("kimi_linear", "kimi_linear_48b", "pattern.attention.at=[3,7,11,15,19,23,26]"): 49_122_675_072,
    ("lfm2", "lfm2_1b2", "pattern.attention.at=[2,5,8,10,12,14]"): 1_170_340_608,
    ("qwen3_next", "qwen3_next_80b"): 79_674_391_296,
    ("mamba2", "mamba2_130m"): 128_989_632,
    ("bamba", "bamba_9b"): 9_780_235_392,
}
# Of one token, the token table included
ACTIVE = {
    "mixtral_8x7b": 12_879_925_248,
    "olmoe_7b": 1_282_017_280,
    "qwen3_30b": 3_353_032_704,
    "deepseek_v3_671b": 37_552_282_624,
    "gpt_oss_20b": 4_187_440_704,
    "kimi_linear_48b": 3_484_453_248,
    "qwen3_next_80b": 3_874_929_408,
}


# One for each kind of layer, head and table; of the others, numbers differ
KINDS = ["llama3_8b", "gpt2", "bert_base", "gemma2_2b", "mixtral_8x7b", "qwen3_5_9b", "lfm2_1b2", "mamba2_130m"]
QUICK = [choice for choice in PUBLISHED if choice[1] in KINDS]
OTHERS = [pytest.param(choice, marks=pytest.mark.matrix) for choice in PUBLISHED if choice not in QUICK]


@pytest.mark.parametrize("choice", [*QUICK, *OTHERS], ids="-".join)
def test_published_models_have_their_published_parameters_on_meta(choice: tuple[str, ...]) -> None:
    arch, size, *others = choice
    peak, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    model = decoder(f"arch={arch}", f"size={size}", *others, vocab_size=1, device="meta")
    cost = measure_cost(model)
    assert time.process_time() - start < 20  # seconds; to draw the weights of the largest would take hours
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 100_000  # KiB
    assert all(t.is_meta for t in (*model.parameters(), *model.buffers()))
    assert cost.params == PUBLISHED[choice]
    assert cost.params_active == ACTIVE.get(size, cost.params)


def test_embeddings_positions_and_the_head_are_not_counted_as_non_embedding() -> None:
    model = decoder("arch=bloom", "position=learned")  # with a norm on the embeddings, which is
    blocks = sum(p.numel() for p in (*model.blocks.parameters(), *model.norm.parameters()))
    cost = measure_cost(model)
    assert cost.params_non_embedding == blocks + 2 * 32
    assert cost.params == cost.params_non_embedding + 97 * 32 + 32 * 32


COUNTED = [
    # without the gradients of depthwise convolutions, in which PyTorch's counter takes all channels for each
    *(VARIANTS[variant] for variant in ("window", "chunk", "gemma2", "qk norm", "gate and values", "sinks")),
    *(PATTERNS[pattern] for pattern in ("global", "biases by layer", "explicit", "blocks")),
    *((f"arch={arch}",) for arch in ("gemma2", "vanilla", "bloom")),
    ("arch=falcon", "model.n_layers=3"),
    ("attention=gqa", "model.head_dim=12", "ffn=relu", "embedding=tied"),
    ("attention=mla", "model.attention.query_rank=10", "model.attention.value_dim=5"),
    ("position=shaw", "attention=gqa", "model.position.clip=5"),
    ("position=shaw", "model.position.per_head=false", "model.position.values=false"),
    ("attention=mha_log_temperature", "model.attention.qk_norm=head", "position=rope_alibi"),
    ("model.block.learned_scale=true", "model.embedding.logit_scale=0.5"),
]


@pytest.mark.parametrize("overrides", COUNTED, ids=" ".join)
def test_dense_flops_are_those_that_pytorch_counts_forward_and_backward(overrides: tuple[str, ...]) -> None:
    B, T = 2, 20
    model = decoder(*overrides, "model.attention.kernel=reference")
    with FlopCounterMode(display=False) as forward:
        logits = model(torch.arange(B * T).view(B, T))
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


def test_kv_cache_bytes_are_the_published_ones() -> None:
    cost = measure_cost(decoder("arch=llama2", "size=llama2_70b", vocab_size=1, device="meta"), 2048)
    assert cost.kv_bytes_per_token == 327_680
    assert cost.kv_bytes == 2048 * 327_680


GQA = ("attention=gqa", "model.n_kv_heads=2")


class Experts(nn.Module):
    """A mixture of experts of which each token uses one, as a user may write it."""

    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.router = nn.Linear(dim, 4, bias=False)
        self.up = nn.ModuleList(nn.Linear(dim, hidden_dim, bias=False) for _ in range(4))
        self.down = nn.ModuleList(nn.Linear(hidden_dim, dim, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen, out = self.router(x).argmax(-1), torch.zeros_like(x)
        for i, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
            out[chosen == i] = down(up(x[chosen == i]).relu())
        return out


class CountedExperts(Experts):
    """The same, which says what it costs."""

    def active_params(self) -> int:
        return sum(p.numel() for p in (self.router.weight, self.up[0].weight, self.down[0].weight))

    def flops_per_token(self, seq_len: int) -> float:
        return 2 * self.active_params()


class BareMatrix(nn.Module):
    """A feed-forward without nn.Linear."""

    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.zeros(dim, dim))

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.matrix)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.matrix


class Twice(nn.Module):
    """A feed-forward that uses its matrix twice."""

    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.linear(x))


class AddedMatrix(GroupedQueryAttention):
    """Attention with a matrix that the inherited answer knows nothing of."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.gain = nn.Parameter(torch.zeros(self.n_heads, self.head_dim))

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.gain)


def test_half_of_the_two_methods_is_refused_inside_of_a_module_that_has_both_too() -> None:
    model = model_with(*GQA, ffn=CountedExperts)
    model.blocks[0].ffn.router.flops_per_token = lambda seq_len: 0
    with pytest.raises(ValueError, match=r"^blocks\.0\.ffn\.router: \S+ has flops_per_token\(seq_len\) alone; "):
        measure_cost(model)


def test_a_mixture_of_experts_counts_what_a_token_uses() -> None:
    model, usual = model_with(*GQA, ffn=CountedExperts), decoder(*GQA)
    cost, plain, experts = measure_cost(model), measure_cost(usual), [block.ffn for block in model.blocks]
    idle = sum(3 * (e.up[0].weight.numel() + e.down[0].weight.numel()) for e in experts)
    assert cost.params == sum(p.numel() for p in model.parameters())
    assert cost.params_active == cost.params - idle
    with FlopCounterMode(display=False) as counter:
        experts[0](torch.randn(1, 64, experts[0].router.in_features))
    assert experts[0].flops_per_token(64) == counter.get_total_flops() / 64
    ours, theirs = (sum(2 * p.numel() for p in m.blocks.parameters() if p.ndim == 2) for m in (usual, model))
    assert cost.flops_per_token - plain.flops_per_token == theirs - 2 * idle - ours


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    ("slot", "component", "told"),
    [
        ("ffn", Experts, "(uses a Linear .* per token|uses its matrices cannot be found out)"),
        ("ffn", BareMatrix, r"has matrices outside of nn\.Linear"),
        ("ffn", Twice, "uses a Linear 2 times per token"),
        ("attention", AddedMatrix, r"has matrices outside of nn\.Linear"),
    ],
)
def test_an_unknown_cost_is_an_error_with_its_hook(
    slot: str, component: type[nn.Module], told: str, device: str
) -> None:
    model = model_with(*GQA, device=device, **{slot: component})
    told = rf"blocks\.0\.{slot}: .*{component.__name__} {told}"
    with pytest.raises(ValueError, match=told) as error:
        measure_cost(model)
    assert "flops_per_token(" in str(error.value)


def test_a_foreign_module_of_linear_layers_counts_by_itself_and_stays_as_it_was() -> None:
    class Plain(nn.Module):
        def __init__(self, dim: int, hidden_dim: int) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(dim, hidden_dim), nn.Dropout(0.5), nn.Linear(hidden_dim, dim))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers(x)

    model = model_with(*GQA, ffn=Plain).train()
    width = model.blocks[0].ffn.layers[0].out_features
    ours = decoder(*GQA, "ffn=relu", f"model.hidden_dim={width}")
    assert measure_cost(model).flops_per_token == measure_cost(ours).flops_per_token
    assert model.training
    assert not any(module._forward_hooks for module in model.modules())
