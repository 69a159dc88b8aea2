"""The recipes compute what independent implementations do: transformers' models, and PyTorch's own Transformer layers.

A family is a tiny random model of theirs, the overrides that compose ours, and a written mapping of the weights.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from omegaconf import OmegaConf
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from llama_lab.hf import family as hf
from llama_lab.hf import llama_families, terms
from llama_lab.hf.by_layer import at_layer
from llama_lab.hf.families import FAMILIES as TABLES
from llama_lab.hf.families import FIELDS
from llama_lab.model import Decoder
from tests.composing import END_OF_TEXT, compose_config, decoder
from tests.hf.theirs import CASES, CONTEXT, LLAMA, VOCAB, rope, their_model

DIM, HEADS, HEAD_DIM, LAYERS = 48, 6, 8, 3
HIDDEN, GATED = 4 * DIM, 128  # the widths that our recipes choose at this dim
TOKENS = torch.randint(VOCAB, (2, CONTEXT), generator=torch.Generator().manual_seed(1))
TOLERANCE = 1e-4  # of float32 logits whose standard deviation is about one


@dataclass(frozen=True, repr=False)
class Family:
    """An independent model, where each of our parameters is in it, and the overrides that compose ours."""

    build: Callable[[], nn.Module]
    table: hf.Family
    overrides: str

    @cached_property
    def theirs(self) -> nn.Module:
        """Their model with noise on all of its parameters, so that no gain is one and no bias zero."""
        with torch.random.fork_rng(), torch.no_grad():
            torch.manual_seed(0)
            model = self.build()
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        return model.eval()

    def as_ours(self, theirs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Their parameters, or gradients, under our names."""
        cfg = compose_config("size=pico", *self.overrides.split())
        settings = hf.flat_settings(OmegaConf.to_container(cfg.model, resolve=True))
        names = self.table.canonical_names(theirs)
        renamed = {names[name]: tensor for name, tensor in theirs.items() if name in names}
        return self.table.of_layout(renamed, settings).to_ours(renamed, settings)


def recipe(case: str, overrides: str, **changes: Any) -> Family:
    """A model of transformers, some of its settings changed, beside our recipe at its sizes."""
    model_type, settings = CASES[case]
    table = next(one for one in TABLES if one.model_type == model_type and not one.variant)
    read = table.read_config(settings | changes, FIELDS)
    read = at_layer(read, read["n_layers"] - 1)
    sizes = ("dim", "n_layers", "n_heads", "head_dim", "hidden_dim", "max_seq_len")
    chosen = [f"size.n_kv_heads={read['n_kv_heads']}", *(f"model.{size}={read[size]}" for size in sizes)]
    return Family(partial(their_model, case, **changes), table, " ".join([overrides, *chosen]))


