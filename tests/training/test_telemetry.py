"""Telemetry says of every layer what hooks written out here find, and changes nothing that is trained."""

import copy
import math
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor

from llama_lab.devices.performance import Stopwatch
from llama_lab.model import Decoder
from llama_lab.model.attention import MultiHeadAttention
from llama_lab.runs.stored import OF_ROUTERS, layer_metric, layer_metrics
from llama_lab.training import telemetry
from llama_lab.training.module import LanguageModel
from tests.conftest import needs_compiler
from tests.selection import first
from tests.training.tiny import (
    Pieces,
    identical,
    on_pairs,
    pieces,
    repeatable,
    rows,
    steps_of,
    trained,
    trained_state,
)

STEP = 256  # tokens
ON = ["train.telemetry=true", "train.log_every=3", "train.evaluations=1", "train.sample_tokens=0", "logger=none"]
SHORT = [*ON, f"train.tokens={8 * STEP}"]
Row = dict[str, float]


def routers(layers: int) -> set[str]:
    """What telemetry says of routers, which dense layers have none of."""
    return {layer_metric(name, layer) for name in OF_ROUTERS for layer in range(layers)}


class Keeping(LanguageModel):
    """Keeps the micro-batches of its last step."""

    def training_step(self, micro_batches: Sequence[tuple[Tensor, Tensor]], step: int) -> None:
        self.micro_batches = micro_batches
        super().training_step(micro_batches, step)


def of_telemetry(row: Row) -> Row:
    return {name: value for name, value in row.items() if name.startswith("telemetry/")}


def norm(tensors: Sequence[Tensor]) -> float:
    return math.sqrt(sum(float((t.double() ** 2).sum()) for t in tensors))


def expected(before: Decoder, after: Decoder, micro_batches: Sequence[Sequence[Tensor]]) -> Row:
    """What telemetry should say of a step, in float64, by hooks and names alone."""
    model = copy.deepcopy(before).double().eval()
    outputs: dict[str, Tensor] = {}
    names = {}
    for name, module in model.named_modules():
        names[id(module)] = name
        module.register_forward_hook(lambda _, inputs, output, name=name: outputs.__setitem__(name, output))
        if name.endswith("ffn"):
            module.register_forward_hook(lambda _, inputs, output, name=name: outputs.__setitem__(f"{name}<", *inputs))
    inputs, _, *given = model.cut(*micro_batches[0])
    model(inputs, None, *given)
    seen = {name: output.detach() for name, output in outputs.items() if isinstance(output, Tensor)}
    for batch in micro_batches:
        inputs, targets, *others = model.cut(*batch)
        loss = F.cross_entropy(model(inputs, None, *others).flatten(0, 1), targets.flatten()) / len(micro_batches)
        loss.backward()  # type: ignore[no-untyped-call]
    old, new = dict(before.named_parameters()), dict(after.named_parameters())
    row: Row = {}
    for i, block in enumerate(names[id(block)] for block in model.all_blocks):
        for part, place in {"block": block, "attention": f"{block}.attention", "ffn": f"{block}.ffn"}.items():
            own = [name for name in old if name.startswith(f"{place}.")]
            row[f"telemetry/{part}_grad_norm/layer_0{i}"] = norm([model.get_parameter(n).grad for n in own])  # type: ignore[misc]
            update = norm([new[n].detach().double() - old[n].detach().double() for n in own])
            row[f"telemetry/{part}_update_ratio/layer_0{i}"] = update / norm([old[n].detach() for n in own])
            row[f"telemetry/{part}_activation_rms/layer_0{i}"] = float((seen[place] ** 2).mean()) ** 0.5
            row[f"telemetry/{part}_activation_max/layer_0{i}"] = float(seen[place].abs().max())
        scores = scores_by_hand(model, block, seen, given)
        entropies = [-(p * p.log()).sum() for p in (s.softmax(0) for s in scores)]
        row[f"telemetry/attention_entropy/layer_0{i}"] = float(torch.stack(entropies).mean())
        row[f"telemetry/attention_logit_max/layer_0{i}"] = max(float(s.max()) for s in scores)
        row |= {f"telemetry/router_{name}/layer_0{i}": x for name, x in routing(model, block, seen).items()}
    return row


