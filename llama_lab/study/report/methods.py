"""The methods section of a paper, from the records of a study's runs; differences between runs are spelled out."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

from llama_lab.formatting import conjoin, count, duration, learning_rate, number, percent, three_digits
from llama_lab.runs.record import Record, finished, started
from llama_lab.study.naming import disagreement
from llama_lab.study.settings import RATE, SEEDS

from . import references
from .environment import UNCOMMITTED, environment
from .markup import latex, markdown
from .references import Keys, sources
from .result import Result

Part = str | Keys  # a text, or the citations after it
Sentence = tuple[Part, ...]

PANDOC, LATEX = (" [@", "; @", "]"), (r"~\cite{", ",", "}")  # before, between and after the keys of a citation
MOST_NAMED = 12  # arms; runs.csv has the names of more

DESIGNS = {
    "ladder": "a ladder: each arm is the one before it with one more change",
    "add_one": "one change at a time: each arm is the baseline with one change",
    "leave_one_out": "leave-one-out: each arm is the baseline with one change reverted",
    "factorial": "a two-level factorial",
    "options": "a comparison of options",
    "learning_rate": "whole recipes, each over a grid of learning rates",
    "recipes": "whole recipes at one size, ranked by loss, speed, memory and loss at longer contexts",
    "kv_heads": "one model with different numbers of key and value heads",
    "depth": "blocks at several depths, with several lengths of warm-up",
    "context": "position encodings, evaluated at contexts longer than those that they were trained on",
    "scaling": "options over sizes and budgets, with power laws and compute-equivalent gains",
    "uptrain": "training on from one model with fewer key and value heads, which start in several ways",
    "extend": "training on from one model at a longer context, with several scalings of its rotary positions",
    "comparison": "a comparison of existing runs",
}
MATCHES = {
    "params": "The feed-forward width of an arm was chosen so that it has as many parameters without embeddings as the "
    "arm that it is matched to",
    "flops": "The feed-forward width of an arm was chosen so that its forward pass takes as many FLOPs per token as "
    "that of the arm that it is matched to",
    "none": "The sizes of the arms were not matched",
    "": "It is not recorded whether the sizes of the arms were matched",
}
CHOICES = {
    "arch": "They start from the recipe",
    "size": "Their size is",
    "block": "Their block is",
    "norm": "Their norm is",
    "position": "Their position encoding is",
    "ffn": "Their feed-forward is",
    "attention": "Their attention is",
    "embedding": "Their embedding is",
    "init": "Their initialisation is",
}
TEXTS = {"StandardLibrary": "the source code of Python's standard library", "TextFiles": "a collection of text files"}
PROBES = {"Recall": "multi-query associative recall", "Copy": "copying", "Induction": "induction"}
TOKENIZERS = {
    "BPETokenizer": "byte-level byte-pair encoding, learnt from the training text",
    "ByteTokenizer": "one token per byte",
    "CharTokenizer": "one token per character",
    "HFTokenizer": "one that was trained elsewhere",
}
OPTIMIZERS = {
    "adafactor": "Adafactor",
    "adam": "Adam",
    "adamw": "AdamW",
    "lion": "Lion",
    "muon": "Muon for the matrices of the blocks and AdamW for the rest",
    "sgd": "stochastic gradient descent with momentum",
}
SCHEDULES = {
    "constant": "a constant learning rate",
    "cosine": "a cosine schedule",
    "linear": "a linear schedule",
    "noam": "an inverse square root schedule",
    "wsd": "a warm-up, stable, decay schedule",
}


@dataclass(frozen=True)
class Paragraph:
    """A few sentences with a title."""

    title: str
    sentences: Sequence[Sentence]

    def written(self, text: Callable[[str], str], citation: tuple[str, str, str]) -> str:
        """The sentences in a format. text: escapes a text. citation: what is before, between and after its keys."""
        before, between, after = citation
        cited = (
            [text(part) if isinstance(part, str) else f"{before}{between.join(part)}{after}" for part in parts if part]
            for parts in self.sentences
        )
        return " ".join(map("".join, cited))


def methods(result: Result) -> list[Paragraph]:
    """The paragraphs that are not empty."""
    runs = started(result.records)
    found = [Paragraph("Design", _design(result))]
    if runs:
        found += [
            Paragraph("Models", _models(result, runs)),
            Paragraph("Data", _data(runs)),
            Paragraph("Training", (*_optimization(runs), *_learning_rates(result, runs))),
            Paragraph("Statistics", _statistics(result)),
            Paragraph("Hardware and software", _hardware(result, runs)),
        ]
    found.append(Paragraph("Not controlled", [(warning,) for warning in result.warnings]))
    return [paragraph for paragraph in found if paragraph.sentences]


def cited(paragraphs: Iterable[Paragraph]) -> set[str]:
    """The keys of all citations."""
    parts = (part for paragraph in paragraphs for sentence in paragraph.sentences for part in sentence)
    return {key for part in parts if isinstance(part, tuple) for key in part}


def methods_markdown(paragraphs: Iterable[Paragraph]) -> str:
    """The paragraphs in Markdown, with citations in Pandoc's syntax."""
    found = (f"**{one.title}.** {one.written(markdown, PANDOC)}" for one in paragraphs)
    return "\n\n".join(found) + "\n"


