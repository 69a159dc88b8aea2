"""Evaluate a trained run: the parts in `eval.parts`, into eval.json."""

import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from llama_lab.config.components import check_decodes
from llama_lab.config.schema import is_kind
from llama_lab.config.trust import Trust
from llama_lab.data.dataset import Dataset
from llama_lab.data.objectives import open_objective
from llama_lab.data.open import has_answers
from llama_lab.devices.hardware import Hardware, choose_hardware
from llama_lab.model import Decoder
from llama_lab.model.prefix_decoder import PrefixDecoder
from llama_lab.runs.evaluation import EmaEvaluation, Evaluation
from llama_lab.runs.folder import RunFolder
from llama_lab.runs.stored import Status
from llama_lab.util.display import quiet_libraries
from llama_lab.util.errors import ConfigError, require_positive, suggestion
from llama_lab.util.formatting import conjoin

from .answers import answers_text
from .cache_memory import cache_losses, cache_sizes
from .lengths import batch_tokens, check_multiples, evaluating_on, evaluation, surroundings
from .load import TrainedRun, check_weights, load_run
from .speed import generation_speed
from .text import NEW_TOKENS, cache_dtype, encode_prompts, generate_texts, sampling, write_texts

AS_TRAINED = "as_trained"  # the precision of the run's own config


@dataclass
class Subject:
    """A run to be evaluated with these `settings` (conf/eval.yaml)."""

    run: TrainedRun
    settings: DictConfig
    hardware: Hardware

    @cached_property
    def dataset(self) -> Dataset:
        """The run's text, opened on first use."""
        return self.run.open_dataset()

    @cached_property
    def served(self) -> Decoder:
        """The model on its device, in 16 bits if the precision is. Measure losses first."""
        return place(self.run.model, self.hardware)

    @property
    def contexts(self) -> list[int]:
        """Context lengths at which memory and speed are measured, in ascending order."""
        length, least = self.run.model.max_seq_len, len(self.run.model.towers)
        return sorted({max(least, round(multiple * length)) for multiple in self.settings.eval.contexts})


def losses(subject: Subject, earlier: Evaluation) -> Evaluation:
    """The parts loss and length: one pass over the validation text for each length. Earlier ones of others stay."""
    run, asked = subject.run, subject.settings.eval
    multiples = list(asked.lengths) if "length" in asked.parts else []
    found = evaluation(run.cfg, subject.dataset, run.model, subject.hardware, run.step, multiples)
    lengths = {entry.length: entry for entry in (*earlier.lengths, *found.lengths)}
    return replace(earlier, metrics=found.metrics, unit=found.unit, lengths=[lengths[n] for n in sorted(lengths)])


def lm_eval(subject: Subject, earlier: Evaluation) -> Evaluation:
    """The part lm_eval; see `harness.py`. Earlier scores in other tasks stay."""
    from .harness import task_scores  # of the extra `lm-eval`, and it takes seconds to import

    batch_size = subject.run.cfg.train.micro_batch_size or subject.run.cfg.train.batch_size
    scores = list(task_scores(subject.served, subject.run.tokenizer, batch_size, subject.settings))
    found = {score.task for score in scores}
    return replace(earlier, tasks=[*(score for score in earlier.tasks if score.task not in found), *scores])


def cache(subject: Subject, earlier: Evaluation) -> Evaluation:
    """The part cache; see `cache_memory.py`."""
    with evaluating_on(subject.served, subject.hardware.torch_device):
        sizes = cache_sizes(subject.served, subject.settings.eval.batch_sizes, subject.contexts)
        parts = subject.dataset.val_parts(subject.run.model.max_seq_len).values()
        objective = open_objective(subject.run.cfg, subject.dataset)
        costs = cache_losses(subject.served, parts, batch_tokens(subject.run.cfg), objective)
    return replace(earlier, cache=sizes, cache_losses=costs)


def speed(subject: Subject, earlier: Evaluation) -> Evaluation:
    """The part speed; see `speed.py`."""
    chosen = subject.settings
    dtype = cache_dtype(chosen)
    speeds = [
        generation_speed(subject.served, batch_size, context, chosen.eval.rounds, chosen.compile, dtype)
        for batch_size in chosen.eval.batch_sizes
        for context in subject.contexts
    ]
    return replace(earlier, speed=speeds)


def sample(subject: Subject, earlier: Evaluation) -> Evaluation:
    """The part sample: a text that begins as the run's own sample does, or the answers to a probe."""
    run, settings, model = subject.run, subject.settings, subject.served
    if has_answers(run.cfg):
        length, seed = settings.max_new_tokens or NEW_TOKENS, settings.seed
        return replace(earlier, sample=answers_text(model, subject.dataset, length, sampling(settings), seed))
    *_, (text,) = generate_texts(run.tokenizer, model, [run.cfg.train.prompt], settings)
    return replace(earlier, sample=text.certain)


PARTS: dict[str, Callable[[Subject, Evaluation], Evaluation]] = {
    "loss": losses,
    "length": losses,
    "lm_eval": lm_eval,
    "cache": cache,
    "speed": speed,
    "sample": sample,
}


