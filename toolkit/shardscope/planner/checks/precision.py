"""Checks of number formats: fp32 or fp16 although bf16 is available, bf16 without hardware support on GPUs
and CPUs, experts that are not quantized, rounded sums and updates."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from shardscope.core.cluster import BEFORE_AMPERE, Cluster, choose_mixed_precision
from shardscope.core.finding import Finding
from shardscope.core.number_format import format_gib
from shardscope.frameworks.registry import frameworks
from shardscope.machine.host import multiplies_in_bf16
from shardscope.memory.state.quantization import count_quantized
from shardscope.planner.advice.descriptions import abbreviate_count
from shardscope.planner.checks.case import (
    NOTICEABLE,
    Case,
    evaluate_variants,
    find_fastest,
    predict_memory,
    replace_plan_fields,
)
from shardscope.planner.checks.number_format import format_percent
from shardscope.planner.checks.other_frameworks import find_in_other_framework, search_other_frameworks
from shardscope.planner.memory_needs import find_shortages
from shardscope.timing.calibration.store import find_calibration
from shardscope.timing.report import format_seconds

if TYPE_CHECKING:
    from shardscope.core.plan import Plan

ROUNDOFF = {"bf16": 2.0**-8, "fp16": 2.0**-11}
"""Unit roundoff: bf16 has 8 significant bits, fp16 11 (IEEE 754-2019, table 3.5)."""
MUCH_ROUNDED = 0.05
"""Relative error of a sum from which it is more than noise compared with the gradient's own."""
CPU_SLOWDOWN = (3.0, 4.0)
"""How many times as long a step takes in bf16 as in fp32 on a CPU that emulates bf16: measured with
SmolLM2-135M-Instruct on two cores with AVX-512."""
FP16_MAX = 65_504
"""Largest fp16 number (IEEE 754-2019, table 3.5)."""


def check_fp16_range(case: Case) -> Iterator[Finding]:
    """Report fp16 on a GPU that supports bf16: gradients need a loss scale, and overflowing steps are
    skipped."""
    plan = case.plan
    if plan.recipe.precision != "fp16-mixed" or "bf16" not in plan.cluster.gpu.peak_flops:
        return
    yield Finding(
        name="fp16-though-bf16-is-there",
        severity="warning",
        why=f"fp16 ends at {FP16_MAX:,}, so that the loss must be scaled and steps that overflow are "
        f"skipped (Micikevicius et al. 2018, section 3.2); {plan.cluster.gpu.name} has bf16, with fp32's "
        "range, which needs no scale.",
        number=float(FP16_MAX),
        change="Mixed precision (bf16)",
        plan=replace_plan_fields(plan, recipe={"precision": "bf16-mixed"}),
    )


def check_fp32_speed(case: Case) -> Iterator[Finding]:
    """Report fp32 on a GPU whose matrix units are faster in half precision, if the step is shorter with it.

    Mixed precision keeps the weights that the optimizer updates in fp32.
    """
    plan = case.plan
    # On CPU ranks bf16 may be slower (check_bf16_on_cpu).
    if plan.recipe.precision != "fp32" or case.step is None or not plan.on_gpu:
        return
    mixed = choose_mixed_precision(plan.cluster.gpu)
    fixed = find_fastest(evaluate_variants(plan, [({"precision": mixed}, {})]))
    if fixed is None or case.compute_gain(fixed) < NOTICEABLE:
        return
    # Neither into a tight plan, nor into one that cannot be launched, for speed alone.
    if (fixed.memory.is_tight and not (case.memory and case.memory.is_tight)) or not case.keeps_launch(
        fixed.plan
    ):
        return
    kind = mixed.removesuffix("-mixed")
    source = (
        "Kalamkar et al. 2019, arXiv:1905.12322"
        if kind == "bf16"
        else "with a loss scale, Micikevicius et al. 2018"
    )
    yield Finding(
        name="fp32-though-half-precision-is-faster",
        severity="warning",
        why=f"Every layer computes in fp32. In {kind}, with the trained weights and the optimizer still in "
        f"fp32 ({source}), a step takes {format_seconds(fixed.step.seconds)} instead of "
        f"{format_seconds(case.step.seconds)}: it is {case.describe_speedup(fixed)}.",
        number=case.step.seconds - fixed.step.seconds,
        change=f"Mixed precision ({kind})",
        plan=fixed.plan,
    )


