"""The contenders of `python -m benchmarks peers`: one Llama, by us and by others, trains or continues a text."""

import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from importlib import import_module
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from llama_lab.api import load_config
from llama_lab.config.components import build
from llama_lab.model import Sampling, generate
from llama_lab.training.compiling import compile_in_place
from llama_lab.training.module import LanguageModel

from .decoders import build_decoder

INITIAL = ("model.init.std=0.02", "model.embedding.std=0.02", "optim.lr=2e-3")  # as the other libraries have


@dataclass(frozen=True)
class Spec:
    """What a contender does: with the Llama of a config with these overrides.

    bf16: autocast in training, weights of that type in decoding. new_tokens: of a greedy text after `prompt` tokens;
    0 to train.
    """

    overrides: tuple[str, ...]
    compile: bool = False
    bf16: bool = False
    prompt: int = 0
    new_tokens: int = 0

    @property
    def config(self) -> DictConfig:
        """The config whose sizes, batches and optimizer all contenders take."""
        return load_config((*INITIAL, *self.overrides))


class Contender:
    """A library at work: every call of `train` or `decode` goes on where the last one stopped."""

    model: Any

    def __init__(self, spec: Spec) -> None:
        self.spec, self.cfg = spec, spec.config
        self.optimizer = self.build(self.cfg)
        self._batches = batches(self.cfg)
        if spec.new_tokens:
            self.model.eval()
            if spec.bf16:
                self.model.bfloat16()
        if spec.compile:
            self.compile()

    def build(self, cfg: DictConfig) -> Optimizer:
        """Build the model, and return its optimizer."""
        raise NotImplementedError

    def compile(self) -> None:
        """Compile the model as its users do."""
        self.model.compile()

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The loss in nats per token, of int64 `(B, T)`; by default that of a model that returns logits."""
        return F.cross_entropy(self.model(inputs).float().flatten(0, 1), targets.flatten())

    def generate(self, prompt: Tensor, new_tokens: int) -> int:
        """Continue a prompt `(1, T)` greedily; the number of tokens that were made."""
        raise NotImplementedError

    def train(self, steps: int) -> tuple[float, list[float]]:
        """Seconds of so many steps, and each loss, in nats per token."""
        parameters = list(self.model.parameters())
        drawn = [(t[:, :-1].contiguous(), t[:, 1:].contiguous()) for t in islice(self._batches, steps)]
        losses = []
        start = time.perf_counter()
        for inputs, targets in drawn:
            with torch.autocast("cpu", torch.bfloat16) if self.spec.bf16 else nullcontext():
                loss = self.loss(inputs, targets)
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(parameters, self.cfg.train.grad_clip)
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(loss.detach())
        return time.perf_counter() - start, [float(loss) for loss in losses]

    @torch.inference_mode()
    def decode(self, texts: int) -> tuple[float, list[float]]:
        """Seconds of so many greedy texts, each after the same prompt. Raises RuntimeError if one ends early."""
        prompt = next(self._batches)[:1, : self.spec.prompt]
        start = time.perf_counter()
        for _ in range(texts):
            made = self.generate(prompt, self.spec.new_tokens)
            if made != self.spec.new_tokens:
                raise RuntimeError(f"the text of {type(self).__name__} ended after {made} tokens")
        return time.perf_counter() - start, []


class Ours(Contender):
    """Our decoder, with the loss and the optimizer of a run."""

    def build(self, cfg: DictConfig) -> Optimizer:
        """Our model and optimizer."""
        self.model = build_decoder(cfg, torch.device("cpu")).train()
        optimizer, schedule = build(cfg.optim, "optim"), build(cfg.schedule, "schedule")
        self._module = LanguageModel(self.model, optimizer, schedule, 1, 1, z_loss=cfg.train.z_loss)
        made: Optimizer = optimizer(self.model)
        return made

    def compile(self) -> None:
        """Block by block, as a run does."""
        compile_in_place(self.model)

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The loss of a run."""
        return self._module.loss(inputs, targets)[1]

    def generate(self, prompt: Tensor, new_tokens: int) -> int:
        """Our `generate`."""
        return len(list(generate(self.model, prompt.tolist(), new_tokens, Sampling(temperature=0))))


