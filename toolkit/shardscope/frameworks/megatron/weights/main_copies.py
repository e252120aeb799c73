"""The fp32 copies that Megatron's optimizer keeps of 16-bit weights, whole on a rank or spread over many."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


class MainWeights:
    """Reads and writes a parameter and, where the optimizer has one, its fp32 copy.

    ``optimizer`` is what ``get_megatron_optimizer`` made, or None: then the parameters are all there is, as
    they are in fp32, and with the precision-aware optimizer, which keeps its own.
    """

    def __init__(self, optimizer: Any = None) -> None:
        # Of fp32 weights a lone optimizer is not chained.
        self._optimizers = getattr(optimizer, "chained_optimizers", [optimizer] if optimizer else [])
        self._copies = bool(self._optimizers) and not self._config.use_precision_aware_optimizer
        self._sharded = bool(self._optimizers) and self._config.use_distributed_optimizer

    @property
    def _config(self) -> Any:
        return self._optimizers[0].config

    def write(self, parameter: torch.nn.Parameter, value: torch.Tensor) -> None:
        """Give the parameter, and this rank's part of its copy, the values of ``value``."""
        with torch.no_grad():
            parameter.copy_(value)
            main = getattr(parameter, "main_param", None)
            if main is not None and self._copies:
                # A copy of its own, so nothing of fp32 is lost on the way through 16 bits.
                main.copy_(self._own(parameter, value).view_as(main))

    def read(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """The parameter's values, in fp32 where there is a copy.

        All ranks of the parameter's data-parallel group together.
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
        """Type of what :meth:`read` gives."""
        return torch.float32 if self._copies else parameter.dtype

    def _own(self, parameter: torch.nn.Parameter, values: torch.Tensor) -> torch.Tensor:
        """Of ``values``, a view of what this rank's copy is of."""
        flat = values.contiguous().view(-1)
        if not self._sharded:
            return flat
        for optimizer in self._optimizers:
            if parameter in optimizer.model_param_gbuf_map:
                found = optimizer._get_model_param_range_map(parameter)["param"]
                return flat[found.start : found.end]
        raise RuntimeError("a parameter has a copy in no optimizer of this rank")


def data_group(parameter: torch.nn.Parameter) -> Any:
    """The ranks that hold the same parameter; an expert's are fewer."""
    from megatron.core import parallel_state

    if not getattr(parameter, "allreduce", True):
        return parallel_state.get_expert_data_parallel_group()
    return parallel_state.get_data_parallel_group(with_context_parallel=True)
