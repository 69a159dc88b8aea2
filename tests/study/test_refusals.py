"""What no study can be: the settings of a command, and the one that its refusal begins with."""

from pathlib import Path
from typing import Any

import pytest

from tests.refusals import check_line, faults
from tests.study.planning import refusal

ONE_OF_EACH_KIND = """
study=ladder study.axis=[norm]
study=ladder optim.lr=1e-3
study=ladder study.axes=[norm] norm=none -> study.target=llama2
study=ladder study.learning_rates=null study.axes=[norm] optim.lr=-1
study=ladder name=a/b
study=ladder study.seeds=[1,1]
study=ladder study.margin=0
study=ladder study.max_seeds=2
study=context study.lengths=[a]
study=recipes study.recipes=[gpt2,llama2] match=active
study=options study.axis=ffn study.options=[relu,gelu] pattern=global_every_2nd
study=options study.axis=optim study.options=[adamw,lion] study.learning_rates={adamw:[1,2],loin:[1,2]}
study=options study.axis=attention study.options=[gqa,mamba2] -> model.attention=
study=families train.eval_lengths=[1,2]
study=options study.axis=objective study.options=[next_token,span] family=encoder_decoder -> objective
"""
OTHERS = """
study=add_one study.extend_rates=true
study=ladder overwrite=true
study=ladder trainer=cpu trainer.devices=2
study=ladder study.seeds=[]
study=ladder study.tuning_seeds=[4,5,3]
study=ladder study.tuning_seeds=[4,4,5]
study=ladder study.learning_rates=null study.tuning_seeds=[4,5,6]
study=ladder study.compare=pairs
study=ladder study.max_seeds=3.5
study=ladder study.margin=0.02 study.add_seeds=true
study=ladder study.max_seeds=5 study.add_seeds=true
study=ladder study.seeds=[1] study.max_seeds=5 study.margin=0.02 study.add_seeds=true
study=ladder study.tuning_seeds=[4,5] study.max_seeds=5 study.margin=0.02 study.add_seeds=true -> study.tuning_seeds
study=scaling study.axis=ffn study.options=[relu,swiglu] study.max_seeds=5 study.margin=0.02 study.add_seeds=true
study=depth schedule.warmup=0.1
study=learning_rate study.learning_rates=1e-3
study=recipes arch=gpt2
study=recipes study.recipes=[gpt2,llama2] model.dim=48 model.n_heads=3 -> model.n_kv_heads=2
study=recipes study.recipes=[gpt2,llama2,llama3] position=rope -> study: arms llama2 and llama3
study=recipes study.recipes=[llama,transformer2017] study.learning_rates=null -> train.eval_lengths=[1,2,4]
study=options study.axis=model.hidden_dim study.options=[32,64] -> model.hidden_dim
study=options study.axis=model.n_kv_heads study.options=[2,null] -> model.n_kv_heads=null
study=options study.axis=optim.lr study.options=[1,2] study.learning_rates=[1,2] -> optim.lr
study=options study.axis=ffn study.options=[relu,gelu] ffn=glu
study=options study.axis=optim study.options=[adamw,adafactor] trainer=fsdp trainer.devices=2 trainer.accelerator=cpu \
hydra/launcher=local_gpus -> optim=adafactor
study=options study.axis=model.max_seq_len study.options=[32,48] train.tokens=6000
study=options study.axis=[optim,norm] study.options=[[adamw,lion],[none,rmsnorm]] \
study.learning_rates={adamw:[1,2],lion:[1,2],none:[1,2]}
study=options study.axis=optim study.options=[adamw,lion] study.learning_rates={adamw:[1,2]}
study=options study.axis=optim study.options=[adamw,lion] study.learning_rates={adamw:[1,2],lion:[1]}
study=options study.axis=block study.options=[prenorm,mixer_only] position=none -> match=params
study=options study.axis=block study.options=[prenorm,mixer_only] attention=mamba2 position=none \
model.attention.value_dim=8
study=options study.axis=model.attention.value_dim study.options=[8,16] attention=mamba2 position=none \
block=mixer_only -> model.attention.value_dim
study=options study.axis=[family,model.max_seq_len] study.options=[[decoder,encoder_decoder],[16,32]] match=none \
-> model.max_seq_len
study=families study.base=gtp2
study=families family=decoder
study=families model.n_layers=3
study=families match=all
study=families data.document_mask=true -> model.document_start_id=256
"""
LATER: list[Any] = [pytest.param(*case, marks=pytest.mark.matrix) for case in faults(OTHERS)]


@pytest.mark.parametrize(("typed", "fault"), [*faults(ONE_OF_EACH_KIND), *LATER])
def test_what_cannot_be_a_study_is_refused_in_one_line(
    typed: str, fault: str, tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    check_line(refusal(*tiny, "train.tokens=5120", "train.evaluations=2", *typed.split()), fault)
    assert not [*tmp_path.iterdir()]
