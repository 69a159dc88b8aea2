"""The papers to cite for the options of runs and for the statistics of a study, as BibTeX."""

import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

FILE = Path(__file__).with_suffix(".bib")

Keys = tuple[str, ...]

VANILLA: Keys = ("vaswani2017attention",)
ROPE: Keys = ("su2021rope",)
OLMO2: Keys = ("olmo2024two",)
GEMMA2: Keys = ("gemma2024two",)
LLAMA: Keys = ("touvron2023llama",)
LLAMA2: Keys = ("touvron2023llama2",)
LLAMA3: Keys = ("grattafiori2024llama3",)
GPT2: Keys = ("radford2019gpt2",)
PYTHIA: Keys = ("biderman2023pythia",)
FALCON: Keys = ("almazrouei2023falcon",)
NEOX: Keys = ("black2022neox",)
TIED: Keys = ("press2017tying",)
NONE: Keys = ()

# The keys for each option of a config group, in citation order.
SOURCES: dict[str, dict[str, Keys]] = {
    "norm": {
        **dict.fromkeys(("layernorm", "layernorm_1e-6"), ("ba2016layernorm",)),
        **dict.fromkeys(("rmsnorm", "rmsnorm_1e-6"), ("zhang2019rmsnorm",)),
        "none": NONE,
        "rmsnorm_offset": ("zhang2019rmsnorm", "gemma2024"),
    },
    "block": {
        "parallel": ("wang2021gptj", *FALCON),
        "parallel_two_norms": NEOX,
        "postnorm": VANILLA,
        "prenorm": (*GPT2, "xiong2020layernorm"),
        "reordered": OLMO2,
        "sandwich": ("ding2021cogview", *GEMMA2),
    },
    "position": {
        "alibi": ("press2022alibi",),
        "learned": GPT2,
        "none": ("kazemnejad2023nope",),
        "relative": ("raffel2020t5",),
        "rope": ROPE,
        "rope_500k": (*ROPE, *LLAMA3),
        "rope_linear": (*ROPE, "chen2023interpolation"),
        "rope_llama3": (*ROPE, *LLAMA3),
        "rope_ntk": (*ROPE, "bloc97ntk"),
        "rope_quarter": (*ROPE, *NEOX),
        "rope_yarn": (*ROPE, "peng2023yarn"),
        "sinusoidal": VANILLA,
        "sinusoidal_concatenated": (*VANILLA, "keskar2019ctrl"),
    },
    "attention": {
        "gqa": ("ainslie2023gqa",),
        "gqa_gemma2": ("ainslie2023gqa", *GEMMA2),
        "gqa_window": ("ainslie2023gqa", "beltagy2020longformer", "jiang2023mistral"),
        **dict.fromkeys(("mha", "mha_bias"), VANILLA),
        "mha_qk_norm": (*VANILLA, "henry2020qknorm", *OLMO2),
        "mqa": ("shazeer2019mqa",),
    },
    "ffn": {
        **dict.fromkeys(("bilinear", "geglu", "geglu_tanh", "reglu", "swiglu"), ("shazeer2020glu",)),
        **dict.fromkeys(("gelu", "gelu_bias", "gelu_tanh", "gelu_tanh_bias"), ("hendrycks2016gelu",)),
        **dict.fromkeys(("relu", "relu_bias"), (*VANILLA, "nair2010relu")),
        "glu": ("dauphin2017glu", "shazeer2020glu"),
        "relu2": ("so2021primer",),
        "silu": ("elfwing2018silu", "ramachandran2017swish"),
    },
    "embedding": {
        "scaled": (*VANILLA, *TIED),
        "scaled_bias": (*VANILLA, *TIED, "keskar2019ctrl"),
        "scaled_softcap": (*VANILLA, *TIED, *GEMMA2),
        "tied": TIED,
        "tied_norm": (*TIED, "lescao2022bloom"),
        "untied": NONE,
    },
    "init": {
        "normal": ("radford2018gpt",),
        "scaled": GPT2,
        "trunc": OLMO2,
        "xavier": ("glorot2010xavier",),
    },
    "arch": {
        "bloom": ("lescao2022bloom",),
        "ctrl": ("keskar2019ctrl",),
        "falcon": FALCON,
        "gemma2": GEMMA2,
        "gpt1": ("radford2018gpt",),
        "gpt2": GPT2,
        "gpt_neox": (*NEOX, *PYTHIA),
        "llama": LLAMA,
        "llama2": LLAMA2,
        "llama3": LLAMA3,
        "mistral": ("jiang2023mistral",),
        "olmo2": OLMO2,
        "opt": ("zhang2022opt",),
        "vanilla": VANILLA,
    },
    "size": {
        **dict.fromkeys(("pico", "nano", "micro", "mini", "small"), NONE),
        **dict.fromkeys(("gpt2", "gpt2_medium", "gpt2_large", "gpt2_xl"), GPT2),
        **dict.fromkeys(("llama_7b", "llama_13b", "llama_33b", "llama_65b"), LLAMA),
        **dict.fromkeys(("llama3_8b", "llama3_70b", "llama3_405b"), LLAMA3),
        **dict.fromkeys((f"pythia_{size}" for size in ("70m", "160m", "410m", "1b", "1b4", "6b9")), PYTHIA),
        **dict.fromkeys(("gemma2_2b", "gemma2_9b"), GEMMA2),
        "bloom_7b": ("lescao2022bloom",),
        "falcon_7b": FALCON,
        "llama2_70b": LLAMA2,
        "llama3_1b": NONE,  # Llama 3.2, which has no paper
        "mistral_7b": ("jiang2023mistral",),
        "olmo2_7b": OLMO2,
        "tinyllama_1b": ("zhang2024tinyllama",),
    },
    "tokenizer": {"bpe": ("sennrich2016bpe", *GPT2), "byte": NONE, "char": NONE},
    "optim": {"adamw": ("loshchilov2019adamw",)},
    "schedule": {"constant": NONE, "cosine": ("loshchilov2017sgdr",), "linear": NONE, "wsd": ("hu2024minicpm",)},
}

# The keys for everything that is not an option of a config group.
MAX_T: Keys = ("hothorn2008simultaneous", "hasler2008heteroscedasticity")
MODERATION: Keys = ("smyth2004moderated", "horn1975heteroscedastic")
DEGREES_OF_FREEDOM: Keys = ("satterthwaite1946",)
EQUIVALENCE: Keys = ("schuirmann1987equivalence",)
SENSITIVITY: Keys = ("wortsman2023proxies",)
Z_LOSS: Keys = ("chowdhery2022palm",)
DESIGNS: dict[str, Keys] = {
    "factorial": ("box2005experimenters",),
    "depth": ("xiong2020layernorm", "wang2022deepnet"),
    "context": ("press2022alibi",),
}


def sources(group: str, option: str) -> Keys:
    """The keys to cite for an option of a config group; empty for a user's own option."""
    return SOURCES.get(group, {}).get(option, NONE)


@cache
def entries() -> dict[str, str]:
    """The entries of references.bib by key."""
    return {entry[1]: entry[0] for entry in re.finditer(r"^@\w+\{(\S+),$.*?^\}$", FILE.read_text(), re.M | re.S)}


def bibliography(keys: Iterable[str]) -> str:
    """The BibTeX entries of these keys, each once, in alphabetical order."""
    return "\n\n".join(entries()[key] for key in sorted(set(keys))) + "\n"
