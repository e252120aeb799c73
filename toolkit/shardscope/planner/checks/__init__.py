"""Checks of a plan and its task: each finding says what runs badly and suggests a fix.

Scripts, functions and earlier runs are checked by ``shardscope.runs.checks``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from shardscope.core.finding import SEVERITIES, Finding, Severity
from shardscope.core.html_table import render_html_table
from shardscope.planner.checks import (
    checkpoints,
    launches,
    learning_rate,
    masked_attention,
    memory,
    offload,
    options,
    pipeline,
    precision,
    recomputation,
    sharding,
    tensor_parallel,
    widths,
)
from shardscope.planner.checks.case import Case

__all__ = ["CHECKS", "SEVERITIES", "Finding", "Findings", "Severity", "run_checks"]

CHECKS: tuple[Callable[[Case], Iterator[Finding]], ...] = (
    memory.check_formulas,
    memory.check_memory_sizes,
    memory.check_tight_fit,
    recomputation.check_missing_recomputation,
    recomputation.check_unneeded_recomputation,
    offload.check_unneeded_offload,
    pipeline.check_pipeline_micro_batches,
    pipeline.check_pipeline_bubble,
    launches.check_launch_bound,
    launches.check_repeated_transfers,
    tensor_parallel.check_tensor_parallel_link,
    sharding.check_repeated_all_gathers,
    sharding.check_shard_size,
    sharding.check_shards_across_nodes,
    sharding.check_expert_shards,
    options.check_overlap_options,
    options.check_unused_options,
    options.check_rotary_positions,
    masked_attention.check_masked_attention,
    precision.check_fp32_speed,
    precision.check_fp16_range,
    precision.check_bf16_support,
    precision.check_bf16_on_cpu,
    precision.check_unquantized_experts,
    precision.check_reduction_precision,
    precision.check_update_precision,
    widths.check_matrix_unit_alignment,
    widths.check_cache_line_alignment,
    widths.check_vocabulary_padding,
    checkpoints.check_checkpoint_format,
    checkpoints.check_resumed_checkpoint,
    checkpoints.check_kept_weights,
    learning_rate.check_learning_rate,
    learning_rate.check_warm_up,
)
"""All checks; each covers one topic."""


class Findings(list[Finding]):
    """A list of findings, printed line by line and displayed as a table at the end of a notebook cell."""

    def __str__(self) -> str:
        return "\n".join(map(str, self)) or "No findings."

    # A plan with all its fields would fill a screen.
    __repr__ = __str__

    def _repr_html_(self) -> str:
        if not self:
            return "<p>No findings.</p>"
        rows = [(one.severity, one.name.replace("-", " "), one.why, one.change) for one in self]
        return render_html_table(("severity", "finding", "why", "suggested fix"), rows)


def run_checks(case: Case) -> Findings:
    """Return the findings for a plan and for the fields of its task, the most severe first."""
    # Stable sorting keeps the order of CHECKS among findings of equal severity: memory first.
    results = [finding for check in CHECKS for finding in check(case)]
    return Findings(sorted(results, key=lambda one: SEVERITIES.index(one.severity)))
