"""DDP's training state: a whole replica on every rank (Li et al. 2020, section 4)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardscope.memory.arithmetic import largest, where
from shardscope.memory.backward import Backward, Peak
from shardscope.memory.head import loss_in_force
from shardscope.memory.optimizer_state import optimizer_bytes
from shardscope.memory.precision import widths
from shardscope.memory.quantization import frozen_base_bytes
from shardscope.memory.report import Term, chosen, no_bytes
from shardscope.memory.stages import Shapes, Stage, StageShape, shapes_of, stage_of
from shardscope.memory.state import TrainingState
from shardscope.memory.words import count, gib

if TYPE_CHECKING:
    from shardscope.plan import Plan


_NOTHING_GATHERED = no_bytes("nothing is sharded, so nothing is gathered")


def shapes(plan: Plan) -> Shapes:
    """One stage with the whole model."""
    return shapes_of(plan.architecture, plan.stage_layers)


def stage(plan: Plan, shape: StageShape) -> Stage:
    """The weights of one of them."""
    return stage_of(plan, shape)


def training_state(plan: Plan, stage: Stage) -> TrainingState:
    """Parameters, gradients and moments in the originals' type; gradients are views of the buckets."""
    width = widths[plan.recipe.precision]
    quantised = plan.recipe.base_quantization is not None
    # peft makes adapters of a quantised Linear in the type that this computes in.
    each = width.compute if quantised else width.original
    trained = each * stage.trainable
    optimizer = optimizer_bytes(plan, stage, each, num_shards=1, library="bitsandbytes")
    base = frozen_base_bytes(plan, stage, width.original) if quantised else width.original * stage.base
    parameters = base + each * stage.adapters

    def parameter_words() -> str:
        if quantised:
            return (
                f"{gib(base)} GiB of {stage.base:,} frozen weights, Linears in NF4, others × "
                f"{width.original} bytes + {stage.adapters:,} of adapters × {each} bytes (Dettmers et al. "
                "2023, bitsandbytes)"
            )
        if plan.recipe.has_adapters:
            return (
                f"({stage.base:,} frozen + {stage.adapters:,} of adapters) × {width.original} bytes · whole "
                "on every rank (Li et al. 2020); autocast casts the base, so it stays in its own type"
            )
        weights = count(stage.base, "parameter")
        return f"{weights} × {width.original} bytes · whole on every rank (Li et al. 2020)"

    return TrainingState(
        parameters=Term(parameters, parameter_words),
        gradients=Term(
            trained,
            lambda: (
                f"{count(stage.trainable, 'gradient')} × {each} bytes · views of the reduction "
                "buckets (gradient_as_bucket_view=True)"
            ),
        ),
        optimizer=optimizer.state,
        optimizer_working=optimizer.working,
        host_bytes=optimizer.host_bytes,
        gather_forward=_NOTHING_GATHERED,
        group_sizes=(plan.degrees.data_parallel,),
        # DDP's reducer makes its buckets when it wraps the model and keeps them for the whole run.
        gradients_stay=True,
        gradients_waiting=_waiting(trained),
        find_backward=lambda shape: _backward(plan, stage, shape, trained),
    )


def _waiting(trained: int) -> Term:
    """Without reduction (``no_sync``) gradients are tensors of their own, until the last backward."""
    return Term(
        2 * trained,
        lambda: (
            f"{gib(trained)} GiB buckets + {gib(trained)} GiB sums of earlier micro-batches beside them, for "
            "no_sync leaves gradients out of the buckets"
        ),
    )


def _backward(plan: Plan, stage: Stage, shape: Backward, trained: int) -> list[Peak]:
    """The loss, the head's weight, the last decoder layer and the embedding."""
    width = widths[plan.recipe.precision]
    # Autocast's backward makes a weight's gradient in half precision, and casts it for the bucket.
    mixed = plan.recipe.precision.endswith("mixed")
    has_adapters = plan.recipe.has_adapters
    each = 0 if has_adapters else width.compute + (width.original if mixed else 0)
    tokens = plan.recipe.micro_batch_size * plan.recipe.seq_len
    vocab, hidden = plan.architecture.vocab_size, plan.architecture.hidden_size
    full = shape.layers + shape.edges + shape.cast
    whole_logits = loss_in_force(plan) == "full" and not has_adapters
    logits = 0 if not whole_logits else width.compute * vocab * tokens
    head = largest(
        full + logits + width.compute * stage.head * (not has_adapters),
        full - (width.compute * stage.head if mixed else 0) + each * stage.head + shape.stream,
    )
    matrix = each * plan.architecture.intermediate_size * hidden
    experts = plan.architecture.mixture_of_experts
    layer = largest(shape.earlier, shape.inside, shape.stream + matrix)
    if experts is not None and not has_adapters:
        # Grouped products are not autocast, so their weights' gradients are the originals' own type.
        gate_up = experts.num_experts * 2 * experts.moe_intermediate_size * hidden * width.original
        with_experts = largest(shape.earlier, shape.inside, shape.later + gate_up)
        layer = where(stage.num_moe_layers > 0, with_experts, layer)
    inside = shape.layers + shape.cast * (not mixed) + layer
    inside += (shape.cast - width.compute * stage.head) * mixed
    # A tied head's gradient waits inside of autograd for the embedding's, and then for their sum.
    tied = 0
    if plan.architecture.tie_word_embeddings and not has_adapters:
        tied = width.original * stage.head
    embedding = shape.stream + (
        0 if has_adapters else largest(width.original * (stage.edges - stage.head), 3 * tied)
    )
    whole = Term(trained, lambda: f"{gib(trained)} GiB, views of the reduction buckets")
    gradients = chosen(plan.num_micro_batches > 1, _waiting(trained), whole)
    return [
        Peak(0.34, _held(full, "all that forward saved"), _NOTHING_GATHERED, gradients, logits=shape.logits),
        Peak(0.36, _held(head, "that, and the gradient of the head's weight"), _NOTHING_GATHERED, gradients),
        Peak(
            0.40,
            _held(inside + tied, "all layers', and gradients inside the last"),
            _NOTHING_GATHERED,
            gradients,
        ),
        Peak(0.97, _held(embedding, "the gradient of the embedding"), _NOTHING_GATHERED, whole),
    ]


def _held(num_bytes: int, words: str) -> Term:
    return Term(num_bytes, lambda: f"{gib(num_bytes)} GiB: {words}, operator by operator")