def methods_latex(paragraphs: Iterable[Paragraph]) -> str:
    r"""The paragraphs in LaTeX, for \input."""
    found = (f"\\paragraph{{{one.title}.}}\n{one.written(latex, LATEX)}" for one in paragraphs)
    return "\n\n".join(found) + "\n"


# --- paragraphs ---


def _design(result: Result) -> list[Sentence]:
    study, names = result.study, [arm.name for arm in result.arms]
    listed = f": {', '.join(names)}" if len(names) <= MOST_NAMED else ""
    design = DESIGNS.get(study.design, f"of the design {study.design}")
    judged = [record for arm in result.arms for record in arm.records]
    by_arm = {arm.name: ", ".join(map(str, sorted({record.seed for record in arm.records}))) for arm in result.arms}
    ends = Counter(record.status for record in result.records)
    others = ", ".join(f"{n} {status}" for status, n in ends.items() if status != "done")
    finished = f"{ends['done']} of {count(len(result.records), 'run')} finished{f' ({others})' if others else ''}"
    seeds = {(record.seed, *(record.config.get(key) for key in SEEDS)) for record in result.records if record.config}
    pairing = f"Arms are compared within seeds, but {' or '.join(SEEDS)} differs between runs of one seed."
    if len(seeds) == len({seed for seed, *_ in seeds}):
        pairing = (
            "Seeds are paired: runs of one seed read their training text in the same order and draw each parameter's "
            "initial values from the same seed, and arms are compared within seeds."
        )
    return [
        (f"The study is {design}", references.DESIGNS.get(study.design, ()), "."),
        (f"It has {count(len(names), 'arm')}{listed}; the baseline is {study.baseline}.",),
        *((note,) for note in study.notes),
        (f"Seeds are {_by_run(judged, [by_arm[record.arm] for record in judged])}; {finished}.",),
        (pairing,),
    ]


def _models(result: Result, runs: Sequence[Record]) -> list[Sentence]:
    layers, dim, heads, context = (
        _of_config(runs, f"model.{key}") for key in ("n_layers", "dim", "n_heads", "max_seq_len")
    )
    shape = f"{layers} layers, {dim} dimensions, {heads} attention heads and a context of {context} tokens"
    found: list[Sentence] = [(f"The models have {shape}.",)]
    params = [arm.costs["params_non_embedding"] for arm in result.arms if "params_non_embedding" in arm.costs]
    if params:
        low, high = number(min(params)), number(max(params))
        found.append((f"They have {low if low == high else f'{low} to {high}'} parameters without embeddings.",))
    for group, beginning in CHOICES.items():
        if options := dict.fromkeys(option for r in runs if (option := r.environment.choices.get(group))):
            parts: list[Part] = []
            for option in options:  # `layernorm [1], or rmsnorm [2]`
                parts += [", or " if parts else "", option, sources(group, option)]
            found.append((f"{beginning} ", *parts, "."))
    found.append((f"Dropout is {_of_config(runs, 'model.dropout')}.",))
    match = result.study.match
    residuals = [abs(arm.arm.residual) for arm in result.arms if arm.arm.residual is not None]
    is_matched = residuals and match in ("params", "flops")
    left = f"; the remaining difference is at most {percent(max(residuals))}" if is_matched else ""
    found.append((f"{MATCHES.get(match, f'The sizes of the arms were matched in {match}')}{left}.",))
    return found


