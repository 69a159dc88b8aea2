"""Greedy decoding of a whole decoder, batch 1, ours and transformers': `python -m llama_lab.bench decode`.

Also measures the floor, the least time to read the weights and the KV cache (`floor.py`), and how the time per token
grows with the text (`growth.py`).
"""

from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from llama_lab.formatting import in_bytes
from llama_lab.model import Decoder
from llama_lab.plots import save
from llama_lab.timing import Timing, time_in_turn

from .charts import decode_chart
from .floor import Floor, buffers, floors_of, reading
from .growth import Growth, measure_contexts, measure_quarters
from .measurement import Measurement, conditions, console, measurements_of, new_table, timing_text, write_csv
from .subjects import Preset, greedy_text, ours

TRANSFORMERS = "transformers"


def run(preset: Preset, compiled: bool, rounds: int, device: torch.device, out: Path) -> None:
    """Measure and print all; write `decode.csv` and `decode.png` into `out`."""
    terminal = console()
    where = conditions(device)
    terminal.print(
        f"{where['device']}, {where['threads']} threads, PyTorch {where['torch']}, {preset.dtype}; {rounds} rounds"
    )
    if find_spec("transformers") is None:
        terminal.print("transformers is not installed, so ours stand alone; pip install 'transformers>=5,<6'")
    model = preset.build(preset.max_seq_len, device)
    measurements, floors = measure_generation(model, preset, compiled, rounds, device)
    growths = [*measure_quarters(model, preset, compiled, rounds), *measure_contexts(preset, rounds, device)]
    print_speeds(measurements, floors, preset)
    print_growth(growths)
    write_csv([row | where for row in csv_rows(measurements, floors, growths, preset)], out / "decode.csv")
    save(decode_chart(measurements, floors, growths), out / "decode.png")
    terminal.print(f"wrote {out / 'decode.csv'} and {out / 'decode.png'}", soft_wrap=True)


def measure_generation(
    model: Decoder, preset: Preset, compiled: bool, rounds: int, device: torch.device
) -> tuple[list[Measurement], list[Floor]]:
    """Seconds per token of every contender, prompt processing included; the first is transformers, if installed.

    The buffers for the floors are read in the same rounds, so that other load on the memory slows both.
    """
    contenders: dict[str, Callable[[], object]] = {}
    if find_spec("transformers") is not None:
        contenders[TRANSFORMERS] = transformers_generation(model, preset, device)
    for name, is_compiled in ours(compiled).items():
        contenders[name] = partial(write_text, model, preset, is_compiled)
    readings = {name: reading(n_bytes, device) for name, n_bytes in buffers(model, preset).items()}
    timings = time_in_turn(contenders | readings, rounds)
    per_token = {name: timings[name].divided_by(preset.new_tokens) for name in contenders}
    size = f"{preset.new_tokens} after {preset.prompt}"
    return measurements_of("decode", size, "generate", per_token), floors_of(model, preset, timings)


def write_text(model: Decoder, preset: Preset, compiled: bool) -> None:
    """Generate our greedy text."""
    for _ in greedy_text(model, preset, compiled):
        pass


def transformers_generation(model: Decoder, preset: Preset, device: torch.device) -> Callable[[], None]:
    """A function that generates as many tokens with transformers' Llama of the same shape.

    Raises RuntimeError if the models differ in their number of parameters; the function does if the text ends early.
    """
    transformers: Any = import_module("transformers")  # not a dependency, and slow to import
    cfg = preset.compose(preset.max_seq_len).model
    with device:
        theirs = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=cfg.vocab_size,
                hidden_size=cfg.dim,
                intermediate_size=cfg.hidden_dim,
                num_hidden_layers=cfg.n_layers,
                num_attention_heads=cfg.n_heads,
                num_key_value_heads=cfg.n_kv_heads,
                head_dim=cfg.head_dim,
                max_position_embeddings=preset.max_seq_len,
                tie_word_embeddings=cfg.embedding.tied,
            )
        )
        prompt = torch.arange(preset.prompt)[None]
    theirs = theirs.to(preset.dtype).eval()
    if sum(p.numel() for p in theirs.parameters()) != sum(p.numel() for p in model.parameters()):
        raise RuntimeError("transformers' model has another number of parameters than ours")
    theirs.generation_config.eos_token_id = None  # else the text might end early
    config = transformers.GenerationConfig(
        max_new_tokens=preset.new_tokens, do_sample=False, use_cache=True, pad_token_id=0
    )
    mask = torch.ones_like(prompt)

    def work() -> None:
        length = theirs.generate(prompt, config, attention_mask=mask).shape[1]
        if length != preset.prompt + preset.new_tokens:
            raise RuntimeError(f"transformers' text ended at {length} tokens")

    return work


