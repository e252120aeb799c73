"""Defaults of the software that ran, for fields that a row lacks: each is reported as assumed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from tests.accuracy.rows import Row, join_fields


class Software(NamedTuple):
    """One trainer and its own defaults, from its documentation and configuration classes."""

    name: str
    pattern: str
    facts: Mapping[str, Any]
    """Its defaults of ``recompute``, ``optimizer``, ``loss``, ``rank``, ``targets`` and ``precision``; with
    ``mixed``, weights that train are in fp32."""


_ALL = "all-linear"
_HUGGING_FACE: dict[str, Any] = {"optimizer": "adamw_foreach"}
"""transformers' ``TrainingArguments.optim`` was adamw_torch until 2025: torch.optim.AdamW as it comes."""


def _make_software(name: str, pattern: str, **facts: Any) -> Software:
    return Software(name, pattern, MappingProxyType(facts))


_KNOWN = (
    # get_peft_model: r=16, seven projections; its loss never has all logits at once.
    _make_software(
        "Unsloth", r"unsloth", **_HUGGING_FACE, rank=16, targets=_ALL, loss="chunked", recompute="unsloth"
    ),
    # hparams/finetuning_args.py: lora_rank 8, lora_target all; model_args.py: checkpointing unless disabled;
    # model/adapter.py: what trains is cast to fp32 but for pure_bf16, ZeRO-3 and FSDP.
    _make_software(
        "LLaMA-Factory",
        r"lla?ma[-_ ]?factory",
        **_HUGGING_FACE,
        rank=8,
        targets=_ALL,
        recompute="full",
        mixed=True,
    ),
    # Its recipes: fused AdamW, CEWithChunkedOutputLoss, adapters of rank 8 on query, value, output and MLP.
    _make_software(
        "torchtune",
        r"torchtune",
        optimizer="adamw",
        loss="chunked",
        rank=8,
        targets="q,v,o,gate,up,down",
        precision="bf16",
    ),
    # DecoupledAdamW steps tensor by tensor.
    _make_software("Composer", r"composer|llm-?foundry|mosaicml", optimizer="adamw"),
    _make_software("torchtitan", r"torchtitan", optimizer="adamw"),
    # finetune/lora.py: lora_r = 8 on query and value.
    _make_software("LitGPT", r"lit-?gpt", rank=8, targets="q,v"),
    # arguments/tuner_args.py: lora_rank 8 on all linear layers; gradient_checkpointing True.
    _make_software(
        "ms-swift", r"ms-?swift|\bswift\b", **_HUGGING_FACE, rank=8, targets=_ALL, recompute="full"
    ),
    _make_software("Axolotl", r"axolotl", recompute="none"),
    # LoraConfig: r = 8, for Llama on query and value.
    _make_software("peft", r"\bpeft\b", **_HUGGING_FACE, rank=8, targets="q,v"),
    # Whether SFTTrainer checkpoints by itself depends on its version.
    _make_software("TRL", r"\btrl\b|sfttrainer", **_HUGGING_FACE),
    # TrainingArguments.gradient_checkpointing is False.
    _make_software(
        "transformers' Trainer",
        r"\btransformers\b|hugging ?face|\bhf[-_ ]trainer|^hf\b|^trainer\b",
        **_HUGGING_FACE,
        recompute="none",
    ),
)


def find_software(row: Row) -> Software | None:
    """Return the trainer that the row's framework names, else that of its source; None if not known."""
    said, about = join_fields(row, "framework"), join_fields(row, "source", "source_url")
    for known in _KNOWN:
        if re.search(known.pattern, said):
            return known
    # Hugging Face's site has pages about all others.
    return next((known for known in _KNOWN[:-1] if re.search(known.pattern, about)), None)


def read_default(row: Row, field: str, assumed: list[str], what: str) -> Any:
    """Return the software's default of a field, noted as assumed; None if it has none or is not known."""
    known = find_software(row)
    if known is None or field not in known.facts:
        return None
    value = known.facts[field]
    assumed.append(f"{what} not stated: {value}, which is {known.name}'s own")
    return value
