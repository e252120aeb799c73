"""Labels of the memory that DeepSpeed's methods allocate in a rehearsal, by component."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import TYPE_CHECKING

import torch

from shardscope.frameworks.deepspeed.layout import get_layout
from shardscope.rehearsal.fake_world import real_tensors
from shardscope.rehearsal.patching import CallContext, methods_in_context

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    from shardscope.core.plan import Plan
    from shardscope.rehearsal.tracker import Tracker

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
    labels = _Labels(tracker)
    with contextlib.ExitStack() as stack:

        def wrap(owner: str, method: str, find_context: CallContext) -> None:
            module, _, name = owner.partition(":")
            stack.enter_context(
                methods_in_context(getattr(import_module(module), name), [method], find_context)
            )

        # Staging memory of collectives.
        for owner, methods in STAGING.items():
            for method in methods:
                wrap(owner, method, lambda _: tracker.label_new_storages("gather_buffers"))
        # AutoTP moves shards and whatever is not sharded to the device.
        if plan.degrees.tp > 1:
            wrap(ENGINE, "_apply_autotp_partitioning", labels.label_parameters)
        # A device mesh reads the values of the tensor with its ranks.
        wrap("deepspeed.comm.torch:TorchBackend", "init_device_mesh", lambda _: real_tensors(tracker))
        # Gradients: full until they are reduced (stages 0 and 1), else partitions copied from the bucket.
        wrap(ZERO_12, "copy_grads_in_partition", labels.label_partitions)
        if stage < 2:
            wrap(ENGINE, "allreduce_gradients", labels.label_full_gradients)
        if stage == 2:
            wrap(ZERO_12, "process_gradients", labels.label_waiting_gradient)
        if stage == 3:
            wrap(ZERO_3, "reduce_ready_partitions_and_remove_grads", labels.label_waiting_gradient)
        yield


class _Labels:
    """Contexts of DeepSpeed's methods, which label tensors before or after the call."""

    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker

    @contextlib.contextmanager
    def label_parameters(self, arguments: Sequence[object]) -> Iterator[None]:
        """Label the model's parameters as they are after the method (engine, model, ...)."""
        model = arguments[1]
        assert isinstance(model, torch.nn.Module)
        yield
        self._tracker.label((parameter.data for parameter in model.parameters()), "parameters")

    @contextlib.contextmanager
    def label_partitions(self, arguments: Sequence[object]) -> Iterator[None]:
        """Label the reduced gradients of this rank's partition, which the method copies from the bucket."""
        optimizer: DeepSpeedZeroOptimizer = arguments[0]
        yield
        if optimizer.grads_in_partition is not None:
            self._tracker.label([optimizer.grads_in_partition], "gradients")

    @contextlib.contextmanager
    def label_full_gradients(self, arguments: Sequence[object]) -> Iterator[None]:
        """Label the full gradients, which live until the method reduces them at the end of backward."""
        engine: DeepSpeedEngine = arguments[0]
        gradients = (p.grad for p in engine.module.parameters() if p.grad is not None)
        self._tracker.label(gradients, "gradients")
        yield

    @contextlib.contextmanager
    def label_waiting_gradient(self, arguments: Sequence[object]) -> Iterator[None]:
        """Label a parameter's full gradient from autograd, which waits to be reduced and freed."""
        parameter = arguments[1]
        assert isinstance(parameter, torch.Tensor)
        if parameter.grad is not None:
            self._tracker.label([parameter.grad], "gather_buffers")
        yield
