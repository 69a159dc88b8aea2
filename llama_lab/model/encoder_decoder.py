"""The encoder-decoder: an encoder reads a source, to which every block of a decoder attends (Vaswani et al. 2017).

Both towers are built from the same components and share the token table.
"""

from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import cache, partial
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .attention_context import AttentionContext
from .block import Block, Serial
from .decoder import Decoder
from .init import ResidualOutput, check_positive
from .loss import IGNORE
from .mixer import Mixer, linear_flops
from .norm import Norm
from .state import DecoderState, State
from .tower import Tower, call

SOURCE = "source"  # of the decoder, in `AttentionContext.shared`


class Source(NamedTuple):
    """What the encoder made of a source, `(B, S, D)`, and the tokens of each sequence, `(B,)`; None: S in each."""

    encoded: Tensor
    lengths: Tensor | None


class SourceCache(State):
    """Keys and values of a source for one layer, `(B, Hkv, S, Dh)` each, and how many each sequence has, `(B,)`."""

    def fill(self, key: Tensor, value: Tensor, lengths: Tensor | None) -> None:
        """Keep those of a source, `(B, Hkv, S, Dh)` each."""
        for kept, new in zip(self.tensors, (key, value), strict=False):
            kept[:, :, : new.shape[2]] = new
        self.tensors[2].copy_(lengths if lengths is not None else self.tensors[2].new_tensor(key.shape[2]))


class BlockState(State):
    """Both states of a block that attends to a source."""

    def __init__(self, mixer: State, source: SourceCache) -> None:
        super().__init__([*mixer.tensors, *source.tensors])
        self.mixer, self.source = mixer, source

    def row(self, index: int) -> "BlockState":
        """A view of one sequence; writes to it change this state."""
        return BlockState(self.mixer.row(index), self.source.row(index))


class CrossAttention(Mixer):
    """Attention from each token of a decoder to all tokens of the source (Vaswani et al. 2017, section 3.2.3).

    No position encoding acts in it, as in T5. scale: multiplies the scores; None: 1 / sqrt(head_dim).
    """

    scores = ("query", "key")  # the maps that do not scale what attention adds
    source_share = 1.0  # tokens of a source for each of a decoder

    def __init__(
        self,
        dim: int,
        n_heads: int,
        n_kv_heads: int,
        head_dim: int,
        query_bias: bool = False,
        key_bias: bool = False,
        value_bias: bool = False,
        output_bias: bool = False,
        scale: float | None = None,
    ) -> None:
        super().__init__()
        check_positive("cross_attention.scale", scale)
        self.n_heads, self.n_kv_heads, self.head_dim, self.scale = n_heads, n_kv_heads, head_dim, scale
        self.query = nn.Linear(dim, n_heads * head_dim, bias=query_bias)
        self.key = nn.Linear(dim, n_kv_heads * head_dim, bias=key_bias)
        self.value = nn.Linear(dim, n_kv_heads * head_dim, bias=value_bias)
        self.output = ResidualOutput(n_heads * head_dim, dim, bias=output_bias)

    def forward(self, x: Tensor, context: AttentionContext, state: State | None = None) -> Tensor:
        """Attend from `x (B, T, D)` to the context's source, which `state` then keeps, or to the one it has kept."""
        query = self.heads(self.query(x))
        source: Source | None = context.shared.get(SOURCE)
        if source is not None:
            key, value = (self.heads(part(source.encoded)) for part in (self.key, self.value))
            lengths = source.lengths
            if state is not None:
                assert isinstance(state, SourceCache)
                state.fill(key, value, lengths)
        if state is not None:  # with its rounding
            key, value, lengths = (kept if kept.ndim == 1 else kept.type_as(query) for kept in state.tensors)
        mask = None
        if lengths is not None:
            mask = (torch.arange(key.shape[2], device=key.device) < lengths[:, None])[:, None, None]
        mixed = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=self.scale, enable_gqa=self.n_kv_heads != self.n_heads
        )
        return self.output(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def heads(self, x: Tensor) -> Tensor:
        """`x (B, T, H * Dh)` as `(B, H, T, Dh)`."""
        return x.view(*x.shape[:2], -1, self.head_dim).transpose(1, 2)

    def flops_per_token(self, seq_len: int) -> float:
        """Forward FLOPs per token of a decoder that reads `seq_len`, with `source_share` as many in the source."""
        of_source = linear_flops(self.key) + linear_flops(self.value) + 4 * self.n_heads * self.head_dim * seq_len
        return linear_flops(self.query) + linear_flops(self.output) + self.source_share * of_source

    def new_state(self, batch_size: int, length: int, device: torch.device, dtype: torch.dtype) -> SourceCache:
        """An empty cache for sources of up to `length` tokens."""
        shape = (batch_size, self.n_kv_heads, length, self.head_dim)
        keys_and_values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(2)]
        return SourceCache([*keys_and_values, torch.zeros(batch_size, dtype=torch.long, device=device)])