DECODING = {"cache", "speed", "sample"}  # the parts that need the model's state
READ_TEXT = {"loss", "length", "cache"}  # those that need a text


def evaluate(path: Path, settings: DictConfig, imported: TrainedRun | None = None) -> Evaluation:
    """Evaluate the run in a folder, write what was found into its eval.json, and return all that this holds.

    imported: the model in the folder, if it is no run.

    With `weights=ema`, eval_ema.json.

    Written part by part, so that what was found before an interruption stays; parts that were found earlier, of the
    same step and on the same device, stay too. Raises ConfigError, for an unfinished run too.
    """
    if imported is None:
        check_done(RunFolder(path))
    subject = open_subject(path, settings, imported)
    run = subject.run
    if DECODING & set(settings.eval.parts):
        parts = f"eval.parts={list(settings.eval.parts)}"
        check_decodes(run.model, parts, f"leave out {conjoin(sorted(DECODING))}", cache_dtype(settings))
    shown = f"model.attention.prefix={run.model.prefix}" if run.model.prefix else "objective=prefix"
    if "lm_eval" in settings.eval.parts and (run.model.prefix or isinstance(run.model, PrefixDecoder)):
        raise ConfigError(f"eval.parts: lm_eval scores texts of which {shown} shows a part; leave it out")
    if "lm_eval" in settings.eval.parts and not run.model.causal:
        raise ConfigError("eval.parts: lm_eval scores next tokens, which an encoder does not predict; leave it out")
    if "lm_eval" in settings.eval.parts and len(run.model.towers) > 1:
        raise ConfigError("eval.parts: leave out lm_eval, which reads no source, as an encoder-decoder must")
    if "sample" in settings.eval.parts:  # the last part's errors, before the first
        encode_prompts(run.tokenizer, run.model, [run.cfg.train.prompt], settings)
    here = surroundings(subject.hardware, run.step)
    if imported and READ_TEXT & set(settings.eval.parts):
        here = replace(here, data_hash=subject.dataset.index.data_hash)
    found = kept_parts(path, here if settings.weights == "last" else EmaEvaluation(**vars(here)))
    asked = [name for name in PARTS if name in settings.eval.parts]  # losses need the weights as they were trained
    for part, names in groupby(asked, PARTS.__getitem__):
        print(f"{path}: {next(names)}", flush=True)
        found = part(subject, found)
        found.save(path)
    return found


def write(path: Path, settings: DictConfig, imported: TrainedRun | None = None) -> None:
    """Continue the prompts of `settings` with the run in a folder, on standard output. Raises ConfigError."""
    subject, prompts = open_subject(path, settings, imported), prompts_of(settings)
    check_decodes(subject.run.model, f"prompt={prompts[0]}", "leave it out")
    if imported is None and (status := Status.load(path).status) != "done":
        print(f"run={path}: is {status}; this is what it writes after {subject.run.step:,} steps", file=sys.stderr)
    write_texts(subject.run, subject.served, prompts, settings)


def prompts_of(settings: DictConfig) -> list[str]:
    """The prompts to continue; none if the run is to be evaluated."""
    return list(settings.prompts) if settings.prompt is None else [settings.prompt]


def check_done(folder: RunFolder) -> None:
    """Raise ConfigError unless the folder holds a run that came to its end."""
    status = folder.status
    if status is None:
        raise ConfigError(f"run={folder.path}: holds no run; name a run's folder, such as runs/llama/base/seed=1")
    if status.status != "done":
        why = f" ({status.message})" if status.message else ""
        losses = "its losses would not be those of its budget; train it to its end, or let it write with prompt="
        raise ConfigError(f"run={folder.path}: is {status.status}{why}, and {losses}")


def open_subject(path: Path, settings: DictConfig, imported: TrainedRun | None = None) -> Subject:
    """The run in a folder, and one device in the precision that the settings ask for. Raises ConfigError."""
    quiet_libraries()
    for key in ("data", "beside"):
        if imported is None and settings.get(key):
            raise ConfigError(f"{key}: is for imported models, and run={path} has a text of its own; leave it out")
    run = imported or load_run(path, Trust.of_command(tuple(settings.trust)), settings.weights)
    wanted = {key: value for key, value in settings.trainer.items() if value != AS_TRAINED}
    here: Any = OmegaConf.merge(run.cfg.trainer, wanted, {"devices": 1, "num_nodes": 1, "strategy": "auto"})
    hardware = choose_hardware(here, run.cfg.model.dim)
    if here.precision == "auto" and settings.trainer.precision == AS_TRAINED and imported is None:
        trained = RunFolder(path).environment
        hardware = hardware.as_trained(trained.device, trained.precision)
    return Subject(run, settings, hardware)


def place(model: Decoder, hardware: Hardware) -> Decoder:
    """Move the model to its device, with weights in 16 bits if the precision is mixed or lower."""
    model.to(hardware.torch_device).eval()
    return model.bfloat16() if hardware.precision.startswith("bf16") else model


