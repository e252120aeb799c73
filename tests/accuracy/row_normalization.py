"""A row as its source spelled it -> the same with numbers as numbers, flags as flags, no placeholders."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

COUNTS = (
    "dp",
    "tp",
    "pp",
    "vpp",
    "cp",
    "ep",
    "micro_batch",
    "global_batch",
    "grad_accum",
    "n_params",
    "layers",
    "hidden",
    "heads",
    "kv_heads",
    "ffn",
    "vocab",
    "seq_len",
    "gpu_mem_gb",
    "n_gpus",
    "nodes",
    "zero_stage",
)
"""Keys whose values are whole numbers, or in the case of memory and parameters any."""
_MEASURED = ("peak_memory_gib", "step_time_s", "tokens_per_s_per_gpu")
_FLAGS = (
    "torch_compile",
    "sequence_parallel",
    "flash_attention",
    "activation_checkpointing",
    "lora",
    "qlora",
)
_WORDS = ("framework", "precision", "optimizer", "activation_checkpointing", "offload", "model", "gpu")
_NOT_SAID = {"", "-", "–", "—", "?", "n/a", "na", "nan", "null", "unknown", "unspecified", "tbd", "auto"} | {
    f"not {word}" for word in ("stated", "specified", "given", "reported", "known", "available", "mentioned")
}
_NOTHING_IS_NONE = (*COUNTS, *_MEASURED, "framework", "precision", "optimizer", "model", "model_ref", "gpu")
"""Keys for which "none" says nothing, where for others it is a choice."""
_YES = {"true", "yes", "on", "enabled", "y"}
_NO = {"false", "no", "off", "disabled", "n"}
_THOUSANDS = re.compile(r"(?<=\d)[,_](?=\d{3}\b)")
_NUMBER = re.compile(
    r"[~≈]?\s*(\d+(?:\.\d+)?(?:e\+?\d+)?)\s*([kmbt]?)(?:[- ]?([a-z]+))?(?: per (?:gpu|device|rank))?"
)
_TIMES = re.compile(r"(\d+)\s*[x×*]\s*(\d+)")
_UNITS = {
    *("gb", "gib", "g", "gpus", "gpu", "tokens", "token", "tok", "layers", "nodes", "node", "params"),
    *("parameters", "samples", "sequences", "seqs", "heads", "steps", "ways", "way"),
}
_DECIMAL = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}


def normalize_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row in the form that every reader here takes; values that cannot be read stay.

    Numbers may be text ("8", "8.0", "4,096", "8k", "70B", "80 GB", "4x8"), lists of one, or floats; flags may
    be words; lists of words become one text; "n/a" and its like become a missing key.
    """
    results: dict[str, Any] = {}
    for key, value in row.items():
        value = value[0] if isinstance(value, list | tuple) and len(value) == 1 else value
        if value is None or _says_nothing(key, value):
            continue
        if key in COUNTS or key in _MEASURED:
            value = _parse_number(key, value)
        elif key in _WORDS and isinstance(value, list | tuple):
            value = " + ".join(map(str, value))
        if key in _FLAGS:
            value = _parse_flag(value)
        results[key] = value
    return results


def _says_nothing(key: str, value: object) -> bool:
    if isinstance(value, float) and math.isnan(value):
        return True
    if not isinstance(value, str):
        return isinstance(value, list | tuple) and not value
    text = value.strip().lower()
    return text in _NOT_SAID or (text == "none" and key in _NOTHING_IS_NONE)


def _parse_number(key: str, value: object) -> object:
    if not isinstance(value, str):
        return value
    text = _THOUSANDS.sub("", value.strip().lower())
    # "2048 (packed)", "max 4096".
    text = re.sub(r"^(?:max(?:imum)?|up to|<=|≤|about|ca\.?)\s*|\s*\([^()]*\)$", "", text)
    if product := _TIMES.fullmatch(text):
        return int(product[1]) * int(product[2]) if key in ("n_gpus", "global_batch") else value
    if key == "peak_memory_gib" and (mib := re.fullmatch(r"([\d.]+)\s*mi?b", text)):
        return float(mib[1]) / 1024
    match = _NUMBER.fullmatch(text)
    if not match or (match[3] and match[3] not in _UNITS):
        return value
    # A sequence of 8k tokens has 8,192; a vocabulary of 128k and 70B parameters are round thousands.
    unit = 1024 if match[2] == "k" and key == "seq_len" else _DECIMAL[match[2]]
    number = float(match[1]) * unit
    return int(number) if number.is_integer() else number


def _parse_flag(value: object) -> object:
    if isinstance(value, str):
        text = value.strip().lower()
        return True if text in _YES else False if text in _NO else value
    # bool is left as it is; 1 and 0 mean the same.
    return bool(value) if isinstance(value, int) and value in (0, 1) else value
