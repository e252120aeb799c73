"""A row's training recipe -> Recipe."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tests.accuracy.adapters import QUANTISED, read_adapters
from tests.accuracy.defaults import find_software, read_default
from tests.accuracy.frameworks import Framework
from tests.accuracy.own_code import is_four_bit, is_moonlight_recipe
from tests.accuracy.row_vocabulary import (
    read_attention,
    read_interval,
    read_offloaded,
    read_optimizer,
    read_recomputation,
)
from tests.accuracy.rows import Row, join_fields, read_number
from tests.accuracy.unmapped_rows import UnmappedError

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
_TOKENS = 100_000
"""A global batch from here on is one in tokens."""
_HALF = re.compile(r"bf-?16|bfloat|fp-?16|float16|\bamp|half|mixed|(?<!\d)16[- _]?(?:bits?|true)|^16$")
_SINGLE = re.compile(r"fp-?32|tf32|float32|(?<!\d)32[- _]?(?:bits?|true)|full precision|^(?:32|single|full)$")
_SELECTIVE = frozenset(
    re.findall(
        r"\w+",
        "selective sac ac activation recompute recomputation checkpointing granularity modules of the te "
        "core attn attention megatron only",
    )
)
"""Words of Megatron's selective recomputation that speak of attention, or of nothing else."""


def read_recipe(
    row: Row, kind: Framework, arch: ss.Architecture, data_parallel: int
) -> tuple[ss.Recipe, list[str]]:
    """Return the recipe and what was assumed. Raises ``UnmappedError`` if a recipe cannot express the row."""
    scripts = next((facts for key, facts in _SCRIPTS.items() if key in str(row.get("source_url"))), {})
    assumed: list[str] = []
    # What the row itself says goes before its source's scripts.
    stated = {key: value for key, value in row.items() if value is not None}
    row = {**{key: scripts[key] for key in ("precision", "flash_attention") if key in scripts}, **stated}
    seq_len = read_number(row, "seq_len")
    if seq_len is None:
        raise UnmappedError("sequence length not stated")
    micro, batch = _read_batches(row, data_parallel)
    what = read_adapters(row, kind, arch, scripts, assumed)
    fields: dict[str, Any] = {
        "seq_len": seq_len,
        "micro_batch_size": micro,
        "global_batch_size": batch,
        **what,
        "precision": _read_precision(row, kind, bool(what), assumed),
        "optimizer": _read_optimizer(row, kind, scripts, assumed),
        "kernels": _read_kernels(row, kind),
        "attention": _read_attention(row, kind, assumed),
        "dropout": scripts.get("dropout", 0.0),
        **_read_recompute(row, kind, scripts, assumed),
    }
    if kind.family != "megatron":
        loss = read_default(row, "loss", assumed, "loss")
        fields |= {"loss": loss} if loss else {}
    if fields["kernels"] == "compiled" and (
        fields.get("recompute") == "selective" and fields["precision"] != "fp8-mixed"
    ):
        fields["kernels"] = None
        assumed.append("compilation left out: the plan's selective recomputation is of uncompiled modules")
    if "foak" in join_fields(row, "table") and "liger" in join_fields(row, "table"):
        # FMS-acceleration takes Liger's loss only; norms and rotations are kernels of its own.
        fields["loss"] = "fused"
    if is_four_bit(row) and re.search(r"mixtral|moe|a3b", join_fields(row, "model")):
        # transformers 4 had a Linear for each expert, which bitsandbytes quantises; 5 has bare parameters.
        raise UnmappedError("4-bit experts, which transformers' modules no longer support")
    if "gptq" in join_fields(row, "qlora"):
        assumed.append("GPTQ's 4-bit weights predicted as NF4")
    return ss.Recipe(**fields), assumed


def _read_batches(row: Row, data_parallel: int) -> tuple[int, int]:
    micro, batch, steps = (read_number(row, key) for key in ("micro_batch", "global_batch", "grad_accum"))
    if micro is None and batch and steps and batch % (data_parallel * steps) == 0:
        micro = batch // (data_parallel * steps)
    if micro is None and batch == data_parallel:
        micro = 1
    if micro is None:
        raise UnmappedError("micro-batch not stated")
    seq_len = read_number(row, "seq_len")
    if batch and seq_len and batch >= _TOKENS and batch % seq_len == 0:
        batch //= seq_len
    if batch is None:
        pp = read_number(row, "pp") or 1
        if steps is None and pp > 1:
            raise UnmappedError("micro-batches in a step not stated")
        batch = micro * data_parallel * (steps or 1)
    if batch % (micro * data_parallel):
        raise UnmappedError("global batch is no multiple of micro-batch x data-parallel ranks")
    return micro, batch


