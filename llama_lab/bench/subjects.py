"""What is measured: parts and whole decoders, built from the configs as training builds them."""

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
        """The settings of a Llama 3 of this shape."""
        return ["arch=llama3", *(f"model.{name}={size}" for name, size in asdict(self).items())]


SMALL = Shape(dim=256, n_layers=6, n_heads=8, n_kv_heads=4, hidden_dim=688, vocab_size=4096)
TINY = Shape(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, hidden_dim=64, vocab_size=64)


def compose(*overrides: str) -> DictConfig:
    """The config that `python train.py *overrides` would run."""
    register_resolvers()
    with hydra.initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        return hydra.compose("config", list(overrides))


def build_decoder(cfg: DictConfig, device: torch.device, dtype: torch.dtype = torch.float32) -> Decoder:
    """The decoder of a config that sets `model.vocab_size`, as training would start it, in evaluation mode."""
    with device:
        model: Decoder = build_model(cfg, cfg.model.vocab_size)
    return model.to(dtype).eval()


@dataclass(frozen=True)
class Preset:
    """A model, and how much of what it reads.

    overrides: its config; max_seq_len: the longest text, which the compiled step attends to from the start.
    prompt, new_tokens: of the text. contexts: at which a token is also timed. buffer_bytes: read for the bandwidth.
    """

    overrides: Sequence[str]
    dtype: torch.dtype = torch.float32
    prompt: int = 32
    new_tokens: int = 200
    max_seq_len: int = 256
    contexts: Sequence[int] = (256, 1024, 4096)
    buffer_bytes: int = 512 * 2**20

    def build(self, max_seq_len: int, device: torch.device) -> Decoder:
        """The model, for texts of so many tokens."""
        return build_decoder(self.compose(max_seq_len), device, self.dtype)

    def compose(self, max_seq_len: int) -> DictConfig:
        """Its config."""
        return compose(*self.overrides, f"model.max_seq_len={max_seq_len}")


PRESETS = {
    "small": Preset(SMALL.overrides()),
    "tiny": Preset(TINY.overrides(), prompt=4, new_tokens=8, max_seq_len=16, contexts=(8, 16), buffer_bytes=2**20),
    "1b": Preset(("arch=llama3", "size=llama3_1b", "embedding=tied"), torch.bfloat16),
}


def ours(compiled: bool) -> dict[str, bool]:
    """Our ways to generate, by name, and whether the step is compiled; eager alone unless `compiled`."""
    return {EAGER: False, COMPILED: True} if compiled else {EAGER: False}


def greedy_text(model: Decoder, preset: Preset, compiled: bool) -> Iterator[Step]:
    """Our greedy text for a preset, step by step."""
    return generate(model, [range(preset.prompt)], preset.new_tokens, Sampling(temperature=0), compiled=compiled)


def choose_device(wanted: str) -> torch.device:
    """`auto` is the GPU where there is one. Raises ConfigError for a device that is missing."""
    if wanted == "auto":
        wanted = "gpu" if torch.cuda.is_available() else "cpu"
    return torch.device({"gpu": "cuda"}.get(choose_accelerator(wanted, "--device"), wanted))
