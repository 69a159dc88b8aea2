"""Configs, models, costs and texts, for notebooks and other programs: a part of `import llama_lab`."""

from collections.abc import Sequence
from pathlib import Path

import torch
from hydra import compose, initialize_config_dir
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf

from llama_lab.config import components
from llama_lab.config.arguments import to_hydra
from llama_lab.config.components import CONF_DIR, model_cost, register_resolvers
from llama_lab.config.messages import USER_ERRORS, one_line
from llama_lab.errors import ConfigError
from llama_lab.estimate.estimate import expected_vocabulary
from llama_lab.evaluation.text import generate_texts
from llama_lab.hf.loading import Loaded
from llama_lab.model import Cost, Decoder
from llama_lab.study.design.command import without
from llama_lab.training.prepare import check_job


def load_config(overrides: Sequence[str] = (), config_dir: str | Path | None = None) -> DictConfig:
    """The config that `python train.py OVERRIDES` would train: `load_config(["arch=llama2", "size=nano"])`.

    config_dir: a folder with options of your own, as for `--config-dir`. Raises ConfigError where the command does.
    """
    register_resolvers()
    typed = to_hydra(list(overrides))
    try:
        with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
            if config_dir is not None:
                search_too(Path(config_dir))
            cfg = compose("config", overrides=typed, return_hydra_config=True)
            choices = dict(cfg.hydra.runtime.choices)
            cfg = without(cfg, "hydra")
            check_job(cfg, choices)
    except USER_ERRORS as error:
        raise ConfigError(one_line(error, typed=typed)) from None
    return cfg


def search_too(config_dir: Path) -> None:
    """Let Hydra find options in a folder of the user's, as `--config-dir` does. Raises ConfigError if there is none."""
    if not config_dir.is_dir():
        raise ConfigError(f"config_dir={config_dir}: is no folder; name the one that holds your norm/, arch/, ...")
    path = create_config_search_path(str(CONF_DIR))
    path.prepend("command-line", f"file://{config_dir.absolute()}", anchor="schema")  # which must stay the last
    GlobalHydra.instance().clear()
    Hydra.create_main_hydra2("llama_lab", path)


def build_model(cfg: DictConfig, vocab_size: int | None = None, eot_id: int | None = None) -> Decoder:
    """The model of a config of `load_config`, with the initial weights that its run would have.

    vocab_size: of the tokenizer; default: that of the config, which `tokenizer=char` leaves to the text. eot_id: its
    end-of-text token, which `data.document_mask=true` needs. Raises ConfigError for settings that cannot work.
    """
    size = expected_vocabulary(cfg)[0] if vocab_size is None else vocab_size
    model: Decoder = components.build_model(cfg, size, eot_id)
    return model


def cost(of: DictConfig | Decoder) -> Cost:
    """Parameters, FLOPs and KV-cache bytes of a model, or of a config's, which is not built: any size is free."""
    if isinstance(of, Decoder):
        return model_cost(of)
    with torch.device("meta"):
        return model_cost(build_model(of, eot_id=0))


def generate(
    loaded: Loaded,
    prompt: str = "",
    max_new_tokens: int | None = None,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    seed: int = 1,
) -> str:
    """The prompt, empty for a new document, and its continuation by a model of `llama_lab.load`.

    The settings are those of `eval.py`; by default 200 tokens, or as far as the context reaches. Raises ConfigError for
    settings that cannot work, and for a model without a tokenizer.
    """
    if loaded.tokenizer is None:
        raise ConfigError(f"{loaded.path}: has no tokenizer; put its tokenizer.json into the folder")
    sampling = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "seed": seed}
    rest = {"max_new_tokens": max_new_tokens, "cache_dtype": None, "compile": False}
    *_, (text,) = generate_texts(loaded.tokenizer, loaded.model, [prompt], OmegaConf.create(sampling | rest))
    return text.certain
