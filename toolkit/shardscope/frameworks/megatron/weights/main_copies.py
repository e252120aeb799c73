"""fp32 main weights of Megatron's optimizer, replicated or sharded over data-parallel ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


class MainWeights:
    """Access to a parameter and to its fp32 main weight, if the optimizer has one.

    ``optimizer`` comes from ``get_megatron_optimizer``, or is None. Only the parameter itself is accessed
    without an optimizer, in fp32, and with the precision-aware optimizer, which keeps its own main weights.
    """

    def __init__(self, optimizer: Any = None) -> None:
        # For fp32 weights a single optimizer is not chained.
        self._optimizers = getattr(optimizer, "chained_optimizers", [optimizer] if optimizer else [])
        self._copies = bool(self._optimizers) and not self._config.use_precision_aware_optimizer
        self._sharded = bool(self._optimizers) and self._config.use_distributed_optimizer

    @property
    def _config(self) -> Any:
        return self._optimizers[0].config

    def write(self, parameter: torch.nn.Parameter, value: torch.Tensor) -> None:
        """Write ``value`` to the parameter, and to this rank's shard of its main weight."""
        with torch.no_grad():
            parameter.copy_(value)
            main = getattr(parameter, "main_param", None)
            if main is not None and self._copies:
                # Copied from ``value`` and not from the parameter, so no fp32 precision is lost in 16 bits.
                main.copy_(self._own(parameter, value).view_as(main))

    def read(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """Return the parameter's values, in fp32 if it has a main weight.

        Collective over the parameter's data-parallel group.
        """
        if not self._copies or parameter.dtype == torch.float32:
            return parameter.detach()
        main = getattr(parameter, "main_param", None)
        if not self._sharded:
            assert main is not None
            return main.detach()
        whole = torch.zeros(parameter.shape, dtype=torch.float32, device=parameter.device)
        if main is not None:
            self._own(parameter, whole).copy_(main.detach().view(-1))
        dist.all_reduce(whole, group=data_group(parameter))
        return whole

    def dtype_of(self, parameter: torch.nn.Parameter) -> torch.dtype:
        """Return the dtype that :meth:`read` returns."""
        return torch.float32 if self._copies else parameter.dtype

    def _own(self, parameter: torch.nn.Parameter, values: torch.Tensor) -> torch.Tensor:
        """Return a flat view of ``values`` that matches this rank's shard of the main weight."""
        flat = values.contiguous().view(-1)
        if not self._sharded:
            return flat
        for optimizer in self._optimizers:
            if parameter in optimizer.model_param_gbuf_map:
                found = optimizer._get_model_param_range_map(parameter)["param"]
                return flat[found.start : found.end]
        raise RuntimeError("a parameter has a copy in no optimizer of this rank")


def data_group(parameter: torch.nn.Parameter) -> Any:
    """Return the process group of the parameter's replicas, which is smaller for experts."""
    from megatron.core import parallel_state

    if not getattr(parameter, "allreduce", True):
        return parallel_state.get_expert_data_parallel_group()
    return parallel_state.get_data_parallel_group(with_context_parallel=True)
