"""Hugging Face's config.json, one small adapter for each ``model_type``.

Each adapter gives the fields that the family's own ``configuration_*.py`` and ``modeling_*.py`` in
transformers 5 build parameters from; defaults are theirs, except for sizes, which must be given: a model
made of default sizes is never the model that somebody meant.
"""

from __future__ import annotations

import json
import re
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from shardscope.architecture import LIMITS, MODEL_TYPES, Architecture
from shardscope.serialization import _no_duplicates
from shardscope.validation import flag, nearest, refuse, whole_number

MAX_BYTES = 1_000_000
"""Real configs are some kilobytes; anything larger is not one."""

Fields = dict[str, Any]


class HfConfig:
    """The keys of one config.json; null stands for a missing key, as in transformers."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        self.data = data

    def get(self, *keys: str, default: Any = None) -> Any:
        """The first of ``keys`` that is there (later ones are the family's aliases), else ``default``."""
        return next((self.data[key] for key in keys if self.data.get(key) is not None), default)

    def size(self, *keys: str, limit: str, default: int | None = None) -> int:
        """A size in its allowed range; refused if missing without a ``default``."""
        low, high = LIMITS[limit]
        key = next((key for key in keys if self.data.get(key) is not None), None)
        if key is None and default is None:
            refuse(
                f"config.json {keys[0]}", None, f"a whole number from {low:,} to {high:,}", f"add {keys[0]!r}"
            )
        value = default if key is None else self.data[key]
        return whole_number(f"config.json {key or keys[0]}", value, low=low, high=high)

    def flag(self, key: str, default: bool) -> bool:
        """True or False."""
        return flag(f"config.json {key}", self.get(key, default=default))


def load(config: str | Path | Mapping[str, Any]) -> Architecture:
    """See :meth:`shardscope.architecture.Architecture.from_hf`."""
    if isinstance(config, Mapping):
        return from_dict(config, None)
    if not isinstance(config, str | Path) or not str(config).strip() or "\0" in str(config):
        allowed = "a path to config.json, its folder, a dict, or a hub id"
        refuse("config", config, allowed, "Architecture.from_hf('folder/config.json')")
    path = Path(config).expanduser()
    if path.exists():
        file = path / "config.json" if path.is_dir() else path
        return from_dict(read(file), _called(file.absolute()))
    if isinstance(config, str) and re.fullmatch(r"[\w.-]+/[\w.-]+", config, re.A) and path.suffix != ".json":
        return from_dict(read(_from_hub(config)), config)
    allowed = "a file or folder that exists, or a hub id 'org/name'"
    return refuse("config", str(config), allowed, "check the spelling")


def _called(file: Path) -> str:
    """A name for what stands in ``file``: its folder's, or the hub id of a folder in the hub's cache."""
    if file.name != "config.json":
        return file.stem
    folder = file.parent
    if folder.parent.name == "snapshots" and folder.parent.parent.name.startswith("models--"):
        return folder.parent.parent.name.removeprefix("models--").replace("--", "/")
    return folder.name


def read(file: Path) -> Mapping[str, Any]:
    """The JSON object in ``file``. Raises ``ValueError`` naming the line for anything else."""
    try:
        status = file.stat()
        if not stat.S_ISREG(status.st_mode):  # a FIFO would block, a device never ends
            refuse("config", str(file), "a regular file", "the path of a config.json")
        if status.st_size > MAX_BYTES:
            refuse(
                "config", str(file), f"at most {MAX_BYTES:,} bytes, not {status.st_size:,}", "a config.json"
            )
        with file.open("rb") as stream:
            text = stream.read(MAX_BYTES + 1).decode("utf-8-sig")  # -sig: Windows editors add a mark
    except FileNotFoundError:
        refuse("config", str(file), "a folder that holds a config.json", "the path of the file itself")
    except OSError as error:
        raise ValueError(f"config {file} cannot be read: {error.strerror or error}.") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"config {file} is not UTF-8 at byte {error.start}; save it as UTF-8.") from error
    try:
        data = json.loads(text, object_pairs_hook=_no_duplicates)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise ValueError(f"config {file}, {where}: {error.msg}.") from error
    except RecursionError as error:
        raise ValueError(f"config {file} is nested too deeply to be a config.json.") from error
    except ValueError as error:
        raise ValueError(f"config {file}{_line_of(text, error)}: {error}") from error
    if not isinstance(data, dict):
        refuse("config", str(file), "a file that holds one JSON object", "a config.json")
    return data


