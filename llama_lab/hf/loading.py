"""Load a model from a folder: a run, an import or export, or a folder of transformers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from llama_lab.config.components import build_model
from llama_lab.config.layers import check_depth
from llama_lab.config.trust import Trust, stored_config
from llama_lab.data.dataset import Dataset
from llama_lab.data.open import open_dataset
from llama_lab.data.tokenizer import TextTokenizer
from llama_lab.evaluation.load import TrainedRun, load_run
from llama_lab.model import Decoder
from llama_lab.model.transfer import first_names
from llama_lab.runs.folder import RESOLVED, TOKENIZER, RunFolder
from llama_lab.runs.stored import Environment
from llama_lab.util.display import open_display
from llama_lab.util.errors import ConfigError, first_line, suggestion

from .families import FAMILIES, FIELDS, MISSING, RECIPES
from .family import Family, model_node
from .tensors import check_finite, common_dtype, has_weights, read_json, read_weights

CONFIG, GENERATION = "config.json", "generation_config.json"
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(frozen=True)
class Loaded:
    """A loaded model with config and tokenizer, on the CPU, in the dtype of its file.

    cfg: the config of a run; of a transformers model, its node `model` alone, resolved.
    tokenizer: None where the folder has none.
    model_type: the family that it is of by its config or, a run's, by its recipe; an export chooses it if it can.
    generation: what generation_config.json holds, with the ids of the tokens that begin and end a text.
    ignored: fields of config.json that the class of transformers ignores, and we with it, as `name=value`.
    """

    path: Path
    cfg: DictConfig
    model: Decoder
    tokenizer: TextTokenizer | None
    model_type: str | None = None
    generation: dict[str, Any] = field(default_factory=dict)
    ignored: Sequence[str] = ()

    @property
    def is_run(self) -> bool:
        """Whether it was loaded from a run's folder."""
        return (self.path / RESOLVED).exists() and not has_weights(self.path)