class TorchTransformer(nn.Module):
    """A decoder of PyTorch's own layers: embeddings scaled and shared with the head, a table of waves, post-norm."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, DIM)
        nn.init.normal_(self.tokens.weight, std=DIM**-0.5)
        layer = nn.TransformerEncoderLayer(DIM, HEADS, HIDDEN, activation="relu", batch_first=True, norm_first=False)
        self.encoder = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        wave = {0: math.sin, 1: math.cos}
        rows = [[wave[i % 2](t / 10000 ** ((i - i % 2) / DIM)) for i in range(DIM)] for t in range(CONTEXT)]
        self.waves = torch.tensor(rows)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        x = math.sqrt(DIM) * self.tokens(tokens) + self.waves[:length]
        causal = nn.Transformer.generate_square_subsequent_mask(length)
        return F.linear(self.encoder(x, mask=causal), self.tokens.weight)


TORCH = hf.Family(
    "",
    "",
    {},
    (),
    {
        "embedding.tokens.weight": "tokens.weight",
        terms.QUERY_KEY_VALUE: ("encoder.layers.#.self_attn.in_proj_*", terms.QKV),
        "blocks.#.attention.output.*": "encoder.layers.#.self_attn.out_proj.*",
        "blocks.#.attention_norm.*": "encoder.layers.#.norm1.*",
        "blocks.#.ffn.up.*": "encoder.layers.#.linear1.*",
        "blocks.#.ffn.down.*": "encoder.layers.#.linear2.*",
        "blocks.#.ffn_norm.*": "encoder.layers.#.norm2.*",
    },
)


class PaLM(nn.Module):
    """PaLM by the list of its paper, section 2: attention beside SwiGLU, one key and value head, RoPE, no biases.

    Its embeddings, of variance one, are the head, too, whose logits are divided by sqrt(dim) (section 5).
    """

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, DIM)
        nn.init.normal_(self.tokens.weight, std=DIM**-0.5)
        shapes = {"query": (DIM, DIM), "key": (DIM, HEAD_DIM), "value": (DIM, HEAD_DIM), "output": (DIM, DIM)}
        shapes |= {"gate": (DIM, GATED), "up": (DIM, GATED), "down": (GATED, DIM)}
        self.layers = nn.ModuleList(
            nn.ModuleDict({name: nn.Linear(*shape, bias=False) for name, shape in shapes.items()})
            for _ in range(LAYERS)
        )
        self.gains = nn.ParameterList(nn.Parameter(torch.ones(DIM)) for _ in range(LAYERS + 1))

    def forward(self, tokens: Tensor) -> Tensor:
        table = math.sqrt(DIM) * self.tokens.weight
        x = table[tokens]
        for layer, gain in zip(self.layers, self.gains, strict=False):
            y = F.layer_norm(x, [DIM], gain)
            x = x + self.attend(layer, y) + layer.down(F.silu(layer.gate(y)) * layer.up(y))
        return F.layer_norm(x, [DIM], self.gains[-1]) @ table.T / math.sqrt(DIM)

    @staticmethod
    def attend(layer: nn.Module, x: Tensor) -> Tensor:
        """One query at a time, over all keys up to its own."""
        query, key, value = layer.query(x).unflatten(-1, (HEADS, HEAD_DIM)), layer.key(x), layer.value(x)
        half = HEAD_DIM // 2
        angles = torch.arange(x.shape[1])[:, None] * 10000.0 ** (-torch.arange(half) / half)
        turn = torch.polar(torch.ones_like(angles), angles)  # multiplies pairs of dimensions as complex numbers
        query = torch.complex(query[..., :half], query[..., half:]) * turn[:, None]
        key = torch.complex(key[..., :half], key[..., half:]) * turn
        mixed = []
        for t in range(x.shape[1]):
            scores = torch.einsum("bhd,bsd->bhs", query[:, t], key[:, : t + 1].conj()).real / math.sqrt(HEAD_DIM)
            mixed.append(scores.softmax(-1) @ value[:, : t + 1])
        return layer.output(torch.stack(mixed, 1).flatten(2))


PALM = hf.Family(
    "",
    "",
    {},
    (),
    {
        "embedding.tokens.weight": "tokens.weight",
        "blocks.#.attention_norm.weight": "gains.#",
        "norm.weight": f"gains.{LAYERS}",
        **{f"blocks.#.attention.{name}.*": f"layers.#.{name}.*" for name in ("query", "key", "value", "output")},
        **{f"blocks.#.ffn.{name}.*": f"layers.#.{name}.*" for name in ("gate", "up", "down")},
    },
)


def llama4() -> nn.Module:
    """Its local layers, of chunks, around a global one, without what is beside them in Llama 4: experts and QK-norm."""
    own = {"head_dim": HEAD_DIM, "intermediate_size_mlp": 80, "moe_layers": [], "use_qk_norm": False}
    layers = ["chunked_attention", "full_attention", "chunked_attention"]
    own |= {"no_rope_layers": [1] * LAYERS, "layer_types": layers, "attention_chunk_size": 7}
    config = AutoConfig.for_model("llama4_text", **LLAMA | rope("default") | own)
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager")


SIZES = f"model.dim={DIM} model.n_layers={LAYERS} model.n_heads={HEADS} model.max_seq_len={CONTEXT}"
EPS = "model.norm.eps=1e-6"  # of the cases of LLaMA, whose recipes have 1e-5
SCALED = "model.position.scaling.factor=4 model.position.scaling.original_max_seq_len=10"
MLA = "arch=llama attention=mla norm=rmsnorm_1e-6 model.attention.kv_rank=20 model.attention.query_rank={}"
MLA += " model.attention.nope_dim=12 model.attention.value_dim=10 model.attention.latent_eps=1e-6"
FAMILIES = {
    "gpt1": recipe("gpt1", "arch=gpt1"),
    "gpt2": recipe("gpt2", "arch=gpt2"),
    "opt": recipe("opt", "arch=opt"),
    # As OPT 350M, which differs from all other sizes
    "opt, post-norm": recipe("opt", "arch=opt block=postnorm", do_layer_norm_before=False),
    "ctrl": recipe("ctrl", "arch=ctrl"),
    # Else a quarter of their width is one pair, and all pairs are neighbours
    "gpt_neox": recipe("gpt_neox", "arch=gpt_neox", num_attention_heads=3),
    "bloom": recipe("bloom", "arch=bloom"),
    "falcon": recipe("falcon", "arch=falcon"),
    "llama": recipe("llama", "arch=llama", num_key_value_heads=HEADS, rms_norm_eps=1e-5),
    "llama2": recipe("llama", f"arch=llama2 {EPS}"),
    "llama3": recipe("llama", f"arch=llama3 {EPS}", rope_theta=500000.0),
    # With bounds such that at this head_dim some frequencies stay, some are blended, and some divided.
    "llama, llama3 scaling": recipe(
        "llama, llama3 scaling",
        f"arch=llama3 position=rope_llama3 model.position.theta=10000 {EPS} {SCALED}"
        " model.position.scaling.low_freq_factor=0.05 model.position.scaling.high_freq_factor=2",
    ),
    "llama, linear scaling": recipe(
        "llama, linear scaling", f"arch=llama2 position=rope_linear model.position.scaling.factor=4 {EPS}"
    ),
    # With bounds such that at this head_dim the ramp passes through the frequencies.
    "llama, yarn": recipe(
        "llama, yarn",
        f"arch=llama2 position=rope_yarn {EPS} {SCALED}"
        " model.position.scaling.beta_fast=2 model.position.scaling.beta_slow=0.01",
    ),
    "mistral": recipe("mistral", f"arch=mistral model.attention.window=7 {EPS}"),
    "llama4": Family(
        llama4,
        replace(llama_families.LLAMA, renamed={"feed_forward": "mlp"}),
        f"arch=llama2 model.attention.chunk=7 model.position.interleaved=true {SIZES} size.n_kv_heads=2"
        " model.hidden_dim=80 +pattern.global={at:'1::2',attention:{chunk:null}}",
    ),
    "olmo2": recipe("olmo2", "arch=olmo2", num_key_value_heads=HEADS, rms_norm_eps=1e-6, rope_theta=500000.0),
    # With heads wider than dim / n_heads, as Gemma 2 9B's, and caps so low that they bite.
    "gemma2": recipe(
        "gemma2", "arch=gemma2 model.attention.window=7 model.attention.softcap=2 model.embedding.logit_softcap=3"
    ),
    "qwen3_next": recipe(
        "qwen3_next",
        "arch=llama2 attention=gqa norm=rmsnorm_offset model.norm.eps=1e-6 embedding=tied model.attention.qk_norm=head"
        " model.attention.gate=element model.position.fraction=0.5",
    ),
    "deepseek_v3": recipe("deepseek_v3", f"{MLA.format(28)} model.position.interleaved=true"),
    "deepseek_v3, queries of no latent": recipe(
        "deepseek_v3", MLA.format("null"), q_lora_rank=None, rope_interleave=False
    ),
    "mixtral": recipe("mixtral", "arch=mixtral model.attention.window=7 model.ffn.n_experts=4"),
    "olmoe": recipe(
        "olmoe, normalised",
        "arch=olmoe model.ffn.n_experts=6 model.ffn.top_k=3",
        norm_topk_prob=False,
        hidden_act="silu",
    ),
    "qwen3_moe": recipe("qwen3_moe", "arch=qwen3_moe model.ffn.n_experts=6 model.ffn.top_k=3", norm_topk_prob=True),
    "deepseek_v3, experts": recipe(
        "deepseek_v3, experts",
        f"{MLA.format(28).replace('llama', 'deepseek_v3')} model.ffn.n_experts=8 model.ffn.top_k=3 model.ffn.n_groups=4"
        " model.ffn.top_groups=2 model.ffn.n_shared=2 pattern.dense.at=[0] +pattern.dense.hidden_dim=80"
        " model.position.interleaved=true",
    ),
    "gpt_oss": recipe(
        "gpt_oss",
        f"arch=gpt_oss position=rope_yarn {SCALED} model.position.scaling.beta_fast=2"
        " model.position.scaling.beta_slow=0.01 model.position.scaling.truncate=false model.attention.window=7"
        " model.ffn.n_experts=6 model.ffn.top_k=3",
        swiglu_limit=7.0,
    ),
    "palm": Family(PaLM, PALM, f"arch=palm {SIZES}"),
    # With biases, which PyTorch's layers have and our recipe leaves out
    "vanilla": Family(TorchTransformer, TORCH, f"arch=vanilla attention=mha_bias ffn=relu_bias {SIZES}"),
}
# One for each position, placement of norms, attention and feed-forward
QUICK = ["gpt2", "bloom", "llama3", "gemma2", "deepseek_v3, experts", "gpt_oss"]
OTHERS = [pytest.param(name, marks=pytest.mark.matrix) for name in FAMILIES if name not in QUICK]


def our_model(family: Family, *overrides: str) -> Decoder:
    """Our model of the family with their weights, which must be exactly the parameters that we have."""
    model = decoder("size=pico", *family.overrides.split(), *overrides, vocab_size=VOCAB).eval()
    weights = family.as_ours(dict(family.theirs.named_parameters()))
    parameters = dict(model.named_parameters())
    assert {name: p.shape for name, p in parameters.items()} == {name: w.shape for name, w in weights.items()}
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(weights[name])
    model.load_state_dict(family.as_ours(dict(family.theirs.named_buffers())), strict=False)
    return model


def their_logits(family: Family) -> Tensor:
    output = family.theirs(TOKENS)
    return output if isinstance(output, Tensor) else output.logits


def largest_difference(a: Tensor, b: Tensor) -> float:
    return (a - b).abs().max().item()


@pytest.mark.parametrize("name", [*QUICK, *OTHERS])
def test_logits_and_gradients_equal_the_independent_implementation(name: str) -> None:
    family = FAMILIES[name]
    expected = their_logits(family)
    assert expected.std() > 0.5
    for kernel in ("reference", "auto"):
        model = our_model(family, f"model.attention.kernel={kernel}")
        logits = model(TOKENS)
        assert largest_difference(logits, expected) <= TOLERANCE
    assert_same_gradients(family, model, logits, expected, TOKENS)


def assert_same_gradients(family: Family, model: Decoder, ours: Tensor, theirs: Tensor, tokens: Tensor) -> None:
    """Those of the loss of their logits and of ours, relative to the largest."""
    expected = family.as_ours(next_token_gradients(family.theirs, theirs, tokens))
    for name, gradient in next_token_gradients(model, ours, tokens).items():
        # The floor is for key biases, which shift all scores of a query alike: their gradient is zero but for rounding
        scale = max(expected[name].abs().max().item(), 1e-3)
        assert largest_difference(gradient, expected[name]) <= 1e-4 * scale, name


def next_token_gradients(model: nn.Module, logits: Tensor, tokens: Tensor) -> dict[str, Tensor]:
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    names, parameters = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))


@pytest.mark.parametrize("name", ["mistral", "llama4"])
def test_packed_documents_equal_those_of_the_independent_implementation(name: str) -> None:
    """Theirs finds the borders where positions start again, if it keeps no cache."""
    family, tokens = FAMILIES[name], TOKENS.clone().clamp(min=1)
    tokens[0, [3, 14]] = tokens[1, 0] = tokens[1, 9] = END_OF_TEXT
    starts = [[0, 3, 14], [0, 9]]
    positions = torch.tensor([[t - max(s for s in row if s <= t) for t in range(CONTEXT)] for row in starts])
    model = our_model(family, "data.document_mask=true")
    logits, expected = model(tokens), family.theirs(tokens, position_ids=positions, use_cache=False).logits
    assert largest_difference(logits, expected) <= TOLERANCE
    assert_same_gradients(family, model, logits, expected, tokens)
    assert largest_difference(our_model(family)(tokens), expected) > 5 * TOLERANCE
