"""A field of a config.json counts only if transformers' class of that model type reads it: here as there."""

from collections.abc import Iterator
from itertools import product
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
from tests.hf.fields import ROPES, Base, all_fields, values_of
from tests.hf.test_loading import edit_json
from tests.hf.theirs import CASES, CONTEXT, FULL, LISTED, RECIPES, SLIDING, products

# Of every family, what one of them reads and others ignore.
TRAPS: list[dict[str, Any]] = [
    {"partial_rotary_factor": 0.5},
    {"rotary_pct": 0.5},
    {"rope_theta": 100.0},
    {"rope_parameters": ROPES[5]},
    {"rope_parameters": ROPES[0], "rope_scaling": ROPES[2]},
    {"rope_scaling": ROPES[3]},
    {"sliding_window_pattern": 2, "sliding_window": 7},
    {"global_attn_every_n_layers": 2},
    {"layer_types": [FULL, SLIDING, FULL], "sliding_window": 7, "num_hidden_layers": 3},
    {"attn_logit_softcapping": 0.5},
    {"head_dim": 12},
]


@pytest.mark.parametrize("case", ["llama", "gpt2", "gemma2", "mamba2", "t5"])
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
    changes += TRAPS
    of_type = [other for other, (model_type, _) in CASES.items() if model_type == CASES[case][0]]
    own = changes[of_type.index(case) :: len(of_type)]  # the cases of a class share its changes
    assert Base(*CASES[case], tmp_path).differing(own) == {}


MOVED = LISTED | {"kda_layers": [2, 3], "full_attn_layers": [1]}
# What config.json of released models holds beside the settings of their families.
RELEASED: dict[str, dict[str, Any]] = {
    "exaone4": {"sliding_window_pattern": "LLLG", "layer_types": [SLIDING, SLIDING, SLIDING, FULL, SLIDING]},
    "kimi_linear, listed": {
        "linear_attn_config": MOVED,
        "mla_use_nope": True,
        "use_grouped_topk": True,
        "head_dim": 72,
    },
    "lfm2, rounded, biases, untied": {"full_attn_idxs": [0]},
    "phi3": {"full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False, "mlp_bias": False},
    "falcon 11B": {"ff_factor": 4},
    "falcon": {"auto_map": {"AutoConfig": "configuration_falcon.FalconConfig"}, "multi_query": True},
    "gpt2": {"n_ctx": CONTEXT, "summary_type": "cls_index", "task_specific_params": {"text-generation": {}}},
    "llama": {"pretraining_tp": 1, "rope_scaling": None, "attention_bias": False},
}


@pytest.mark.parametrize("case", products(RELEASED, ("llama", "gpt2", "kimi_linear, listed")))
def test_a_released_file_is_read(case: str, tmp_path: Path) -> None:
    assert Base(*CASES[case], tmp_path).outcome(**RELEASED[case]) == "equal"


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
SIZES = ("model.dim=48", "model.n_layers=2", "model.n_heads=6", "model.max_seq_len=20", "size.n_kv_heads=2")
QUICK = [("llama", SWITCHES[1]), ("gemma2", SWITCHES[5]), ("olmo", SWITCHES[8]), ("qwen3_next", SWITCHES[3])]


def exports() -> Iterator[Any]:
    """Every recipe with every switch that it can have; the quick line has some."""
    yield pytest.param("kimi_linear", "model.norm.eps=1e-4", marks=pytest.mark.matrix)
    for recipe, switch in product(RECIPES, SWITCHES):
        has_none = recipe in HYBRIDS and "embedding" not in switch
        if not has_none and not (recipe == "deepseek_v3" and switch in (SWITCHES[5], SWITCHES[8])):
            yield pytest.param(recipe, switch, marks=() if (recipe, switch) in QUICK else pytest.mark.matrix)


@pytest.mark.parametrize(("recipe", "switch"), exports())
def test_a_switch_leaves_as_a_class_of_transformers_has_it(recipe: str, switch: str, tmp_path: Path) -> None:
    overrides = ("size=pico", f"arch={recipe}", *SIZES, *switch.split())
    cfg = compose_config(*overrides, "model.vocab_size=61")
    node: Any = OmegaConf.to_container(cfg.model, resolve=True)
    settings = flat_settings(node)
    able = [family for family in FAMILIES if not family.obstacles(settings)[0]]
    able.sort(key=lambda family: family.model_type != RECIPES[recipe])  # its own class, else any other
    if not able:
        pytest.skip("no class has such a switch")
    model = decoder(*overrides, vocab_size=61).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    write_model(Loaded(tmp_path, cfg, model, None), able[0], settings, tmp_path, None, None)
    assert "with the same logits" in check_export(tmp_path, model, able[0], None)


@pytest.fixture
def imported(llama: Path, tmp_path: Path) -> Path:
    import_model(str(llama), tmp_path / "imported")
    return tmp_path / "imported"


def test_a_class_that_loads_another_model_is_no_export(
    imported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convert, "write_weights", lambda folder, weights, _: save_other(folder, weights))
    with pytest.raises(ConfigError, match=r"out: LlamaForCausalLM loads it as another model, whose logits differ by "):
        export_model(imported, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def save_other(folder: Path, weights: dict[str, Tensor]) -> None:
    """The weights, but for one."""
    name, weight = next(iter(weights.items()))
    write_weights(folder, weights | {name: weight + 0.01 * torch.randn_like(weight)})


def test_without_transformers_an_export_is_not_checked(
    imported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convert, "find_spec", lambda _: None)
    assert "not checked, since transformers is not installed" in export_model(imported, tmp_path / "out")


def test_an_import_says_which_fields_it_ignored(llama: Path, tmp_path: Path) -> None:
    edit_json(llama / "config.json", sliding_window=7, partial_rotary_factor=0.5, use_qk_norm=False)
    said = import_model(str(llama), tmp_path / "imported")
    assert said.endswith("; ignored, as transformers does: sliding_window=7, partial_rotary_factor=0.5")