def print_speeds(measurements: Sequence[Measurement], floors: Sequence[Floor], preset: Preset) -> None:
    """Print the contenders' speeds, absolute and as fractions of the floors', and how the floors were measured."""
    title = f"Greedy text, batch 1, {preset.new_tokens} tokens after {preset.prompt}; time of a token"
    table = new_table(title, ("what",), ("median", "low to high", "tokens/s", "speed", "of memory", "of cache"))
    for m in measurements:
        shares = (f"{floor.share(m.timing.median):.1%}" for floor in floors)
        table.add_row(m.what, *timing_text(m.timing), f"{1 / m.timing.median:,.0f}", f"{m.speed_ratio:.2f}x", *shares)
    table.add_section()
    for floor in floors:
        median, _ = timing_text(Timing((floor.seconds,)))
        shares = (f"{other.share(floor.seconds):.1%}" for other in floors)
        table.add_row(floor.name, median, "", f"{1 / floor.seconds:,.0f}", "", *shares)
    terminal = console()
    terminal.print(table)
    for floor in floors:
        terminal.print(
            f"{floor.name}: {in_bytes(floor.bytes_per_token)} per token, weights and KV cache, at "
            f"{floor.bytes_per_second / 1e9:.1f} GB/s, the best of reading {in_bytes(floor.buffer_bytes)}"
        )


def print_growth(growths: Sequence[Growth]) -> None:
    """Print seconds per token by text length; only attention's share should grow."""
    title = "Time of a token as the text grows, and of that attention's kernels alone"
    table = new_table(title, ("what", "where"), ("median", "low to high", "attention", "the rest"))
    for growth in growths:
        cells = ["", ""]
        if growth.attention is not None:
            rest = Timing((growth.step.median - growth.attention.median,))
            cells = [timing_text(timing)[0] for timing in (growth.attention, rest)]
        table.add_row(growth.what, growth.where, *timing_text(growth.step), *cells)
    console().print(table)


def csv_rows(
    measurements: Sequence[Measurement], floors: Sequence[Floor], growths: Sequence[Growth], preset: Preset
) -> list[dict[str, Any]]:
    """All measurements, with the same keys; times are in seconds per token, or per read of a buffer.

    bytes_read: per token of a floor, in all of a read. of_memory_floor, of_cache_floor: fractions of their speed.
    """
    rows = []
    for m in measurements:
        shares = [floor.share(m.timing.median) for floor in floors]
        rows.append(row(m.what, m.size, "generate", m.timing, m.speed_ratio, None, *shares))
    for floor in floors:
        size = f"{preset.new_tokens} after {preset.prompt}"
        rows.append(row(floor.name, size, "read", Timing((floor.seconds,)), None, floor.bytes_per_token))
        rows.append(row(f"{floor.name}'s buffer", "", "read", floor.reading, None, floor.buffer_bytes))
    for growth in growths:
        rows.append(row(growth.what, growth.where, "decode", growth.step))
        if growth.attention is not None:
            rows.append(row("attention alone", growth.where, "decode", growth.attention))
    return rows


def row(
    what: str,
    size: str,
    direction: str,
    timing: Timing,
    ratio: float | None = None,
    bytes_read: float | None = None,
    of_memory_floor: float | None = None,
    of_cache_floor: float | None = None,
) -> dict[str, Any]:
    """A row of decode.csv."""
    return {
        "component": "decode",
        "what": what,
        "size": size,
        "pass": direction,
        "median_s": timing.median,
        "low_s": timing.low,
        "high_s": timing.high,
        "ratio": ratio,
        "tokens_per_s": None if direction == "read" else 1 / timing.median,
        "bytes_read": bytes_read,
        "of_memory_floor": of_memory_floor,
        "of_cache_floor": of_cache_floor,
    }
