"""A model's answers to a probe, or its targets of pairs, as text."""

import numpy as np
import torch

from llama_lab.data.dataset import Dataset
from llama_lab.model import Decoder, Sampling
from llama_lab.model.init import parameter_generator
from llama_lab.model.loss import IGNORE


@torch.no_grad()
def answers_text(model: Decoder, dataset: Dataset, length: int, sampling: Sampling, seed: int) -> str:
    """The first `length` symbols of a validation sequence, with an answer drawn from the model in the place of each.

    It ends with the last. A wrong one is followed by the right one: `k3 v1 k7 v4 k3 v1 k7 v9(v4)`. `model` should be in
    evaluation mode.
    """
    if length == 0:
        return ""
    device = model.embedding.tokens.weight.device
    symbols, answers = dataset.val_windows(model.max_seq_len)[0]
    inputs, targets, *given = model.cut(*(torch.from_numpy(side)[None].to(device) for side in (symbols, answers)))
    logits = model(inputs, None, *given)[0].float()
    drawn = sampling.draw(logits, [parameter_generator(seed, "answers")] * len(logits))
    guesses = drawn[targets[0].cpu() != IGNORE].tolist()
    places = np.flatnonzero(answers != IGNORE)[-len(guesses) :].tolist()  # the cut may have left out the first
    names = [dataset.tokenizer.decode([symbol]) for symbol in range(dataset.tokenizer.vocab_size)]
    shown = [names[symbol] for symbol in symbols[1 : places[-1] + 2]]
    for place, guess in zip(places, guesses, strict=True):
        right = names[answers[place]]
        shown[place : place + 1] = [right if guess == answers[place] else f"{names[guess]}({right})"]
    return ("" if dataset.entropy_floor is None else " ").join(shown[:length])
