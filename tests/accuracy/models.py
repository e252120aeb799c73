"""A row's model -> Architecture: by its name where it is a known one, else by its shape."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache

from tests.accuracy.nanotron import first_stage_layers
from tests.accuracy.rows import Row, number, text
from tests.accuracy.unmapped import UnmappedError

import shardscope as ss
from shardscope.architecture import LatentAttention, MixtureOfExperts

# Config files of models whose own code is not in transformers, as their authors published them.
_OTHERS: dict[str, dict[str, object]] = {
    # Qwen (v1): huggingface.co/Qwen/Qwen-7B config.json; intermediate_size counts gate and up together there.
    "qwen-1.8b": {"hidden": 2048, "layers": 24, "heads": 16, "ffn": 5504, "vocab": 151936},
    "qwen-7b": {"hidden": 4096, "layers": 32, "heads": 32, "ffn": 11008, "vocab": 151936},
    "qwen-14b": {"hidden": 5120, "layers": 40, "heads": 40, "ffn": 13696, "vocab": 152064},
    "qwen-72b": {"hidden": 8192, "layers": 80, "heads": 64, "ffn": 24576, "vocab": 152064},
}
_HYBRID = ("nemotron-3", "nemotron-h", "mamba", "jamba", "zamba", "falcon-h1", "qwen3-next", "qwen3.8", "lfm")
_GPT_VOCAB = 50_304
"""GPT-2's 50,257 words, padded to 128."""


def architecture(row: Row) -> tuple[ss.Architecture, list[str]]:
    """The model and what had to be assumed about it. Raises ``UnmappedError`` where too little is known."""
    if number(row, "layers") and number(row, "hidden"):
        return _by_shape(row)
    for field in ("model_ref", "model"):
        if row.get(field):
            known = by_name(str(row[field]))
            if known is not None:
                return known, []
    if number(row, "hidden") and number(row, "n_params"):
        return _by_size(row)
    name = text(row, "model_ref") or text(row, "model")
    if any(part in name for part in _HYBRID):
        raise UnmappedError("hybrid model with state-space layers")
    raise UnmappedError(f"model not in the catalogue: {row.get('model') or 'not stated'}")


@lru_cache(maxsize=1024)
def by_name(name: str) -> ss.Architecture | None:
    """The catalogue's model of that name, whatever its spelling; None if there is none."""
    wanted = _plain(name)
    for key in ss.models:
        if _plain(key) == wanted:
            return ss.models[key]
    if wanted in _PLAIN_OTHERS:
        return _qwen_v1(wanted)
    if wanted == _plain("moonlight-16b-a3b"):
        return _moonlight()
    return None


def _plain(name: str) -> str:
    """Without owner, tuning and punctuation: ``meta-llama/Meta-Llama-3-8B`` -> ``llama38b``."""
    name = name.lower().split("/")[-1]
    name = re.sub(r"\(.*?\)|, .*$", "", name).replace("_", ".")
    name = re.sub(r"(?<=\d)\.(?=\d+b\b)", "p", name)
    name = re.sub(r"^l(?=\d)", "llama-", name)
    name = re.sub(r"\b(meta|instruct|chat|base|hf|it|pt)\b|-v0\.1\b", "", name)
    name = re.sub(r"[^a-z0-9p]", "", name.replace("huggyllama", ""))
    # Llama 1 has the shape of Llama 2 at 7B and 13B.
    return {
        "llama7b": "llama27b",
        "llama13b": "llama213b",
        "mistral7bv0p1": "mistral7b",
        "llama370b": "llama3p170b",
    }.get(name, name)


_PLAIN_OTHERS = {_plain(key): key for key in _OTHERS}


def _qwen_v1(plain: str) -> ss.Architecture:
    shape = _OTHERS[_PLAIN_OTHERS[plain]]
    return _llama(_PLAIN_OTHERS[plain], dict(shape), bias=True)


def _moonlight() -> ss.Architecture:
    # huggingface.co/moonshotai/Moonlight-16B-A3B config.json: DeepSeek-V3's layers without a query rank.
    return ss.Architecture(
        name="moonlight-16b-a3b",
        model_type="deepseek_v3",
        hidden_size=2048,
        intermediate_size=11264,
        num_hidden_layers=27,
        num_attention_heads=16,
        num_key_value_heads=16,
        head_dim=64,
        vocab_size=163840,
        max_position_embeddings=8192,
        latent_attention=LatentAttention(
            q_lora_rank=None, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128
        ),
        mixture_of_experts=MixtureOfExperts(
            num_experts=64,
            num_experts_per_tok=6,
            moe_intermediate_size=1408,
            shared_expert_intermediate_size=2816,
            first_k_dense_replace=1,
        ),
    )


