"""The loss of a trained run on each held-out document, from which a report learns how much other text would matter."""

import numpy as np
import torch
from omegaconf import DictConfig

from llama_lab.data.dataset import Dataset
from llama_lab.data.objectives import open_objective, predicts_text
from llama_lab.data.open import has_answers
from llama_lab.data.windows import ValWindows
from llama_lab.devices.hardware import Hardware
from llama_lab.model import Decoder
from llama_lab.model.loss import IGNORE
from llama_lab.runs.evaluation import DocumentLosses

from .lengths import batch_tokens, evaluating_on

MOST_GROUPS = 500  # of neighbouring documents, where there are more documents


def has_documents(cfg: DictConfig) -> bool:
    """Whether a run is judged by the next tokens of held-out documents: not a tuning run, nor one with answers."""
    return predicts_text(cfg) and not has_answers(cfg) and cfg.data.get("val_half") != "tuning"


def document_losses(cfg: DictConfig, dataset: Dataset, model: Decoder, hardware: Hardware) -> DocumentLosses:
    """The losses of `model` on the held-out documents, in the trained windows, on one device."""
    owners = dataset.val_documents
    count = int(owners.max()) + 1
    groups = min(count, MOST_GROUPS)
    length = model.max_seq_len
    texts = dataset.val_windows(length)
    owner_windows = ValWindows(np.concatenate([[0], owners * groups // count]), length)
    objective, size = open_objective(cfg, dataset), max(1, batch_tokens(cfg) // length)
    nats, tokens = np.zeros(groups), np.zeros(groups, dtype=np.int64)
    with hardware.autocast(), evaluating_on(model, hardware.torch_device):
        for start in range(0, len(texts), size):
            at = range(start, min(start + size, len(texts)))
            examples = (torch.from_numpy(ids).to(hardware.torch_device) for ids in objective.val_batch(texts, at))
            inputs, targets, *given = model.cut(*examples)
            losses = model.loss(inputs, targets, *given)[-1].cpu().double().numpy()
            owner = np.stack([owner_windows[i][1] for i in at])[:, -targets.shape[1] :]  # a source has no targets
            is_predicted = targets.cpu().numpy() != IGNORE
            nats += np.bincount(owner[is_predicted], losses[is_predicted], groups)
            tokens += np.bincount(owner[is_predicted], minlength=groups)
    return DocumentLosses(tokens=tokens.tolist(), nats=[round(float(one), 3) for one in nats])
