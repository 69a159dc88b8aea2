"""The position encodings; their interface is in `encoding.py`."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from .encoding import Position, Rotation
from .init import Table, check_positive


class Sinusoidal(Position):
    """Fixed sines and cosines added to the embeddings (Vaswani et al. 2017, section 3.5).

    `amplitude` multiplies the table: 1 (the paper) fits token embeddings of unit variance; the configs use the standard
    deviation of the token embeddings, since a larger table would drown tokens drawn at 0.02.
    `interleaved` alternates sine and cosine, as in the paper; otherwise all sines come first (its code, CTRL).
    `offset` is the number of the first position: fairseq's models start at 2, after the rows of its padding.
    """

    def __init__(
        self, dim: int, theta: float = 10000.0, interleaved: bool = True, amplitude: float = 1.0, offset: int = 0
    ) -> None:
        super().__init__()
        if offset < 0:
            raise ValueError(f"position.offset={offset}: must not be negative")
        if dim % 2:
            raise ValueError(f"dim={dim}: sinusoidal positions need an even dim; use {dim + 1}")
        self.dim = dim
        self.theta = theta
        self.interleaved = interleaved
        self.amplitude = amplitude
        self.offset = offset

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        """Add the sines and cosines, computed in float32."""
        frequencies = inverse_frequencies(self.dim, self.theta, positions.device)
        angles = (positions + self.offset).float()[..., None] * frequencies
        waves = (angles.sin(), angles.cos())  # `(..., T, dim / 2)` each
        table = torch.stack(waves, -1).flatten(-2) if self.interleaved else torch.cat(waves, -1)
        return x + (self.amplitude * table).type_as(x)


class Learned(Position):
    """One trained vector per position, added to the embeddings (GPT-1, GPT-2, OPT)."""

    def __init__(self, dim: int, max_seq_len: int, std: float = 0.02) -> None:
        super().__init__()
        check_positive("position.std", std)
        self.table = Table(max_seq_len, dim, std)
        self.max_positions = max_seq_len

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        """Add the table's rows."""
        return x + self.table(positions)  # type: ignore[no-any-return]


def inverse_frequencies(dim: int, theta: float, device: torch.device) -> Tensor:
    """Float32 `(dim / 2,)`: theta^(-2k / dim), radians per position.

    Computed at every forward rather than kept in a buffer: a buffer would be cast with the model, and in bfloat16
    positions above 256 collapse.
    """
    return theta ** (-torch.arange(0, dim, 2, device=device, dtype=torch.float32) / dim)


@dataclass(frozen=True)
class RopeScaling(ABC):
    """Frequencies for texts `factor` times as long. Raises ValueError unless every field is positive, or `may_be_0`."""

    may_be_0: ClassVar[tuple[str, ...]] = ()

    factor: float

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            for number in value if isinstance(value, Sequence) else (value,):
                if name not in self.may_be_0 or number != 0:
                    check_positive(f"position.scaling.{name}", number)

    @property
    def attention_factor(self) -> float:
        """Multiplies cosines and sines, and so, squared, the scores."""
        return 1.0

    @abstractmethod
    def __call__(self, dim: int, theta: float, device: torch.device) -> Tensor:
        """Float32 `(dim / 2,)`, in place of `inverse_frequencies`."""


class LinearScaling(RopeScaling):
    """Position interpolation: every frequency divided by `factor` (Chen et al. 2023, eq. 4)."""

    def __call__(self, dim: int, theta: float, device: torch.device) -> Tensor:
        """Scaled inverse frequencies `(dim / 2,)`."""
        return inverse_frequencies(dim, theta, device) / self.factor


class NTKScaling(RopeScaling):
    """A larger base: the lowest frequency is divided by `factor`, the highest kept (bloc97 2023, NTK-aware)."""

    def __call__(self, dim: int, theta: float, device: torch.device) -> Tensor:
        """Scaled inverse frequencies `(dim / 2,)`."""
        return inverse_frequencies(dim, theta * self.factor ** (dim / (dim - 2)), device)