def load(path: str | Path, trust: Trust = Trust(), weights: str = "last") -> Loaded:  # noqa: B008, it is frozen
    """The model in the folder `path`: a run's, what `llama-lab-convert` wrote, or one of transformers.

    weights: of a run with `train.ema`, `ema` for the moving average of its weights in place of the last ones.

    Nothing in the folder is run: weights are read from safetensors or as plain tensors, and a config that names code
    outside our components is refused unless `trust` has it. Raises ConfigError for a folder that is none of these, or
    not whole.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise ConfigError(f"{path}: is no folder; name a run, or a folder with {CONFIG} and safetensors; "
                          f"llama-lab-convert import takes the name of a repository, too")  # fmt: skip
    if (folder / RESOLVED).exists() and not has_weights(folder):
        return load_trained(folder, trust, weights)
    if weights != "last":
        raise ConfigError(f"weights={weights}: {folder} is no run, and has one kind of weights; leave it out")
    if (folder / RESOLVED).exists():
        return load_ours(folder, trust)
    if (folder / CONFIG).exists():
        return load_transformers(folder)
    raise ConfigError(f"{folder}: holds neither {RESOLVED} of a run nor {CONFIG} of transformers; name another folder")


@dataclass(frozen=True)
class Imported(TrainedRun):
    """An imported model with the interface of a trained run, for evaluations."""

    def open_dataset(self) -> Dataset:
        """The text of its config, in its own tokens."""
        with open_display(0, rank=0) as display:
            return open_dataset(self.cfg, display)


def as_run(loaded: Loaded, data: DictConfig) -> Imported:
    """Wrap a model, in float32, as a run that was trained on `data`. Raises ConfigError if it has no tokenizer.

    A forward pass of its evaluation has about 4,096 tokens, since vocabularies of others are large.
    """
    path, length = loaded.path, loaded.model.max_seq_len
    if loaded.tokenizer is None:
        raise ConfigError(f"run={path}: has no tokenizer; put its {TOKENIZER} into the folder")
    if data.get("document_mask"):
        raise ConfigError("data.document_mask=true: is for models that were trained with it; leave it out")
    cfg = {
        "model": loaded.cfg.model,
        "data": OmegaConf.to_container(data, resolve=True),
        "tokenizer": {"_target_": "llama_lab.data.hf_tokenizer.HFTokenizer", "path": str(path)},
        "train": {"batch_size": max(1, 4096 // length), "micro_batch_size": None, "prompt": ""},
        "trainer": {"accelerator": "auto", "precision": "auto"},
    }
    if not loaded.model.causal:
        cfg["objective"] = {"_target_": "llama_lab.data.objectives.Masked", "share": 0.15}
    model = loaded.model.float()
    return Imported(RunFolder(path), OmegaConf.create(cfg), Environment(), loaded.tokenizer, model, None)


def load_trained(folder: Path, trust: Trust, weights: str) -> Loaded:
    """A run, with these weights of its last checkpoint."""
    run = load_run(folder, trust, weights)
    eot_id = run.tokenizer.eot_id
    ids = {"bos_token_id": eot_id, "eos_token_id": eot_id, "pad_token_id": None}  # every document follows an end
    arch = run.environment.choices.get("arch", "")
    model_type = next((one.model_type for one in FAMILIES if one.model_type == RECIPES.get(arch, arch)), None)
    return Loaded(folder, run.cfg, run.model, run.tokenizer, model_type, ids)


def load_ours(folder: Path, trust: Trust) -> Loaded:
    """Load weights stored beside resolved.yaml: a model that no transformers class can hold."""
    cfg = stored_config(folder / RESOLVED)
    if "model" not in cfg:
        raise ConfigError(f"{folder}: its {RESOLVED} has no model; export it again")
    weights = read_weights(folder)
    model = build(folder / RESOLVED, cfg, "cpu", trust)
    check_fit(folder, named_weights(model), weights)
    check_finite(folder, weights)
    cast(model, weights)
    model.load_state_dict(weights, strict=False)  # the second name of a tied weight is not in the file
    tokenizer = read_tokenizer(folder, model.vocab_size)
    return Loaded(folder, cfg, model.eval(), tokenizer, generation=read_generation(folder))


def load_transformers(folder: Path) -> Loaded:
    """A model that transformers saved, of a family that we express."""
    config = read_json(folder / CONFIG)
    family = family_of(folder, config)
    try:
        for key in ("num_hidden_layers", "num_layers", "n_layers", "n_layer"):  # reading lists what each layer has
            check_depth(config.get(key, 1))
        settings = family.read_config(config, FIELDS)
    except (ValueError, TypeError, KeyError, AttributeError, ArithmeticError) as error:
        why = str(error) if type(error) in (ValueError, ConfigError) else f"is damaged, {first_line(error)}"
        raise ConfigError(f"{folder}: its {CONFIG}: {why}") from error
    cfg = OmegaConf.create({"model": model_node(settings, family.model)})
    tensors = read_weights(folder)
    names = family.canonical_names(tensors)
    weights = {names[name]: tensor for name, tensor in tensors.items() if name in names}
    family = family.of_layout(weights, settings)
    model = build(folder / CONFIG, cfg, "meta", Trust())
    expected = family.to_theirs(named_weights(model), settings)
    check_fit(folder, expected, without_copies(folder, family, weights, expected))
    check_finite(folder, weights)
    assign(model, family.to_ours(weights, settings))
    tokenizer = read_tokenizer(folder, model.vocab_size)
    generation = {key: config[key] for key in TOKEN_IDS if key in config} | read_generation(folder)
    ignored, context = family.ignored(config), settings["max_seq_len"]
    if (longer := config.get("max_position_embeddings") or context) > context:  # LongRoPE's
        ignored.append(f"max_position_embeddings={longer} (for texts up to {context} tokens)")
    return Loaded(folder, cfg, model.eval(), tokenizer, family.model_type, generation, ignored)


def family_of(folder: Path, config: Mapping[str, Any]) -> Family:
    """The family that a config names. Raises ConfigError for one that we do not express."""
    model_type = str(config.get("model_type"))
    for family in FAMILIES:
        if family.model_type == model_type and all(config.get(key) == value for key, value in family.variant.items()):
            return family
    known = [family.model_type for family in FAMILIES]
    why = f": {MISSING[model_type]}" if model_type in MISSING else suggestion(model_type, known)
    raise ConfigError(
        f"{folder}: its {CONFIG}: model_type={model_type} is none that our switches express{why}; we have "
        f"{', '.join(known)}"
    )


def build(file: Path, cfg: DictConfig, device: str, trust: Trust) -> Decoder:
    """The model of the config that was read from `file`, on a device. Raises ConfigError, also for untrusted code."""
    folder = file.parent
    trust.check(cfg, f"{folder}: its {file.name}", lambda package: f"trust=[{package}], or --trust {package}")
    try:
        with torch.device(device):
            model: Decoder = build_model(cfg, 1)
    except ConfigError as error:
        raise ConfigError(f"{folder}: {error}") from error
    return model


def named_weights(model: Decoder) -> dict[str, Tensor]:
    """The state of a model without the second names of tied weights."""
    return {name: weight.detach() for name, weight in first_names(model).items()}


def check_fit(folder: Path, expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> None:
    """Raise ConfigError unless a file holds exactly the model's tensors, with their shapes."""
    missing, extra = (sorted(a.keys() - b.keys()) for a, b in ((expected, found), (found, expected)))
    for names, what, fix in (
        (missing, "lack", "the config is of another model, or the files are not all of its"),
        (extra, "have, beyond its config,", "the config is of another model, or the model has more than we express"),
    ):
        if names:
            more = f" and {len(names) - 1} more" if names[1:] else ""
            raise ConfigError(f"{folder}: its weights {what} {names[0]}{more}; {fix}")
    for name, weight in found.items():
        if weight.shape != expected[name].shape:
            raise ConfigError(
                f"{folder}: its weight {name} is {tuple(weight.shape)}, and its config makes it "
                f"{tuple(expected[name].shape)}; restore the two files that belong together"
            )
        if not weight.is_floating_point():
            raise ConfigError(f"{folder}: its weight {name} is quantised, {weight.dtype}; name the unquantised model")


