"""The families side by side: what their arms are, how they are matched, and what no loss compares."""

import pytest

from llama_lab.data.objectives import Prefix
from llama_lab.runs.study import MOST_RESIDUAL
from llama_lab.study.design.designs import Families
from llama_lab.study.design.matching import MEASURES
from tests.study.design.test_designs import CONFIGS
from tests.study.planning import planned_study, refusal

STUDY = ("study=families", "train.tokens=5120", "study.seeds=[1]", "name=f")
FAMILIES = ["decoder", "prefix_decoder", "encoder_decoder"]
LONGER = "beyond the trained context families read unlike parts of a window; set it to []"
AXIS = ("study=options", "study.axis=family", "study.options=[decoder,encoder_decoder]", "match=none", *STUDY[1:])


def test_the_families_are_one_recipe_with_half_of_the_layers_in_a_tower_where_parameters_are_matched() -> None:
    for match, depth in {"params": 2, "active": 2, "flops": 4, "none": 4}.items():
        arms = Families("gpt2", match).variants(CONFIGS).arms
        assert [arm.name for arm in arms] == FAMILIES
        made = [CONFIGS.compose(*arm.overrides) for arm in arms]
        assert {choices["arch"] for _, choices in made} == {"gpt2"}
        assert {choices["norm"] for _, choices in made} == {"layernorm"}
        models = [cfg.model for cfg, _ in made]
        assert [one._target_.rpartition(".")[2] for one in models] == ["Decoder", "PrefixDecoder", "EncoderDecoder"]
        assert [one.n_layers for one in models] == [4, 4, depth]
        assert models[2].encoder_layers == depth


def test_one_layer_stays_in_each_tower() -> None:
    arms = Families("llama", "params").variants(type(CONFIGS)(CONFIGS._loader, ["model.n_layers=1"])).arms
    assert [arm.axes["model.n_layers"] for arm in arms] == ["1", "1", "1"]


@pytest.mark.slow
@pytest.mark.parametrize("match", ["params", "flops"])
def test_the_families_are_matched(tiny: list[str], match: str) -> None:
    plan = planned_study(*tiny, *STUDY, "size=nano", f"match={match}")
    decoder, prefix, encoder = plan.arms
    measures = [MEASURES[match](arm.cost) for arm in plan.arms]
    assert measures == pytest.approx([measures[0]] * 3, rel=MOST_RESIDUAL)
    assert decoder.width == prefix.width != encoder.width
    other = MEASURES["flops" if match == "params" else "params"]
    ratio = other(encoder.cost) / other(decoder.cost)
    assert ratio == pytest.approx(0.5 if match == "params" else 2.0, rel=0.05), "Raffel et al. (2020), table 2"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            (*STUDY, "train.eval_lengths=[1,2]"),
            f"train.eval_lengths=[1,2]: {LONGER}",
        ),
        (
            ("study=recipes", "study.recipes=[llama,transformer2017]", "study.learning_rates=null", *STUDY[1:]),
            f"train.eval_lengths=[1,2,4]: {LONGER}",
        ),
        (
            (
                *("study=options", "study.axis=[family,model.max_seq_len]", "match=none", *STUDY[1:]),
                "study.options=[[decoder,encoder_decoder],[16,32]]",
            ),
            "model.max_seq_len: arms have 16 and 32, but families are compared by the second halves of equal windows; "
            "give all arms one",
        ),
        (
            (
                *("study=options", "study.axis=objective", "study.options=[next_token,span]", *STUDY[1:]),
                "family=encoder_decoder",
            ),
            "objective: losses of next tokens and spans do not compare; give all arms the same targets",
        ),
        ((*STUDY, "study.base=gtp2"), "study.base=gtp2: no such recipe (did you mean gpt2?)"),
        ((*STUDY, "family=decoder"), "family=decoder: the study sets family itself, arm by arm; leave it out"),
        ((*STUDY, "model.n_layers=3"), "model.n_layers=3: the study sets model.n_layers itself, arm by arm"),
        ((*STUDY, "match=all"), "match=all: unknown; choose params, active, flops or none"),
        ((*STUDY, "data.document_mask=true"), "model.document_start_id=256: a prefix holds several documents"),
    ],
)
def test_what_families_cannot_have_is_refused(tiny: list[str], arguments: tuple[str, ...], message: str) -> None:
    line = refusal(*tiny, *arguments)
    assert line.startswith(message), line


def test_losses_of_unlike_targets_are_refused(tiny: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Prefix, "targets", "masked tokens")
    assert refusal(*tiny, *STUDY) == (
        "objective: losses of masked tokens and next tokens do not compare; give all arms the same targets"
    )
    planned_study(*tiny, *AXIS)
