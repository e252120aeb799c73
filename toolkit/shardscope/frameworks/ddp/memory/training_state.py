"""DDP's training state: a whole replica on every rank (Li et al. 2020, section 4)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardscope.core.number_format import format_count, format_gib
from shardscope.core.precision import FP32, get_base_width, widths
from shardscope.frameworks.ddp.memory.peaks import NOTHING_GATHERED, explain_accumulated, find_peaks
from shardscope.memory.report import Term
from shardscope.memory.state.optimizer_state import compute_optimizer_bytes
from shardscope.memory.state.quantization import compute_frozen_base_bytes
from shardscope.memory.state.stages import (
    Stage,
    StageShape,
    StageShapes,
    count_stage_weights,
    find_stage_shapes,
)
from shardscope.memory.state.training_state import TrainingState

if TYPE_CHECKING:
    from shardscope.core.plan import Plan

counts_neighbours = False
branches_on_stages = False


def find_shapes(plan: Plan) -> StageShapes:
    """Return the shape of the one stage, the whole model."""
    return find_stage_shapes(plan.architecture, plan.stage_layers)


def count_weights(plan: Plan, shape: StageShape) -> Stage:
    """Return the weights of the stage."""
    return count_stage_weights(plan, shape)


def compute_training_state(plan: Plan, stage: Stage) -> TrainingState:
    """Return one rank's parameters, gradients and optimizer state in the weights' type, in bytes.

    Gradients are views of the reducer's buckets.
    """
    width, frozen_width = widths[plan.recipe.precision], get_base_width(plan.recipe)
    is_quantized = plan.recipe.base_quantization is not None
    # peft creates the adapters of an int8 Linear in fp32 (tuners_utils.py,
    # _move_adapter_to_device_of_base_layer: an integer type is not adopted).
    int8 = plan.recipe.base_quantization == "int8"
    trained_width = FP32 if int8 else width.original
    trained = trained_width * stage.trainable
    optimizer = compute_optimizer_bytes(plan, stage, trained_width, num_shards=1, library="bitsandbytes")
    base = compute_frozen_base_bytes(plan, stage, frozen_width) if is_quantized else frozen_width * stage.base
    parameters = base + trained_width * stage.adapters

    def explain_parameters() -> str:
        if is_quantized:
            kind, source = ("int8", "2022") if int8 else ("NF4", "2023")
            return (
                f"{format_gib(base)} GiB of {stage.base:,} frozen weights, Linears in {kind}, others × "
                f"{frozen_width} bytes + {stage.adapters:,} of adapters × {trained_width} bytes (Dettmers et "
                f"al. {source}, bitsandbytes)"
            )
        if plan.recipe.has_adapters:
            return (
                f"{stage.base:,} frozen × {frozen_width} bytes + {stage.adapters:,} of adapters × "
                f"{trained_width} bytes · unsharded on every rank (Li et al. 2020); frozen weights have no "
                "fp32 original"
            )
        weights = format_count(stage.base, "parameter")
        return f"{weights} × {width.original} bytes · unsharded on every rank (Li et al. 2020)"

    return TrainingState(
        parameters=Term(parameters, explain_parameters),
        gradients=Term(
            trained,
            lambda: (
                f"{format_count(stage.trainable, 'gradient')} × {trained_width} bytes · views of the "
                "reduction buckets (gradient_as_bucket_view=True)"
            ),
        ),
        optimizer=optimizer.state,
        optimizer_working=optimizer.working,
        host_bytes=optimizer.host_bytes,
        gather_forward=NOTHING_GATHERED,
        group_sizes=(plan.degrees.data_parallel,),
        # DDP's reducer allocates its buckets when it wraps the model and keeps them for the whole run.
        keeps_gradients=True,
        # Under no_sync autograd creates .grad tensors of its own: they are not in the buckets until the last
        # backward.
        gradients_accumulated=_compute_unreduced_gradients(trained),
        find_backward_peaks=lambda backward: find_peaks(plan, stage, backward, trained),
    )


def _compute_unreduced_gradients(trained: int) -> Term:
    """Return the buckets and the gradients that ``no_sync`` keeps separate until the last backward. Bytes."""
    return Term(2 * trained, lambda: f"{format_gib(trained)} GiB buckets + {explain_accumulated(trained)}")
