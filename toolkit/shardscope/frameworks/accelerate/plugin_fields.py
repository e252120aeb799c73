"""Layout fields that Accelerate passes to the framework that it starts, with Accelerate's names.

Accelerate is a wrapper: the same script with ``accelerator.prepare(...)`` runs on DDP, FSDP2, DeepSpeed or
Megatron-LM, depending on the configuration. DeepSpeed's JSON carries the rest of its layout.
``limits.why_not_started`` decides whether a whole plan can be passed.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

TITLE = "Accelerate"

PLUGIN_FIELDS: Mapping[str, Mapping[str, str]] = MappingProxyType({
    "ddp": MappingProxyType({}),
    "fsdp2": MappingProxyType({
        "shard": "ParallelismConfig.dp_shard_size",
        "replicate": "ParallelismConfig.dp_replicate_size",
        "tp": "ParallelismConfig.tp_size",
        "cp": "ParallelismConfig.cp_size",
        "reshard_after_forward": "FullyShardedDataParallelPlugin.reshard_after_forward",
        "offload": "FullyShardedDataParallelPlugin.cpu_offload",
    }),
    "deepspeed": MappingProxyType({
        "stage": "DeepSpeedPlugin.zero_stage",
        "tp": "DeepSpeedPlugin.hf_ds_config",  # ``tensor_parallel.autotp_size`` in that file
        "offload_optimizer": "DeepSpeedPlugin.offload_optimizer_device",
        "offload_params": "DeepSpeedPlugin.offload_param_device",
    }),
    "megatron": MappingProxyType({
        "tp": "MegatronLMPlugin.tp_degree",
        "pp": "MegatronLMPlugin.pp_degree",
        "cp": "MegatronLMPlugin.context_parallel_size",
        "ep": "MegatronLMPlugin.expert_model_parallel_size",
        "etp": "MegatronLMPlugin.expert_tensor_parallel_size",
        "sequence_parallel": "MegatronLMPlugin.sequence_parallelism",
        "distributed_optimizer": "MegatronLMPlugin.use_distributed_optimizer",
        "use_precision_aware_optimizer": "MegatronLMPlugin.use_precision_aware_optimizer",
    }),
})  # fmt: skip
"""Framework of the registry -> field of its layout -> class and field of Accelerate 1.15
(``accelerate/parallelism_config.py``, ``accelerate/utils/dataclasses.py``)."""
