"""The decoders to measure, built from the configs as training builds them."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import hydra
import torch
from omegaconf import DictConfig

from llama_lab.config.components import CONF_DIR, build_model, register_resolvers
from llama_lab.devices.hardware import choose_accelerator
from llama_lab.model import Decoder, Sampling, generate
from llama_lab.model.generate import Step

EAGER, COMPILED = "ours, eager", "ours, compiled"


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder, named as in LLaMA."""

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    hidden_dim: int
    vocab_size: int

    def overrides(self) -> list[str]:
        """The overrides for a Llama 3 of this shape."""
        return ["arch=llama3", *(f"model.{name}={size}" for name, size in asdict(self).items())]


SMALL = Shape(dim=256, n_layers=6, n_heads=8, n_kv_heads=4, hidden_dim=688, vocab_size=4096)
TINY = Shape(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, hidden_dim=64, vocab_size=64)


def compose(*overrides: str) -> DictConfig:
    """The config of `python train.py *overrides`."""
    register_resolvers()
    with hydra.initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        return hydra.compose("config", list(overrides))


def build_decoder(cfg: DictConfig, device: torch.device, dtype: torch.dtype = torch.float32) -> Decoder:
    """The untrained decoder of a config that sets `model.vocab_size`, in evaluation mode."""
    with device:
        model: Decoder = build_model(cfg, cfg.model.vocab_size)
    return model.to(dtype).eval()


@dataclass(frozen=True)
class Preset:
    """A model and the sizes of its measurements.

    overrides: those of its config. max_seq_len: the longest text, over which the compiled step always attends.
    prompt, new_tokens: lengths of the text. contexts: further lengths at which a token is timed. buffer_bytes: of the
    buffer that measures the bandwidth.
    """

    overrides: Sequence[str]
    dtype: torch.dtype = torch.float32
    prompt: int = 32
    new_tokens: int = 200
    max_seq_len: int = 256
    contexts: Sequence[int] = (256, 1024, 4096)
    buffer_bytes: int = 512 * 2**20

    def build(self, max_seq_len: int, device: torch.device) -> Decoder:
        """The model, for texts of `max_seq_len` tokens."""
        return build_decoder(self.compose(max_seq_len), device, self.dtype)

    def compose(self, max_seq_len: int) -> DictConfig:
        """The model's config."""
        return compose(*self.overrides, f"model.max_seq_len={max_seq_len}")


PRESETS = {
    "small": Preset(SMALL.overrides()),
    "tiny": Preset(TINY.overrides(), prompt=4, new_tokens=8, max_seq_len=16, contexts=(8, 16), buffer_bytes=2**20),
    "1b": Preset(("arch=llama3", "size=llama3_1b", "embedding=tied"), torch.bfloat16),
}


def ours(compiled: bool) -> dict[str, bool]:
    """Our contenders: whether the step is compiled, by name. The compiled one is included if `compiled`."""
    return {EAGER: False, COMPILED: True} if compiled else {EAGER: False}


def greedy_text(model: Decoder, preset: Preset, compiled: bool) -> Iterator[Step]:
    """Generate our greedy text for a preset, step by step."""
    return generate(model, [range(preset.prompt)], preset.new_tokens, Sampling(temperature=0), compiled=compiled)


def choose_device(wanted: str) -> torch.device:
    """The device named `wanted`; `auto`: the GPU if there is one. Raises ConfigError for a missing device."""
    if wanted == "auto":
        wanted = "gpu" if torch.cuda.is_available() else "cpu"
    return torch.device({"gpu": "cuda"}.get(choose_accelerator(wanted, "--device"), wanted))
