"""Environment of one rehearsed rank: fake process groups and fake tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from typing import Self

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed.tensor import DTensor

from shardscope.rehearsal.gpu_operators import gpu_operators, grouped_matmuls
from shardscope.rehearsal.patching import Patch, patch_attributes
from shardscope.rehearsal.tracker import Tracker

Convert = Callable[[torch.Tensor], torch.Tensor]


@contextlib.contextmanager
def fake_ranks(world_size: int, rank: int = 0) -> Iterator[None]:
    """Act as rank ``rank`` of ``world_size``: collectives return at once, without communication."""
    # The import registers output shapes of collectives for fake tensors.
    import_module("torch.distributed._tools.fake_collectives")
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
        _clear_mesh_caches()


def _clear_mesh_caches() -> None:
    """Clear DTensor's caches, which treat an equal mesh of the next process groups as the same mesh."""
    from torch.distributed.tensor import _redistribute, debug

    debug._clear_sharding_prop_cache()
    _redistribute._gen_transform_infos.cache_clear()
    _redistribute.clear_redistribute_planner_cache()


# DeepSpeed's MoE copies experts (deepspeed 0.19.8, moe/experts.py), and with their tensors the tensors' mode.
class _SharedFakeMode(FakeTensorMode):
    """Fake tensor mode that ``copy.deepcopy`` does not copy: views share no storage across two modes."""

    def __deepcopy__(self, memo: object) -> Self:
        return self


@contextlib.contextmanager
def fake_tensors(
    on_gpu: bool = True,
    logit_widths: Iterable[int] = (),
    *,
    separate_host: bool = False,
    has_flash: bool = True,
) -> Iterator[Tracker]:
    """Create fake tensors, which have a shape and no memory; yield the :class:`Tracker` that follows them.

    ``separate_host``: tensors on "cpu:0" are the device's, those on "cpu" the host's. For fake tensors they
    are two devices: code that would fail on a GPU because it mixes devices fails here as well. ``has_flash``:
    see :attr:`Gpu.has_flash_attention`.
    """
    tracker = Tracker(logit_widths, separate_host=separate_host)
    # The tracker is entered last, and so sees an operator first, with the tensors that the module passed.
    with (
        _SharedFakeMode(allow_non_fake_inputs=True),
        replace_converted_parameters(),
        transformers_as_on_real_tensors(),
        _hide_dtensor_shapes(tracker),
        gpu_operators(has_flash=has_flash) if on_gpu else grouped_matmuls(),
        tracker,
    ):
        yield tracker


@contextlib.contextmanager
def transformers_as_on_real_tensors() -> Iterator[None]:
    """Let transformers treat fake tensors as real ones: otherwise it keeps masks that a real run skips.

    With such a mask it also disables SDPA's grouped queries and repeats keys and values over all heads, which
    a real step does not (``masking_utils.py``, ``integrations/sdpa_attention.py``).
    """
    from transformers import masking_utils
    from transformers.utils import import_utils

    patches: list[Patch] = [
        (module, "is_tracing", _return_false)
        for module in (import_utils, masking_utils)
        if hasattr(module, "is_tracing")
    ]
    # It reads the values of positions to detect packed rows; rehearsed rows are not packed.
    patches.append((masking_utils, "find_packed_sequence_indices", _find_no_packed_rows))
    with patch_attributes(patches):
        yield


def _find_no_packed_rows(position_ids: torch.Tensor) -> None:
    return None


def _return_false(tensor: torch.Tensor | None = None) -> bool:
    return False


@contextlib.contextmanager
def _hide_dtensor_shapes(tracker: Tracker) -> Iterator[None]:
    """Hide the global-size fake tensors on which DTensor computes shapes: no rank allocates them."""
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    name = "_propagate_tensor_meta_non_cached"
    untracked = tracker.pause()(getattr(ShardingPropagator, name))
    with patch_attributes([(ShardingPropagator, name, untracked)]):
        yield


@contextlib.contextmanager
def real_tensors(tracker: Tracker) -> Iterator[None]:
    """Use real tensors inside :func:`fake_tensors`, for code that reads the values of a small tensor."""
    with unset_fake_temporarily(), tracker.pause():
        yield


# ---- ``module.to(...)`` with fake parameters, which torch supports only without weak references to them


@contextlib.contextmanager
def replace_converted_parameters() -> Iterator[None]:
    """Replace parameters in ``Module._apply`` where torch would swap fake tensors; tied ones stay tied.

    ``swap_tensors`` raises for a tensor with weak references, which every tensor that a dispatch mode has
    seen has.
    """
    original: Callable[[torch.nn.Module, Convert, bool], torch.nn.Module] = torch.nn.Module._apply
    replaced: dict[int, tuple[torch.nn.Parameter, torch.nn.Parameter]] = {}
    depth = 0

    def apply_in_place(self: torch.nn.Module, function: Convert, recurse: bool = True) -> torch.nn.Module:
        nonlocal depth
        depth += 1
        try:
            parameters = [parameter for parameter in self._parameters.values() if parameter is not None]
            if any(isinstance(parameter, DTensor) for parameter in parameters):
                return original(self, function, recurse)
            if recurse:
                for child in self.children():
                    child._apply(function)
            for name, parameter in self._parameters.items():
                if parameter is not None:
                    self._parameters[name] = _convert_parameter(parameter, function, replaced)
            for name, buffer in self._buffers.items():
                if buffer is not None:
                    self._buffers[name] = function(buffer)
            return self
        finally:
            depth -= 1
            if depth == 0:
                replaced.clear()

    with patch_attributes([(torch.nn.Module, "_apply", apply_in_place)]):
        yield


def _convert_parameter(
    parameter: torch.nn.Parameter,
    function: Convert,
    replaced: dict[int, tuple[torch.nn.Parameter, torch.nn.Parameter]],
) -> torch.nn.Parameter:
    if id(parameter) not in replaced:
        with torch.no_grad():
            converted = function(parameter)
        if converted is not parameter:
            converted = torch.nn.Parameter(converted, requires_grad=parameter.requires_grad)
        # The original is stored too: while it is alive, no other parameter can have its id.
        replaced[id(parameter)] = (parameter, converted)
    return replaced[id(parameter)][1]
