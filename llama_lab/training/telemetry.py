"""Telemetry: gradients, updates, activations, attention scores and routing of every layer at logged steps.

Gradients are those of the whole step before clipping; updates are the weights after the optimizer step minus those
before it. Activations and scores come from an extra forward pass before the step, as in evaluation. docs/telemetry.md
defines every metric, and says what a logged step costs.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from llama_lab.devices.performance import synchronize
from llama_lab.model import Decoder
from llama_lab.model.attention import GroupedQueryAttention, attention_scores
from llama_lab.model.attention_context import AttentionContext
from llama_lab.model.experts import MixtureOfExperts
from llama_lab.runs.stored import PARTS, layer_metric

from .module import LanguageModel
from .monitor import Monitor

CHUNK = 2**24  # attention scores that are in memory at once

Place = tuple[str, int]  # a part of a block, and its layer
Readings = dict[str, Tensor]  # by the name of the metric


class Telemetry(L.Callback):
    """Adds the metrics of every layer to the rows of the run's `Monitor`, which must come after it in the list."""

    def __init__(self) -> None:
        self._backward_passes = 0  # that the gradient of a logged step still lacks; below 0 in others
        self._weights: dict[nn.Parameter, Tensor] = {}  # of a logged step, before its update

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Before a step that will be logged: read its activations."""
        self.monitor = Monitor.of(trainer)
        if not self.monitor.logs(trainer.global_step + 1, trainer.max_steps):
            return
        self._backward_passes = len(batch)
        with self._untimed(pl_module), trainer.precision_plugin.val_step_context():
            self._add(read_activations(pl_module.model, batch[0], trainer.strategy))

    def on_after_backward(self, trainer: L.Trainer, pl_module: Any) -> None:
        """After the last backward pass of such a step: read its gradients, and keep its weights."""
        self._backward_passes -= 1
        if self._backward_passes != 0:
            return
        with self._untimed(pl_module):
            groups = parameters(pl_module.model)
            grads = norms(groups, lambda p: p.grad, trainer.strategy)
            self._add({layer_metric(f"{part}_grad_norm", layer): norm for (part, layer), norm in grads.items()})
            self._weights = {p: p.detach().clone() for own in groups.values() for p in own}

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """After such a step: read its update."""
        if not self._weights:
            return
        weights, self._weights = self._weights, {}
        with self._untimed(pl_module):
            groups = parameters(pl_module.model)
            steps = norms(groups, lambda p: p.detach() - weights[p], trainer.strategy)
            sizes = norms(groups, weights.__getitem__, trainer.strategy)
            self._add({layer_metric(f"{part}_update_ratio", i): steps[part, i] / sizes[part, i] for part, i in groups})

    def _add(self, readings: Readings) -> None:
        values = torch.stack(list(readings.values())).tolist()
        self.monitor.add(dict(zip(readings, values, strict=True)))

    @contextmanager
    def _untimed(self, module: LanguageModel) -> Iterator[None]:
        """Context manager: pause the training clock."""
        synchronize(module.device)
        with self.monitor.stopwatch.paused():
            yield
            synchronize(module.device)


def places(model: Decoder) -> Iterator[tuple[Place, nn.Module]]:
    """The blocks of a model, those of an encoder first, and their mixers and feed-forwards."""
    for layer, block in enumerate(model.all_blocks):
        yield ("block", layer), block
        yield from (((name, layer), part) for name, part in block.named_children() if name in PARTS)


def parameters(model: Decoder) -> dict[Place, list[nn.Parameter]]:
    """The trainable parameters of every place that has any."""
    found = {place: [p for p in module.parameters() if p.requires_grad] for place, module in places(model)}
    return {place: own for place, own in found.items() if own}


def norms(
    groups: Mapping[Place, Sequence[nn.Parameter]], value: Callable[[nn.Parameter], Tensor | None], strategy: Strategy
) -> dict[Place, Tensor]:
    """The norm, float32, of the values of each group's parameters taken together; None counts as zero.

    Of shards, over all devices.
    """

    def square(p: nn.Parameter) -> Tensor:
        tensor = value(p)
        own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        return torch.zeros((), device=p.device) if own is None else torch.linalg.vector_norm(own.float()).square()

    squares = torch.stack([torch.stack([square(p) for p in own]).sum() for own in groups.values()])
    if any(isinstance(p, DTensor) for own in groups.values() for p in own):
        squares = strategy.reduce(squares, reduce_op="sum")
    return dict(zip(groups, squares.sqrt().unbind(), strict=True))


@torch.no_grad()
def read_activations(model: Decoder, batch: tuple[Tensor, Tensor], strategy: Strategy) -> Readings:
    """Activations and attention's scores of every layer on inputs and targets `(B, T)`, over all devices."""
    means: Readings = {}
    maxima: Readings = {}
    was_training = model.training
    # As in validation: on shards, it is `loss` that gathers them, and it never holds all logits.
    with watched(model.eval(), means, maxima), torch.compiler.set_stance("force_eager"):
        model.loss(*model.cut(*batch))
    model.train(was_training)
    reduced = [
        dict(zip(own, strategy.reduce(torch.stack(list(own.values())), reduce_op=how).unbind(), strict=True))
        for own, how in ((means, "mean"), (maxima, "max"))
    ]
    return reduced[0] | reduced[1]


