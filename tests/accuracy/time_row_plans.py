"""One row -> one Plan whose step is timed, or the reason why there is none.

A step's time hangs on other details than a peak of memory: what moves bytes but hardly seconds (8-bit
copies of weights, recomputed norms, the optimizer's words) is left out and said so, where
:mod:`tests.accuracy.row_plans` refuses it.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from tests.accuracy.adapters import with_adapters
from tests.accuracy.frameworks import Framework, find_framework, with_degrees
from tests.accuracy.layouts import read_layout
from tests.accuracy.megatron_options import megatron_options, with_options
from tests.accuracy.models import whole_architecture
from tests.accuracy.nanotron_layout import NanotronLayout
from tests.accuracy.own_code import own_code
from tests.accuracy.own_rows import read_plan
from tests.accuracy.recipes import read_recipe
from tests.accuracy.row_normalization import normalize_row
from tests.accuracy.row_plans import (
    Mapped,
    call_or_raise_unmapped,
    checked_data_parallel,
    data_parallel,
    stored_type,
)
from tests.accuracy.rows import Row, join_fields, read_number
from tests.accuracy.schedules import with_schedule
from tests.accuracy.time_machines import timed_cluster
from tests.accuracy.unmapped_rows import UnmappedError

import shardscope as ss

_LIGHT = frozenset(["mla_up_proj", "layernorm", "norm", "moe_act", "core_attn", "shared_experts", "act"])
"""Modules whose recomputation Megatron-core offers because it costs hardly any time."""


def map_timed_row(row: Row) -> Mapped:
    """Return the plan whose step the row measured. Raises ``UnmappedError`` if there is none."""
    return call_or_raise_unmapped(_map_checked_row, row)


def _map_checked_row(row: Row) -> Mapped:
    plan = read_plan(row)
    if plan is not None:
        plan.step()
        return Mapped(row, plan, plan.layout.framework, (), ())
    row, schedule, about_schedule = with_schedule(with_degrees(with_adapters(normalize_row(row))))
    kind = find_framework(row)
    row, left_out = _without_what_weighs_little(row, kind)
    row, options = megatron_options(row, kind)
    arch, about_model = whole_architecture(row)
    machines, about_machines = timed_cluster(row)
    row, about_batch = _whole_batches(row, kind, machines.num_gpus)
    spread, about_layout = read_layout(row, kind, arch.num_hidden_layers)
    what, about_recipe = read_recipe(row, kind, arch, data_parallel(row, kind, machines.num_gpus))
    if is_nvidias_own(row):
        options |= {"grad_reduce_in_fp32": False, "cross_entropy_fusion_impl": "te"}
    what, spread = with_options(what, spread, options)
    what, about_type = stored_type(what, spread)
    spread, about_overlap = _with_overlap(row, kind, machines, spread)
    plan, about_plan = _plan(arch, machines, what, spread)
    checked_data_parallel(row, plan)
    assumed = (
        *about_schedule,
        *left_out,
        *about_model,
        *about_machines,
        *about_batch,
        *about_layout,
        *about_overlap,
        *about_recipe,
        *about_type,
        *about_plan,
    )
    return Mapped(row, plan, kind.name, assumed, own_code(row, kind.name, plan.recipe), schedule)


def _without_what_weighs_little(row: Row, kind: Framework) -> tuple[Row, list[str]]:
    """The row in words that a plan has, where the rest costs a step next to no time."""
    changed: dict[str, Any] = {}
    assumed: list[str] = []
    said, about = join_fields(row, "precision"), join_fields(row, "framework", "source")
    if "tf32" in said:
        raise UnmappedError("fp32 weights whose products run in TF32, which no recipe says")
    if re.search(r"fp8|mxfp8|float8", said) and kind.family == "megatron":
        # Delayed, current, blockwise and MX scaling multiply at the same speed; their casts differ.
        changed["precision"] = "fp8"
    again = join_fields(row, "activation_checkpointing")
    modules = set(re.findall(r"[a-z_]+", again)) - {"selective", "and", "recompute", "modules"}
    if kind.family == "megatron" and modules and modules <= _LIGHT and modules != {"core_attn"}:
        changed["activation_checkpointing"] = "none"
        assumed.append(f"recomputation left out: {again}")
    if isinstance(row.get("lora"), dict) and not row["lora"].get("rank") and "automodel" in about:
        # Its examples' match_all_linear with dim 8; a few ranks more are no time.
        changed["lora"] = {"rank": 8, "targets": "q,k,v,o,gate,up,down"}
        assumed.append("LoRA rank not stated: 8 on all projections, as its examples have")
    if not again and kind.family == "fsdp2" and "automodel" in about:
        changed["activation_checkpointing"] = "none"
        assumed.append("recomputation not stated: none")
    if row.get("optimizer") is None and kind.family == "megatron":
        changed["optimizer"] = "Adam (distributed)" if _has_distributed_optimizer(row) else None
    is_340b = re.search(r"nemotron4? 340b", join_fields(row, "model"))
    if "dgxc" in about and is_340b and (read_number(row, "pp") or 1) > 1 and read_number(row, "vpp") is None:
        # NVIDIA/dgxc-benchmarking, nemotron/README_340b.md: VP=12 at every scale of its H100.
        changed["vpp"] = 12
        assumed.append("interleaving not stated: 12 chunks, as the recipe's own page has")
    is_70b = re.search(r"llama3[_ ]70b", join_fields(row, "model")) and is_nvidias_own(row)
    if is_70b and (read_number(row, "pp") or 1) > 1 and read_number(row, "vpp") is None:
        # Megatron-Bridge, scripts/performance/configs/llama/llama3_workload_base_configs.py: 5 on every GPU.
        changed["vpp"] = 5
        assumed.append("interleaving not stated: 5 chunks, as the recipe has")
    if (
        read_number(row, "cp") == 16
        and read_number(row, "dp") == 4
        and "llama 3" in join_fields(row, "source", "model")
    ):
        # Its table prints 4 where 16,384 GPUs in tp 8, cp 16, pp 16 leave 8.
        changed["dp"] = None
    return {**row, **changed}, assumed


def _has_distributed_optimizer(row: Row) -> bool:
    # NeMo's recipes: distributed_fused_adam_with_cosine_annealing, and DistributedOptimizer in mcore's.
    return "nemo" in join_fields(row, "framework", "source") or "dgxc" in join_fields(row, "source")


def is_nvidias_own(row: Row) -> bool:
    """Whether the row is of NVIDIA's tables, whose recipes all reduce gradients in bf16 and fuse the loss.

    Megatron-Bridge's perf_recipes/_common.py (``_benchmark_common``); NeMo's
    ``pretrain_performance_optimizations``.
    """
    megatron = "megatron" in join_fields(row, "framework")
    return megatron and bool(re.search(r"megatron-bridge performance|dgxc", join_fields(row, "source")))


def _whole_batches(row: Row, kind: Framework, num_gpus: int) -> tuple[Row, list[str]]:
    """The row with a global batch of whole micro-batches: the last one of a rank may have been smaller."""
    micro, batch = read_number(row, "micro_batch"), read_number(row, "global_batch")
    if micro is None or batch is None or batch >= 100_000:
        return row, []
    each = micro * data_parallel(row, kind, num_gpus)
    whole = max(1, round(batch / each)) * each
    if whole == batch:
        return row, []
    return {**row, "global_batch": whole, "grad_accum": None}, ["global batch rounded to whole micro-batches"]


def _with_overlap(
    row: Row, kind: Framework, machines: ss.Cluster, spread: ss.Layout
) -> tuple[ss.Layout, list[str]]:
    """Megatron's flags for overlapped collectives, as its own scripts for Hopper and later have them.

    Megatron-LM's README (its H100 scaling runs) and Megatron-Bridge's CommOverlapConfig: gradients, weights
    and tensor parallelism overlap. Runs on A100 of 2021 and 2022 had none of it.
    """
    old = machines.gpu.architecture in (None, "volta", "turing", "ampere")
    if kind.name == "nanotron":
        return NanotronLayout.of(spread), ["stages split by cost, as nanotron does"]
    if kind.name != "Megatron" or old:
        return spread, []
    shards = bool(getattr(spread, "distributed_optimizer", False))
    flags = {"overlap_grad_reduce": True, "overlap_param_gather": shards}
    return replace(spread, **flags, tp_comm_overlap=spread.splits_sequence), [
        "overlap of collectives not stated: on, as in Megatron's own scripts for this GPU"
    ]


def _plan(
    arch: ss.Architecture, machines: ss.Cluster, what: ss.Recipe, spread: ss.Layout
) -> tuple[ss.Plan, list[str]]:
    """The plan; without details for which the framework's model has no formula and which cost little time."""
    left_out: list[str] = []
    while True:
        try:
            plan = ss.Plan(arch, machines, what, spread)
            plan.step()
        except (ValueError, LookupError) as error:
            # Megatron's own schedule looks stages up that come out even, whatever nanotron's do.
            text = str(error)
            changed = _find_relative(arch, what, spread, text)
            if changed is None:
                raise UnmappedError(f"raises ValueError: {text.split('; allowed')[0][:90]}") from None
            arch, what, words = changed
            left_out.append(words)
        else:
            return plan, left_out


