"""A model's name, whatever its spelling -> the catalogue's architecture, or that of a known relative."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import shardscope as ss

_NOISE = re.compile(
    r"^(?:meta|instruct|chat|base|hf|it|pt|sft|dpo|bnb|gptq|awq|int[48]|[48]-?bit|fp16|bf16|fp8|lora|qlora|full|model"
    r"|dense|pretrain(?:ing|ed)?|finetun(?:e|ed|ing)|fine|tuning|preview|thinking|hybrid|text|decoder|dynamic|only"
    r"|coder|math|deduped|\d{1,3}k|1m|mtp|lm|unsloth|nvidia|google|microsoft|models?|parameters?|params?"
    r"|proxy|\d{1,2}l|nodes?)$"
)
_DATE = re.compile(r"^(?:1[12]|2[345]|0[1-9])(?:0[1-9]|1[0-2]|[0-3]\d)$")
"""Months of releases: 2407, 2507, 1124, 0425."""
_SIZE = re.compile(r"(\d+(?:p\d+)?)([mbt])$")
_UNITS = {"m": 10**6, "b": 10**9, "t": 10**12}
_NEAR = 0.1
"""How far a size in a name may be from the parameters of the model that it names."""


class Shape(NamedTuple):
    """The sizes of a dense decoder."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    bias: bool = False


# config.json of each on huggingface.co. Of Qwen (v1), whose own code is not in transformers,
# intermediate_size counts gate and up together.
_LLAMA_SHAPED = {
    "qwen-1.8b": Shape(24, 2048, 16, 16, 5504, 151936, True),
    "qwen-7b": Shape(32, 4096, 32, 32, 11008, 151936, True),
    "qwen-14b": Shape(40, 5120, 40, 40, 13696, 152064, True),
    "qwen-72b": Shape(80, 8192, 64, 64, 24576, 152064, True),
    "qwen1.5-4b": Shape(40, 2560, 20, 20, 6912, 151936, True),
    "qwen1.5-32b": Shape(64, 5120, 40, 8, 27392, 152064, True),
    "llama-33b": Shape(60, 6656, 52, 52, 17920, 32000),
    "llama-65b": Shape(80, 8192, 64, 64, 22016, 32000),
    "codellama-7b": Shape(32, 4096, 32, 32, 11008, 32016),
    "codellama-13b": Shape(40, 5120, 40, 40, 13824, 32016),
    "codellama-34b": Shape(48, 8192, 64, 8, 22016, 32000),
    "tinyllama-1.1b": Shape(22, 2048, 32, 4, 5632, 32000),
    "yi-6b": Shape(32, 4096, 32, 4, 11008, 64000),
    "yi-34b": Shape(60, 7168, 56, 8, 20480, 64000),
    "mistral-7b-v0.2": Shape(32, 4096, 32, 8, 14336, 32000),
    "solar-10.7b": Shape(48, 4096, 32, 8, 14336, 32000),
}
# Brown et al. 2020 (arXiv:2005.14165), table 2.1, by parameters: layers, width, heads. 13B's width of 5,140
# is no multiple of its heads; those who train it take 5,120. 1.3B has 16 heads of 128, as its width says.
_GPT3 = {
    125e6: (12, 768, 12),
    350e6: (24, 1024, 16),
    760e6: (24, 1536, 16),
    1.3e9: (24, 2048, 16),
    2.7e9: (32, 2560, 32),
    6.7e9: (32, 4096, 32),
    13e9: (40, 5120, 40),
}
_GPT_VOCAB = 51_200
"""GPT-2's 50,257 words, padded as in Megatron's papers."""
# Names of relatives with the same shape.
_SAME = (
    (r"llama1?(7|13)b", r"llama2\1b"),
    (r"(?:vicuna|alpaca|openllama)(?:v1p\d)?(7|13)b(?:v1p\d)?", r"llama2\1b"),
    (r"llama1?(?:30|33)b", "llama33b"),
    (r"llama1?65b", "llama65b"),
    (r"llama8b", "llama38b"),
    (r"llama3?405b", "llama3p1405b"),
    (r"yi1p5(6|34)b", r"yi\1b"),
    (r"llama370b", "llama3p170b"),
    (r"l(?=\d)(.*)", r"llama\1"),
    (r"codellama34b.*", "codellama34b"),
    (r"tinyllama.*", "tinyllama1p1b"),
    (r"mistral7bv0p1|mistral7b1p0|zephyr7b.*", "mistral7b"),
    (r"mistral(?:ai)?7bv0p2", "mistral7bv0p2"),
    (r"(mixtral8x\d+b)v0p1", r"\1"),
    (r"mixtral", "mixtral8x7b"),
    (r"mistralnemo(?:12b)?", "mistralnemo12b"),
    (r"mistralsmall3?(?:p\d)?(?:24b)?", "mistralsmall24b"),
    (r"mistrallarge2?(?:123b)?", "mistrallarge123b"),
    (r"qwen2(0p5|1p5|7|72)b", r"qwen2p5\1b"),
    (r"qwen1p5(1p8|7|14|72)b", r"qwen\1b"),
    (r"qwen2a14b(?:57b)?", "qwen257ba14b"),
    (r"smollm1?(135m|360m|1p7b)", r"smollm2\1"),
    (r"phi3p5mini(.*)", r"phi3mini\1"),
    (r"(phi3(?:mini|medium)|phi4mini)(?:3p8b|14b)?", r"\1"),
    (r"deepseek(?:r1|v3p1|v30324)(?:671b)?", "deepseekv3"),
    (r"deepseekr1distillllama(8|70)b", r"llama3p1\1b"),
    (r"deepseekr1distillqwen(7|14|32)b", r"qwen2p5\1b"),
    (r"falcon2(11b)", r"falcon\1"),
    (r"nemotron(15|340)b", r"nemotron4\1b"),
    (r"megatronturing.*|mtnlg.*", "megatrongpt529p6b"),
    (r"gptneox", "gptneox20b"),
    (r"gpt2small|gpt2117m", "gpt2"),
)


