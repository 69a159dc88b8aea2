"""The floor is made of the bytes that a token really reads, and the other model really makes as much text."""

from typing import Any

import pandas as pd
import pytest
import torch
import transformers
from torch.overrides import TorchFunctionMode

from benchmarks import decode
from benchmarks.decode import (
    PRESETS,
    cache_bytes,
    floors_of,
    measure_contexts,
    measure_generation,
    measure_quarters,
    weight_bytes,
)
from benchmarks.rows import measurement
from llama_lab.model import Decoder, Sampling, generate
from tests.composing import decoder

CPU = torch.device("cpu")
TINY = PRESETS["tiny"]


class Reads(TorchFunctionMode):
    """Adds up what the operations on a model's parameters, and its attention, are given."""

    def __init__(self, model: Decoder) -> None:
        super().__init__()
        self.parameters = {id(p) for p in model.parameters()}
        self.weights: dict[tuple[int, bool], int] = {}
        self.keys_and_values = 0

    def __torch_function__(self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function is torch.nn.functional.scaled_dot_product_attention:
            self.keys_and_values += args[1].nbytes + args[2].nbytes
        is_lookup = function is torch.nn.functional.embedding
        for tensor in (*args, *(kwargs or {}).values()):
            if id(tensor) in self.parameters and function in READERS:
                self.weights[id(tensor), is_lookup] = result.nbytes if is_lookup else tensor.nbytes
        return result


READERS = (torch.nn.functional.linear, torch.nn.functional.embedding, torch.Tensor.float)


def reads_of_a_step(model: Decoder, seen: int) -> Reads:
    """What the token after `seen` others reads."""
    cache = model.new_state(1, seen + 1)
    with torch.inference_mode():
        model(torch.zeros(1, seen, dtype=torch.long), cache)
        with Reads(model) as reads:
            model(torch.zeros(1, 1, dtype=torch.long), cache)
    return reads


@pytest.mark.parametrize("overrides", [["attention=mqa"], ["embedding=tied", "norm=layernorm"]])
def test_the_floor_s_weights_are_those_that_a_token_reads(overrides: list[str]) -> None:
    model = decoder("arch=llama3", *overrides).eval()
    assert sum(reads_of_a_step(model, 5).weights.values()) == weight_bytes(model)


def test_the_floor_s_cache_is_what_the_tokens_of_a_text_read_on_average() -> None:
    model, prompt, new = decoder("arch=llama3").eval(), 6, 5
    with Reads(model) as reads:
        list(generate(model, [list(range(prompt))], new, Sampling(temperature=0)))
    # The first of the new tokens is drawn after the prompt, whose keys and values were given as they were computed.
    assert reads.keys_and_values / new == cache_bytes(model, prompt, new)


def test_the_floor_s_time_follows_from_bytes_and_the_fastest_read() -> None:
    (floor,) = floors_of(100.0, {"memory": 1000}, {"memory": measurement([2.0, 1.0, 4.0])}).itertuples()
    assert (floor.read_bytes, floor.token_bytes, floor.gb_per_s) == (1000, 100.0, 1e-6)
    assert floor.floor_ms == pytest.approx(100.0)


def test_all_contenders_are_timed_by_the_token_and_compared_with_transformers() -> None:
    model = TINY.build(TINY.max_seq_len, CPU)
    rows, floors = measure_generation(model, TINY, {"ours": False}, rounds=1, device=CPU)
    assert list(rows.what) == ["transformers", "ours"]
    assert rows.ratio[0] == 1.0
    assert list(floors.what) == ["memory", "cache"]
    assert list(floors.read_bytes) == [2**20, weight_bytes(model)]
    for floor in floors.itertuples():
        assert list(rows[f"of_{floor.what}"]) == pytest.approx(
            [floor.floor_ms / row.median_ms for row in rows.itertuples()]
        )
    assert list(rows.tokens_per_s) == pytest.approx([1000 / row.median_ms for row in rows.itertuples()])


def test_a_text_of_transformers_that_ends_early_is_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    work = decode.transformers_generation(TINY.build(TINY.max_seq_len, CPU), TINY, CPU)
    work()
    whole = transformers.LlamaForCausalLM.generate
    monkeypatch.setattr(transformers.LlamaForCausalLM, "generate", lambda *a, **k: whole(*a, **k)[:, :-1])
    with pytest.raises(RuntimeError, match="ended after 7 tokens"):
        work()


def test_a_token_is_timed_early_and_late_in_a_text_and_at_every_context() -> None:
    model = TINY.build(TINY.max_seq_len, CPU)
    quarters = pd.concat(measure_quarters(model, TINY, {"ours": False}, rounds=2))
    assert list(quarters["size"]) == ["first 2 tokens", "last 2 tokens"]
    assert (quarters.low_ms < quarters.high_ms).all()  # of two rounds
    contexts = list(measure_contexts(TINY, rounds=1, device=CPU))
    assert [size for rows in contexts for size in rows["size"]] == ["at 8 tokens"] * 2 + ["at 16 tokens"] * 2
    for rows in contexts:
        step, attention = rows.itertuples()
        assert (step.what, attention.what) == ("ours, eager", "attention alone")
        assert 0 < attention.median_ms < step.median_ms
