"""A field of a config.json counts only if transformers' class of that model type reads it: here as there."""

from collections.abc import Container
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor

from llama_lab.hf import convert
from llama_lab.hf.convert import check_export, export_model, import_model, write_model
from llama_lab.hf.families import FAMILIES
from llama_lab.hf.family import flat_settings
from llama_lab.hf.loading import Loaded
from llama_lab.hf.tensors import write_weights
from llama_lab.util.errors import ConfigError
from tests.composing import compose_config, decoder
from tests.hf.fields import KINDS, ROPES, YARN, Base, all_fields, values_of
from tests.hf.test_loading import edit_json
from tests.hf.theirs import CASES, CONTEXT, FULL, LISTED, RECIPES, SLIDING, their_model

FIRST = {model_type: case for case, (model_type, _) in reversed(CASES.items())}
BOTH = {"rope_parameters": ROPES[0], "rope_scaling": ROPES[2]}


# Of every family, what one of them reads and others ignore.
TRAPS: list[dict[str, Any]] = [
    {"partial_rotary_factor": 0.5},
    {"rotary_pct": 0.5},
    {"rope_theta": 100.0},
    {"rope_parameters": ROPES[5]},
    BOTH,
    {"rope_scaling": ROPES[3]},
    {"sliding_window_pattern": 2, "sliding_window": 7},
    {"global_attn_every_n_layers": 2},
    {"layer_types": [FULL, SLIDING, FULL], "sliding_window": 7, "num_hidden_layers": 3},
    {"attn_logit_softcapping": 0.5},
    {"head_dim": 12},
]


@pytest.mark.parametrize("case", FIRST.values())
def test_a_field_that_siblings_read_counts_only_where_the_class_reads_it(case: str, tmp_path: Path) -> None:
    assert Base(*CASES[case], tmp_path).differing(TRAPS) == {}


@pytest.mark.matrix
@pytest.mark.parametrize("case", CASES)
def test_every_field_that_any_class_reads_is_read_as_transformers_does_or_refused(case: str, tmp_path: Path) -> None:
    settings = CASES[case][1]
    layers = next(
        settings[name] for name in ("num_hidden_layers", "num_layers", "n_layer", "n_layers") if name in settings
    )
    changes = [{field: value} for field in all_fields() for value in values_of(field, layers)]
    changes += [{"rope_parameters": ROPES[0], "rope_scaling": rope} for rope in ROPES]
    of_type = [other for other, (model_type, _) in CASES.items() if model_type == CASES[case][0]]
    own = changes[of_type.index(case) :: len(of_type)]  # the cases of a class share its changes
    assert Base(*CASES[case], tmp_path).differing(own) == {}


