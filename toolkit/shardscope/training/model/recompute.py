"""Activation checkpointing per decoder layer (``Recipe.recompute``)."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, ParamSpec, Self, TypeVar

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from shardscope.training.optimizers.gradients import local_shard

P = ParamSpec("P")
R = TypeVar("R")

_KEPT_BY_SELECTIVE = frozenset(
    getattr(torch.ops.aten, name).default
    for name in (
        "mm",
        "addmm",
        "bmm",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
    )
    if hasattr(torch.ops.aten, name)
)
"""Operators whose outputs "selective" saves: matmuls and attention. Norms, activation functions, rotary and
residuals are cheap to recompute. The same list as torchtitan's, without collectives (layers have none)."""


def list_decoder_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the repeated layers of ``model``: its longest outermost ``ModuleList``; empty if it has none."""
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    # Consider only outermost lists: a list of experts inside a layer may be longer than the list of layers.
    outer: list[torch.nn.ModuleList] = []
    for candidate in lists:
        if not any(candidate is inner for accepted in outer for inner in accepted.modules()):
            outer.append(candidate)
    layers: list[torch.nn.Module] = []
    for candidate in outer:
        layers = list(candidate) if len(candidate) > len(layers) else layers
    return layers


def apply_recompute(model: torch.nn.Module, recompute: str, interval: int = 1) -> int:
    """Make every ``interval``-th decoder layer recompute in the backward pass. Return their number.

    ``"offload"`` recomputes nothing: it keeps the layer's saved tensors in host memory.

    The layer's ``forward`` is replaced, not its ``__call__``: FSDP2's all-gather hooks stay outside of the
    recomputed region, and parameter names do not change (``checkpoint_wrapper`` would add a prefix). Raises
    ``ValueError`` for an unknown choice and for a model without layers.
    """
    if recompute == "none":
        return 0
    if recompute not in ("full", "selective", "offload"):
        raise ValueError(
            f"Recipe.recompute is {recompute!r}; allowed: 'none', 'selective', 'full', 'offload'. "
            "Nearest fix: 'full'."
        )
    layers = list_decoder_layers(model)[::interval]
    if not layers:
        raise ValueError(
            f"Recipe.recompute is {recompute!r}, but {type(model).__name__} has no ModuleList of layers; "
            "allowed: a model with one, or recompute='none'. Nearest fix: 'none'."
        )
    for layer in layers:
        layer.forward = _wrap_forward(layer, recompute)
    return len(layers)


def _wrap_forward(layer: torch.nn.Module, recompute: str) -> functools.partial[object]:
    """Return the ``forward`` of a layer that recomputes; :func:`_read_recompute` recognizes it."""
    if recompute == "offload":
        return functools.partial(_run_offloaded, layer, layer.forward)
    if recompute == "selective":
        return functools.partial(
            checkpoint, layer.forward, use_reentrant=False, context_fn=_create_selective_contexts
        )
    return functools.partial(checkpoint, layer.forward, use_reentrant=False)


def check_recompute(model: torch.nn.Module, recompute: str, interval: int = 1) -> dict[str, object]:
    """Read back the recomputation of the decoder layers of ``model``, for a run's record.

    Raises ``RuntimeError`` if it differs from :func:`apply_recompute` with the same arguments.
    """
    actual = [_read_recompute(layer) for layer in list_decoder_layers(model)]
    planned = ["none" if number % interval else recompute for number in range(len(actual))]
    if actual != planned:
        frequency = "every layer" if interval == 1 else f"one of {interval} layers"
        raise RuntimeError(
            f"the plan says recompute={recompute!r} in {frequency}, and the layers do: {', '.join(actual)}"
        )
    recomputed = [kind for kind in actual if kind != "none"]
    return {"recompute": recomputed[0] if recomputed else "none", "num_recomputed_layers": len(recomputed)}


def _read_recompute(layer: torch.nn.Module) -> str:
    """Return the ``recompute`` choice that a layer's ``forward`` implements."""
    forward = vars(layer).get("forward")
    # torch.compile stores the function that it replaces (torch 2.13, _dynamo/eval_frame.py).
    forward = getattr(forward, "_torchdynamo_orig_callable", forward)
    if getattr(forward, "__func__", None) is run_recomputed:
        return "full"
    if not isinstance(forward, functools.partial):
        return "none"
    if forward.func is _run_offloaded:
        return "offload"
    if forward.func is not checkpoint:
        return "none"
    return "selective" if "context_fn" in forward.keywords else "full"


def run_recomputed(layer: torch.nn.Module, *args: object, **kwargs: object) -> object:
    """Run the layer's forward under full checkpointing, for compiled layers."""
    # checkpoint() takes its own options and the keywords together: types do not separate them.
    return checkpoint(type(layer).forward, layer, *args, use_reentrant=False, **kwargs)  # type: ignore[arg-type]


class _OffloadedTensor(NamedTuple):
    """A saved tensor in host memory: the copy of its storage, and its view of that storage."""

    copy: _HostCopy
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt


