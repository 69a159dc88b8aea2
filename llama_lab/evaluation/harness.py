"""EleutherAI's lm-evaluation-harness on a trained run, through its own API: the extra `lm-eval`."""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import lm_eval
import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import Collator, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from omegaconf import DictConfig

from llama_lab.config.components import check_decodes
from llama_lab.data.tokenizer import TextTokenizer
from llama_lab.model import Decoder, Sampling, generate
from llama_lab.runs.evaluation import TaskScore
from llama_lab.util.errors import ConfigError, suggestion

SAMPLING = ("top_k", "top_p", "min_p")  # settings of generation that mean the same to the harness and to us
BOOTSTRAPS = 1000  # for standard errors without a formula; 2% of rounding
READ = (*SAMPLING, "temperature", "do_sample", "until", "max_gen_toks")

Request = tuple[Any, list[int], list[int]]
"""Context and continuation as text, which the harness does not need back, and as token ids."""


class HarnessModel(TemplateLM):  # type: ignore[misc]  # untyped
    """A decoder as the harness sees one. It conditions on the end-of-text token where a task gives no context.

    Contexts are cut from the left to `max_seq_len` tokens, continuation included. batch_size: sequences in a forward
    pass. seed: of sampling, in tasks that sample.
    """

    backend = "causal"

    def __init__(self, model: Decoder, tokenizer: TextTokenizer, batch_size: int, seed: int = 0) -> None:
        super().__init__()
        self.model, self.tokenizer = model, tokenizer
        self.batch_size, self.seed = batch_size, seed
        self._device = model.embedding.tokens.weight.device

    @property
    def eot_token_id(self) -> int:
        """The end-of-text token."""
        return self.tokenizer.eot_id

    @property
    def max_length(self) -> int:
        """The trained context."""
        return self.model.max_seq_len

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: object) -> list[int]:
        """The ids of a text. No tokenizer of ours adds any token to it."""
        return self.tokenizer.encode(string)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """The log-likelihood of whole texts, in disjoint windows of `max_seq_len` tokens; see the base class."""
        windows: list[list[Request]] = []
        for request in requests:
            (text,) = request.args
            pairs = get_rolling_token_windows(self.tok_encode(text), self.prefix_token_id, self.max_length, 1)
            windows.append([(None, *make_disjoint_window(pair)) for pair in pairs])
        scores = iter(self._loglikelihood_tokens([window for own in windows for window in own]))
        return [sum(next(scores)[0] for _ in own) for own in windows]

    @torch.no_grad()
    def _loglikelihood_tokens(self, requests: list[Request], **kwargs: object) -> list[tuple[float, bool]]:
        """The log-likelihood of each continuation, and whether greedy decoding would produce it."""
        order = Collator(requests, sort_fn=lambda request: (-len(request[1]) - len(request[2]), request[1:]))
        scores: list[tuple[float, bool]] = []
        for batch in order.get_batched(n=self.batch_size):
            longest = max(len(continuation) for _, _, continuation in batch)
            if longest > self.max_length:
                limit = f"model.max_seq_len={self.max_length}"
                raise ConfigError(f"eval.tasks: a continuation has {longest} tokens, more than {limit}; choose others")
            rows = [torch.tensor((before + after)[-self.max_length - 1 :]) for _, before, after in batch]
            inputs = torch.nn.utils.rnn.pad_sequence([row[:-1] for row in rows], batch_first=True)
            read = self.model.hidden_states(inputs.to(self.device))
            for row, x, (_, _, continuation) in zip(rows, read, batch, strict=True):
                end, targets = len(row) - 1, torch.tensor(continuation)
                logits = self.model.embedding.logits(x[end - len(continuation) : end]).float().cpu()
                likelihoods = logits.log_softmax(-1).gather(-1, targets[:, None])
                scores.append((float(likelihoods.sum()), bool((logits.argmax(-1) == targets).all())))
        return order.get_original(scores)  # type: ignore[no-any-return]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Continue contexts until one of the task's stop sequences, the end-of-text token or the longest length."""
        check_decodes(self.model, "eval.tasks", "choose tasks that do not generate")
        order = Collator(
            [request.args for request in requests],
            sort_fn=lambda request: (-len(request[0]), request[0]),
            group_by="gen_kwargs",
            group_fn=lambda request: request[1],
        )
        texts: list[str] = []
        given: Counter[tuple[int, ...]] = Counter()
        for batch in order.get_batched(n=self.batch_size):  # with the same settings for all
            settings = dict(normalize_gen_kwargs(batch[0][1]))
            new_tokens, stops = settings["max_gen_toks"], settings["until"]
            if unknown := settings.keys() - {*READ}:
                names = ", ".join(sorted(unknown))
                raise ConfigError(f"eval.tasks: a task generates with {names}, which is not offered")
            room = self.max_length - new_tokens
            if room <= 0:
                limit = f"leaves no context within model.max_seq_len={self.max_length}"
                raise ConfigError(f"eval.tasks: a task's max_gen_toks={new_tokens} {limit}; choose another")
            prompts = [(self.tok_encode(context) or [self.prefix_token_id])[-room:] for context, _ in batch]
            temperature = settings.get("temperature", 1.0) if settings["do_sample"] else 0.0
            sampling = Sampling(temperature, **{key: settings[key] for key in SAMPLING if key in settings})
            tokens: list[list[int]] = [[] for _ in prompts]
            written = [""] * len(prompts)
            for step in generate(self.model, prompts, new_tokens, sampling, self.eot_token_id, self.seed, given=given):
                for ids, token in zip(tokens, step, strict=True):
                    ids += [] if token in (None, self.eot_token_id) else [token]
                written = [self.tokenizer.decode(ids) for ids in tokens]
                if all(any(stop in text for stop in stops) for text in written):
                    break
            texts += [postprocess_generated_text(text, stops, think_end_token=None) for text in written]
        return order.get_original(texts)  # type: ignore[no-any-return]


