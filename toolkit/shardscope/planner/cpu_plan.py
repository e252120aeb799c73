"""CPU rehearsals: the same framework and kind of layout on CPU ranks, with a tiny model of the same family.

A rehearsal runs the framework's own code; only sizes differ, and the differences are listed.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from shardscope.catalog import gpus
from shardscope.core.cluster import Cluster
from shardscope.core.layout import find_largest_divisor
from shardscope.core.number_format import format_count
from shardscope.core.plan import Plan
from shardscope.families.registry import family_of
from shardscope.frameworks.registry import why_not_trained

if TYPE_CHECKING:
    from shardscope.core.architecture import Architecture
    from shardscope.core.layout import Layout
    from shardscope.core.recipe import Recipe

HIDDEN_SIZE = 128
HEADS = 4
HEAD_DIM = 32
LAYERS = 4
EXPERTS = 4
GROUPED_EXPERTS = 16
"""Two experts in each of the eight groups of DeepSeek-V3's group-limited router."""
VOCABULARY = 2048
"""Vocabulary size of the tokenizer that is shipped with the text."""
MAX_SEQ_LEN = 128
MICRO_BATCH_SIZE = 4
MAX_MICRO_BATCHES = 2


class Rehearsal(NamedTuple):
    """A plan that this machine can run, and its differences from the original plan."""

    plan: Plan
    differences: tuple[str, ...]


def rehearsal_of(plan: Plan, num_ranks: int = 2) -> Rehearsal:
    """Return ``plan`` reduced to ``num_ranks`` CPU ranks of this machine.

    Method, precision, optimizer, recomputation and the framework's options stay; sizes and degrees shrink.
    Tensor and pipeline parallelism stay where ``num_ranks`` and the framework's engine allow them. Raises
    ``ValueError`` if no reduced plan is valid.
    """
    cluster = Cluster.parse(f"{num_ranks}x{gpus['cpu'].name}")
    architecture = _small_architecture(plan.architecture)
    for degrees in (
        _choose_degrees(plan.layout, num_ranks, "tp", "pp"),
        _choose_degrees(plan.layout, num_ranks, "pp"),
        {},
    ):
        layout, changes = _small_layout(plan.layout, degrees)
        try:
            recipe = _small_recipe(plan, num_ranks // (degrees.get("tp", 1) * degrees.get("pp", 1)), degrees)
            small = Plan(architecture, cluster, recipe, layout)
        except ValueError:
            if not degrees:
                raise
            continue
        if not degrees or why_not_trained(small) is None:
            break
    device = "GPU" if plan.on_gpu else "CPU rank"
    sizes = (
        f"{small.architecture.num_parameters:,} instead of {plan.architecture.num_parameters:,} parameters",
        f"{num_ranks} CPU ranks instead of {format_count(plan.world_size, device)}",
        f"{recipe.seq_len:,} instead of {plan.recipe.seq_len:,} tokens a sequence",
    )
    return Rehearsal(small, (*sizes, *changes))


def _small_architecture(arch: Architecture) -> Architecture:
    """Return a few layers of the same family, with the original's gating, weight tying, grouped-query heads
    and experts."""
    changes: dict[str, Any] = {
        "name": f"tiny {arch.name}",
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": 4 * HIDDEN_SIZE if not arch.gated_mlp else 3 * HIDDEN_SIZE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": _small_groups(arch),
        "head_dim": HEAD_DIM,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": min(arch.max_position_embeddings, 4 * MAX_SEQ_LEN),
        "sliding_window_layers": LAYERS * bool(arch.sliding_window_layers),
    }
    if arch.sliding_window_layers and arch.sliding_window_layers < arch.num_hidden_layers:
        changes["sliding_window_layers"] = LAYERS // 2
    if arch.mixture_of_experts is not None:
        shared = bool(arch.mixture_of_experts.shared_expert_intermediate_size)
        family = family_of(arch)
        width = HIDDEN_SIZE if family.has_expert_intermediate_size else changes["intermediate_size"]
        changes["mixture_of_experts"] = replace(
            arch.mixture_of_experts,
            num_experts=GROUPED_EXPERTS if family.has_group_limited_routing else EXPERTS,
            num_experts_per_tok=min(2, arch.mixture_of_experts.num_experts_per_tok),
            moe_intermediate_size=width,
            shared_expert_intermediate_size=width * shared,
            first_k_dense_replace=min(1, arch.mixture_of_experts.first_k_dense_replace),
            mlp_only_layers=(),
        )
    if arch.latent_attention is not None:
        changes["latent_attention"] = replace(
            arch.latent_attention,
            q_lora_rank=HIDDEN_SIZE // 2 if arch.latent_attention.q_lora_rank else None,
            kv_lora_rank=HIDDEN_SIZE // 4,
            qk_nope_head_dim=HEAD_DIM,
            qk_rope_head_dim=HEAD_DIM,
            v_head_dim=HEAD_DIM,
        )
    return replace(arch, **changes)


def _small_groups(arch: Architecture) -> int:
    """Return the number of key and value heads: as many as query heads, fewer, or a single one that is
    broadcast."""
    if arch.num_key_value_heads == arch.num_attention_heads:
        return HEADS
    broadcasts = family_of(arch).expands_key_heads and not arch.new_decoder_architecture
    return 1 if broadcasts else HEADS // 2


def _small_recipe(plan: Plan, data_parallel: int, degrees: dict[str, int]) -> Recipe:
    """Return the recipe with a few short micro-batches, at least one for each pipeline stage."""
    num_micro_batches = max(min(plan.num_micro_batches, MAX_MICRO_BATCHES), degrees.get("pp", 1))
    return replace(
        plan.recipe,
        seq_len=min(plan.recipe.seq_len, MAX_SEQ_LEN),
        micro_batch_size=MICRO_BATCH_SIZE,
        global_batch_size=MICRO_BATCH_SIZE * data_parallel * num_micro_batches,
    )


def _choose_degrees(layout: Layout, num_ranks: int, *names: str) -> dict[str, int]:
    """Return the degrees of ``names`` that fit into ``num_ranks``, in order of priority, and the chunks of a
    stage."""
    degrees = {}
    for name in names:
        degree = find_largest_divisor(num_ranks, getattr(layout, name, 1))
        if degree > 1:
            degrees[name] = degree
            num_ranks //= degree
    chunks: int = getattr(layout, "vpp", 1)
    if "pp" in degrees and chunks > 1:
        degrees["vpp"] = min(chunks, LAYERS // degrees["pp"])
    return degrees


def _small_layout(layout: Layout, degrees: dict[str, int]) -> tuple[Layout, list[str]]:
    """Return the layout with every degree reset to 1 except those in ``degrees``, and the list of changes;
    options stay."""
    changes: dict[str, Any] = {}
    texts = []
    for field in fields(layout):
        value = getattr(layout, field.name)
        if field.name in ("tp", "pp", "vpp", "cp", "ep", "replicate") and value > 1:
            small = changes[field.name] = degrees.get(field.name, 1)
            if small != value:
                texts.append(f"{field.name} {small} instead of {value}")
        elif field.name == "shard":
            changes["shard"] = None
        elif field.name == "sequence_parallel":
            changes["sequence_parallel"] = None
        elif field.name == "reshard_after_forward" and not isinstance(value, bool):
            changes["reshard_after_forward"] = True
        elif field.name in layout.on_cpu_ranks and value != layout.on_cpu_ranks[field.name]:
            changes[field.name] = layout.on_cpu_ranks[field.name]
            texts.append(f"{field.name} {changes[field.name]} instead of {value}")
    return replace(layout, **changes), texts
