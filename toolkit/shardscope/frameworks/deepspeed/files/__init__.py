"""DeepSpeed's configuration files, written and read, and ``train.py`` with the plans that it trains."""

from __future__ import annotations

from shardscope.frameworks.formats.train_file import FULL_TRAINING, TrainedValues

TRAINED_VALUES: TrainedValues = {
    **FULL_TRAINING,
    "Recipe.optimizer": ("adamw",),
    "Recipe.precision": ("bf16-mixed", "bf16", "fp32"),
    "Layout.tp": (1,),
    "Layout.pp": (1,),
    "Layout.ep": (1,),
}
"""All stages, and whatever else ds_config.json says, are trained."""
