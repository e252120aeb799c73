"""nanotron's memory on its first pipeline stage, from its source: it is no framework of Shardscope's.

What ran is ``scripts/scaling_benchmarks.py`` over ``examples/config_tiny_llama_bench.yaml`` of
huggingface/nanotron: 1F1B, ``tp_mode: REDUCE_SCATTER`` with ``tp_linear_async_communication``, no
recomputation, ``accumulate_grad_in_fp32``, ZeRO-0 under torch's DDP or ZeRO-1; ``log_throughput`` prints
``torch.cuda.max_memory_reserved() / 1024**3`` of rank 0 after the fourth step. Nothing here is fitted to
rows; two choices were made by rows of role ``calibration``, and say so.
"""

from __future__ import annotations

from typing import NamedTuple

from shardscope import Architecture, Plan
from shardscope.core.ops import ceil_div
from shardscope.core.precision import FP32
from shardscope.memory.activations.modules.attention import get_attention_widths
from shardscope.memory.activations.modules.saved_tensors import SavedTensor
from shardscope.memory.overheads import libraries as overheads
from shardscope.memory.overheads.band import compute_band
from shardscope.memory.report import Component, MemoryReport, Phase, PhaseMemory, StageMemory, Term

HALF = 2
"""Bytes of a bfloat16."""

RUNTIME = overheads.estimate_runtime("nvidia", "hopper")
"""All rows are of H100s."""


def list_layer_tensors(arch: Architecture) -> list[SavedTensor]:
    """List what ``LlamaDecoderLayer`` saves (src/nanotron/models/llama.py), in bytes per token."""
    width, hidden, c = get_attention_widths(arch), arch.hidden_size, HALF
    # Without grouped queries the projection is laid out anew as one tensor, which the queries, rotated in
    # place, are a view of: its keys and values stay although new ones are rotated beside them.
    queries = width.inputs if arch.num_key_value_heads == arch.num_attention_heads else width.query
    return [
        # Both norms keep their inputs and 1 / rms (flash_attn's Triton kernel); both outputs feed products,
        # which gather them over tp anew in backward, into one buffer that all layers share.
        SavedTensor("norms", 4 * hidden * c + 2 * FP32, "sequence"),
        SavedTensor("attention", (queries + width.key + width.value + width.output) * c, "tp"),
        SavedTensor("attention", FP32 * arch.num_attention_heads, "tp"),
        # GLUActivation in plain operations: gate and up in one tensor, silu's output, the product of both.
        SavedTensor("mlp", 4 * arch.intermediate_size * c, "tp"),
    ]


def first_stage_layers(arch: Architecture, pp: int) -> int:
    """Decoder layers on the first stage: blocks are dealt out by compute cost, in which the head counts too.

    models/base.py (build_model) and models/llama.py (get_block_compute_costs): a stage takes blocks until
    their cost reaches its share. Where it is reached exactly, stored versions take one block more; what ran
    did not, by calibration rows (1.34B on 2 and 4 stages would hold more than was reserved).
    """
    one = sum(arch.layer_matrix_parameters(0).values())
    total = arch.num_hidden_layers * one + arch.vocab_size * arch.hidden_size
    found: int = ceil_div(total, pp * one)
    return max(1, min(arch.num_hidden_layers, found))


class _Sizes(NamedTuple):
    """Bytes of one rank of the first stage."""

    parameters: int
    state: dict[Component, int]
    """At rest."""
    saved: int
    """Activations of one micro-batch."""
    in_flight: int
    """Micro-batches whose activations are there when the first backward begins."""
    working: int
    """What backward needs beside them in the last layer."""
    sharded_logits: int
    """Numbers of one micro-batch's logits on this rank; 0 without the head."""
    gathered: int
    """One hidden state of the whole sequence."""


def _compute_sizes(plan: Plan) -> _Sizes:
    arch, degrees, recipe = plan.architecture, plan.degrees, plan.recipe
    num_layers, is_last = plan.stage_layers[0], degrees.pp == 1
    tokens, tp = recipe.micro_batch_size * recipe.seq_len, degrees.tp
    splits = plan.layout.splits_sequence
    ends = ceil_div(arch.vocab_size, tp) * arch.hidden_size
    weights = ends + num_layers * (
        ceil_div(sum(arch.layer_matrix_parameters(0).values()), tp) + arch.norms_per_layer * arch.hidden_size
    )
    if is_last:
        weights += arch.hidden_size + (0 if arch.tie_word_embeddings else ends)
    per_token = sum(
        ceil_div(saved.bytes_per_token, tp if splits or saved.cut_by != "sequence" else 1)
        for saved in list_layer_tensors(arch)
    )
    gathered = tokens * arch.hidden_size * HALF
    sharded = splits_optimizer(plan)
    staging = 0
    if degrees.data_parallel > 1 and not sharded:
        # torch's DDP, gradient_as_bucket_view off: buckets of all gradients beside them (trainer.py).
        staging += weights * HALF
    if splits and tp > 1:
        # MemoryBuffer's "allgather" and "allgather2" (parallel/tensor_parallel/functional.py).
        staging += 2 * gathered
    # Each layer has sines and cosines of its own, in fp32 and, within flash_attn's module, in bf16.
    angles = num_layers * recipe.seq_len * arch.head_dim * (FP32 + HALF)
    inner = arch.intermediate_size * HALF
    return _Sizes(
        parameters=weights,
        state={
            "parameters": weights * HALF + angles,
            "gradients": weights * FP32,
            "optimizer": 3 * FP32 * ceil_div(weights, degrees.data_parallel if sharded else 1),
            "gather_buffers": staging,
        },
        saved=tokens * num_layers * per_token,
        in_flight=min(degrees.pp, plan.num_micro_batches),
        # The activation's gradients: two of its outputs and both of its inputs at once.
        working=tokens * ceil_div(2 * inner, tp) + 2 * ceil_div(gathered, tp if splits else 1),
        sharded_logits=tokens * ceil_div(arch.vocab_size, tp) if is_last else 0,
        gathered=gathered,
    )


