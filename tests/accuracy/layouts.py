"""A row's framework and degrees -> Layout."""

from __future__ import annotations

import re

from tests.accuracy.frameworks import Framework, read_framework_text, zero_stages
from tests.accuracy.row_vocabulary import read_offloaded
from tests.accuracy.rows import Row, join_fields, read_number
from tests.accuracy.unmapped_rows import UnmappedError

import shardscope as ss


def read_layout(row: Row, kind: Framework, num_layers: int) -> tuple[ss.Layout, list[str]]:
    """Return the layout and what had to be assumed about it."""
    degrees = {key: read_number(row, key) or 1 for key in ("tp", "pp", "cp", "ep")}
    words, away = read_framework_text(row), read_offloaded(row) - {"activations"}
    if kind.family == "ddp":
        if any(degree > 1 for degree in degrees.values()):
            raise UnmappedError("DDP with other degrees")
        if kind.name == "one GPU" and read_number(row, "n_gpus") != 1:
            raise UnmappedError("one GPU that are several")
        if away:
            raise UnmappedError(f"{' and '.join(sorted(away))} in host memory without ZeRO or FSDP")
        return ss.Layout.ddp(), []
    vpp, assumed = _read_vpp(row, words, degrees["pp"], num_layers)
    if kind.family == "fsdp2":
        return _read_fsdp(row, words, degrees, vpp, away, assumed), assumed
    if kind.family == "deepspeed":
        return _read_zero(row, words, degrees, away, assumed), assumed
    if away:
        raise UnmappedError("Megatron with its optimizer in host memory")
    return ss.Layout.megatron(
        **degrees,
        vpp=vpp,
        sequence_parallel=_sequence_parallel(row, kind, degrees["tp"]),
        distributed_optimizer=_distributed_optimizer(row, words, kind, assumed),
        **_expert_tp(row, degrees),
    ), assumed


def _read_fsdp(
    row: Row, words: str, degrees: dict[str, int], vpp: int, away: frozenset[str], assumed: list[str]
) -> ss.Layout:
    if degrees["ep"] > 1:
        raise UnmappedError("FSDP with expert parallelism")
    if "nvme" in away:
        raise UnmappedError("FSDP with its state on NVMe")
    if away == {"optimizer"}:
        # CPUOffloadPolicy moves parameters, gradients and optimizer together.
        raise UnmappedError("FSDP with its optimizer alone in host memory")
    num_gpus = read_number(row, "n_gpus") or 1
    replicate = 1
    shard = re.search(r"(?:fsdp\d?|shard\w*)\s*[=:]\s*(\d+)", words)
    if re.search(r"hsdp|hybrid", words):
        if found := re.search(r"replica\w*\s*[=:]\s*(\d+)", words):
            replicate = int(found[1])
        elif not shard:
            # HYBRID_SHARD's own process groups: shards in a node, copies between nodes.
            replicate = read_number(row, "nodes") or max(1, num_gpus // 8)
            assumed.append(f"hybrid sharding: {replicate} copies, one a node")
    if shard:
        other = int(shard[1]) * degrees["tp"] * degrees["pp"] * degrees["cp"]
        if num_gpus % other:
            raise UnmappedError("degrees do not divide the GPUs")
        replicate = num_gpus // other
    keeps = r"grad_op|reshard_after_forward\s*[=:]\s*(?:false|never)|no reshard"
    return ss.Layout.fsdp2(
        tp=degrees["tp"],
        pp=degrees["pp"],
        vpp=vpp,
        cp=degrees["cp"],
        replicate=replicate,
        reshard_after_forward=not re.search(keeps, words),
        offload="cpu" if away else None,
    )


def _expert_tp(row: Row, degrees: dict[str, int]) -> dict[str, int]:
    """Experts whole on each rank, where their parallelism leaves no room for the others' tp."""
    replicas = (read_number(row, "n_gpus") or 1) // (degrees["tp"] * degrees["pp"])
    whole = degrees["ep"] > 1 and degrees["tp"] > 1 and replicas % degrees["ep"] != 0
    return {"etp": 1} if whole else {}


def _read_vpp(row: Row, said: str, pp: int, num_layers: int) -> tuple[int, list[str]]:
    stated = read_number(row, "vpp")
    if stated is not None or pp == 1:
        return stated or 1, []
    if "interleaved" not in said and "1f1b-i" not in said:
        return 1, []
    for extra in (0, 2, 1):
        if (num_layers + extra) % pp == 0:
            return (num_layers + extra) // pp, ["interleaved, chunks not stated: one layer each"]
    raise UnmappedError("interleaved schedule without its chunks")


def _read_zero(
    row: Row, words: str, degrees: dict[str, int], away: frozenset[str], assumed: list[str]
) -> ss.Layout:
    stages = zero_stages(row)
    if len(stages) != 1:
        raise UnmappedError("ZeRO stage not stated" if not stages else "several ZeRO stages in one row")
    if degrees["cp"] > 1:
        raise UnmappedError("ZeRO with context parallelism")
    stage, where = stages.pop(), "nvme" if "nvme" in away else "cpu"
    if not away and "infinity" in words:
        raise UnmappedError("ZeRO-Infinity without what it moves")
    # Whoever says only that ZeRO-3 offloads has the configurations in mind that move both.
    if away - {"nvme"} == {"all"} or away == {"nvme"}:
        away = frozenset({"optimizer", "params"} if stage == 3 else {"optimizer"})
        assumed.append(f"offload: {' and '.join(sorted(away))}")
    return ss.Layout.zero(
        stage=stage,
        tp=degrees["tp"],
        pp=degrees["pp"],
        ep=degrees["ep"],
        offload_optimizer=where if "optimizer" in away else None,
        offload_params=where if "params" in away else None,
    )


def _sequence_parallel(row: Row, kind: Framework, tp: int) -> bool | None:
    stated = row.get("sequence_parallel")
    if tp == 1:
        return None
    if isinstance(stated, bool):
        return stated
    # Megatron-DeepSpeed of 2021 and 2022 has no sequence parallelism (Korthikanti et al. came later).
    return False if kind.name == "Megatron-DeepSpeed" else None


def _distributed_optimizer(row: Row, words: str, kind: Framework, assumed: list[str]) -> bool:
    stages = zero_stages(row)
    if stages:
        return 0 not in stages
    optimizer = join_fields(row, "optimizer")
    if re.search(r"(?:no|without|non|w/o)[- ]*dist", f"{words} {optimizer}"):
        return False
    if "distributed" in f"{words} {optimizer}" or re.search(r"dist[-_ ]?opt", f"{words} {optimizer}"):
        return True
    # Plain "megatron" in papers before 2023 has none; Megatron-Bridge, NeMo and Primus have it by default.
    on = kind.name == "Megatron-DeepSpeed" or any(
        part in words for part in ("bridge", "nemo", "core", "primus")
    )
    assumed.append(f"distributed optimizer not stated: {'on' if on else 'off'}")
    return on
