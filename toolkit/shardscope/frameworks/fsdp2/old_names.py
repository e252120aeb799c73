"""FSDP1 names and their FSDP2 replacements, following PyTorch's migration guide.

Source: PyTorch's tutorial "Getting Started with Fully Sharded Data Parallel (FSDP2)", section "FSDP1-to-FSDP2
migration guide", and torch/distributed/fsdp/api.py; each right-hand name is torch 2.13's.
"""

from __future__ import annotations

from typing import NamedTuple

from shardscope.core.errors import Fix


class Strategy(NamedTuple):
    """FSDP2 equivalent of one ``torch.distributed.fsdp.ShardingStrategy``."""

    replacement: str
    """The replacement, as text for an error message."""
    reshards: bool
    """Value of ``reshard_after_forward``."""
    is_hybrid: bool
    """Whether it shards within a node and replicates over nodes."""
    shards: bool = True
    """Whether parameters are sharded at all; False for NO_SHARD."""

    @property
    def as_layout(self) -> Fix:
        """The suggested fix: the option of ``Layout.fsdp2`` with the same effect."""
        if not self.shards:
            return "Layout.ddp()"
        if self.is_hybrid:
            return f"reshard_after_forward={self.reshards} with replicate= the number of nodes"
        return {"reshard_after_forward": self.reshards}


STRATEGIES: dict[str, Strategy] = {
    "FULL_SHARD": Strategy("reshard_after_forward=True (ZeRO-3)", True, False),
    "SHARD_GRAD_OP": Strategy("reshard_after_forward=False (ZeRO-2)", False, False),
    "NO_SHARD": Strategy(
        "DistributedDataParallel, for fully_shard always shards", False, False, shards=False
    ),
    "HYBRID_SHARD": Strategy("reshard_after_forward=True over a mesh of (nodes, GPUs of a node)", True, True),
    "_HYBRID_SHARD_ZERO2": Strategy(
        "reshard_after_forward=False over a mesh of (nodes, GPUs of a node)", False, True
    ),
}
"""Strategies by FSDP1's name. Accelerate numbers them from 1 in this order, and spells
_HYBRID_SHARD_ZERO2 without the leading underscore."""

REPLACEMENTS: dict[str, str] = {
    "auto_wrap_policy": "fully_shard(layer) for each decoder layer, then fully_shard(model)",
    "transformer_auto_wrap_policy": "fully_shard(layer) for each decoder layer",
    "ModuleWrapPolicy": "fully_shard(layer) for each decoder layer",
    "cpu_offload": "offload_policy=CPUOffloadPolicy()",
    "backward_prefetch": "nothing: FSDP2 always prefetches as BACKWARD_PRE does",
    "forward_prefetch": "module.set_modules_to_forward_prefetch([...])",
    "limit_all_gathers": "nothing: FSDP2 needs no limit, for it does not use record_stream",
    "use_orig_params": "nothing: FSDP2 always keeps the original parameters",
    "sync_module_states": "set_model_state_dict(..., StateDictOptions(full_state_dict=True, "
    "broadcast_from_rank0=True))",
    "device_id": "mesh=init_device_mesh(...), on whose devices parameters go",
    "process_group": "mesh=init_device_mesh(...)",
    "param_init_fn": "the model on the meta device, then model.to_empty(device=...) and its own "
    "initialisation",
    "ignored_modules": "ignored_params={...}",
    "ignored_states": "ignored_params={...}",
    "mixed_precision": "mp_policy=MixedPrecisionPolicy(param_dtype=..., reduce_dtype=torch.float32)",
    "no_sync": "model.set_requires_gradient_sync(False)",
    "summon_full_params": "model.unshard(), or parameter.full_tensor()",
    "clip_grad_norm_": "torch.nn.utils.clip_grad_norm_(model.parameters(), ...)",
    "optim_state_dict": "get_optimizer_state_dict(model, optimizer)",
    "optim_state_dict_to_load": "set_optimizer_state_dict(model, optimizer, state)",
    "state_dict_type": "get_model_state_dict(model, options=StateDictOptions(...))",
    "set_state_dict_type": "get_model_state_dict(model, options=StateDictOptions(...))",
    "FullStateDictConfig": "StateDictOptions(full_state_dict=True, cpu_offload=True)",
    "ShardedStateDictConfig": "nothing: a state_dict of FSDP2 is sharded",
    "ShardedGradScaler": "torch.amp.GradScaler",
}
"""Arguments, methods and classes of FSDP1, with the FSDP2 replacement of each."""

CONFIG_REPLACEMENTS: dict[str, str] = {
    "fsdp_backward_prefetch": "nothing: leave it out",
    "fsdp_forward_prefetch": "nothing: FSDP2's plugin refuses it",
    "fsdp_use_orig_params": "nothing: leave it out",
    "fsdp_sync_module_states": "fsdp_cpu_ram_efficient_loading: true",
}
"""Keys of accelerate's configuration that are unused with ``fsdp_version: 2``, with the suggested fix of each
(accelerate/utils/dataclasses.py)."""
