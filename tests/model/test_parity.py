"""The recipes compute what independent implementations do: transformers' models, and PyTorch's own Transformer layers.

A family is a tiny random model of theirs, the overrides that compose ours, and a written mapping of the weights.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from omegaconf import OmegaConf
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, GenerationMixin

from llama_lab.hf import family as hf
from llama_lab.hf import gpt_families, llama_families, terms
from llama_lab.model import Decoder, Sampling, generate
from tests.composing import END_OF_TEXT, compose_config, decoder

transformers.logging.set_verbosity_error()

VOCAB, DIM, HEADS, KV_HEADS, HEAD_DIM, LAYERS, LENGTH = 101, 96, 6, 2, 16, 3, 24
HIDDEN, GATED = 4 * DIM, 256  # the widths that our recipes choose at this dim
TOLERANCE = 1e-4  # of float32 logits whose standard deviation is about one
PADDING = 0  # after an end of text
NOTICED = 5 * TOLERANCE  # by how much a near miss must miss; the smallest is GELU for its tanh approximation


@dataclass(frozen=True, repr=False)
class Family:
    """An independent model, the overrides that compose ours, and how its weights become ours.

    table: where each of our parameters is in theirs; the rows of it that `tests/hf` checks by hand are its own.
    near_misses: overrides that change what we compute but not our parameters' shapes, and so must break parity.
    unused: how many of their numbers have no use.
    """

    build: Callable[[], nn.Module]
    overrides: Sequence[str]
    table: hf.Family
    near_misses: Sequence[str]
    unused: int = 0

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
        cfg = compose_config(*self.sizes, *self.overrides)
        settings = hf.flat_settings(OmegaConf.to_container(cfg.model, resolve=True))
        names = self.table.canonical_names(theirs)
        return self.table.to_ours({names[name]: tensor for name, tensor in theirs.items()}, settings)

    @property
    def sizes(self) -> list[str]:
        """The overrides of the sizes."""
        sizes = {"dim": DIM, "n_layers": LAYERS, "n_heads": HEADS, "max_seq_len": LENGTH}
        return ["size=pico", *(f"model.{key}={size}" for key, size in sizes.items()), f"size.n_kv_heads={KV_HEADS}"]


def theirs(model_type: str, sizes: dict[str, Any], **settings: Any) -> Callable[[], nn.Module]:
    """How to build a model of transformers."""
    config = AutoConfig.for_model(model_type, vocab_size=VOCAB, **sizes | settings)
    return partial(AutoModelForCausalLM.from_config, config, attn_implementation="eager")


GPT = {"n_embd": DIM, "n_layer": LAYERS, "n_head": HEADS, "n_positions": LENGTH}
BLOOM = {"hidden_size": DIM, "n_layer": LAYERS, "n_head": HEADS}
ALL_HEADS = {
    "hidden_size": DIM,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "max_position_embeddings": LENGTH,
    "pad_token_id": None,
}
OPT = ALL_HEADS | {"ffn_dim": HIDDEN}
GATED_ALL_HEADS = ALL_HEADS | {"intermediate_size": GATED}
MISTRAL = GATED_ALL_HEADS | {"num_key_value_heads": KV_HEADS}
LLAMA = GATED_ALL_HEADS | {"rms_norm_eps": 1e-5, "max_position_embeddings": 64}
LLAMA2 = LLAMA | {"num_key_value_heads": KV_HEADS}


def rope(theta: float = 10000.0, kind: str = "default", **settings: float) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **settings}}


class TorchTransformer(nn.Module):
    """A decoder of PyTorch's own layers: embeddings scaled and shared with the head, a table of waves, post-norm."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, DIM)
        nn.init.normal_(self.tokens.weight, std=DIM**-0.5)
        layer = nn.TransformerEncoderLayer(DIM, HEADS, HIDDEN, activation="relu", batch_first=True, norm_first=False)
        self.encoder = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        wave = {0: math.sin, 1: math.cos}
        rows = [[wave[i % 2](t / 10000 ** ((i - i % 2) / DIM)) for i in range(DIM)] for t in range(LENGTH)]
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


