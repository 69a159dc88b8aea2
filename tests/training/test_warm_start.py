"""A run starts from the weights of another, says what it took, and then needs the other no more."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from llama_lab.config.components import build_model
from llama_lab.data.open import open_dataset
from llama_lab.evaluation.load import load_run
from llama_lab.hf.convert import export_model
from llama_lab.runs.folder import RunFolder
from llama_lab.runs.stored import Environment, WarmStart
from llama_lab.training import warm_start
from llama_lab.training.monitor import Monitor
from llama_lab.training.warm_start import hash_of, init_hash, load_source, start_from
from llama_lab.util.errors import ConfigError, FinishedRunError
from tests.conftest import Command, last_of_each
from tests.selection import first
from tests.training.stopping import at, stop, stopped
from tests.training.tiny import identical, planned, rows, steps_of, trained, trained_state

AT_STEP_7 = at(Monitor, "on_train_batch_end", 7)
TOKENS = torch.arange(32)[None]
SHORT = ("train.tokens=5120", "train.evaluations=2", "train.log_every=5")  # 20 steps


@pytest.fixture(scope="module")
def source(tiny: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 20 steps."""
    return trained(*tiny, *SHORT, f"runs_dir={tmp_path_factory.mktemp('source')}")


@pytest.fixture
def settings(tiny: list[str], source: Path, tmp_path: Path) -> list[str]:
    """The overrides of a run from a copy of the source, which a test may change."""
    shutil.copytree(source, tmp_path / "source")
    return [*tiny, *SHORT, f"runs_dir={tmp_path / 'runs'}", f"init_from='{tmp_path / 'source'}'"]


def change_weights(folder: Path, change: float) -> None:
    """Give the checkpoint of a run other weights."""
    file = RunFolder(folder).checkpoint
    content = torch.load(file, weights_only=True)
    content["state_dict"]["model.norm.weight"][0] = change
    torch.save(content, file)


def test_a_run_begins_where_its_source_ended_and_trains_on(settings: list[str], source: Path) -> None:
    folder = trained(*settings)
    begin, end = rows(folder)[0], rows(folder)[-1]
    assert (begin["step"], begin["tokens"]) == (0, 0)
    assert begin["val/loss"] == rows(source)[-1]["val/loss"]
    assert end["val/loss"] < begin["val/loss"]
    assert (steps_of(folder, "val/loss"), steps_of(source, "val/loss")) == ([0, 10, 20], [10, 20])
    assert not (source / WarmStart.FILE).exists()
    assert Environment.load(source).init_hash == ""


def test_a_decoder_starts_from_that_of_an_encoder_decoder(tiny: list[str], tmp_path: Path) -> None:
    two = trained(*tiny, *SHORT, "family=encoder_decoder", "model.encoder_layers=3", f"runs_dir={tmp_path / 'two'}")
    made = planned(*tiny, *SHORT, f"init_from='{two}'", f"runs_dir={tmp_path}")
    source, dataset = load_source(made.cfg), open_dataset(made.cfg)
    model = build_model(made.cfg, dataset.index.vocab_size)
    start = start_from(source, made.cfg, model, dataset)
    theirs = source.model.state_dict()
    assert all((tensor == theirs[name]).all() for name, tensor in model.state_dict().items())
    assert (start.share, start.anew, start.rows) == (1, [], [])
    crossing = ["cross_attention_norm", *(f"cross_attention.{part}" for part in ("query", "key", "value", "output"))]
    encoder = [name.replace("*", "0-2") for name in start.taken if name.startswith(("blocks", "norm"))]
    assert sorted(start.left) == sorted(
        [*(f"blocks.*.{part}.weight" for part in crossing), *(f"encoder.{name}" for name in encoder)]
    )
    assert start.settings["model"] == ["EncoderDecoder", "Decoder"]