class Transformers(Contender):
    """`LlamaForCausalLM`, with its own loss and `generate`."""

    def build(self, cfg: DictConfig) -> Optimizer:
        """Their model, with fused AdamW."""
        self.model = llama(cfg.model)
        return adamw(self.model, cfg.optim)

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Their own loss."""
        result: Tensor = self.model(inputs, labels=targets, shift_labels=targets, use_cache=False).loss
        return result

    def generate(self, prompt: Tensor, new_tokens: int) -> int:
        """Their `generate`."""
        return continued(self.model, prompt, new_tokens)


class XTransformers(Contender):
    """x-transformers' decoder; its gated feed-forward has a bias that cannot be switched off."""

    def build(self, cfg: DictConfig) -> Optimizer:
        """Their model, with fused AdamW."""
        from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

        m = cfg.model
        layers = Decoder(
            dim=m.dim,
            depth=m.n_layers,
            heads=m.n_heads,
            attn_kv_heads=m.n_kv_heads,
            attn_dim_head=m.head_dim,
            attn_flash=True,
            rotary_pos_emb=True,
            rotary_emb_dim=m.head_dim,
            use_rmsnorm=True,
            ff_glu=True,
            ff_swish=True,
            ff_no_bias=True,
            ff_mult=(m.hidden_dim + 0.5) / m.dim,  # which is rounded down
            verbose=False,
        )
        self.model = TransformerWrapper(
            num_tokens=m.vocab_size, max_seq_len=m.max_seq_len, attn_layers=layers, use_abs_pos_emb=False
        )
        self._generator = AutoregressiveWrapper(self.model)
        return adamw(self.model, cfg.optim)

    def generate(self, prompt: Tensor, new_tokens: int) -> int:
        """Their `generate`."""
        new: Tensor = self._generator.generate(prompt, new_tokens, temperature=0.0, cache_kv=True)
        return new.shape[1]


CONTENDERS: dict[str, type[Contender]] = {"ours": Ours, "transformers": Transformers, "x-transformers": XTransformers}


def llama(model: DictConfig) -> Any:
    """`transformers`' Llama of a config's `model`, which never ends a text."""
    from transformers import LlamaConfig, LlamaForCausalLM

    theirs = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=model.vocab_size,
            hidden_size=model.dim,
            intermediate_size=model.hidden_dim,
            num_hidden_layers=model.n_layers,
            num_attention_heads=model.n_heads,
            num_key_value_heads=model.n_kv_heads,
            head_dim=model.head_dim,
            max_position_embeddings=model.max_seq_len,
            rms_norm_eps=model.norm.eps,
            rope_parameters={"rope_type": "default", "rope_theta": model.position.theta},
            tie_word_embeddings=model.embedding.tied,
        )
    )
    theirs.generation_config.eos_token_id = None
    return theirs


def continued(model: Any, prompt: Tensor, new_tokens: int) -> int:
    """Continue `prompt (1, T)` greedily with the `generate` of `transformers`; the number of new tokens."""
    config = import_module("transformers").GenerationConfig(
        max_new_tokens=new_tokens, do_sample=False, use_cache=True, pad_token_id=0
    )
    length: int = model.generate(prompt, config, attention_mask=torch.ones_like(prompt)).shape[1]
    return length - prompt.shape[1]


def adamw(model: nn.Module, optim: DictConfig) -> Optimizer:
    """PyTorch's fused AdamW on a peer, whose matrices get our initial distribution first; only they decay."""
    torch.manual_seed(0)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    for p in matrices:
        nn.init.normal_(p, std=0.02)
    vectors = {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0}
    groups = [{"params": matrices, "weight_decay": optim.weight_decay}, vectors]
    return AdamW(groups, lr=optim.lr, betas=(optim.beta1, optim.beta2), eps=optim.eps, fused=True)


def batches(cfg: DictConfig) -> Iterator[Tensor]:
    """Endless batches `(batch_size, max_seq_len + 1)` of tokens drawn by Zipf's law, the same for all contenders.

    So there is something to learn: the loss starts near ln(vocab_size) and falls to the entropy of that law.
    """
    generator = torch.Generator().manual_seed(0)
    weights = 1 / torch.arange(1, cfg.model.vocab_size + 1)
    size = (cfg.train.batch_size, cfg.model.max_seq_len + 1)
    while True:
        yield torch.multinomial(weights, size[0] * size[1], replacement=True, generator=generator).view(size)


_here: list[Contender] = []  # the contender of this process


def begin(name: str, spec: Spec) -> int:
    """Build a contender in this process, for `work`; its number of parameters."""
    _here[:] = [CONTENDERS[name](spec)]
    return sum(p.numel() for p in _here[0].model.parameters())


def work(count: int) -> tuple[float, list[float]]:
    """Let the contender of this process train for so many steps, or make so many texts: the seconds, and each loss."""
    (contender,) = _here
    return contender.decode(count) if contender.spec.new_tokens else contender.train(count)