@dataclass(frozen=True)
class YarnScaling(RopeScaling):
    """NTK by parts with a sharper softmax (Peng et al. 2023, sections 3.2 and 3.4).

    Frequencies that turn more than `beta_fast` times within `original_max_seq_len` stay, those that turn less than
    `beta_slow` times are divided by `factor`, and a ramp joins them. How much sharper is the ratio of `mscale` and
    `mscale_all_dim` (DeepSeek-V2's code); with 1 and 0 it is the paper's. truncate: whether the ramp begins and ends at
    whole frequencies (not in gpt-oss).
    """

    may_be_0 = ("mscale", "mscale_all_dim", "truncate")

    original_max_seq_len: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0
    truncate: bool = True

    @property
    def attention_factor(self) -> float:
        """sqrt(1 / t) of section 3.4, in the general form of DeepSeek-V2's `yarn_get_mscale`."""
        growth = 0.1 * math.log(max(self.factor, 1.0))
        return (self.mscale * growth + 1.0) / (self.mscale_all_dim * growth + 1.0)

    def __call__(self, dim: int, theta: float, device: torch.device) -> Tensor:
        """Scaled inverse frequencies `(dim / 2,)`."""
        fast, slow = (  # the (real) indices of the frequencies that turn this often within the original length
            dim * math.log(self.original_max_seq_len / (turns * 2 * math.pi)) / (2 * math.log(theta))
            for turns in (self.beta_fast, self.beta_slow)
        )
        if self.truncate:
            fast, slow = math.floor(fast), math.ceil(slow)
        low, high = max(fast, 0), min(slow, dim - 1)
        steps = torch.arange(dim // 2, device=device, dtype=torch.float32)
        interpolated = ((steps - low) / max(high - low, 0.001)).clamp(0, 1)
        frequencies = inverse_frequencies(dim, theta, device)
        return frequencies / self.factor * interpolated + frequencies * (1 - interpolated)


@dataclass(frozen=True)
class Llama3Scaling(RopeScaling):
    """Llama 3.1's scaling (`apply_scaling` in Meta's code): long wavelengths divided by `factor`, short ones kept.

    Wavelengths above original / low_freq_factor are long, below original / high_freq_factor short, and a linear ramp
    joins them.
    """

    original_max_seq_len: int
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"position.scaling.high_freq_factor={self.high_freq_factor}: must exceed "
                f"low_freq_factor={self.low_freq_factor}"
            )

    def __call__(self, dim: int, theta: float, device: torch.device) -> Tensor:
        """Scaled inverse frequencies `(dim / 2,)`."""
        frequencies = inverse_frequencies(dim, theta, device)
        turns = self.original_max_seq_len * frequencies / (2 * math.pi)
        kept = ((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)).clamp(0, 1)
        return frequencies * kept + frequencies / self.factor * (1 - kept)


@dataclass(frozen=True)
class LongRopeScaling(RopeScaling):
    """LongRoPE: every frequency divided by a factor of its own, which a search found (Ding et al. 2024, section 3).

    `long_factors` act if the context, `max_seq_len`, exceeds `original_max_seq_len`, and `short_factors` otherwise: one
    for each frequency, or a number for all. `factor` sets the attention factor alone, as in Phi-3, section 2.
    """

    original_max_seq_len: int
    max_seq_len: int
    short_factors: float | Sequence[float]
    long_factors: float | Sequence[float]

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.original_max_seq_len < 2:
            raise ValueError("position.scaling.original_max_seq_len=1: has no logarithm to divide by; raise it")

    @property
    def attention_factor(self) -> float:
        """sqrt(1 + ln(factor) / ln(original length))."""
        return math.sqrt(1 + math.log(max(self.factor, 1.0)) / math.log(self.original_max_seq_len))

    def __call__(self, dim: int, theta: float, device: torch.device) -> Tensor:
        """Scaled inverse frequencies `(dim / 2,)`."""
        name = "long_factors" if self.max_seq_len > self.original_max_seq_len else "short_factors"
        factors = torch.tensor(getattr(self, name), dtype=torch.float32, device="cpu")
        if factors.ndim and len(factors) != dim // 2:
            raise ValueError(
                f"position.scaling.{name}: has {len(factors)} numbers for {dim // 2} frequencies; give all"
            )
        return inverse_frequencies(dim, theta, device) / factors.to(device, non_blocking=True)


def rotary_dim(head_dim: int, fraction: float) -> int:
    """Number of rotated dimensions, rounded down: a fraction of 0.4 of 16 is 6, and 0.333333 of 96 is 32."""
    return int(head_dim * fraction + 1e-3)


class Rope(Position):
    """Rotary positions (Su et al. 2021, section 3.2.2): scores depend on the distance of query and key alone.

    `fraction` of each head is rotated (GPT-NeoX 0.25). `interleaved` pairs neighbouring dimensions (the paper, GPT-J);
    otherwise dimension i pairs with i + R/2 (GPT-NeoX, Hugging Face's LLaMA). `scaling` adapts it to longer texts.
    """

    def __init__(
        self,
        head_dim: int,
        theta: float = 10000.0,
        fraction: float = 1.0,
        interleaved: bool = False,
        scaling: RopeScaling | None = None,
    ) -> None:
        super().__init__()
        self.rotary_dim = rotary_dim(head_dim, fraction)
        if not 0 < fraction <= 1 or self.rotary_dim % 2 or self.rotary_dim == 0:
            raise ValueError(
                f"position.fraction={fraction}: turns {self.rotary_dim} of head_dim={head_dim} dimensions, but the "
                f"number must be even and between 2 and head_dim; change fraction, head_dim, or dim and n_heads"
            )
        if theta <= 1:
            raise ValueError(f"position.theta={theta}: must exceed 1")
        if isinstance(scaling, NTKScaling) and self.rotary_dim < 4:
            raise ValueError(f"position.fraction={fraction}: NTK scaling needs 4 rotary dimensions; raise it")
        if scaling is not None:
            scaling(self.rotary_dim, theta, torch.device("cpu"))  # raises what does not fit
        self.theta = theta
        self.interleaved = interleaved
        self.scaling = scaling

    def rotation(self, positions: Tensor) -> Rotation:
        """Tables for `positions`."""
        frequencies = (self.scaling or inverse_frequencies)(self.rotary_dim, self.theta, positions.device)
        gain = self.scaling.attention_factor if self.scaling else 1.0
        angles = positions.float()[..., None] * frequencies
        return Rotation(gain * angles.cos(), gain * angles.sin(), self.interleaved)


