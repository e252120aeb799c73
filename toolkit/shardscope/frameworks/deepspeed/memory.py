"""DeepSpeed ZeRO's training state, as DeepSpeed 0.19 keeps it (Rajbhandari et al. 2020, section 5).

Read off ``deepspeed/runtime``: which optimizer really wraps which stage and precision
(``engine.py: _do_optimizer_sanity_check``), flat buffers and their padding, buckets, gathers and what each of
them copies. Checked against DeepSpeed's own engine in ``tests/unit/test_deepspeed_memory.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from shardscope.frameworks.deepspeed.backward import peaks, sizes_of
from shardscope.frameworks.deepspeed.buckets import (
    Cut,
    Instant,
    Part,
    all_reduce_bucket,
    beyond,
    early,
    late,
    parts_of,
)
from shardscope.frameworks.deepspeed.gathers import Gathered, Modules, Thresholds, gathered
from shardscope.frameworks.deepspeed.offload import Pieces, offloaded
from shardscope.frameworks.deepspeed.tensors import (
    FP64,
    Tensors,
    cut_each,
    largest_group,
    partition,
    tensors_of,
    working,
)
from shardscope.memory.arithmetic import smallest
from shardscope.memory.optimizers import flat_state
from shardscope.memory.precision import FP32, widths
from shardscope.memory.report import Term, no_bytes
from shardscope.memory.stages import Shapes, Stage, StageShape, outer_shapes, shapes_of, stage_of
from shardscope.memory.state import TrainingState
from shardscope.memory.words import gib

if TYPE_CHECKING:
    from shardscope.plan import Plan


def shapes(plan: Plan) -> Shapes:
    """Stages of DeepSpeed's pipeline module, or the one of the whole model."""
    return shapes_of(plan.architecture, plan.stage_layers)


def stage(plan: Plan, shape: StageShape) -> Stage:
    """The weights of one of them."""
    return stage_of(plan, shape)


def training_state(plan: Plan, stage: Stage) -> TrainingState:
    """What one rank keeps, on the device, on the host and on NVMe."""
    layout: Any = plan.layout
    numbers = _Numbers.of(plan, stage)
    state = (_whole, _flat, _flat, _cut)[layout.stage](plan, stage, numbers)
    if not (layout.offload_optimizer or layout.offload_params):
        return state
    return offloaded(plan, state, _pieces(plan, numbers))


def _pieces(plan: Plan, n: _Numbers) -> Pieces:
    """What can move, in elements of one rank."""
    layout: Any = plan.layout
    trained, experts = n.tensors.trained, n.tensors.experts
    if layout.stage == 3:
        part = cut_each(trained, n.ranks)
        group, kept = largest_group(trained, n.ranks, layout.sub_group_size), part
    else:
        parts = partition(trained, n.ranks, n.half), partition(experts, n.expert_ranks, n.half)
        part = group = sum(each.part for each in parts)
        kept = sum(each.whole for each in parts)
    moments = flat_state(plan.recipe.optimizer, part)
    return Pieces(n.half, part, group, kept, max((*trained, *experts)), moments)


