"""Prompts go on: at once, each as if it were alone, and never with half a character on the screen."""

import io
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from llama_lab.config.components import build_model
from llama_lab.data.dataset import Examples
from llama_lab.data.objectives import Span
from llama_lab.data.tokenizer import ByteTokenizer, TextTokenizer
from llama_lab.evaluation import text as text_module
from llama_lab.evaluation.load import TrainedRun, load_run
from llama_lab.evaluation.text import SEPARATOR, encode_prompts, generate_texts, write_texts
from llama_lab.training import recording
from llama_lab.util.errors import ConfigError
from tests.composing import compose_config, eval_settings
from tests.training.tiny import planned

EOT = 256
STREAM = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=100)


def texts_of(run: TrainedRun, prompts: Sequence[str], *overrides: str) -> list[list[int]]:
    """The ids that go on from the prompts."""
    *_, texts = generate_texts(run.tokenizer, run.model, prompts, eval_settings(*overrides))
    return [text.tokens for text in texts]


class Screen(io.StringIO):
    """A standard output that remembers what it has shown."""

    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self.shown, self._terminal = "", terminal

    def isatty(self) -> bool:
        return self._terminal

    def flush(self) -> None:
        self.shown = self.getvalue()


@pytest.fixture
def scripted(endless: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Stream given tokens in the place of generated ones; what stood on the screen before each step, and in the end."""
    run, chosen = load_run(endless), eval_settings()

    def stream(prompts: Sequence[str], *tokens: Sequence[int], terminal: bool = False) -> list[str]:
        screen, before = Screen(terminal), []

        def steps(*_: Any, **__: Any) -> Iterator[list[int | None]]:
            for i in range(max(map(len, tokens))):
                before.append(screen.shown)
                yield [row[i] if i < len(row) else None for row in tokens]

        with monkeypatch.context() as patched:
            patched.setattr(text_module, "generate", steps)
            patched.setattr(sys, "stdout", screen)
            write_texts(run, run.model, prompts, chosen)
        return [*before, screen.shown]

    return stream


def test_a_character_is_printed_when_its_last_byte_has_come(scripted: Callable[..., list[str]]) -> None:
    assert scripted(["x"], [*"a€😀b".encode(), EOT]) == [
        "",
        "xa",
        *["xa"] * 2,
        "xa€",
        *["xa€"] * 3,
        "xa€😀",
        "xa€😀b",
        "xa€😀b\n",
    ]


@given(content=st.text(max_size=12) | st.binary(min_size=1, max_size=12), end=st.booleans())
@STREAM
def test_the_pieces_make_up_the_whole_text(scripted: Callable[..., list[str]], content: str | bytes, end: bool) -> None:
    tokens = [*(content.encode() if isinstance(content, str) else content), *([EOT] if end else [])]
    *before, shown = scripted(["€"], tokens or [EOT])
    decoded = ByteTokenizer().train(iter(())).decode([token for token in tokens if token != EOT])
    assert shown == f"€{decoded}\n"
    assert all(shown.startswith(earlier) for earlier in before)
    for i, earlier in enumerate(before[1:], 1):  # all that is whole is there, at once
        whole = bytes(tokens[:i]).decode(errors="replace").rstrip("\N{REPLACEMENT CHARACTER}")
        assert earlier == f"€{whole}" or i == len(tokens)


def test_a_space_after_the_prompt_is_kept_where_a_tokenizer_leaves_out_the_first_of_a_text(
    endless: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, words = load_run(endless), Tokenizer(models.WordLevel({"<|endoftext|>": 0, "▁a": 1, "▁b": 2}, unk_token="▁a"))
    words.add_special_tokens(["<|endoftext|>"])
    words.pre_tokenizer, words.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    monkeypatch.setattr(text_module, "generate", lambda *_, **__: iter([[2, 2, 2]]))
    tokenizer, prompts = TextTokenizer(words), ["a b", "a", ""]
    *_, texts = generate_texts(tokenizer, run.model, prompts, eval_settings())
    assert [text.certain for text in texts] == ["a b b", "a b", "b"]
    *_, texts = generate_texts(tokenizer, run.model, prompts, eval_settings(), are_sources=True)
    assert [text.certain for text in texts] == ["a b\nb", "a\nb", "\nb"]


def test_of_several_texts_the_next_one_comes_when_the_first_has_ended(scripted: Callable[..., list[str]]) -> None:
    assert scripted(["1", "2"], [*b"ab", EOT], [*b"cdef", EOT]) == [
        "",
        "1a",
        "1ab",
        f"1ab{SEPARATOR}2cde",
        f"1ab{SEPARATOR}2cdef",
        f"1ab{SEPARATOR}2cdef\n",
    ]


def test_a_terminal_is_not_steered_by_a_text_and_a_file_holds_it_as_it_is(scripted: Callable[..., list[str]]) -> None:
    assert scripted(["\x1b["], [*b"\x07\n", EOT], terminal=True)[-1] == "␛[␇\n\n"
    assert scripted(["\x1b["], [*b"\x07\n", EOT])[-1] == "\x1b[\x07\n\n"


def test_a_batch_of_unequal_prompts_gives_the_texts_that_each_gives_alone(endless: Path) -> None:
    run = load_run(endless)
    prompts = ["", "def f", "x €", "return 12 * x  # and so on, for longer than the window"]
    for sampling in (["temperature=0"], ["temperature=1", "top_k=50", "top_p=0.95"]):
        together = texts_of(run, prompts, "max_new_tokens=40", *sampling)
        assert together == [texts_of(run, [prompt], "max_new_tokens=40", *sampling)[0] for prompt in prompts]


def test_text_is_reproducible_by_its_seed(endless: Path) -> None:
    run = load_run(endless)
    one, again, other = (texts_of(run, ["def "] * 8, "max_new_tokens=40", f"seed={seed}") for seed in (1, 1, 2))
    assert one == again != other
    assert one[0] not in one[1:], "each draws by itself"


def test_an_empty_prompt_begins_a_document_as_every_prompt_does(endless: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, started = load_run(endless), []
    monkeypatch.setattr(text_module, "generate", lambda _, starts, *__, **___: started.extend(starts) or iter([]))
    list(generate_texts(run.tokenizer, run.model, ["", "a€"], eval_settings()))
    assert started == [[EOT], [EOT, *"a€".encode()]]


def test_a_prompt_for_a_model_of_spans_is_a_source_as_in_training(
    tiny: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends with the end of text, with which the decoder begins; so does the source of a run's sample."""
    tokenizer = ByteTokenizer().train(iter(())).with_tokens(Span.extra_tokens)
    model = build_model(compose_config("size=pico", "arch=t5"), tokenizer.vocab_size, EOT)
    text = np.arange(97, 113)[None]
    inputs, _, source = Span(tokenizer, 0.2, 3.0).examples(Examples(text, text), 0, 0, 1, range(1))
    assert [source[0, -1], inputs[0, 0], model.start_id] == [EOT] * 3
    assert EOT not in source[0, :-1]
    assert encode_prompts(tokenizer, model, ["ab"], eval_settings())[0] == [[*b"ab", EOT]]
    started: list[list[int]] = []
    monkeypatch.setattr(recording, "generate", lambda _, starts, *__, **___: started.extend(starts) or iter([[7]]))
    recording.sample_text(planned(*tiny, "train.sample_tokens=1"), model, [*b"ab"], EOT)
    assert started == [[*b"ab", EOT]]


def test_a_text_stops_at_its_end_and_does_not_show_it(endless: Path) -> None:
    run, greedy = load_run(endless), ("temperature=0", "max_new_tokens=20")
    (free,) = texts_of(run, ["a"], *greedy)
    end = free[-1]
    with torch.no_grad():  # the model now means the end where it meant that token
        run.model.embedding.head.weight[[end, EOT]] = run.model.embedding.head.weight[[EOT, end]]
    *_, (text,) = generate_texts(run.tokenizer, run.model, ["a"], eval_settings(*greedy))
    assert text.tokens == free[: free.index(end)]
    assert text.certain == "a" + run.tokenizer.decode(text.tokens)


def test_without_a_length_text_has_200_tokens_or_fills_the_context(endless: Path, learned: Path) -> None:
    for folder, expected in ((endless, 200), (learned, 32 - 4)):
        run = load_run(folder)
        assert encode_prompts(run.tokenizer, run.model, ["d", "ddd"], eval_settings())[1] == expected
        assert encode_prompts(run.tokenizer, run.model, ["d"], eval_settings("max_new_tokens=7"))[1] == 7


def test_a_model_that_has_diverged_is_told_in_one_line(endless: Path) -> None:
    run = load_run(endless)
    with torch.no_grad():
        run.model.norm.weight.fill_(float("nan"))
    for temperature in (0.8, 0):
        with pytest.raises(ConfigError, match=r"^model: its logits are not finite; it has diverged$"):
            texts_of(run, ["a"], f"temperature={temperature}")
