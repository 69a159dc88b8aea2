"""Recipes are choices of group options and nothing else, and one switch changes one thing."""

import pickle
from functools import cache
from itertools import combinations
from typing import Any

import pytest
import torch
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError
from torch import nn

from llama_lab.config.components import CONF_DIR, build_model
from llama_lab.model import Decoder
from llama_lab.model.init import ResidualOutput
from llama_lab.util.errors import ConfigError
from tests import composing
from tests.composing import ENCODER_DECODERS, compose_config, kinds, options, softmaxes, without_numbers, written
from tests.model.cases import GROUPS

OPTIONS = {group: options(group) for group in GROUPS}
SWITCHES = [(group, option) for group in GROUPS for option in options(group)]
KINDS = [(group, option) for group in GROUPS for option in kinds(group)]
TOKENS = torch.arange(24)[None] * 7 % 97

composed = cache(compose_config)


def recipe(arch: str) -> DictConfig:
    return composed("size=pico", f"arch={arch}")


def switched(arch: str, group: str, option: str) -> DictConfig:
    """What `arch=<arch> <group>=<option>` composes; `test_a_group_on_the_command_line_...` shows that it is that."""
    cfg, donor = recipe(arch).copy(), composed("size=pico", "arch=llama", f"{group}={option}")
    is_left_out = group == "block" and left_out(cfg) != left_out(donor)
    for key in (*GROUPS[group], *GROUPS["ffn"] * is_left_out):
        OmegaConf.update(cfg.model, key, donor.model._get_node(key), merge=False)
    is_added = cfg.model.position._target_.endswith(("Learned", "Sinusoidal"))
    if group == "attention" and option not in softmaxes() and not is_added:  # they would ignore it
        cfg.model.position = composed("size=pico", "position=none").model.position
    return cfg


def left_out(cfg: DictConfig) -> list[str]:
    """The keys of the feed-forward, if the block has none."""
    return GROUPS["ffn"] if cfg.model.ffn is None else []


def component(cfg: DictConfig, group: str) -> dict[str, Any]:
    """A group's nodes, interpolations unresolved."""
    model = OmegaConf.to_container(cfg.model, resolve=False)
    return {key: model[key] for key in GROUPS[group]}


@pytest.mark.parametrize("arch", ["vanilla", "gpt2", "phi", "olmo", "gemma3", "stablelm", "lfm2", "mixtral"])
def test_one_word_leaves_out_every_bias_of_a_recipe_and_another_puts_one_everywhere(arch: str) -> None:
    for word in (False, True):
        with torch.device("meta"):
            model = build_model(composed("size=pico", f"arch={arch}", f"bias={str(word).lower()}"), 97)
        parts = [part for part in model.modules() if isinstance(part, nn.Linear | nn.LayerNorm)]
        assert {part.bias is not None for part in parts if part.weight is not None} == {word}


def test_keys_that_tests_set_in_a_composed_config_are_those_that_hydra_sets() -> None:
    for keys in (
        ["model.dim=64", "train.tokens=1e9", "model.attention.window=null"],
        ["+pattern.a={at: [0], position: {theta: 100.0}}", "pattern.global.at=2::3", "data.files=[a,b]"],
    ):
        overrides = ["size=pico", "data=text", "pattern=global_every_2nd", *keys]
        assert compose_config(*overrides) == pickle.loads(composing.composed("config", *overrides))


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


@pytest.mark.parametrize("row", ROWS, ids=str)
@pytest.mark.slow
def test_a_group_on_the_command_line_beats_the_recipe_and_leaves_nothing_of_it(row: dict[str, str]) -> None:
    """Of all groups at once; one alone leaves the others as the recipe has them."""
    given = [f"{group}={option}" for group, option in row.items()]
    after_llama, after_vanilla = (compose_config("size=pico", f"arch={arch}", *given) for arch in ARCHES)
    assert after_vanilla.model == after_llama.model
    group = list(GROUPS)[ROWS.index(row) % len(GROUPS)]
    alone = composed("size=pico", "arch=vanilla", f"{group}={row[group]}")
    assert switched("vanilla", group, row[group]).model == alone.model
    assert component(alone, group) == component(after_llama, group)
    for other in GROUPS.keys() - {group} - {*left_out(alone)}:
        assert component(alone, other) == component(recipe("vanilla"), other)


ARCHES = ("llama", "vanilla")


def test_the_default_recipe_is_llama() -> None:
    assert composed("size=pico").model == recipe("llama").model


def test_olmoe_begins_truncated_as_olmo2() -> None:
    """Both at three standard deviations of 0.02: `init_cutoff_factor` in allenai/OLMoE, `configs/`."""
    assert recipe("olmoe").model.init == recipe("olmo2").model.init


