"""EleutherAI's harness on a run: the numbers of its own transformers model on the export, on local tasks."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from llama_lab.evaluation import evaluate as evaluate_module
from llama_lab.evaluation.evaluate import check_settings, evaluate
from llama_lab.evaluation.load import load_run
from llama_lab.hf.convert import export_model
from llama_lab.util.errors import ConfigError
from tests.composing import eval_settings
from tests.conftest import Command

pytest.importorskip("lm_eval", reason="needs the extra lm-eval")
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from llama_lab.evaluation.harness import HarnessModel

Trained = Callable[..., Path]
LINES = [f"def f{i}(x): return {i * 37 % 1000} * x" for i in range(12)]
LONG = "\n".join(LINES)  # many contexts of 32 tokens
PAIRS = [
    ("def f1(x)", ": return 5"),
    ("def f2(x): ", "return 7 * x  # é"),
    ("", "def"),
    (LONG, " + 1"),  # cut from the left
    ("x", "y"),
    ("a" * 40, "b" * 20),
]


def requests(kind: str, arguments: list[tuple[Any, ...]]) -> list[Instance]:
    return [Instance(kind, {}, one, i) for i, one in enumerate(arguments)]


@pytest.fixture(scope="module")
def models(trained: Trained, tmp_path_factory: pytest.TempPathFactory) -> tuple[HarnessModel, HFLM]:
    """A run as we hand it to the harness, and its export as the harness's own class for transformers reads it."""
    run = trained("arch=llama2")
    theirs = tmp_path_factory.mktemp("export") / "theirs"
    export_model(run, theirs)
    loaded = load_run(run)
    hf = AutoModelForCausalLM.from_pretrained(theirs, dtype=torch.float32)
    hflm = HFLM(hf, tokenizer=AutoTokenizer.from_pretrained(theirs), batch_size=3, max_length=32, device="cpu")
    return HarnessModel(loaded.model, loaded.tokenizer, batch_size=4), hflm


def test_loglikelihoods_are_those_of_the_export_in_transformers(models: tuple[HarnessModel, HFLM]) -> None:
    ours, theirs = (model.loglikelihood(requests("loglikelihood", PAIRS), disable_tqdm=True) for model in models)
    assert [is_greedy for _, is_greedy in ours] == [is_greedy for _, is_greedy in theirs]
    assert [total for total, _ in ours] == pytest.approx([total for total, _ in theirs], abs=2e-4)
    assert len({round(total, 3) for total, _ in ours}) == len(PAIRS)
    texts = [(LONG,), ("def f1(x)",), ("é" * 16,), ("é" * 17,)]
    ours, theirs = (model.loglikelihood_rolling(requests("loglikelihood_rolling", texts), True) for model in models)
    assert ours == pytest.approx(theirs, rel=1e-5)


def test_greedy_texts_are_those_of_the_export_in_transformers(models: tuple[HarnessModel, HFLM]) -> None:
    settings = {"max_gen_toks": 8, "do_sample": False}
    asked = [("def f1(", settings | {"until": ["\n"]}), (LONG, settings | {"until": ["e", "r"]}), ("x", settings)]
    ours, theirs = (model.generate_until(requests("generate_until", asked), disable_tqdm=True) for model in models)
    assert ours == theirs
    assert any(ours)