def routing(model: Decoder, block: str, seen: dict[str, Tensor]) -> Row:
    """How a layer's tokens were spread over its experts; nothing of a dense one."""
    ffn: Any = model.get_submodule(f"{block}.ffn")
    if not hasattr(ffn, "router"):
        return {}
    logits = seen[f"{block}.ffn<"] @ ffn.router.weight.detach().T
    chosen = logits.topk(ffn.top_k).indices.flatten().tolist()
    shares = [chosen.count(expert) / len(chosen) for expert in range(ffn.n_experts)]
    return {
        "load_entropy": -sum(share * math.log(share) for share in shares if share),
        "load_max": max(shares),
        "dead_experts": shares.count(0),
        "z": float((logits.exp().sum(-1).log() ** 2).mean()),
    }


def visible(model: Decoder, block: str, given: Sequence[Tensor], row: int, query: int, length: int) -> list[int]:
    """The tokens that one sees: of a padded source all but the padding, and itself; else a prefix, and up to here."""
    has_source = hasattr(model, "encoder")
    if has_source and block.startswith("encoder"):
        lengths = given[1:]
        return [*range(int(lengths[0][row]) if lengths else length)] + [query] * bool(lengths)
    prefix = int(given[0][row]) if given and not has_source else 0
    return [*range(max(prefix, query + 1))]


