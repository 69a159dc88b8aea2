"""Components of a user's own, from YAMLs of their own package, are tried before training: a fault is one line."""

import json
import re
from pathlib import Path

import pytest

from tests.conftest import Command, Ran
from tests.selection import first
from tests.training.tiny import own_options

COMPONENTS = '''import torch
from torch import nn

from llama_lab.model.mixer import Mixer
from llama_lab.model.encoding import Position
from llama_lab.model.state import State


class Sum(Mixer):
    """The sum of the values of all tokens up to now, over 100."""

    max_state_tokens = 0

    def __init__(self, dim):
        super().__init__()
        self.dim = dim
        self.value = nn.Linear(dim, dim)
        self.register_buffer("mask", torch.ones(1))  # a name that GQA has for something else

    def forward(self, x, layout, state=None):
        total = self.value(x).cumsum(1) / 100
        if state is not None:
            total = total + state.tensors[0][:, None]
            self.keep(state, total[:, -1])
        return total

    def keep(self, state, last):
        state.tensors[0].copy_(last)

    def flops_per_token(self, seq_len):
        return 2 * self.dim**2

    def new_state(self, batch_size, length, device, dtype):
        return State([torch.zeros(batch_size, self.dim, device=device, dtype=dtype)])


class Leaking(Sum):
    def forward(self, x, layout, state=None):
        return self.value(x).flip(1).cumsum(1)


class Forgetful(Sum):
    def keep(self, state, last):
        state.tensors[0].copy_(0 * last)


class Replacing(Sum):
    def keep(self, state, last):
        state.tensors[0] = last


class Boasting(Sum):
    def state_bytes(self, length, dtype):
        return 1


class Stateless(Sum):
    new_state = Mixer.new_state


class Wide(nn.Module):
    def __init__(self, dim, hidden_dim):
        super().__init__()
        self.up, self.down = nn.Linear(dim, hidden_dim), nn.Linear(hidden_dim, dim)

    def forward(self, x):
        return self.down(self.up(x).relu())


class Narrow(Wide):
    def forward(self, x):
        return super().forward(x)[..., :1]


class Shifted(Wide):
    def forward(self, x):
        return super().forward(x.roll(1, 1))


class Bias(Position):
    def bias(self, query_positions, key_positions):
        return torch.zeros(len(query_positions), len(key_positions), 4)


class Turning(Position):
    def rotation(self, positions):
        return "tables"
'''


def line(text: str, after: str) -> int:
    """The number of the first line with `text` in a class."""
    lines = COMPONENTS.splitlines()
    start = next(i for i, one in enumerate(lines) if one.startswith(f"class {after}("))
    return 1 + next(i for i in range(start, len(lines)) if text in lines[i])


@pytest.fixture
def mine(tmp_path: Path, tiny: list[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The overrides of a short run, with options `mine/<class>` that are packed into one group each."""
    groups = {"attention": "Sum Leaking Forgetful Replacing Boasting Stateless", "ffn": "Wide Narrow Shifted"}
    groups["position"] = "Bias Turning"
    options = {
        f"{group}/{name.lower()}": f"_target_: trial_lab.parts.{name}\n_partial_: true"
        for group, names in groups.items()
        for name in names.split()
    }
    conf = own_options(tmp_path, monkeypatch, "trial_lab/parts.py", COMPONENTS, options)
    return [conf, *tiny, "train.tokens=512", "arm=a"]


def assert_refused(ran: Ran, message: str) -> None:
    """In one line, before training."""
    assert ran.code == 2
    assert re.fullmatch(rf"error: {message}.*\n", ran.err), ran.err
    assert not list((ran.cwd / "runs").rglob("metrics.csv"))


def test_a_prefix_in_some_layers_is_no_fault_of_theirs(mine: list[str], command: Command) -> None:
    ran = command(*mine, "ffn=wide", "model.n_layers=2", "+pattern.a={at: 1, attention: {prefix: 9}}")
    assert ran.code == 0, ran.err


def test_parts_of_a_user_s_own_train_though_their_yamls_set_no_size(mine: list[str], command: Command) -> None:
    ran = command(*mine, "attention=sum", "ffn=wide", "position=none")
    assert ran.code == 0, ran.err
    summary = json.loads((ran.run / "summary.json").read_text())
    assert (summary["kv_cache/bytes_per_token"], summary["kv_cache/bytes"]) == (0, 2 * 32 * 2)
    assert summary["attention_kernel"] == "eager"
    assert len((ran.run / "sample.txt").read_text()) > 0


FAULTS = {
    "attention=leaking": (
        ("forward", "Leaking"),
        "model.blocks.0.attention: Leaking gives a token something else when",
    ),
    "attention=forgetful": (("forward", "Sum"), "model.blocks.0.attention: Forgetful gives something else token by"),
    "attention=replacing": (("forward", "Sum"), "model.blocks.0.attention: Replacing loses the state of single"),
    "attention=boasting": (("forward", "Sum"), r"model.blocks.0.attention: Boasting says 1 bytes of state after 1"),
    "ffn=narrow": (("forward", "Narrow"), r"model.blocks.0.ffn: Narrow returns \(2, 11, 1\) for an input of \(2, 11, "),
    "ffn=shifted": (("forward", "Shifted"), "model.blocks.0.ffn: Shifted gives"),
    "position=bias": (("bias", "Bias"), r"model.position: Bias returns a bias of shape \(11, 11, 4\) for 11 positions"),
}


@pytest.mark.parametrize("override", first(3, FAULTS))
def test_a_fault_is_one_line_with_its_place_before_training(override: str, mine: list[str], command: Command) -> None:
    (method, owner), message = FAULTS[override]
    place = rf"trial_lab/parts\.py:{line(f'def {method}(', owner)}, in {method}: "
    assert_refused(command(*mine, "position=none", override), place + message)


def test_an_error_in_our_code_names_the_user_s_component(mine: list[str], command: Command) -> None:
    told = r"model\.position=trial_lab\.parts\.Turning: cannot train, TypeError: .* shows where"
    assert_refused(command(*mine, "position=turning"), told)


@pytest.mark.slow
def test_a_mixer_without_a_state_writes_no_sample(mine: list[str], command: Command, evaluating: Command) -> None:
    told = r"train\.sample_tokens=10: model\.blocks\.0\.attention: Stateless must read the whole text again .* give it"
    assert_refused(command(*mine, "position=none", "attention=stateless"), told)
    ran = command(*mine, "position=none", "attention=stateless", "train.sample_tokens=0")
    assert ran.code == 0, ran.err
    assert "kv_cache/bytes" not in json.loads((ran.run / "summary.json").read_text())
    refused = evaluating(f"run={ran.run}", "eval.parts=[cache]", "trust=[trial_lab]")
    assert refused.code == 2
    assert re.fullmatch(r"error: eval\.parts=\['cache'\]: model\.blocks\.0\.attention: Stateless .*\n", refused.err)
