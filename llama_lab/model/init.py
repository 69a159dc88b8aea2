"""Seeded initialisation: every parameter is drawn from a generator of its own, seeded by (seed, its name).

So a switch that adds, removes or reshapes one parameter leaves the initial values of all others as they were, and the
values do not depend on the device, on sharding, or on the order in which modules are built.
"""

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

KV_HEADS = ("mean", "first", "random")  # how fewer key and value heads may start than trained weights have


class ResidualOutput(nn.Linear):
    """A linear map whose output is added to the residual stream; `Scaled` initialises these smaller."""


class StackedLinear(nn.Linear):
    """`n` linear maps of one shape, weight `(n, out, in)` and bias `(n, out)`; a subclass says which acts where.

    Each is initialised as a linear map of its own with the name `<name>.<i>` would be.
    """

    def __init__(self, n: int, one: nn.Linear) -> None:
        super().__init__(one.in_features, one.out_features, one.bias is not None)
        self.is_residual = isinstance(one, ResidualOutput)
        for name, parameter in list(self.named_parameters()):
            setattr(self, name, nn.Parameter(parameter.new_empty(n, *parameter.shape)))


WeightInit = Callable[[Tensor, bool, torch.Generator], None]
"""Draws a weight matrix `(out, in)` in place; the bool says whether its output is added to the residual stream."""


class Normal:
    """N(0, std): GPT-1 and most models since."""

    def __init__(self, std: float = 0.02) -> None:
        check_positive("init.std", std)
        self.std = self.residual_std = std

    def __call__(self, weight: Tensor, residual: bool, generator: torch.Generator) -> None:
        """Fill `weight` in place."""
        weight.normal_(0.0, self.residual_std if residual else self.std, generator=generator)


class Scaled(Normal):
    """N(0, std), and std / sqrt(2 n_layers) on residual outputs (Radford et al. 2019, section 2.3)."""

    def __init__(self, n_layers: int, std: float = 0.02) -> None:
        super().__init__(std)
        self.residual_std = std / math.sqrt(2 * n_layers)


class Xavier:
    """Uniform with variance gain² · 2 / (in + out) (Glorot & Bengio 2010, eq. 16), as the 2017 Transformer's code."""

    def __init__(self, gain: float = 1.0) -> None:
        check_positive("init.gain", gain)
        self.gain = gain

    def __call__(self, weight: Tensor, residual: bool, generator: torch.Generator) -> None:
        """Fill `weight` in place."""
        nn.init.xavier_uniform_(weight, self.gain, generator=generator)


class DeepNorm(Xavier):
    """Xavier, times (8 n_layers)^(-1/4) on a block's matrices but queries' and keys' (Wang et al. 2022, figure 2)."""

    def __init__(self, n_layers: int, gain: float = 1.0) -> None:
        super().__init__(gain)
        self.branch_gain = (8 * n_layers) ** -0.25


class FanIn:
    """N(0, gain² / in), of queries divided by head_dim, which fits unscaled scores, and of a head gain²: T5.

    As Mesh TensorFlow draws them, and after it `T5PreTrainedModel._init_weights` of transformers.
    """

    def __init__(self, dim: int, head_dim: int, gain: float = 1.0) -> None:
        check_positive("init.gain", gain)
        self.gain = gain
        self.gains = {"query": head_dim**-0.5, "head": dim**0.5}  # beside, by the last name of a map

    def __call__(self, weight: Tensor, residual: bool, generator: torch.Generator) -> None:
        """Fill `weight` in place."""
        weight.normal_(0.0, self.gain * weight.shape[-1] ** -0.5, generator=generator)


class Truncated:
    """N(0, std) truncated at `cutoff` standard deviations (OLMo-core, `init.py`)."""

    def __init__(self, std: float = 0.02, cutoff: float = 3.0) -> None:
        check_positive("init.std", std)
        check_positive("init.cutoff", cutoff)
        self.std = std
        self.cutoff = cutoff

    def __call__(self, weight: Tensor, residual: bool, generator: torch.Generator) -> None:
        """Fill `weight` in place."""
        bound = self.cutoff * self.std
        nn.init.trunc_normal_(weight, 0.0, self.std, -bound, bound, generator=generator)


def check_positive(name: str, value: float | None) -> None:
    """Raise ValueError unless `value` is positive, or None for none."""
    if value is not None and value <= 0:
        raise ValueError(f"{name}={value}: must be positive")