@lru_cache(maxsize=1024)
def by_name(name: str) -> ss.Architecture | None:
    """The model of that name in any spelling ("meta-llama/Llama-2-7b-hf", "LLaMA 2 7B"); None if unknown."""
    for with_dates in (True, False):
        wanted = normalize_name(name, with_dates=with_dates)
        found = _find_architecture(wanted)
        for pattern, same in _SAME:
            if found is None and re.fullmatch(pattern, wanted):
                found = _find_architecture(re.sub(rf"^(?:{pattern})$", same, wanted))
        if found is not None:
            return found
    return _gpt_of_size(name)


def normalize_name(name: str, *, with_dates: bool = True) -> str:
    """Remove owner, tuning and punctuation: ``meta-llama/Meta-Llama-3-8B`` -> ``llama38b``."""
    name = name.lower().split("/")[-1] if re.match(r"[\w.-]+/[\w.-]+", name) else name.lower()
    # Qwen-1_8B has 1.8 billion, LLAMA3_8B eight.
    name = re.sub(r"(?<=[- ])(\d)_(\d)(?=b\b)", r"\1.\2", name)
    # Only Llama 3.2 has these sizes; "LLaMA-33B" is another.
    name = re.sub(r"llama[-_ ]?3[-_ ]+(?=[13]b)", "llama-3.2-", name)
    # "Llama 3 (8B)" keeps what is in brackets; "(tokendrop)" does not.
    name = re.sub(r"\(\s*([\d.]+\s?[mbt])\s*\)", r" \1", name)
    name = re.sub(r"\(.*?\)|\[.*?\]|, .*$|\b\d+-nodes?\b", "", name)
    name = re.sub(r"(\d)\s+(?=(?:b|m|t|billion|million|trillion)\b)", r"\1", name)
    name = re.sub(
        r"(?<=\d)(b|m|t)illion\b|(?<=\d)(tr)illion\b", lambda found: "t" if found[2] else found[1], name
    )
    words = [word for word in re.split(r"[-_\s:,+]+", name.replace("huggyllama", "")) if word]
    kept = [word for word in words if not _NOISE.match(word) and (with_dates or not _DATE.match(word))]
    return re.sub(r"[^a-z0-9]", "", "-".join(kept).replace(".", "p"))


