"""Recipes are choices of group options and nothing else, and one switch changes one thing."""

from functools import cache

import pytest
import torch
from omegaconf import OmegaConf
from omegaconf.errors import InterpolationResolutionError
from torch import nn

from llama_lab.config.components import CONF_DIR, build_model
from llama_lab.model import Decoder
from llama_lab.util.errors import ConfigError
from tests.composing import ENCODER_DECODERS, compose_config, cover, decoder, kinds, options, softmaxes
from tests.model.cases import GROUPS, composed, recipe, switched

OPTIONS = {group: options(group) for group in GROUPS}
KINDS = [(group, option) for group in GROUPS for option in kinds(group)]
TOKENS = torch.arange(24)[None] * 7 % 97


@pytest.mark.parametrize("arch", ["gpt2", "olmo", "lfm2", "mixtral"])
def test_one_word_leaves_out_every_bias_of_a_recipe_and_another_puts_one_everywhere(arch: str) -> None:
    for word in (False, True):
        with torch.device("meta"):
            model = build_model(composed("size=pico", f"arch={arch}", f"bias={str(word).lower()}"), 97)
        parts = [part for part in model.modules() if isinstance(part, nn.Linear | nn.LayerNorm)]
        assert {part.bias is not None for part in parts if part.weight is not None} == {word}


@pytest.mark.parametrize("arch", options("arch"))
def test_recipes_choose_one_option_in_every_group_and_nothing_else(arch: str) -> None:
    body = OmegaConf.to_container(OmegaConf.load(CONF_DIR / "arch" / f"{arch}.yaml"))
    assert body.keys() == {"defaults"}
    family = ["family"] if arch in ("bert", *ENCODER_DECODERS) else []  # others are decoders
    family += ["objective"] if arch.startswith(("bert", "t5")) else []
    assert [key for choice in body["defaults"] for key in choice] == [
        f"override /{group}" for group in (*GROUPS, "pattern", *family)
    ]


LARGEST = max(map(len, OPTIONS.values()))
ROWS = [{group: names[i % len(names)] for group, names in OPTIONS.items()} for i in range(LARGEST)]
MORE = [pytest.param(row, marks=pytest.mark.matrix) for row in ROWS[2:]]


@pytest.mark.parametrize("row", [*ROWS[:2], *MORE], ids=str)
def test_a_group_on_the_command_line_beats_the_recipe_and_leaves_nothing_of_it(row: dict[str, str]) -> None:
    """Of all groups at once; one alone leaves the others as the recipe has them."""
    given = [f"{group}={option}" for group, option in row.items()]
    after_llama, after_vanilla = (compose_config("size=pico", f"arch={arch}", *given) for arch in ARCHES)
    assert after_vanilla.model == after_llama.model
    group = list(GROUPS)[ROWS.index(row) % len(GROUPS)]
    alone = composed("size=pico", "arch=vanilla", f"{group}={row[group]}")
    assert switched("vanilla", group, row[group]).model == alone.model


ARCHES = ("llama", "vanilla")


def test_the_default_recipe_is_llama() -> None:
    assert composed("size=pico").model == recipe("llama").model


def test_olmoe_begins_truncated_as_olmo2() -> None:
    """Both at three standard deviations of 0.02: `init_cutoff_factor` in allenai/OLMoE, `configs/`."""
    assert recipe("olmoe").model.init == recipe("olmo2").model.init


ADDED = ("learned", "sinusoidal", "sinusoidal_concatenated")
RECURRENT = [option for option in options("attention") if option not in softmaxes()]
LATENT = [option for option in options("attention") if option.startswith("mla")]
ROTATING = [option for option in options("position") if option not in (*ADDED, "none")]
NORMED = ["bloom", "gemma3", "lfm2", "nanochat", "olmo2", "olmoe", "qwen3", "qwen3_moe"]  # in other places than blocks
# Whose recurrent layers take no positions
HYBRIDS = ["bamba", "kimi_linear", "lfm2", "olmo_hybrid", "qwen3_5", "qwen3_next"]
# What cannot be: options of a group in recipes.
REFUSED = [
    ("norm", ["none"], NORMED),
    ("norm", ["centring", "none"], ["qwen3_5", "qwen3_next", "kimi_linear", "olmo_hybrid"]),  # has no offset, no eps
    ("position", ROTATING, [*HYBRIDS, "mamba2"]),
    ("position", ADDED, ["bamba", "lfm2", "qwen3_5", "qwen3_next", "gemma3", "smollm3"]),  # differ by layer
    ("position", ["alibi", "none", "relative", "relative_dim", "shaw"], ["gemma3"]),  # which sets theta
    ("position", ["shaw"], ["deepseek_v3"]),
    ("attention", [*LATENT, *RECURRENT], ["gemma2", "gemma3", "gpt_oss"]),  # which set a window
    ("attention", RECURRENT, ["bert", *ENCODER_DECODERS]),
    ("ffn", OPTIONS["ffn"], ["mamba2"]),
    ("block", ["mixer_only"], ["deepseek_v3", "kimi_linear", "olmo_hybrid"]),
    ("block", ["parallel", "parallel_two_norms"], ENCODER_DECODERS),
    ("init", ["deepnorm"], ENCODER_DECODERS),
]