SCALED_BY_4 = "model.position.scaling.factor=4"
FROM_16 = "model.position.scaling.original_max_seq_len=16"
FAMILIES = {
    "gpt1": Family(theirs("openai-gpt", GPT), ["arch=gpt1"], gpt_families.GPT1, ["ffn=gelu_bias", "ffn=relu_bias"]),
    "gpt2": Family(
        theirs("gpt2", GPT),
        ["arch=gpt2"],
        gpt_families.GPT2,
        ["ffn=gelu_bias", "block=reordered", "block=parallel_two_norms", "model.norm.eps=1e-6"],
    ),
    "opt": Family(
        theirs("opt", OPT),
        ["arch=opt"],
        gpt_families.OPT,
        ["ffn=gelu_bias", "block=reordered", "block=parallel_two_norms", "model.norm.eps=1e-6"],
        unused=2 * DIM,
    ),
    "opt_postnorm": Family(  # as OPT 350M, which differs from all other sizes
        theirs("opt", OPT, do_layer_norm_before=False),
        ["arch=opt", "block=postnorm"],
        gpt_families.OPT,
        ["ffn=gelu_bias"],
        unused=2 * DIM,
    ),
    "ctrl": Family(
        theirs("ctrl", GPT, dff=HIDDEN),
        ["arch=ctrl"],
        gpt_families.CTRL,
        ["position=sinusoidal", "model.position.theta=5000", "block=reordered"],
    ),
    "gpt_neox": Family(
        theirs("gpt_neox", ALL_HEADS, intermediate_size=HIDDEN, **rope(partial_rotary_factor=0.25)),
        ["arch=gpt_neox"],
        gpt_families.GPT_NEOX,
        [
            *("block=prenorm", "position=rope", "model.position.interleaved=true", "ffn=gelu_tanh_bias"),
            "model.norm.eps=1e-6",
        ],
    ),
    "bloom": Family(
        theirs("bloom", BLOOM),
        ["arch=bloom"],
        gpt_families.BLOOM,
        ["position=none", "ffn=gelu_bias", "block=reordered", "model.norm.eps=1e-6"],
    ),
    "falcon": Family(
        theirs("falcon", ALL_HEADS, new_decoder_architecture=False, alibi=False),
        ["arch=falcon"],
        gpt_families.FALCON,
        ["position=alibi", "model.position.interleaved=true", "ffn=gelu_tanh", "model.norm.eps=1e-6"],
    ),
    "llama": Family(
        theirs("llama", LLAMA, **rope()),
        ["arch=llama"],
        llama_families.LLAMA,
        [
            *("model.position.interleaved=true", "block=parallel_two_norms", "block=reordered", "ffn=geglu"),
            "model.norm.eps=1e-6",
        ],
    ),
    "llama2": Family(
        theirs("llama", LLAMA2, **rope()),
        ["arch=llama2"],
        llama_families.LLAMA,
        ["position=none", "position=rope_500k", "model.norm.eps=1e-6"],
    ),
    "llama3": Family(
        theirs("llama", LLAMA2, **rope(500000.0)),
        ["arch=llama3"],
        llama_families.LLAMA,
        ["position=rope", "model.norm.eps=1e-6"],
    ),
    # With bounds such that at this head_dim some frequencies stay, some are blended, and some divided.
    "llama_with_llama3_scaling": Family(
        theirs(
            "llama",
            LLAMA2,
            **rope(
                *(500000.0, "llama3"),
                factor=4.0,
                original_max_position_embeddings=16,
                low_freq_factor=0.05,
                high_freq_factor=2.0,
            ),
        ),
        [
            *("arch=llama3", "position=rope_llama3", SCALED_BY_4, FROM_16),
            *("model.position.scaling.low_freq_factor=0.05", "model.position.scaling.high_freq_factor=2"),
        ],
        llama_families.LLAMA,
        ["model.position.scaling=null", "model.position.scaling.high_freq_factor=4"],
    ),
    "llama_with_linear_scaling": Family(
        theirs("llama", LLAMA, **rope(kind="linear", factor=4.0)),
        ["arch=llama", "position=rope_linear", SCALED_BY_4],
        llama_families.LLAMA,
        ["model.position.scaling=null"],
    ),
    # With bounds such that at this head_dim the ramp passes through five frequencies.
    "llama_with_yarn_scaling": Family(
        theirs(
            "llama",
            LLAMA,
            **rope(kind="yarn", factor=4.0, original_max_position_embeddings=16, beta_fast=2.0, beta_slow=0.01),
        ),
        [
            *("arch=llama", "position=rope_yarn", SCALED_BY_4, FROM_16),
            *("model.position.scaling.beta_fast=2", "model.position.scaling.beta_slow=0.01"),
        ],
        llama_families.LLAMA,
        ["model.position.scaling=null", "model.position.scaling.beta_slow=1"],
    ),
    "mistral": Family(
        theirs("mistral", MISTRAL, rms_norm_eps=1e-5, sliding_window=7),
        ["arch=mistral", "model.attention.window=7"],
        llama_families.MISTRAL,
        ["model.attention.window=8", "model.attention.window=null", "model.norm.eps=1e-6"],
    ),
    # Its local layers, of chunks, around a global one, without what is beside them in Llama 4: experts and QK-norm.
    "llama4": Family(
        theirs(
            "llama4_text",
            MISTRAL | rope(),
            head_dim=HEAD_DIM,
            intermediate_size_mlp=GATED,
            moe_layers=[],
            use_qk_norm=False,
            no_rope_layers=[1] * LAYERS,
            layer_types=["chunked_attention", "full_attention", "chunked_attention"],
            attention_chunk_size=7,
        ),
        [
            *("arch=llama2", "model.attention.chunk=7", "model.position.interleaved=true"),
            "+pattern.global={at: '1::2', attention: {chunk: null}}",
        ],
        replace(llama_families.LLAMA, renamed={"feed_forward": "mlp"}),
        ["model.attention.chunk=8", "pattern.global.at=[2]", "model.position.interleaved=false"],
    ),
    "olmo2": Family(
        theirs("olmo2", GATED_ALL_HEADS, rms_norm_eps=1e-6, **rope(500000.0)),
        ["arch=olmo2"],
        llama_families.OLMO2,
        ["block=prenorm", "position=rope", "model.norm.eps=1e-5"],
    ),
    # With heads wider than dim / n_heads, as Gemma 2 9B's, and caps so low that they bite.
    "gemma2": Family(
        theirs(
            "gemma2",
            MISTRAL,
            head_dim=24,
            query_pre_attn_scalar=24,
            sliding_window=7,
            attn_logit_softcapping=2.0,
            final_logit_softcapping=3.0,
        ),
        [
            *("arch=gemma2", "model.head_dim=24", "model.attention.window=7"),
            *("model.attention.softcap=2", "model.embedding.logit_softcap=3"),
        ],
        llama_families.GEMMA2,
        [
            *("model.attention.window=8", "pattern.global.at=2::3", "model.attention.softcap=null", "ffn=geglu"),
            *("model.embedding.logit_softcap=null", "model.embedding.scale=1", "model.norm.unit_offset=false"),
        ],
    ),
    "palm": Family(
        PaLM, ["arch=palm"], PALM, ["norm=rmsnorm", "position=none", "ffn=geglu", "model.embedding.scale=1"]
    ),
    "vanilla": Family(  # with biases, which PyTorch's layers have and our recipe leaves out
        TorchTransformer,
        ["arch=vanilla", "attention=mha_bias", "ffn=relu_bias"],
        TORCH,
        ["ffn=gelu_bias", "position=sinusoidal_concatenated", "model.embedding.scale=1"],
    ),
}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors this small gain nothing from a second thread, and wait for it long on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Family:
    return FAMILIES[request.param]


