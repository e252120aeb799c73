"""DDP's configuration files, written, and ``train.py`` with the plans that it trains."""

from __future__ import annotations

from shardscope.frameworks.formats.train_file import FULL_TRAINING, TrainedValues

TRAINED_VALUES: TrainedValues = {**FULL_TRAINING, "Recipe.method": ("full", "lora")}
