"""One side of `python -m benchmarks peers`, in a process of its own: `python side.py SPEC`, in JSON.

For a peer nothing of ours is imported, so that another environment need hold only PyTorch and the peer. The process
answers in lines of JSON: once when it is ready, and then each line of its input, which is a number of steps or texts.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.metadata import version
from itertools import islice
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR


@dataclass(frozen=True)
class Shape:
    """A Llama whose head is not tied, as configs name its sizes. theta: of RoPE. eps: of RMSNorm."""

    vocab_size: int
    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    hidden_dim: int
    max_seq_len: int
    theta: float
    eps: float


@dataclass(frozen=True)
class Spec:
    """What a side does.

    overrides: of our config whose `shape` it is. bf16: autocast in training, weights of that type in decoding.
    optim: AdamW's lr, beta1, beta2, eps and weight_decay. new_tokens: of a greedy text after `prompt` tokens; 0 to
    train on batches of `batch_size` sequences of `max_seq_len` tokens.
    """

    side: str
    shape: Shape
    overrides: tuple[str, ...]
    optim: dict[str, float]
    grad_clip: float
    batch_size: int
    threads: int
    compile: bool = False
    bf16: bool = False
    prompt: int = 0
    new_tokens: int = 0

    @property
    def tokens(self) -> int:
        """Tokens of a step, or new ones of a text."""
        return self.new_tokens or self.batch_size * self.shape.max_seq_len

    def dumps(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def loads(cls, text: str) -> "Spec":
        """From JSON."""
        values = json.loads(text)
        return cls(**values | {"shape": Shape(**values["shape"])})


class Side(NamedTuple):
    """What differs between the sides.

    loss: of inputs and targets, both int64 `(B, T)`, in nats per token. generate: continues a prompt `(1, T)` greedily
    by a number of tokens, and returns how many it made.
    """

    model: nn.Module
    optimizer: Optimizer
    loss: Callable[[Tensor, Tensor], Tensor]
    generate: Callable[[Tensor, int], int]


def ours(spec: Spec) -> Side:
    """Our decoder, with the loss and the optimizer of a run."""
    from benchmarks.decoders import compose
    from llama_lab.config.components import build, build_model
    from llama_lab.model import Sampling, generate
    from llama_lab.training.compiling import compile_in_place
    from llama_lab.training.module import LanguageModel

    cfg = compose(*spec.overrides)
    model = build_model(cfg, spec.shape.vocab_size)
    optimizer, schedule = build(cfg.optim, "optim"), build(cfg.schedule, "schedule")
    module = LanguageModel(model, optimizer, schedule, steps=1, bytes_per_token=1, z_loss=cfg.train.z_loss)

    def text(prompt: Tensor, new_tokens: int) -> int:
        return len(list(generate(model, prompt.tolist(), new_tokens, Sampling(temperature=0))))

    if spec.compile:
        compile_in_place(model)
    return Side(model, optimizer(model), lambda inputs, targets: module.loss(inputs, targets)[1], text)


def transformers(spec: Spec) -> Side:
    """`LlamaForCausalLM`, with its own loss and `generate`."""
    model = llama(spec.shape)

    def loss(inputs: Tensor, targets: Tensor) -> Tensor:
        result: Tensor = model(inputs, labels=targets, shift_labels=targets, use_cache=False).loss
        return result

    return Side(model, peers_adamw(model, spec), loss, lambda prompt, new_tokens: continued(model, prompt, new_tokens))


def llama(shape: Shape, tied: bool = False) -> Any:
    """`transformers`' Llama of a shape, which never ends a text."""
    transformers: Any = import_module("transformers")
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=shape.vocab_size,
            hidden_size=shape.dim,
            intermediate_size=shape.hidden_dim,
            num_hidden_layers=shape.n_layers,
            num_attention_heads=shape.n_heads,
            num_key_value_heads=shape.n_kv_heads,
            head_dim=shape.head_dim,
            max_position_embeddings=shape.max_seq_len,
            rms_norm_eps=shape.eps,
            rope_parameters={"rope_type": "default", "rope_theta": shape.theta},
            tie_word_embeddings=tied,
        )
    )
    model.generation_config.eos_token_id = None
    return model


def continued(model: Any, prompt: Tensor, new_tokens: int) -> int:
    """Continue `prompt (1, T)` greedily with the `generate` of `transformers`; the number of new tokens."""
    config = import_module("transformers").GenerationConfig(
        max_new_tokens=new_tokens, do_sample=False, use_cache=True, pad_token_id=0
    )
    length: int = model.generate(prompt, config, attention_mask=torch.ones_like(prompt)).shape[1]
    return length - prompt.shape[1]


def x_transformers(spec: Spec) -> Side:
    """x-transformers' decoder; its gated feed-forward has a bias that cannot be switched off."""
    package: Any = import_module("x_transformers")
    s = spec.shape
    layers = package.Decoder(
        dim=s.dim,
        depth=s.n_layers,
        heads=s.n_heads,
        attn_kv_heads=s.n_kv_heads,
        attn_dim_head=s.head_dim,
        attn_flash=True,
        rotary_pos_emb=True,
        rotary_emb_dim=s.head_dim,
        use_rmsnorm=True,
        ff_glu=True,
        ff_swish=True,
        ff_no_bias=True,
        ff_mult=(s.hidden_dim + 0.5) / s.dim,  # which is rounded down
        verbose=False,
    )
    model = package.TransformerWrapper(
        num_tokens=s.vocab_size, max_seq_len=s.max_seq_len, attn_layers=layers, use_abs_pos_emb=False
    )
    generator = package.AutoregressiveWrapper(model)

    def text(prompt: Tensor, new_tokens: int) -> int:
        new: Tensor = generator.generate(prompt, new_tokens, temperature=0.0, cache_kv=True)
        return new.shape[1]

    return Side(model, peers_adamw(model, spec), cross_entropy_of(model), text)