class Table(nn.Embedding):
    """A lookup table `(rows, dim)` whose entries start as N(0, std)."""

    def __init__(self, rows: int, dim: int, std: float) -> None:
        assert std >= 0
        self.std = std
        super().__init__(rows, dim)

    def reset_parameters(self) -> None:
        """Does nothing: `initialise` draws the values."""


def parameter_generator(seed: int, name: str) -> torch.Generator:
    """A CPU generator that depends on nothing but `seed` and the parameter's `name`."""
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return torch.Generator("cpu").manual_seed(int.from_bytes(digest, "little") >> 1)


@torch.no_grad()
def initialise(model: nn.Module, weight_init: WeightInit, seed: int) -> None:
    """Draw every parameter of `model`, in float32 on the CPU, then copy it to where the parameter lives.

    Weight matrices follow `weight_init`, tables their own standard deviation, biases start at zero, and every other
    module with parameters (the norms) resets itself, with the global generator seeded likewise. A tied weight is drawn
    under its first name. Parameters on the meta device are skipped. Raises ValueError for a module that has parameters
    but no `reset_parameters`: their values would depend on the order in which modules are built.
    """
    for name, module in model.named_modules():
        own = list(module.parameters(recurse=False))
        if not own or isinstance(module, nn.Linear | nn.Embedding) or any(p.is_meta for p in own):
            continue
        reset = getattr(module, "reset_parameters", None)
        if reset is None:
            raise ValueError(f"{name}: {type(module).__name__} has parameters but no reset_parameters(); give it one")
        with torch.random.fork_rng(devices=[]), on_cpu(own):
            torch.default_generator.manual_seed(parameter_generator(seed, name).initial_seed())  # the CPU's alone
            reset()
    draw_weights(model, weight_init, seed)


@contextmanager
def on_cpu(parameters: list[nn.Parameter]) -> Iterator[None]:
    """Context manager: parameters and new tensors are on the CPU, since devices draw different random numbers."""
    homes = [p.data for p in parameters]
    for p in parameters:
        p.data = p.data.cpu()
    try:
        with torch.device("cpu"):
            yield
    finally:
        for p, home in zip(parameters, homes, strict=True):
            p.data = home.copy_(p.data)


@torch.no_grad()
def draw_weights(
    model: nn.Module, weight_init: WeightInit, seed: int, keep: Callable[[Tensor, Tensor], object] = Tensor.copy_
) -> None:
    """The part of `initialise` for linear maps and tables. `keep` is called with each weight and its initial value."""
    drawn: set[Tensor] = set()
    within = {module for block in getattr(model, "all_blocks", ()) for module in block.modules()}
    named = [getattr(module, name) for module in within for name in getattr(module, "scores", ())]
    scores = {part for one in named if one is not None for part in one.modules()}
    branch_gain, branches = getattr(weight_init, "branch_gain", 1.0), within - scores  # which scale what branches add
    gains: Mapping[str, float] = getattr(weight_init, "gains", {})
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear | nn.Embedding) or module.weight.is_meta:
            continue
        if (bias := getattr(module, "bias", None)) is not None:
            nn.init.zeros_(bias)
        if module.weight not in drawn:
            drawn.add(module.weight)
            value = torch.empty(module.weight.shape, device="cpu")  # where its generator is
            is_residual, matrices = isinstance(module, ResidualOutput), {f"{name}.weight": value}
            if isinstance(module, StackedLinear):
                is_residual, matrices = module.is_residual, {f"{name}.{i}.weight": one for i, one in enumerate(value)}
            for own_name, matrix in matrices.items():
                generator = parameter_generator(seed, own_name)
                if isinstance(module, Table):
                    matrix.normal_(0.0, module.std, generator=generator)
                else:
                    weight_init(matrix, is_residual, generator)
                    matrix *= gains.get(name.rpartition(".")[2], branch_gain if module in branches else 1.0)
            keep(module.weight, value)


@contextmanager
def linear_on_meta(enabled: bool) -> Iterator[None]:
    """Context manager: if `enabled`, build linear layers on the meta device, for `draw_weights` to fill later.

    All other parameters are small, or needed before the model is moved to its device, such as the token table.
    """

    def place(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        is_new = getattr(module, name, None) is None  # else it is tied: the token table becomes the weight of a head
        is_linear = type(module) in (nn.Linear, ResidualOutput) or isinstance(module, StackedLinear)
        if not enabled or parameter is None or not is_linear or not is_new:
            return None
        return nn.Parameter(parameter.to("meta"))

    with register_module_parameter_registration_hook(place):  # type: ignore[arg-type]  # it may return a parameter
        yield