def our_model(family: Family, *overrides: str) -> Decoder:
    """Our model of the family with their weights, which must be exactly the parameters that we have."""
    model = decoder(*family.sizes, *family.overrides, *overrides, vocab_size=VOCAB).eval()
    weights = family.as_ours(dict(family.theirs.named_parameters()))
    parameters = dict(model.named_parameters())
    assert {name: p.shape for name, p in parameters.items()} == {name: w.shape for name, w in weights.items()}
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(weights[name])
    return model


def their_logits(family: Family, tokens: Tensor) -> Tensor:
    output = family.theirs(tokens)
    return output if isinstance(output, Tensor) else output.logits


@pytest.fixture
def tokens() -> Tensor:
    return torch.randint(VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(1))


def largest_difference(a: Tensor, b: Tensor) -> float:
    return (a - b).abs().max().item()


def test_mapping_reads_every_number_of_theirs_once(family: Family) -> None:
    numbers, total = {}, 0
    for name, parameter in family.theirs.named_parameters():
        numbers[name] = torch.arange(total, total + parameter.numel()).view(parameter.shape)
        total += parameter.numel()
    read = torch.cat([tensor.flatten() for tensor in family.as_ours(numbers).values()])
    assert len(read) == len(read.unique()) == total - family.unused


@pytest.mark.parametrize("kernel", ["auto", "reference"])
@torch.no_grad()
def test_logits_equal_the_independent_implementation(family: Family, tokens: Tensor, kernel: str) -> None:
    expected = their_logits(family, tokens)
    assert expected.std() > 0.5
    logits = our_model(family, f"model.attention.kernel={kernel}")(tokens)
    assert largest_difference(logits, expected) <= TOLERANCE


