"""The decoders to measure, built from the configs as training builds them."""

import hydra
import torch
from omegaconf import DictConfig

from llama_lab.config.components import CONF_DIR, build_model, register_resolvers
from llama_lab.devices.hardware import choose_accelerator
from llama_lab.model import Decoder

# Overrides for a Llama 3 of each size. `size.n_kv_heads` is that of attention=gqa.
SMALL = (
    "arch=llama3",
    "size.n_kv_heads=4",
    *("model.dim=256", "model.n_layers=6", "model.n_heads=8", "model.hidden_dim=688", "model.vocab_size=4096"),
)
TINY = ("arch=llama3", "size=pico", "model.vocab_size=64")


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


def choose_device(wanted: str) -> torch.device:
    """The device named `wanted`; `auto`: the GPU if there is one. Raises ConfigError for a missing device."""
    if wanted == "auto":
        wanted = "gpu" if torch.cuda.is_available() else "cpu"
    return torch.device({"gpu": "cuda"}.get(choose_accelerator(wanted, "--device"), wanted))
