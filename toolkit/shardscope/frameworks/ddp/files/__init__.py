"""``train.py``, which users get as it is, and the plans that it trains."""

from __future__ import annotations

from shardscope.frameworks.formats.train_file import FULL_TRAINING, Covered

COVERED: Covered = {**FULL_TRAINING, "Recipe.method": ("full", "lora")}
