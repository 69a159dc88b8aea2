"""Estimate a run on devices that need not be here: memory per device, FLOPs, time, and the nearest setup that fits.

The memory of a device is the sum of what it holds at the peak of a step (Rajbhandari et al. 2020, ZeRO, section 3):
weights, gradients, optimizer states, and the activations of one micro-batch. In bf16-mixed, Lightning keeps the first
three in float32: 16 bytes per parameter with AdamW. bf16-true halves that. `train.ema` adds a copy of the weights.

DDP: every device holds everything, and PyTorch's reducer a second copy of the gradients, its buckets. Autocast keeps a
bf16 copy of the weights of all linear layers from the forward pass to the backward pass, but for those in parts that
are recomputed.

FSDP: weights, gradients and optimizer states are sharded over the devices (ZeRO-3). A device also gathers, in bf16 but
for 32-true, the current block and the next, and holds the gradients of one; what belongs to no block (token table,
head, last norm) stays gathered for the whole step, with its gradients.

Not counted: the CUDA context, NCCL's buffers, kernel workspaces and fragmentation, for which `USABLE` leaves room.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import product
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch import nn
from torch.utils.benchmark import Timer

from llama_lab.config.components import build, model_cost
from llama_lab.data.batch_size import micro_batches_per_step, multiples_around
from llama_lab.data.objectives import kind_of
from llama_lab.data.open import is_probe, open_probe
from llama_lab.devices.hardware import (
    asked_counts,
    check_strategy,
    choose_accelerator,
    choose_precision,
    has_native_bf16,
)
from llama_lab.devices.performance import Device, device_memory, named, options
from llama_lab.model import Cost
from llama_lab.model.cost import count
from llama_lab.model.recompute import PARTS, recomputed_flops
from llama_lab.training.run import budget_steps, check_numbers, check_small_updates
from llama_lab.util.errors import ConfigError, first_line, suggestion

from .activations import Footprint

USABLE = 0.95  # fraction of a device's memory: about what the CUDA context and fragmentation leave
MOST_DEVICES = 2**17
MOST_PARTS = 2**16  # of a step on one device


@dataclass(frozen=True)
class Setup:
    """What memory depends on beside the model. devices: over all nodes. micro_batch: sequences per device at once."""

    sharded: bool
    devices: int
    batch_size: int
    micro_batch: int
    seq_len: int

    @property
    def layout(self) -> str:
        """Name of the way in which devices share the work."""
        if self.sharded:
            return "FSDP"
        return "DDP" if self.devices > 1 else "one device"


@dataclass(frozen=True)
class Memory:
    """Bytes on one device.

    ema: the average of the weights. buckets: DDP's gradients. working: bf16 copies of weights, or FSDP's gathered
    blocks.
    """

    weights: int
    ema: int
    gradients: int
    buckets: int
    optimizer: int
    working: int
    activations: int

    @property
    def total(self) -> int:
        """Sum of all parts."""
        return sum(vars(self).values())


class MemoryModel:
    """The memory of a run, for any `Setup`. Raises ConfigError for a model that cannot be built."""

    def __init__(self, cfg: DictConfig, vocab_size: int, steps: int, precision: str) -> None:
        self.cfg, self.vocab_size, self.steps = cfg, vocab_size, steps
        self.mixed = precision == "bf16-mixed"
        self.dtype = torch.bfloat16 if precision == "bf16-true" else torch.float32
        self.gathered = torch.bfloat16 if self.mixed else self.dtype  # by FSDP
        self._footprint, self._activations = cache(self._new_footprint), cache(self._measure)
        own = self._footprint(self.dtype, cfg.model.max_seq_len)
        self.model = own.model
        self.params = count(self.model)
        self.largest_block = max(count(block) for block in self.model.all_blocks)
        self.outside = self.params - sum(count(block) for block in self.model.all_blocks)
        again = {module for part in PARTS[cfg.train.recompute](self.model) for module in part.modules()}
        kept = {m.weight for m in self.model.modules() if isinstance(m, nn.Linear) and m not in again}
        self.kept_linear = sum(weight.numel() for weight in kept)  # of the layers that are not recomputed
        self.optimizer = own.optimizer_bytes()
        self.recomputed = recomputed_flops(self.model, cfg.train.recompute)

    @cached_property
    def cost(self) -> Cost:
        """The cost of the model."""
        return model_cost(self.model)

    def memory(self, setup: Setup) -> Memory:
        """The memory of one device at the peak of a step."""
        fixed = self._fixed_memory(setup)
        measured = self._activations(setup.sharded, setup.micro_batch, setup.seq_len)
        return replace(fixed, activations=measured - (0 if setup.sharded else fixed.working))

    def fits(self, setup: Setup, limit: float) -> bool:
        """Whether one device needs at most `limit` bytes; activations are measured only if the rest fits."""
        return self._fixed_memory(setup).total <= limit and self.memory(setup).total <= limit

    def builds(self, seq_len: int) -> bool:
        """Whether the model can be built with this context."""
        try:
            return self._footprint(self.gathered, seq_len).model is not None
        except ConfigError:
            return False

    def _fixed_memory(self, setup: Setup) -> Memory:
        """The memory of one device without activations."""
        shards = setup.devices if setup.sharded else 1
        weights = math.ceil(self.params / shards) * self.dtype.itemsize
        copies = 2 * self.kept_linear if self.mixed else 0
        gathered = self.gathered.itemsize * (2 * self.outside + 3 * self.largest_block)
        return Memory(
            weights=weights,
            ema=0 if self.cfg.train.ema is None else weights,
            gradients=weights,
            buckets=weights if setup.layout == "DDP" else 0,
            optimizer=math.ceil(self.optimizer / shards),
            working=gathered if setup.sharded else copies,
            activations=0,
        )

    def _measure(self, sharded: bool, sequences: int, seq_len: int) -> int:
        """Peak bytes of a micro-batch; includes autocast's copies of the weights, unless FSDP gathers them in bf16."""
        return self._footprint(self.gathered if sharded else self.dtype, seq_len).activation_bytes(sequences)

    def _new_footprint(self, dtype: torch.dtype, seq_len: int) -> Footprint:
        cfg: Any = OmegaConf.merge(self.cfg, {"model": {"max_seq_len": seq_len}})
        return Footprint(cfg, self.vocab_size, self.steps, dtype, self.mixed)


