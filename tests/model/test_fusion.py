"""Linear maps that share an input become one product while text is generated, and nothing else changes."""

import copy

import pytest
import torch
from torch import Tensor, nn

from llama_lab.model import generate
from llama_lab.model.fusion import OF_ONE_INPUT, fused
from tests.composing import decoder

INPUT = 16  # more than all outputs, so that weights are kept by rows
PROMPTS = [[1, 2, 3], [4, 5]]


class Maps(nn.Module):
    """Maps of one input, with the names that those of one of our modules have."""

    def __init__(self, *biases: bool, inputs: int = INPUT, widths: tuple[int, ...] = (3, 5, 2)) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.names = next(names for names in OF_ONE_INPUT if len(names) == len(biases))
        for name, width, bias in zip(self.names, widths, biases, strict=False):
            self.add_module(name, nn.Linear(inputs, width, bias=bias))

    @property
    def linears(self) -> list[nn.Linear]:
        return [getattr(self, name) for name in self.names]


Maps.__module__ = "llama_lab.model.maps"


def products(module: Maps, x: Tensor) -> tuple[tuple[Tensor, ...], int]:
    """Outputs of all maps, and the number of products that they took."""
    with torch.profiler.profile() as trace, torch.no_grad():
        found = tuple(linear(x) for linear in module.linears)
    return found, sum(event.count for event in trace.key_averages() if event.key == "aten::linear")


@pytest.mark.parametrize("biases", [(False, False), (True, True, True), (True, False, True)])
def test_fused_maps_are_one_product_with_the_same_values(biases: tuple[bool, ...]) -> None:
    module, x = Maps(*biases), torch.randn(2, 3, INPUT)
    apart, count = products(module, x)
    with fused(module):
        joined, once = products(module, x)
    again, after = products(module, x)
    assert (count, once, after) == (len(biases), 1, len(biases))
    torch.testing.assert_close(joined, apart)
    assert all(torch.equal(a, b) for a, b in zip(again, apart, strict=True))


def test_parameters_keep_their_values_and_take_no_more_memory() -> None:
    module = Maps(True, True, False)
    before = copy.deepcopy(module.state_dict())
    with fused(module):
        pass
    torch.testing.assert_close(module.state_dict(), before, rtol=0, atol=0)
    first, _, last = module.linears
    whole = first.weight.untyped_storage()
    assert whole.nbytes() == 10 * INPUT * 4
    assert last.weight.untyped_storage().data_ptr() == whole.data_ptr()
    with fused(module):
        pass
    assert first.weight.data_ptr() == whole.data_ptr(), "copied again"


def test_maps_that_have_been_moved_are_fused_anew() -> None:
    module, x = Maps(True, True), torch.randn(2, 3, INPUT)
    with fused(module):
        pass
    first, second = module.linears
    second.weight.data = second.weight.data.clone()
    first.bias.data = 2 * first.bias.data
    apart, _ = products(module, x)
    with fused(module):
        joined, once = products(module, x)
    assert once == 1
    torch.testing.assert_close(joined, apart)


@pytest.mark.parametrize("arch", ["llama2", "gpt2"])  # gpt2's head is the token table
def test_a_model_that_has_generated_trains_on_as_before(arch: str) -> None:
    used, fresh = decoder(f"arch={arch}"), decoder(f"arch={arch}")
    list(generate(used, PROMPTS, 3))
    assert all(p.is_contiguous() and not p.is_inference() for p in used.parameters())
    tokens = torch.randint(97, (2, 9), generator=torch.Generator().manual_seed(0))
    for model in (used, fresh):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
        for _ in range(2):
            optimizer.zero_grad()
            model.loss(tokens[:, :-1], tokens[:, 1:])[1].backward()
            optimizer.step()
    torch.testing.assert_close(used.state_dict(), fresh.state_dict(), rtol=0, atol=0)
    assert list(generate(used, PROMPTS, 9)) == list(generate(fresh, PROMPTS, 9))


class Louder(nn.Linear):
    """A user's map."""

    def forward(self, x: Tensor) -> Tensor:
        return 50 * super().forward(x)


def test_a_users_map_and_a_hook_are_called_still() -> None:
    plain, louder, hooked = (decoder("arch=llama2") for _ in range(3))
    louder.blocks[0].attention.value.__class__ = Louder
    hooked.blocks[0].attention.value.register_forward_hook(lambda module, inputs, output: 50 * output)
    given, by_map, by_hook = (list(generate(model, PROMPTS, 8)) for model in (plain, louder, hooked))
    assert by_map == by_hook != given


def test_fused_weights_with_more_rows_than_columns_are_kept_by_columns_while_inside() -> None:
    module = Maps(True, True, inputs=4)
    first, second = module.linears
    before, x = copy.deepcopy(module.state_dict()), torch.randn(2, 4)
    apart, _ = products(module, x)
    for _ in range(2):
        with fused(module):
            assert first.weight.stride() == (1, 8)
            assert second.weight.untyped_storage().data_ptr() == first.weight.untyped_storage().data_ptr()
            torch.testing.assert_close(products(module, x)[0], apart)
            torch.testing.assert_close(module.state_dict(), before, rtol=0, atol=0)
        assert first.weight.is_contiguous()
        assert second.weight.is_contiguous()
        torch.testing.assert_close(module.state_dict(), before, rtol=0, atol=0)


def test_maps_of_other_inputs_and_those_of_a_users_class_compute_their_own() -> None:
    module, x, other = Maps(True, True), torch.randn(2, INPUT), torch.randn(2, INPUT)
    gate, up = module.linears
    expected = gate(x), up(other)
    with fused(module), torch.no_grad():
        torch.testing.assert_close((gate(x), up(other)), expected)
    mine = type("Mine", (Maps,), {})(True, True)
    with fused(mine):
        assert products(mine, x)[1] == 2