def is_refused(arch: str, group: str, option: str) -> bool:
    return any(group == of and option in refused and arch in recipes for of, refused, recipes in REFUSED)


@pytest.mark.parametrize("arch", options("arch"))
@pytest.mark.matrix
def test_switches_of_recipes_run_or_are_refused(arch: str) -> None:
    """Every other one; its neighbours among the recipes have the rest."""
    for group, option in KINDS[options("arch").index(arch) % 2 :: 2]:
        cfg = switched(arch, group, option)
        if is_refused(arch, group, option):
            with pytest.raises((ConfigError, InterpolationResolutionError)):
                build_model(cfg, 97)
        else:
            model = build_model(cfg, 97)
            inputs, _, *given = model.cut(TOKENS, TOKENS)
            assert model(inputs, None, *given).isfinite().all(), (group, option)


FEW = ["llama", "gpt2", "mixtral", "mamba2", "qwen3_next", "deepseek_v3", "t5"]
ONCE = [(size, FEW[i % len(FEW)]) for i, size in enumerate(options("size"))]
PRODUCT = [(size, arch) for i, size in enumerate(options("size")) for arch in options("arch")[i % 8 :: 8]]
OTHERS = [pytest.param(*one, marks=pytest.mark.matrix) for one in PRODUCT if one not in ONCE]


@pytest.mark.parametrize(("size", "arch"), [*ONCE, *OTHERS])
def test_every_size_fits_every_recipe(size: str, arch: str) -> None:
    given = OmegaConf.load(CONF_DIR / "size" / f"{size}.yaml")
    given.pop("defaults", None)
    cfg = OmegaConf.merge(recipe(arch), given)
    cfg.model.n_layers = 2  # the others are alike; whole models are built in test_cost.py
    with torch.device("meta"):
        assert build_model(cfg, 97).dim == given.model.dim


@cache
def unswitched(base: str) -> Decoder:
    return build_model(recipe(base), 97)


def owned_by(group: str, model: Decoder) -> set[str]:
    """The parameters whose distribution a group is there to change."""
    linear = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    named = {name for name, _ in model.named_parameters()}
    return {
        "norm": {name for name in named if "norm" in name},
        "init": linear,
        "position": {name for name in named if name.startswith("position.")},
    }.get(group, set())


BASES = [(*kind, ARCHES[i % 2]) for i, kind in enumerate(KINDS)]
SOME = BASES[::3]
MORE_BASES = [pytest.param(*one, marks=pytest.mark.matrix) for one in BASES if one not in SOME]


@pytest.mark.parametrize(("group", "option", "base"), [*SOME, *MORE_BASES])
def test_a_switch_leaves_the_initial_values_of_all_shared_parameters(group: str, option: str, base: str) -> None:
    before = unswitched(base)
    after = build_model(switched(base, group, option), 97)
    old, new = dict(before.named_parameters()), dict(after.named_parameters())
    shared = {name for name in old.keys() & new.keys() if old[name].shape == new[name].shape} - owned_by(group, before)
    assert "embedding.tokens.weight" in shared
    for name in shared:
        if group == "embedding" and name == "embedding.tokens.weight":  # the same draws at the table's own scale
            torch.testing.assert_close(new[name] / after.embedding.tokens.std, old[name] / before.embedding.tokens.std)
        else:
            assert torch.equal(old[name], new[name]), name


@pytest.mark.parametrize(("position", "embedding"), cover(ADDED, kinds("embedding"), meeting=1))
def test_tokens_and_positions_start_with_signals_of_one_order(position: str, embedding: str) -> None:
    model = decoder(f"position={position}", f"embedding={embedding}")
    tokens = model.embedding(TOKENS)
    positions = model.position.embed(torch.zeros_like(tokens), torch.arange(TOKENS.shape[1]))
    ratio = tokens.square().mean().sqrt() / positions.square().mean().sqrt()
    assert 0.3 < ratio < 3
