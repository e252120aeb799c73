"""A row's fields of LoRA and quantized bases -> recipe fields."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tests.accuracy.defaults import read_default
from tests.accuracy.frameworks import Framework
from tests.accuracy.own_code import is_four_bit
from tests.accuracy.rows import Row, join_fields, read_number
from tests.accuracy.unmapped_rows import UnmappedError

import shardscope as ss

_NOT = ("", "false", "none", "no", "0")
_LETTERS = {
    spelled: f"{name}_proj"
    for name, spellings in {
        "q": ("q", "query", "wq"),
        "k": ("k", "key", "wk"),
        "v": ("v", "value", "wv"),
        "o": ("o", "output", "output_proj", "wo"),
        "gate": ("gate", "w1"),
        "up": ("up", "w3"),
        "down": ("down", "w2"),
    }.items()
    for spelled in spellings
}
"""Other names of Llama's projections."""
_FUSED: dict[str, tuple[str, ...]] = {
    "q_proj": ("qkv_proj", "query_key_value", "c_attn"),
    "o_proj": ("dense", "c_proj"),
    "gate_proj": ("gate_up_proj",),
}
"""A projection, and what models call the matrix that has it."""
QUANTISED = re.compile(
    r"nf4|fp4|gptq|\b4[- ]?bits?\b|int4|load_in_4bit|\bbnb|bitsandbytes|\bint8\b|\b8[- ]?bits?\b|llm\.int8"
)
_STRANGE = re.compile(r"\b[12356][- ]?bits?\b|aqlm|\bhqq|quip|loftq|eetq|\bawq|higgs|vptq")
_TARGET_KEYS = ("targets", "target_modules", "lora_target", "target", "modules", "layers")
_MLP = ("gate_proj", "up_proj", "down_proj")


def with_adapters(row: Row) -> Row:
    """The row with ``lora`` and ``qlora`` where only its framework, precision or model's name say so."""
    said, precision = join_fields(row, "framework"), join_fields(row, "precision")
    more: dict[str, Any] = {}
    if not _is_stated(row, "qlora"):
        lora = row.get("lora")
        kind = join_fields(lora, "type", "kind", "method") if isinstance(lora, Mapping) else str(lora).lower()
        if re.search(r"\bqlora\b", f"{said} {kind}") or re.search(
            r"(?:bnb|nf4)[-_ ]?4?bit$", join_fields(row, "model")
        ):
            more["qlora"] = "nf4"
        elif (found := re.search(r"\bnf4\b|\b4[- ]?bit\b|int4", precision)) or (
            row.get("lora") and (found := re.search(r"\b8[- ]?bit\b|\bint8\b", precision))
        ):
            more["qlora"] = found[0]
    if not _is_stated(row, "lora") and (more or re.search(r"\blora\b", said)):
        more["lora"] = True
    return {**row, **more} if more else row


def _is_stated(row: Row, key: str) -> bool:
    return key in row and str(row[key]).lower() not in ("", "none")


def read_adapters(
    row: Row, kind: Framework, arch: ss.Architecture, scripts: Mapping[str, Any], assumed: list[str]
) -> dict[str, Any]:
    """Return the adapter fields of a ``Recipe``, if any. Raises ``UnmappedError`` for other kinds."""
    stated, quantised = row.get("lora"), join_fields(row, "qlora")
    has_base = quantised not in _NOT
    if (
        stated is None or (isinstance(stated, dict) and not stated) or str(stated).lower() in _NOT
    ) and not has_base:
        return {}
    text = "" if isinstance(stated, bool | None) else str(stated).lower()
    lora = stated if isinstance(stated, Mapping) else {"kind": text}
    adapter = str(lora.get("type") or lora.get("peft_type") or "LORA").upper().replace("-", "")
    if "FULL" in adapter or text.startswith("full"):
        return {}
    if adapter not in ("LORA", "QLORA", "RSLORA"):
        raise UnmappedError(f"adapters of another kind: {adapter}")
    if lora.get("use_dora") or "dora" in text.replace("'use_dora': false", ""):
        raise UnmappedError("adapters of another kind: DORA")
    if lora.get("emb_trainable"):
        raise UnmappedError("trains embeddings as well as adapters")
    words = str(lora.get("kind") or "")
    rank = (
        _read_lora_rank(stated, lora, words)
        or scripts.get("rank")
        or read_default(row, "rank", assumed, "LoRA rank")
    )
    if rank is None:
        raise UnmappedError("LoRA rank not stated")
    targets = next((lora[key] for key in _TARGET_KEYS if lora.get(key)), None)
    targets = targets or _said_targets(words) or scripts.get("targets")
    targets = None if str(targets).lower() == "default" else targets
    targets = targets or read_default(row, "targets", assumed, "LoRA targets")
    if not targets:
        assumed.append("LoRA targets not stated: all of attention's")
    fields: dict[str, Any] = {
        "method": "lora",
        "lora_rank": rank,
        "lora_targets": target_names(targets, arch, has_letters=not isinstance(targets, list | tuple)),
    }
    dropout = lora.get("dropout") or lora.get("lora_dropout") or scripts.get("lora_dropout")
    if isinstance(dropout, int | float) and dropout:
        fields["lora_dropout"] = dropout
    if has_base:
        _check_base(row, quantised)
    if has_base and is_four_bit(row):
        # GPTQ keeps 4 bits and group scales, NF4 with double quantisation 4.13.
        fields["method"] = "qlora"
    elif has_base:
        fields["quantization"] = "int8"
    return fields


