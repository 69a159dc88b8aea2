"""Build the LightningModule of a run."""

from torch.optim import Adafactor

from llama_lab.config.components import build
from llama_lab.data.objectives import predicts_text
from llama_lab.data.open import has_answers
from llama_lab.model import Decoder
from llama_lab.model.recompute import recompute
from llama_lab.util.errors import ConfigError

from .module import LanguageModel
from .run import Run


def build_module(run: Run, model: Decoder, bytes_per_token: float) -> LanguageModel:
    """The module that trains `model` by the run's config. Raises ConfigError for an invalid setting."""
    cfg = run.cfg
    recompute(model, cfg.train.recompute)
    optimizer, schedule, train = build(cfg.optim, "optim"), build(cfg.schedule, "schedule"), cfg.train
    module = LanguageModel(
        model,
        optimizer,
        schedule,
        run.steps,
        bytes_per_token if predicts_text(cfg) else None,
        grad_clip=train.grad_clip,
        z_loss=train.z_loss,
        label_smoothing=train.label_smoothing or 0.0,
        seed=cfg.seed,
        with_accuracy=has_answers(cfg) or not predicts_text(cfg),
        ema=train.ema,
    )
    made = module.configure_optimizers()  # so that a bad setting is refused before anything is written
    if run.hardware.sharded and isinstance(made["optimizer"], Adafactor):
        raise ConfigError(
            "optim=adafactor: PyTorch's cannot hold sharded parameters; choose trainer=ddp, or optim=adamw"
        )
    return module
