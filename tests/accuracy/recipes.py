"""A row's training recipe -> Recipe."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tests.accuracy.layouts import Framework
from tests.accuracy.own_code import is_four_bit, is_moonlight_recipe
from tests.accuracy.rows import Row, number, text
from tests.accuracy.unmapped import UnmappedError

import shardscope as ss

# What a source's own public scripts set, where its table leaves it out.
_SCRIPTS: dict[str, dict[str, Any]] = {
    # finetune_lora_single_gpu.sh, finetune_qlora_single_gpu.sh: --gradient_checkpointing True; finetune.py:
    # lora_r=64, lora_dropout=0.05 on c_attn, c_proj, w1, w2, which are all the projections.
    "QwenLM/Qwen@": {
        "activation_checkpointing": "full",
        "rank": 64,
        "lora_dropout": 0.05,
        "targets": "q,k,v,o,gate,up,down",
    },
    # The file itself has lora_dropout 0.0, whatever scenarios.yaml says today.
    "refs/a100_80gb.csv": {"optimizer": "adamw_foreach"},
    # scripts/benchmarks/scenarios-liger.yaml: lora_dropout: 0.1. The Trainer's optimizer then: adamw_torch,
    # which does not fuse.
    "foundation-model-stack/fms-acceleration": {"lora_dropout": 0.1, "optimizer": "adamw_foreach"},
    # examples/pretrain_zero_bubble.sh: --fp16, Megatron's own dropout of 0.1, one layer a chunk. Attention is
    # not said; plain attention is what the calibration rows fit (34 s b h + 5 a s^2 b a layer).
    "2401.10241": {"precision": "fp16", "dropout": 0.1, "flash_attention": False},
}
_TARGETS = {key: f"{key}_proj" for key in ("q", "k", "v", "o", "gate", "up", "down")}


def recipe(row: Row, kind: Framework, data_parallel: int) -> tuple[ss.Recipe, list[str]]:
    """The recipe and what had to be assumed about it. Raises ``UnmappedError`` if it cannot say so."""
    scripts = next((facts for key, facts in _SCRIPTS.items() if key in str(row.get("source_url"))), {})
    assumed: list[str] = []
    # What the row itself says goes before its source's scripts.
    row = {**{key: scripts[key] for key in ("precision", "flash_attention") if key in scripts}, **row}
    seq_len = number(row, "seq_len")
    if seq_len is None:
        raise UnmappedError("sequence length not stated")
    micro, batch = _batches(row, data_parallel)
    adapters = _adapters(row, kind, scripts)
    fields: dict[str, Any] = {
        "seq_len": seq_len,
        "micro_batch_size": micro,
        "global_batch_size": batch,
        **adapters,
        "precision": _precision(row, kind, bool(adapters)),
        "optimizer": _optimizer(row, scripts),
        "kernels": _kernels(row, kind),
        "attention": _attention(row, kind),
        "dropout": scripts.get("dropout", 0.0),
        **_recompute(row, kind, scripts, assumed),
    }
    if fields["kernels"] == "compiled" and (
        fields.get("recompute") == "selective" and fields["precision"] != "fp8-mixed"
    ):
        fields["kernels"] = None
        assumed.append("compiled: not said, for the plan's selective recomputation is of uncompiled modules")
    if "foak" in text(row, "table") and "liger" in text(row, "table"):
        # FMS-acceleration takes Liger's loss only; norms and rotations are kernels of its own.
        fields["loss"] = "fused"
    if is_four_bit(row) and re.search(r"mixtral|moe|a3b", text(row, "model")):
        # transformers 4 had a Linear for each expert, which bitsandbytes quantises; 5 has bare parameters.
        raise UnmappedError("experts in 4 bits, which transformers' modules no longer allow")
    if "gptq" in text(row, "qlora"):
        assumed.append("GPTQ's 4 bits counted as NF4's")
    return ss.Recipe(**fields), assumed


def _batches(row: Row, data_parallel: int) -> tuple[int, int]:
    micro, batch, steps = (number(row, key) for key in ("micro_batch", "global_batch", "grad_accum"))
    if micro is None and batch and steps and batch % (data_parallel * steps) == 0:
        micro = batch // (data_parallel * steps)
    if micro is None:
        raise UnmappedError("micro-batch not stated")
    if batch is None:
        pp = number(row, "pp") or 1
        if steps is None and pp > 1:
            raise UnmappedError("micro-batches in a step not stated")
        batch = micro * data_parallel * (steps or 1)
    if batch % (micro * data_parallel):
        raise UnmappedError("global batch is no multiple of micro-batch x data-parallel ranks")
    return micro, batch


def _adapters(row: Row, kind: Framework, scripts: Mapping[str, Any]) -> dict[str, Any]:
    lora, quantised = row.get("lora"), text(row, "qlora")
    if not lora and quantised in ("", "false", "none"):
        return {}
    lora = lora if isinstance(lora, Mapping) else {}
    adapter = str(lora.get("type") or "LORA").upper()
    if "FULL" in adapter:
        return {}
    if adapter not in ("LORA", "QLORA"):
        raise UnmappedError(f"adapters of another kind: {adapter}")
    if lora.get("emb_trainable"):
        raise UnmappedError("embeddings trained beside adapters")
    said = str(lora.get("kind") or "")
    rank = number(lora, "rank") or (int(found[1]) if (found := re.search(r"r=(\d+)", said)) else None)
    rank = rank or scripts.get("rank")
    if rank is None:
        raise UnmappedError("LoRA rank not stated")
    targets = lora.get("targets") or (said.split()[-1] if "," in said else None) or scripts.get("targets")
    fields: dict[str, Any] = {"method": "lora", "lora_rank": rank, "lora_targets": _target_names(targets)}
    if scripts.get("lora_dropout"):
        fields["lora_dropout"] = scripts["lora_dropout"]
    if is_four_bit(row):
        # GPTQ keeps 4 bits and group scales, NF4 with double quantisation 4.13. FSDP2 refuses what FSDP1
        # sharded as packed numbers: own_code has that.
        fields["method"] = "lora" if kind.name == "FSDP1" else "qlora"
    elif quantised not in ("", "false", "none"):
        fields["quantization"] = "int8"
    return fields


def _target_names(targets: object) -> tuple[str, ...] | None:
    if not targets:
        return None
    words = targets if isinstance(targets, list | tuple) else re.split(r"[,\s]+", str(targets).split("(")[0])
    names = [_TARGETS.get(str(word), str(word)) for word in words if word]
    if not all(re.fullmatch(r"[a-z_]+", name) for name in names):
        raise UnmappedError(f"LoRA targets {targets!r}")
    return tuple(names)


def _precision(row: Row, kind: Framework, adapters: bool) -> str:
    said = text(row, "precision")
    if "fp4" in said:
        raise UnmappedError("4-bit training")
    if kind.family == "megatron" and "fp8 current" in said:
        # Megatron-Bridge's recipe of that name (training/mixed_precision.py).
        raise UnmappedError("fp8 with weights in 8 bits too (fp8_param_gather)")
    if "fp8" in said or "float8" in said:
        return "fp8-mixed"
    half = re.search(r"bf16|bfloat16|fp16|float16|amp|half", said)
    if not half and re.search(r"fp32|tf32|float32", said):
        return "fp32"
    if not said and kind.family in ("ddp", "fsdp2"):
        raise UnmappedError("precision not stated")
    if kind.family in ("megatron", "deepspeed"):
        return "fp16-mixed" if re.search(r"fp16|float16", said) else "bf16-mixed"
    # Under adapters the frozen base is in half precision, and so is a model on one GPU that is loaded so;
    # FSDP keeps what it trains in fp32 (Accelerate's own upcast), unless the row says otherwise.
    if kind.family == "ddp" and text(row, "table") == "baseline-peft-bnb":
        # peft's prepare_model_for_kbit_training leaves norms, embeddings and head in fp32.
        return "bf16-mixed"
    pure = re.search(r"true|pure", said) and "amp" not in said and "mixed" not in said
    if pure or adapters or (kind.family == "ddp" and "amp" not in said and "mixed" not in said):
        return "bf16"
    return "fp16-mixed" if re.search(r"fp16|float16", said) else "bf16-mixed"


def _optimizer(row: Row, scripts: Mapping[str, Any]) -> str:
    said = text(row, "optimizer").replace("-", "_")
    if "8bit" in said or "8_bit" in said:
        return "paged_adamw_8bit" if "paged" in said else "adamw_8bit"
    if "paged" in said:
        return "paged_adamw"
    for name in ("adafactor", "muon", "lion", "sgd"):
        if name in said:
            return name
    if said and "adam" not in said:
        raise UnmappedError(f"optimizer {row['optimizer']!r}")
    return str(scripts.get("optimizer", "adamw"))


def _kernels(row: Row, kind: Framework) -> str | None:
    said = text(row, "table", "framework")
    if kind.family == "megatron":
        return None
    if "liger" in said and "foak" not in said:
        return "liger"
    return "compiled" if row.get("torch_compile") is True else None


def _attention(row: Row, kind: Framework) -> str | None:
    said = row.get("flash_attention")
    if said is None:
        return None
    if said is True or "fa" in str(said).lower().replace("false", ""):
        # Megatron's and PyTorch's own fused kernels keep what FlashAttention keeps.
        return None
    return "eager"


def _recompute(row: Row, kind: Framework, scripts: Mapping[str, Any], assumed: list[str]) -> dict[str, Any]:
    stated = row.get("activation_checkpointing")
    if stated is None:
        stated = scripts.get("activation_checkpointing")
    said = str(stated).lower() if stated is not None else ""
    if said in ("", "unknown"):
        if kind.family != "megatron":
            raise UnmappedError("recomputation not stated")
        assumed.append("recomputation not stated: none")
        return {}
    if said in ("none", "false", "off", "no"):
        return {}
    if said.startswith("full") or said == "true":
        return {"recompute": "full"}
    if "selective" in said:
        what = said.partition(":")[2].strip()
        if (
            kind.family == "megatron"
            and what
            and set(re.split(r"[+,\s]+", what)) - {"core_attn", "core", "attention"}
        ):
            if not is_moonlight_recipe(row):
                raise UnmappedError("selective recomputation of other parts than attention")
            # There the optimizer's step is fuller than any moment of the layers.
            assumed.append("which modules are recomputed is left out: the optimizer's step is the peak")
            return {}
        if "layer" in said and kind.family == "fsdp2":
            return {"recompute": "full", "recompute_interval": 2}
        return {"recompute": "selective"}
    raise UnmappedError(f"recomputation {stated!r}")
