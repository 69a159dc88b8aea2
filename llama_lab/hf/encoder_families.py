"""Families with an encoder, and a decoder or none; see `family.py`."""

from typing import Any

from .family import Family, Weights
from .settings import Choice, Fixed, Settings, Unread, Value
from .terms import (
    ACTIVATIONS,
    ALL_BIASES,
    GATED,
    GELU,
    GELU_TANH,
    LAYER_NORM,
    LEARNED,
    PLAIN,
    RMS_NORM,
    block,
    component,
    fields,
    like,
    sizes,
    weights,
)


def is_gated(ours: Settings) -> bool:
    """Whether the feed-forward has a gate."""
    return GATED.items() <= ours.items()


def tower(name: str, last: int) -> Weights:
    """Where a tower of T5 is kept, whose feed-forward is the part `last` of its layers."""
    layer, ffn = f"{name}.block.#.layer", f"{last}.DenseReluDense"
    kept = weights(
        layer,
        [f"0.SelfAttention.{part}" for part in "qkvo"],
        ("0.layer_norm", f"{last}.layer_norm"),
        [f"{ffn}.{part}" for part in ("wi_0", "wi_1", "wo")],
        ("shared", f"{name}.final_layer_norm"),
    )
    return kept | {
        "blocks.#.ffn.up.*": lambda ours: f"{layer}.{ffn}.{'wi_1' if is_gated(ours) else 'wi'}.*",
        "position.table.weight": f"{name}.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
    }


HEADS: dict[Any, Settings] = {
    True: {"embedding.tied": True, "embedding.logit_scale": lambda ours: ours["dim"] ** -0.5},
    False: {"embedding.tied": False, "embedding.logit_scale": 1.0},
}
T5 = Family(
    "t5",
    "T5ForConditionalGeneration",
    RMS_NORM
    | block("PreNorm")
    | component("position", "position.Relative")
    | {"attention.scale": 1.0}
    | component("cross_attention", "encoder_decoder.CrossAttention", scale=1.0)
    | dict.fromkeys((f"cross_attention.{part}_bias" for part in ("query", "key", "value", "output")), False),
    (
        *fields(vocab_size=32128, layer_norm_epsilon=1e-6),
        Value("d_model|hidden_size", "dim", 512),
        Value("d_kv|head_dim", "head_dim", 64),
        Value("d_ff", "hidden_dim", 2048),
        Value("num_layers|num_hidden_layers", "encoder_layers", 6),
        Value("num_decoder_layers", "n_layers", like("encoder_layers")),
        Value("num_heads|num_attention_heads", "n_heads", 8),
        Value("n_positions", "max_seq_len", 512),  # which transformers does not read: relative positions have no limit
        Value("relative_attention_num_buckets", "position.n_buckets", 32),
        Value("relative_attention_max_distance", "position.max_distance", 128),
        Value("decoder_start_token_id", "start_id", None, nullable=True),
        Choice("feed_forward_proj", "relu", {"relu": PLAIN | ACTIVATIONS["relu"], "gated-gelu": GATED | GELU_TANH}),
        Choice("tie_word_embeddings|scale_decoder_outputs", True, HEADS),  # new files say the first of all models
        Fixed("is_gated_act", is_gated),  # which follow, and are read before it
        Fixed("dense_act_fn", lambda ours: "gelu_new" if is_gated(ours) else "relu"),
    ),
    tower("decoder", 2)
    | {f"encoder.{ours}": theirs for ours, theirs in tower("encoder", 1).items() if "embedding" not in str(ours)}
    | {
        f"blocks.#.cross_attention.{ours}.*": f"decoder.block.#.layer.1.EncDecAttention.{theirs}.*"
        for ours, theirs in zip(("query", "key", "value", "output"), "qkvo", strict=True)
    }
    | {"blocks.#.cross_attention_norm.*": "decoder.block.#.layer.1.layer_norm.*"},
    idle=r"(en|de)coder\.embed_tokens\.weight|decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias.*",
    model="EncoderDecoder",
)
BERT = Family(
    "bert",
    "BertForMaskedLM",
    LAYER_NORM
    | (PLAIN | GELU | LEARNED | ALL_BIASES | block("PostNorm"))
    | {"embedding.tied": True, "embedding.head_bias": True},
    (
        *sizes(30522, 768, 12, 12, 512),
        *fields(intermediate_size=3072, layer_norm_eps=1e-12),
        *(Fixed("hidden_act", "gelu"), Fixed("tie_word_embeddings", True), Fixed("type_vocab_size", 2)),
        *(Fixed("is_decoder", False), Fixed("add_cross_attention", False)),
        Fixed("position_embedding_type", "absolute"),
        Unread("hidden_dropout_prob|attention_probs_dropout_prob", written=0.0),
    ),
    weights(
        "bert.encoder.layer.#",
        (*(f"attention.self.{name}" for name in ("query", "key", "value")), "attention.output.dense"),
        ("attention.output.LayerNorm", "output.LayerNorm"),
        ("intermediate.dense", "output.dense"),
        ("bert.embeddings.word_embeddings", "bert.norm"),
    )
    | {
        "position.table.weight": "bert.embeddings.position_embeddings.weight",
        "segments.weight": "bert.embeddings.token_type_embeddings.weight",
        "input_norm.*": "bert.embeddings.LayerNorm.*",
        "head_transform.0.*": "cls.predictions.transform.dense.*",
        "head_transform.2.*": "cls.predictions.transform.LayerNorm.*",
        "embedding.head.*": "cls.predictions.*",
    },
    renamed={r"\.gamma$": ".weight", r"\.beta$": ".bias", r"predictions\.decoder": "predictions"},
    idle=r"bert\.(pooler\..*|embeddings\.position_ids)|cls\.seq_relationship\..*",
    model="Bert",
)