class _Numbers(NamedTuple):
    """What all stages count with."""

    tensors: Tensors
    half: int
    """Bytes of a weight as forward reads it, and of its gradient."""
    main: int
    """Bytes of the fp32 main copy."""
    ranks: int
    expert_ranks: int
    accumulates: bool
    tied: int
    """Elements of an embedding that is the head too: its first gradient waits through backward for the other,
    and then there are both and their sum."""
    tied_head: bool
    frozen: int
    """Bytes of weights under adapters, which no optimizer sees."""

    @classmethod
    def of(cls, plan: Plan, stage: Stage) -> _Numbers:
        tensors, half = tensors_of(plan, stage), widths[plan.recipe.precision].compute
        ranks = plan.degrees.data_parallel
        tied_head = plan.architecture.tie_word_embeddings and plan.degrees.pp == 1
        return cls(
            tensors=tensors,
            half=half,
            main=FP32,
            ranks=ranks,
            # An expert has fewer replicas than a dense weight: ep of them were spent on other experts.
            expert_ranks=max(1, ranks // plan.degrees.ep),
            accumulates=plan.num_micro_batches > 1,
            tied=tensors.trained[0] if tied_head and not stage.adapters else 0,
            tied_head=tied_head,
            frozen=half * sum(tensors.frozen),
        )

    @property
    def groups(self) -> tuple[int, ...]:
        """Trained tensors in each part of backward."""
        tensors = self.tensors
        return parts_of(tensors.trained_before, tensors.trained_per_layer, len(tensors.trained))

    @property
    def trained(self) -> int:
        """Elements that get gradients."""
        return sum(self.tensors.trained) + sum(self.tensors.experts)


def group_sizes(plan: Plan) -> tuple[int, ...]:
    """Ranks of each communicator: pipeline neighbours send and receive in one for each pair (torch's
    ``ProcessGroupNCCL``; deepspeed/runtime/pipe/p2p.py)."""
    degrees = plan.degrees
    return (degrees.data_parallel, degrees.tp, *(2,) * min(2, degrees.pp - 1), degrees.ep)


def _whole(plan: Plan, stage: Stage, n: _Numbers) -> TrainingState:
    """Stage 0: ``FP16_Optimizer`` also for bf16, or the optimizer itself for fp32."""
    trained, name = n.trained, plan.recipe.optimizer
    moments = flat_state(name, trained)
    flattened = max(all_reduce_bucket(n.tensors.trained), all_reduce_bucket(n.tensors.experts))
    parameters, gradients = n.half * trained + n.frozen, n.half * trained
    if n.half == FP32:
        optimizer, update, begins = moments, 0, 0
        words = "the optimizer's own moments: fp32 weights are their own main copies"
    else:
        optimizer = FP32 * trained + moments
        # With FusedAdam fp32 gradients exist one by one and flattened; other optimizers keep main copies one
        # by one (FP16_UnfusedOptimizer), and so their gradients.
        fused = name == "adamw" and plan.on_gpu
        update = (2 if fused else 1) * FP32 * trained
        begins = FP32 * trained
        words = "FP16_Optimizer's fp32 main copies and moments, for bf16 too"
    parts = late(n.tensors.trained, n.groups, n.tied, n.accumulates, n.tensors.num_attention)
    end = Instant(flattened, trained)
    parts = (*parts[:-1], Part(end, end))
    return TrainingState(
        parameters=_parameters_term(n, parameters, f"{trained:,} on every rank × {n.half} bytes"),
        gradients=Term(gradients, lambda: f"{trained:,} on every rank × {n.half} bytes of gradients"),
        optimizer=Term(optimizer, lambda: f"{trained:,} on every rank · {words} ({name})"),
        gather_forward=no_bytes("parameters are whole, so nothing is gathered in forward"),
        find_backward=lambda shape: peaks(
            parts,
            shape,
            n.half,
            sizes_of(plan, stage),
            before=gradients if n.accumulates else 0,
        ),
        optimizer_working=Term(
            update,
            lambda: f"{gib(update)} GiB fp32 gradients (FP16_Optimizer.step makes them singly, then flat)",
        ),
        initialisation={
            # Before the first step FP16_Optimizer takes one with gradients of zeros.
            "parameters": Term(parameters, lambda: "weights"),
            "optimizer": Term(
                optimizer + begins,
                lambda: "fp32 main copies, moments and gradients of zeros (DeepSpeed#1445)",
            ),
        },
        group_sizes=group_sizes(plan),
    )


def _flat(plan: Plan, stage: Stage, n: _Numbers) -> TrainingState:
    """Stages 1 and 2: one flat buffer of weights, whose parts are updated by one rank each."""
    layout: Any = plan.layout
    half, tensors = n.half, n.tensors
    dense = partition(tensors.trained, n.ranks, half)
    experts = partition(tensors.experts, n.expert_ranks, half)
    flat, part, kept = dense.flat + experts.flat, dense.part + experts.part, dense.whole + experts.whole
    optimizer = n.main * part + flat_state(plan.recipe.optimizer, part)
    # Stage 1 reduces when backward has ended, unless asked to overlap.
    is_late = layout.stage == 1 and (not layout.overlap_comm or n.accumulates)
    # Of stage 2's micro-batches before, the own part's gradients wait.
    waiting = half * kept if n.accumulates and not is_late else 0
    bucket = half * _bucket(plan, n)
    cut = Cut(dense.part, dense.rank, dense.whole, layout.reduce_bucket_size)
    parts = _flat_parts(n, cut, experts.whole, is_late)
    # Where both do not fit, DeepSpeed flattens on the host.
    flattening = half * (flat + n.trained)
    if flattening + n.frozen > plan.cluster.usable_bytes_per_gpu:
        flattening = half * flat
    update = max(FP64 * experts.piece, working(half, part, dense.piece))
    held = n.trained if is_late else kept

    def kept_words() -> str:
        return f"{kept:,} × {half} bytes · whole tensors that the fullest of {n.ranks} partitions touches"

    return TrainingState(
        parameters=_parameters_term(
            n, half * flat + n.frozen, f"{flat:,} in the flat buffer, padded to 2 × ranks, × {half} bytes"
        ),
        gradients=Term(
            half * held,
            lambda: (
                f"{held:,} × {half} bytes of gradients, whole until backward has ended (ZeRO-1)"
                if is_late
                else kept_words()
            ),
        ),
        gradients_reduced=Term(half * kept, kept_words),
        optimizer=Term(
            optimizer,
            lambda: (
                f"{n.trained:,} / {n.ranks} ranks = {part:,} × fp32 main copy and {plan.recipe.optimizer} "
                f"state (ZeRO-{layout.stage})"
            ),
        ),
        gather_forward=_bucket_term(layout, bucket)
        if n.accumulates and is_late
        else no_bytes("parameters are whole, so nothing is gathered in forward"),
        find_backward=lambda shape: peaks(
            parts,
            shape,
            half,
            sizes_of(plan, stage),
            bucket=bucket,
            # The head's own gradient has its hook first; a tied one only with the embedding's.
            first_hook=(n.accumulates and is_late) or not (n.tied or tensors.frozen),
            trains_all=not tensors.frozen,
            forward=bucket if n.accumulates and is_late else 0,
            waiting=waiting,
            before=half * held if n.accumulates else 0,
        ),
        optimizer_working=Term(
            update,
            lambda: (
                f"{gib(update)} GiB: fp32 gradients of the partition beside the {half}-byte ones, or the "
                "norm's fp64 copy of the largest piece"
            ),
        ),
        initialisation={
            "parameters": Term(
                flattening + n.frozen,
                lambda: "weights, and the flat buffer they are copied to if there is room",
            ),
        },
        group_sizes=group_sizes(plan),
    )


def _flat_parts(n: _Numbers, cut: Cut, experts: int, is_late: bool) -> tuple[Part, ...]:
    """Parts of backward in stages 1 and 2; experts of their own group are kept beside."""
    sizes = n.tensors.trained
    if is_late:
        parts = late(sizes, n.groups, n.tied, n.accumulates, n.tensors.num_attention)
        total = sum(sizes)
        end = Instant(beyond(sizes, cut), total)
        parts = (*parts[:-1], Part(end, end))
    else:
        parts = early(sizes, n.groups, cut, n.tied, n.tensors.num_attention)
    if not experts:
        return parts
    return tuple(Part(part.base, part.peak._replace(kept=part.peak.kept + experts)) for part in parts)


def _bucket(plan: Plan, n: _Numbers) -> int:
    """Elements of the contiguous bucket, allocated whole however small the model; twice to overlap."""
    layout: Any = plan.layout
    if not layout.contiguous_gradients:
        return int(smallest(n.trained, layout.reduce_bucket_size))
    return int(layout.reduce_bucket_size) * (2 if layout.overlap_comm else 1)


def _bucket_term(layout: Any, bucket: int) -> Term:
    return Term(bucket, lambda: f"{gib(bucket)} GiB (reduce_bucket_size={layout.reduce_bucket_size:,})")


def _cut(plan: Plan, stage: Stage, n: _Numbers) -> TrainingState:
    """Stage 3: every tensor cut over all ranks, gathered when a module needs it."""
    layout: Any = plan.layout
    half, tensors = n.half, n.tensors
    trained = cut_each(tensors.trained, n.ranks)
    frozen = cut_each(tensors.frozen, n.ranks)
    optimizer = n.main * trained + flat_state(plan.recipe.optimizer, trained)
    group = largest_group(tensors.trained, n.ranks, layout.sub_group_size)
    update = (FP32 + (half if half < FP32 else 0)) * group
    bucket = half * layout.reduce_bucket_size if layout.contiguous_gradients else 0
    whole = gathered_elements(plan, stage, n)

    def staging(elements: int, when: str) -> Term:
        return Term(
            bucket + half * elements,
            lambda: (
                f"{gib(bucket)} GiB bucket (reduce_bucket_size={layout.reduce_bucket_size:,}) + {elements:,} "
                f"elements × {half} bytes gathered {when} "
                f"(stage3_max_reuse_distance={layout.stage3_max_reuse_distance:,}, "
                f"stage3_prefetch_bucket_size={layout.stage3_prefetch_bucket_size:,})"
            ),
        )

    return TrainingState(
        parameters=_parameters_term(
            n._replace(frozen=0),
            half * (trained + frozen),
            f"{trained + frozen:,} = each tensor / {n.ranks} ranks, rounded up, × {half} bytes",
        ),
        gradients=Term(
            half * trained, lambda: f"{trained:,} × {half} bytes · a buffer that is kept, each tensor / ranks"
        ),
        gradients_stay=True,
        optimizer=Term(
            optimizer,
            lambda: f"{trained:,} × fp32 main copy and {plan.recipe.optimizer} state, each tensor / ranks",
        ),
        gather_rest=staging(whole.rest, "and never released"),
        gather_forward=staging(whole.forward, "when forward ends"),
        find_backward=lambda shape: peaks(
            whole.backward,
            shape,
            half,
            sizes_of(plan, stage),
            bucket=bucket,
            in_forward=whole.in_forward,
            forward=bucket + half * whole.forward,
            waiting=half * trained,
        ),
        optimizer_working=Term(
            update,
            lambda: (
                f"{gib(update)} GiB gradients of a sub-group of {group:,} (sub_group_size), flat and fp32"
            ),
        ),
        initialisation={
            "optimizer": Term(n.main * trained, lambda: "fp32 main copies; moments come with the first step"),
            "gather_buffers": staging(max(tensors.used, default=0), "tensor by tensor"),
        },
        group_sizes=group_sizes(plan),
    )


def gathered_elements(plan: Plan, stage: Stage, n: _Numbers) -> Gathered:
    """Elements that stage 3 has gathered at the moments of a step."""
    layout: Any = plan.layout
    arch, recipe = plan.architecture, plan.recipe
    moe_layers = stage.num_moe_layers
    outer = outer_shapes(plan, True, True)
    sizes: dict[str, tuple[int, ...]] = {
        group: tuple(rows * columns for other, rows, columns in outer if other == group)
        for group in ("embedding", "norm", "lm_head")
    }
    modules = Modules(
        arch,
        recipe if recipe.has_adapters else None,
        stage.num_layers - moe_layers,
        moe_layers,
        sizes["embedding"],
        sizes["norm"],
        sizes["lm_head"],
    )
    return gathered(
        modules,
        n.ranks,
        recipe.recompute in ("full", "selective"),
        Thresholds(
            layout.stage3_param_persistence_threshold,
            layout.stage3_prefetch_bucket_size,
            layout.stage3_max_live_parameters,
            layout.stage3_max_reuse_distance,
            layout.reduce_bucket_size,
        ),
    )


def _parameters_term(n: _Numbers, num_bytes: int, words: str) -> Term:
    frozen = f" + {gib(n.frozen)} GiB frozen" if n.frozen else ""
    return Term(num_bytes, lambda: f"{words}{frozen}")