def _find_relative(
    arch: ss.Architecture, what: ss.Recipe, spread: ss.Layout, refusal: str
) -> tuple[ss.Architecture, ss.Recipe, str] | None:
    """Return the nearest model and recipe that are not refused, and how they differ; None if too far."""
    for field in ("lora_dropout", "dropout"):
        if f"Recipe.{field} is" in refusal and getattr(what, field):
            words = f"without {field}={getattr(what, field)!r}, for which there is no formula"
            return arch, replace(what, **{field: 0.0}), words
    if what.kernels == "compiled" and "kernels='compiled'" in refusal:
        return (
            arch,
            replace(what, kernels="liger"),
            "compiled kernels predicted as Liger's, which fuse as much",
        )
    if arch.model_type == "gpt_oss" and "Architecture.model_type" in refusal:
        relative = replace(arch, model_type="qwen3_moe", attention_bias=False, attention_output_bias=False)
        return replace(relative, mlp_bias=False), what, "without GPT-OSS's biases and sinks"
    pp, vpp = getattr(spread, "pp", 1), getattr(spread, "vpp", 1)
    uneven = any(words in refusal for words in ("Layout.pp is", "Layout.vpp is"))
    if uneven and spread.framework == "megatron" and pp > 1:
        for more in range(1, pp * vpp):
            if any((arch.num_hidden_layers + more + ends) % (pp * vpp) == 0 for ends in (0, 1, 2)):
                words = f"{more} more layers, because every stage takes as long as the largest"
                return replace(arch, num_hidden_layers=arch.num_hidden_layers + more), what, words
    return None
