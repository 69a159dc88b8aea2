"""Patterns over layers: which layers have what, and one line for a pattern that cannot be meant."""

from contextlib import nullcontext

import hydra
import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from llama_lab.config.components import check_idle
from llama_lab.config.layers import layers_at
from llama_lab.model.experts import MixtureOfExperts
from llama_lab.training.prepare import check_complete, check_effects
from tests.composing import compose_config, decoder, options
from tests.refusals import refusing
from tests.selection import first

FOUR = ("size=nano",)
WINDOWED = (*FOUR, "attention=gqa_window", "model.attention.window=5")


@given(n=st.integers(1, 40), begin=st.integers(-45, 45), end=st.integers(-45, 45), step=st.integers(1, 9))
def test_a_slice_names_the_layers_that_python_names(n: int, begin: int, end: int, step: int) -> None:
    expected = list(range(n))[begin:end:step]
    if expected:
        assert layers_at("at", f"{begin}:{end}:{step}", n) == expected
        assert layers_at("at", [layer - n for layer in expected], n) == expected


@pytest.mark.parametrize("option", first(6, options("pattern")))
@pytest.mark.parametrize("n_layers", [13, *(pytest.param(n, marks=pytest.mark.matrix) for n in (2, 3, 8))])
def test_every_packaged_pattern_fits_any_depth(option: str, n_layers: int) -> None:
    cfg = compose_config("size=nano", "attention=gqa_window", f"model.n_layers={n_layers}", f"pattern={option}")
    for one in cfg.model.layers:
        assert 0 < len(one["at"]) < n_layers


@pytest.mark.parametrize(
    ("rule", "n_kv_heads", "hidden_dim"),
    [("attention: mqa, ffn: gelu", 1, 512), ("n_kv_heads: 2, attention: gqa_window", 2, 344)],
)
def test_an_option_in_a_layer_brings_its_sizes_but_the_layer_s_win(rule: str, n_kv_heads: int, hidden_dim: int) -> None:
    model = decoder(*FOUR, f"+pattern.odd={{at: '1::2', {rule}}}")
    assert [block.attention.n_kv_heads for block in model.blocks] == [4, n_kv_heads] * 2
    assert [block.ffn.down.in_features for block in model.blocks] == [344, hidden_dim] * 2


def test_experts_in_some_layers_of_a_dense_model_have_the_width_of_their_option() -> None:
    model = decoder(*FOUR, "+pattern.sparse={at: '1::2', ffn: moe}")
    assert [isinstance(block.ffn, MixtureOfExperts) for block in model.blocks] == [False, True] * 2
    assert model.blocks[1].ffn.experts.down.weight.shape == (8, 128, 176)


def test_settings_of_a_layer_follow_those_of_the_run() -> None:
    windows = compose_config(*FOUR, "model.max_seq_len=64", "+pattern.local={at: 0, attention: gqa_window}")
    assert windows.model.layers[0].attention.window == 32


def test_a_stored_config_needs_no_options_to_build_its_layers() -> None:
    cfg = compose_config(*FOUR, "+pattern.nope={at: -1, position: none}")
    stored = OmegaConf.create(OmegaConf.to_container(cfg.model, resolve=True))
    assert OmegaConf.to_container(stored.layers) == [
        {"at": [3], "position": {"_target_": "llama_lab.model.position.Position", "_partial_": True}}
    ]


