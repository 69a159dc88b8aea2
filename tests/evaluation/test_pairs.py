"""Pairs from the command line: the documented example learns its task, and what a run reports is what it writes."""

import re
from pathlib import Path

import pytest
import torch
from torch.nn.functional import one_hot

from llama_lab.data.open import open_dataset
from llama_lab.evaluation.answers import answers_text
from llama_lab.evaluation.load import load_run
from llama_lab.evaluation.text import generate_texts
from llama_lab.model import Sampling
from llama_lab.model.loss import IGNORE
from llama_lab.runs.stored import Summary
from llama_lab.training.command import train_run
from tests.composing import compose_config, decoder, eval_settings
from tests.conftest import Command
from tests.selection import first
from tests.training.tiny import planned

PAGE = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8").partition("## Pairs")[2]


def example(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The settings of the page's first command, after its program has made the files in `folder`."""
    monkeypatch.chdir(folder)
    exec(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[0], {})
    command, _, _ = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)[0].partition("\npython eval")
    words = command.replace("\\\n", " ").replace("'", "").split()[2:]
    return [*words, "logger=none", "train.evaluations=1", f"runs_dir={folder}", f"data.cache_dir={folder / 'cache'}"]


def exact_matches(folder: Path) -> list[bool]:
    """Of each validation pair, whether the run's greedy text is its target."""
    run = load_run(folder)
    windows = run.open_dataset().val_windows(run.model.max_seq_len)
    eot, found = run.tokenizer.eot_id, []
    for i in range(len(windows)):
        inputs, targets = (torch.from_numpy(side) for side in windows[i])
        ids = targets[targets != IGNORE].tolist()
        source = inputs[1 : inputs.tolist().index(eot, 1)].tolist()
        prompt, target = run.tokenizer.decode(source), run.tokenizer.decode(ids[:-1])
        settings = eval_settings("temperature=0", f"max_new_tokens={len(ids)}")
        *_, (text,) = generate_texts(run.tokenizer, run.model, [prompt], settings, are_sources=True)
        found.append(text.certain == f"{prompt}\n{target}" and len(text.tokens) == len(ids) - 1)
    return found


@pytest.mark.matrix
def test_dates_are_written_in_one_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = planned(*example(tmp_path, monkeypatch))
    assert train_run(made) == "done"
    reported = Summary.load(made.folder.path).metrics["val/exact_match"]
    matches = exact_matches(made.folder.path)
    assert reported == pytest.approx(sum(matches) / len(matches))
    assert reported >= 0.95


@pytest.mark.parametrize("family", first(1, ["encoder_decoder", "decoder"]))
def test_exact_matches_are_those_of_greedy_decoding(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, evaluating: Command
) -> None:
    """Of a task that is learnt in part: each target is the first letter of its source, twice."""
    monkeypatch.chdir(tmp_path)
    words = [f"{a}{b}{c}" for a in "abcd" for b in "efgh" for c in "ijkl"]
    (tmp_path / "from.txt").write_text("\n".join(words))
    (tmp_path / "to.txt").write_text("\n".join(word[0] * 2 for word in words))
    settings = ["data=pairs", "data.files=[from.txt,to.txt]", "data.val_fraction=0.3", "tokenizer=char", "size=pico"]
    training = ["model.max_seq_len=8", "train.batch_size=8", "train.tokens=1920", "optim.lr=1e-3", "logger=none"]
    made = planned(
        *settings, *training, f"family={family}", f"runs_dir={tmp_path}", f"data.cache_dir={tmp_path / 'cache'}"
    )
    assert train_run(made) == "done"
    metrics, matches = Summary.load(made.folder.path).metrics, exact_matches(made.folder.path)
    assert metrics["val/exact_match"] == pytest.approx(sum(matches) / len(matches))
    assert 0 < metrics["val/exact_match"] < 1
    assert "val/second_half_loss" not in metrics
    sample = (made.folder.path / "sample.txt").read_text()
    assert re.fullmatch(r"[a-d][e-h][i-l]<\|endoftext\|>.*", sample)
    ran = evaluating(f"run={made.folder.path}", 'prompts=["aei","bfj"]', "temperature=0", "max_new_tokens=3")
    assert re.match(r"aei\n.*\n-{20}\nbfj\n", ran.out)


def test_in_a_sample_right_letters_of_several_bytes_are_whole_and_a_wrong_byte_stands_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in (("from.txt", "a"), ("to.txt", "größe")):
        (tmp_path / name).write_text("".join(f"{text}{n}\n" for n in range(9)))
    files = f"data.files=[{tmp_path / 'from.txt'},{tmp_path / 'to.txt'}]"
    dataset = open_dataset(
        compose_config("data=pairs", files, "data.val_fraction=0.3", "tokenizer=byte", f"data.cache_dir={tmp_path}")
    )
    model = decoder(vocab_size=257)
    source, answers = dataset.val_windows(model.max_seq_len)[0]
    guesses = torch.from_numpy(answers).clamp(min=0)
    guesses[9] = ord("x")
    monkeypatch.setattr(model, "forward", lambda *_: one_hot(guesses, 257)[None])
    found = answers_text(model, dataset, 99, Sampling(temperature=0), seed=1)
    assert found == f"a{chr(source[2])}<|endoftext|>größx(e){chr(source[2])}<|endoftext|>"
