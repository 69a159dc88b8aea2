"""What cannot be loaded is refused in one line that names the file and the fix; nothing in a folder is run."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file
from torch import Tensor

import llama_lab
from llama_lab.config.trust import Trust
from llama_lab.hf.convert import export_model
from llama_lab.hf.loading import load
from llama_lab.hf.tensors import INDEX, WEIGHTS, parse_size
from llama_lab.util.errors import ConfigError

SHARD = "model-00001-of-00002.safetensors"


def edit_json(file: Path, **changes: Any) -> None:
    """Change keys of a JSON file; None deletes one."""
    content = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def edit_weights(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    """Put all weights into one file, changed."""
    weights: dict[str, Tensor] = {}
    for shard in folder.glob("model-*.safetensors"):
        weights |= load_file(shard)
        shard.unlink()
    (folder / INDEX).unlink()
    change(weights)
    save_file(weights, folder / WEIGHTS)


def only_a_pickle(folder: Path) -> None:
    """As older repositories are."""
    for file in (*folder.glob("model-*.safetensors"), folder / INDEX):
        file.unlink()
    torch.save({}, folder / "pytorch_model.bin")


def shard_elsewhere(folder: Path) -> None:
    """An index that points out of its folder."""
    placed = json.loads((folder / INDEX).read_text())["weight_map"]
    edit_json(folder / INDEX, weight_map=dict.fromkeys(placed, "../secret.safetensors"))


def write(name: str, content: bytes) -> Callable[[Path], Any]:
    """A file with other content."""
    return lambda folder: (folder / name).write_bytes(content)


def config(**changes: Any) -> Callable[[Path], Any]:
    """Changes of config.json."""
    return lambda folder: edit_json(folder / "config.json", **changes)


def weights(change: Callable[[dict[str, Tensor]], Any]) -> Callable[[Path], Any]:
    """A change of the weights."""
    return lambda folder: edit_weights(folder, change)


def weight(**changed: Tensor) -> Callable[[Path], Any]:
    """Weights in the place of others, or beside them."""
    return weights(lambda own: own.update(changed))


DOWN = "model.layers.1.mlp.down_proj.weight"
IDS = b'{"model": {"vocab": {"a": 2147483653}}}'
# What is done to a folder, and what is named: the file, the weight or the key at fault.
HARMS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a weight is missing": (weights(lambda own: own.pop(DOWN)), f"its weights lack {DOWN}"),
    "one too many": (weight(more=torch.ones(1)), "its weights have, beyond its config, model.more"),
    "infinite": (weight(**{DOWN: torch.full((48, 80), torch.inf)}), f"its weight {DOWN} is not finite"),
    "misshapen": (
        weight(**{DOWN: torch.ones(48, 79)}),
        f"its weight {DOWN} is (48, 79), and its config makes it (48, 80)",
    ),
    "quantised": (weight(**{DOWN: torch.ones(48, 80).to(torch.int8)}), f"its weight {DOWN} is quantised"),
    "tied, but not equal": (config(tie_word_embeddings=True), "lm_head.weight is no copy of model.embed_tokens.weight"),
    "a shard is absent": (lambda folder: (folder / SHARD).unlink(), f"{SHARD} is missing"),
    "a shard of another model": (
        lambda folder: save_file({"other": torch.ones(1)}, folder / SHARD),
        f"{SHARD} lacks model.embed_tokens.weight",
    ),
    "an index elsewhere": (shard_elsewhere, "names ../secret.safetensors, outside of its folder"),
    "a pickle": (only_a_pickle, "pytorch_model.bin, a pickle"),
    "an unknown family": (config(model_type="lama"), "did you mean llama?"),
    "a family that lacks a switch": (config(model_type="qwen2_moe"), "its shared expert has a width of its own"),
    "a RoPE that is a list": (config(rope_parameters=[1]), "config.json: is damaged"),
    "a size that is broken": (config(head_dim=8.5), "head_dim=8.5"),
    "ids": (config(vocab_size=10**12), "vocab_size=1000000000000"),
    "width": (config(hidden_size=10**9), "restore the two files that belong together"),
    "NaN": (config(rms_norm_eps=float("nan")), "NaN is no JSON number"),
    "no end": (write("config.json", b"[" * 10**5), "config.json: cannot be read"),
    "a damaged tokenizer": (write("tokenizer.json", b"{}"), "tokenizer.json: cannot be read"),
    "a tokenizer of many ids": (write("tokenizer.json", IDS), "tokenizer.json: id: 2147483653"),
    "no config": (
        lambda folder: (folder / "config.json").unlink(),
        "holds neither resolved.yaml of a run nor config.json",
    ),
    "no folder": (shutil.rmtree, "is no folder"),
}


@pytest.mark.parametrize("harm", HARMS)
def test_a_harmed_folder_is_refused_in_one_line(harm: str, llama: Path) -> None:
    change, expected = HARMS[harm]
    change(llama)
    with pytest.raises(ConfigError, match=r"^[^\n]*$") as caught:
        load(llama)
    assert expected in str(caught.value)
    assert str(llama) in str(caught.value)


def test_a_head_that_only_repeats_the_tied_table_is_left_out(llama: Path) -> None:
    edit_weights(llama, lambda w: w.update({"lm_head.weight": w["model.embed_tokens.weight"].clone()}))
    edit_json(llama / "config.json", tie_word_embeddings=True)
    embedding = load(llama).model.embedding
    assert embedding.head.weight is embedding.tokens.weight


def test_files_of_the_base_model_alone_lack_its_prefix(llama: Path) -> None:
    whole = load(llama).model.state_dict()

    def strip(weights: dict[str, Tensor]) -> None:
        for name in [name for name in weights if name.startswith("model.")]:
            weights[name.removeprefix("model.")] = weights.pop(name)
        weights["layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)  # which older files have

    edit_weights(llama, strip)
    assert all(torch.equal(whole[name], weight) for name, weight in load(llama).model.state_dict().items())


def test_weights_of_two_dtypes_are_loaded_in_the_wider(llama: Path) -> None:
    edit_weights(llama, lambda w: w.update({name: weight.bfloat16() for name, weight in w.items() if name != DOWN}))
    assert {p.dtype for p in load(llama).model.parameters()} == {torch.float32}


def test_a_run_is_loaded_by_the_package(trained: Callable[..., Path]) -> None:
    run = trained()
    loaded = llama_lab.load(run)
    checkpoint = torch.load(run / "checkpoints/last.ckpt", weights_only=True)["state_dict"]
    assert all(torch.equal(weight, checkpoint[f"model.{name}"]) for name, weight in loaded.model.state_dict().items())
    assert loaded.cfg.train.tokens == 2560
    assert loaded.tokenizer is not None


ATTACK = {"_target_": "os.system", "command": "touch harm"}
# Where a config.json of transformers could hide it.
HIDDEN: list[dict[str, Any]] = [
    {"rms_norm_eps": [ATTACK]},
    {"tie_word_embeddings": [ATTACK]},
    {"rope_parameters": {"rope_type": "linear", "factor": ATTACK}},
    {"rope_parameters": {"rope_type": "linear", "factor": [ATTACK]}},
    {"rms_norm_eps": "${oc.env:HOME}"},
]


@pytest.fixture
def ours(trained: Callable[..., Path], tmp_path: Path) -> Path:
    """What an export makes of a run that no class of transformers holds."""
    export_model(trained("norm=rmsnorm", "position=relative"), tmp_path / "ours")
    assert {file.name for file in (tmp_path / "ours").iterdir()} >= {"resolved.yaml", WEIGHTS, "tokenizer.json"}
    return tmp_path / "ours"


def test_a_strangers_folder_runs_nothing(trained: Callable[..., Path], copied: Callable[[Path], Path], ours: Path,
                                         tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """A run's, and weights beside a config of ours."""
    monkeypatch.chdir(tmp_path)
    for folder in (copied(trained()), ours):
        cfg = OmegaConf.load(folder / "resolved.yaml")
        cfg.model.norm = ATTACK
        OmegaConf.save(cfg, folder / "resolved.yaml")
        for use in (load, lambda folder: export_model(folder, tmp_path / "out")):
            with pytest.raises(ConfigError, match=r"names os\.system, which is none of our components"):
                use(folder)
    assert not (tmp_path / "harm").exists()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("hidden", HIDDEN)