def _data(runs: Sequence[Record]) -> list[Sentence]:
    if all(record.environment.entropy_floor is not None for record in runs):
        probes = [PROBES.get(name, name) for name in _classes(runs, "data.probe._target_")]
        found = _by_run(runs, [record.environment.data_hash[:12] for record in runs])
        return [
            (
                f"The data is a synthetic probe, {_by_run(runs, probes)}, with the hash {found}, drawn anew for every "
                f"step; losses and accuracy are those of the answers, whose tokens count as a byte each.",
            )
        ]
    kinds = [TOKENIZERS.get(name, name) for name in _classes(runs, "tokenizer._target_")]
    hashes = {
        fact: _by_run(runs, [getattr(record.environment, fact)[:12] or "unknown" for record in runs])
        for fact in ("data_hash", "tokenizer_hash")
    }
    fractions = [record.config.get("data.val_fraction") for record in runs]
    if all(map(_is_number, fractions)):
        parts = _by_run(runs, [percent(fraction) for fraction in fractions])
        held_out = f"Of its documents, {parts}, chosen by the hash of their text, are held out for validation"
    else:
        held_out = f"Validation is on {_by_run(runs, list(map(_validation, runs)))}"
    bounds = [record.config.get("data.val_tokens") for record in runs]
    read = [f"at most {bound:,} tokens of them are read" if bound else "all of them are read" for bound in bounds]
    masked = [record.config.get("data.document_mask") for record in runs]
    seen = ["only their own document, from position 0 on" if alone else "earlier documents too" for alone in masked]
    sizes = [number(record.environment.vocab_size or None) for record in runs]
    lengths = [three_digits(record.environment.bytes_per_token or None) for record in runs]
    return [
        (f"The text is {_by_run(runs, list(map(_text, runs)))}, with the hash {hashes['data_hash']}.",),
        (f"{held_out}; {_by_run(runs, read)}.",),
        *([(f"Tokens see {_by_run(runs, seen)}.",)] if any(masked) else []),
        (
            f"The tokenizer is {_by_run(runs, kinds)}",
            _sources(runs, "tokenizer"),
            f", with the hash {hashes['tokenizer_hash']}.",
        ),
        (f"Its vocabulary has {_by_run(runs, sizes)} tokens, which have {_by_run(runs, lengths)} bytes on average.",),
    ]


def _text(record: Record) -> str:
    """What a run was trained on."""
    if shares := below(record.config, "data.mix."):
        return f"a mixture of {conjoin([f'{name} ({percent(share)})' for name, share in shares.items()])}"
    if path := record.config.get("data.path"):
        commits = [f" at commit {commit:.12}" for commit in record.environment.revisions.values()]
        return f"the dataset {path}{''.join(commits)}"
    (name,) = _classes([record], "data.source._target_")
    return TEXTS.get(name, name)


def _validation(record: Record) -> str:
    """What a run was validated on, unless it is a fraction of its documents."""
    if below(record.config, "data.mix."):
        return "held-out text of every part, in the same shares"
    return f"its split {record.config.get('data.val_split')}"


