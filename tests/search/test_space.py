"""The space of a search, from Hydra's grammar."""

import re

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hypothesis import given
from hypothesis import strategies as st
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from llama_lab.search.space import Parameter, parameter
from llama_lab.util.errors import ConfigError


def parse(argument: str) -> Override:
    return OverridesParser.create().parse_override(argument)


def read(argument: str) -> Parameter:
    return parameter(argument, parse(argument))


@pytest.mark.parametrize(
    ("argument", "distribution"),
    [
        ("optim.lr=interval(1e-4,1e-2)", FloatDistribution(1e-4, 1e-2)),
        ("optim.lr=tag(log, interval(1e-4, 1e-2))", FloatDistribution(1e-4, 1e-2, log=True)),
        ("model.n_layers=int(interval(2,6))", IntDistribution(2, 6)),
        ("seed=range(1,7,2)", IntDistribution(1, 5, step=2)),
        ("seed=range(7,1,-3)", IntDistribution(4, 7, step=3)),
        ("seed=tag(log,range(1,9))", IntDistribution(1, 8, log=True)),
        ("optim.weight_decay=range(0.1,0.5,0.1)", FloatDistribution(0.1, 0.4, step=0.1)),
        ("norm=choice(rmsnorm,layernorm)", CategoricalDistribution(["rmsnorm", "layernorm"])),
        ("norm=rmsnorm,layernorm", CategoricalDistribution(["rmsnorm", "layernorm"])),
        ("train.eval_lengths=[1],[1,2]", CategoricalDistribution(["[1]", "[1,2]"])),
    ],
)
def test_a_sweep_of_hydra_s_is_a_distribution_of_optuna_s(
    argument: str, distribution: CategoricalDistribution | FloatDistribution | IntDistribution
) -> None:
    assert read(argument).distribution == distribution


@pytest.mark.parametrize(
    "argument",
    ["x=range(0.1,0.5,0.1)", "x=range(0,1,0.3)", "x=range(5,1,-2)", "x=3,1,2", "+x=a,'b c',[1,2]", "x=range(4)"],
)
def test_every_value_of_a_finite_space_is_written_as_hydra_s_own_sweep_writes_it(argument: str) -> None:
    found, sweep = read(argument), parse(argument)
    wanted = [f"{sweep.get_key_element()}={text}" for text in sweep.sweep_string_iterator()]
    assert [found.override(value) for value in found.values] == wanted
    assert all(found.distribution._contains(found.distribution.to_internal_repr(value)) for value in found.values)


@given(st.floats(1e-6, 1e3))
def test_an_interval_s_value_goes_on_the_command_line_without_loss(value: float) -> None:
    override = read("x=interval(1e-6,1e3)").override(value)
    assert parse(override).value() == value


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("optim.lr=interval(1e-2,1e-4)", "from 0.01 to 0.0001 there is nothing; give the lower bound first"),
        ("optim.lr=tag(log,interval(0,1))", "a logarithmic scale has no 0; give positive bounds"),
        ("norm=choice(rmsnorm)", "a single option; give two or more, or take it out of the search as norm=VALUE"),
        ("seed=range(3,3)", "holds 0 value"),
        ("seed=range(1,2,0)", "the step is 0"),
        ("seed=tag(log,range(1,9,2))", "tag log takes whole numbers and a step of 1"),
        ("norm=tag(log,choice(a,b))", "tag log is for a range or an interval"),
        ("optim.lr=tag(logarithmic,interval(1,2))", "unknown tag logarithmic; the only one is log"),
    ],
)
def test_a_bad_space_is_refused(argument: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(f'{argument}: {message}')}"):
        read(argument)
