"""Masks with which the kernels of ``scaled_dot_product_attention`` are known to return wrong gradients."""

from __future__ import annotations

from collections.abc import Iterator

from shardscope.core.errors import FieldError
from shardscope.core.finding import Finding
from shardscope.memory.activations.forward import find_modules
from shardscope.memory.activations.modules.attention import compute_saved_scores, passes_mask
from shardscope.planner.checks.case import Case, replace_plan_fields
from shardscope.timing.layers import find_attention_kernels

_TILE = 128
"""Keys that one tile of cuDNN's backward multiplies."""


def check_masked_attention(case: Case) -> Iterator[Finding]:
    """Report sequences whose last tile of keys is half full, with a mask and cuDNN's kernels.

    Their padding is scored 0 instead of minus infinity: exp(0 - logsumexp) overflows where a query's
    logsumexp is below -88.7, and the query's gradient is NaN (pytorch issue 196678, on H100 and H200).
    """
    plan = case.plan
    arch, recipe = plan.architecture, plan.recipe
    if recipe.seq_len % _TILE != _TILE // 2 or plan.cluster.gpu.architecture != "hopper":
        return
    try:
        modules = find_modules(plan)
    except FieldError:  # A family without formulas: what it saves is not known.
        return
    runs_cudnn = find_attention_kernels(arch, modules) == "sdpa" and not compute_saved_scores(arch, modules)
    if recipe.precision == "fp32" or not runs_cudnn or not passes_mask(arch, modules):
        return
    seq_len = max(_TILE, recipe.seq_len - _TILE // 2)
    yield Finding(
        name="masked-attention-can-be-nan",
        severity="warning",
        why=f"Attention gets a mask, and seq_len={recipe.seq_len:,} is 64 more than a multiple of 128. "
        "On this GPU scaled_dot_product_attention takes cuDNN's kernels (torch 2.11 and later), and with "
        "cuDNN before 9.26 (torch 2.13 has 9.20) their backward returns NaN where all scores of a query are "
        "far below zero, as in Qwen 2.5 (https://github.com/pytorch/pytorch/issues/196678).",
        number=float(recipe.seq_len),
        change=f"seq_len={seq_len}, or torch.backends.cuda.enable_cudnn_sdp(False)",
        plan=replace_plan_fields(plan, recipe={"seq_len": seq_len}),
    )
