"""Build the LightningModule and the optimizer of a run."""

from typing import TYPE_CHECKING

from torch.optim import Adafactor, Optimizer

from llama_lab.config.components import build
from llama_lab.data.objectives import predicts_text
from llama_lab.data.open import has_answers
from llama_lab.model import Decoder
from llama_lab.model.recompute import recompute
from llama_lab.util.errors import ConfigError

from .run import Run

if TYPE_CHECKING:
    from .module import LanguageModel


def build_module(run: Run, model: Decoder, bytes_per_token: float) -> "LanguageModel":
    """The module that trains `model` by the run's config. Raises ConfigError for an invalid setting."""
    from .module import LanguageModel  # Lightning takes three seconds to import, and a plan needs only the optimizer

    cfg = run.cfg
    recompute(model, cfg.train.recompute)
    optimizer, schedule, train = build(cfg.optim, "optim"), build(cfg.schedule, "schedule"), cfg.train
    build_optimizer(run, model)  # so that a bad setting is refused before anything is written
    return LanguageModel(
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


def build_optimizer(run: Run, model: Decoder) -> Optimizer:
    """The run's optimizer. Raises ConfigError for an invalid setting of it, or of the schedule."""
    optimizer: Optimizer = build(run.cfg.optim, "optim")(model)
    build(run.cfg.schedule, "schedule")(0, run.steps)
    if run.hardware.sharded and isinstance(optimizer, Adafactor):
        raise ConfigError(
            "optim=adafactor: PyTorch's cannot hold sharded parameters; choose trainer=ddp, or optim=adamw"
        )
    return optimizer