def test_a_task_that_samples_draws_by_the_seed(models: tuple[HarnessModel, HFLM]) -> None:
    ours, _ = models
    asked = [("def", {"max_gen_toks": 12, "do_sample": True, "temperature": 1.5, "until": []})]
    texts = [
        HarnessModel(ours.model, ours.tokenizer, 1, seed).generate_until(requests("g", asked)) for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize(
    ("kind", "asked"),
    [
        ("generate_until", ("def", {"max_gen_toks": 32})),
        ("generate_until", ("def", {"max_gen_toks": 4, "num_beams": 3})),
        ("loglikelihood", ("a", "b" * 33)),
    ],
)
def test_what_the_model_cannot_answer_is_refused(
    kind: str, asked: tuple[Any, ...], models: tuple[HarnessModel, HFLM]
) -> None:
    with pytest.raises(ConfigError, match=r"^eval\.tasks: "):
        getattr(models[0], kind)(requests(kind, [asked]))


# Through eval.py


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    """A folder with three tasks of our own, and their data: of choices, of perplexity, and of generation."""
    folder = tmp_path / "tasks"
    folder.mkdir()
    rows = [{"question": f"def f{i}", "choices": ["(x): return", "zzzzzz"], "answer": i % 2} for i in range(6)]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shared = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "data.jsonl")}},
        "test_split": "test",
        "doc_to_text": "{{question}}",
        "metadata": {"version": 1.0},
    }
    choices = {"output_type": "multiple_choice", "doc_to_choice": "{{choices}}", "doc_to_target": "{{answer}}"}
    reading = {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{question}}"}
    writing = {"output_type": "generate_until", "doc_to_target": "(x)"}
    writing |= {"generation_kwargs": {"until": ["\n"], "max_gen_toks": 4}}
    for name, metric, own in [
        ("our_chosen", "acc", choices),
        ("our_read", "word_perplexity", reading),
        ("our_written", "exact_match", writing),
    ]:
        task = shared | own | {"task": name, "metric_list": [{"metric": metric}]}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(task))
    return folder


@pytest.mark.slow
def test_tasks_of_a_folder_are_scored_into_eval_json_and_the_table(
    evaluating: Command, trained: Trained, copied: Callable[[Path], Path], tasks: Path
) -> None:
    run = copied(trained("arch=llama2"))
    asked = ("eval.parts=[lm_eval]", f"eval.task_path={tasks}")
    ran = evaluating(f"run={run}", *asked, "eval.tasks=[our_chosen,our_read,our_written]")
    assert ran.code == 0, ran.err
    scores = {score["task"]: score for score in json.loads((run / "eval.json").read_text())["tasks"]}
    assert [*scores] == ["our_chosen", "our_read", "our_written"]
    # The first choice, of the text that the run was trained on, is the likelier one, and right every other time.
    assert scores["our_chosen"]["value"] == 0.5
    assert (scores["our_chosen"]["samples"], scores["our_chosen"]["fewshot"]) == (6, 0)
    assert scores["our_chosen"]["stderr"] == pytest.approx((0.25 / 5) ** 0.5)
    for words in ("our_chosen", "acc", "0.5000", "0.2236"):
        assert words in ran.out
    again = evaluating(f"run={run}", *asked, "eval.tasks=[our_chosen]", "eval.limit=2", "eval.fewshot=1")
    assert again.code == 0, again.err
    scores = {score["task"]: score for score in json.loads((run / "eval.json").read_text())["tasks"]}
    assert (scores["our_chosen"]["samples"], scores["our_chosen"]["fewshot"]) == (2, 1)
    assert scores.keys() == {"our_chosen", "our_read", "our_written"}


@pytest.mark.parametrize("override", ["eval.tasks=[]", "eval.fewshot=-1", "eval.limit=0"])
def test_settings_out_of_range_are_refused(override: str) -> None:
    settings = eval_settings("eval.parts=[lm_eval]", "eval.tasks=[a]", override)
    with pytest.raises(ConfigError, match=f"^{re.escape(override)}: "):
        check_settings(settings, [])


def test_without_the_harness_its_pip_line_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate_module, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'llama-lab\[lm-eval\]'"):
        check_settings(eval_settings("eval.parts=[lm_eval]", "eval.tasks=[a]"), [])


@pytest.mark.slow
def test_an_unknown_task_and_a_folder_that_does_not_exist_are_refused(trained: Trained, tasks: Path) -> None:
    for path, message in (
        (tasks, r"eval.tasks: hellaswagg is no task of lm-eval .*did you mean hellaswag\?"),
        ("nowhere", r"eval.task_path=nowhere: is no folder"),
    ):
        settings = eval_settings("eval.parts=[lm_eval]", "eval.tasks=[hellaswagg]", f"eval.task_path={path}")
        with pytest.raises(ConfigError, match=message):
            evaluate(trained("arch=llama2"), settings)