def test_an_option_is_composed_once_however_often_the_layers_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside of a command, too, where Hydra is no longer there when they are."""
    cfg = compose_config(*FOUR, "+pattern.once={at: [0, 2], position: alibi}")
    composed: list[object] = []
    real = hydra.compose
    monkeypatch.setattr(hydra, "compose", lambda *args, **settings: (composed.append(args), real(*args, **settings))[1])
    for _ in range(3):
        assert cfg.model.layers[0].position._target_.endswith(".Alibi")
    assert len(composed) <= 1


@pytest.mark.parametrize(
    ("overrides", "fault"),
    [
        (["+pattern.a={at: [0,9], position: none}"], "pattern.a.at=[0, 9]"),
        (["+pattern.a={at: x, position: none}"], "pattern.a.at=x"),
        (["+pattern.a={at: '::0', position: none}"], "pattern.a.at=::0"),
        (
            [*WINDOWED, "+pattern.a={at: ':2', attention: {window: null}}", "+pattern.b={at: '2:', attention: mha}"],
            "pattern: changes attention.window in every layer",
        ),
        (["+pattern.a={at: '::2', attention: mqa}", "+pattern.b={at: 0, n_kv_heads: 2}"], "pattern.b: layer 0 "),
        (["+pattern.a={at: 1, position: {thta: 3}}"], "pattern.a.position.thta"),
        (["+pattern.a={at: 1, position: 3}"], "pattern.a.position=3"),
        (["+pattern.a=3"], "pattern.a=3"),
        (["+pattern.a={at: 1, attention: {window: 256}}"], "model.attention.window=256"),
    ],
)
def test_a_pattern_that_cannot_be_meant_is_refused_in_one_line(overrides: list[str], fault: str) -> None:
    with refusing(fault):
        check_complete(compose_config(*FOUR, *overrides))
        decoder(*FOUR, *overrides)


@pytest.mark.parametrize(
    ("rule", "key"),
    [
        ("position: rope", ""),
        ("position: {theta: 1e4}", ""),
        ("n_kv_heads: 4", ""),
        ("attention: mha", ""),
        ("norm: none, ffn: swiglu", ".ffn"),
        ("norm: none, n_kv_heads: 4", ".n_kv_heads"),
        ("attention: {window: null, gate: head}", ".attention.window"),
    ],
)
def test_what_a_pattern_was_asked_for_and_does_not_change_is_refused(rule: str, key: str) -> None:
    asked = f"+pattern.a={{at: 1, {rule}}}"
    cfg = compose_config(*FOUR, *(["pattern=nope_every_4th"] if key else []), asked)
    with refusing(f"pattern.a{key}" if key else "+pattern.a="):
        check_effects([cfg], [asked])
    check_effects([cfg], ["pattern=nope_every_4th"] if key else [])  # of a recipe whose other part was chosen otherwise


@pytest.mark.parametrize("asked", ["model.n_heads=2", "model.head_dim=16"])
def test_heads_that_no_layer_has_are_refused(asked: str) -> None:
    conv, hybrid = ("attention=conv", "position=none"), "+pattern.a={at: 1, attention: gqa}"
    with refusing(f"{asked}: attention=conv"):
        check_effects([compose_config(*FOUR, *conv, asked)], [*conv, asked])
    check_effects([compose_config(*FOUR, *conv, asked)], [*conv])  # of a recipe
    check_effects([compose_config(*FOUR, *conv, asked, hybrid)], [*conv, asked, hybrid])
    check_effects([compose_config(*FOUR, "attention=linear", "position=none", asked)], [asked])


RESIDUAL, ROTATED = "model.attention.value_residual=0.5", "model.attention.qk_norm_rotated=true"


@pytest.mark.parametrize(
    ("rule", "overrides", "fault"),
    [
        ("at: 0, attention: {value_residual: 0.5}", [], RESIDUAL),
        ("at: '1:', attention: {value_residual: null}", [RESIDUAL], RESIDUAL),
        ("at: 1, position: alibi", ["position=none", "attention=mha_qk_norm_rotated"], ROTATED),
        ("at: 1, position: rope", ["position=none", "attention=mha_qk_norm_rotated"], None),
    ],
)
def test_a_setting_without_effect_in_any_layer_is_refused(rule: str, overrides: list[str], fault: str | None) -> None:
    model = compose_config(*FOUR, *overrides, f"+pattern.a={{{rule}}}").model
    with refusing(fault) if fault else nullcontext():
        check_idle(model)
