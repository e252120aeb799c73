"""Second partitions of stage 3's weights (ZeRO++'s hpZ, Wang et al. 2023, section 3.2).

Read off ``deepspeed/runtime/zero/partition_parameters.py`` (``_partition_param_sec``) and ``stage3.py``
(``_post_step``, which forgets those of what was trained) of DeepSpeed 0.19.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from shardscope.core.arrays.arithmetic import looked_up
from shardscope.frameworks.deepspeed.memory.tensors import cut_each, tensors_on

if TYPE_CHECKING:
    from shardscope.core.plan import Plan


class SecondParts(NamedTuple):
    """Elements of one rank's second partitions (hpZ), each tensor cut over ``zero_hpz_partition_size``."""

    trained: Any = 0
    """Of what is not always gathered: from its release in forward until the optimizer has stepped."""
    frozen: Any = 0
    """Of what is frozen, all along."""
    at_first: Any = 0
    """Of all tensors: ``zero.Init`` makes them all."""

    @property
    def all(self) -> Any:
        """Most that there is in a step."""
        return self.trained + self.frozen


def second_parts(plan: Plan) -> SecondParts:
    """Second partitions of one rank; none unless the layout asks for them."""
    layout: Any = plan.layout
    group = layout.zero_hpz_partition_size
    if group == 1:
        return SecondParts()
    arch, ranks = plan.architecture, plan.degrees.data_parallel
    adapted = plan.recipe if plan.recipe.has_adapters else None
    moe = arch.num_moe_layers
    tensors = tensors_on(arch, adapted, 1, 1, arch.num_hidden_layers - moe, moe, 1, 1)
    threshold = layout.stage3_param_persistence_threshold
    cut = tuple(size for size in tensors.trained if size > threshold)

    def each(sizes: tuple[int, ...]) -> Any:
        # Padded for all ranks first, then cut among the fewer.
        return looked_up(lambda number: cut_each(sizes, number), ranks) * ranks // group

    return SecondParts(each(cut), each(tensors.frozen), each((*tensors.trained, *tensors.frozen)))
