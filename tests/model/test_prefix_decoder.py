"""The prefix decoder: each sequence as a decoder reads it that has its prefix in every layer."""

import pytest
import torch

from llama_lab.model import Sampling, generate
from llama_lab.model.loss import IGNORE
from tests.composing import decoder

LENGTH = 24
SWITCHES = ["position=alibi", "position=relative", "attention=gqa_window model.attention.window=6", "attention=gqa"]


def texts(count: int) -> torch.Tensor:
    return torch.randint(97, (count, LENGTH), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("switches", SWITCHES)
def test_each_sequence_is_read_with_its_own_prefix(switches: str) -> None:
    ours, tokens = decoder(*switches.split(), "objective=prefix"), texts(3)
    prefixes = (2, 7, 20)
    found = ours(tokens, None, torch.tensor(prefixes))
    fixed = [
        decoder(*switches.split(), f"model.attention.prefix={prefix}")(tokens)[i] for i, prefix in enumerate(prefixes)
    ]
    torch.testing.assert_close(found, torch.stack(fixed), rtol=1e-4, atol=1e-4)
    assert (found[1] - ours(tokens)[1]).abs().max() > 1e-3, "a causal decoder would do"


def test_what_has_no_target_before_the_first_is_the_prefix_and_else_the_first_half() -> None:
    model, tokens = decoder("objective=prefix"), texts(3)
    targets = tokens.clone()
    targets[1, :4], targets[2] = IGNORE, IGNORE
    _, found, prefix = model.cut(tokens, targets)
    assert prefix.tolist() == [12, 5, 12]
    assert [(row == IGNORE).sum().item() for row in found] == [11, 4, LENGTH]
    assert (found[0, 11:] == targets[0, 11:]).all()
    again = model.cut(tokens, found, prefix)
    assert all((x == y).all() for x, y in zip(again, (tokens, found, prefix), strict=True))


def test_a_prompt_is_a_prefix_in_generation() -> None:
    model = decoder("objective=prefix").eval()
    prompts = [texts(1)[0, :9].tolist(), texts(1)[0, 3:8].tolist()]
    written = zip(*generate(model, prompts, 6, Sampling(temperature=0)), strict=True)
    for prompt, new in zip(prompts, written, strict=True):
        tokens = list(prompt)
        for _ in range(6):
            logits = model(torch.tensor([tokens]), None, torch.tensor([len(prompt)]))
            tokens.append(int(logits[0, -1].argmax()))
        assert [*prompt, *new][-6:] == tokens[-6:]
