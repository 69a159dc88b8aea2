"""What a run ends with."""

from llama_lab.model import measure_cost
from llama_lab.model.cost import cost_metrics
from llama_lab.runs.result_table import state_rows
from tests.composing import decoder
from tests.model.cases import ON_NONE


def test_a_hybrids_state_per_sequence_stands_beside_its_kv_cache_per_token() -> None:
    cost = measure_cost(decoder(*ON_NONE["hybrid, 1 in 4"]), 4096)
    matrices, pasts = 4 * 4 * 8 * 8, 2 * 3 * 3 * 32  # of a layer: in float32; queries, keys and values in 16 bits
    assert cost.state_bytes_per_sequence == 3 * (matrices + pasts) == 4800
    assert state_rows(cost_metrics(cost), 4096) == [
        ("KV cache per token, 16-bit", "64 B"),
        ("state per sequence", "4.688 KiB"),
        ("KV cache and state at 4,096 tokens", "260.7 KiB"),
    ]


def test_attention_has_no_row_of_a_state_and_a_model_that_cannot_decode_none() -> None:
    rows = state_rows(cost_metrics(measure_cost(decoder("attention=mha"), 32)), 32)
    assert rows == [("KV cache per token, 16-bit", "256 B"), ("KV cache at 32 tokens", "8 KiB")]
    assert state_rows({"params": 7}, 32) == []


def test_the_rows_of_an_encoder_decoder_are_of_what_either_tower_reads_of_a_window() -> None:
    rows = state_rows(cost_metrics(measure_cost(decoder("arch=transformer2017"), 32)), 32)
    assert rows[1:] == [("KV cache of a target", "4 KiB"), ("  and of its source", "4.016 KiB")]