class AttendsToSource(Serial):
    """Mixed into a block: cross-attention between its mixer and its feed-forward, with norm and scale of its own."""

    def __init__(self, dim: int, norm: Norm, cross_attention: CrossAttention, **others: Any) -> None:
        super().__init__(dim=dim, norm=norm, **others)
        self.cross_attention = cross_attention
        self.cross_attention_scale = deepcopy(self.attention_scale)
        for end in self.norms:
            self.add_module(f"cross_attention_{end}", norm(dim))

    def mix(self, x: Tensor, context: AttentionContext, state: State | None) -> Tensor:
        """What the feed-forward reads: `x (B, T, D)` with the branches of mixer and cross-attention."""
        own, source = (state.mixer, state.source) if isinstance(state, BlockState) else (None, None)
        x = super().mix(x, context, own)
        return self.add("cross_attention", lambda x: self.dropout(self.cross_attention(x, context, source)), x)


@cache
def attending(block: Callable[..., Serial]) -> Callable[..., Serial]:
    """The class of blocks like those of the class `block` that attend to a source."""
    assert isinstance(block, type)
    return type(block.__name__, (AttendsToSource, block), {})


class EncoderDecoder(Decoder):
    """A decoder and its `encoder`; what the decoder is given beside its tokens is the source of each sequence.

    A `source (B, S)` may be padded: then `lengths (B,)` follows. With a state, only the first pass is given them.

    cross_attention: the factory of cross-attention, called like `attention`. encoder_layers: of the encoder. start_id:
    the token that the decoder begins with; None: the last one of the source. Others are those of `Decoder`. Raises
    ValueError, its message beginning with the setting at fault.
    """

    def __init__(
        self,
        cross_attention: Callable[..., CrossAttention],
        encoder_layers: int,
        start_id: int | None = None,
        **decoder: Any,
    ) -> None:
        self._cross_attention, self._encoder_layers, self.start_id = cross_attention, encoder_layers, start_id
        self.division = (1, 1), 2  # tokens of source and target, of a window of so many
        super().__init__(**decoder)
        if start_id is not None and not 0 <= start_id < self.vocab_size:
            raise ValueError(f"start_id={start_id}: must be one of the model's {self.vocab_size} ids, or null")
        if self.prefix:
            raise ValueError(f"attention.prefix={self.prefix}: an encoder-decoder has a source instead; set it to null")
        if self.document_start_id is not None:
            raise ValueError("document_start_id: an encoder sees all documents; set data.document_mask=false")
        if hasattr(self.weight_init, "branch_gain"):
            raise ValueError(f"init={type(self.weight_init).__name__}: it is for decoders alone; choose init=xavier")
        if self.max_seq_len < 2:
            raise ValueError(f"max_seq_len={self.max_seq_len}: half of it is the source; make it at least 2")

    def make_blocks(self, sizes: Mapping[str, int], **components: Any) -> None:
        """Make those of the decoder, and an encoder of the same components."""
        super().make_blocks(sizes, **components)
        n_layers, depth = self._encoder_layers, sizes["n_layers"]
        if n_layers < 1 or (components["layers"] and n_layers != depth):
            raise ValueError(f"encoder_layers={n_layers}: must be positive, and where layers differ n_layers={depth}")
        self.encoder = Tower()
        self.encoder.make_blocks({**sizes, "n_layers": n_layers}, **components, causal=False)

    def make_block(self, block: Callable[..., Block], sizes: Mapping[str, Any], **parts: Any) -> Block:
        """A block of the decoder."""
        settings = block.keywords if isinstance(block, partial) else {}
        kind = block.func if isinstance(block, partial) else block
        if not (isinstance(kind, type) and issubclass(kind, Serial)):
            raise ValueError(
                f"block={getattr(kind, '__name__', kind)}: cross-attention is to read what the mixer adds, and the "
                f"feed-forward what both do; choose block=prenorm, or another one in series"
            )
        return attending(kind)(  # type: ignore[arg-type]  # a class can be hashed
            cross_attention=call(self._cross_attention, **sizes), **parts, **settings
        )

    def cut(self, inputs: Tensor, targets: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
        """The arguments of `loss` for windows: the source ends with the first input, whose target follows it.

        It is the first half of each window; where windows do not predict their first token, what has no targets before
        the first, and the `lengths (B,)` of such sources follow. Shapes depend on the longest and the shortest one.
        """
        if given:
            return self.begin(inputs), targets, *given
        length, lengths = inputs.shape[1], 1 + (targets != IGNORE).int().argmax(-1)
        targets = targets.clamp(min=IGNORE)
        if inputs.is_meta or not (lengths > 1).any():  # without data, plain windows
            half = length // 2
            return self.begin(inputs[:, half - 1 : -1]), targets[:, half - 1 : -1], inputs[:, :half]
        lengths = torch.where(lengths > 1, lengths, length // 2)
        shortest, longest = (int(end) for end in lengths.aminmax())
        at = lengths[:, None] - 1 + torch.arange(length - shortest + 1, device=inputs.device)
        ended, at = at >= length, at.clamp(max=length - 1)
        targets = targets.gather(1, at).masked_fill(ended, IGNORE)
        return self.begin(inputs.gather(1, at)), targets, inputs[:, :longest], lengths

    def begin(self, inputs: Tensor) -> Tensor:
        """The decoder's `inputs (B, T)`, of which the first is `start_id`, if there is one."""
        return inputs if self.start_id is None else F.pad(inputs[:, 1:], (1, 0), value=self.start_id)

    def attention_context(
        self, tokens: Tensor, at: Tensor, shortest: int, longest: int, state: DecoderState | None, *given: Tensor
    ) -> AttentionContext:
        """The context of a forward pass over `tokens (B, T)`, with what the encoder makes of a source."""
        context = super().attention_context(tokens, at, shortest, longest, state)
        if given:
            context.shared[SOURCE] = self.encode(*given)
        elif state is None or not longest:
            raise ValueError("source: an encoder-decoder needs one; give it after the tokens and the state")
        return context

    def encode(self, source: Tensor, lengths: Tensor | None = None) -> Source:
        """The encoder's output for `source (B, S)`."""
        if ended := self.encoder.length_error(source.shape[1]):
            raise ValueError(f"max_seq_len={self.max_seq_len}: {ended}, not at {source.shape[1]} tokens of a source")
        at = torch.arange(source.shape[1], device=source.device)
        context = AttentionContext(self.encoder.position, at, prefix=lengths)
        return Source(self.encoder.transform(self.embedding(source), context), lengths)

    def read_prompt(self, prompt: Tensor, state: DecoderState) -> Tensor:
        """The hidden states after a `prompt (1, T)`: it is the source, and its last token the decoder's first."""
        return self.hidden_states(self.begin(prompt[:, -1:]), state, prompt)

    def new_state(self, batch_size: int, context: int | None = None, dtype: torch.dtype | None = None) -> DecoderState:
        """An empty state for `context` tokens, and for as many of a source; see `Decoder.new_state`."""
        if dtype == torch.int8:
            raise ValueError("cross_attention: cannot keep a source in int8; choose a floating dtype")
        state = super().new_state(batch_size, context, dtype)
        weight = self.embedding.tokens.weight
        sizes = (batch_size, state.context, weight.device, dtype or weight.dtype)
        caches = [cross.new_state(*sizes) for cross in self.cross_attentions]
        state.layers = [BlockState(*pair) for pair in zip(state.layers, caches, strict=True)]
        return state

    def source_bytes(self, length: int, dtype: torch.dtype) -> int:
        """Bytes of keys and values of a source of `length` tokens, in all layers."""
        return sum(cross.state_bytes(length, dtype) for cross in self.cross_attentions)

    @property
    def cross_attentions(self) -> list[CrossAttention]:
        """The cross-attention of each block, from the first."""
        return [cast(AttendsToSource, block).cross_attention for block in self.blocks]

    def divide(self, source: int, target: int) -> None:
        """Count the costs of windows that are made into a `source` and a `target` of so many tokens, not halves."""
        self.division = (source, target), self.max_seq_len
        for cross in self.cross_attentions:
            cross.source_share = source / target

    def readers(self, length: int) -> list[tuple[Tower, int]]:
        """The encoder and the decoder, each with the tokens that it reads of a window of `length`."""
        (source, target), whole = self.division
        return [(self.encoder, length * source // whole), (self, length * target // whole)]
