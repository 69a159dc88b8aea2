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
    shown = [*symbols[1 : places[-1] + 1], answers[places[-1]]][:length]
    decode, parts, start = dataset.tokenizer.decode, [], 0
    for place, guess in zip(places, guesses, strict=True):
        if place < length and guess != answers[place]:
            parts += [decode(shown[start:place]), f"{decode([guess])}({decode([answers[place]])})"]
            start = place + 1
    parts.append(decode(shown[start:]))  # together, since a letter may be several tokens
    return ("" if dataset.entropy_floor is None else " ").join(filter(None, parts))
