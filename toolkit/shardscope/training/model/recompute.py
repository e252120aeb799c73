"""Activation checkpointing per decoder layer (``Recipe.recompute``)."""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

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


def decoder_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
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
    layers = decoder_layers(model)[::interval]
    if not layers:
        raise ValueError(
            f"Recipe.recompute is {recompute!r}, but {type(model).__name__} has no ModuleList of layers; "
            "allowed: a model with one, or recompute='none'. Nearest fix: 'none'."
        )
    context: dict[str, Any] = {}
    if recompute == "selective":
        context["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _choose_policy)
    for layer in layers:
        if recompute == "offload":
            layer.forward = functools.partial(_run_offloaded, layer, layer.forward)
            continue
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False, **context)
    return len(layers)


def check_recompute(model: torch.nn.Module, recompute: str, interval: int = 1) -> dict[str, Any]:
    """Read back the recomputation of the decoder layers of ``model``, for a run's record.

    Raises ``RuntimeError`` if it differs from :func:`apply_recompute` with the same arguments.
    """
    actual = [_read_recompute(layer) for layer in decoder_layers(model)]
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
    forward = getattr(forward, "_torchdynamo_orig_callable", forward)
    if getattr(forward, "__func__", None) is run_recomputed:
        return "full"
    call = getattr(forward, "func", None)
    if call is _run_offloaded:
        return "offload"
    if call is not checkpoint:
        return "none"
    return "selective" if "context_fn" in forward.keywords else "full"


def run_recomputed(layer: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run the layer's forward under full checkpointing, for compiled layers."""
    return checkpoint(type(layer).forward, layer, *args, use_reentrant=False, **kwargs)


def _run_offloaded(layer: torch.nn.Module, forward: Any, *args: Any, **kwargs: Any) -> Any:
    """Run ``forward`` with its saved tensors in host memory, each storage copied once.

    Weights are not offloaded: they are resident anyway, and FSDP2 all-gathers them again. Weight storages are
    identified when a tensor is saved: ZeRO-3 all-gathers each weight only when its own module runs.
    """
    parameters = list(layer.parameters())
    copies: dict[int, _HostCopy] = {}

    def offload(tensor: torch.Tensor) -> Any:
        storage = tensor.untyped_storage()
        if any(parameter.untyped_storage()._cdata == storage._cdata for parameter in parameters):
            return tensor
        if storage._cdata not in copies or not copies[storage._cdata].is_current:
            copies[storage._cdata] = _HostCopy(storage, tensor.device)
        return copies[storage._cdata], tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset()

    def fetch_back(packed: Any) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        copy, dtype, *layout = packed
        return torch.empty(0, dtype=dtype, device=copy.device).set_(
            copy.fetch(), layout[2], layout[0], layout[1]
        )

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
        """Whether the storage is still alive, so that its address cannot have been reused."""
        return self._origin() is not None

    def fetch(self) -> torch.UntypedStorage:
        """Return the storage on its device, copied back at most once at a time."""
        fetched = self._fetched() if self._fetched is not None else None
        if fetched is None:
            fetched = self._host.to(self.device, non_blocking=True).untyped_storage()
            self._fetched = weakref.ref(fetched)
        return fetched


def _choose_policy(_context: Any, operation: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    is_saved = operation in _KEPT_BY_SELECTIVE
    return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE
