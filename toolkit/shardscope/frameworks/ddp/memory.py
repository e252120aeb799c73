"""DDP's training state: a whole replica on every rank (Li et al. 2020, section 4)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardscope.memory.optimizer_state import optimizer_bytes
from shardscope.memory.precision import widths
from shardscope.memory.report import Term, no_bytes
from shardscope.memory.stages import Stage, stages_of
from shardscope.memory.state import TrainingState
from shardscope.memory.words import count

if TYPE_CHECKING:
    from shardscope.plan import Plan


def stages(plan: Plan) -> list[Stage]:
    """One stage with the whole model."""
    return stages_of(plan)


def training_state(plan: Plan, stage: Stage) -> TrainingState:
    """Parameters, gradients and moments in the originals' type; gradients are views of the buckets."""
    width = widths[plan.recipe.precision]
    trained = width.original * stage.trainable
    optimizer = optimizer_bytes(plan, stage, width.original, num_shards=1, library="bitsandbytes")
    parameters = width.original * (stage.base + stage.adapters)

    def parameter_words() -> str:
        if stage.adapters:
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
                f"{count(stage.trainable, 'gradient')} × {width.original} bytes · views of the reduction "
                "buckets (gradient_as_bucket_view=True)"
            ),
        ),
        optimizer=optimizer.state,
        optimizer_working=optimizer.working,
        host_bytes=optimizer.host_bytes,
        gather_forward=no_bytes("nothing is sharded, so nothing is gathered"),
        gather_backward=no_bytes("gradients are reduced in their buckets"),
        group_sizes=(plan.degrees.data_parallel,),
        # DDP's reducer makes its buckets when it wraps the model and keeps them for the whole run.
        gradients_stay=True,
    )
