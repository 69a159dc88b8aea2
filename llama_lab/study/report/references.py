"""The papers to cite for the options of runs and for the statistics of a study, as BibTeX."""

import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

FILE = Path(__file__).with_suffix(".bib")

Keys = tuple[str, ...]

# The keys to cite for each option of a config group, in order.
SOURCES: dict[str, dict[str, str]] = {
    "norm": {
        **dict.fromkeys(("layernorm", "layernorm_1e-6"), "ba2016layernorm"),
        "layernorm_offset": "ba2016layernorm parmar2024nemotron",
        "layernorm_plain": "ba2016layernorm groeneveld2024olmo",
        "layernorm_no_bias": "ba2016layernorm chowdhery2022palm",
        **dict.fromkeys(("rmsnorm", "rmsnorm_1e-6", "rmsnorm_plain"), "zhang2019rmsnorm"),
        "none": "",
        "rmsnorm_offset": "zhang2019rmsnorm gemma2024",
    },
    "block": {
        "deepnorm": "vaswani2017attention wang2022deepnet",
        "parallel": "wang2021gptj almazrouei2023falcon",
        "parallel_two_norms": "black2022neox",
        "postnorm": "vaswani2017attention",
        "prenorm": "radford2019gpt2 xiong2020layernorm",
        "prenorm_scaled": "radford2019gpt2 xiong2020layernorm granite2024",
        "reordered": "olmo2024two",
        "sandwich": "ding2021cogview gemma2024two",
    },
    "position": {
        "alibi": "press2022alibi",
        "learned": "radford2019gpt2",
        "none": "kazemnejad2023nope",
        "relative": "raffel2020t5",
        "rope": "su2021rope",
        "rope_alibi": "su2021rope press2022alibi",
        "rope_2m": "su2021rope bakouch2025smollm3",
        "rope_500k": "su2021rope grattafiori2024llama3",
        "rope_500k_interleaved": "su2021rope grattafiori2024llama3 cohere2024commandr",
        "rope_half": "su2021rope gunasekar2023phi",
        "rope_linear": "su2021rope chen2023interpolation",
        "rope_llama3": "su2021rope grattafiori2024llama3",
        "rope_long": "su2021rope ding2024longrope",
        "rope_ntk": "su2021rope bloc97ntk",
        "rope_quarter": "su2021rope black2022neox",
        "rope_quarter_interleaved": "su2021rope wang2021gptj",
        "rope_yarn": "su2021rope peng2023yarn",
        "shaw": "shaw2018relative",
        "sinusoidal": "vaswani2017attention",
        "sinusoidal_concatenated": "vaswani2017attention keskar2019ctrl",
    },
    "attention": {
        **dict.fromkeys(("gqa", "gqa_bias"), "ainslie2023gqa"),
        "gqa_gemma2": "ainslie2023gqa gemma2024two",
        "gqa_mup": "ainslie2023gqa yang2022mup",
        "gqa_qk_norm": "ainslie2023gqa henry2020qknorm yang2025qwen3",
        "gqa_qkv_bias": "ainslie2023gqa yang2024qwen2",
        "gqa_window": "ainslie2023gqa beltagy2020longformer jiang2023mistral",
        "gqa_window_qk_norm": "ainslie2023gqa beltagy2020longformer henry2020qknorm gemma2025three",
        **dict.fromkeys(("mha", "mha_bias"), "vaswani2017attention"),
        "mha_log_temperature": "vaswani2017attention chiang2022overcoming",
        "mha_step_temperature": "vaswani2017attention nakanishi2025softmax",
        "mha_qk_norm": "vaswani2017attention henry2020qknorm olmo2024two",
        "mha_qk_norm_rotated": "vaswani2017attention henry2020qknorm karpathy2025nanochat",
        "mla": "deepseek2024v2",
        "mqa": "shazeer2019mqa",
    },
    "ffn": {
        **dict.fromkeys(("bilinear", "geglu", "geglu_tanh", "reglu", "swiglu"), "shazeer2020glu"),
        **dict.fromkeys(("gelu", "gelu_bias", "gelu_tanh", "gelu_tanh_bias"), "hendrycks2016gelu"),
        **dict.fromkeys(("relu", "relu_bias"), "vaswani2017attention nair2010relu"),
        "glu": "dauphin2017glu shazeer2020glu",
        "relu2": "so2021primer",
        "silu": "elfwing2018silu ramachandran2017swish",
    },
    "embedding": {
        "scaled": "vaswani2017attention press2017tying",
        "scaled_bias": "vaswani2017attention press2017tying keskar2019ctrl",
        "scaled_softcap": "vaswani2017attention press2017tying gemma2024two",
        "tied": "press2017tying",
        "tied_logit_scale": "press2017tying cohere2024commandr",
        "tied_multipliers": "press2017tying granite2024",
        "tied_norm": "press2017tying lescao2022bloom",
        "untied": "",
        "untied_bias": "wang2021gptj",
        "untied_norm_softcap": "karpathy2025nanochat",
    },
    "init": {
        "deepnorm": "glorot2010xavier wang2022deepnet",
        "normal": "radford2018gpt",
        "scaled": "radford2019gpt2",
        "trunc": "olmo2024two",
        "xavier": "glorot2010xavier",
    },
    "arch": {
        "bloom": "lescao2022bloom",
        "cohere": "cohere2024commandr",
        "ctrl": "keskar2019ctrl",
        "falcon": "almazrouei2023falcon",
        "gemma": "gemma2024",
        "gemma2": "gemma2024two",
        "gemma3": "gemma2025three",
        "gpt1": "radford2018gpt",
        "gpt2": "radford2019gpt2",
        "gpt_neox": "black2022neox biderman2023pythia",
        "gptj": "wang2021gptj",
        "granite": "granite2024",
        "llama": "touvron2023llama",
        "llama2": "touvron2023llama2",
        "llama3": "grattafiori2024llama3",
        "mistral": "jiang2023mistral",
        "mpt": "mosaicml2023mpt",
        "nanochat": "karpathy2025nanochat",
        "olmo": "groeneveld2024olmo",
        "olmo2": "olmo2024two",
        "opt": "zhang2022opt",
        "palm": "chowdhery2022palm",
        "phi": "gunasekar2023phi li2023phi",
        "qwen2": "yang2024qwen2",
        "qwen3": "yang2025qwen3",
        "smollm3": "bakouch2025smollm3",
        "stablelm": "tow2023stablelm",
        "starcoder2": "lozhkov2024starcoder2",
        "vanilla": "vaswani2017attention",
    },
    "size": {
        **dict.fromkeys(("pico", "nano", "micro", "mini", "small"), ""),
        **dict.fromkeys(("gpt2", "gpt2_medium", "gpt2_large", "gpt2_xl"), "radford2019gpt2"),
        **dict.fromkeys(("llama_7b", "llama_13b", "llama_33b", "llama_65b"), "touvron2023llama"),
        **dict.fromkeys(("llama3_8b", "llama3_70b", "llama3_405b"), "grattafiori2024llama3"),
        **dict.fromkeys((f"pythia_{n}" for n in ("70m", "160m", "410m", "1b", "1b4", "6b9")), "biderman2023pythia"),
        **dict.fromkeys(("gemma2_2b", "gemma2_9b"), "gemma2024two"),
        "bloom_7b": "lescao2022bloom",
        "falcon_7b": "almazrouei2023falcon",
        "llama2_70b": "touvron2023llama2",
        "llama3_1b": "",  # Llama 3.2, which has no paper
        "mistral_7b": "jiang2023mistral",
        "olmo2_7b": "olmo2024two",
        "tinyllama_1b": "zhang2024tinyllama",
    },
    "tokenizer": {"bpe": "sennrich2016bpe radford2019gpt2", **dict.fromkeys(("byte", "char", "hf", "symbols"), "")},
    "optim": {
        "adafactor": "shazeer2018adafactor",
        "adam": "kingma2015adam",
        "adamw": "loshchilov2019adamw",
        "lion": "chen2023lion",
        "muon": "jordan2024muon liu2025muon loshchilov2019adamw",
        "sgd": "sutskever2013momentum",
    },
    "schedule": {
        "constant": "",
        "cosine": "loshchilov2017sgdr",
        "linear": "",
        "noam": "vaswani2017attention",
        "wsd": "hu2024minicpm",
    },
}

