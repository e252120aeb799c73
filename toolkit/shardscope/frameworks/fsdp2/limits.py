"""What the FSDP2 engine runs of what can be planned: it shards and replicates, no more yet."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardscope.frameworks.limits import check_recipe
from shardscope.validation import refuse

if TYPE_CHECKING:
    from shardscope.plan import Plan


HOST_BUILD_BYTES = 2**30
"""Fresh models up to this size (in fp32) are built whole on each rank, with DDP's weights; larger ones on
meta. A model with weights of its own is built whole whatever its size."""


def check_plan(plan: Plan) -> None:
    """Raise ``ValueError`` for what the engine cannot run."""
    layout: Any = plan.layout
    for degree in ("tp", "pp", "cp"):  # vpp comes with pp only.
        if getattr(layout, degree) > 1:
            refuse(
                f"Layout.{degree}",
                getattr(layout, degree),
                f"1 to train: the {layout.title} engine runs shard and replicate, and does not run {degree} "
                "yet",
                f"{degree}=1",
            )
    check_recipe(plan.recipe)
