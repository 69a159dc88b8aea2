"""Convert models between layouts: `llama-lab-convert import` and `export`."""

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor
from torch.func import functional_call

from llama_lab.config.trust import Trust
from llama_lab.data.hub import is_hub_name, report_hub_errors
from llama_lab.data.tokenizer import SPECIAL_TOKENS_MAP, TOKENIZER_CONFIG
from llama_lab.model import Decoder
from llama_lab.runs.folder import OVERRIDES, RESOLVED, TOKENIZER, write_yaml
from llama_lab.util.errors import ConfigError, first_line
from llama_lab.util.files import discard

from .families import FAMILIES, OF_FAMILY
from .family import Family, flat_settings
from .loading import CONFIG, GENERATION, TOKEN_IDS, Loaded, load, named_weights
from .overrides import overrides_of
from .settings import Settings
from .tensors import check_finite, write_json, write_weights

TOKENIZER_FILES = (TOKENIZER, TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP, "added_tokens.json", "chat_template.jinja")
CHECKED_TOKENS = 64
DOWNLOADED = ["*.json", "*.safetensors", "*.jinja"]


def import_model(source: str, dest: Path, dtype: torch.dtype | None = None, max_shard_bytes: int | None = None) -> str:
    """Import a transformers model from a folder or repository into `dest`, with overrides that compose it.

    Returns what was done.
    """
    loaded = load(local_folder(source))
    if (loaded.path / RESOLVED).exists():
        raise ConfigError(f"{source}: is a model of ours already; load it as it is, or export it")
    settings = settings_of(loaded)
    family, obstacles = nearest_family(loaded, settings)
    with building(dest) as fresh:
        write_model(loaded, None if obstacles else family, settings, fresh, dtype, max_shard_bytes)
        write_yaml([*OF_FAMILY.get(str(loaded.model_type), []), *overrides_of(settings)], fresh / OVERRIDES)
    ignored = f"; ignored, as transformers does: {', '.join(loaded.ignored)}" if loaded.ignored else ""
    return (
        f"{dest}: {loaded.model_type} of {count(loaded)}; {OVERRIDES} has what composes the same model with train.py"
        f"{ignored}"
    )


def export_model(
    run: Path,
    dest: Path,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int | None = None,
    trust: Trust = Trust(),  # noqa: B008, it cannot be changed
    weights: str = "last",
) -> str:
    """Export a run or an imported model into `dest` in the layout of transformers; returns a message.

    weights: see `load`.
    A model that no class of transformers can hold is written beside its config of ours, which `load` reads.
    """
    loaded = load(run, trust, weights)
    check_finite(run, named_weights(loaded.model))
    settings = settings_of(loaded)
    family, obstacles = nearest_family(loaded, settings)
    with building(dest) as fresh:
        write_model(loaded, None if obstacles else family, settings, fresh, dtype, max_shard_bytes)
        if not obstacles:
            checked = check_export(fresh, loaded.model, family, dtype)
            return f"{dest}: {family.architecture} of {count(loaded)}; {checked}"
    return (
        f"{dest}: {count(loaded)} beside {RESOLVED}, for llama_lab.load, since no class of transformers holds it; the "
        f"nearest, {family.architecture}, differs in {', '.join(obstacles)}"
    )


def settings_of(loaded: Loaded) -> Settings:
    """The settings of a model that its output depends on."""
    node: Any = OmegaConf.to_container(loaded.cfg.model, resolve=True)
    return flat_settings(node | of_tokens(loaded))


def of_tokens(loaded: Loaded) -> dict[str, int | None]:
    """The settings that a run leaves to its tokenizer."""
    model = loaded.model
    return {"vocab_size": model.vocab_size} | ({"start_id": model.start_id} if "start_id" in loaded.cfg.model else {})


def nearest_family(loaded: Loaded, settings: Settings) -> tuple[Family, list[str]]:
    """The family with the fewest obstacles to holding a model, and these; none if it can hold the model.

    Of two with as many, another component stands in the way more than a key; a family that cannot have one of the
    values, and so tells of no other obstacle, is not near.
    """
    families = sorted(FAMILIES, key=lambda family: family.model_type != loaded.model_type)
    found = [(family, *family.obstacles(settings)) for family in families]
    family, obstacles, _ = min(
        found, key=lambda one: (not one[2], len(one[1]), sum("." not in of.partition("=")[0] for of in one[1]))
    )
    kind = type(loaded.model).__name__
    return family, obstacles if kind == family.model else [f"model={kind} ({family.model})", *obstacles]


def write_model(
    loaded: Loaded,
    family: Family | None,
    settings: Settings,
    folder: Path,
    dtype: torch.dtype | None,
    max_shard_bytes: int | None,
) -> None:
    """Write a model as transformers does, of a `family`; None: as it is, beside its config."""
    weights = named_weights(loaded.model)
    if family is None:
        cfg = loaded.cfg.copy()
        cfg.model.update(of_tokens(loaded))
        write_yaml(OmegaConf.to_container(cfg, resolve=True), folder / RESOLVED)
    else:
        weights = family.to_theirs(weights, settings)
        config = family.write_config(settings)
        config["pad_token_id"] = None  # of some classes' own, which may lie outside of the vocabulary
        config |= {key: loaded.generation[key] for key in TOKEN_IDS if key in loaded.generation}
        config |= {"model_type": family.model_type, "architectures": [family.architecture]}
        config["dtype"] = str(dtype or next(loaded.model.parameters()).dtype).removeprefix("torch.")
        write_json(folder / CONFIG, config)
    write_weights(folder, in_dtype(weights, dtype), max_shard_bytes)
    write_surroundings(loaded, folder)


