"""Activation memory of a training step, measured on meta tensors."""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from omegaconf import DictConfig
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from llama_lab.config.components import build, build_model
from llama_lab.model import Decoder, attention, blocked_attention, loss
from llama_lab.model.cost import random_batch
from llama_lab.model.recompute import recompute
from llama_lab.training.model_check import allocate, optimizer_bytes

if TYPE_CHECKING:
    from llama_lab.training.module import LanguageModel

CHUNKS = 2  # of a loss that are computed: a long context has thousands of them


class PeakMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tracks the bytes of tensors allocated while it is active: `live` now, and their `peak`. Views cost nothing."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {id(x.untyped_storage()) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        out = func(*args, **(kwargs or {}))
        for storage in [x.untyped_storage() for x in tree_leaves(out) if isinstance(x, Tensor)]:
            key, size = id(storage), storage.nbytes()
            if key not in before | self._known:
                self._known.add(key)
                weakref.finalize(storage, self._free, key, size)
                self.live += size
                self.peak = max(self.peak, self.live)
        return out

    def _free(self, key: int, size: int) -> None:
        """Count no longer a storage that is freed."""
        self._known.discard(key)
        self.live -= size


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Inside, keys and values are repeated where a GPU's kernels need that, and a loss has chunks as large as there.

    Only the first of these are computed: all take the same memory.
    """
    of_cpu, all_chunks, must_repeat = loss.CHUNK["cpu"], loss.chunks, attention.must_repeat_heads
    largest, blocked_attention.LARGEST = blocked_attention.LARGEST, 0
    loss.CHUNK["cpu"] = loss.CHUNK["cuda"]
    loss.chunks = lambda n, size: islice(all_chunks(n, size), CHUNKS)
    attention.must_repeat_heads = partial(must_repeat, on_cuda=True)
    try:
        yield
    finally:
        loss.CHUNK["cpu"], loss.chunks, attention.must_repeat_heads = of_cpu, all_chunks, must_repeat
        blocked_attention.LARGEST = largest


@dataclass(frozen=True)
class Footprint:
    """Memory of training the model that a config describes, beside parameters and gradients.

    steps: of the training. dtype: of the parameters. mixed: whether bf16 autocast is on.
    """

    cfg: DictConfig
    vocab_size: int
    steps: int
    dtype: torch.dtype
    mixed: bool

    def optimizer_bytes(self) -> int:
        """Bytes of the optimizer's states after a step."""
        return self._of_any_depth(lambda layers: 2 * (optimizer_bytes(self._first_layers(layers), self.cfg.optim),))

    def activation_bytes(self, sequences: int) -> int:
        """Peak bytes of a forward and backward pass over `sequences` whole contexts.

        They hold what autograd saves (counted by hand in Korthikanti et al. 2022, section 4.1), autocast's copies of
        the weights, and temporaries, of which the float32 logits are the largest.
        """
        return self._of_any_depth(lambda layers: self._activation_bytes(layers, sequences))

    def _of_any_depth(self, measure: Callable[[int], tuple[int, int]]) -> int:
        """A peak at the config's depth, extrapolated from two shallow models, since every period needs the same.

        measure: the peak at a depth, and what is kept until the backward pass. Where an unusual layer sets the peak of
        shallow models, it grows by less than that, and deeper ones are measured.
        """
        layers: int = self.cfg.model.n_layers
        first, period = self._repeats
        shallow = first - 1 + 2 * period + (layers - first + 1) % period
        while layers > shallow + period:
            (less, kept), (more, kept_later) = measure(shallow), measure(shallow + period)
            if more - less >= kept_later - kept:
                return less + (layers - shallow) // period * (more - less)
            shallow += period * (shallow // period)
        return measure(layers)[0]

    @cached_property
    def _repeats(self) -> tuple[int, int]:
        """From which layer on they repeat, at least 1, and after how many, by the attributes of their modules."""
        model = self.model
        parts = [(*model.position_at(i).modules(), *block.modules()) for i, block in enumerate(model.blocks)]
        traits_of = [[traits(part) for part in own] for own in parts]
        kinds = [traits_of.index(own) for own in traits_of]

        def first(period: int) -> int:
            return max((i + 1 for i in range(len(kinds) - period) if kinds[i] != kinds[i + period]), default=1)

        repeats = [(first(period), period) for period in range(1, len(kinds) + 1)]
        return min(repeats, key=lambda repeat: repeat[0] + 2 * repeat[1])

    def _activation_bytes(self, layers: int, sequences: int) -> tuple[int, int]:
        """`step_bytes` of the first `layers` layers."""
        from llama_lab.training.module import LanguageModel  # Lightning takes seconds, and plans import this file

        cfg, model = self.cfg, self._first_layers(layers)
        # On fake CPU tensors, since meta tensors support neither autocast nor kernels.
        with FakeTensorMode(allow_non_fake_inputs=True), as_on_a_gpu():
            batch = random_batch(model, sequences, cfg.model.max_seq_len)
            allocate(model)
            recompute(model, cfg.train.recompute)
            for p in model.parameters():
                p.grad = torch.zeros_like(p)  # so that backward passes add to it, as after a step's first micro-batch
            optimizer, schedule = build(cfg.optim, "optim"), build(cfg.schedule, "schedule")
            weights = cfg.train.z_loss, cfg.train.label_smoothing or 0.0
            module = LanguageModel(model, optimizer, schedule, self.steps, 1, None, *weights)
            return step_bytes(module, batch, self.mixed)

    @cached_property
    def model(self) -> Decoder:
        """The decoder, on the meta device."""
        with torch.device("meta"):
            model: Decoder = build_model(self.cfg, self.vocab_size, eot_id=0)
        return model.to(self.dtype)

    def _first_layers(self, layers: int) -> Decoder:
        """A copy of the decoder with its first `layers` layers."""
        copies: dict[int, Any] = {}
        copies[id(self.model.blocks)] = deepcopy(self.model.blocks[:layers], copies)
        return deepcopy(self.model, copies)


def traits(module: nn.Module) -> tuple[object, ...]:
    """What the memory of a module depends on: its class, plain attributes, and shapes of parameters."""
    plain = {name: value for name, value in vars(module).items() if isinstance(value, str | int | float | None)}
    return type(module), plain, [p.shape for p in module.parameters(recurse=False)]


def step_bytes(module: "LanguageModel", batch: Sequence[Tensor], mixed: bool) -> tuple[int, int]:
    """Peak bytes of a micro-batch's forward and backward pass, and those kept between the two.

    Beside existing parameters and gradients.
    """
    memory = PeakMemory()
    with memory:
        with torch.autocast("cpu", torch.bfloat16, enabled=mixed, cache_enabled=False):  # as Lightning has it
            _, objective = module.loss(*batch)
        kept = memory.live
        torch.autograd.backward(objective)
    return memory.peak, kept