def check_bf16_support(case: Case) -> Iterator[Finding]:
    """Report bf16 on a GPU whose matrix units lack it: it runs with fp32 arithmetic or in software."""
    gpu = case.plan.cluster.gpu
    # fp8 needs Hopper or Ada anyway, so only bf16 can be missing.
    if not case.plan.recipe.precision.startswith("bf16") or gpu.architecture not in BEFORE_AMPERE:
        return
    peak = gpu.peak_flops.get("fp16")
    fixed = replace_plan_fields(case.plan, recipe={"precision": "fp16-mixed"})
    rate_text = "" if peak is None else f", {peak / 1e12:,.0f} TFLOP/s of them"
    yield Finding(
        name="bf16-is-not-there",
        severity="warning",
        why=f"{gpu.name} has no bf16 in its matrix units, which came with Ampere; it has fp16{rate_text}, "
        "with a loss scale (Micikevicius et al. 2018, section 3.2).",
        number=None if peak is None else peak / 1e12,
        change="Mixed precision (fp16)" + _describe_shortage(case, fixed),
        plan=fixed,
    )


def find_bf16_slowdown(cluster: Cluster) -> float | None:
    """Return how many times as long matmuls took in bf16 as in fp32 on these CPU ranks.

    None if they were never calibrated (``ss.calibrate``).
    """
    try:
        calibration = find_calibration(cluster)
    except (OSError, ValueError):  # A damaged file; predictions of time name it.
        return None
    return None if calibration is None else calibration.find_bf16_slowdown()


def check_bf16_on_cpu(case: Case) -> Iterator[Finding]:
    """Report a fine-tune in bf16 on CPU ranks whose bf16 matmuls are slower than those in fp32.

    A calibration says so, or else the CPU's instruction sets.
    """
    recipe = case.plan.recipe
    # Pretraining on CPU ranks is a rehearsal of the plan's own precision; a fine-tune is for its result.
    is_finetune = getattr(case.task, "weights", None) is not None
    if case.plan.cluster.gpu.vendor != "cpu" or not recipe.precision.startswith("bf16") or not is_finetune:
        return
    if recipe.method == "qlora":  # Not measured.
        return
    slowdown = find_bf16_slowdown(case.plan.cluster)
    if slowdown is not None:
        if slowdown <= 1:
            return
        number = slowdown
        why = f"By ss.calibrate, matmuls take {slowdown:.2g} times as long in bf16 as in fp32."
    elif multiplies_in_bf16() is False:  # Some CPUs do not report their instruction sets.
        number, most = CPU_SLOWDOWN
        why = (
            f"This CPU has no bf16 instructions: a step took {number:g} to {most:g} times as long in bf16 as "
            "in fp32 (SmolLM2-135M-Instruct, 4 sequences of 96 tokens, two cores)."
        )
    else:
        return
    fixed = replace_plan_fields(case.plan, recipe={"precision": "fp32"})
    yield Finding(
        name="bf16-on-cpu-ranks",
        severity="warning",
        why=why,
        number=number,
        change="fp32" + _describe_shortage(case, fixed),
        plan=fixed,
    )


def check_unquantized_experts(case: Case) -> Iterator[Finding]:
    """Report a quantized base most of which stays as it is, because its experts are no Linears."""
    arch, recipe = case.plan.architecture, case.plan.recipe
    if recipe.base_quantization is None or arch.mixture_of_experts is None:
        return
    quantized = count_quantized(arch)
    share = quantized / arch.num_parameters
    plain = {"method": "lora"} if recipe.method == "qlora" else {"quantization": None}
    fixed = replace_plan_fields(case.plan, recipe=plain)
    yield Finding(
        name="experts-are-not-quantized",
        severity="hint",
        why=f"Of {abbreviate_count(arch.num_parameters)} weights, {abbreviate_count(quantized)} "
        f"({format_percent(share)}) are in {recipe.base_quantization}: bitsandbytes replaces Linears, and "
        "transformers 5 keeps all experts of a layer in one tensor.",
        number=100 * share,
        change="LoRA over an unquantized base, whose layers need not be dequantized"
        + _describe_shortage(case, fixed),
        plan=fixed,
    )