def without_copies(
    folder: Path, family: Family, weights: Mapping[str, Tensor], expected: Mapping[str, Tensor]
) -> Mapping[str, Tensor]:
    """Drop a head that only repeats the token table to which it is tied."""
    head, table = family.ends
    if head not in weights or head in expected:
        return weights
    if table in weights and not torch.equal(weights[head], weights[table]):
        raise ConfigError(
            f"{folder}: its {CONFIG} ties the head, but {head} is no copy of {table}; set tie_word_embeddings "
            f"to false there"
        )
    return {name: weight for name, weight in weights.items() if name != head}


def assign(model: Decoder, weights: Mapping[str, Tensor]) -> None:
    """Make `weights` those of a model on the meta device, which takes its dtypes from them."""
    cast(model, weights)
    tied = model.embedding.head.weight is model.embedding.tokens.weight
    state = model.state_dict()
    weights = {name: weight.to(state[name].dtype) for name, weight in weights.items()}
    model.load_state_dict(weights, strict=False, assign=True)
    if tied:
        model.embedding.head.weight = model.embedding.tokens.weight


def cast(model: Decoder, weights: Mapping[str, Tensor]) -> None:
    """Give the parameters of a model the dtype that holds every one in a file, and its buffers those that they have."""
    model.to(common_dtype({name: weights[name] for name, _ in model.named_parameters() if name in weights}))
    for name, buffer in model.named_buffers():
        buffer.data = buffer.data.to(weights.get(name, buffer).dtype)


def read_generation(folder: Path) -> dict[str, Any]:
    """What generation_config.json holds, if there is one."""
    return read_json(folder / GENERATION) if (folder / GENERATION).exists() else {}


def read_tokenizer(folder: Path, vocab_size: int) -> TextTokenizer | None:
    """The tokenizer beside a model; None without one. Raises ConfigError if the model has no row for all of its ids."""
    file = folder / TOKENIZER
    if not file.exists():
        return None
    try:
        tokenizer = TextTokenizer.load(file)
    except ConfigError:
        raise
    except ValueError as error:  # ours, of what ends a text
        raise ConfigError(f"{file}: {error}; set eos_token in the tokenizer_config.json beside it") from error
    except Exception as error:  # tokenizers raises nothing more specific
        raise ConfigError(f"{file}: cannot be read, {first_line(error)}; copy or download it again") from error
    if tokenizer.vocab_size > vocab_size:
        raise ConfigError(
            f"{folder}: its {TOKENIZER} has {tokenizer.vocab_size} ids, and its model a vocabulary of {vocab_size}; "
            f"restore the two files that belong together"
        )
    return tokenizer
