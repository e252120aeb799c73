"""Context parallelism: each rank's shard of a batch, and a check of Transformer Engine's attention.

Megatron-core's own attention asserts cp=1 (``DotProductAttention.__init__``). The ranks of a context-parallel
group read the same batch. Each keeps two of 2 x cp equal chunks of the sequence, one from the front and one
from the back, which balances the causal attention work.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812

from shardscope.core.errors import refuse

if TYPE_CHECKING:
    from shardscope.core.plan import Plan

PROBE_TOKENS = 64
"""Tokens in each chunk of the probe sequence that checks the attention."""
ROUNDING = {torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.05}
"""Relative tolerance for sums in another order, by dtype; misplaced chunks differ by far more."""


def core_attention() -> Any:
    """Return the only Megatron-core attention class that exchanges keys and values between ranks."""
    from megatron.core.extensions import transformer_engine

    return transformer_engine.TEDotProductAttention


def own_pieces(batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return this rank's tokens of tensors of shape (rows, tokens, ...): all of them without cp."""
    from megatron.core.utils import get_batch_on_this_cp_rank

    found: dict[str, torch.Tensor] = get_batch_on_this_cp_rank(dict(batch))
    return found


def check_length(num_tokens: int) -> None:
    """Raise ``ValueError`` for rows that do not divide into 2 x cp equal chunks."""
    from megatron.core import parallel_state

    cp = parallel_state.get_context_parallel_world_size()
    if cp > 1 and num_tokens % (2 * cp):
        refuse(
            "batch",
            f"rows of {num_tokens} tokens",
            f"rows of a multiple of {2 * cp} with cp={cp}: each rank has two of {2 * cp} equal pieces",
            f"rows of {-(-num_tokens // (2 * cp)) * 2 * cp}, with -100 as the label of padding",
        )


def check_attention(plan: Plan, chunks: list[Any]) -> dict[str, Any]:
    """Check context-parallel attention against whole sequences. Collective over all ranks.

    Returns the relative error as JSON, or nothing without cp. Raises ``RuntimeError`` if it is too large.
    """
    cp = plan.degrees.cp
    if cp == 1:
        return {}
    layers = [layer for chunk in chunks for layer in chunk.module.decoder.layers]
    apart = torch.zeros((), device=next(chunks[0].parameters()).device)
    if layers:  # The first and the last of many stages may have none.
        apart = _distance_from_whole(layers[0].self_attention, apart.device)
    dist.all_reduce(apart, op=dist.ReduceOp.MAX)
    kind = chunks[0].module.config.params_dtype
    if not apart < ROUNDING[kind]:
        raise RuntimeError(
            f"the plan splits sequences over cp={cp} ranks, and attention over them is {apart:.1%} off what "
            "it is over the whole sequence"
        )
    return {"attention_off_by": float(apart)}


def _distance_from_whole(attention: Any, device: torch.device) -> torch.Tensor:
    """Return the relative error of context-parallel attention on a few tokens, gradients included.

    It is this rank's largest difference from attention to the whole sequence, divided by the largest value.
    """
    from megatron.core import parallel_state

    core, kind = attention.core_attention, attention.config.params_dtype
    heads = attention.config.num_attention_heads // parallel_state.get_tensor_model_parallel_world_size()
    groups, width = attention.num_query_groups_per_partition, attention.hidden_size_per_attention_head
    num_tokens = 2 * parallel_state.get_context_parallel_world_size() * PROBE_TOKENS
    drawn = torch.Generator().manual_seed(0)
    sizes = (heads, groups, groups, heads)
    query, key, value, gradient = (
        torch.randn(1, num_tokens, number, width, generator=drawn).to(device, kind) for number in sizes
    )
    whole = [tensor.clone().requires_grad_() for tensor in (query, key, value)]
    queries, keys, values = (tensor.transpose(1, 2) for tensor in whole)
    attended = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)
    attended = attended.transpose(1, 2)
    attended.backward(gradient)
    names = ("query", "key", "value", "gradient")
    own = own_pieces(dict(zip(names, (query, key, value, gradient), strict=True)))
    # (tokens, rows, heads, width), as Megatron-core's layers have it.
    parts = [own[name].transpose(0, 1).contiguous().requires_grad_() for name in names[:3]]
    out = core(*parts, None, attn_mask_type=attention.attn_mask_type)
    out.backward(own["gradient"].transpose(0, 1).reshape(out.shape))
    found = [out.detach().view(parts[0].shape), *(part.grad for part in parts)]
    expected = [attended.detach(), *(tensor.grad for tensor in whole)]
    worst = torch.zeros((), device=device)
    for part, all_of_it in zip(found, expected, strict=True):
        right = own_pieces({"all": all_of_it})["all"].transpose(0, 1)
        worst = torch.maximum(worst, ((part - right).abs().max() / all_of_it.abs().max()).float())
    return worst