def test_a_source_is_hashed_once_by_a_process_until_its_files_change(
    settings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg, hashed = planned(*settings).cfg, []
    monkeypatch.setattr(warm_start, "hash_of", lambda weights: hashed.append(1) or hash_of(weights))
    before = [init_hash(cfg) for _ in range(3)]
    assert len(hashed) == 1
    change_weights(tmp_path / "source", 7.0)
    after = [init_hash(cfg) for _ in range(3)]
    assert len(hashed) == 2
    assert {*before} != {*after}
    assert len({*before, *after}) == 2


def test_what_was_taken_made_anew_and_left_is_told_by_name(tiny: list[str], source: Path, command: Command) -> None:
    ran = command(*tiny, *SHORT, f"init_from={source}", "attention=mqa", "norm=layernorm", "position=learned")
    assert (ran.code, ran.err) == (0, "")
    start = json.loads((ran.run / WarmStart.FILE).read_text())
    assert start["source"] == str(source)
    assert start["hash"] == hash_of(load_run(source).model.state_dict())
    assert start["pooled"] == [f"blocks.*.attention.{part}.weight" for part in ("key", "value")]
    assert start["anew"] == [
        "position.table.weight",
        *(f"blocks.*.{part}_norm.bias" for part in ("attention", "ffn")),
        "norm.bias",
    ]
    assert (start["left"], start["rows"]) == ([], [])
    assert "blocks.*.ffn.gate.weight" in start["taken"]
    assert start["settings"]["model.norm"] == ["RMSNorm", "LayerNorm"]
    assert start["settings"]["model.n_kv_heads"] == [4, 1]
    assert 0.9 < start["share"] < 1
    for line in (
        f"from {source}: {100 * start['share']:.1f}% of the parameters",
        f"  made anew: {', '.join(start['anew'])}",
    ):
        assert line in ran.out.splitlines()
    assert "model.norm RMSNorm -> LayerNorm" in ran.out
    for file in ("environment.json", "summary.json"):
        assert json.loads((ran.run / file).read_text())["init_hash"] == start["hash"]


SCALINGS = {
    "rope": [],
    "rope_linear": ["scaling.factor=4.0"],
    "rope_ntk": ["scaling.factor=4.0"],
    "rope_yarn": ["scaling.factor=4.0", "scaling.original_max_seq_len=32"],
    "rope_llama3": ["theta=10000.0", "scaling.factor=4.0", "scaling.original_max_seq_len=32"],
}


@pytest.mark.parametrize("position", SCALINGS)
def test_every_scaling_takes_all_weights_to_a_longer_context(position: str, settings: list[str], source: Path) -> None:
    scaling = [f"model.position.{setting}" for setting in SCALINGS[position]]
    run = planned(*settings, f"position={position}", "model.max_seq_len=128", *scaling)
    dataset, loaded = open_dataset(run.cfg), load_source(run.cfg)
    model = build_model(run.cfg, dataset.index.vocab_size).eval()
    start = start_from(loaded, run.cfg, model, dataset)
    assert (start.share, start.anew, start.left) == (1.0, [], [])
    with torch.no_grad():
        same = torch.equal(model(TOKENS), loaded.model(TOKENS))
    assert same == (position == "rope")
    assert start.settings["model.max_seq_len"] == [32, 128]


@pytest.mark.parametrize("position", ["rope_yarn", "rope_llama3"])
def test_a_scaling_from_another_context_than_the_source_s_is_refused(position: str, settings: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"^model\.position\.scaling\.original_max_seq_len=(128|8192): .* set .*=32$"):
        trained(*settings, f"position={position}", "model.max_seq_len=128")


@pytest.mark.slow
def test_a_run_that_goes_on_needs_its_source_no_more(
    settings: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = trained(*last_of_each([*settings, f"runs_dir={tmp_path / 'whole'}"]))
    stopped(AT_STEP_7, stop, *settings)
    shutil.rmtree(tmp_path / "source")
    capsys.readouterr()
    folder = trained(*settings)
    assert identical(trained_state(folder), trained_state(whole))
    assert steps_of(folder, "step") == steps_of(whole, "step")
    assert Environment.load(folder).init_hash == Environment.load(whole).init_hash
    assert "of the parameters" not in capsys.readouterr().out, "it took nothing now"
    with pytest.raises(ConfigError, match=r"^init_from=.* is no folder"):
        trained(*settings, "seed=2")


@pytest.mark.parametrize("status", first(1, ["interrupted", "done"]))
def test_a_source_that_has_changed_since_is_noticed(status: str, settings: list[str], tmp_path: Path) -> None:
    if status == "done":
        trained(*settings)
    else:
        stopped(AT_STEP_7, stop, *settings)
    change_weights(tmp_path / "source", 0.5)
    with pytest.raises(ConfigError, match=r"^init_from=.*: holds other weights now"):
        planned(*settings)
    planned(*settings, "overwrite=true")


def test_another_source_is_another_run(settings: list[str], tmp_path: Path) -> None:
    folder = trained(*settings)
    shutil.copytree(tmp_path / "source", tmp_path / "moved")
    with pytest.raises(ConfigError, match="already holds a finished run") as error:
        planned(*last_of_each([*settings, f"init_from='{tmp_path / 'moved'}'"]))
    assert not isinstance(error.value, FinishedRunError), "a sweep would pass it over"
    assert OmegaConf.load(folder / "resolved.yaml").init_from == str(tmp_path / "source")


REFUSED = {
    "init_from=nowhere": "init_from=nowhere: ",
    "model.dim=16": "init_from=",
    "init_kv_heads=first": "init_kv_heads=first: ",
    "init_from=null init_experts=copies": "init_experts=copies: ",
    "init_experts=copies": "init_experts=copies: ",
    "ffn=moe model.hidden_dim=88": "init_experts=null: ",
    "init_from=null init_kv_heads=mean": "init_kv_heads=mean: ",
    "init_from=null trust=[lab]": "trust=['lab']: ",
}


@pytest.mark.parametrize("overrides", first(4, REFUSED))
def test_what_cannot_be_a_start_is_refused(overrides: str, tiny: list[str], source: Path, command: Command) -> None:
    ran = command(*tiny, f"init_from={source}", *overrides.split())
    assert (ran.code, ran.err.count("\n")) == (2, 1)
    assert ran.err.startswith(f"error: {REFUSED[overrides]}")
    assert not (ran.cwd / "runs").exists()


def test_weights_that_are_not_finite_are_refused_by_name(settings: list[str], tmp_path: Path) -> None:
    change_weights(tmp_path / "source", float("nan"))
    with pytest.raises(ConfigError, match=r"^init_from=.*: its norm\.weight is not finite"):
        trained(*settings)


def test_a_stranger_s_config_runs_no_code(settings: list[str], tmp_path: Path, command: Command) -> None:
    file = tmp_path / "source" / "resolved.yaml"
    cfg: Any = OmegaConf.load(file)
    cfg.model.norm._target_ = "warm_lab.Mine"
    OmegaConf.save(cfg, file)
    refused = command(*settings)
    assert refused.code == 2
    assert refused.err.startswith("error: init_from=")
    assert refused.err.rstrip().endswith("add trust=[warm_lab]")


@pytest.mark.slow
def test_each_seed_of_a_sweep_may_start_from_its_own_source(tiny: list[str], command: Command) -> None:
    sweep = ("--multirun", *tiny, *SHORT, "seed=1,2")
    assert command(*sweep, "arm=base", "name=source").code == 0
    assert command(*sweep, "arm=on", "name=on", "init_from=runs/source/base/seed=${seed}").code == 0
    for seed in (1, 2):
        folder, source = (Path(f"runs/{name}/seed={seed}") for name in ("on/on", "source/base"))
        assert WarmStart.load(folder).source == str(source.absolute())
        assert rows(folder)[0]["val/loss"] == rows(source)[-1]["val/loss"]


def test_an_exported_model_is_the_same_source_as_its_run(settings: list[str], source: Path, tmp_path: Path) -> None:
    export_model(source, tmp_path / "exported")
    folder = trained(*last_of_each([*settings, f"init_from='{tmp_path / 'exported'}'"]), "seed=2", "data.seed=1")
    assert rows(folder)[0]["val/loss"] == pytest.approx(rows(source)[-1]["val/loss"], abs=1e-6)
    start = WarmStart.load(folder)
    assert (start.share, start.anew, start.left) == (1.0, [], [])


@pytest.mark.slow
def test_other_data_is_read_with_the_tokenizer_of_the_source(tiny: list[str], tmp_path: Path) -> None:
    short = [*tiny, *SHORT, f"runs_dir={tmp_path}", "tokenizer=bpe", "tokenizer.vocab_size=300"]
    source = trained(*short)
    other = tmp_path / "other.txt"
    other.write_text("".join(f"class C{i}:\n    y = {i * 7 % 97} + 2  # b{i % 5}\n\n" for i in range(3000)))
    start = [f"data.files=['{other}']", f"init_from='{source}'", f"runs_dir={tmp_path / 'on'}"]
    with pytest.raises(ConfigError, match=r"another tokenizer .* tokenizer=hf tokenizer\.path=") as error:
        trained(*last_of_each([*short, *start]))
    option, path = str(error.value).split()[-2:]
    others = [o for o in short if not o.startswith("tokenizer")]
    folder = trained(*last_of_each([*others, *start, option, path.replace("=/", "='/") + "'"]))
    assert Environment.load(folder).tokenizer_hash == Environment.load(source).tokenizer_hash
    assert Environment.load(folder).data_hash != Environment.load(source).data_hash