def task_scores(model: Decoder, tokenizer: TextTokenizer, batch_size: int, settings: DictConfig) -> Iterator[TaskScore]:
    """The scores of `model` in the tasks of `settings` (conf/eval.yaml). Raises ConfigError for an unknown task."""
    chosen = settings.eval
    tasks = list(chosen.tasks)
    found = lm_eval.simple_evaluate(
        HarnessModel(model, tokenizer, batch_size, settings.seed),
        tasks=tasks,
        num_fewshot=chosen.fewshot,
        limit=chosen.limit,
        task_manager=task_manager(tasks, chosen.task_path),
        log_samples=False,
        bootstrap_iters=BOOTSTRAPS,
    )
    assert found is not None  # on rank 0
    for task, results in found["results"].items():
        for key, value in results.items():
            metric, _, filter_name = key.partition(",")
            if not filter_name or metric.endswith("_stderr"):
                continue
            error = results.get(f"{metric}_stderr,{filter_name}")
            yield TaskScore(
                task=task,
                metric=metric if filter_name == "none" else f"{metric}, {filter_name}",
                value=float(value),
                stderr=error if isinstance(error, float) else None,
                fewshot=found["n-shot"].get(task),
                samples=found["n-samples"].get(task, {}).get("effective"),
                version=str(found["versions"].get(task, "")),
                harness=lm_eval.__version__,
            )


def task_manager(tasks: Sequence[str], path: str | None) -> TaskManager:
    """What knows these tasks: those in the YAML files of the folder `path`, and the harness's own if one is asked for.

    The harness's are 14,000 files, which take seconds to find. Raises ConfigError for an unknown task.
    """
    if path is not None:
        if not Path(path).is_dir():
            raise ConfigError(f"eval.task_path={path}: is no folder; name the one that holds the tasks' YAML files")
        theirs = TaskManager(include_path=path, include_defaults=False)
        if set(tasks) <= set(theirs.all_tasks):
            return theirs
    manager = TaskManager(include_path=path)
    for task in tasks:
        if task not in manager.all_tasks:
            near = suggestion(task, manager.all_tasks)
            where = "see `lm_eval ls tasks`, or name your own folder, eval.task_path"
            raise ConfigError(f"eval.tasks: {task} is no task of lm-eval {lm_eval.__version__}{near}; {where}")
    return manager
