"""What a run records beside metrics and checkpoints: metadata before it trains, then a sample, losses, a summary."""

from copy import deepcopy

import torch

from llama_lab.config.components import build_model
from llama_lab.data.dataset import Dataset
from llama_lab.data.open import has_answers
from llama_lab.evaluation.answers import answers_text
from llama_lab.evaluation.documents import document_losses, has_documents
from llama_lab.evaluation.lengths import evaluation
from llama_lab.model import Cost, Decoder, Sampling, generate
from llama_lab.model.cost import cost_metrics
from llama_lab.model.generate import marked
from llama_lab.runs.checkpoint import before, consolidate, load_checkpoint, model_weights
from llama_lab.runs.folder import SAMPLE
from llama_lab.runs.metrics import described, read_cells, with_numbers
from llama_lab.runs.stored import RunMetadata, Summary, WarmStart
from llama_lab.util.files import discard, replace_text

from .loggers import log_hparams
from .monitor import Monitor
from .run import Run


def run_metadata(run: Run, dataset: Dataset, model: Decoder, cost: Cost, start: WarmStart | None = None) -> RunMetadata:
    """The metadata of a run that is about to train `model`."""
    first_window = torch.from_numpy(dataset.val_windows(model.max_seq_len)[0][0])
    return RunMetadata(
        name=run.name,
        arm=run.arm,
        label=run.label,
        seed=run.cfg.seed,
        choices=run.choices,
        device=run.hardware.device_name,
        devices=run.hardware.world_size,
        sharded=run.hardware.sharded,
        precision=run.hardware.precision,
        attention_kernel="+".join(sorted(attention_kernels(run, model))),
        experts_kernel="+".join(sorted({str(getattr(ffn, "kernel", "none")) for ffn in model.feedforwards})),
        compiled=run.compiled,
        data_hash=dataset.index.data_hash,
        tokenizer_hash=dataset.index.tokenizer_hash,
        vocab_size=model.vocab_size,
        init_hash=start.hash if start else "",
        bytes_per_token=dataset.bytes_per_token,
        unigram_entropy=dataset.unigram_entropy(),
        entropy_floor=dataset.entropy_floor,
        revisions=dict(dataset.index.revisions),
        epochs={part: n for part, n in dataset.epochs(model.max_seq_len, run.sequences).items() if part},
        token_to_position_ratio=token_to_position_ratio(model, first_window),
        metrics=cost_metrics(cost),
    )


def attention_kernels(run: Run, model: Decoder) -> set[str]:
    """The implementations of the mixers in training."""
    micro_batch = run.cfg.train.micro_batch_size or run.cfg.train.batch_size // run.hardware.world_size
    kind = torch.float32 if run.hardware.precision == "32-true" else torch.bfloat16
    at = (micro_batch, model.max_seq_len, run.hardware.torch_device.type, kind)
    return {mixer.kernel_in_training(*at) for mixer in model.mixers}


@torch.no_grad()
def token_to_position_ratio(model: Decoder, tokens: torch.Tensor) -> float | None:
    """Ratio of the sizes of token and position embeddings at step 0; None where positions are not added.

    Far below 1, positions drown the tokens: a bad initialisation that looks like a bad position encoding.
    """
    x = model.embedding(tokens[None])
    added = model.position.embed(x, torch.arange(len(tokens))) - x
    return float(x.norm() / added.norm()) if added.any() else None


def finish(
    run: Run, model: Decoder, dataset: Dataset, prompt: list[int], metadata: RunMetadata, monitor: Monitor
) -> None:
    """Write sample, summary and status of a trained run, on rank 0; repeated if the run is killed here."""
    cfg, folder = run.cfg, run.folder
    consolidate(folder.checkpoint)
    if run.hardware.sharded:
        model = build_model(cfg, dataset.index.vocab_size, dataset.tokenizer.eot_id)
        model.load_state_dict(model_weights(load_checkpoint(folder.checkpoint)))
    model.to(run.hardware.torch_device).eval()  # Lightning has moved it to the CPU, slow for a large one
    # A copy with the weights that an evaluation serves, since losses are those of the trained ones.
    served = deepcopy(model).bfloat16() if run.hardware.precision == "bf16-mixed" else model
    if has_answers(cfg):
        sample = answers_text(served, dataset, cfg.train.sample_tokens, Sampling(temperature=0), cfg.seed)
    else:
        sample = dataset.tokenizer.decode(sample_text(run, served, prompt, dataset.tokenizer.eot_id))
    replace_text(folder.path / SAMPLE, sample)
    if cfg.train.eval_lengths:
        evaluation(cfg, dataset, model, run.hardware, run.steps, cfg.train.eval_lengths).save(folder.path)
    if has_documents(cfg):
        document_losses(cfg, dataset, model, run.hardware).save(folder.path)
    rows, metrics = read_cells(folder.metrics), dict(metadata.metrics)
    for row in with_numbers(rows):
        metrics |= row  # so that the last value of each stays
    metrics |= monitor.speed_metrics(monitor.speed.overall)
    if run.compiled and monitor.warm_up_seconds is not None:
        metrics["perf/compile_seconds"] = monitor.warm_up_seconds
    summary = Summary(**vars(metadata) | {"metrics": metrics}, rows=described(rows)["checksum"])
    summary.save(folder.path)
    if cfg.logger.tensorboard:
        log_hparams(run, summary)
    discard(before(folder.checkpoint))
    folder.write_status("done")


def sample_text(run: Run, model: Decoder, prompt: list[int], eot_id: int) -> list[int]:
    """The prompt and the model's continuation, within its context; seeded by the run."""
    start = marked(prompt, model, eot_id)[: model.max_seq_len]
    length = min(run.cfg.train.sample_tokens, model.max_seq_len - len(start))
    if length == 0:  # a model without a state cannot generate
        return prompt
    steps = generate(model, [start], length, Sampling(temperature=0.8), seed=run.cfg.seed)
    with torch.compiler.set_stance("force_eager"):  # a text has a shape for each of its tokens
        return [*prompt, *(token for (token,) in steps if token is not None)]