@dataclass(frozen=True)
class Column:
    """A setup and whether it fits. nearest: if not, the nearest setup that does; None if there is none.

    recomputing: if not, the bytes that it takes with `train.recompute=block`, unless it recomputes them already.
    """

    setup: Setup
    memory: Memory
    fits: bool
    nearest: Setup | None
    recomputing: int | None = None


@dataclass(frozen=True)
class Estimate:
    """The result of an estimate of the run that `cfg` describes.

    device_name, device, precision, mfu: what it assumes, the last of a run that recomputes nothing. vocabulary: the key
    that gives the number of ids. recomputed_per_token: FLOPs beside the model's. tokens: in whole steps, over all
    devices; their batch differs from `train.batch_size` if the devices cannot share that equally.
    """

    cfg: DictConfig
    device_name: str
    device: Device
    precision: str
    mfu: float
    vocab_size: int
    vocabulary: str
    cost: Cost
    recomputed_per_token: float
    tokens: int
    columns: tuple[Column, ...]

    @property
    def setup(self) -> Setup:
        """The setup that was asked for."""
        return self.columns[0].setup

    @property
    def usable(self) -> float:
        """Bytes of a device that a run may use."""
        return USABLE * self.device.memory

    @property
    def reached_mfu(self) -> float:
        """Model FLOPs utilisation when the device computes as fast as at `mfu`, but some of it again."""
        return self.tokens_per_second * self.cost.train_flops_per_token / self.device.peak

    @property
    def seconds(self) -> float:
        """Duration of the training, without evaluation and checkpoints."""
        return self.tokens / (self.setup.devices * self.tokens_per_second)

    @property
    def tokens_per_second(self) -> float:
        """Training speed of one device."""
        return self.device.peak * self.mfu / (self.cost.train_flops_per_token + self.recomputed_per_token)


