"""What is known of a run before it trains, for its folder and dashboards."""

import torch

from llama_lab.data.dataset import Dataset
from llama_lab.model import Cost, Decoder
from llama_lab.model.cost import cost_metrics
from llama_lab.runs.stored import Facts, WarmStart

from .run import Run


def run_facts(run: Run, dataset: Dataset, model: Decoder, cost: Cost, start: WarmStart | None = None) -> Facts:
    """The facts of a run that is about to train `model`."""
    first_window = torch.from_numpy(dataset.val_windows(model.max_seq_len)[0][0])
    return Facts(
        name=run.name,
        arm=run.arm,
        label=run.label,
        seed=run.cfg.seed,
        choices=run.choices,
        device=run.hardware.device_name,
        devices=run.hardware.world_size,
        sharded=run.hardware.sharded,
        precision=run.hardware.precision,
        attention_kernel="+".join(sorted({mixer.kernel for mixer in model.mixers})),
        compiled=run.compiled,
        data_hash=dataset.index.data_hash,
        tokenizer_hash=dataset.index.tokenizer_hash,
        vocab_size=model.vocab_size,
        init_hash=start.hash if start else "",
        bytes_per_token=dataset.bytes_per_token,
        unigram_entropy=dataset.unigram_entropy(),
        entropy_floor=dataset.entropy_floor,
        revisions=dict(dataset.index.revisions),
        epochs=dataset.epochs(model.max_seq_len, run.steps * run.cfg.train.batch_size),
        token_to_position_ratio=token_to_position_ratio(model, first_window),
        metrics=cost_metrics(cost),
    )


@torch.no_grad()
def token_to_position_ratio(model: Decoder, tokens: torch.Tensor) -> float | None:
    """Size of the token signal over that of the position signal at step 0; None where positions are not added.

    Far below 1, positions drown the tokens, and what looks like a bad position encoding is a bad start.
    """
    x = model.embedding(tokens[None])
    added = model.position.embed(x, torch.arange(len(tokens))) - x
    return float(x.norm() / added.norm()) if added.any() else None
