"""A run's plan, its sample and its facts."""

import re
import resource
from pathlib import Path

import pytest
import torch

from llama_lab.data.open import open_dataset
from llama_lab.devices.performance import M_MMAP_MAX, libc, peak_memory_bytes, reset_peak_memory
from llama_lab.training.recording import sample_text, token_to_position_ratio
from tests.composing import decoder
from tests.training.tiny import pieces, planned, trained

M_MMAP_THRESHOLD = -3  # of mallopt(3)


@pytest.mark.parametrize(("tokens", "steps"), [(256, 1), (511, 1), (512, 2), ("2e4", 78)])
def test_a_budget_buys_whole_steps_within_it(tokens: object, steps: int, tiny: list[str], tmp_path: Path) -> None:
    run = planned(*tiny, f"train.tokens={tokens}", f"runs_dir={tmp_path / 'runs'}")
    assert (run.steps, run.tokens_per_step) == (steps, 256)
    assert list(tmp_path.iterdir()) == [], "a plan writes nothing"


def test_a_run_says_how_often_it_repeats_its_text(
    tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short = tmp_path / "short.txt"
    short.write_text(" ".join(map(str, range(500))))
    trained(*tiny, f"data.files=[{short}]", "train.tokens=2560", f"runs_dir={tmp_path}")
    assert re.search(r"^data: reads the text 1\.\d+ times, so repeats it$", capsys.readouterr().out, re.MULTILINE)


def test_a_sample_begins_with_the_prompt_repeats_and_ends_with_the_context(tiny: list[str]) -> None:
    model = decoder(vocab_size=257)
    run = planned(*tiny, "train.sample_tokens=10")
    sample = sample_text(run, model, [100, 101, 102], eot_id=256)
    assert sample[:3] == [100, 101, 102]
    assert len(sample) == 3 + 10
    assert sample_text(run, model, [100, 101, 102], 256) == sample
    assert sample_text(planned(*tiny, "train.sample_tokens=10", "seed=2"), model, [100, 101, 102], 256) != sample
    assert len(sample_text(planned(*tiny, "train.sample_tokens=999"), model, [100], 256)) == 32 - 1
    assert sample_text(run, model, [7] * 99, 256) == [7] * 99


def test_tokens_and_added_positions_start_equally_large(tiny: list[str]) -> None:
    dataset = open_dataset(planned(*tiny).cfg)
    window = torch.from_numpy(dataset.train[:32].astype("int64"))
    for position in ("sinusoidal", "learned"):
        ratio = token_to_position_ratio(decoder(f"position={position}", vocab_size=257), window)
        assert ratio is not None
        assert 2 / 3 < ratio < 3 / 2
    for position in ("rope", "alibi", "relative", "none"):
        assert token_to_position_ratio(decoder(f"position={position}", vocab_size=257), window) is None


def test_a_peak_of_memory_before_the_run_is_not_the_run_s() -> None:
    cpu = torch.device("cpu")
    ballast = torch.ones(64 * 2**20)  # 256 MiB, all of it touched
    before = peak_memory_bytes(cpu)
    del ballast
    reset_peak_memory(cpu)
    assert peak_memory_bytes(cpu) < before - 128 * 2**20


def test_training_on_a_cpu_keeps_freed_memory(tiny: list[str], tmp_path: Path) -> None:
    if not hasattr(libc, "mallopt"):
        pytest.skip("this C library is not glibc")

    def page_faults() -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(8):
            torch.ones(2**20)  # 4 MiB
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    libc.mallopt(M_MMAP_MAX, 2**16)  # glibc's defaults, which an earlier test may have changed
    libc.mallopt(M_MMAP_THRESHOLD, 2**17)
    returned = page_faults()  # one per page of 4 KiB, or per 16 KiB where the kernel maps four at once
    pieces(*tiny, "train.tokens=512", f"runs_dir={tmp_path}").fit()
    page_faults()
    assert page_faults() < returned / 10
