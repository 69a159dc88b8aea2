"""A model's answers to a probe, as text."""

import torch

from llama_lab.data.dataset import Dataset
from llama_lab.model import Decoder, Sampling
from llama_lab.model.init import parameter_generator
from llama_lab.model.loss import IGNORE


@torch.no_grad()
def answers_text(model: Decoder, dataset: Dataset, length: int, sampling: Sampling, seed: int) -> str:
    """The first `length` symbols of a validation sequence, with an answer drawn from the model in the place of each.

    A wrong one is followed by the right one: `k3 v1 k7 v4 k3 v1 k7 v9(v4)`. `model` should be in evaluation mode.
    """
    if length == 0:
        return ""
    device = model.embedding.tokens.weight.device
    window = (torch.from_numpy(side)[None, :length].to(device) for side in dataset.val_windows(model.max_seq_len)[0])
    inputs, targets, *given = model.cut(*window)
    logits = model(inputs, None, *given)[0].float()
    guesses = sampling.draw(logits, [parameter_generator(seed, "answers")] * len(logits)).tolist()
    following = [*inputs[0].tolist()[1:], None]  # the symbol after the last input is shown only if it is an answer
    names = [dataset.tokenizer.decode([symbol]) for symbol in range(dataset.tokenizer.vocab_size)]
    shown = []
    for symbol, target, guess in zip(following, targets[0].tolist(), guesses, strict=True):
        if target == IGNORE:
            shown += [] if symbol is None else [names[symbol]]
        else:
            shown.append(names[guess] if guess == target else f"{names[guess]}({names[target]})")
    return " ".join(shown)
