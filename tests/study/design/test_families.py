"""The families side by side: what their arms are, how they are matched, and what no loss compares."""

import pytest

from llama_lab.data.objectives import Prefix
from llama_lab.runs.study import MOST_RESIDUAL
from llama_lab.study.design.designs import Families
from llama_lab.study.design.matching import MEASURES
from tests.refusals import check_line
from tests.study.design.test_designs import CONFIGS
from tests.study.planning import planned_study, refusal

STUDY = ("study=families", "train.tokens=5120", "study.seeds=[1]", "name=f")
FAMILIES = ["decoder", "prefix_decoder", "encoder_decoder"]
AXIS = ("study=options", "study.axis=family", "study.options=[decoder,encoder_decoder]", "match=none", *STUDY[1:])


def test_the_families_are_one_recipe_with_half_of_the_layers_in_a_tower_where_parameters_are_matched() -> None:
    for match, depth in {"params": 2, "active": 2, "flops": 4, "none": 4}.items():
        arms = Families("gpt2", match).variants(CONFIGS).arms
        assert [arm.name for arm in arms] == FAMILIES
        made = [CONFIGS.compose(*arm.overrides) for arm in arms]
        assert {choices["norm"] for _, choices in made} == {"layernorm"}
        models = [cfg.model for cfg, _ in made]
        assert [one._target_.rpartition(".")[2] for one in models] == ["Decoder", "PrefixDecoder", "EncoderDecoder"]
        assert [one.n_layers for one in models] == [4, 4, depth]
        assert models[2].encoder_layers == depth


@pytest.mark.slow
@pytest.mark.parametrize(("match", "other", "ratio"), [("params", "flops", 0.5), ("flops", "params", 2.0)])
def test_the_families_are_matched(tiny: list[str], match: str, other: str, ratio: float) -> None:
    plan = planned_study(*tiny, *STUDY, "size=nano", f"match={match}")
    decoder, prefix, encoder = plan.arms
    measures = [MEASURES[match](arm.cost) for arm in plan.arms]
    assert measures == pytest.approx([measures[0]] * 3, rel=MOST_RESIDUAL)
    assert decoder.width == prefix.width != encoder.width
    found = MEASURES[other](encoder.cost) / MEASURES[other](decoder.cost)
    assert found == pytest.approx(ratio, rel=0.05), "Raffel et al. (2020), table 2"


def test_losses_of_unlike_targets_are_refused(tiny: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Prefix, "targets", "masked tokens")
    check_line(refusal(*tiny, *STUDY), "objective: losses of masked tokens and next tokens do not compare")
    planned_study(*tiny, *AXIS)
