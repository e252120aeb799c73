"""Environment of one rehearsed rank: fake process groups and fake tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from shardscope.rehearsal.gpu_operators import gpu_operators, grouped_products
from shardscope.rehearsal.replacing import replaced
from shardscope.rehearsal.tracker import Tracker


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
        _forget_meshes()


def _forget_meshes() -> None:
    """Clear DTensor's caches, which treat an equal mesh of the next process groups as the same mesh."""
    from torch.distributed.tensor import _redistribute, debug

    debug._clear_sharding_prop_cache()
    _redistribute._gen_transform_infos.cache_clear()
    _redistribute.clear_redistribute_planner_cache()


@contextlib.contextmanager
def fake_tensors(
    on_gpu: bool = True,
    logit_widths: Iterable[int] = (),
    *,
    host_apart: bool = False,
    has_flash: bool = True,
) -> Iterator[Tracker]:
    """Create fake tensors, which have a shape and no memory; yield the :class:`Tracker` that follows them.

    ``host_apart``: tensors on "cpu:0" are the device's, those on "cpu" the host's. For fake tensors these are
    two devices: code that would fail on a GPU because it mixes devices fails here as well. ``has_flash``:
    see :attr:`Gpu.has_flash_attention`.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    tracker = Tracker(logit_widths, host_apart=host_apart)
    mode: Any = FakeTensorMode(allow_non_fake_inputs=True)
    # copy.deepcopy of a tensor would copy the mode too; views share no storage across two modes.
    mode.__deepcopy__ = lambda _: mode
    with (
        mode,
        converting_by_replacing(),
        _transformers_as_on_real_tensors(),
        _shapes_of_dtensors_unseen(tracker),
        gpu_operators(has_flash=has_flash) if on_gpu else grouped_products(),
        tracker,
    ):
        yield tracker


@contextlib.contextmanager
def _transformers_as_on_real_tensors() -> Iterator[None]:
    """Let transformers treat fake tensors as real ones: otherwise it keeps masks that a real run skips.

    With such a mask it also disables SDPA's grouped queries and repeats keys and values over all heads, which
    a real step does not (``masking_utils.py``, ``integrations/sdpa_attention.py``).
    """
    from transformers import masking_utils
    from transformers.utils import import_utils

    patches: list[tuple[Any, str, Any]] = [
        (module, "is_tracing", _never)
        for module in (import_utils, masking_utils)
        if hasattr(module, "is_tracing")
    ]
    # It reads the values of positions to detect packed rows; rehearsed rows are not packed.
    patches.append((masking_utils, "find_packed_sequence_indices", _not_packed))
    with replaced(patches):
        yield


def _not_packed(position_ids: torch.Tensor) -> None:
    return None


def _never(tensor: Any = None) -> bool:
    return False


@contextlib.contextmanager
def _shapes_of_dtensors_unseen(tracker: Tracker) -> Iterator[None]:
    """Hide the global-size fake tensors on which DTensor computes shapes: no rank allocates them."""
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    name = "_propagate_tensor_meta_non_cached"
    before = getattr(ShardingPropagator, name)

    def unseen(self: Any, *args: Any, **kwargs: Any) -> Any:
        with tracker.paused():
            return before(self, *args, **kwargs)

    setattr(ShardingPropagator, name, unseen)
    try:
        yield
    finally:
        setattr(ShardingPropagator, name, before)


@contextlib.contextmanager
def real_numbers(tracker: Tracker) -> Iterator[None]:
    """Use real tensors inside :func:`fake_tensors`, for code that reads the values of a small tensor."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    with unset_fake_temporarily(), tracker.paused():
        yield


# ---- ``module.to(...)`` with fake parameters, which torch supports only without weak references to them


@contextlib.contextmanager
def converting_by_replacing() -> Iterator[None]:
    """Replace parameters in ``Module._apply`` where torch would swap fake tensors; tied ones stay tied.

    ``swap_tensors`` raises for a tensor with weak references, which every tensor that a dispatch mode has
    seen has.
    """
    original = torch.nn.Module._apply
    replaced: dict[int, tuple[Any, Any]] = {}
    depth = 0

    def apply(self: Any, function: Callable[[Any], Any], recurse: bool = True) -> Any:
        nonlocal depth
        depth += 1
        try:
            own = [parameter for parameter in self._parameters.values() if parameter is not None]
            if any(isinstance(parameter, DTensor) for parameter in own):
                return original(self, function, recurse)
            if recurse:
                for module in self.children():
                    module._apply(function)
            for name, parameter in self._parameters.items():
                if parameter is not None:
                    self._parameters[name] = _converted(parameter, function, replaced)
            for name, buffer in self._buffers.items():
                if buffer is not None:
                    self._buffers[name] = function(buffer)
            return self
        finally:
            depth -= 1
            if depth == 0:
                replaced.clear()

    torch.nn.Module._apply = apply
    try:
        yield
    finally:
        torch.nn.Module._apply = original


def _converted(parameter: Any, function: Callable[[Any], Any], replaced: dict[int, tuple[Any, Any]]) -> Any:
    if id(parameter) not in replaced:
        with torch.no_grad():
            new = function(parameter)
        kept = new if new is parameter else torch.nn.Parameter(new, requires_grad=parameter.requires_grad)
        replaced[id(parameter)] = (parameter, kept)
    return replaced[id(parameter)][1]