def _by_shape(row: Row) -> tuple[ss.Architecture, list[str]]:
    hidden, layers = number(row, "hidden"), number(row, "layers")
    assert hidden and layers
    assumed: list[str] = []
    heads = number(row, "heads")
    if heads is None:
        heads = _likely_heads(hidden, number(row, "tp") or 1)
        assumed.append("heads not stated")
    ffn, vocab = number(row, "ffn"), number(row, "vocab")
    if vocab is None:
        vocab = _GPT_VOCAB
        assumed.append(f"vocabulary not stated: {vocab:,}")
    shape = {"hidden": hidden, "layers": layers, "heads": heads, "ffn": ffn, "vocab": vocab}
    if _is_gpt(row):
        return _gpt(
            str(row.get("model")), {**shape, "ffn": ffn or 4 * hidden}, number(row, "seq_len") or 2048
        ), assumed
    if ffn is None:
        raise UnmappedError("MLP width not stated")
    kv_heads = number(row, "kv_heads") or heads
    one = _llama(str(row.get("model")), shape, kv_heads=kv_heads, tied=False)
    tied = _llama(str(row.get("model")), shape, kv_heads=kv_heads, tied=True)
    stated = number(row, "n_params")
    if stated is None:
        return one, assumed
    found = min((one, tied), key=lambda arch: abs(arch.num_parameters - stated))
    pp = number(row, "pp") or 1
    if "nanotron" in text(row, "framework") and pp > 1:
        first = first_stage_layers(found, pp)
        # Its rows speak of rank 0 only, so that every stage may have as many layers as the first.
        found = replace(found, num_hidden_layers=first * pp)
        assumed.append("stages split by cost, as nanotron does: all like the first")
    return found, assumed


def _by_size(row: Row) -> tuple[ss.Architecture, list[str]]:
    """Layers from parameters, rounded to whole pipeline stages."""
    if not _is_gpt(row):
        raise UnmappedError("layers not stated")
    hidden, stated = number(row, "hidden"), number(row, "n_params")
    assert hidden and stated
    vocab, pp = number(row, "vocab") or _GPT_VOCAB, number(row, "pp") or 1
    ideal = (stated - vocab * hidden) / (12 * hidden * hidden)
    layers = max(pp, round(ideal / pp) * pp)
    found, assumed = _by_shape({**row, "layers": layers})
    return found, ["layers not stated: from the parameters", *assumed]


def _is_gpt(row: Row) -> bool:
    return "gpt" in text(row, "model") and "gpt-oss" not in text(row, "model")


def _likely_heads(hidden: int, tp: int) -> int:
    """The number of heads of about 128 that divides the width, and is divided by tp."""
    fitting = [heads for heads in range(tp, hidden // 32 + 1, tp) if hidden % heads == 0]
    if not fitting:
        raise UnmappedError("heads not stated")
    return min(fitting, key=lambda heads: abs(hidden / heads - 128))


def _llama(
    name: str,
    shape: dict[str, object],
    *,
    kv_heads: int | None = None,
    tied: bool = False,
    bias: bool = False,
) -> ss.Architecture:
    hidden, heads = int(str(shape["hidden"])), int(str(shape["heads"]))
    return ss.Architecture(
        name=name,
        model_type="qwen2" if bias else "llama",
        hidden_size=hidden,
        intermediate_size=int(str(shape["ffn"])),
        num_hidden_layers=int(str(shape["layers"])),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads or heads,
        head_dim=hidden // heads,
        vocab_size=int(str(shape["vocab"])),
        max_position_embeddings=2**20,
        tie_word_embeddings=tied,
        attention_bias=bias,
    )


def _gpt(name: str, shape: dict[str, int], seq_len: int) -> ss.Architecture:
    """Megatron's GPT: two-matrix MLP, LayerNorm, biases, learned positions, tied embedding."""
    return ss.Architecture(
        name=name,
        model_type="gpt2",
        hidden_size=shape["hidden"],
        intermediate_size=shape["ffn"],
        num_hidden_layers=shape["layers"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["heads"],
        head_dim=shape["hidden"] // shape["heads"],
        vocab_size=shape["vocab"],
        max_position_embeddings=seq_len,
        tie_word_embeddings=True,
        attention_bias=True,
        attention_output_bias=True,
        mlp_bias=True,
        gated_mlp=False,
        norm="layernorm",
        position_embedding="learned",
    )
