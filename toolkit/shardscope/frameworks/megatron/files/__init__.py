"""Megatron-core's configuration files, written and read, and ``train.py`` with the plans that it trains."""

from __future__ import annotations

from shardscope.families.registry import list_families_with
from shardscope.frameworks.formats.train_file import FULL_TRAINING, TrainedValues

TRAINED_VALUES: TrainedValues = {
    **FULL_TRAINING,
    "Recipe.kernels": ("megatron", "transformers"),
    "Recipe.attention": (None,),
    "Recipe.optimizer": ("adamw",),
    "Recipe.precision": ("bf16-mixed", "bf16", "fp32"),
    "Recipe.recompute_interval": (1,),
    "Recipe.dropout": (0.0,),
    "Layout.pp": (1,),
    "Layout.cp": (1,),
    "Layout.ep": (1,),
    "Layout.use_precision_aware_optimizer": (False,),
    "Layout.tp_comm_overlap": (False,),
    "Architecture.model_type": list_families_with("megatron_script"),
    "Architecture.attention_output_bias": (False,),
    "Architecture.mlp_bias": (False,),
}
"""Plans that ``train.py`` runs: tensor and data parallelism of dense Llama-like models."""
