"""Labels of the memory that DeepSpeed's methods allocate in a rehearsal, by component."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import TYPE_CHECKING

from shardscope.frameworks.deepspeed.layout import get_layout
from shardscope.rehearsal.fake_world import real_tensors

if TYPE_CHECKING:
    import torch
    from deepspeed import DeepSpeedEngine
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    from shardscope.core.plan import Plan
    from shardscope.memory.report import Component
    from shardscope.rehearsal.tracker import Tracker

Method = Callable[..., object]
Wrap = Callable[[Method], Method]
"""Returns a method that calls the given one, and labels what it allocates."""

ENGINE = "deepspeed.runtime.engine:DeepSpeedEngine"
ZERO_12 = "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer"
ZERO_3 = "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3"
STAGING = {
    ENGINE: ("allreduce_gradients", "buffered_allreduce_fallback"),
    ZERO_12: (
        "setup_buckets",
        "reduce_ipg_grads",
        "reduce_independent_p_g_buckets_and_remove_grads",
    ),
    ZERO_3: (
        "reduce_independent_p_g_buckets_and_remove_grads",
        "independent_gradient_partition_epilogue",
    ),
    "deepspeed.runtime.zero.partitioned_param_coordinator:PartitionedParameterCoordinator": (
        "fetch_sub_module",
        "release_sub_module",
    ),
}
"""Methods that allocate staging memory of collectives: buckets, copies, all-gathered parameters."""


@contextlib.contextmanager
def label_allocations(tracker: Tracker, plan: Plan) -> Iterator[None]:
    """Wrap DeepSpeed's methods, so that the tracker labels what each of them allocates."""
    stage = get_layout(plan).stage
    with contextlib.ExitStack() as stack:

        def patch(owner: str, method: str, wrap: Wrap) -> None:
            module, _, name = owner.partition(":")
            stack.enter_context(_patch_method(getattr(import_module(module), name), method, wrap))

        # Staging memory of collectives.
        for owner, methods in STAGING.items():
            for method in methods:
                patch(owner, method, _label_new(tracker, "gather_buffers"))
        # AutoTP moves shards and whatever is not sharded to the device.
        if plan.degrees.tp > 1:
            patch(ENGINE, "_apply_autotp_partitioning", _label_parameters(tracker))
        patch("deepspeed.comm.torch:TorchBackend", "init_device_mesh", _use_real_tensors(tracker))
        # Gradients: full until they are reduced (stages 0 and 1), else partitions copied from the bucket.
        patch(ZERO_12, "copy_grads_in_partition", _label_partitions(tracker))
        if stage < 2:
            patch(ENGINE, "allreduce_gradients", _label_full_gradients(tracker))
        if stage == 2:
            patch(ZERO_12, "process_gradients", _label_waiting_gradient(tracker))
        if stage == 3:
            patch(ZERO_3, "reduce_ready_partitions_and_remove_grads", _label_waiting_gradient(tracker))
        yield


@contextlib.contextmanager
def _patch_method(owner: type, name: str, wrap: Wrap) -> Iterator[None]:
    original = owner.__dict__[name]
    setattr(owner, name, functools.wraps(original)(wrap(original)))
    try:
        yield
    finally:
        setattr(owner, name, original)


def _label_new(tracker: Tracker, component: Component) -> Wrap:
    """Label everything that the method allocates."""

    def wrap(original: Method) -> Method:
        def method(*args: object, **kwargs: object) -> object:
            with tracker.labelling(component):
                return original(*args, **kwargs)

        return method

    return wrap


def _use_real_tensors(tracker: Tracker) -> Wrap:
    """Run the method on real tensors: a device mesh reads the values of its ranks."""

    def wrap(original: Method) -> Method:
        def method(*args: object, **kwargs: object) -> object:
            with real_tensors(tracker):
                return original(*args, **kwargs)

        return method

    return wrap


def _label_parameters(tracker: Tracker) -> Wrap:
    """Label the model's parameters as they are after the method."""

    def wrap(original: Method) -> Method:
        def method(engine: DeepSpeedEngine, model: torch.nn.Module, *args: object) -> object:
            result = original(engine, model, *args)
            tracker.label((parameter.data for parameter in model.parameters()), "parameters")
            return result

        return method

    return wrap


def _label_partitions(tracker: Tracker) -> Wrap:
    """Label the reduced gradients of this rank's partition, which the method copies from the bucket."""

    def wrap(original: Method) -> Method:
        def method(optimizer: DeepSpeedZeroOptimizer, *args: object) -> object:
            result = original(optimizer, *args)
            if optimizer.grads_in_partition is not None:
                tracker.label([optimizer.grads_in_partition], "gradients")
            return result

        return method

    return wrap


def _label_full_gradients(tracker: Tracker) -> Wrap:
    """Label the full gradients, which live until the method reduces them at the end of backward."""

    def wrap(original: Method) -> Method:
        def method(engine: DeepSpeedEngine, *args: object, **kwargs: object) -> object:
            gradients = (p.grad for p in engine.module.parameters() if p.grad is not None)
            tracker.label(gradients, "gradients")
            return original(engine, *args, **kwargs)

        return method

    return wrap


def _label_waiting_gradient(tracker: Tracker) -> Wrap:
    """Label a full gradient from autograd, which waits to be reduced and freed."""

    def wrap(original: Method) -> Method:
        def method(optimizer: DeepSpeedZeroOptimizer, parameter: torch.nn.Parameter, *args: object) -> object:
            if parameter.grad is not None:
                tracker.label([parameter.grad], "gather_buffers")
            return original(optimizer, parameter, *args)

        return method

    return wrap