# What cannot be, by recipe, group and option, and why.
NORMED = (
    "bloom",
    "gemma3",
    "lfm2",
    "nanochat",
    "olmo2",
    "olmoe",
    "qwen3",
    "qwen3_moe",
)  # in other places than blocks, too
# Whose recurrent layers take no positions
HYBRIDS = ("bamba", "kimi_linear", "lfm2", "olmo_hybrid", "qwen3_5", "qwen3_next")
ADDED = ("learned", "sinusoidal", "sinusoidal_concatenated")
RECURRENT = [option for option in options("attention") if option not in softmaxes()]
REFUSED = {
    **{(arch, "norm", "none"): "the model's norm does nothing" for arch in NORMED},
    **{(arch, "position", added): "which cannot differ in them" for arch in ("gemma3", "smollm3") for added in ADDED},
    **{
        (arch, "attention", latent): "window: model.attention has no such key"
        for arch in ("gemma2", "gemma3", "gpt_oss")
        for latent in ("mla", "mla_deepseek_v3", "mla_kimi_linear", "mla_step_temperature", *RECURRENT)
    },
    **{
        (arch, "position", other): "which cannot differ in them" if other in ADDED else "would ignore the"
        for arch in HYBRIDS
        for other in OPTIONS["position"]
        if other != "none"
        and not (arch in ("kimi_linear", "olmo_hybrid") and other in ADDED)  # whose attention has none
    },
    **{
        (arch, "norm", option): f"the model's norm has no {lacks}"
        for lacks, kept in {"unit_offset": ("qwen3_5", "qwen3_next"), "eps": ("kimi_linear", "olmo_hybrid")}.items()
        for arch in kept
        for option in ("centring", "none")
    },
    **{("mamba2", "ffn", option): "the block of layer 0 has no feed-forward" for option in OPTIONS["ffn"]},
    **{
        ("mamba2", "position", other): "would ignore the"
        for other in OPTIONS["position"]
        if other not in (*ADDED, "none")
    },
    **{
        (arch, "block", "mixer_only"): "the block of layer 0 has no feed-forward; leave ffn out"
        for arch in ("deepseek_v3", "kimi_linear")
    },
    ("olmo_hybrid", "block", "mixer_only"): "the block of layer 1 has a feed-forward; give the layer ffn, too",
    ("deepseek_v3", "position", "shaw"): "would ignore the relation",
    **{(arch, "attention", option): "see all" for arch in ("bert", *ENCODER_DECODERS) for option in RECURRENT},
    **{
        (arch, "block", option): "choose block=prenorm, or another one in series"
        for arch in ENCODER_DECODERS
        for option in ("parallel", "parallel_two_norms")
    },
    **{(arch, "init", "deepnorm"): "it is for decoders alone" for arch in ENCODER_DECODERS},
    **{
        ("gemma3", "position", other): "has no such key"
        for other in ("alibi", "learned", "none", "relative", "relative_dim", "shaw")
    },
}


@cache
def kind(group: str, option: str) -> str:
    """What options that differ in numbers alone have in common."""
    return str(without_numbers(written(group, option)))


Pair = tuple[tuple[str, str], tuple[str, str]]  # of groups with the kinds of their options


@cache
def switches() -> dict[str, list[tuple[str, str]]]:
    """The switches that are refused, and enough others for any two kinds of options that can meet to do so."""
    every: dict[tuple[str, str, str], set[Pair]] = {}
    for arch in options("arch"):
        choices = {
            group: choice
            for one in OmegaConf.load(CONF_DIR / "arch" / f"{arch}.yaml").defaults
            for group, choice in one.items()
        }
        own = {group: kind(group, choices[f"override /{group}"]) for group in GROUPS}
        own["pattern"] = str(choices["override /pattern"])
        for group, option in KINDS:
            every[arch, group, option] = {*combinations(sorted((own | {group: kind(group, option)}).items()), 2)}
    found: dict[str, list[tuple[str, str]]] = {}
    met: set[Pair] = set()
    for least in range(max(map(len, every.values())), 0, -1):  # first those in which the most meet
        for (arch, group, option), pairs in every.items():
            if (arch, group, option) not in REFUSED and len(pairs - met) >= least:
                found.setdefault(arch, []).append((group, option))
                met |= pairs
    for arch, group, option in REFUSED:
        found.setdefault(arch, []).append((group, option))
    return found


@pytest.mark.parametrize("arch", switches())
@pytest.mark.slow
def test_switches_of_recipes_run_or_are_refused(arch: str) -> None:
    for group, option in switches()[arch]:
        cfg = switched(arch, group, option)
        if why := REFUSED.get((arch, group, option)):
            with pytest.raises((ConfigError, InterpolationResolutionError), match=why):
                build_model(cfg, 97)
        else:
            model = build_model(cfg, 97)
            inputs, _, *given = model.cut(TOKENS, TOKENS)
            assert model(inputs, None, *given).isfinite().all(), (group, option)


FITTED = [(size, arch) for i, size in enumerate(options("size")) for arch in options("arch")[i % 8 :: 8]]


@pytest.mark.parametrize(("size", "arch"), FITTED)
def test_every_size_fits_every_recipe(size: str, arch: str) -> None:
    given = OmegaConf.load(CONF_DIR / "size" / f"{size}.yaml")
    assert OmegaConf.merge(recipe("llama"), given) == composed(f"size={size}", "arch=llama")  # so merging composes
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


@pytest.mark.parametrize("base", ARCHES)
@pytest.mark.parametrize(("group", "option"), SWITCHES)
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


@pytest.mark.parametrize("base", ARCHES)
def test_scaled_init_leaves_all_but_residual_outputs_as_normal_has_them(base: str) -> None:
    normal, scaled = (build_model(switched(base, "init", init), 97) for init in ("normal", "scaled"))
    residual = {f"{name}.weight" for name, module in scaled.named_modules() if isinstance(module, ResidualOutput)}
    new = dict(scaled.named_parameters())
    assert {name for name, p in normal.named_parameters() if not torch.equal(p, new[name])} == residual


@pytest.mark.parametrize("position", ADDED)
@pytest.mark.parametrize("arch", [arch for arch in options("arch") if (arch, "position", "learned") not in REFUSED])
def test_tokens_and_positions_start_with_signals_of_one_order(arch: str, position: str) -> None:
    model = build_model(switched(arch, "position", position), 97)
    tokens = model.embedding(TOKENS)
    positions = model.position.embed(torch.zeros_like(tokens), torch.arange(TOKENS.shape[1]))
    ratio = tokens.square().mean().sqrt() / positions.square().mean().sqrt()
    assert 0.3 < ratio < 3