@lru_cache(maxsize=1)
def _list_catalog_names() -> dict[str, str]:
    # "Qwen3 235B" is its only model of that size, active parameters said or not.
    without_active = {re.sub(r"(?<=b)a\d+b$", "", normalize_name(key)): key for key in ss.models}
    return without_active | {normalize_name(key): key for key in (*ss.models, *_LLAMA_SHAPED)}


def _find_architecture(wanted: str) -> ss.Architecture | None:
    known = _list_catalog_names()
    if wanted in known:
        return _make_architecture(known[wanted])
    # "phi-2 2.7B", "DeepSeek-V3 671B", "GPT-2 1.5B": names without a size, and the size.
    size = _SIZE.search(wanted)
    if not size:
        return None
    for cut in range(size.start(), size.end() - 1):
        # Digits before the unit are the size's or the name's: "phi22p7b" is phi-2 of 2.7b.
        stem, number = wanted[:cut], _SIZE.fullmatch(wanted[cut:])
        if not number:
            continue
        keys = [known[stem]] if stem in known else []
        keys += [key for key in ("gpt2-medium", "gpt2-large", "gpt2-xl") if stem == "gpt2"]
        for key in keys:
            found = _make_architecture(key)
            if abs(_read_parameters(number) / found.num_parameters - 1) < _NEAR and not _SIZE.search(stem):
                return found
    return None


def _read_parameters(size: re.Match[str]) -> float:
    return float(size[1].replace("p", ".")) * _UNITS[size[2]]


def _make_architecture(key: str) -> ss.Architecture:
    if key in ss.models:
        return ss.models[key]
    return make_llama(key, _LLAMA_SHAPED[key])


def _gpt_of_size(name: str) -> ss.Architecture | None:
    """GPT of a size that Brown et al. or Megatron's papers print: "GPT-3 175B", "GPT 18.4B", "GPT-1T"."""
    # "GPT3-13B" has 13 billion, "GPT 3.6B" 3.6.
    sized = re.sub(r"gpt[-_ ]?[23][-_ :(]+(?=\d)", "gpt-", name.lower())
    match = re.fullmatch(
        r"(?:megatron(?:lm)?)?gpt(\d+(?:p\d+)?[mbt])|(\d+(?:p\d+)?[mbt])gpt[23]?", normalize_name(sized)
    )
    size = _SIZE.fullmatch(match[1] or match[2]) if match else None
    return _gpt_near(size) if size else None


def _gpt_near(size: re.Match[str]) -> ss.Architecture | None:
    stated = _read_parameters(size)
    for parameters, (layers, hidden, heads) in _GPT3.items():
        if abs(stated / parameters - 1) < 0.01:
            shape = Shape(layers, hidden, heads, heads, 4 * hidden, _GPT_VOCAB)
            return make_gpt(f"gpt-3-{size[0].replace('p', '.')}", shape)
    megatron = [arch for key, arch in ss.models.items() if key.startswith(("megatron-gpt", "gpt-3"))]
    nearest = min(megatron, key=lambda arch: abs(stated / arch.num_parameters - 1))
    return nearest if abs(stated / nearest.num_parameters - 1) < 0.01 else None


def make_llama(name: str, shape: Shape, *, tied: bool = False) -> ss.Architecture:
    """Make a decoder of Llama's layers, with Qwen's biases if the shape has them."""
    return ss.Architecture(
        name=name,
        model_type="qwen2" if shape.bias else "llama",
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.hidden // shape.heads,
        vocab_size=shape.vocab,
        max_position_embeddings=2**20,
        tie_word_embeddings=tied,
        attention_bias=shape.bias,
    )


def make_gpt(name: str, shape: Shape, seq_len: int = 2048) -> ss.Architecture:
    """Make Megatron's GPT: two-matrix MLP, LayerNorm, biases, learned positions, tied embedding."""
    return ss.Architecture(
        name=name,
        model_type="gpt2",
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        head_dim=shape.hidden // shape.heads,
        vocab_size=shape.vocab,
        max_position_embeddings=seq_len,
        tie_word_embeddings=True,
        attention_bias=True,
        attention_output_bias=True,
        mlp_bias=True,
        gated_mlp=False,
        norm="layernorm",
        position_embedding="learned",
    )


def with_layers(arch: ss.Architecture, layers: int) -> ss.Architecture:
    """The model with another number of layers, as tables have that make a model fit a few cards."""
    return replace(arch, num_hidden_layers=layers)