@contextmanager
def watched(model: Decoder, means: Readings, maxima: Readings) -> Iterator[None]:
    """Context manager: hooks store activation statistics of a forward pass in `means` and `maxima`."""

    def read_output(place: Place, module: nn.Module, args: object, output: Tensor) -> None:
        part, layer = place
        means[layer_metric(f"{part}_activation_rms", layer)] = output.float().square().mean().sqrt()
        maxima[layer_metric(f"{part}_activation_max", layer)] = output.abs().max().float()

    def read_router(layer: int, module: MixtureOfExperts, args: tuple[Tensor], output: Tensor) -> None:
        means.update({layer_metric(f"router_{name}", layer): x for name, x in module.readings(*args).items()})

    def read_scores(layer: int, mixer: GroupedQueryAttention, *args: Any) -> Tensor:
        query, key, _, context, _ = args
        entropy, largest = score_statistics(query, key, context, mixer)
        means[layer_metric("attention_entropy", layer)] = entropy
        maxima[layer_metric("attention_logit_max", layer)] = largest
        return type(mixer).attend(mixer, *args)

    with ExitStack() as hooks:
        for place, module in places(model):
            hooks.enter_context(module.register_forward_hook(partial(read_output, place)))
            if isinstance(module, MixtureOfExperts):
                hooks.enter_context(module.register_forward_hook(partial(read_router, place[1])))
        for layer, mixer in enumerate(block.attention for block in model.all_blocks):
            # A subclass that attends in another way may have no softmax.
            if isinstance(mixer, GroupedQueryAttention) and type(mixer).attend is GroupedQueryAttention.attend:
                mixer.attend = partial(read_scores, layer, mixer)  # type: ignore[method-assign]
                hooks.callback(delattr, mixer, "attend")
        yield


def score_statistics(
    query: Tensor, key: Tensor, context: AttentionContext, mixer: GroupedQueryAttention
) -> tuple[Tensor, Tensor]:
    """The mean entropy of attention, in nats, and the largest score that enters its softmax, sinks included.

    `query (B, H, T, Dh)`, `key (B, Hkv, T, Dh)`; the mean is over sequences, heads and queries. A few queries at a
    time, since the scores of all would take `B * H * T * T` numbers.
    """
    B, H, T, _ = query.shape
    rows = max(1, CHUNK // (B * H * T))
    entropy, largest = [], []
    with torch.autocast(query.device.type, enabled=False):
        key = key.float()
        for start in range(0, T, rows):
            part = slice(start, start + rows)
            before, starts = context.cache_positions, None if context.starts is None else context.starts[..., part]
            own = AttentionContext(context.position, before[..., part], starts=starts, prefix=context.prefix)
            mask, relation, keys = own.mask_of(mixer.mask_rule, before), own.relation(before), key
            if mixer.sinks is not None:
                keys, _, mask = mixer.sinks(key, key, mask)
            scores = attention_scores(query[:, :, part].float(), keys, mask, mixer.softcap, mixer.scale, relation)
            largest.append(scores.max())
            entropy.append(torch.special.entr(scores.softmax(-1)).sum())
    return torch.stack(entropy).sum() / (B * H * T), torch.stack(largest).max()
