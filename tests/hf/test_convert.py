"""`llama-lab-convert`: what it writes is loaded by transformers, and by ourselves, as it was."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from llama_lab.evaluation.text import generate_texts
from llama_lab.hf.loading import load
from llama_lab.model import Sampling, generate
from tests.composing import eval_settings
from tests.conftest import Command
from tests.hf.test_loading import edit_weights
from tests.hf.theirs import reload

Trained = Callable[..., Path]
TEXT = "def f(x): return 'a€ é'  # <|endoftext|> 日本\n\n\t1  2"


@pytest.mark.slow
def test_transformers_writes_what_the_run_writes(trained: Trained, converting: Command, tmp_path: Path) -> None:
    run = trained("train.tokens=40000", "optim.lr=0.01")
    ran = converting("export", run, tmp_path / "out")
    assert (ran.code, ran.err) == (0, "")
    assert (
        "LlamaForCausalLM of 41,696 parameters; LlamaForCausalLM.from_pretrained loads it, with the same logits"
        in ran.out
    )
    ours, theirs = load(run), reload(tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    ids = ours.tokenizer.encode(TEXT)
    assert tokenizer(TEXT, split_special_tokens=True).input_ids == ids
    assert tokenizer.decode(ids) == TEXT
    generation = GenerationConfig.from_pretrained(tmp_path / "out")
    assert generation.eos_token_id == generation.bos_token_id == tokenizer.eos_token_id == ours.tokenizer.eot_id
    prompt = tokenizer("def f", return_tensors="pt").input_ids
    n = ours.model.max_seq_len - prompt.shape[1]
    settings = GenerationConfig(max_new_tokens=n, do_sample=False, pad_token_id=0)
    expected = theirs.generate(prompt, settings, attention_mask=torch.ones_like(prompt))[0, prompt.shape[1] :]
    steps = generate(ours.model, prompt.tolist(), n, Sampling(temperature=0))
    assert [step[0] for step in steps] == expected.tolist()
    assert len(set(expected.tolist())) > 3  # it has learnt more than one letter


def test_transformers_writes_what_a_run_of_spans_writes_and_so_does_its_import(
    trained: Trained, converting: Command, tmp_path: Path
) -> None:
    run = trained("arch=t5")
    assert "with the same logits" in converting("export", run, tmp_path / "out").out
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    source = tokenizer(f"def f{tokenizer.eos_token}", return_tensors="pt").input_ids
    start, *expected = reload(tmp_path / "out").generate(source, max_new_tokens=8, do_sample=False)[0].tolist()
    assert start == source[0, -1] == tokenizer.eos_token_id
    for folder in (run, tmp_path / "out"):
        loaded = load(folder)
        assert loaded.model.start_id == start
        settings = eval_settings("temperature=0", "max_new_tokens=8")
        *_, (text,) = generate_texts(loaded.tokenizer, loaded.model, ["def f"], settings)
        assert text.tokens == [token for token in expected if token != start]
        assert text.certain == f"def f\n{loaded.tokenizer.decode(text.tokens)}"


def test_a_tokenizer_of_theirs_goes_in_and_out_unchanged(llama: Path, converting: Command, tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: i for i, word in enumerate(["<s>", "</s>", "<unk>", "a", "b", "ab"])}
    plain = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    theirs = PreTrainedTokenizerFast(
        tokenizer_object=plain, bos_token="<s>", eos_token="</s>", unk_token="<unk>", model_max_length=20
    )
    theirs.save_pretrained(llama)
    assert converting("import", llama, tmp_path / "imported").code == 0
    assert converting("export", tmp_path / "imported", tmp_path / "out").code == 0
    loaded = load(tmp_path / "imported")
    assert loaded.tokenizer.eot_id == 1
    again = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert again("a ab b c").input_ids == theirs("a ab b c").input_ids == [3, 5, 4, 2]
    assert (again.eos_token, again.bos_token, again.model_max_length) == ("</s>", "<s>", 20)


def test_an_export_is_compared_within_a_document(trained: Trained, converting: Command, tmp_path: Path) -> None:
    run = trained("attention=gqa_window", "data.document_mask=true")
    assert "with the same logits" in converting("export", run, tmp_path / "out").out


@pytest.mark.parametrize(
    ("overrides", "obstacle"),
    [
        (["norm=layernorm", "position=relative"], "position=Relative (Rope)"),
        (["attention=mla"], "nearest, DeepseekV3ForCausalLM, differs in attention.latent_eps=1e-05 (1e-06)"),
    ],
)
def test_a_mix_that_no_class_holds_is_written_beside_its_config_and_read_back_exactly(
    overrides: list[str], obstacle: str, trained: Trained, converting: Command, tmp_path: Path
) -> None:
    run = trained(*overrides)
    ran = converting("export", run, tmp_path / "out", "--max-shard-size", "50KB")
    assert ran.code == 0
    assert "no class of transformers holds it; the nearest, " in ran.out
    assert obstacle in ran.out
    before, after = load(run), load(tmp_path / "out")
    ours, again = (loaded.model.state_dict() for loaded in (before, after))
    assert ours.keys() == again.keys()
    assert all(torch.equal(ours[name], again[name]) for name in ours)
    assert before.tokenizer.hash == after.tokenizer.hash
    before.cfg.model.vocab_size = 257  # which follows the tokenizer in a run
    assert OmegaConf.to_container(before.cfg, resolve=True) == OmegaConf.to_container(after.cfg, resolve=True)


def test_an_export_has_its_shards_and_its_dtype(trained: Trained, converting: Command, tmp_path: Path) -> None:
    run = trained("arch=gpt2")
    converting("export", run, tmp_path / "out", "--dtype", "bfloat16", "--max-shard-size", "20KB")
    shards = sorted(tmp_path.glob("out/model-*-of-*.safetensors"))
    assert len(shards) > 1
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 2 * sum(p.numel() for p in load(run).model.parameters())
    model = reload(tmp_path / "out")
    assert model.dtype == torch.bfloat16
    ours = dict(load(run).model.named_parameters())
    assert torch.equal(model.transformer.wte.weight, ours["embedding.tokens.weight"].bfloat16())


def test_weights_that_are_not_finite_are_not_exported(
    trained: Trained, copied: Callable[[Path], Path], converting: Command, tmp_path: Path
) -> None:
    run, name = copied(trained()), "embedding.tokens.weight"
    checkpoint = torch.load(run / "checkpoints" / "last.ckpt", weights_only=False)
    next(weight for key, weight in checkpoint["state_dict"].items() if key.endswith(name)).view(-1)[:1] = torch.nan
    torch.save(checkpoint, run / "checkpoints" / "last.ckpt")
    ran = converting("export", run, tmp_path / "out")
    assert (ran.code, ran.err.count("\n")) == (2, 1)
    assert ran.err.startswith(f"error: {run}: its weight {name} is not finite; ")
    assert not (tmp_path / "out").exists()


def test_a_weight_that_its_dtype_cannot_hold_is_not_written(llama: Path, converting: Command, tmp_path: Path) -> None:
    edit_weights(llama, lambda weights: weights["model.embed_tokens.weight"].view(-1)[:1].fill_(1e5))
    assert converting("import", llama, tmp_path / "ours").code == 0
    ran = converting("export", tmp_path / "ours", tmp_path / "out", "--dtype", "float16")
    assert (ran.code, ran.err.count("\n")) == (2, 1)
    assert ran.err.startswith("error: --dtype float16: cannot hold model.embed_tokens.weight; ")
    assert not (tmp_path / "out").exists()


def test_nothing_is_overwritten(llama: Path, converting: Command, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    assert converting("import", llama, tmp_path / "out").code == 0  # it was empty
    before = {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()}
    ran = converting("import", llama, tmp_path / "out")
    assert (ran.code, ran.err.count("\n")) == (2, 1)
    assert ran.err.startswith(f"error: {tmp_path / 'out'}: exists already; ")
    assert before == {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()}


@pytest.mark.slow
def test_an_import_into_the_current_folder_or_through_a_link_touches_nothing_else(
    llama: Path, converting: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside, here, linked = (tmp_path / name for name in ("out.tmp", "here", "linked"))
    for folder in (beside, here, linked):
        folder.mkdir()
    (beside / "mine").write_text("precious")
    (tmp_path / "link").symlink_to(linked)
    monkeypatch.chdir(here)
    for dest in (".", tmp_path / "link", tmp_path / "out"):
        assert converting("import", llama, dest).code == 0
        assert len(load(dest).model.blocks) == len(load(llama).model.blocks)
        assert not list(Path(dest).glob(".*"))
    assert (beside / "mine").read_text() == "precious"


def test_an_import_that_fails_leaves_nothing_behind(llama: Path, converting: Command, tmp_path: Path) -> None:
    (llama / "config.json").write_text("{}")
    assert converting("import", llama, tmp_path / "deep" / "out").code == 2
    assert not (tmp_path / "deep").exists()


def test_a_model_of_ours_is_not_imported(trained: Trained, converting: Command, tmp_path: Path) -> None:
    ran = converting("import", trained(), tmp_path / "out")
    assert ran.code == 2
    assert "is a model of ours already" in ran.err


def test_a_repository_without_a_network_is_refused_with_the_way_round(
    converting: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    ran = converting("import", "nobody/nothing", tmp_path / "out")
    assert ran.code == 2
    *_, message = ran.err.splitlines()
    assert message.startswith("error: nobody/nothing: the Hugging Face Hub cannot be reached (")
    assert "; " in message


def test_a_repository_is_downloaded_to_where_the_hubs_library_keeps_it(
    llama: Path, converting: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the cache that it reads offline, since there is no network in tests."""
    import huggingface_hub.constants

    commit = "0" * 40
    repository = tmp_path / "hub" / "models--some--llama"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    (repository / "snapshots").mkdir()
    llama.rename(repository / "snapshots" / commit)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    assert converting("import", "some/llama", tmp_path / "out").code == 0
    assert load(tmp_path / "out").model_type == "llama"
    assert AutoModelForCausalLM.from_pretrained(repository / "snapshots" / commit).config.hidden_size == 48
