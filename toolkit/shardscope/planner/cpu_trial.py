"""CPU trial of a plan: a tiny model of its family on CPU ranks, in the same framework and kind of layout.

The Studio launches it where the plan's own GPUs are missing. It is real training with the framework's own
code; only sizes differ, and the differences are listed. (A rehearsal, in ``shardscope.rehearsal``, trains
nothing: it runs one rank of the full plan on fake tensors.)
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING, NamedTuple

from shardscope.catalog import gpus
from shardscope.core.cluster import Cluster, name_device
from shardscope.core.layout import find_largest_divisor
from shardscope.core.number_format import format_count
from shardscope.core.plan import Plan
from shardscope.core.serialization import replace_fields
from shardscope.families.registry import find_family
from shardscope.frameworks.registry import why_not_trained

if TYPE_CHECKING:
    from shardscope.core.architecture import Architecture
    from shardscope.core.layout import Layout
    from shardscope.core.recipe import Recipe

# The sizes of the tiny model. Four heads of 32 make up the hidden size, which GPT-2 requires; four layers are
# two pipeline stages of two chunks each.
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


class CpuTrial(NamedTuple):
    """A plan that this machine can run, and its differences from the original plan."""

    plan: Plan
    differences: tuple[str, ...]


def build_cpu_trial(plan: Plan, num_ranks: int = 2, max_degree: int | None = None) -> CpuTrial:
    """Return ``plan`` reduced to ``num_ranks`` CPU ranks of this machine.

    Method, precision, optimizer, recomputation and the framework's options stay; sizes and degrees shrink.
    Tensor and pipeline parallelism stay where ``num_ranks`` and the framework's engine allow them, with
    degrees of at most ``max_degree``. Raises ``ValueError`` if no reduced plan is valid.
    """
    # Keep as many kinds of parallelism as an engine trains on so few ranks. What it combines is in its own
    # limits (why_not_trained), and is not repeated here.
    cluster = Cluster.parse(f"{num_ranks}x{gpus['cpu'].name}")
    architecture = _shrink_architecture(plan.architecture)
    for degrees in (
        _choose_degrees(plan.layout, num_ranks, max_degree, "tp", "pp"),
        _choose_degrees(plan.layout, num_ranks, max_degree, "pp"),
        {},
    ):
        layout, changes = _shrink_layout(plan.layout, degrees)
        try:
            recipe = _shrink_recipe(plan, num_ranks // (degrees.get("tp", 1) * degrees.get("pp", 1)), degrees)
            small = Plan(architecture, cluster, recipe, layout)
        except ValueError:
            # Without any degree there is nothing left to drop, so that the error is the user's to see.
            if not degrees:
                raise
            continue
        if not degrees or why_not_trained(small) is None:
            break
    # The Studio shows these under the button: a trial shows that the plan's kind of training runs, not how
    # fast.
    sizes = (
        f"{small.architecture.num_parameters:,} instead of {plan.architecture.num_parameters:,} parameters",
        f"{num_ranks} CPU ranks instead of {format_count(plan.world_size, name_device(plan.cluster))}",
        f"{recipe.seq_len:,} instead of {plan.recipe.seq_len:,} tokens a sequence",
    )
    return CpuTrial(small, (*sizes, *changes))


def _shrink_architecture(arch: Architecture) -> Architecture:
    """Return a few layers of the same family, with the original's gating, weight tying, grouped-query heads
    and experts."""
    intermediate_size = 3 * HIDDEN_SIZE if arch.gated_mlp else 4 * HIDDEN_SIZE
    changes: dict[str, object] = {
        "name": f"tiny {arch.name}",
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": _choose_key_value_heads(arch),
        "head_dim": HEAD_DIM,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": min(arch.max_position_embeddings, 4 * MAX_SEQ_LEN),
        "sliding_window_layers": LAYERS * bool(arch.sliding_window_layers),
    }
    # A model that mixes windowed and full attention keeps both, because they are different masks in the
    # engine.
    if arch.sliding_window_layers and arch.sliding_window_layers < arch.num_hidden_layers:
        changes["sliding_window_layers"] = LAYERS // 2
    # Mixtral's config.json has no width of its own for experts: theirs is intermediate_size, and must equal
    # it. mlp_only_layers are indices of the original's layers, which the tiny model does not have.
    if arch.mixture_of_experts is not None:
        shared = bool(arch.mixture_of_experts.shared_expert_intermediate_size)
        family = find_family(arch)
        width = HIDDEN_SIZE if family.has_expert_intermediate_size else intermediate_size
        changes["mixture_of_experts"] = replace(
            arch.mixture_of_experts,
            num_experts=GROUPED_EXPERTS if family.has_group_limited_routing else EXPERTS,
            num_experts_per_tok=min(2, arch.mixture_of_experts.num_experts_per_tok),
            moe_intermediate_size=width,
            shared_expert_intermediate_size=width * shared,
            first_k_dense_replace=min(1, arch.mixture_of_experts.first_k_dense_replace),
            mlp_only_layers=(),
        )
    # q_lora_rank stays None where the original has none (DeepSeek-V2-Lite): its queries are one projection,
    # not two.
    if arch.latent_attention is not None:
        changes["latent_attention"] = replace(
            arch.latent_attention,
            q_lora_rank=HIDDEN_SIZE // 2 if arch.latent_attention.q_lora_rank else None,
            kv_lora_rank=HIDDEN_SIZE // 4,
            qk_nope_head_dim=HEAD_DIM,
            qk_rope_head_dim=HEAD_DIM,
            v_head_dim=HEAD_DIM,
        )
    return replace_fields(arch, changes)


def _choose_key_value_heads(arch: Architecture) -> int:
    """Return the number of key and value heads: as many as query heads, fewer, or a single one that is
    broadcast."""
    if arch.num_key_value_heads == arch.num_attention_heads:
        return HEADS
    # Falcon without new_decoder_architecture has one key and value head, which its attention broadcasts.
    broadcasts = find_family(arch).expands_key_heads and not arch.new_decoder_architecture
    return 1 if broadcasts else HEADS // 2


def _shrink_recipe(plan: Plan, data_parallel: int, degrees: dict[str, int]) -> Recipe:
    """Return the recipe with a few short micro-batches, at least one for each pipeline stage."""
    # A pipeline with fewer micro-batches than stages would leave a stage without work.
    num_micro_batches = max(min(plan.num_micro_batches, MAX_MICRO_BATCHES), degrees.get("pp", 1))
    return replace(
        plan.recipe,
        seq_len=min(plan.recipe.seq_len, MAX_SEQ_LEN),
        micro_batch_size=MICRO_BATCH_SIZE,
        global_batch_size=MICRO_BATCH_SIZE * data_parallel * num_micro_batches,
    )


def _choose_degrees(layout: Layout, num_ranks: int, max_degree: int | None, *names: str) -> dict[str, int]:
    """Return the degrees of ``names`` that fit into ``num_ranks``, in order of priority, and the chunks of a
    stage."""
    degrees = {}
    # Each degree takes its ranks from what the previous ones left: tp comes first, as in a real layout, where
    # it has to stay inside a node.
    for name in names:
        wanted: int = getattr(layout, name, 1)
        degree = find_largest_divisor(num_ranks, min(wanted, max_degree or wanted))
        if degree > 1:
            degrees[name] = degree
            num_ranks //= degree
    chunks: int = getattr(layout, "vpp", 1)
    if "pp" in degrees and chunks > 1:
        degrees["vpp"] = min(chunks, LAYERS // degrees["pp"], max_degree or chunks)
    return degrees


def _shrink_layout(layout: Layout, degrees: dict[str, int]) -> tuple[Layout, list[str]]:
    """Return the layout with every degree reset to 1 except those in ``degrees``, and the list of changes;
    options stay."""
    changes: dict[str, object] = {}
    texts = []
    for field in fields(layout):
        value = getattr(layout, field.name)
        if field.name in ("tp", "pp", "vpp", "cp", "ep", "replicate") and value > 1:
            small = degrees.get(field.name, 1)
            changes[field.name] = small
            if small != value:
                texts.append(f"{field.name} {small} instead of {value}")
        # The number of shards is derived again from the ranks that the other degrees leave.
        elif field.name == "shard":
            changes["shard"] = None
        # Its default follows tp, which may be 1 now: Megatron-core rejects sequence parallelism without it.
        elif field.name == "sequence_parallel":
            changes["sequence_parallel"] = None
        # An int is the number of ranks to reshard to, a non-trivial divisor of the shard mesh (torch 2.13,
        # fsdp/_fully_shard/_fully_shard.py, fully_shard). Two ranks have none.
        elif field.name == "reshard_after_forward" and not isinstance(value, bool):
            changes["reshard_after_forward"] = True
        # Options that need a GPU library, such as fused quantization kernels: each layout class lists its
        # own.
        elif field.name in layout.on_cpu_ranks and value != layout.on_cpu_ranks[field.name]:
            changes[field.name] = layout.on_cpu_ranks[field.name]
            texts.append(f"{field.name} {changes[field.name]} instead of {value}")
    return replace_fields(layout, changes), texts