def splits_optimizer(plan: Plan) -> bool:
    """Return whether ZeRO-1 splits the fp32 copies and moments: the mapping says so as Megatron would."""
    return bool(getattr(plan.layout, "distributed_optimizer", False)) and plan.degrees.data_parallel > 1


def held_back_bytes(plan: Plan) -> int:
    """The most that stays reserved beside a peak's own tensors, for blocks that no later phase can reuse.

    ZeRO-1's ``all_gather_coalesced`` flattens the new weights (distributed.py), and so does NCCL's list form
    once more: blocks larger than any other. And whatever a tensor-parallel collective touched is recorded on
    its stream, so that the allocator cannot give it out again before the collective has run: in each layer
    two gathered inputs and two outputs before reduce-scatter, the CPU being ahead by a whole forward. (One
    forward, and not backward too, was chosen by calibration rows, of which 94 % lie in the band.)
    """
    sizes = _compute_sizes(plan)
    held = 2 * HALF * sizes.parameters if splits_optimizer(plan) else 0
    if plan.degrees.tp > 1:
        held += 4 * plan.stage_layers[0] * sizes.gathered
    return held


def predict_memory(plan: Plan) -> MemoryReport:
    """Predict the first stage's memory. The plan has its layers and degrees as Megatron's options."""
    sizes = _compute_sizes(plan)
    moments = tuple(_list_phases(plan, sizes))
    stage = StageMemory(stage=0, num_layers=plan.stage_layers[0], find_phases=lambda: moments)
    groups = (plan.degrees.tp, plan.degrees.pp, plan.degrees.data_parallel)

    return MemoryReport(
        find_stages=lambda: (stage,),
        worst_stage=stage,
        usable_bytes=plan.cluster.usable_bytes_per_gpu,
        find_band=lambda: compute_band(plan, [(moments, overheads.estimate_communication(groups, "nvidia"))]),
    )


def _list_phases(plan: Plan, sizes: _Sizes) -> list[PhaseMemory]:
    groups = (plan.degrees.tp, plan.degrees.pp, plan.degrees.data_parallel)
    rest: dict[Component, int] = {
        **sizes.state,
        "communication": overheads.estimate_communication(groups, "nvidia").point,
        "runtime": RUNTIME.point,
    }
    forward = sizes.in_flight * sizes.saved
    waiting = (sizes.in_flight - 1) * sizes.saved
    half_gradients = sizes.parameters * HALF
    after: dict[Component, int] = {"gather_buffers": rest["gather_buffers"]}
    if splits_optimizer(plan):
        after["gather_buffers"] += 2 * HALF * sizes.parameters + ceil_div(
            HALF * sizes.parameters, plan.degrees.data_parallel
        )
    norm = 2 * ceil_div(sizes.gathered, plan.degrees.tp) if sizes.sharded_logits else 0
    return [
        _make_phase("rest", 0.0, rest, {}),
        # Logits cast to fp32, and their softmax, which the loss makes beside them and keeps.
        _make_phase(
            "forward", 0.33, rest, {"activations": forward + norm, "logits": 2 * FP32 * sizes.sharded_logits}
        ),
        # Its gradient, made in place, is cast to half precision.
        _make_phase(
            "backward",
            0.34,
            rest,
            {"activations": forward + norm, "logits": (FP32 + HALF) * sizes.sharded_logits},
        ),
        _make_phase("backward", 0.36, rest, {"activations": forward + sizes.working}),
        # All half-precision gradients are there before the first is added to the fp32 ones
        # (optim/gradient_accumulator.py, backward).
        _make_phase(
            "backward",
            0.97,
            rest,
            {"activations": waiting, "gradients": rest["gradients"] + half_gradients},
        ),
        _make_phase("optimizer", 0.98, rest, after),
    ]


def _make_phase(
    phase: Phase, fraction: float, rest: dict[Component, int], more: dict[Component, int]
) -> PhaseMemory:
    terms: dict[Component, Term] = {
        name: Term(num_bytes, lambda: "huggingface/nanotron, by its source")
        for name, num_bytes in {**rest, **more}.items()
    }
    found = PhaseMemory.from_terms(phase, fraction, terms)
    if phase in ("forward", "backward"):
        step_bytes = found.components["activations"] + found.components["logits"]
        lost = overheads.estimate_fragmentation(step_bytes, on_gpu=True).point
        terms["fragmentation"] = Term(lost, lambda: "blocks that the allocator cannot give out again")
    return PhaseMemory.from_terms(phase, fraction, terms)
