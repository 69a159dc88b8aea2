"""The decoder-only language model: embeddings, blocks, head. Components are built by factories."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .attention_context import AttentionContext
from .block import Block
from .embedding import Embedding
from .encoding import Position
from .init import WeightInit, initialise
from .loss import IGNORE, head_loss
from .mixer import NEW_STATE, Mixer, class_name
from .norm import Norm
from .state import DecoderState, State
from .tower import Tower, call

LARGEST = 2**30  # of any size, so that the bytes of a matrix fit into 64 bits


class Decoder(Tower):
    """A decoder built from one component per slot; each slot is a factory.

    Those of position, attention, ffn and init are called with the following arguments that their signatures name.
    position, attention and ffn: the sizes below but vocab_size, and norm. attention and ffn also: layer, counted from
    0. position also: layers, those in which it acts. init: sizes. A block is called with dim, dropout, norm,
    attention and, if its signature names it, ffn; else ffn and hidden_dim are None in its layers.

    vocab_size, dim, n_layers, n_heads, n_kv_heads, head_dim, hidden_dim, max_seq_len: sizes, named as in LLaMA.
    layers: overrides of components and sizes for the layers `at`, counted from 0; later entries win.
    dropout: on the embeddings and on every residual branch (Vaswani et al. 2017, section 5.4).
    embedding, norm, position, attention, ffn, block, init: the components.
    seed: of the initial parameters; see `init.py`.
    document_start_id: id of the token that starts a document, if attention must not cross documents; else None.
    Raises ValueError, its message beginning with the setting at fault.
    """

    start_id: int | None = None  # what the decoder of a source begins with; see `EncoderDecoder`

    def __init__(
        self,
        vocab_size: int,
        dim: int,
        n_layers: int,
        n_heads: int,
        n_kv_heads: int,
        head_dim: int,
        hidden_dim: int | None,
        max_seq_len: int,
        embedding: Callable[..., Embedding],
        norm: Norm,
        position: Callable[..., Position],
        attention: Callable[..., Mixer],
        ffn: Callable[..., nn.Module] | None,
        block: Callable[..., Block],
        init: Callable[..., WeightInit],
        layers: Sequence[Mapping[str, Any]] = (),
        dropout: float = 0.0,
        seed: int = 0,
        document_start_id: int | None = None,
    ) -> None:
        super().__init__()
        heads = {"n_heads": n_heads, "n_kv_heads": n_kv_heads, "head_dim": head_dim}
        sizes = {"dim": dim, "n_layers": n_layers, **heads, "hidden_dim": hidden_dim, "max_seq_len": max_seq_len}
        for name, size in {"vocab_size": vocab_size, **sizes}.items():
            if (name, size) == ("hidden_dim", None):
                continue  # of blocks without a feed-forward
            if not isinstance(size, int) or not 1 <= size <= LARGEST:
                raise ValueError(f"{name}={size}: must be a positive whole number, and at most {LARGEST}")
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout={dropout}: must be at least 0 and less than 1")
        self.vocab_size, self.dim, self.max_seq_len = vocab_size, dim, max_seq_len
        self.embedding = embedding(vocab_size=vocab_size, dim=dim, norm=norm)
        parts: dict[str, Any] = {"position": position, "attention": attention, "ffn": ffn, "block": block}
        self.make_blocks(sizes, norm=norm, **parts, layers=layers, dropout=dropout)
        for mixer in self.mixers:
            if document_start_id is not None and not mixer.documents:
                raise ValueError(
                    f"attention={class_name(mixer)}: tokens see other documents; set data.document_mask=false, or have "
                    f"it start anew where context.positions is 0, and say so with `documents = True`"
                )
        self.prefix = max(mixer.prefix for mixer in self.mixers)
        if self.prefix >= max_seq_len:
            raise ValueError(f"attention.prefix={self.prefix}: max_seq_len={max_seq_len} ends there; make it smaller")
        if self.prefix and document_start_id is not None:
            raise ValueError(
                f"attention.prefix={self.prefix}: with documents, sequences would predict unequally many tokens; "
                f"set it to null, or data.document_mask=false"
            )
        self.document_start_id = document_start_id
        self.weight_init, self.seed = call(init, **sizes), seed
        initialise(self, self.weight_init, seed)

    def forward(self, tokens: Tensor, state: DecoderState | None = None, *given: Tensor) -> Tensor:
        """Logits `(B, T, V)` for the token after each of `tokens (B, T)`, which follow those in `state`.

        given: how many first tokens of each sequence all its tokens see, `(B,)`; default: what the mixers have.
        Raises ValueError if positions or the state are exhausted, or the state has another batch size.
        """
        return self.embedding.logits(self.hidden_states(tokens, state, *given))

    def loss(
        self, tokens: Tensor, targets: Tensor, *given: Tensor, z_loss: float = 0.0, label_smoothing: float = 0.0
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The summed loss of `tokens (B, T)` against `targets (B, T)`, the objective and more; see `head_loss`."""
        return head_loss(self.embedding, self.hidden_states(tokens, None, *given), targets, z_loss, label_smoothing)

    def hidden_states(self, tokens: Tensor, state: DecoderState | None = None, *given: Tensor) -> Tensor:
        """Final hidden states `(B, T, D)`, the input of the head; see `forward`."""
        B, T = tokens.shape
        if state is None:
            positions, shortest, longest = torch.arange(T, device=tokens.device), 0, 0
        else:
            positions, shortest, longest = state.next_positions(B, T)
        if ended := self.length_error(longest + T):
            raise ValueError(f"max_seq_len={self.max_seq_len}: {ended}, not at {longest + T} tokens")
        context = self.attention_context(tokens, positions.to(tokens.device), shortest, longest, state, *given)
        if state is None:
            return self.run_blocks(tokens, context)
        x = self.run_blocks(tokens, context, state.layers)
        state.lengths += T
        return x

    def attention_context(
        self, tokens: Tensor, at: Tensor, shortest: int, longest: int, state: DecoderState | None, *given: Tensor
    ) -> AttentionContext:
        """The context of a forward pass over `tokens (B, T)`; records new document starts in `state`."""
        if self.document_start_id is None:
            return AttentionContext(self.position, at, shortest, longest, None, *given)
        before = 0 if state is None else state.starts[:, None]
        starts = torch.where(tokens == self.document_start_id, at, before).cummax(-1).values
        if state is not None:
            state.starts.copy_(starts[:, -1])
        return AttentionContext(self.position, at, shortest, longest, starts, *given)

    def cut(self, inputs: Tensor, targets: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
        """The arguments of `loss` for windows: `targets (B, T)` are IGNORE in the mixers' prefix, which is seen."""
        seen = torch.arange(targets.shape[1], device=targets.device) < self.prefix - 1
        return inputs, targets.clamp(min=IGNORE).masked_fill(seen, IGNORE), *given

    def read_prompt(self, prompt: Tensor, state: DecoderState) -> Tensor:
        """The hidden states `(1, T, D)` of a `prompt (1, T)`, which begins the empty `state`."""
        return self.hidden_states(prompt, state)

    def run_blocks(self, tokens: Tensor, context: AttentionContext, states: Sequence[State] | None = None) -> Tensor:
        """Embeddings, blocks and final norm: `tokens (B, T)` to `(B, T, D)`; updates the mixers' `states` in place."""
        return self.transform(self.embedding(tokens), context, states)

    @property
    def decodes(self) -> bool:
        """Whether all mixers have a state to decode with; never in an encoder, which predicts no next token."""
        return self.causal and all(mixer.has_state for mixer in self.mixers)

    def new_state(self, batch_size: int, context: int | None = None, dtype: torch.dtype | None = None) -> DecoderState:
        """An empty state for `context` tokens (default: `max_seq_len`), in `dtype` (default: the model's).

        It slides, and accepts any number of tokens, if no layer needs more than `context` of them. Raises ValueError
        for a mixer without `new_state`, a state whose first dimension is not the batch, or an unsupported `dtype`.
        """
        weight = self.embedding.tokens.weight
        context, dtype = context or self.max_seq_len, dtype or weight.dtype
        layers = []
        for i, mixer in enumerate(self.mixers):
            name = f"blocks.{i}.attention: {type(mixer).__name__}"
            if not mixer.has_state:
                raise ValueError(f"{name} must read the whole text again for every new token; give it {NEW_STATE}")
            if dtype == torch.int8 and not mixer.int8_state:
                raise ValueError(f"{name} cannot keep its state in int8; choose a floating dtype")
            state = mixer.new_state(batch_size, context, weight.device, dtype)
            for tensor in state.tensors:
                if tensor.ndim == 0 or len(tensor) != batch_size:
                    raise ValueError(
                        f"{name}.new_state({batch_size}, ...) has a tensor of shape {tuple(tensor.shape)}; its first "
                        f"dimension must be the batch, {batch_size}"
                    )
            layers.append(state)
        slides = all(m.max_state_tokens is not None and m.max_state_tokens <= context for m in self.mixers)
        lengths, starts = (torch.zeros(batch_size, dtype=torch.long, device=at) for at in ("cpu", weight.device))
        return DecoderState(layers, lengths, starts, context, slides)

    def source_bytes(self, length: int, dtype: torch.dtype) -> int | None:
        """Bytes that a state takes for a source of `length` tokens; None: there is none."""
        return None

    @property
    def max_context(self) -> int | None:
        """Largest number of tokens; None if the states of all layers stop growing and positions have no limit."""
        slides = all(mixer.max_state_tokens is not None for mixer in self.mixers)
        return None if slides and not any(one.max_positions for one in self.encodings) else self.max_seq_len
