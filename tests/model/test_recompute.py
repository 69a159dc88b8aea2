"""What is recomputed keeps fewer activations, and changes nothing else."""

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from llama_lab.model import Decoder, measure_cost
from llama_lab.model.recompute import recompute, recomputed_flops
from tests.composing import decoder
from tests.model.cases import ON_NONE
from tests.selection import first

TOKENS = torch.randint(97, (2, 33), generator=torch.Generator().manual_seed(0))
PARTS = ["attention", "block"]
SOFTCAPPED = ("arch=gemma2", "model.attention.window=8", "pattern=global_every_2nd", "model.dropout=0.2")
CASES = {
    **{block: (f"block={block}", "model.dropout=0.2") for block in ("postnorm", "sandwich", "parallel")},
    **{position: (f"position={position}",) for position in ("rope_alibi", "shaw")},
    "softcap": SOFTCAPPED,
    "values of the first layer": (
        "model.attention.value_residual=learned",
        "model.attention.gate=element",
        "model.n_layers=3",
        "+pattern.mixed={at: [1], position: none}",
    ),
    "latent": ("attention=mla", "model.dropout=0.2"),
    "experts": ("ffn=moe", "model.ffn.n_shared=1", "model.ffn.scope=batch"),
    **{name: ON_NONE[name] for name in ("gated delta",)},
    "alibi in a window": ("position=alibi", "model.attention.window=8", "model.n_layers=3"),
}


def recomputing(parts: str, *overrides: str) -> Decoder:
    model = decoder(*overrides)
    recompute(model, parts)
    return model


def loss_of(model: Decoder) -> Tensor:
    return F.cross_entropy(model(TOKENS[:, :-1]).flatten(0, 1), TOKENS[:, 1:].flatten())


def step(model: Decoder, mixed: bool = False) -> tuple[Tensor, list[Tensor]]:
    """The loss and all gradients, with seeded dropout."""
    torch.manual_seed(1)
    with torch.autocast("cpu", torch.bfloat16, enabled=mixed, cache_enabled=False):
        loss = loss_of(model)
    loss.backward()  # type: ignore[no-untyped-call]
    assert all(p.grad is not None for p in model.parameters())
    return loss.detach(), [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize(("case", "mixed"), first(6, [("softcap", True), *((case, False) for case in CASES)]))
def test_losses_and_gradients_are_the_same_to_the_last_bit(case: str, mixed: bool) -> None:
    loss, gradients = step(decoder(*CASES[case]), mixed)
    for parts in PARTS:
        model = recomputing(parts, *CASES[case])
        assert list(model.state_dict()) == list(decoder(*CASES[case]).state_dict())
        again, same = step(model, mixed)
        assert torch.equal(again, loss), parts
        assert all(map(torch.equal, same, gradients)), parts


def test_the_gradient_of_a_trained_bias_is_summed_in_another_order() -> None:
    overrides = ("position=relative", "model.dropout=0.2", "model.attention.window=8")
    loss, gradients = step(decoder(*overrides))
    for parts in PARTS:
        again, same = step(recomputing(parts, *overrides))
        assert torch.equal(again, loss), parts
        for ours, theirs in zip(same, gradients, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6 * theirs.abs().max().item(), msg=parts)


def kept_bytes(model: Decoder) -> int:
    """Bytes that autograd keeps from a forward pass to its backward pass, beside the parameters."""
    kept: dict[int, int] = {}
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def keep(x: Tensor) -> Tensor:
        if x.untyped_storage().data_ptr() not in own:
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        loss_of(model)
    return sum(kept.values())


@pytest.mark.parametrize("overrides", [("arch=llama",), SOFTCAPPED])
def test_without_attention_less_is_kept_and_of_a_block_only_its_input(overrides: tuple[str, ...]) -> None:
    all_of_it, attention, block = (kept_bytes(recomputing(p, *overrides)) for p in ("none", *PARTS))
    assert block < attention < all_of_it
    many = kept_bytes(recomputing("block", *overrides, "model.n_layers=6"))
    assert many - block == 4 * TOKENS[:, 1:].numel() * 32 * 4, "layers x tokens x dim x float32"


@pytest.mark.parametrize("parts", ["none", *PARTS])
@pytest.mark.parametrize("arch", ["llama", "falcon"])
def test_recomputed_flops_are_those_of_the_parts_but_for_each_one_s_last_product(arch: str, parts: str) -> None:
    model = recomputing(parts, f"arch={arch}", "model.attention.kernel=reference", "model.max_seq_len=32")
    cost = measure_cost(model)
    with FlopCounterMode(display=False) as counter:
        step(model)
    hidden_keys = cost.flops_per_token_dense - cost.flops_per_token if parts != "none" else 0
    last = {"none": [], "attention": [b.attention.output for b in model.blocks]}
    left_out = sum(2 * linear.weight.numel() for linear in last.get(parts, [b.ffn.down for b in model.blocks]))
    found = counter.get_total_flops() / TOKENS[:, 1:].numel() - 3 * cost.flops_per_token_dense
    assert found == pytest.approx(recomputed_flops(model, parts) + hidden_keys - left_out)


@pytest.mark.parametrize(("parts", "guard"), [("attention", torch.no_grad), ("block", torch.inference_mode)])
def test_without_gradients_nothing_runs_twice(parts: str, guard: Any) -> None:
    model, runs = recomputing(parts), Counter[torch.nn.Module]()
    for inside in (part for block in model.blocks for part in (block.attention.query, block.ffn)):
        inside.register_forward_hook(lambda module, *_: runs.update([module]))
    with guard():
        loss_of(model)
    assert set(runs.values()) == {1}
    step(model)
    assert max(runs.values()) == 3


@pytest.mark.parametrize("parts", PARTS)
def test_a_state_is_updated_once_also_where_gradients_flow(parts: str) -> None:
    model = recomputing(parts)
    state = model.new_state(2)
    read = torch.cat([model(x, state) for x in TOKENS[:, :32].split(8, 1)], 1)
    torch.testing.assert_close(read, decoder()(TOKENS[:, :32]))