# The keys for everything that is not an option of a config group.
MAX_T: Keys = ("hothorn2008simultaneous", "hasler2008heteroscedasticity")
MODERATION: Keys = ("smyth2004moderated", "horn1975heteroscedastic")
DEGREES_OF_FREEDOM: Keys = ("satterthwaite1946",)
RANKS: Keys = ("mohamad2022ranks",)
EQUIVALENCE: Keys = ("schuirmann1987equivalence",)
SENSITIVITY: Keys = ("wortsman2023proxies",)
Z_LOSS: Keys = ("chowdhery2022palm",)
DESIGNS: dict[str, Keys] = {
    "factorial": ("box2005experimenters",),
    "depth": ("xiong2020layernorm", "wang2022deepnet"),
    "context": ("press2022alibi",),
    "scaling": ("hoffmann2022chinchilla", "besiroglu2024chinchilla"),
}


def sources(group: str, option: str) -> Keys:
    """The keys to cite for an option of a config group; empty for a user's own option."""
    return tuple(SOURCES.get(group, {}).get(option, "").split())


@cache
def entries() -> dict[str, str]:
    """The entries of references.bib by key."""
    return {entry[1]: entry[0] for entry in re.finditer(r"^@\w+\{(\S+),$.*?^\}$", FILE.read_text(), re.M | re.S)}


def bibliography(keys: Iterable[str]) -> str:
    """The BibTeX entries of these keys, each once, in alphabetical order."""
    return "\n\n".join(entries()[key] for key in sorted(set(keys))) + "\n"