def from_dict(data: Mapping[str, Any], name: str | None) -> Architecture:
    """The architecture of a config's keys; ``name`` is used if the config does not say its own."""
    family = data.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        known = ", ".join(FAMILIES)
        for part in ("text_config", "llm_config", "language_config", "thinker_config"):
            if isinstance(data.get(part), Mapping):
                fix = f"its language model alone, from_hf(config[{part!r}]), if its model_type is known"
                refuse("config.json model_type", family, f"a language model, not a wrapper: {known}", fix)
        fix = f"{nearest(family, list(FAMILIES))!r} if its layers are the same"
        refuse("config.json model_type", family, f"known architectures: {known}", fix)
    config = HfConfig(data)
    called = name or config.get("_name_or_path") or family
    if not isinstance(called, str):
        refuse("config.json _name_or_path", called, "text", repr(family))
    fields = {"name": called, "model_type": family, **FAMILIES[family](config)}
    return Architecture.from_dict(fields)


def _line_of(text: str, error: ValueError) -> str:
    """ ", line 7" for a duplicate key: where it stands the second time."""
    key = re.search(r"JSON key '(.+?)' stands twice", str(error))
    places = [m.start() for m in re.finditer(re.escape(json.dumps(key[1])) + r"\s*:", text)] if key else []
    return f", line {text.count(chr(10), 0, places[1]) + 1}" if len(places) > 1 else ""


def _from_hub(hub_id: str) -> Path:
    try:
        from huggingface_hub import hf_hub_download, try_to_load_from_cache
    except ImportError as error:
        wanted = 'pip install "shardscope[train]", or pass the path of a config.json'
        raise ValueError(f"Reading {hub_id!r} from the hub needs huggingface_hub: {wanted}.") from error
    try:
        cached = try_to_load_from_cache(hub_id, "config.json")
        return Path(cached if isinstance(cached, str) else hf_hub_download(hub_id, "config.json"))
    except Exception as error:  # offline, gated, misspelt: the hub has a class of its own for each
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        fix = "pass the path of its config.json, or check the name, the network and `hf auth login`"
        raise ValueError(
            f"config.json of {hub_id!r} could not be had from the hub: {reason} Fix: {fix}."
        ) from error


# ------------------------------------------------------------------------------------------- families