def _read_precision(row: Row, kind: Framework, adapters: bool, assumed: list[str]) -> str:
    text = join_fields(row, "precision")
    if re.search(r"float8|fp8", join_fields(row, "framework")) and not re.search(r"8|fp4", text):
        # "FSDP2 + Float8".
        text = f"fp8 {text}"
    if refused := re.search(r"fp4|int8[- ](?:train|mixed)|fp6|1[- ]?bit|ternary|\bqat\b", text):
        raise UnmappedError("4-bit training" if refused[0] == "fp4" else f"precision {row['precision']!r}")
    if re.search(r"fp8[-_ ]?(?:param|weight|primary|optim|lm\b)|ms-?amp|\bcoat\b", text) or (
        kind.family == "megatron" and "fp8 current" in text
    ):
        # Megatron-Bridge's recipe of that name (training/mixed_precision.py).
        raise UnmappedError("fp8 with weights in 8 bits too (fp8_param_gather)")
    if "fp8" in text or "float8" in text:
        return "fp8-mixed"
    half = _HALF.search(text)
    if not half and _SINGLE.search(text):
        return "fp32"
    if text and not half and not (adapters and QUANTISED.search(text)):
        raise UnmappedError(f"precision {row['precision']!r}")
    if not text and kind.family in ("ddp", "fsdp2"):
        own = read_default(row, "precision", assumed, "precision")
        if own is None and not adapters:
            raise UnmappedError("precision not stated")
        if own is None:
            assumed.append("precision not stated: bf16 under adapters")
        text = str(own or "bf16")
    elif not text:
        assumed.append("precision not stated: bf16-mixed")
    is_fp16 = re.search(r"(?<!b)fp-?16|(?<!b)float16|(?<![a-z\d-])16[- _]?mixed", text)
    if kind.family in ("megatron", "deepspeed"):
        return "fp16-mixed" if is_fp16 else "bf16-mixed"
    # A model on one GPU is in half precision if it is loaded so; FSDP keeps what it trains in fp32
    # (Accelerate's own upcast), unless the row says otherwise. Adapters are in fp32 over a frozen base in
    # half: peft's own (autocast_adapter_dtype), and a GradScaler takes no others. Not over int8, which the
    # product plans without autocast.
    mixed = bool(re.search(r"\bamp|mixed|master", text))
    known = find_software(row)
    says_pure = re.search(r"\d[-_ ]true|pure|full bf16|stochastic", text)
    if known and known.facts.get("mixed") and not (adapters or mixed or says_pure):
        assumed.append(f"weights that train in fp32, as {known.name} casts them")
        mixed = True
    pure = (says_pure or (known and known.facts.get("precision") == "bf16")) and not mixed
    is_int8 = adapters and join_fields(row, "qlora") not in ("", "false", "none") and not is_four_bit(row)
    if pure or is_int8 or (kind.family == "ddp" and not mixed and not adapters):
        if not adapters and not pure:
            assumed.append("weights in half precision too")
        return "bf16"
    return "fp16-mixed" if is_fp16 else "bf16-mixed"


def _read_optimizer(row: Row, kind: Framework, scripts: Mapping[str, Any], assumed: list[str]) -> str:
    if re.search(
        r"(?:optim\w*|step)[-_ ](?:in|fused[-_ ]into)[-_ ](?:the[-_ ])?(?:bwd|backward)",
        join_fields(row, "table", "framework"),
    ):
        raise UnmappedError("an optimizer that steps inside backward")
    found, is_stated = read_optimizer(row, kind.family, str(scripts.get("optimizer", "adamw")))
    if row.get("optimizer") is None and "optimizer" not in scripts:
        assumed.append("optimizer not stated: AdamW")
    if is_stated or "optimizer" in scripts or kind.family in ("deepspeed", "megatron"):
        return found
    # torch.optim.AdamW without a word takes its multi-tensor operations on a GPU.
    known = find_software(row)
    own = known.facts.get("optimizer") if known else None
    name = known.name if known and own else "PyTorch"
    own = str(own or "adamw_foreach")
    assumed.append(f"AdamW's kernel not stated: {own}, which is {name}'s own")
    return own


def _read_kernels(row: Row, kind: Framework) -> str | None:
    text = join_fields(row, "table", "framework")
    if kind.family == "megatron":
        return None
    if "liger" in text and "foak" not in text:
        return "liger"
    return "compiled" if row.get("torch_compile") is True else None


def _read_attention(row: Row, kind: Framework, assumed: list[str]) -> str | None:
    found, is_default = read_attention(row, kind.family)
    if is_default:
        assumed.append("no FlashAttention: PyTorch's own fused attention")
    return found


def _read_recompute(
    row: Row, kind: Framework, scripts: Mapping[str, Any], assumed: list[str]
) -> dict[str, Any]:
    stated = row.get("activation_checkpointing")
    if stated is None:
        stated = scripts.get("activation_checkpointing")
    if stated is None:
        stated = read_default(row, "recompute", assumed, "recomputation")
    if stated is None:
        if kind.family != "megatron":
            raise UnmappedError("recomputation not stated")
        assumed.append("recomputation not stated: none")
        return {}
    text = str(stated).lower()
    fields = _read_selective(row, kind, text, assumed)
    if fields is None:
        fields = read_recomputation(stated, kind.family)
    if "activations" in read_offloaded(row):
        if fields:
            raise UnmappedError("recomputation whose layer inputs are in host memory: no formula")
        return {"recompute": "offload"}
    return fields


def _read_selective(row: Row, kind: Framework, said: str, assumed: list[str]) -> dict[str, Any] | None:
    """Return the fields for selective recomputation; None if the text names another kind."""
    plain = r"|^(?:recompute[-_ ]|core[-_ ])*att(?:n|ention)\b" if kind.family == "megatron" else ""
    if not re.search(rf"selective|\bsac\b|core[-_ ]att{plain}", said) or re.search(r"offload|^no", said):
        return None
    if every := read_interval(said):
        # Whole layers, every so-manieth, go by that name too.
        return every
    what = set(re.findall(r"[a-z]+", said)) - _SELECTIVE
    if kind.family == "megatron" and what:
        if not is_moonlight_recipe(row):
            raise UnmappedError("selective recomputation of other parts than attention")
        # There the optimizer's step is fuller than any moment of the layers.
        assumed.append("which modules are recomputed is left out: the optimizer's step is the peak")
        return {}
    if "layer" in said and kind.family == "fsdp2":
        return {"recompute": "full", "recompute_interval": 2}
    return {"recompute": "selective"}