def kept_parts(path: Path, here: Evaluation) -> Evaluation:
    """What an earlier evaluation found of the same step, in the same surroundings; otherwise `here`, with a message."""
    file = path / here.FILE
    if not file.exists():
        return here
    try:
        earlier = here.load(path)
    except ConfigError:
        print(f"{file}: is damaged; replaced", file=sys.stderr)
        return here
    before = {key: getattr(earlier, key) for key in here.to_json()}
    if changed := ", ".join(f"{key} {value}" for key, value in before.items() if value != getattr(here, key)):
        print(f"{file}: was found with {changed}; replaced", file=sys.stderr)
    return here if changed else earlier


def check_settings(settings: DictConfig, typed: Collection[str]) -> None:
    """Raise ConfigError for a setting out of range, or a key in `typed` that nothing asked for reads."""
    check_weights(settings.weights)
    if not 0 <= settings.seed < 2**31:
        raise ConfigError(f"seed={settings.seed}: must be a whole number from 0 to 2147483647")
    chosen = settings.eval
    if not chosen.parts:
        raise ConfigError(f"eval.parts=[]: evaluates nothing; choose of {', '.join(PARTS)}")
    for part in chosen.parts:
        if part not in PARTS:
            near = suggestion(str(part), PARTS)
            raise ConfigError(f"eval.parts: {part} is no part{near}; choose of {', '.join(PARTS)}")
    check_multiples("eval.lengths", chosen.lengths)
    if "lm_eval" in chosen.parts and find_spec("lm_eval") is None:
        raise ConfigError("eval.parts: lm_eval needs EleutherAI's harness; pip install 'llama-lab[lm-eval]'")
    if "lm_eval" in chosen.parts and not (chosen.tasks and all(isinstance(task, str) for task in chosen.tasks)):
        raise ConfigError(f"eval.tasks={chosen.tasks}: lm_eval needs the names of tasks, such as [lambada_openai]")
    for key, least in (("fewshot", 0), ("limit", 1)):
        if chosen[key] is not None and chosen[key] < least:
            raise ConfigError(f"eval.{key}={chosen[key]}: must be a whole number from {least}, or null")
    if not chosen.contexts or not all(is_kind(c, float) and 0 < c <= 1 for c in chosen.contexts):
        raise ConfigError(f"eval.contexts={chosen.contexts}: must hold multiples of the context, above 0, up to 1")
    if not chosen.batch_sizes or not all(is_kind(size, int) and size > 0 for size in chosen.batch_sizes):
        raise ConfigError(f"eval.batch_sizes={chosen.batch_sizes}: must hold positive whole numbers")
    require_positive("eval.rounds", chosen.rounds)
    if settings.prompt is not None and settings.prompts:
        raise ConfigError("prompts: there is a prompt too; give one, or put it among the prompts")
    for prompt in prompts_of(settings):
        if not isinstance(prompt, str):
            raise ConfigError(f'prompts: {prompt} is no text; quote it: \'prompts=["a","b"]\'')
        shown = prompt.encode(errors="backslashreplace").decode()
        if shown != prompt:
            raise ConfigError(f"prompt={shown}: holds bytes that are not UTF-8; write it in that encoding")
    if settings.max_new_tokens is not None and settings.max_new_tokens < 1:
        raise ConfigError(f"max_new_tokens={settings.max_new_tokens}: must not be negative or 0, but may be null")
    sampling(settings)
    cache_dtype(settings)
    check_read(settings, typed)


WRITERS = {"prompt", "sample"}
READ_BY = {  # keys that only some parts read, or writing
    "data": READ_TEXT,
    "beside": {"loss", "length"},
    "eval.lengths": {"length"},
    "eval.contexts": {"cache", "speed"},
    "eval.batch_sizes": {"cache", "speed"},
    "eval.rounds": {"speed"},
    **{f"eval.{key}": {"lm_eval"} for key in ("tasks", "task_path", "fewshot", "limit")},
    "compile": {"speed", *WRITERS},
    "cache_dtype": {"speed", *WRITERS},
    **dict.fromkeys(("max_new_tokens", "temperature", "top_k", "top_p", "min_p"), WRITERS),
    "seed": {"lm_eval", *WRITERS},
}


def check_read(settings: DictConfig, typed: Collection[str]) -> None:
    """Raise ConfigError for a key on the command line that has no effect on what is asked for."""
    writes = bool(prompts_of(settings))
    asked = {"prompt"} if writes else set(settings.eval.parts)
    greedy = {"top_k", "top_p", "min_p", "seed"} if settings.temperature == 0 else set()
    for key in typed:
        if key in greedy:
            raise ConfigError(f"{key}={settings[key]}: does nothing at temperature=0; leave it out")
        of_group = READ_BY.get(key.partition(".")[0], asked)
        readers = {"loss", *PARTS} if key == "eval.parts" else READ_BY.get(key, of_group)
        if not readers & asked:
            what = "with a prompt nothing is evaluated" if writes else f"it is for {', '.join(sorted(readers))}"
            raise ConfigError(f"{key}={OmegaConf.select(settings, key)}: does nothing here, {what}; leave it out")
