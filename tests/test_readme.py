"""What the README states as a fact of published models is what the code says."""

import re
from pathlib import Path

import pytest

from llama_lab.model import measure_cost
from tests.composing import decoder

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
MODELS = {
    "LLaMA 7B": ["arch=llama", "size=llama_7b"],
    "Llama 2 70B": ["arch=llama2", "size=llama2_70b"],
    "Llama 3 8B": ["arch=llama3", "size=llama3_8b"],
    "Mistral 7B": ["arch=mistral", "size=mistral_7b"],
    "Falcon 7B": ["arch=falcon", "size=falcon_7b"],
}


@pytest.mark.parametrize("model", MODELS)
def test_the_readme_tells_the_kv_cache_bytes_that_the_modules_take(model: str) -> None:
    row = re.search(rf"^\| {model}\b.*?\| ([\d,]+) \| ([\d.]+) GiB \| ([\d.]+) GiB \|$", README, re.MULTILINE)
    assert row is not None
    built = decoder(*MODELS[model], vocab_size=1, device="meta")
    assert measure_cost(built).kv_bytes_per_token == int(row[1].replace(",", ""))
    for cell, length in ((row[2], 4096), (row[3], 32768)):
        assert measure_cost(built, length).kv_bytes == float(cell) * 2**30
