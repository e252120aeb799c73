"""Context parallelism: each rank's shard of a batch, and a check of Transformer Engine's attention.

Megatron-core's own attention asserts cp=1 (``DotProductAttention.__init__``). The ranks of a context-parallel
group read the same batch. Each keeps two of 2 x cp equal chunks of the sequence, one from the front and one
from the back, which balances the causal attention work.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812

from shardscope.core.errors import refuse

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.transformer.attention import SelfAttention

    from shardscope.core.plan import Plan

PROBE_TOKENS = 64
"""Tokens in each chunk of the probe sequence that checks the attention."""
ROUNDING = {torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.05}
"""Relative tolerance for sums in another order, by dtype; misplaced chunks differ by far more."""


def get_context_attention() -> type[torch.nn.Module]:
    """Return the only Megatron-core attention class that exchanges keys and values between ranks."""
    from megatron.core.extensions import transformer_engine

    attention: type[torch.nn.Module] = transformer_engine.TEDotProductAttention
    return attention


def shard_sequences(batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return this rank's tokens of tensors of shape (rows, tokens, ...): all of them without cp.

    These are megatron-core's chunks (utils.py, ``get_batch_on_this_cp_rank``, which has other arguments from
    release to release).
    """
    from megatron.core import parallel_state

    cp = parallel_state.get_context_parallel_world_size()
    if cp == 1:
        return dict(batch)
    rank = parallel_state.get_context_parallel_rank()
    shard: dict[str, torch.Tensor] = {}
    for name, tensor in batch.items():
        chunks = tensor.chunk(2 * cp, dim=1)
        shard[name] = torch.cat((chunks[rank], chunks[2 * cp - 1 - rank]), dim=1)
    return shard


def check_length(num_tokens: int) -> None:
    """Raise ``ValueError`` for rows that do not divide into 2 x cp equal chunks."""
    from megatron.core import parallel_state

    cp = parallel_state.get_context_parallel_world_size()
    if cp > 1 and num_tokens % (2 * cp):
        refuse(
            "batch",
            f"rows of {num_tokens} tokens",
            f"rows of a multiple of {2 * cp} with cp={cp}: each rank has two of {2 * cp} equal chunks",
            f"rows of {-(-num_tokens // (2 * cp)) * 2 * cp}, with -100 as the label of padding",
        )


def check_attention(plan: Plan, chunks: list[DistributedDataParallel]) -> dict[str, object]:
    """Check context-parallel attention against whole sequences. Collective over all ranks.

    Returns the relative error as JSON, or nothing without cp. Raises ``RuntimeError`` if it is too large.
    """
    cp = plan.degrees.cp
    if cp == 1:
        return {}
    layers = [layer for chunk in chunks for layer in chunk.module.decoder.layers]
    error = torch.zeros((), device=next(chunks[0].parameters()).device)
    if layers:  # The first and the last stage may have none (count_pipeline_ends).
        error = _measure_error(layers[0].self_attention, error.device)
    # All ranks, those without layers too, must agree whether to raise: others would wait forever.
    dist.all_reduce(error, op=dist.ReduceOp.MAX)
    dtype = chunks[0].module.config.params_dtype
    # Not ``>=``: NaN must raise as well.
    if not error < ROUNDING[dtype]:
        raise RuntimeError(
            f"the plan splits sequences over cp={cp} ranks, and attention over them is {100 * error:.1f} % "
            "off what it is over the whole sequence"
        )
    return {"attention_off_by": float(error)}


def _measure_error(attention: SelfAttention, device: torch.device) -> torch.Tensor:
    """Return the relative error of context-parallel attention on a few tokens, gradients included.

    It is this rank's largest difference from attention to the whole sequence, divided by the largest value.
    """
    from megatron.core import parallel_state

    core, dtype = attention.core_attention, attention.config.params_dtype
    heads = attention.config.num_attention_heads // parallel_state.get_tensor_model_parallel_world_size()
    groups, width = attention.num_query_groups_per_partition, attention.hidden_size_per_attention_head
    num_tokens = 2 * parallel_state.get_context_parallel_world_size() * PROBE_TOKENS
    # Every rank draws the whole sequence with the same seed, so no collective is needed.
    generator = torch.Generator().manual_seed(0)
    sizes = (heads, groups, groups, heads)
    query, key, value, gradient = (
        torch.randn(1, num_tokens, number, width, generator=generator).to(device, dtype) for number in sizes
    )
    # The expected result: attention over the whole sequence.
    full = [tensor.clone().requires_grad_() for tensor in (query, key, value)]
    queries, keys, values = (tensor.transpose(1, 2) for tensor in full)
    attended = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)
    attended = attended.transpose(1, 2)
    attended.backward(gradient)
    names = ("query", "key", "value", "gradient")
    # The result of this rank: (tokens, rows, heads, width), as Megatron-core's layers have it.
    shard = shard_sequences(dict(zip(names, (query, key, value, gradient), strict=True)))
    parts = [shard[name].transpose(0, 1).contiguous().requires_grad_() for name in names[:3]]
    out = core(*parts, None, attn_mask_type=attention.attn_mask_type)
    out.backward(shard["gradient"].transpose(0, 1).reshape(out.shape))
    # Compare outputs and gradients: queries, keys and values each get theirs from other ranks, too.
    results = [out.detach().view(parts[0].shape), *_list_gradients(parts)]
    expected = [attended.detach(), *_list_gradients(full)]
    worst = torch.zeros((), device=device)
    for result, full_result in zip(results, expected, strict=True):
        # The expected result has the whole sequence: take this rank's chunks of it.
        right = shard_sequences({"full": full_result})["full"].transpose(0, 1)
        worst = torch.maximum(worst, ((result - right).abs().max() / full_result.abs().max()).float())
    return worst


def _list_gradients(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.grad for tensor in tensors if tensor.grad is not None]