def scores_by_hand(model: Decoder, block: str, seen: dict[str, Tensor], given: Sequence[Tensor]) -> list[Tensor]:
    """The scores of the keys that each query of each head and sequence sees, one vector for each."""
    mixer: Any = model.get_submodule(f"{block}.attention")
    query, key = (seen[f"{block}.attention.{name}"].unflatten(-1, (-1, mixer.head_dim)) for name in ("query", "key"))
    B, T, H, Dh = query.shape
    position = type(model.position).__name__
    if position == "Rope":
        frequencies = 1e4 ** (-torch.arange(0, Dh, 2).double() / Dh)
        turns = torch.exp(1j * torch.outer(torch.arange(T).double(), frequencies))[:, None]
        turned = (torch.complex(*x.chunk(2, -1)) * turns for x in (query, key))
        query, key = (torch.cat((x.real, x.imag), -1) for x in turned)
    found = []
    for b, h, t in product(range(B), range(H), range(T)):
        back = t - torch.tensor(sorted({*visible(model, block, given, b, t, T)}))
        if mixer.mask_rule.window is not None:
            back = back[back < mixer.mask_rule.window]
        keys = key[b, t - back, h * key.shape[2] // H]
        if position == "Shaw":
            vectors: Any = model.position_at(int(block.split(".")[1])).keys.weight.detach().view(-1, H, Dh)
            keys = keys + vectors[back.clamp(max=len(vectors) - 1), h]
        scores = keys @ query[b, t, h] / math.sqrt(Dh)
        if mixer.softcap is not None:
            scores = mixer.softcap * (scores / mixer.softcap).tanh()
        if position == "Alibi":
            scores = scores - 2.0 ** (-8 * (h + 1) / H) * back
        if mixer.sinks is not None:
            scores = torch.cat((scores, scores.new_zeros(1)))
        found.append(scores)
    return found


def one_step(*overrides: str, tokens: int = STEP) -> tuple[Decoder, Pieces]:
    """The model before its first and only step, and the run."""
    run = pieces(*overrides, *ON, f"train.tokens={tokens}", kind=Keeping)
    before = copy.deepcopy(run.module.model)
    assert run.fit() == "done"
    return before, run


CASES = {
    "rotated, grouped, in a window": ["attention=gqa", "model.n_kv_heads=2", "model.attention.window=9"],
    "biased scores, capped": ["arch=bloom", "model.attention.softcap=0.05"],
    "experts after a dense layer": ["ffn=moe", "model.ffn.balance_loss=null", "+pattern.dense={at: 0, ffn: swiglu}"],
    "on padded pairs": ["family=encoder_decoder", "model.encoder_layers=1", "position=none"],
    "post-norm, with biases": ["arch=gpt2", "block=postnorm"],
    "with sinks": ["model.attention.sinks=true"],
    "clipped, in several micro-batches": ["train.micro_batch_size=2", "train.grad_clip=0.01"],
    "shaw, window, softcap": ["position=shaw", "model.attention.window=20", "model.attention.softcap=3.0"],
    "an encoder-decoder of unequal depths": ["family=encoder_decoder", "model.encoder_layers=3", "position=none"],
    "a prefix decoder": ["objective=prefix", "position=none"],
}


@pytest.mark.parametrize("case", first(4, CASES))
def test_the_metrics_are_those_of_hooks_written_out_in_float64(
    case: str, tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(telemetry, "CHUNK", 5000)  # so that queries come in several chunks
    shared = on_pairs(tiny, tmp_path) if "pairs" in case else tiny
    before, run = one_step(*shared, *CASES[case], f"runs_dir={tmp_path}")
    assert isinstance(run.module, Keeping)
    found = of_telemetry(run.rows[0])
    assert found == pytest.approx(expected(before, run.module.model, run.module.micro_batches), rel=2e-4)
    layers = len(before.all_blocks)
    assert found.keys() | routers(layers) == {*layer_metrics(layers)}


def without(found: list[Row]) -> list[Row]:
    return [{name: value for name, value in row.items() if name not in of_telemetry(row)} for row in found]


def test_a_run_with_it_leaves_the_same_weights_and_losses_to_the_last_bit(tiny: list[str], tmp_path: Path) -> None:
    common = [*tiny, *SHORT, "model.dropout=0.1", "train.micro_batch_size=4"]
    watched, plain = (
        trained(*common, f"train.telemetry={on}", f"runs_dir={tmp_path / str(on)}") for on in (True, False)
    )
    assert identical(trained_state(watched), trained_state(plain))
    assert without(repeatable(watched)) == repeatable(plain)
    assert [row["step"] for row in rows(watched) if of_telemetry(row)] == [1, 3, 6, 8]
    assert "telemetry" not in (plain / "metrics.csv").read_text()


def test_it_reads_the_same_where_activations_are_dropped_or_recomputed(tiny: list[str], tmp_path: Path) -> None:
    plain, dropped, again = (
        of_telemetry(one_step(*tiny, *more, f"runs_dir={tmp_path / str(i)}")[1].rows[0])
        for i, more in enumerate(([], ["model.dropout=0.3"], ["train.recompute=block"]))
    )
    of_forward = [name for name in plain if "activation" in name or "entropy" in name or "logit" in name]
    assert len(of_forward) == 2 * 8
    assert [dropped[name] for name in of_forward] == [plain[name] for name in of_forward]
    assert dropped["telemetry/block_grad_norm/layer_00"] != plain["telemetry/block_grad_norm/layer_00"]
    assert again == plain


def test_other_steps_do_no_more_than_without(tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []  # each of which takes 1000 seconds
    for name in ("read_activations", "norms"):
        work = getattr(telemetry, name)
        monkeypatch.setattr(telemetry, name, lambda *args, work=work, name=name: (done.append(name), work(*args))[1])
    stopwatch = Stopwatch(lambda: 1000.0 * len(done))
    run = pieces(*tiny, *SHORT, "train.log_every=100", f"runs_dir={tmp_path}", stopwatch=stopwatch)
    assert run.fit() == "done"
    assert done == ["read_activations", "norms", "norms", "norms"] * 2, "the first step and the last"
    assert run.rows[-1]["seconds"] == 0.0


def test_it_may_be_switched_on_when_a_run_goes_on(tiny: list[str], tmp_path: Path) -> None:
    common = [*tiny, *SHORT, "train.log_every=1", f"runs_dir={tmp_path}"]
    folder = trained(*common, "train.telemetry=false", f"train.tokens={2 * STEP}")
    trained(*common, f"resume='{folder}'", f"train.tokens={4 * STEP}")
    assert steps_of(folder, "train/loss") == [1, 2, 3, 4]
    assert [row["step"] for row in rows(folder) if of_telemetry(row)] == [3, 4]


class Sigmoid(MultiHeadAttention):
    """Attends with another function than softmax."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, context: Any, lookup: Any) -> Tensor:
        return (query @ key.transpose(-1, -2)).sigmoid().tril() @ value


def test_a_mixer_without_softmax_has_no_entropy(tiny: list[str], tmp_path: Path) -> None:
    run = pieces(*tiny, *ON, f"train.tokens={STEP}", f"runs_dir={tmp_path}")
    of_first: Any = run.module.model.blocks[0]
    of_first.attention.__class__ = Sigmoid
    assert run.fit() == "done"
    lacking = {f"telemetry/attention_{name}/layer_00" for name in ("entropy", "logit_max")}
    assert of_telemetry(run.rows[0]).keys() == {*layer_metrics(2)} - routers(2) - lacking


@needs_compiler
@pytest.mark.slow
def test_a_compiled_run_reads_what_an_eager_one_reads_and_trains_as_without(tiny: list[str], tmp_path: Path) -> None:
    """Also where it recomputes."""
    common = [*tiny, *SHORT, "train.recompute=block"]
    found = []
    for compiles, on in ((False, True), (True, True), (True, False)):
        settings = (f"trainer.compile={compiles}", f"train.telemetry={on}", f"runs_dir={tmp_path}/{compiles}{on}")
        found.append(repeatable(trained(*common, *settings)))
    eager, compiled, plain = found
    assert torch._dynamo.utils.counters["frames"]["ok"] > 0
    for ours, theirs in zip(compiled, eager, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3)
    assert without(compiled) == plain


@pytest.mark.slow
def test_gradients_grow_towards_the_output_in_post_norm_and_fall_in_pre_norm(tiny: list[str], tmp_path: Path) -> None:
    """Xiong et al. 2020, figure 3, and theorem 1 of the last layer: O(1) at any depth, and O(1 / sqrt(depth))."""

    def first_and_last(block: str, depth: int) -> tuple[float, float]:
        sizes = [f"model.n_layers={depth}", "model.dim=64", "model.max_seq_len=128"]
        settings = [*tiny, "arch=vanilla", f"block={block}", *sizes]
        _, run = one_step(*settings, f"runs_dir={tmp_path / block / str(depth)}", tokens=4 * STEP)
        first, last = (run.rows[0][f"telemetry/ffn_grad_norm/layer_{layer:02d}"] for layer in (0, depth - 1))
        return first, last

    (post_first, post), (pre_first, pre) = (first_and_last(block, 16) for block in ("postnorm", "prenorm"))
    assert post > 1.5 * post_first
    assert pre < 0.6 * pre_first
    (_, post_shallow), (_, pre_shallow) = (first_and_last(block, 4) for block in ("postnorm", "prenorm"))
    assert post == pytest.approx(post_shallow, rel=0.3)
    assert pre < 0.8 * pre_shallow


def test_tensorboard_has_a_chart_of_all_layers_for_each_quantity(tiny: list[str], tmp_path: Path) -> None:
    folder = trained(*tiny, *SHORT, "logger=tensorboard", f"runs_dir={tmp_path}")
    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    assert {*layer_metrics(2)} - routers(2) <= {*events.Tags()["scalars"]}
    (layout,) = events.Tensors("custom_scalars__config__")
    text = str(layout.tensor_proto.string_val[0])
    assert text.count("telemetry/") == len(layer_metrics(2)) / 2
    assert "telemetry/ffn_grad_norm/layer_" in text
