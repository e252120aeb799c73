"""Ring attention of transformers models: torch's implementation, its registration and its verification."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from typing import TypedDict, Unpack

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._context_parallel import _attention
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward

from shardscope.frameworks.fsdp2.limits import check_rope

RING_BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]
"""Kernels with a ring implementation. The math backend has none: DTensor would silently attend within the
local shard only."""
PROBE_TOKENS = 8
"""Tokens of the verification, in each of the two pieces of a sequence that a rank has."""
HEADS, SEQUENCE = 1, 2
"""Dimensions of (batch, heads, sequence, head dimension), the shape of queries, keys and values."""

_numbers = count()


class AttentionOptions(TypedDict, total=False):
    """Options with which transformers' models call an attention function."""

    dropout: float
    scaling: float | None
    is_causal: bool | None


class CausalHeads(torch.nn.Module):
    """The attributes that ``sdpa_attention_forward`` reads from an attention module."""

    def __init__(self, num_key_value_groups: int) -> None:
        super().__init__()
        self.num_key_value_groups = num_key_value_groups
        self.is_causal = True


class Ring:
    """Causal ring attention over sequences sharded on ``mesh``, as an attention function of transformers.

    It is registered under its own name, for which transformers builds no mask: the positions of a rank's
    shard are not contiguous, which transformers would take for packed documents. ``repeats_keys`` is for
    kernels without grouped-query attention.
    """

    def __init__(self, mesh: DeviceMesh, device: torch.device, *, repeats_keys: bool) -> None:
        if device.type == "cpu":
            register_cpu_ring()
        self.mesh, self._device, self._repeats_keys = mesh, device, repeats_keys
        self._ungrouped = CausalHeads(num_key_value_groups=1)
        # Registered functions are global to the process: each engine's model must find its own ring.
        self.name = f"shardscope_ring_{next(_numbers)}"
        self.num_calls = 0
        self._is_sharding = False
        AttentionInterface.register(self.name, self)

    def replace_attention(self, model: torch.nn.Module) -> None:
        """Make ``model``, of transformers, call this ring for its attention.

        Raises ``ValueError`` unless its attention is transformers' SDPA, and for RoPE types whose angles
        would differ between ranks.
        """
        # The causal language model and its body share one config, from which the attention layers read.
        models = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
        configs = {id(module.config): module.config for module in models}.values()
        implementations = {config._attn_implementation for config in configs}
        if implementations != {"sdpa"}:
            raise ValueError(
                f"build_model gives a model whose attention is "
                f"{sorted(map(str, implementations)) or 'its own'}; allowed with cp > 1: a causal language "
                "model of transformers with attn_implementation='sdpa', whose calls torch's "
                "context_parallel takes over. Nearest fix: cp=1."
            )
        # Check all before changing any: after an error the model is as it was.
        for config in configs:
            check_rope(config.to_dict())
        for config in configs:
            config._attn_implementation = self.name

    @contextmanager
    def shard_positions(self, num_tokens: int) -> Iterator[torch.Tensor]:
        """Enable ring attention over ``mesh`` inside the context. Yields this rank's positions.

        Each rank has a piece from the front and one from the back of a sequence, so that all ranks attend to
        equally many keys (torch's ``_HeadTailLoadBalancer``). Forward and backward must both run inside.
        """
        # torch shards its buffers in place: the positions become this rank's, with which micro-batches are
        # indexed. It would restore them on exit, which no_restore_buffers prevents.
        positions = torch.arange(num_tokens, device=self._device)
        ring_attention = context_parallel(
            self.mesh, buffers=[positions], buffer_seq_dims=[0], no_restore_buffers={positions}
        )
        self._is_sharding = True
        try:
            with ring_attention, sdpa_kernel(RING_BACKENDS):
                yield positions
        finally:
            self._is_sharding = False
            # Torch never removes the SDPA replacements that it records: they would grow with every entry
            # (torch 2.13, _context_parallel/_attention.py, _distribute_function).
            _attention._replaced_functions.clear()

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **options: Unpack[AttentionOptions],
    ) -> tuple[torch.Tensor, None]:
        """Compute attention with the signature of ``transformers.integrations.sdpa_attention``.

        Shapes are (batch, heads, local sequence, head dimension). Raises ``RuntimeError`` outside
        :meth:`shard_positions` or with a mask.
        """
        # Either would compute something else without an error: attention within the local shard, or a mask
        # that the ring ignores.
        if attention_mask is not None or not self._is_sharding:
            fault = "without its ring" if attention_mask is None else "with a mask, which no ring supports"
            raise RuntimeError(f"the plan splits sequences over ranks, and attention was called {fault}")
        self.num_calls += 1
        if self._repeats_keys:
            groups = query.shape[HEADS] // key.shape[HEADS]
            key, value = repeat_kv(key, groups), repeat_kv(value, groups)
            module = self._ungrouped
        # It calls F.scaled_dot_product_attention, which torch's context_parallel has replaced.
        output: tuple[torch.Tensor, None] = sdpa_attention_forward(module, query, key, value, None, **options)
        return output

    def measure_deviation(
        self, num_heads: int, num_key_heads: int, head_dim: int, dtype: torch.dtype
    ) -> float:
        """Return the largest relative difference between ring attention and attention over whole sequences.

        Both are computed on a few random tokens, with gradients; the result is the maximum over all ranks. It
        is zero up to rounding if all ranks' keys are used and the shards are in the right order.
        """
        num_tokens = 2 * self.mesh.size() * PROBE_TOKENS
        module = CausalHeads(num_heads // num_key_heads)
        # The same seed on every rank: all have the same whole sequence. Generated on the host, where the
        # numbers do not depend on the GPU.
        generator = torch.Generator().manual_seed(0)
        query, key, value, gradient = (
            torch.randn(1, heads, num_tokens, head_dim, generator=generator).to(self._device, dtype)
            for heads in (num_heads, num_key_heads, num_key_heads, num_heads)
        )
        expected = _attend_with_gradients(_attend_to_whole_sequence, module, (query, key, value), gradient)
        with torch.enable_grad(), self.shard_positions(num_tokens) as positions:
            shards = [tensor[:, :, positions] for tensor in (query, key, value, gradient)]
            actual = _attend_with_gradients(self, module, (shards[0], shards[1], shards[2]), shards[3])
        # The engine counts the calls of the first step.
        self.num_calls = 0
        worst = torch.zeros((), device=self._device)
        for shard, full in zip(actual, expected, strict=True):
            deviation = (shard - full.index_select(SEQUENCE, positions)).abs().max() / full.abs().max()
            worst = torch.maximum(worst, deviation.float())
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        return float(worst)


def _attend_with_gradients(
    attention: Callable[..., tuple[torch.Tensor, None]],
    module: torch.nn.Module,
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    gradient: torch.Tensor,
) -> list[torch.Tensor]:
    """Return the output of ``attention`` for query, key and value, and the gradients of these three."""
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    # transformers' attention functions return (batch, sequence, heads, head dimension).
    output = attention(module, *leaves, None)[0].transpose(HEADS, SEQUENCE)
    return [output.detach(), *torch.autograd.grad(output, leaves, gradient)]


def _attend_to_whole_sequence(
    module: CausalHeads,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
) -> tuple[torch.Tensor, None]:
    """Compute causal attention without transformers and without a ring, as the reference of both."""
    groups = module.num_key_value_groups
    output = F.scaled_dot_product_attention(
        query, repeat_kv(key, groups), repeat_kv(value, groups), attention_mask, is_causal=True
    )
    return output.transpose(HEADS, SEQUENCE), None


# ---- Torch's ring attention on CPU ranks: the one fused kernel for which ``context_parallel`` has no ring
#
# Torch's template (``_templated_ring_attention``, torch 2.13) sends keys and values around a group and merges
# the partial outputs of any kernel that returns its logsumexp. Torch registers CUDA's three such kernels. The
# CPU's flash attention is one too, and is registered here with the same template: communication and merging
# are torch's.


CPU_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
CPU_FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def register_cpu_ring() -> None:
    """Register a ring for CPU tensors with torch's ``context_parallel``, which looks it up on entry."""
    for kernel in _CPU_RINGS:
        # A torch version with its own CPU ring keeps it.
        _attention.custom_ops.setdefault(kernel, _handle_cpu_attention)


def _handle_cpu_attention(
    op_call: torch._ops.OpOverload, args: tuple[object, ...], kwargs: dict[str, object]
) -> tuple[DTensor, ...]:
    """Run a CPU kernel as ring attention on DTensors sharded along the sequence: DTensor's handler of it."""
    op_info = DTensor._op_dispatcher.unwrap_to_op_info(op_call, args, kwargs)
    mesh: DeviceMesh = op_info.compute_mesh
    outputs = _CPU_RINGS[op_call](mesh, *op_info.local_args, **op_info.local_kwargs)
    return tuple(_wrap_shard(output, mesh) for output in outputs)


def _run_cpu_ring(
    mesh: DeviceMesh,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> tuple[torch.Tensor, ...]:
    """Run the forward of the CPU's flash attention, whose arguments these are, around ``mesh``."""
    _check_no_mask(attn_mask)
    outputs: tuple[torch.Tensor, ...] = _attention._templated_ring_attention(
        mesh.get_group(),
        SEQUENCE,
        CPU_FLASH,
        query=query,
        key=key,
        value=value,
        is_causal=is_causal,
        dropout_p=dropout_p,
        scale=scale,
    )
    return outputs


def _run_cpu_ring_backward(
    mesh: DeviceMesh,
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> tuple[torch.Tensor, ...]:
    """Run the backward of the CPU's flash attention, whose arguments these are, around ``mesh``."""
    _check_no_mask(attn_mask)
    gradients: tuple[torch.Tensor, ...] = _attention._templated_ring_attention_backward(
        mesh.get_group(),
        SEQUENCE,
        CPU_FLASH_BACKWARD,
        grad_out=grad_out,
        grad_out_name="grad_out",
        query=query,
        key=key,
        value=value,
        out=out,
        logsumexp=logsumexp,
        is_causal=is_causal,
        dropout_p=dropout_p,
        scale=scale,
    )
    return gradients


_CPU_RINGS: Mapping[torch._ops.OpOverload, Callable[..., tuple[torch.Tensor, ...]]] = {
    CPU_FLASH: _run_cpu_ring,
    CPU_FLASH_BACKWARD: _run_cpu_ring_backward,
}


def _check_no_mask(attn_mask: torch.Tensor | None) -> None:
    if attn_mask is not None:
        raise NotImplementedError("a ring passes keys, not masks: attention must be causal, without a mask")


def _wrap_shard(shard: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """Return the DTensor whose local shard along the sequence is ``shard``."""
    shape = list(shard.shape)
    shape[SEQUENCE] *= mesh.size()
    # As DTensor's dispatcher wraps the results of operators (torch 2.13, tensor/_dispatch.py).
    spec = DTensorSpec(
        mesh, (Shard(SEQUENCE),), tensor_meta=TensorMeta(torch.Size(shape), shard.stride(), shard.dtype)
    )
    return DTensor(shard, spec, requires_grad=False)