def estimate_training(cfg: DictConfig) -> Estimate:
    """Estimate the run that `cfg` describes, on the device that it names. Raises ConfigError."""
    check_mfu(cfg.estimate_mfu)
    asked = cfg.trainer.accelerator
    if cfg.device is not None and asked not in ("auto", "gpu"):
        raise ConfigError(f"trainer.accelerator={asked}: device={cfg.device} is a GPU; leave one of them out")
    accelerator = choose_accelerator(asked) if cfg.device is None else "gpu"
    name, device = find_device(cfg.device, accelerator)
    has_bf16 = accelerator != "cpu" or has_native_bf16()
    precision, _ = choose_precision(cfg.trainer.precision, accelerator, has_bf16, cfg.model.dim)
    if accelerator == "gpu" and not precision.startswith("bf16"):
        raise ConfigError(f"trainer.precision={precision}: only peaks of bf16 are known; choose auto or bf16-true")
    check_small_updates(cfg, precision)
    setup = asked_setup(cfg)
    vocab_size, vocabulary = expected_vocabulary(cfg)
    steps = budget_steps(cfg, setup.batch_size)
    layouts = [setup] if setup.sharded or setup.devices == 1 else [setup, replace(setup, sharded=True)]
    try:
        model = MemoryModel(cfg, vocab_size, steps, precision)
        columns = [column_of(layout, model, USABLE * device.memory) for layout in layouts]
        if cfg.train.recompute != "block" and not all(column.fits for column in columns):
            smaller: Any = OmegaConf.merge(cfg, {"train": {"recompute": "block"}})
            other = MemoryModel(smaller, vocab_size, steps, precision)
            columns = [c if c.fits else replace(c, recomputing=other.memory(c.setup).total) for c in columns]
    except RuntimeError as error:  # of a tensor whose bytes do not fit into 64 bits
        if "overflow" not in str(error):
            raise
        raise ConfigError(f"estimate=true: a tensor would be too large, {first_line(error)}") from error
    return Estimate(
        cfg=cfg,
        device_name=name,
        device=device,
        precision=precision,
        mfu=cfg.estimate_mfu,
        vocab_size=model.model.vocab_size,
        vocabulary=vocabulary,
        cost=model.cost,
        recomputed_per_token=model.recomputed,
        tokens=steps * setup.batch_size * setup.seq_len,
        columns=tuple(columns),
    )


def check_mfu(mfu: float) -> float:
    """The model FLOPs utilisation that is assumed. Raises ConfigError unless it is a fraction."""
    if not 0 < mfu <= 1:
        raise ConfigError(f"estimate_mfu={mfu:g}: must be above 0 and at most 1, such as 0.4")
    return mfu


def find_device(wanted: str | None, accelerator: str = "gpu") -> tuple[str, Device]:
    """A device and its name: `wanted`; default: this machine's `accelerator`. Raises ConfigError for an unknown one."""
    known = options()
    if wanted is not None:
        if wanted not in known:
            near = suggestion(wanted, known)
            raise ConfigError(f"device={wanted}: unknown{near}; choose {' | '.join(known)} | null, this machine's")
        return wanted, known[wanted]
    if accelerator != "gpu":
        here = torch.device(accelerator)
        return accelerator.upper(), Device(device_memory(here), measured_peak(here))
    name, here = torch.cuda.get_device_name(), torch.device("cuda")
    device = named(name) or Device(0, measured_peak(here))
    return name, replace(device, memory=device_memory(here))


def measured_peak(device: torch.device) -> float:
    """FLOP/s of a matrix product on a device of this machine, for one whose peak is in no table."""
    a = torch.randn(2048, 2048, device=device, dtype=torch.bfloat16 if device.type == "cuda" else torch.float32)
    timer = Timer("a @ a", globals={"a": a}, num_threads=torch.get_num_threads())
    return float(2 * len(a) ** 3 / timer.blocked_autorange().median)


