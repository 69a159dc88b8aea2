"""The end of a run that is done: its checkpoint in one file, a sample, losses at other lengths, and its summary."""

import torch

from llama_lab.config.components import build_model
from llama_lab.data.dataset import Dataset
from llama_lab.data.open import is_probe
from llama_lab.evaluation.answers import answers_text
from llama_lab.evaluation.lengths import evaluation
from llama_lab.model import Decoder, Sampling, generate
from llama_lab.runs.checkpoint import before, consolidate, load_checkpoint, model_weights
from llama_lab.runs.folder import SAMPLE
from llama_lab.runs.metrics import described, read_cells, with_numbers
from llama_lab.runs.stored import Facts, Summary
from llama_lab.util.files import discard, replace_text

from .loggers import log_hparams
from .monitor import Monitor
from .run import Run


def finish(run: Run, model: Decoder, dataset: Dataset, prompt: list[int], facts: Facts, monitor: Monitor) -> None:
    """Write everything that a finished run has beyond a trained one, on the first device; a kill repeats it."""
    cfg, folder = run.cfg, run.folder
    consolidate(folder.checkpoint)
    if run.hardware.sharded:
        model = build_model(cfg, dataset.index.vocab_size, dataset.tokenizer.eot_id)
        model.load_state_dict(model_weights(load_checkpoint(folder.checkpoint)))
    if is_probe(cfg):
        model.to(run.hardware.torch_device).eval()
        sample = answers_text(model, dataset, cfg.train.sample_tokens, Sampling(temperature=0), cfg.seed)
    else:
        sample = dataset.tokenizer.decode(sample_text(run, model, prompt, dataset.tokenizer.eot_id))
    replace_text(folder.path / SAMPLE, sample)
    if cfg.train.eval_lengths:
        evaluation(cfg, dataset, model, run.hardware, run.steps, cfg.train.eval_lengths).save(folder.path)
    summary = summarize(run, facts, monitor)
    summary.save(folder.path)
    if cfg.logger.tensorboard:
        log_hparams(folder.path, cfg.optim.get("lr"), summary)
    discard(before(folder.checkpoint))
    folder.write_status("done")


def sample_text(run: Run, model: Decoder, prompt: list[int], eot_id: int) -> list[int]:
    """The prompt and the model's continuation, within its context; seeded by the run."""
    start = [eot_id, *prompt][: model.max_seq_len]
    length = min(run.cfg.train.sample_tokens, model.max_seq_len - len(start))
    if length == 0:  # a model without a state cannot generate
        return prompt
    model.to(run.hardware.torch_device).eval()  # Lightning has moved it to the CPU, slow for a large one
    steps = generate(model, [start], length, Sampling(temperature=0.8), seed=run.cfg.seed)
    with torch.compiler.set_stance("force_eager"):  # a text has a shape for each of its tokens
        return [*prompt, *(token for (token,) in steps if token is not None)]


def summarize(run: Run, facts: Facts, monitor: Monitor) -> Summary:
    """Facts, costs, and the last value of every metric, but the speed of the whole run."""
    rows = read_cells(run.folder.metrics)
    metrics = dict(facts.metrics)
    for row in with_numbers(rows):
        metrics |= row
    metrics |= monitor.speed_metrics(monitor.speed.overall, run.hardware.world_size)
    if run.compiled and monitor.warm_up_seconds is not None:
        metrics["perf/compile_seconds"] = monitor.warm_up_seconds
    return Summary(**vars(facts) | {"metrics": metrics}, rows=described(rows)["checksum"])