def _check_base(row: Row, quantised: str) -> None:
    if _STRANGE.search(quantised):
        raise UnmappedError(f"a base quantised as {row['qlora']!r}")
    if quantised not in ("yes", "true", "qlora", "1") and not QUANTISED.search(
        quantised.replace("bnb.", "bnb ")
    ):
        raise UnmappedError(f"a base quantised as {row['qlora']!r}")


def _read_lora_rank(stated: object, lora: Mapping[str, Any], words: str) -> int | None:
    if isinstance(stated, int | float) and not isinstance(stated, bool):
        return read_number({"rank": stated}, "rank")
    for key in ("rank", "r", "lora_r", "lora_rank"):
        value = lora.get(key)
        if isinstance(value, str) and value.strip().isdigit():
            value = int(value)
        found = read_number({key: value}, key)
        if found:
            return found
    match = re.search(r"(?:\br(?:ank)?|lora_r)\s*[=: ]?\s*(\d+)|^(\d+)$", words)
    return int(match[1] or match[2]) if match else None


def _said_targets(words: str) -> str | None:
    """The targets among other words: "r=8 q,v", "rank 16, all linear layers", "r 64, q_proj, v_proj"."""
    if re.search(r"\ball\b", words):
        return "all-linear"
    if named := re.findall(r"\b[a-z_]+_proj\b", words):
        return ",".join(named)
    last = words.split()[-1] if words.split() else ""
    return last if "," in last else None


def target_names(
    targets: object, arch: ss.Architecture, *, has_letters: bool = True
) -> tuple[str, ...] | None:
    """The model's own names of the projections that the row names; None where it names none."""
    if not targets:
        return None
    known = tuple(dict.fromkeys(target for target, _ in arch.lora_shapes))
    text = " ".join(map(str, targets)) if isinstance(targets, list | tuple) else str(targets).split("(")[0]
    text = text.strip().lower()
    if re.fullmatch(r"\W*(?:all|linears?|all\b.*(?:linear|mlp|modules|layers|projections)\w*.*)\W*", text):
        # peft leaves fused experts alone, which are no Linear.
        return tuple(name for name in known if name not in _MLP or not arch.num_moe_layers)
    if text in ("attention", "attn", "all attention", "attention layers"):
        return None
    if re.fullmatch(r"attn ?\+ ?mlp|attention (?:and|\+) mlp|attn,? ?mlp", text):
        return known
    if has_letters and re.fullmatch(r"[qkvo]{2,4}", text):
        text = ",".join(text)
    words = [word for word in re.split(r"[,\s+/]+", text) if word and word != "and"]
    names = [_LETTERS.get(word, word) for word in words]
    if not all(re.fullmatch(r"[a-z_0-9]+", name) for name in names):
        raise UnmappedError(f"LoRA targets {targets!r}")
    return _as_fused(names, known)


def _as_fused(names: list[str], known: tuple[str, ...]) -> tuple[str, ...]:
    """The names, with one fused matrix for those of query, key and value where the model has that instead."""
    if not {"q_proj", "k_proj", "v_proj"} <= set(names) or "q_proj" in known:
        return tuple(names)
    results = []
    for name in names:
        fused = next((own for own in _FUSED.get(name, ()) if own in known), None)
        if name in known or fused:
            results.append(name if name in known else fused or name)
        elif name not in ("k_proj", "v_proj", "up_proj"):
            results.append(name)
    return tuple(results)
