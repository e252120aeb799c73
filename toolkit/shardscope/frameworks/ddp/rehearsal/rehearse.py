"""DDP rehearsal: torch's ``DistributedDataParallel`` on fake tensors, for one of any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel, distributed

from shardscope.frameworks.ddp.engine.engine import DdpEngine
from shardscope.frameworks.limits import check_rehearsed
from shardscope.rehearsal.fake_world import fake_ranks, fake_tensors
from shardscope.rehearsal.patching import patch_attributes
from shardscope.rehearsal.torch_step import FakeContext, rehearse_engine

if TYPE_CHECKING:
    from shardscope.core.plan import Plan
    from shardscope.rehearsal.result import RehearsedStage
    from shardscope.rehearsal.torch_step import NoteProgress
    from shardscope.rehearsal.tracker import Tracker
    from shardscope.training.engine import BuildModel, Context


def rehearse(plan: Plan, note_progress: NoteProgress) -> list[RehearsedStage]:
    """Rehearse the one stage of ``plan``. Raises ``ValueError`` for recipes that cannot be rehearsed."""
    check_rehearsed(plan.recipe)
    # With activations offloaded to the host, fake tensors have two devices.
    separate_host = plan.on_gpu and plan.recipe.recompute == "offload"
    context = FakeContext(plan, "cpu:0" if separate_host else "cpu")
    has_flash = plan.cluster.gpu.has_flash_attention
    vocab = {plan.architecture.vocab_size}
    with (
        fake_ranks(plan.world_size),
        fake_tensors(plan.on_gpu, vocab, separate_host=separate_host, has_flash=has_flash) as tracker,
        _ddp_without_values(),
    ):
        return [rehearse_engine(_RehearsedDdpEngine(context, tracker), tracker, note_progress)]


class _RehearsedDdpEngine(DdpEngine):
    """DDP engine whose tensors are fake, and whose all-reduce completes immediately."""

    _host_model: torch.nn.Module

    def __init__(self, ctx: Context, tracker: Tracker) -> None:
        super().__init__(ctx)
        self._tracker = tracker

    def wrap(self, build_model: BuildModel) -> torch.nn.Module:
        # Build in host memory, untracked: only the parameters, then the buckets, are allocated on the device.
        with self._tracker.pause():
            self._host_model = super().build_on_host(build_model)
        self._tracker.label(self._host_model.parameters(), "parameters")
        with self._tracker.label_new_storages("gradients"):
            module = super().wrap(build_model)
        assert isinstance(module, DistributedDataParallel)
        # A lambda: DDP compares a hook's annotations with classes (_check_comm_hook), and those of a function
        # in this module are strings.
        module.register_comm_hook(None, lambda _, bucket: _return_bucket(bucket))
        return module

    def build_on_host(self, build_model: BuildModel) -> torch.nn.Module:
        return self._host_model


def _return_bucket(bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Return a completed future with the bucket itself, as the all-reduce does: it works in place."""
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


@contextmanager
def _ddp_without_values() -> Iterator[None]:
    """Skip the parts of DDP that read a tensor's values, which fake tensors do not have.

    The constructor compares shapes between ranks and broadcasts initial weights. After the first step the
    reducer rebuilds its buckets in the order of gradients; their total size stays the same.
    """
    with patch_attributes([
        (distributed, "_verify_param_shape_across_processes", _verify_nothing),
        (distributed, "_sync_module_states", _sync_nothing),
        (dist.Reducer, "_rebuild_buckets", _keep_buckets),
    ]):  # fmt: skip
        yield


def _verify_nothing(
    process_group: dist.ProcessGroup, tensors: Sequence[torch.Tensor], logger: dist.Logger | None = None
) -> None:
    """Replace torch.distributed.utils._verify_param_shape_across_processes."""


def _sync_nothing(*args: object, **kwargs: object) -> None:
    """Replace torch.distributed.utils._sync_module_states."""


def _keep_buckets(reducer: dist.Reducer) -> bool:
    """Replace Reducer._rebuild_buckets. Returns whether buckets were rebuilt."""
    return False