def check_reduction_precision(case: Case) -> Iterator[Finding]:
    """Report gradients that are summed over ranks in half precision, which rounds at every rank.

    The error of n additions is about sqrt(n) roundoffs, at most n (Higham & Mary 2019); a ring over n + 1
    ranks has n additions.
    """
    plan = case.plan
    defaults = frameworks[plan.layout.framework].defaults()
    # Context-parallel ranks hold parts of a sequence: their gradients are summed too.
    kind, ranks = defaults.get_reduce_type(plan), plan.degrees.data_parallel * plan.degrees.cp
    if kind == "fp32" or ranks == 1 or plan.recipe.has_adapters:
        return
    # The random-walk estimate, not the worst case: rounding errors of independent gradients partly cancel.
    error = math.sqrt(ranks - 1) * ROUNDOFF[kind]
    # Where the plan's own framework cannot reduce in fp32 with these options, another one may.
    suggestion, fixed = defaults.suggest_fp32_reduction(plan)
    other = find_in_other_framework(plan, _reduces_in_fp32) if fixed is None else None
    yield Finding(
        name="reductions-in-half-precision",
        severity="warning" if error >= MUCH_ROUNDED else "hint",
        why=f"Gradients are summed over {ranks} ranks in {kind}, rounding by "
        f"{format_percent(ROUNDOFF[kind])} at each: "
        f"about {format_percent(error)} of a sum is error (Higham & Mary 2019).",
        number=100 * error,
        change=(
            suggestion
            if other is None
            else f"{other.layout.description}, which sums in fp32; or {suggestion}"
        )
        + (_describe_shortage(case, fixed or other) or case.describe_slowdown(fixed)),
        plan=fixed or other,
        search=None if fixed or other else partial(search_other_frameworks, plan, _reduces_in_fp32),
    )


def _describe_shortage(case: Case, fixed: Plan | None) -> str:
    """Return the memory that the wider format lacks, as text; empty if it fits or the plan does not fit
    either."""
    # Say what the fix lacks, but not for a plan that does not fit as it is: that is a finding of its own.
    memory = None if fixed is None else predict_memory(fixed)
    if fixed is None or memory is None or not case.has_room:
        return ""
    lacks = [f"{format_gib(need.short_bytes)} GiB of {need.name}" for need in find_shortages(fixed, memory)]
    return f", which lacks {' and '.join(lacks)}" if lacks else ""


def _reduces_in_fp32(plan: Plan) -> bool:
    return frameworks[plan.layout.framework].defaults().get_reduce_type(plan) == "fp32"


def check_update_precision(case: Case) -> Iterator[Finding]:
    """Report weights in bf16 only (8 significant bits): an update that is small relative to its weight is
    lost.

    AdamW moves a weight by about the learning rate, whatever its gradient (Kingma & Ba 2015, section 2.1).
    """
    plan = case.plan
    defaults = frameworks[plan.layout.framework].defaults()
    # Mixed precision updates fp32 master weights, and so do DeepSpeed and Megatron-core in "bf16".
    if plan.recipe.precision != "bf16" or plan.recipe.has_adapters or defaults.keeps_fp32_weights(plan):
        return
    smallest = ROUNDOFF["bf16"]
    mixed = choose_mixed_precision(plan.cluster.gpu)
    fixed = replace_plan_fields(plan, recipe={"precision": mixed})
    rate = getattr(case.task, "learning_rate", None)
    beyond = (
        f" At a learning rate of {rate:g} that is every weight beyond {rate / smallest:.2g}." if rate else ""
    )
    yield Finding(
        name="updates-round-away",
        severity="warning",
        why=f"Weights in bf16 alone: an update below {format_percent(smallest)} of its weight is lost "
        f"(Micikevicius et al. 2018, section 3.1).{beyond}",
        number=100 * smallest,
        change=f"Mixed precision ({mixed.removesuffix('-mixed')}), with fp32 originals"
        + (_describe_shortage(case, fixed) or case.describe_slowdown(fixed)),
        plan=fixed,
    )