class Alibi(Position):
    """Scores fall linearly with distance, each head with its own slope (Press et al. 2021, section 3). No parameters.

    They fall alike for keys before and after the query, where these are seen.

    The slopes are the geometric sequence 2^(-8/n), ..., 2^-8. If the number of heads is not a power of two, they are
    the sequence of the power below, then every other term of the one above, as in the authors' code. `max_exponent` is
    the 8 of these (MPT's `alibi_bias_max`), and `slope_scale` multiplies all slopes (Falcon: 1 / sqrt(head_dim)).
    """

    def __init__(self, n_heads: int, max_exponent: float = 8.0, slope_scale: float = 1.0) -> None:
        super().__init__()
        check_positive("position.max_exponent", max_exponent)
        check_positive("position.slope_scale", slope_scale)
        power = 2 ** math.floor(math.log2(n_heads))
        exponents = [(i + 1) / power for i in range(power)] + [(i + 0.5) / power for i in range(n_heads - power)]
        self.slopes = [slope_scale * 2 ** (-max_exponent * exponent) for exponent in exponents]

    def bias(self, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        """Float32 `(..., H, Tq, Tk)`: minus slope times distance."""
        slopes = torch.tensor(self.slopes, dtype=torch.float32).to(query_positions.device, non_blocking=True)
        distance = (query_positions[..., :, None] - key_positions[..., None, :]).abs()
        return -slopes[:, None, None] * distance.float()[..., None, :, :]


class RopeAlibi(Rope):
    """RoPE and ALiBi at once, as one encoding: queries and keys turn, and scores fall with distance.

    Both are relative, and neither has parameters; the arguments are theirs.
    """

    def __init__(self, n_heads: int, max_exponent: float = 8.0, slope_scale: float = 1.0, **rope: Any) -> None:
        super().__init__(**rope)
        self.alibi = Alibi(n_heads, max_exponent, slope_scale)

    def bias(self, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        """Float32 `(..., H, Tq, Tk)`: ALiBi's."""
        return self.alibi.bias(query_positions, key_positions)


class Relative(Position):
    """A trained bias per head and bucket of distance, shared by all layers (Raffel et al. 2020, section 2.1, T5).

    Half of the `n_buckets` hold exact distances, the other half grow logarithmically up to `max_distance`. In an
    encoder, which is not `causal`, half of them are so used for keys up to the query, and the others for keys after it.
    """

    def __init__(
        self, n_heads: int, n_buckets: int = 32, max_distance: int = 128, std: float = 0.02, causal: bool = True
    ) -> None:
        super().__init__()
        self.causal, self.of_a_side = causal, n_buckets if causal else n_buckets // 2
        if self.of_a_side < 2:
            raise ValueError(f"position.n_buckets={n_buckets}: must be at least {2 if causal else 4}")
        if max_distance <= n_buckets // 2:
            raise ValueError(
                f"position.max_distance={max_distance}: must exceed position.n_buckets / 2 = {n_buckets // 2}"
            )
        self.max_distance = max_distance
        check_positive("position.std", std)
        self.table = Table(n_buckets, n_heads, std)

    def buckets(self, distance: Tensor) -> Tensor:
        """Bucket of each distance, int64 of the same shape; keys after the query, if masked or in a prefix, get 0."""
        n_buckets = self.of_a_side
        exact = n_buckets // 2
        first = 0 if self.causal else (distance < 0) * n_buckets
        distance = distance.clamp(min=0) if self.causal else distance.abs()
        growth = (distance.clamp(min=1).float() / exact).log() / math.log(self.max_distance / exact)
        logarithmic = exact + (growth * (n_buckets - exact)).long()
        return first + torch.where(distance < exact, distance, logarithmic.clamp(max=n_buckets - 1))

    def bias(self, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        """Float32 `(..., H, Tq, Tk)`."""
        distance = query_positions[..., :, None] - key_positions[..., None, :]
        return self.table(self.buckets(distance)).movedim(-1, -3).float()  # type: ignore[no-any-return]