def asked_setup(cfg: DictConfig) -> Setup:
    """The configured setup, with the nearest batch size that the devices can share equally.

    Raises ConfigError for invalid numbers.
    """
    check_strategy(cfg.trainer.strategy)
    devices, nodes = asked_counts(cfg.trainer, "an estimate")
    world, micro = devices * nodes, cfg.train.micro_batch_size
    check_numbers(cfg)
    batch_size = nearest_multiple(cfg.train.batch_size, world * (micro or 1))
    return setup_of(cfg, cfg.trainer.strategy == "fsdp", world, batch_size)


def setup_of(cfg: DictConfig, sharded: bool, world: int, batch_size: int) -> Setup:
    """The setup in which devices share a batch as `train.micro_batch_size` says, which must divide it."""
    accumulate = micro_batches_per_step(batch_size, cfg.train.micro_batch_size, world)
    return Setup(sharded, world, batch_size, batch_size // world // accumulate, cfg.model.max_seq_len)


def nearest_multiple(number: int, unit: int) -> int:
    """The positive multiple of `unit` nearest to `number`; of two, the lower."""
    return min(multiples_around(number, unit), key=lambda multiple: abs(multiple - number))


def expected_vocabulary(cfg: DictConfig) -> tuple[int, str]:
    """Number of ids of the tokenizer, from the config alone, and the key that gives it.

    Raises ConfigError for a tokenizer that learns the number from the text.
    """
    if cfg.model.vocab_size is not None:
        return cfg.model.vocab_size, "model.vocab_size"
    tokenizer, extra = build(cfg.tokenizer, "tokenizer"), kind_of(cfg).extra_tokens
    of_objective = f", and {len(extra)} of the objective" if extra else ""
    if is_probe(cfg):
        probe = open_probe(cfg, tokenizer).with_tokens(extra)
        return probe.index.vocab_size, f"data{of_objective}"
    if tokenizer.vocabulary_from == "nothing":
        return tokenizer.train(iter(())).with_tokens(extra).vocab_size, f"tokenizer{of_objective}"
    if "vocab_size" not in cfg.tokenizer:
        reason = "this tokenizer learns its vocabulary from the text, which is not read here; give a number"
        raise ConfigError(f"model.vocab_size=null: {reason}")
    return cfg.tokenizer.vocab_size + len(extra), f"tokenizer.vocab_size{of_objective}"


def column_of(setup: Setup, model: MemoryModel, limit: float) -> Column:
    """A setup's memory, and if that exceeds `limit` bytes, the nearest setup that fits."""
    if model.fits(setup, limit):
        return Column(setup, model.memory(setup), True, None)
    nearest = next((s for s in alternatives(setup, model.builds) if model.fits(s, limit)), None)
    return Column(setup, model.memory(setup), False, nearest)


def alternatives(setup: Setup, builds: Callable[[int], bool]) -> Iterator[Setup]:
    """Other setups, the nearest first: smaller micro-batches, then FSDP, more devices, and shorter contexts.

    Shorter contexts, which change what is trained, come after all numbers of devices, ordered by the number of
    doublings and halvings. builds: whether there is a model with a context.
    """
    yield from smaller_micro_batches(setup)
    worlds = [max(setup.devices, 2)]
    while 2 * worlds[-1] <= MOST_DEVICES:
        worlds.append(2 * worlds[-1])
    contexts = [setup.seq_len]
    while contexts[-1] // 2 > 1 and builds(contexts[-1] // 2):
        contexts.append(contexts[-1] // 2)
    changes = product(range(len(contexts)), range(len(worlds)))
    for halved, doubled in sorted(changes, key=lambda times: (times[0] > 0, sum(times), times[0])):
        world = worlds[doubled]
        batch_size = nearest_multiple(setup.batch_size, world)
        largest = min(setup.micro_batch, batch_size // world)
        yield from smaller_micro_batches(Setup(True, world, batch_size, largest + 1, contexts[halved]))


def smaller_micro_batches(setup: Setup) -> Iterator[Setup]:
    """The same setup with smaller micro-batches that divide a device's share of the batch, the largest first."""
    share = setup.batch_size // setup.devices
    for parts in range(share // setup.micro_batch + 1, min(share, MOST_PARTS) + 1):
        if share % parts == 0:
            yield replace(setup, micro_batch=share // parts)