def litgpt(spec: Spec) -> Side:
    """LitGPT's model, with its own `generate`."""
    package: Any = import_module("litgpt")
    generate = import_module("litgpt.generate.base").generate
    s = spec.shape
    model = package.GPT(
        package.Config(
            block_size=s.max_seq_len,
            n_layer=s.n_layers,
            n_embd=s.dim,
            n_head=s.n_heads,
            n_query_groups=s.n_kv_heads,
            head_size=s.head_dim,
            intermediate_size=s.hidden_dim,
            vocab_size=s.vocab_size,
            padded_vocab_size=s.vocab_size,
            norm_class_name="RMSNorm",
            norm_eps=s.eps,
            mlp_class_name="LLaMAMLP",
            parallel_residual=False,
            bias=False,
            rotary_percentage=1.0,
            rope_base=int(s.theta),
        )
    )
    if spec.new_tokens:
        model.set_kv_cache(batch_size=1)

    def text(prompt: Tensor, new_tokens: int) -> int:
        new: Tensor = generate(model, prompt[0], prompt.shape[1] + new_tokens, temperature=0.0, include_prompt=False)
        return len(new)

    return Side(model, peers_adamw(model, spec), cross_entropy_of(model), text)


SIDES = {"ours": ours, "transformers": transformers, "x-transformers": x_transformers, "litgpt": litgpt}


def cross_entropy_of(model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    """The loss of a model that returns logits `(B, T, V)`."""
    return lambda inputs, targets: F.cross_entropy(model(inputs).float().flatten(0, 1), targets.flatten())


def peers_adamw(model: nn.Module, spec: Spec) -> Optimizer:
    """PyTorch's fused AdamW on a peer, whose matrices get our initial distribution first; only they decay."""
    torch.manual_seed(0)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    for p in matrices:
        nn.init.normal_(p, std=0.02)
    groups = [
        {"params": matrices, "weight_decay": spec.optim["weight_decay"]},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    betas = (spec.optim["beta1"], spec.optim["beta2"])
    return AdamW(groups, lr=spec.optim["lr"], betas=betas, eps=spec.optim["eps"], fused=True)


def batches(spec: Spec) -> Iterator[Tensor]:
    """Endless batches `(batch_size, max_seq_len + 1)` of tokens drawn by Zipf's law, the same for all sides.

    So there is something to learn: the loss starts near ln(vocab_size) and falls to the entropy of that law.
    """
    generator = torch.Generator().manual_seed(0)
    weights = 1 / torch.arange(1, spec.shape.vocab_size + 1)
    size = (spec.batch_size, spec.shape.max_seq_len + 1)
    while True:
        yield torch.multinomial(weights, size[0] * size[1], replacement=True, generator=generator).view(size)


class Work:
    """A side at work: every call of `train` or `decode` goes on where the last one stopped."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        torch.set_num_threads(spec.threads)
        self.side = SIDES[spec.side](spec)
        self._batches = batches(spec)
        self._scheduler = LambdaLR(self.side.optimizer, lambda _: 1.0)  # every training has one
        if spec.new_tokens:
            self.side.model.eval()
            if spec.bf16:
                self.side.model.bfloat16()
        if spec.compile and SIDES[spec.side] is not ours:  # a run of ours compiles block by block
            self.side.model.compile()

    def train(self, steps: int) -> dict[str, Any]:
        """Seconds of `steps` steps, those of their clipping and optimizer alone, and each loss, in nats per token."""
        side, spec = self.side, self.spec
        parameters = list(side.model.parameters())
        drawn = [(t[:, :-1].contiguous(), t[:, 1:].contiguous()) for t in islice(self._batches, steps)]
        losses, updating = [], 0.0
        start = time.perf_counter()
        for inputs, targets in drawn:
            with torch.autocast("cpu", torch.bfloat16) if spec.bf16 else nullcontext():
                loss = side.loss(inputs, targets)
            loss.backward()  # type: ignore[no-untyped-call]
            before = time.perf_counter()
            nn.utils.clip_grad_norm_(parameters, spec.grad_clip)
            side.optimizer.step()
            side.optimizer.zero_grad()
            self._scheduler.step()
            updating += time.perf_counter() - before
            losses.append(loss.detach())
        seconds = time.perf_counter() - start
        return {"seconds": seconds, "update_seconds": updating, "losses": [float(loss) for loss in losses]}

    @torch.inference_mode()
    def decode(self, texts: int) -> dict[str, Any]:
        """Seconds of `texts` greedy texts, each after the same prompt. Raises RuntimeError if one ends early."""
        spec = self.spec
        prompt = next(self._batches)[:1, : spec.prompt]
        start = time.perf_counter()
        for _ in range(texts):
            made = self.side.generate(prompt, spec.new_tokens)
            if made != spec.new_tokens:
                raise RuntimeError(f"{spec.side}: the text ended after {made} tokens")
        return {"seconds": time.perf_counter() - start, "losses": []}


def main() -> None:
    """Answer a line for each line of standard input; what a library prints goes to standard error."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    spec = Spec.loads(sys.argv[1])
    try:
        work = Work(spec)
    except ModuleNotFoundError as error:
        print(json.dumps({"missing": error.name}), file=answers)
        return
    params = sum(p.numel() for p in work.side.model.parameters())
    release = version("llama-lab" if spec.side == "ours" else spec.side)
    print(json.dumps({"params": params, "version": release, "torch": torch.__version__}), file=answers)
    for line in sys.stdin:
        run = work.decode if spec.new_tokens else work.train
        print(json.dumps(run(int(line))), file=answers)


if __name__ == "__main__":
    main()
