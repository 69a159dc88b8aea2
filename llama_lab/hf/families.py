"""All supported families of transformers models."""

from . import encoder_families, expert_families, gpt_families, llama_families, recurrent_families
from .family import Family

# An export takes the first that can hold a model; of two with one `model_type`, the first whose `variant` fits is read.
FAMILIES = tuple(
    one
    for module in (llama_families, expert_families, recurrent_families, gpt_families, encoder_families)
    for one in vars(module).values()
    if isinstance(one, Family) and one.model_type
)
# What a class of any family reads: a field of another family is ignored, as transformers ignores it.
FIELDS = {name.partition(".")[0] for family in FAMILIES for setting in family.settings for name in setting.names}
# The `model_type` of recipes that are called otherwise than their family
RECIPES = {
    "gpt1": "openai-gpt",
    "llama2": "llama",
    "llama3": "llama",
    "gemma3": "gemma3_text",
    "qwen3_5": "qwen3_5_text",
    "t5_v1_1": "t5",
}
# Overrides that compose a family which is no decoder, beside those of its settings
OF_FAMILY = {"bert": ["family=bert", "objective=masked"]}
# Families that a user may well try, and what they need that we have no switch for.
MISSING = {
    "qwen2_moe": "its shared expert has a width of its own",
    "mimo_v2_flash": "it has values of another width, and routes tokens to experts",
    "mamba": "its states decay by a number per channel; mamba2 is known",
}
