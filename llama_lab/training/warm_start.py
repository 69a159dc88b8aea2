"""Starting a run from trained weights: `init_from=RUN_OR_FOLDER`."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from llama_lab.config.components import targets
from llama_lab.config.schema import flatten
from llama_lab.config.trust import Trust, search_path_targets, stored_config
from llama_lab.data.dataset import Dataset
from llama_lab.devices.hardware import current_rank
from llama_lab.hf.loading import Loaded, load
from llama_lab.hf.tensors import has_weights
from llama_lab.model import Decoder
from llama_lab.model.position import Rope
from llama_lab.model.transfer import Transfer, dense_names, fewer_heads, patterns, transfer
from llama_lab.runs.checkpoint import checkpoint_step, existing
from llama_lab.runs.folder import RESOLVED, TOKENIZER, RunFolder
from llama_lab.runs.stored import FATES, Status, WarmStart
from llama_lab.util.errors import ConfigError

from .run import Run


def check_start(run: Run) -> None:
    """Raise ConfigError if the run cannot start or resume, FinishedRunError if it is done.

    The source is checked first: a finished run that started from other weights is not done.
    """
    check_unchanged(run.cfg, run.folder)
    if run.cfg.measure or current_rank() != 0:  # nothing is trained; rank 0 answers for all
        return
    run.folder.check(run.cfg, run.choices)
    if not run.cfg.resume:
        return
    trained = checkpoint_step(run.folder.checkpoint_for(run.cfg))
    if run.steps <= trained and Status.load(run.folder.path).status == "done":
        raise ConfigError(
            f"train.tokens={run.cfg.train.tokens:g}: the run has had {trained * run.tokens_per_step}; to train it "
            f"further, give more"
        )


def warm_start(run: Run) -> Callable[[Decoder, Dataset], WarmStart] | None:
    """A function that copies the weights of `init_from` into a new model and returns a record; None without.

    For a run that resumes from a checkpoint, it only reads the record of its start. Raises ConfigError if no weight can
    be copied.
    """
    cfg, folder = run.cfg, run.folder
    goes_on = not cfg.overwrite and (folder.path / RESOLVED).exists() and existing(folder.checkpoint)

    def initialize(model: Decoder, dataset: Dataset) -> WarmStart:
        return WarmStart.load(folder.path) if goes_on else start_from(load_source(cfg), cfg, model, dataset)

    return initialize if cfg.init_from else None


def source_config(cfg: DictConfig) -> DictConfig:
    """The config of the source; for a folder of transformers, of its model only. Raises ConfigError."""
    file = Path(cfg.init_from) / RESOLVED
    return stored_config(file) if file.exists() else load_source(cfg).cfg


def load_source(cfg: DictConfig) -> Loaded:
    """Load the source. Raises ConfigError for a folder without weights, and for non-finite weights.

    Its config may name the components of this command's config, and those of the packages in `trust`.
    """
    ours = {target for _, target in targets(OmegaConf.to_container(cfg))}
    try:
        source = load(cfg.init_from, Trust(tuple(cfg.trust), search_path_targets() | ours))
    except ConfigError as error:
        raise ConfigError(f"init_from={str(error).removeprefix('run=')}") from error
    for name, tensor in source.model.state_dict().items():
        if not tensor.isfinite().all():
            raise ConfigError(
                f"init_from={cfg.init_from}: its {name} is not finite, as after a divergence; name a run that is"
            )
    return source


def start_from(source: Loaded, cfg: DictConfig, model: Decoder, dataset: Dataset) -> WarmStart:
    """Copy matching weights of `source` into `model`; returns a record."""
    done = fit_weights(source, cfg, model, dataset)
    layers = {fate: len((source.model if fate == "left" else model).blocks) for fate in FATES}
    return WarmStart(
        source=str(Path(cfg.init_from).absolute()),
        hash=hash_of(source.model.state_dict()),
        share=done.share,
        settings=changed_settings(source.cfg, cfg),
        **{fate: patterns(getattr(done, fate), layers[fate]) for fate in FATES},
    )


def fit_weights(source: Loaded, cfg: DictConfig, model: Decoder, dataset: Dataset) -> Transfer:
    """Copy matching weights of `source` into `model`, which may be on the meta device.

    Raises ConfigError if the tokenizers differ, if `model` scales rotary positions from another context than the
    source's, if nothing carries over, or if `init_kv_heads` has nothing to pool.
    """
    key = f"init_from={cfg.init_from}"
    if source.tokenizer is None:
        raise ConfigError(f"{key}: has no tokenizer, so that nobody knows what its embeddings are of; put it there")
    if source.tokenizer.hash != dataset.index.tokenizer_hash:
        raise ConfigError(
            f"{key}: has another tokenizer than this run ({source.tokenizer.hash:.8}, here "
            f"{dataset.index.tokenizer_hash:.8}), so that its embeddings are of other tokens; train with its own, "
            f"tokenizer=hf tokenizer.path={Path(cfg.init_from) / TOKENIZER}"
        )
    check_original_context(source, cfg, model)
    try:
        done = transfer(source.model, model, cfg.init_kv_heads or "mean", cfg.init_experts)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if cfg.init_experts and not dense_names(source.model, model):
        problem = f"this model has no experts of the width of feed-forwards in {cfg.init_from}"
        raise ConfigError(f"init_experts={cfg.init_experts}: {problem}; set model.hidden_dim, or leave it out")
    if not (done.taken or done.pooled):
        raise ConfigError(f"{key}: none of its weights has a name and shape of this model; name a more similar one")
    if cfg.init_kv_heads is not None and not fewer_heads(source.model, model):
        raise ConfigError(
            f"init_kv_heads={cfg.init_kv_heads}: this model has not fewer key and value heads than {cfg.init_from}, "
            f"with the same queries; leave it out"
        )
    return done


def check_original_context(source: Loaded, cfg: DictConfig, model: Decoder) -> None:
    """Raise ConfigError if RoPE scaling assumes another original context than the source's."""
    theirs, ours = source.model.position, model.position
    if not (isinstance(theirs, Rope) and isinstance(ours, Rope)):
        return
    wanted = getattr(theirs.scaling, "original_max_seq_len", source.model.max_seq_len)
    original = getattr(ours.scaling, "original_max_seq_len", wanted)
    if original != wanted:
        key = "model.position.scaling.original_max_seq_len"
        raise ConfigError(
            f"{key}={original}: {cfg.init_from} was trained on {wanted} tokens, from which frequencies are to be "
            f"scaled; set {key}={wanted}"
        )


