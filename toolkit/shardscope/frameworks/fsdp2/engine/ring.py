"""Ring attention of transformers models: torch's implementation, its registration and its verification."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._context_parallel import _attention
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward

from shardscope.frameworks.fsdp2.limits import check_rope

KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]
"""Kernels with a ring implementation. The math backend has none: DTensor would silently attend within the
local shard only."""
PROBE_TOKENS = 8
"""Tokens of the verification, in each of the two pieces of a sequence that a rank has."""

_numbers = count()


class Ring:
    """Causal ring attention over sequences sharded on ``mesh``, as an attention function of transformers.

    It is registered under its own name, for which transformers builds no mask: the positions of a rank's
    shard are not contiguous, which transformers would take for packed documents. ``repeats_keys`` is for
    kernels without grouped-query attention.
    """

    def __init__(self, mesh: DeviceMesh, device: torch.device, *, repeats_keys: bool) -> None:
        if device.type == "cpu":
            add_cpu_ring()
        self.mesh, self._device, self._repeats_keys = mesh, device, repeats_keys
        self.name = f"shardscope_ring_{next(_numbers)}"
        self.num_calls = 0
        self._is_split = False
        AttentionInterface.register(self.name, self)

    def take_over(self, model: torch.nn.Module) -> None:
        """Replace the attention of ``model`` by this one.

        Raises ``ValueError`` unless it is transformers' SDPA, and for RoPE types whose angles would differ
        between ranks.
        """
        configs = {id(one.config): one.config for one in model.modules() if hasattr(one, "config")}
        found = {getattr(config, "_attn_implementation", None) for config in configs.values()}
        if found != {"sdpa"}:
            raise ValueError(
                f"build_model gives a model whose attention is {sorted(map(str, found)) or 'its own'}; "
                "allowed with cp > 1: a causal language model of transformers with "
                "attn_implementation='sdpa', whose calls torch's context_parallel takes over. Nearest fix: "
                "cp=1."
            )
        for config in configs.values():
            check_rope(config.to_dict())
        for config in configs.values():
            config._attn_implementation = self.name

    @contextmanager
    def split(self, num_tokens: int) -> Iterator[torch.Tensor]:
        """Enable ring attention over ``mesh`` inside the context. Yields this rank's positions.

        Each rank has a piece from the front and one from the back of a sequence, so that all ranks attend to
        equally many keys (torch's ``_HeadTailLoadBalancer``). Forward and backward must both run inside.
        """
        here = torch.arange(num_tokens, device=self._device)
        split = context_parallel(self.mesh, buffers=[here], buffer_seq_dims=[0], no_restore_buffers={here})
        self._is_split = True
        try:
            with split, sdpa_kernel(KERNELS):
                yield here
        finally:
            self._is_split = False
            # Torch never removes the SDPA replacements that it records: they would grow with every entry.
            _attention._replaced_functions.clear()

    def __call__(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **others: Any,
    ) -> tuple[torch.Tensor, None]:
        """Compute attention with the signature of ``transformers.integrations.sdpa_attention``.

        Shapes are (batch, heads, local sequence, head dimension). Raises ``RuntimeError`` outside
        :meth:`split` or with a mask.
        """
        if attention_mask is not None or not self._is_split:
            what = "without its ring" if attention_mask is None else "a mask, which no ring takes"
            raise RuntimeError(f"the plan splits sequences over ranks, and attention was called with {what}")
        self.num_calls += 1
        if self._repeats_keys:
            groups = query.shape[1] // key.shape[1]
            key, value = repeat_kv(key, groups), repeat_kv(value, groups)
            module = SimpleNamespace(num_key_value_groups=1, is_causal=True)
        found: tuple[torch.Tensor, None] = sdpa_attention_forward(module, query, key, value, None, **others)
        return found

    def distance_from_whole(self, num_heads: int, num_key_heads: int, width: int, kind: torch.dtype) -> float:
        """Return the largest relative difference between ring attention and attention over whole sequences.

        Both are computed on a few random tokens, with gradients; the result is the maximum over all ranks. It
        is zero up to rounding if all ranks' keys are used and the shards are in the right order.
        """
        ranks = self.mesh.size()
        num_tokens = 2 * ranks * PROBE_TOKENS
        drawn = torch.Generator().manual_seed(0)
        heads = (num_heads, num_key_heads, num_key_heads, num_heads)
        query, key, value, gradient = (
            torch.randn(1, number, num_tokens, width, generator=drawn).to(self._device, kind)
            for number in heads
        )
        module = SimpleNamespace(num_key_value_groups=num_heads // num_key_heads, is_causal=True)
        groups = module.num_key_value_groups
        whole = [tensor.clone().requires_grad_() for tensor in (query, key, value)]
        attended = F.scaled_dot_product_attention(
            whole[0], repeat_kv(whole[1], groups), repeat_kv(whole[2], groups), is_causal=True
        )
        attended.backward(gradient)
        expected = [attended.detach().transpose(1, 2), *(tensor.grad for tensor in whole)]
        with torch.enable_grad(), self.split(num_tokens) as here:
            parts = [tensor[:, :, here].clone().requires_grad_() for tensor in (query, key, value)]
            out, _ = self(module, parts[0], parts[1], parts[2], None)
            out.backward(gradient[:, :, here].transpose(1, 2))
        self.num_calls = 0
        found = [out.detach(), *(tensor.grad for tensor in parts)]
        worst = torch.zeros((), device=self._device)
        for number, (part, all_of_it) in enumerate(zip(found, expected, strict=True)):
            right = all_of_it.index_select(SEQUENCE if number else 1, here)
            apart = (part - right).abs().max() / all_of_it.abs().max()
            worst = torch.maximum(worst, apart.float())
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        return float(worst)


# ---- Torch's ring attention on CPU ranks: the one fused kernel for which ``context_parallel`` has no ring
#
# Torch's template (``_templated_ring_attention``, torch 2.13) sends keys and values around a group and merges
# the partial outputs of any kernel that returns its logsumexp. Torch registers CUDA's three such kernels. The
# CPU's flash attention is one too, and is registered here with the same template: communication and merging
# are torch's.


SEQUENCE = 2
"""The dimension of the sequence in (batch, heads, sequence, width)."""
FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def add_cpu_ring() -> None:
    """Register a ring for CPU tensors with torch's ``context_parallel``, which looks it up on entry."""
    for kernel in (FORWARD, BACKWARD):
        # A torch version with its own CPU ring keeps it.
        _attention.custom_ops.setdefault(kernel, _ring)


def _ring(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[DTensor, ...]:
    """Run ``kernel`` as ring attention: DTensor's handler, for DTensors sharded along the sequence."""
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
