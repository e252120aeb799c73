"""Labels of the memory that DeepSpeed's methods allocate in a rehearsal, by component."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import TYPE_CHECKING, Any

from shardscope.rehearsal.fake_world import real_tensors

if TYPE_CHECKING:
    from shardscope.core.plan import Plan
    from shardscope.rehearsal.tracker import Tracker

_STAGING = {
    "deepspeed.runtime.engine:DeepSpeedEngine": ("allreduce_gradients", "buffered_allreduce_fallback"),
    "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer": (
        "setup_buckets",
        "reduce_ipg_grads",
        "reduce_independent_p_g_buckets_and_remove_grads",
    ),
    "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3": (
        "reduce_independent_p_g_buckets_and_remove_grads",
        "independent_gradient_partition_epilogue",
    ),
    "deepspeed.runtime.zero.partitioned_param_coordinator:PartitionedParameterCoordinator": (
        "fetch_sub_module",
        "release_sub_module",
    ),
}
"""What these methods make is staging for a collective: buckets, flattened copies, gathered parameters."""


@contextlib.contextmanager
def labelled(tracker: Tracker, plan: Plan) -> Iterator[None]:
    """DeepSpeed's methods say what they make."""
    found: list[tuple[Any, str, Any]] = []

    def patch(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        original = owner.__dict__[name]
        found.append((owner, name, original))
        setattr(owner, name, functools.wraps(original)(make(original)))

    def labelling(component: Any) -> Callable[[Any], Any]:
        def make(original: Any) -> Any:
            def method(*args: Any, **kwargs: Any) -> Any:
                with tracker.labelling(component):
                    return original(*args, **kwargs)

            return method

        return make

    def waiting(original: Any) -> Any:
        """Autograd made this whole gradient; it waits to be reduced and dropped."""

        def method(self: Any, param: Any, *args: Any) -> Any:
            if param.grad is not None:
                tracker.label([param.grad], "gather_buffers")
            return original(self, param, *args)

        return method

    def kept(original: Any) -> Any:
        """Reduced gradients of the own partition, copied out of the bucket."""

        def method(self: Any, *args: Any) -> Any:
            answer = original(self, *args)
            if self.grads_in_partition is not None:
                tracker.label([self.grads_in_partition], "gradients")
            return answer

        return method

    for place, names in _STAGING.items():
        module, _, name = place.partition(":")
        owner = getattr(import_module(module), name)
        for method in names:
            patch(owner, method, labelling("gather_buffers"))
    engine = import_module("deepspeed.runtime.engine").DeepSpeedEngine

    def reduced(original: Any) -> Any:
        """Whole gradients, until they are reduced when backward has ended."""

        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            tracker.label((p.grad for p in self.module.parameters() if p.grad is not None), "gradients")
            return original(self, *args, **kwargs)

        return method

    def of_real_numbers(original: Any) -> Any:
        def method(*args: Any, **kwargs: Any) -> Any:
            with real_tensors(tracker):
                return original(*args, **kwargs)

        return method

    def moved(original: Any) -> Any:
        """Cut matrices are on the device; so is all that is not cut, now."""

        def method(self: Any, model: Any, *args: Any) -> Any:
            answer = original(self, model, *args)
            tracker.label((parameter.data for parameter in model.parameters()), "parameters")
            return answer

        return method

    if plan.degrees.tp > 1:
        patch(engine, "_apply_autotp_partitioning", moved)
    patch(import_module("deepspeed.comm.torch").TorchBackend, "init_device_mesh", of_real_numbers)
    zero_12 = _owner("stage_1_and_2", "DeepSpeedZeroOptimizer")
    patch(zero_12, "copy_grads_in_partition", kept)
    patch(zero_12, "setup_buckets", labelling("gather_buffers"))
    stage: int = plan.layout.stage  # type: ignore[attr-defined]
    if stage < 2:
        patch(engine, "allreduce_gradients", reduced)
    if stage == 2:
        patch(zero_12, "process_gradients", waiting)
    if stage == 3:
        zero_3 = _owner("stage3", "DeepSpeedZeroOptimizer_Stage3")
        patch(zero_3, "reduce_ready_partitions_and_remove_grads", waiting)
    try:
        yield
    finally:
        for owner, name, original in reversed(found):
            setattr(owner, name, original)


def _owner(module: str, name: str) -> Any:
    return getattr(import_module(f"deepspeed.runtime.zero.{module}"), name)
