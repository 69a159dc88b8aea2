"""What `import llama_lab` gives notebooks and other programs: configs, models, costs, texts, runs, comparisons."""

import glob
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from hydra import initialize_config_dir
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf

from llama_lab.config import components
from llama_lab.config.components import CONF_DIR, model_cost, register_resolvers
from llama_lab.config.composing import compose
from llama_lab.config.grammar import to_hydra
from llama_lab.config.messages import USER_ERRORS, one_line
from llama_lab.config.trust import Trust
from llama_lab.estimate.estimate import expected_vocabulary
from llama_lab.evaluation.text import generate_texts
from llama_lab.hf.loading import Loaded
from llama_lab.hf.loading import load as load
from llama_lab.model import Cost, Decoder
from llama_lab.runs.naming import short_names
from llama_lab.runs.record import every_run, read_record
from llama_lab.training.prepare import check_effects, check_run, with_recorded
from llama_lab.training.run import check_numbers
from llama_lab.util.errors import ConfigError as ConfigError

if TYPE_CHECKING:
    import pandas as pd

    from llama_lab.report.write import Report


def load_config(overrides: Sequence[str] = (), config_dir: str | Path | None = None) -> DictConfig:
    """The config that `python train.py OVERRIDES` would train: `load_config(["arch=llama2", "size=nano"])`.

    config_dir: a folder with options of your own, as for `--config-dir`. Raises ConfigError where the command does, but
    for what depends on the token budget, this machine and folders.
    """
    check_list("overrides", overrides)
    typed = with_recorded(to_hydra(list(overrides)))
    with composing(typed, config_dir):
        cfg, choices = compose(typed)
        check_run(cfg, choices)
        check_effects([cfg], typed)
        check_numbers(cfg)
    return cfg


def check_list(name: str, given: Sequence[str]) -> None:
    """Raise ConfigError for a text where a list of texts is wanted: it would be read letter by letter."""
    if isinstance(given, str):
        raise ConfigError(f"{name}={given!r}: is a text; give a list of them, {name}=[{given!r}]")


@contextmanager
def composing(typed: list[str], config_dir: str | Path | None) -> Iterator[ConfigLoader]:
    """Context manager: lets Hydra compose, with a folder of the user's options if there is one.

    typed: the overrides that errors of users are about. Raises ConfigError for these, each in one line.
    """
    register_resolvers()
    try:
        with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
            if config_dir is not None:
                add_config_dir(Path(config_dir))
            yield GlobalHydra.instance().config_loader()
    except USER_ERRORS as error:
        raise ConfigError(one_line(error, typed=typed)) from None


def add_config_dir(config_dir: Path) -> None:
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
    settings = OmegaConf.create(sampling | rest)
    *_, (text,) = generate_texts(
        loaded.tokenizer, loaded.model, [prompt], settings, "pair_files" in loaded.cfg.get("data", {})
    )
    return text.certain


def read_runs(pattern: str | Path) -> "pd.DataFrame":
    """One row per run in the folders that match a pattern, such as `runs/*`, and below them, whatever their status.

    Columns: `run`, its short name among these; `seed`, `status`; the last value of every metric and the costs, as in
    summary.json; the option of every config group; every config key with a dot, such as `train.tokens`; `path`. Raises
    ConfigError if there are none.
    """
    import pandas as pd  # takes a second

    matches = map(Path, sorted(glob.glob(str(Path(pattern).expanduser()), recursive=True)))
    records = [read_record(run) for run in dict.fromkeys(run for match in matches for run in every_run(match))]
    if not records:
        raise ConfigError(f"{pattern}: holds no run; name folders of runs or studies, such as runs/*")
    rows = []
    for record, name in zip(records, short_names(records), strict=True):
        identity = {"run": name, "seed": record.seed, "status": record.status}
        settings = {key: value for key, value in record.config.items() if "." in key}
        choices = record.environment.choices
        rows.append({**identity, **record.costs, **record.summary, **choices, **settings, "path": record.path})
    return pd.DataFrame(rows)


def compare(
    *paths: str | Path,
    group_by: Sequence[str] = (),
    baseline: str | None = None,
    title: str | None = None,
    trust: Sequence[str] = (),
) -> "Report":
    """A report on runs and studies, as `llama-lab-compare` makes it; writes nothing.

    group_by: groups or settings that define the arms. trust: packages whose components the runs use. Raises ConfigError
    for a path without runs, an unknown key or arm, and runs of one arm with the same seed.
    """
    # SciPy takes a second to import.
    from llama_lab.analysis.analyse import analyse
    from llama_lab.analysis.grouping import compared, is_study
    from llama_lab.report.write import Report

    if not paths:
        raise ConfigError("compare: names no run; name folders of runs or studies, such as runs/llama")
    check_list("group_by", group_by)
    check_list("trust", trust)
    folders = [Path(path) for path in paths]
    study = compared(folders, group_by, baseline, title)
    own = folders[0] if is_study(folders, group_by) else Path("comparison")  # where speeds measured together are
    return Report(analyse(study, own, Trust(tuple(trust))))