@torch.no_grad()
def check_export(folder: Path, model: Decoder, family: Family, dtype: torch.dtype | None) -> str:
    """Load an exported folder by transformers, compare the logits of a short text, in float32, and say so.

    Raises ConfigError if they differ from those of `model`, whose weights were written in `dtype`.
    """
    call = f"{family.architecture}.from_pretrained"
    if find_spec("transformers") is None:
        return f"for {call}; not checked, since transformers is not installed"
    import transformers
    from transformers.utils.logging import disable_progress_bar, set_verbosity_error

    set_verbosity_error()  # type: ignore[no-untyped-call]
    disable_progress_bar()  # type: ignore[no-untyped-call]
    length = min(model.max_seq_len, CHECKED_TOKENS)
    tokens = torch.randint(model.vocab_size, (1, length), generator=torch.Generator().manual_seed(0))
    if (start := model.document_start_id) is not None:  # transformers has no masks of documents, so compare one
        tokens[tokens == start] = (start + 1) % model.vocab_size
    written = in_dtype(named_weights(model), dtype)
    tokens, _, *source = model.cut(tokens, tokens)
    given = {"input_ids": source[0], "decoder_input_ids": tokens} if source else {"input_ids": tokens}
    weights = {name: weight.float() for name, weight in written.items()}
    expected = functional_call(model, weights, (tokens, None, *source))
    try:
        class_ = getattr(transformers, family.architecture)
        theirs, info = class_.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
        found = theirs.eval()(**given).logits
    except Exception as error:  # of any kind, from their code
        raise ConfigError(f"{folder.parent}: {family.architecture} does not load it, {first_line(error)}") from error
    distance = ((found - expected).abs().max() / expected.abs().max()).item()
    if any(info.values()) or not distance <= family.precision:
        raise ConfigError(
            f"{folder.parent}: {family.architecture} loads it as another model, whose logits differ by {distance:.2g} "
            f"of the largest; please report it with the config of the model"
        )
    return f"{call} loads it, with the same logits"


def write_surroundings(loaded: Loaded, folder: Path) -> None:
    """Write tokenizer and generation_config.json; for an imported model, its own files unchanged."""
    write_json(folder / GENERATION, loaded.generation)
    if loaded.is_run and loaded.tokenizer is not None:
        loaded.tokenizer.save(folder / TOKENIZER)
        return
    for name in TOKENIZER_FILES:
        if (loaded.path / name).exists():
            shutil.copyfile(loaded.path / name, folder / name)


def in_dtype(weights: dict[str, Tensor], dtype: torch.dtype | None) -> dict[str, Tensor]:
    """The weights in another dtype; None keeps theirs. Raises ConfigError for a weight beyond its range."""
    written = weights if dtype is None else {name: weight.to(dtype) for name, weight in weights.items()}
    if infinite := next((name for name, weight in written.items() if not weight.isfinite().all()), None):
        raise ConfigError(f"--dtype {str(dtype).removeprefix('torch.')}: cannot hold {infinite}; choose a wider one")
    return written


def count(loaded: Loaded) -> str:
    """The number of parameters, for a message."""
    return f"{sum(parameter.numel() for parameter in loaded.model.parameters()):,} parameters"


@contextmanager
def building(dest: Path) -> Iterator[Path]:
    """Yield a folder to write to, whose files move to `dest` at the end, or are deleted after an exception.

    Raises ConfigError if there is something at `dest` already.
    """
    if blocked := next((path for path in (dest, *dest.parents) if path.is_file()), None):
        raise ConfigError(f"{dest}: {blocked} is a file; choose a folder")
    existed = dest.is_dir()
    if existed and any(dest.iterdir()):
        raise ConfigError(f"{dest}: exists already; choose another folder, or delete it")
    fresh = dest / ".unfinished"
    fresh.mkdir(parents=True)
    try:
        yield fresh
    except BaseException:
        discard(fresh if existed else dest)
        raise
    for file in fresh.iterdir():
        file.rename(dest / file.name)
    fresh.rmdir()


def local_folder(source: str) -> Path:
    """The folder of a model: `source` itself, or where the repository of that name is downloaded to."""
    path = Path(source).expanduser()
    if path.exists() or not is_hub_name(source):
        return path
    from huggingface_hub import snapshot_download

    print(f"{source}: is no folder here; looking for the repository of that name", file=sys.stderr)
    local = f"download it where there is a network, hf download {source} --local-dir FOLDER, and name that folder"
    with report_hub_errors(source, local):
        return Path(snapshot_download(source, allow_patterns=DOWNLOADED))