def changed_settings(theirs: DictConfig, ours: DictConfig) -> dict[str, list[Any]]:
    """The model's settings that differ, without its seed: (there, here) by key; a component by its class.

    The keys of a component that the other's class does not have are left out.
    """
    before, now = (flatten(OmegaConf.to_container(cfg.model, resolve=True), "model") for cfg in (theirs, ours))
    found = {}
    for key in {**before, **now}:
        values = [before.get(key), now.get(key)]
        is_null = key.rpartition(".")[0] in (*before, *now)  # a component there or here, where the other has null
        if key == "model.vocab_size" and None in values:  # that of the tokenizer
            continue
        if values[0] == values[1] or key == "model.seed" or not (is_null or (key in before and key in now)):
            continue
        if key.endswith("._target_"):
            values = [target and target.rpartition(".")[2] for target in values]
        found[key.removesuffix("._target_")] = values
    return found


def hash_of(weights: dict[str, Tensor]) -> str:
    """Hash of weights: names, dtypes, shapes and bits."""
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(weights.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def has_source(cfg: DictConfig) -> bool:
    """Whether the source still has weights."""
    folder = Path(cfg.init_from)
    return has_weights(folder) or RunFolder(folder).checkpoint.exists()


def init_hash(cfg: DictConfig) -> str | None:
    """The hash of the source's weights as they are now; None if they are gone.

    Cached in this process until a file of the source changes: hashing a large source takes minutes.
    """
    if not has_source(cfg):
        return None
    files = [(str(file), file.stat()) for file in sorted(Path(cfg.init_from).absolute().rglob("*")) if file.is_file()]
    version = tuple((name, stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in files)
    if version not in _hashes:
        _hashes[version] = hash_of(load_source(cfg).model.state_dict())
    return _hashes[version]


_hashes: dict[tuple[tuple[str, int, int, int], ...], str] = {}  # by the version of a source's files


def check_unchanged(cfg: DictConfig, folder: RunFolder) -> None:
    """Raise ConfigError if `init_from` holds other weights now than the run in `folder` started from.

    They may be gone: the run has its own.
    """
    if current_rank() != 0 or cfg.overwrite or not cfg.init_from or not (folder.path / WarmStart.FILE).exists():
        return
    then, now = WarmStart.load(folder.path).hash, init_hash(cfg)
    if now not in (None, then):
        raise ConfigError(
            f"init_from={cfg.init_from}: holds other weights now ({now:.8}) than the run in {folder.path} started from "
            f"({then:.8}); restore them, choose another name, or start over with overwrite=true"
        )
