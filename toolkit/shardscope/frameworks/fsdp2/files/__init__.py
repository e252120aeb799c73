"""FSDP2's configuration files, written, and ``train.py`` with the plans that it trains."""

from __future__ import annotations

from shardscope.frameworks.formats.train_file import FULL_TRAINING, TrainedValues

TRAINED_VALUES: TrainedValues = {
    **FULL_TRAINING,
    "Recipe.precision": ("bf16-mixed", "bf16", "fp32"),
    "Layout.tp": (1,),
    "Layout.pp": (1,),
    "Layout.cp": (1,),
}
"""Shards, replicas, ``reshard_after_forward`` and offloading are all trained."""
