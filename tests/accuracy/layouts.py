"""A row's framework and degrees -> Layout."""

from __future__ import annotations

import re
from typing import NamedTuple

from tests.accuracy.rows import Row, number, text
from tests.accuracy.unmapped import UnmappedError

import shardscope as ss

FAMILIES = ("ddp", "fsdp2", "deepspeed", "megatron")
_NOT_OURS = {
    "zb-": "zero-bubble schedule",
    "zero bubble": "zero-bubble schedule",
    "megatron-fsdp": "Megatron-FSDP",
    "colossalai": "ColossalAI",
    "in-house": "in-house framework",
    "paddle": "Paddle",
}


class Framework(NamedTuple):
    """Whose memory model answers for the row."""

    family: str
    """One of FAMILIES."""
    name: str
    """As the report groups rows: nanotron and Megatron-DeepSpeed apart from Megatron."""


def framework(row: Row) -> Framework:
    """The framework. Raises ``UnmappedError`` for those that we do not model."""
    said = _said(row)
    if not said:
        raise UnmappedError("framework not stated")
    for part, words in _NOT_OURS.items():
        if part in said:
            raise UnmappedError(f"{words} is not modelled")
    for part, family, name in (
        ("nanotron", "megatron", "nanotron"),
        # Megatron's layers and pipeline; ZeRO-1 splits what its distributed optimizer does.
        ("megatron-deepspeed", "megatron", "Megatron-DeepSpeed"),
        ("megatron", "megatron", "Megatron"),
        ("nemo", "megatron", "Megatron"),
        ("fsdp", "fsdp2", "FSDP1" if "fsdp1" in said else "FSDP2"),
        ("hsdp", "fsdp2", "FSDP2"),
        ("zero", "deepspeed", "DeepSpeed"),
        ("deepspeed", "deepspeed", "DeepSpeed"),
        ("ddp", "ddp", "DDP"),
        ("single", "ddp", "one GPU"),
    ):
        if part in said:
            return Framework(family, name)
    raise UnmappedError(f"framework {row['framework']!r} is not one of ours")


def _said(row: Row) -> str:
    """The framework in the row's words, or those of the script that its source runs."""
    if "QwenLM/Qwen@" in str(row.get("source_url")) and "Full" in str(row.get("table")):
        # finetune/finetune_ds.sh, on one GPU too: ds_config_zero3.json.
        return "deepspeed zero3"
    return text(row, "framework")


def layout(row: Row, kind: Framework, num_layers: int) -> tuple[ss.Layout, list[str]]:
    """The layout and what had to be assumed about it."""
    degrees = {key: number(row, key) or 1 for key in ("tp", "pp", "cp", "ep")}
    said = _said(row)
    if kind.family == "ddp":
        if any(degree > 1 for degree in degrees.values()):
            raise UnmappedError("DDP with other degrees")
        if kind.name == "one GPU" and number(row, "n_gpus") != 1:
            raise UnmappedError("one GPU that are several")
        return ss.Layout.ddp(), []
    vpp, assumed = _vpp(row, said, degrees["pp"], num_layers)
    if kind.family == "fsdp2":
        if degrees["ep"] > 1:
            raise UnmappedError("FSDP with expert parallelism")
        return ss.Layout.fsdp2(
            tp=degrees["tp"],
            pp=degrees["pp"],
            vpp=vpp,
            cp=degrees["cp"],
            reshard_after_forward="grad_op" not in said,
            offload="cpu" if "cpu" in text(row, "offload") else None,
        ), assumed
    if kind.family == "deepspeed":
        return _zero(row, said, degrees), assumed
    return ss.Layout.megatron(
        **degrees,
        vpp=vpp,
        sequence_parallel=_sequence_parallel(row, kind, degrees["tp"]),
        distributed_optimizer=_distributed_optimizer(said, kind),
        **_expert_tp(row, degrees),
    ), assumed


def _expert_tp(row: Row, degrees: dict[str, int]) -> dict[str, int]:
    """Experts whole on each rank, where their parallelism leaves no room for the others' tp."""
    replicas = (number(row, "n_gpus") or 1) // (degrees["tp"] * degrees["pp"])
    whole = degrees["ep"] > 1 and degrees["tp"] > 1 and replicas % degrees["ep"] != 0
    return {"etp": 1} if whole else {}


def _vpp(row: Row, said: str, pp: int, num_layers: int) -> tuple[int, list[str]]:
    stated = number(row, "vpp")
    if stated is not None or pp == 1:
        return stated or 1, []
    if "interleaved" not in said and "1f1b-i" not in said:
        return 1, []
    for extra in (0, 2, 1):
        if (num_layers + extra) % pp == 0:
            return (num_layers + extra) // pp, ["interleaved, chunks not stated: one layer each"]
    raise UnmappedError("interleaved schedule without its chunks")


def _zero(row: Row, said: str, degrees: dict[str, int]) -> ss.Layout:
    stages = set(re.findall(r"zero[- _]?([0-3])", said)) | set(re.findall(r"/([0-3])\b", said))
    if len(stages) != 1:
        raise UnmappedError("ZeRO stage not stated" if not stages else "several ZeRO stages in one row")
    if degrees["cp"] > 1:
        raise UnmappedError("ZeRO with context parallelism")
    moved = text(row, "offload")
    return ss.Layout.zero(
        stage=int(stages.pop()),
        tp=degrees["tp"],
        pp=degrees["pp"],
        ep=degrees["ep"],
        offload_optimizer="cpu"
        if moved and moved != "false" and ("opt" in moved or "cpu" in moved)
        else None,
        offload_params="cpu" if "param" in moved else None,
    )


def _sequence_parallel(row: Row, kind: Framework, tp: int) -> bool | None:
    stated = row.get("sequence_parallel")
    if tp == 1:
        return None
    if isinstance(stated, bool):
        return stated
    # Megatron-DeepSpeed of 2021 and 2022 has no sequence parallelism (Korthikanti et al. came later).
    return False if kind.name == "Megatron-DeepSpeed" else None


def _distributed_optimizer(said: str, kind: Framework) -> bool:
    if "zero0" in said:
        return False
    if "zero1" in said or kind.name == "Megatron-DeepSpeed":
        return True
    # Plain "megatron" in papers before 2023 has none; Megatron-Bridge and NeMo have it by default.
    return any(part in said for part in ("bridge", "nemo", "core", "distributed optimizer"))
