"""DeepSpeed for a user's script: Accelerate's plugin with the plan's configuration file."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardscope.frameworks.accelerate.plugins import contradicts
from shardscope.frameworks.deepspeed.files.config import deepspeed_config

if TYPE_CHECKING:
    from shardscope.core.plan import Plan


def check_installed(plan: Plan) -> None:
    """Check nothing: the engine's own requirements suffice."""


def distributed_types(plan: Plan) -> tuple[str, ...]:
    """Return the one distributed type of all ZeRO stages."""
    return ("DEEPSPEED",)


def environment(plan: Plan, folder: Path) -> dict[str, str]:
    """Write the configuration file, and return the variables for ``DeepSpeedPlugin`` that name it
    (accelerate/utils/dataclasses.py)."""
    config = deepspeed_config(plan, nvme_folder=str(folder / "nvme"))
    # Filled by Accelerate with 1.0: under DeepSpeed a script's own clip_grad_norm_ does nothing.
    config["gradient_clipping"] = "auto"
    file = folder / f"ds_config-{os.environ.get('RANK', '0')}.json"
    file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    layout: Any = plan.layout
    return {
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(file),
        "ACCELERATE_DEEPSPEED_ZERO3_INIT": str(layout.stage == 3).lower(),
    }


def told(plan: Plan, accelerator: Any) -> None:
    """Configure nothing: the file has everything."""


def read_back(plan: Plan, accelerator: Any, model: Any) -> dict[str, Any]:
    """Check and describe stage, offloading, partitions and ranks of the ``deepspeed.initialize`` engine."""
    from deepspeed import DeepSpeedEngine

    from shardscope.frameworks.deepspeed.engine import inspection

    if not isinstance(model, DeepSpeedEngine):
        raise contradicts("DeepSpeed", type(model).__name__)
    tp = max(1, int(model.autotp_size()))
    if tp != plan.degrees.tp:
        raise contradicts(f"DeepSpeed with tp={plan.degrees.tp}", f"DeepSpeed with tp={tp}")
    record = inspection.read_back(plan, model)
    return {**record, "tp": tp, "words": " ".join(inspection.describe_built(record, "").split())}
