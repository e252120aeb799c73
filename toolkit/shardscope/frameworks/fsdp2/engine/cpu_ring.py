"""Torch's ring attention on CPU ranks: the one fused kernel for which ``context_parallel`` has no ring.

Torch's template (``_templated_ring_attention``, torch 2.13) sends keys and values round a group and merges
what any kernel makes of each part, if that kernel gives its logsumexp. Torch names CUDA's three of them. CPUs
have one too, and here it is handed to the same template: where keys go and how parts are merged is torch's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.experimental._context_parallel import _attention

SEQUENCE = 2
"""The dimension of the sequence in (batch, heads, sequence, width)."""
FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def add_cpu_ring() -> None:
    """Give torch's ``context_parallel`` a ring for CPU tensors; it asks for one only while it is entered."""
    for kernel in (FORWARD, BACKWARD):
        # A torch that has a ring of its own for CPUs keeps it.
        _attention.custom_ops.setdefault(kernel, _ring)


def _ring(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[DTensor, ...]:
    """What DTensor calls in ``kernel``'s place: arguments are DTensors in parts along the sequence."""
    call = DTensor._op_dispatcher.unwrap_to_op_info(kernel, args, kwargs)
    mesh: Any = call.compute_mesh
    given = _by_name(kernel, call.local_args, call.local_kwargs)
    if given.pop("attn_mask", None) is not None:
        raise NotImplementedError("a ring passes keys, not masks: attention must be causal, without a mask")
    if kernel is FORWARD:
        parts = _attention._templated_ring_attention(mesh.get_group(), SEQUENCE, kernel, **given)
    else:
        parts = _attention._templated_ring_attention_backward(
            mesh.get_group(), SEQUENCE, kernel, grad_out_name="grad_out", **given
        )
    return tuple(_along_the_sequence(part, mesh) for part in parts)


def _by_name(kernel: Any, args: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    names = [argument.name for argument in kernel._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _along_the_sequence(part: torch.Tensor, mesh: Any) -> DTensor:
    shape = list(part.shape)
    shape[SEQUENCE] *= mesh.size()
    whole = TensorMeta(torch.Size(shape), part.stride(), part.dtype)
    return DTensor(part, DTensorSpec(mesh, (Shard(SEQUENCE),), tensor_meta=whole), requires_grad=False)