def below(config: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """The settings whose keys begin with `prefix`, without it."""
    return {key.removeprefix(prefix): value for key, value in config.items() if key.startswith(prefix)}


def _sources(runs: Sequence[Record], group: str) -> Keys:
    """What to cite for the runs' options in a config group."""
    options = [record.environment.choices.get(group, "") for record in runs]
    return tuple(dict.fromkeys(key for option in options for key in sources(group, option)))


def _optimization(runs: Sequence[Record]) -> list[Sentence]:
    done = finished(runs)
    steps = _by_run(done, [number(record.summary.get("step")) for record in done])
    tokens = _by_run(runs, [number(record.config.get("train.tokens")) for record in runs])
    batch, context = _of_config(runs, "train.batch_size"), _of_config(runs, "model.max_seq_len")
    in_steps = f", which are {steps} steps" if done else ""
    optimizers = [OPTIMIZERS.get(name, name) for name in _classes(runs, "optim._target_")]
    schedules = [SCHEDULES.get(name, name) for name in _classes(runs, "schedule._target_")]
    clips = [record.config.get("train.grad_clip") for record in runs]
    clipping = [f"gradients clipped at a norm of {clip:g}" if clip else "gradients not clipped" for clip in clips]
    found: list[Sentence] = [
        (f"The budget of a run is {tokens} tokens, in batches of {batch} sequences of {context} tokens{in_steps}.",),
        (
            f"The optimizer is {_by_run(runs, optimizers)}",
            _sources(runs, "optim"),
            f"{_settings(runs, 'optim', RATE)}, with {_by_run(runs, schedules)}",
            _sources(runs, "schedule"),
            f"{_settings(runs, 'schedule')} and {_by_run(runs, clipping)}.",
        ),
    ]
    if any(record.config.get("train.z_loss") for record in runs):
        found.append((f"The weight of the z-loss is {_of_config(runs, 'train.z_loss')}", references.Z_LOSS, "."))
    if any(record.config.get("train.ema") is not None for record in runs):
        decay = _of_config(runs, "train.ema")
        found.append(
            (f"An exponential moving average of the weights with a decay of {decay} per step is evaluated, too.",)
        )
    return found


def _settings(runs: Sequence[Record], group: str, without: str = "") -> str:
    """The numerical settings of a config group: ` (beta1 0.9, beta2 0.95)`."""
    keys = dict.fromkeys(key for record in runs for key in record.config if key.startswith(f"{group}."))
    shown = [key for key in keys if key != without and any(_is_number(record.config.get(key)) for record in runs)]
    listed = ", ".join(f"{key.removeprefix(f'{group}.')} {_of_config(runs, key)}" for key in shown)
    return f" ({listed})" if listed else ""


def _learning_rates(result: Result, runs: Sequence[Record]) -> list[Sentence]:
    if not result.learning_rates:
        rates = [learning_rate(record.config.get(RATE)) for record in runs]
        return [(f"The peak learning rate is {_by_run(runs, rates)}; it was not tuned.",)]
    grids = {sweep.arm: ", ".join(map(learning_rate, sweep.rates)) for sweep in result.learning_rates}
    swept = [record for record in result.records if record.arm in grids]
    tried = _by_run(swept, [grids[r.arm] for r in swept])
    chosen = {sweep.arm: sorted({*sweep.chosen.values()} or {sweep.best}) for sweep in result.learning_rates}
    shown = "; ".join(f"{', '.join(map(learning_rate, rates))} for {arm}" for arm, rates in chosen.items())
    if any(sweep.chosen for sweep in result.learning_rates):
        choice = (
            "Each judged run was trained at the learning rate with the lowest final validation loss on a tuning seed "
            "of its own, one for each judged seed, which is not compared. "
            f"The rates {tried} were tried; the chosen ones are {shown}."
        )
    else:
        choice = (
            f"Every seed was trained at each of the learning rates {tried}. An arm is judged at the rate with the "
            f"lowest mean validation loss among those at which most of its seeds finished: {shown}."
        )
    sensitivity = "The sensitivity to the learning rate is that of the loss averaged over the grid"
    return [(choice,), (sensitivity, references.SENSITIVITY, ".")]


def _statistics(result: Result) -> list[Sentence]:
    found: list[Sentence] = [
        (
            f"Arms are judged by their final validation loss in {result.unit}, the mean over all validation "
            "tokens that are read.",
        ),
        ("The intervals of an arm's loss are 95% intervals over seeds by Student's t.",),
    ]
    is_max_t, is_factorial = "max-t" in result.tests, result.study.is_factorial
    if result.tests == "none":
        found.append(("Differences are means over the seeds that both arms have finished, and were not tested.",))
    elif is_max_t and is_factorial:
        found.append(("Effects are estimated by least squares within each seed; an effect is its mean over seeds.",))
    else:
        found.append(("Differences are means over the seeds that both arms have finished.",))
    if result.tests != "none":
        found.append(
            (f"They were tested by {result.tests}", references.MAX_T if is_max_t else (), ", two-sided at 5%.")
        )
    if is_max_t:
        what = "effect over seeds" if is_factorial else "arm, in a model of arm and seed,"
        found.append(
            (
                f"The variance of each {what} is shrunk towards the typical one",
                references.MODERATION,
                "; degrees of freedom are Satterthwaite's",
                references.DEGREES_OF_FREEDOM,
                "; p is adjusted for the family, and its 95% intervals are simultaneous.",
            )
        )
    if result.scaling and not result.scaling.lacking:
        found.append(
            (
                "A power law of parameters and tokens was fitted to each option by Huber's loss of log losses; "
                "compute-equivalent gains follow from the paired differences of log losses by one fit to all options. "
                "Their 95% intervals are by parametric bootstrap.",
            )
        )
    if result.ranks:
        found.append(("Intervals of ranks follow from the significant pairs and hold together", references.RANKS, "."))
        if result.speed:
            found.append(("Speeds are ranked by the same tests of their logarithms, paired by round.",))
    if result.study.margin is not None:
        margin = f"{result.study.margin:g} {result.unit}"
        tests = f"Changes of less than {margin} count as equivalent, by two one-sided tests"
        found.append((tests, references.EQUIVALENCE, "."))
    return found


def _hardware(result: Result, runs: Sequence[Record]) -> list[Sentence]:
    environments = [environment(record.environment) for record in runs]

    def facts(*names: str) -> str:
        """`device cpu, precision 32-true`."""
        return ", ".join(f"{name} {_by_run(runs, [values[name] for values in environments])}" for name in names)

    hardware = facts("devices", "device", "precision", "CPU threads", "attention kernel", "platform")
    seconds = [record.summary["seconds"] for record in runs if isfinite(record.summary.get("seconds", float("nan")))]
    took = f" {count(len(seconds), 'finished run')} took {duration(sum(seconds))} in total." if seconds else ""
    found: list[Sentence] = [(f"Runs were trained with {hardware}.{took}",)]
    if speed := result.speed:
        rounds = max(len(arm.train) for arm in speed.arms.values())
        measured = (
            f"Speeds are geometric means of {count(rounds, 'round')}, each of which measured every arm, on "
            f"{speed.devices} x {speed.device} in {speed.precision} with {speed.threads} CPU threads."
        )
        found.append((measured,))
    software = facts("llama-lab", "commit", UNCOMMITTED, "python", "torch", "lightning", "numpy", "tokenizers")
    return [*found, (f"Software: {software}.",)]


# --- values of runs ---


def _of_config(runs: Sequence[Record], key: str) -> str:
    values = [record.config.get(key) for record in runs]
    shown = [f"{value:,.10g}" if _is_number(value) else str("unknown" if value is None else value) for value in values]
    return _by_run(runs, shown)


def _by_run(runs: Sequence[Record], values: Sequence[str]) -> str:
    """The value that all runs share, or each value with its runs."""
    return f"({disagreement(runs, values)})" if len(set(values)) > 1 else values[0] if values else "unknown"


def _classes(runs: Sequence[Record], key: str) -> list[str]:
    """The name of a component's class or function in each run."""
    return [str(record.config.get(key, "unknown")).rpartition(".")[2] for record in runs]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
