"""DDP rehearsal: torch's ``DistributedDataParallel`` on fake tensors, for one of any number of ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import distributed

from shardscope.frameworks.ddp.engine.engine import DdpEngine
from shardscope.frameworks.limits import check_rehearsed
from shardscope.rehearsal.fake_world import fake_ranks, fake_tensors
from shardscope.rehearsal.torch_step import FakeContext, rehearse_engine

if TYPE_CHECKING:
    from shardscope.core.plan import Plan
    from shardscope.rehearsal.result import RehearsedStage
    from shardscope.rehearsal.torch_step import NoteProgress
    from shardscope.training.engine import BuildModel


def rehearse(plan: Plan, note_progress: NoteProgress) -> list[RehearsedStage]:
    """Rehearse the one stage of ``plan``. Raises ``ValueError`` for recipes that cannot be rehearsed."""
    check_rehearsed(plan.recipe)
    # With activations offloaded to the host, fake tensors have two devices.
    apart = plan.on_gpu and plan.recipe.recompute == "offload"
    with fake_ranks(plan.world_size):
        engine = _Rehearsed(FakeContext(plan, "cpu:0" if apart else "cpu"))
        has_flash = plan.cluster.gpu.has_flash_attention
        vocab = {plan.architecture.vocab_size}
        with fake_tensors(plan.on_gpu, vocab, separate_host=apart, has_flash=has_flash) as tracker:
            engine.tracker = tracker
            return [rehearse_engine(engine, tracker, note_progress)]


class _Rehearsed(DdpEngine):
    tracker: Any
    host_model: Any = None

    def wrap(self, build_model: BuildModel) -> torch.nn.Module:
        # Build in host memory, untracked: only the parameters, then the buckets, are allocated on the device.
        with self.tracker.paused():
            self.host_model = super().build_on_host(build_model)
        self.tracker.label(self.host_model.parameters(), "parameters")
        with self.tracker.labelling("gradients"), _without_numbers():
            module: Any = super().wrap(build_model)
        module.register_comm_hook(None, lambda _, bucket: _reduced_in_place(bucket))
        module.reducer = _KeepsItsBuckets(module.reducer)
        found: torch.nn.Module = module
        return found

    def build_on_host(self, build_model: BuildModel) -> torch.nn.Module:
        found: torch.nn.Module = self.host_model
        return found


def _reduced_in_place(bucket: Any) -> Any:
    """Return a completed future with the bucket itself, as the all-reduce does."""
    done: Any = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


@contextlib.contextmanager
def _without_numbers() -> Iterator[None]:
    """Skip DDP's checks of shapes and initial weights between ranks: fake tensors have no values."""
    names = ("_verify_param_shape_across_processes", "_sync_module_states")
    before = [getattr(distributed, name) for name in names]
    for name in names:
        setattr(distributed, name, lambda *args, **kwargs: None)
    try:
        yield
    finally:
        for name, was in zip(names, before, strict=True):
            setattr(distributed, name, was)


class _KeepsItsBuckets:
    """Reducer that never rebuilds its buckets.

    After its first step DDP rebuilds the buckets in the order of gradients, for which it reads a tensor's
    values, which a fake tensor does not have. The total size of the buckets stays the same.
    """

    def __init__(self, reducer: Any) -> None:
        self._reducer = reducer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)

    def _rebuild_buckets(self) -> bool:
        return False