class _OffloadedDTensor(NamedTuple):
    """A saved DTensor, whose local tensor is in host memory."""

    local: _OffloadedTensor
    mesh: DeviceMesh
    placements: Sequence[Placement]
    size: torch.Size
    stride: tuple[int, ...]


def _run_offloaded(layer: torch.nn.Module, forward: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Run ``forward`` with its saved tensors in host memory, each storage copied once.

    Weights are not offloaded: they are resident anyway, and FSDP2 all-gathers them again. Weight storages are
    identified when a tensor is saved: ZeRO-3 all-gathers each weight only when its own module runs.
    """
    parameters = list(layer.parameters())
    copies: dict[int, _HostCopy] = {}

    def offload(tensor: torch.Tensor) -> torch.Tensor | _OffloadedTensor | _OffloadedDTensor:
        # With tensor parallelism. A DTensor has no storage of its own: reading it crashes the process.
        if isinstance(tensor, DTensor):
            local = offload(tensor._local_tensor)
            if not isinstance(local, _OffloadedTensor):
                return tensor
            return _OffloadedDTensor(
                local, tensor.device_mesh, tensor.placements, tensor.size(), tensor.stride()
            )
        if isinstance(tensor, AsyncCollectiveTensor):
            tensor = tensor.trigger_wait()
        # Storages are compared by the address of the C++ object: Python objects of one storage differ.
        storage = tensor.untyped_storage()
        if any(local_shard(parameter).untyped_storage()._cdata == storage._cdata for parameter in parameters):
            return tensor
        if storage._cdata not in copies or not copies[storage._cdata].is_current:
            copies[storage._cdata] = _HostCopy(storage, tensor.device)
        return _OffloadedTensor(
            copies[storage._cdata], tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset()
        )

    def fetch_back(saved: torch.Tensor | _OffloadedTensor | _OffloadedDTensor) -> torch.Tensor:
        if isinstance(saved, torch.Tensor):
            return saved
        if isinstance(saved, _OffloadedDTensor):
            return DTensor.from_local(
                fetch_back(saved.local),
                saved.mesh,
                saved.placements,
                run_check=False,
                shape=saved.size,
                stride=saved.stride,
            )
        empty = torch.empty(0, dtype=saved.dtype, device=saved.copy.device)
        return empty.set_(saved.copy.fetch(), saved.offset, saved.size, saved.stride)

    with torch.autograd.graph.saved_tensors_hooks(offload, fetch_back):
        out = forward(*args, **kwargs)
    # The hooks, alive as long as any saved tensor, hold this dict: clear it, so that each copy is freed with
    # its last user.
    copies.clear()
    return out


class _HostCopy:
    """Host copy of a storage; once fetched, it is shared by all tensors that used the storage."""

    def __init__(self, storage: torch.UntypedStorage, device: torch.device) -> None:
        # The tensor's device, because the storage of a fake tensor has none.
        self.device = device
        # torch keeps a storage's Python object alive as long as any tensor uses the storage.
        self._origin = weakref.ref(storage)
        host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._host = host.copy_(torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage))
        self._fetched: weakref.ref[torch.UntypedStorage] | None = None

    @property
    def is_current(self) -> bool:
        """Return whether the storage is still alive, so that its address cannot have been reused."""
        return self._origin() is not None

    def fetch(self) -> torch.UntypedStorage:
        """Return the storage on its device, copied back at most once at a time."""
        fetched = self._fetched() if self._fetched is not None else None
        if fetched is None:
            fetched = self._host.to(self.device, non_blocking=True).untyped_storage()
            self._fetched = weakref.ref(fetched)
        return fetched


class _KeptOperators(TorchDispatchMode):
    """One of torch's two modes of selective checkpointing, for the operators alone that are kept.

    torch's modes count the calls of all operators, and a recomputation that has more of any than the forward
    had is an error (torch 2.13, utils/checkpoint.py, _CachedTorchDispatchMode). ZeRO-3's hooks run inside of
    the layer: its forward may find weights that were prefetched before, which backward has to all-gather.
    """

    supports_higher_order_operators = True
    """Higher-order operators such as ``flex_attention`` are recomputed, as by torch's own modes."""

    def __init__(self, mode: TorchDispatchMode) -> None:
        super().__init__()
        self._mode = mode

    def __enter__(self) -> Self:
        # torch's mode counts from 0 when it is entered. Without that, a second backward of the layer
        # (retain_graph) would go on counting and take the outputs of later calls, where torch raises.
        with self._mode:
            pass
        super().__enter__()
        return self

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True, as torch's own modes: a function that the layer compiles stays compiled."""
        return True

    def __torch_dispatch__(
        self,
        function: torch._ops.OpOverload[..., object],
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if function in _KEPT_BY_SELECTIVE:
            return self._mode.__torch_dispatch__(function, types, args, kwargs or {})
        return function(*args, **(kwargs or {}))


def _create_selective_contexts() -> tuple[_KeptOperators, _KeptOperators]:
    """Return the modes of a layer's forward and of its recomputation."""
    caching, cached = create_selective_checkpoint_contexts(list(_KEPT_BY_SELECTIVE))
    return _KeptOperators(caching), _KeptOperators(cached)