def test_a_strangers_config_json_runs_nothing(
    hidden: dict[str, Any], llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    edit_json(llama / "config.json", **hidden)
    with pytest.raises(ConfigError, match=r"config\.json: .*is no number"):
        load(llama)
    assert not (tmp_path / "harm").exists()


def test_a_config_of_ours_with_a_file_of_no_weights_is_refused(ours: Path) -> None:
    save_file({}, ours / WEIGHTS)
    with pytest.raises(ConfigError, match="its weights lack "):
        load(ours)


def test_a_component_of_ones_own_is_loaded_where_it_is_trusted(ours: Path) -> None:
    cfg = OmegaConf.load(ours / "resolved.yaml")
    cfg.model.norm._target_ = "tests.hf.own.OwnNorm"
    OmegaConf.save(cfg, ours / "resolved.yaml")
    with pytest.raises(ConfigError, match=r"add trust=\[tests\], or --trust tests"):
        load(ours)
    assert type(load(ours, Trust(("tests",))).model.norm).__name__ == "OwnNorm"


def test_a_size_is_a_number_and_a_unit_of_a_thousand() -> None:
    sizes = {"1.5GB": 1_500_000_000, "200kb": 200_000, "5": 5, "2 MB": 2_000_000}
    assert {text: parse_size("--max-shard-size", text) for text in sizes} == sizes
    for text in ("0GB", "GB", "-1MB", "5 parsecs", ""):
        with pytest.raises(ConfigError, match=f"^--max-shard-size={text}: is no size"):
            parse_size("--max-shard-size", text)