MOVED = LISTED | {"kda_layers": [2, 3], "full_attn_layers": [1]}
# What config.json of released models holds beside the settings of their families.
RELEASED: dict[str, dict[str, Any]] = {
    "exaone4": {"sliding_window_pattern": "LLLG", "layer_types": [SLIDING, SLIDING, SLIDING, FULL, SLIDING]},
    "qwen2": {"use_mrope": False},
    "kimi_linear, listed": {
        "linear_attn_config": MOVED,
        "mla_use_nope": True,
        "use_grouped_topk": True,
        "head_dim": 72,
    },
    "lfm2, rounded, biases, untied": {"full_attn_idxs": [0]},
    "olmo_hybrid": {"rope_parameters": {"rope_theta": None, "rope_type": "default"}},
    "phi3": {"full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False, "mlp_bias": False},
    "cohere": {"model_max_length": 131072},
    "falcon 11B": {"ff_factor": 4},
    "falcon": {"auto_map": {"AutoConfig": "configuration_falcon.FalconConfig"}, "multi_query": True},
    "gpt2": {"n_ctx": CONTEXT, "summary_type": "cls_index", "task_specific_params": {"text-generation": {}}},
    "gpt_neox": {"rotary_emb_base": 10000, "torch_dtype": "float16", "use_parallel_residual": True},
    "llama": {"pretraining_tp": 1, "rope_scaling": None, "attention_bias": False},
}


@pytest.mark.parametrize("case", RELEASED)
def test_a_released_file_is_read(case: str, tmp_path: Path) -> None:
    assert Base(*CASES[case], tmp_path).outcome(**RELEASED[case]) == "equal"


@pytest.mark.parametrize("case", ["olmo3", "gemma3"])
def test_whether_yarn_is_truncated_is_read_beside_the_kinds_of_layers(case: str, tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "rope_theta": 500.0, **YARN}
    changes = [{"rope_parameters": KINDS | {FULL: yarn | {"truncate": False}}}]
    changes += [{"rope_parameters": KINDS | {FULL: yarn, "truncate": False}}]
    base = Base(*CASES[case], tmp_path)
    assert [base.outcome(**change) for change in changes] == ["equal", "equal"]


# Switches that some classes have, and whole numbers where they declare floats.
SWITCHES = (
    "position=rope_half",
    "position=rope_long model.position.scaling.original_max_seq_len=20",
    "position=rope_yarn",
    "embedding=tied",
    "model.attention.scale=1",
    "model.attention.softcap=30",
    "model.embedding.logit_softcap=30",
    "model.embedding.logit_scale=2",
    "model.attention.clip_qkv=8",
)
HYBRIDS = ("kimi_linear", "lfm2", "olmo_hybrid", "qwen3_5", "qwen3_next", "mamba2", "bamba")
NOT_OF_LATENT_ATTENTION = ("model.attention.softcap=30", "model.attention.clip_qkv=8")
SIZES = ("model.dim=48", "model.n_layers=2", "model.n_heads=6", "model.max_seq_len=20", "size.n_kv_heads=2")
QUICK = (
    ("llama", SWITCHES[0]),
    ("gemma2", SWITCHES[5]),
    ("phi", SWITCHES[3]),
    ("olmo", SWITCHES[8]),
    ("llama", SWITCHES[1]),
)


def check_exports(recipe: str, switch: str, folder: Path, met: Container[str] = ()) -> set[str]:
    """Write a recipe with a switch, and noise on all parameters, as every class that can hold it; these classes.

    met: those in which other recipes had the switch, which only a recipe of their own is written as again.
    """
    overrides = ("size=pico", f"arch={recipe}", *SIZES, *switch.split())
    cfg = compose_config(*overrides, "model.vocab_size=61")
    node: Any = OmegaConf.to_container(cfg.model, resolve=True)
    settings = flat_settings(node)
    able = [family for family in FAMILIES if not family.obstacles(settings)[0]]
    tried = [family for family in able if family.architecture not in met or family.model_type == RECIPES[recipe]]
    if tried:
        model = decoder(*overrides, vocab_size=61).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
    for number, family in enumerate(tried):
        (folder / str(number)).mkdir()
        write_model(Loaded(folder, cfg, model, None), family, settings, folder / str(number), None, None)
        assert "with the same logits" in check_export(folder / str(number), model, family, None)
    return {family.architecture for family in tried}


@pytest.mark.parametrize(("recipe", "switch"), QUICK)
def test_a_switch_leaves_as_the_class_of_transformers_has_it(recipe: str, switch: str, tmp_path: Path) -> None:
    check_exports(recipe, switch, tmp_path)


@pytest.mark.parametrize("recipe", ["mixtral", "olmoe", "qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_a_recipe_with_experts_leaves_as_its_class_has_it(recipe: str, tmp_path: Path) -> None:
    assert check_exports(recipe, "model.position.theta=500", tmp_path)


@pytest.mark.parametrize("recipe", HYBRIDS)
def test_a_hybrid_leaves_as_its_class_has_it(recipe: str, tmp_path: Path) -> None:
    switch = "model.norm.eps=1e-4" if recipe == "kimi_linear" else "embedding=tied"  # whose head never is
    assert check_exports(recipe, switch, tmp_path)


@pytest.mark.matrix
@pytest.mark.parametrize("switch", SWITCHES)
def test_every_switch_leaves_every_recipe_as_its_own_class_and_as_any_other_once(switch: str, tmp_path: Path) -> None:
    met: set[str] = set()
    for recipe in RECIPES:
        if recipe == "deepseek_v3" and switch in NOT_OF_LATENT_ATTENTION:
            continue
        if recipe in HYBRIDS and "embedding" not in switch:
            continue
        (tmp_path / recipe).mkdir()
        met |= check_exports(recipe, switch, tmp_path / recipe, met)
    assert met


def test_a_class_that_loads_another_model_is_no_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    their_model("llama").save_pretrained(tmp_path / "saved")
    import_model(str(tmp_path / "saved"), tmp_path / "imported")
    monkeypatch.setattr(convert, "write_weights", lambda folder, weights, _: save_other(folder, weights))
    with pytest.raises(ConfigError, match=r"out: LlamaForCausalLM loads it as another model, whose logits differ by "):
        export_model(tmp_path / "imported", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def save_other(folder: Path, weights: dict[str, Tensor]) -> None:
    """The weights, but for one."""
    name, weight = next(iter(weights.items()))
    write_weights(folder, weights | {name: weight + 0.01 * torch.randn_like(weight)})


def test_without_transformers_an_export_is_not_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    their_model("llama").save_pretrained(tmp_path / "saved")
    import_model(str(tmp_path / "saved"), tmp_path / "imported")
    monkeypatch.setattr(convert, "find_spec", lambda _: None)
    assert "not checked, since transformers is not installed" in export_model(tmp_path / "imported", tmp_path / "out")


def test_an_import_says_which_fields_it_ignored(tmp_path: Path) -> None:
    their_model("llama").save_pretrained(tmp_path / "saved")
    edit_json(tmp_path / "saved" / "config.json", sliding_window=7, partial_rotary_factor=0.5, use_qk_norm=False)
    said = import_model(str(tmp_path / "saved"), tmp_path / "imported")
    assert said.endswith("; ignored, as transformers does: sliding_window=7, partial_rotary_factor=0.5")
