"""fp32 main weights of Megatron's optimizer, replicated or sharded over data-parallel ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig


class MainWeights:
    """Access to a parameter and to its fp32 main weight, if the optimizer has one.

    ``optimizer`` comes from ``get_megatron_optimizer``, or is None. Only the parameter itself is accessed
    without an optimizer, in fp32, and with the precision-aware optimizer, which keeps its own main weights.
    """

    def __init__(self, optimizer: MegatronOptimizer | None = None) -> None:
        # For fp32 weights a single optimizer is not chained.
        self._optimizers = getattr(optimizer, "chained_optimizers", [optimizer] if optimizer else [])
        self._has_main = bool(self._optimizers) and not self._config.use_precision_aware_optimizer
        self._sharded = bool(self._optimizers) and self._config.use_distributed_optimizer

    @property
    def _config(self) -> OptimizerConfig:
        return self._optimizers[0].config

    def write(self, parameter: torch.nn.Parameter, value: torch.Tensor) -> None:
        """Write ``value`` to the parameter, and to this rank's shard of its main weight."""
        with torch.no_grad():
            parameter.copy_(value)
            main = getattr(parameter, "main_param", None)
            if main is not None and self._has_main:
                # Copied from ``value`` and not from the parameter, so no fp32 precision is lost in 16 bits.
                main.copy_(self._view_shard(parameter, value).view_as(main))

    def read(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """Return the parameter's values, in fp32 if it has a main weight.

        Collective over the parameter's data-parallel group.
        """
        if not self._has_main or parameter.dtype == torch.float32:
            return parameter.detach()
        main = getattr(parameter, "main_param", None)
        if not self._sharded:
            assert isinstance(main, torch.Tensor)
            return main.detach()
        # Each rank writes its shard into zeros, and the sum is the whole tensor. The optimizer shards buffers
        # and not tensors, so shards may be empty or uneven, which all-gather does not support.
        full = torch.zeros(parameter.shape, dtype=torch.float32, device=parameter.device)
        if main is not None:
            self._view_shard(parameter, full).copy_(main.detach().view(-1))
        dist.all_reduce(full, group=get_data_group(parameter))
        return full

    def get_read_dtype(self, parameter: torch.nn.Parameter) -> torch.dtype:
        """Return the dtype that :meth:`read` returns."""
        return torch.float32 if self._has_main else parameter.dtype

    def _view_shard(self, parameter: torch.nn.Parameter, values: torch.Tensor) -> torch.Tensor:
        """Return a flat view of ``values`` that matches this rank's shard of the main weight."""
        flat = values.contiguous().view(-1)
        if not self._sharded:
            return flat
        for optimizer in self._optimizers:
            if parameter in optimizer.model_param_gbuf_map:
                shard = optimizer._get_model_param_range_map(parameter)["param"]
                return flat[shard.start : shard.end]
        raise RuntimeError("no optimizer of this rank owns the main weights of this parameter")


def get_data_group(parameter: torch.nn.Parameter) -> dist.ProcessGroup:
    """Return the process group of the parameter's replicas, which is smaller for experts."""
    from megatron.core import parallel_state

    # megatron-core sets ``allreduce`` to False on the weights of experts with ep > 1.
    group: dist.ProcessGroup = (
        parallel_state.get_data_parallel_group(with_context_parallel=True)
        if getattr(parameter, "allreduce", True)
        else parallel_state.get_expert_data_parallel_group()
    )
    return group