@torch.no_grad()
def test_decoding_with_a_cache_equals_the_independent_implementation(family: Family, tokens: Tensor) -> None:
    model = our_model(family)
    cache = model.new_state(len(tokens))
    pieces = tokens.split([10, 3] + [1] * (LENGTH - 13), dim=1)
    logits = torch.cat([model(piece, cache) for piece in pieces], dim=1)
    assert largest_difference(logits, their_logits(family, tokens)) <= TOLERANCE


def test_greedy_text_equals_the_independent_implementation(family: Family, tokens: Tensor) -> None:
    """To the end of the context, past every window, or to the end of text, after which theirs is padded."""
    prompts, generator = tokens[:, :5], getattr(family.theirs, "generation_config", None)
    eot_id = None if generator is None else generator.eos_token_id
    steps = list(generate(our_model(family), prompts.tolist(), LENGTH - 5, Sampling(temperature=0), eot_id))
    padded = [[PADDING if token is None else token for token in step] for step in steps]
    assert torch.tensor(padded).T.tolist() == their_greedy_text(family, prompts).tolist()


@torch.no_grad()
def their_greedy_text(family: Family, tokens: Tensor) -> Tensor:
    """What follows `tokens (B, T)` up to the context: by their `generate` where they have it."""
    n = tokens.shape[1]
    if isinstance(family.theirs, GenerationMixin):
        settings = GenerationConfig(max_new_tokens=LENGTH - n, do_sample=False, pad_token_id=PADDING)
        return family.theirs.generate(tokens, settings, attention_mask=torch.ones_like(tokens))[:, n:]
    for _ in range(LENGTH - n):
        tokens = torch.cat((tokens, their_logits(family, tokens)[:, -1:].argmax(-1)), 1)
    return tokens[:, n:]


def test_gradients_equal_the_independent_implementation(family: Family, tokens: Tensor) -> None:
    model = our_model(family)
    assert_same_gradients(family, model, model(tokens), their_logits(family, tokens), tokens, floor=1e-3)


def assert_same_gradients(
    family: Family, model: Decoder, ours: Tensor, theirs: Tensor, tokens: Tensor, floor: float = 0.0
) -> None:
    """Those of the loss of their logits and of ours, relative to the largest, or to a larger floor."""
    expected = family.as_ours(next_token_gradients(family.theirs, theirs, tokens))
    for name, gradient in next_token_gradients(model, ours, tokens).items():
        # The floor is for key biases, which shift all scores of a query alike: their gradient is zero but for rounding
        scale = max(expected[name].abs().max().item(), floor)
        assert largest_difference(gradient, expected[name]) <= 1e-4 * scale, name


def next_token_gradients(model: nn.Module, logits: Tensor, tokens: Tensor) -> dict[str, Tensor]:
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    names, parameters = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))


@torch.no_grad()
def test_parity_breaks_at_every_near_miss(family: Family, tokens: Tensor) -> None:
    expected = their_logits(family, tokens)
    missed_by = {o: largest_difference(our_model(family, o)(tokens), expected) for o in family.near_misses}
    assert not {override: missed for override, missed in missed_by.items() if missed < NOTICED}


@pytest.mark.parametrize("name", ["llama", "mistral", "llama4"])
def test_packed_documents_equal_those_of_the_independent_implementation(name: str) -> None:
    """Theirs finds the borders where positions start again, if it keeps no cache."""
    family, generator = FAMILIES[name], torch.Generator().manual_seed(0)
    tokens = torch.randint(1, VOCAB, (2, LENGTH), generator=generator)
    tokens[0, [3, 14]] = tokens[1, 0] = tokens[1, 9] = END_OF_TEXT
    starts = [[0, 3, 14], [0, 9]]
    positions = torch.tensor([[t - max(s for s in row if s <= t) for t in range(LENGTH)] for row in starts])
    model = our_model(family, "data.document_mask=true")
    logits, expected = model(tokens), family.theirs(tokens, position_ids=positions, use_cache=False).logits
    assert largest_difference(logits, expected) <= TOLERANCE
    assert_same_gradients(family, model, logits, expected, tokens)
    assert largest_difference(our_model(family)(tokens), expected) > NOTICED
