"""Tokens per second of greedy generation, ours and transformers', in turn: `python -m tests.model.speed [compiled]`.

Batch 1, a prompt of 32 tokens and 200 new ones, float32. The threads are PyTorch's: set OMP_NUM_THREADS.
"""

import sys
import time
from collections.abc import Callable
from statistics import median

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from llama_lab.model import Sampling, generate
from tests.composing import decoder

PROMPT, NEW, ROUNDS = 32, 200, 5
SIZES = {"dim": 256, "n_layers": 6, "n_heads": 8, "n_kv_heads": 4, "hidden_dim": 688, "max_seq_len": 256}
VOCAB = 4096


def seconds(work: Callable[[], object]) -> float:
    """How long it takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main(compiled: bool) -> None:
    """Print the tokens per second of every round, and the ratio of the medians."""
    ours = decoder("arch=llama3", *(f"model.{key}={n}" for key, n in SIZES.items()), vocab_size=VOCAB).eval()
    theirs = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=SIZES["dim"],
            intermediate_size=SIZES["hidden_dim"],
            num_hidden_layers=SIZES["n_layers"],
            num_attention_heads=SIZES["n_heads"],
            num_key_value_heads=SIZES["n_kv_heads"],
            max_position_embeddings=SIZES["max_seq_len"],
            tie_word_embeddings=False,
        )
    ).eval()
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in theirs.parameters())
    prompt = torch.arange(PROMPT)[None]
    theirs.generation_config.eos_token_id = None  # else the text might end early
    config = GenerationConfig(max_new_tokens=NEW, do_sample=False, use_cache=True, pad_token_id=0)
    contenders = {
        "ours": lambda: list(generate(ours, prompt.tolist(), NEW, Sampling(temperature=0), compiled=compiled)),
        "transformers": lambda: theirs.generate(prompt, config, attention_mask=torch.ones_like(prompt)),
    }
    speeds: dict[str, list[float]] = {name: [] for name in contenders}
    for work in contenders.values():
        work()  # warm up, and compile
    assert theirs.generate(prompt, config).shape[1] == PROMPT + NEW
    for _ in range(ROUNDS):
        for name, work in contenders.items():
            speeds[name].append(NEW / seconds(work))
    for name, rounds in speeds.items():
        print(f"{name}: {median(rounds):.0f} tokens/s ({', '.join(f'{speed:.0f}' for speed in rounds)})")
    print(f"ratio: {median(speeds['ours']) / median(speeds['transformers']):.2f}")


if __name__ == "__main__":
    main("compiled" in sys.argv)