def _sizes(c: HfConfig, *, kv_heads: int | None, positions: int) -> Fields:
    """What all families but GPT-2 spell alike; ``kv_heads`` None: as many as query heads."""
    hidden = c.size("hidden_size", limit="hidden_size")
    heads = c.size("num_attention_heads", limit="num_attention_heads")
    default_kv = heads if kv_heads is None or _given_null(c, "num_key_value_heads") else kv_heads
    return {
        "hidden_size": hidden,
        "intermediate_size": c.size("intermediate_size", limit="intermediate_size"),
        "num_hidden_layers": c.size("num_hidden_layers", limit="num_hidden_layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": c.size("num_key_value_heads", limit="num_key_value_heads", default=default_kv),
        "head_dim": c.size("head_dim", limit="head_dim", default=max(1, hidden // heads)),
        "vocab_size": c.size("vocab_size", limit="vocab_size"),
        "max_position_embeddings": c.size(
            "max_position_embeddings", limit="max_position_embeddings", default=positions
        ),
        "tie_word_embeddings": c.flag("tie_word_embeddings", False),
    }


def _given_null(c: HfConfig, key: str) -> bool:
    return key in c.data and c.data[key] is None


def _even_heads(fields: Fields) -> Fields:
    """LlamaConfig, Gemma2Config and GPT2Attention refuse a width that the heads do not divide."""
    hidden, heads = fields["hidden_size"], fields["num_attention_heads"]
    if hidden % heads:
        refuse("config.json hidden_size", hidden, f"a multiple of num_attention_heads={heads}",
               f"{max(1, round(hidden / heads)) * heads}")  # fmt: skip
    return fields


def _window(c: HfConfig, fields: Fields, *, default: int | None, layers: Callable[[int], int]) -> Fields:
    """``default`` holds only while the key is missing: null switches the window off."""
    value = c.data.get("sliding_window", default)
    if value is None:
        return fields
    window = c.size("sliding_window", limit="max_position_embeddings", default=value)
    types = c.get("layer_types")
    total = fields["num_hidden_layers"]
    count = layers(total)
    if isinstance(types, list | tuple):
        count = sum(kind == "sliding_attention" for kind in types[:total])
    return {**fields, "sliding_window": window if count else None, "sliding_window_layers": count}


def _bias(c: HfConfig) -> Fields:
    bias = c.flag("attention_bias", False)
    return {"attention_bias": bias, "attention_output_bias": bias}


def llama(c: HfConfig) -> Fields:
    """LlamaConfig: Llama 1 to 3.3 and the many models that share its layers."""
    fields = _even_heads(_sizes(c, kv_heads=None, positions=2_048))
    return {**fields, **_bias(c), "mlp_bias": c.flag("mlp_bias", False)}


def mistral(c: HfConfig) -> Fields:
    """MistralConfig: a window of 4096 unless the key says null."""
    fields = _sizes(c, kv_heads=8, positions=131_072)
    return _window(c, fields, default=4_096, layers=lambda total: total)


def mixtral(c: HfConfig) -> Fields:
    """MixtralConfig: ``intermediate_size`` is that of one expert; every layer is MoE."""
    fields = _sizes(c, kv_heads=8, positions=131_072)
    fields["mixture_of_experts"] = {
        "num_experts": c.size("num_local_experts", "num_experts", limit="num_experts", default=8),
        "num_experts_per_tok": c.size("num_experts_per_tok", limit="num_experts", default=2),
        "moe_intermediate_size": fields["intermediate_size"],
    }
    return _window(c, fields, default=None, layers=lambda total: total)


def _qwen_window(c: HfConfig, fields: Fields, *, from_layer: bool) -> Fields:
    if not c.flag("use_sliding_window", False):
        return fields
    first = c.get("max_window_layers", default=28)
    first = whole_number("config.json max_window_layers", first, low=0, high=LIMITS["num_hidden_layers"][1])
    return _window(
        c, fields, default=4_096, layers=lambda total: max(0, total - first) if from_layer else total
    )


def qwen2(c: HfConfig) -> Fields:
    """Qwen2Config (Qwen 2 and 2.5): query, key and value always have biases; head_dim may be overridden."""
    fields = {**_sizes(c, kv_heads=32, positions=32_768), "attention_bias": True}
    return _qwen_window(c, fields, from_layer=True)


def qwen3(c: HfConfig) -> Fields:
    """Qwen3Config: head_dim is 128 unless given, whatever the width; queries and keys are normalised."""
    fields = {**_sizes(c, kv_heads=32, positions=32_768), **_bias(c), "qk_norm": True}
    fields["head_dim"] = c.size("head_dim", limit="head_dim", default=128)
    return _qwen_window(c, fields, from_layer=True)


def qwen3_moe(c: HfConfig) -> Fields:
    """Qwen3MoeConfig: some layers may stay dense."""
    fields = {**_sizes(c, kv_heads=4, positions=32_768), **_bias(c), "qk_norm": True}
    fields["mixture_of_experts"] = {
        "num_experts": c.size("num_experts", "num_local_experts", limit="num_experts", default=128),
        "num_experts_per_tok": c.size("num_experts_per_tok", limit="num_experts", default=8),
        "moe_intermediate_size": c.size("moe_intermediate_size", limit="moe_intermediate_size", default=768),
        "decoder_sparse_step": c.get("decoder_sparse_step", default=1),
        "mlp_only_layers": c.get("mlp_only_layers", default=()),
    }
    return _qwen_window(c, fields, from_layer=False)


def gemma2(c: HfConfig) -> Fields:
    """Gemma2Config: four norms in each layer, tied by default, every other layer windowed from the first."""
    fields = {**_even_heads(_sizes(c, kv_heads=4, positions=8_192)), **_bias(c), "norms_per_layer": 4}
    fields["tie_word_embeddings"] = c.flag("tie_word_embeddings", True)
    fields["head_dim"] = c.size("head_dim", limit="head_dim", default=256)
    return _window(c, fields, default=4_096, layers=lambda total: (total + 1) // 2)


def phi3(c: HfConfig) -> Fields:
    """Phi3Config: fused projections, no biases."""
    fields = _sizes(c, kv_heads=None, positions=4_096)
    return _window(c, fields, default=None, layers=lambda total: total)


def deepseek_v3(c: HfConfig) -> Fields:
    """DeepseekV3Config: latent attention; the multi-token-prediction module is not in ``ForCausalLM``."""
    fields = {**_sizes(c, kv_heads=None, positions=4_096), **_bias(c)}
    inner = c.size("moe_intermediate_size", limit="moe_intermediate_size", default=2_048)
    shared = whole_number(
        "config.json n_shared_experts", c.get("n_shared_experts", default=1), low=0, high=1_024
    )
    rank = c.data.get("q_lora_rank", 1_536)
    latent = {
        "q_lora_rank": rank,
        "kv_lora_rank": c.get("kv_lora_rank", default=512),
        "qk_nope_head_dim": c.get("qk_nope_head_dim", default=128),
        "qk_rope_head_dim": c.size("qk_rope_head_dim", limit="head_dim", default=64),
        "v_head_dim": c.get("v_head_dim", default=128),
    }
    dense = c.get("first_k_dense_replace", default=3)
    most = fields["num_hidden_layers"]
    if isinstance(dense, int) and not isinstance(dense, bool):
        dense = min(dense, most)  # a small test model of three layers simply has no MoE layer
    fields["mixture_of_experts"] = {
        "num_experts": c.size("n_routed_experts", "num_local_experts", limit="num_experts", default=256),
        "num_experts_per_tok": c.size("num_experts_per_tok", limit="num_experts", default=8),
        "moe_intermediate_size": inner,
        "shared_expert_intermediate_size": inner * shared,
        "first_k_dense_replace": dense,
    }
    return {**fields, "head_dim": latent["qk_rope_head_dim"], "latent_attention": latent}


def gpt2(c: HfConfig) -> Fields:
    """GPT2Config: its own spelling, fused and biased Conv1D projections, learned positions, tied."""
    if c.flag("add_cross_attention", False):
        refuse("config.json add_cross_attention", True, "False: a decoder alone", "False")
    hidden = c.size("n_embd", "hidden_size", limit="hidden_size")
    heads = c.size("n_head", "num_attention_heads", limit="num_attention_heads")
    _even_heads({"hidden_size": hidden, "num_attention_heads": heads})
    return {
        "hidden_size": hidden,
        "intermediate_size": c.size("n_inner", limit="intermediate_size", default=4 * hidden),
        "num_hidden_layers": c.size("n_layer", "num_hidden_layers", limit="num_hidden_layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": hidden // heads,
        "vocab_size": c.size("vocab_size", limit="vocab_size"),
        "max_position_embeddings": c.size(
            "n_positions", "max_position_embeddings", limit="max_position_embeddings", default=1_024
        ),
        "tie_word_embeddings": c.flag("tie_word_embeddings", True),
        "attention_bias": True,
        "attention_output_bias": True,
        "mlp_bias": True,
        "gated_mlp": False,
        "norm": "layernorm",
        "position_embedding": "learned",
    }


FAMILIES: Mapping[str, Callable[[HfConfig], Fields]] = {
    adapter.__name__: adapter
    for adapter in (llama, mistral, mixtral, qwen2, qwen3, qwen3_moe, gemma2, phi3, deepseek_v3, gpt2)
}
assert tuple(FAMILIES) == MODEL_TYPES
