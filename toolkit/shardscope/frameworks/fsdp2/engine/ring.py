"""Attention of transformers' models in torch's ring: what calls it, and how a run finds out that it does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._context_parallel import _attention
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward

from shardscope.frameworks.fsdp2.engine.cpu_ring import SEQUENCE, add_cpu_ring
from shardscope.frameworks.fsdp2.limits import check_rope

KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]
"""Those that have a ring. Plain math has none: DTensor would attend within the part that is here, and say
nothing."""
PROBE_TOKENS = 8
"""In each of the two pieces of a sequence that a rank has."""

_numbers = count()


class Ring:
    """Causal attention over sequences that the ranks of ``mesh`` have in parts, as transformers calls it.

    Under a name of its own transformers makes no mask for it: positions that jump, as those of a rank's part
    do, would look to it like documents that were packed. ``repeats_keys`` is for kernels without grouped
    queries.
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
        """Make ``model``'s attention this one.

        Raises ``ValueError`` unless it is transformers' SDPA, at angles that parts of a sequence share.
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
        """While inside, attention is over all of ``mesh``; the positions of a sequence that are here.

        Each rank has a piece from the front and one from the back, so that all have as many keys to attend
        to (torch's ``_HeadTailLoadBalancer``). Forward and backward both belong inside.
        """
        here = torch.arange(num_tokens, device=self._device)
        split = context_parallel(self.mesh, buffers=[here], buffer_seq_dims=[0], no_restore_buffers={here})
        self._is_split = True
        try:
            with split, sdpa_kernel(KERNELS):
                yield here
        finally:
            self._is_split = False
            # Torch keeps each function that it ever put in SDPA's place, one more for every entry.
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
        """As ``transformers.integrations.sdpa_attention``: (batch, heads, sequence, width) each."""
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
        """How far attention over the ring is from attention to the whole, gradients too, on any rank.

        The largest difference, as a part of the largest number; both are computed here and now, on a few
        tokens. Zero but for rounding where keys of all ranks come by and parts lie where they should.
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
