"""DeepSpeed under a script of one's own: Accelerate's plugin around the plan's configuration file."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardscope.frameworks.accelerate.plugins import check_on_gpu, contradicts
from shardscope.frameworks.deepspeed.config import deepspeed_config
from shardscope.memory.words import count
from shardscope.validation import refuse

if TYPE_CHECKING:
    from shardscope.plan import Plan

NOT_IN_CONFIG = {"pp": "a pipeline engine", "ep": "expert parallelism"}
"""What DeepSpeed takes from the model, and Accelerate does not make."""


def check_plan(plan: Plan) -> None:
    """Raise ``ValueError`` on CPU ranks, and for what DeepSpeed's configuration has no words for."""
    check_on_gpu(plan, "DeepSpeed plugin")
    for degree, what in NOT_IN_CONFIG.items():
        size = getattr(plan.degrees, degree)
        if size > 1:
            refuse(f"Layout.{degree}", size, f"1 for a Script: Accelerate has no {what}", f"{degree}=1")


def distributed_types(plan: Plan) -> tuple[str, ...]:
    """One, whatever the stage."""
    return ("DEEPSPEED",)


def environment(plan: Plan, folder: Path) -> dict[str, str]:
    """A configuration file, which ``DeepSpeedPlugin`` reads (accelerate/utils/dataclasses.py)."""
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
    """Nothing: all is in the file."""


def what_it_is(plan: Plan, accelerator: Any, model: Any) -> dict[str, Any]:
    """Stage, offloading and ranks, from the engine that ``deepspeed.initialize`` made."""
    from deepspeed import DeepSpeedEngine

    kind = type(model).__name__
    if not isinstance(model, DeepSpeedEngine):
        raise contradicts("DeepSpeed", kind)
    layout: Any = plan.layout
    offloaded = {
        "offload_optimizer": _device(model.zero_offload_optimizer()),
        "offload_params": _device(model.zero_offload_param()),
    }
    found: dict[str, Any] = {
        "stage": int(model.zero_optimization_stage()),
        **offloaded,
        "tp": max(1, int(model.autotp_size())),
        "data_parallel": int(model.dp_world_size),
    }
    planned = {
        "stage": layout.stage,
        "offload_optimizer": layout.offload_optimizer,
        "offload_params": layout.offload_params,
        "tp": plan.degrees.tp,
        "data_parallel": plan.degrees.data_parallel,
    }
    for name, value in planned.items():
        if found[name] != value:
            raise contradicts(f"DeepSpeed with {name}={value!r}", f"DeepSpeed with {name}={found[name]!r}")
    homes = "".join(
        f", {name.removeprefix('offload_')} on {device}" for name, device in offloaded.items() if device
    )
    return {
        "module": kind,
        **found,
        "gradient_accumulation_steps_of_engine": int(model.gradient_accumulation_steps()),
        "gradient_clipping": float(model.gradient_clipping()),
        "words": f"DeepSpeed ZeRO-{found['stage']} over {count(found['data_parallel'], 'rank')}{homes}",
    }


def _device(offload: Any) -> str | None:
    """``cpu``, ``nvme`` or None of what DeepSpeed's configuration has for an offloading."""
    device = getattr(offload, "device", None)
    name = getattr(device, "value", device)
    return None if name in (None, "none") else str(name)
