"""Megatron for a user's script: Accelerate's plugin around an installed Megatron-LM."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardscope.core.errors import refuse
from shardscope.frameworks.accelerate.plugins import contradicts

if TYPE_CHECKING:
    from shardscope.core.plan import Plan


def check_installed(plan: Plan) -> None:
    """Raise ``ValueError`` if Megatron-LM's training code is not installed."""
    if not has_megatron_lm():
        refuse(
            "Layout.framework",
            plan.layout.framework,
            "'ddp', 'fsdp2' or 'deepspeed' for a Script here: Accelerate's plugin needs megatron.training of "
            "Megatron-LM's repository, which the package megatron-core does not have",
            "ss.launch(plan, ss.Pretrain()), whose engine needs megatron-core alone",
        )


def has_megatron_lm() -> bool:
    """Return whether Megatron-LM's training code, which Accelerate's plugin calls, is installed."""
    try:
        return importlib.util.find_spec("megatron.training") is not None
    except ModuleNotFoundError:
        return False


def distributed_types(plan: Plan) -> tuple[str, ...]:
    """Return the one distributed type of all degrees."""
    return ("MEGATRON_LM",)


def environment(plan: Plan, folder: Path) -> dict[str, str]:
    """Return the variables for ``MegatronLMPlugin`` (accelerate/utils/dataclasses.py)."""
    layout: Any = plan.layout
    degrees, recipe = plan.degrees, plan.recipe
    said: dict[str, object] = {
        "TP_DEGREE": degrees.tp,
        "PP_DEGREE": degrees.pp,
        "CONTEXT_PARALLEL_SIZE": degrees.cp,  # Accelerate's own default is 2
        "EXPERT_MODEL_PARALLEL_SIZE": degrees.ep,
        "EXPERT_TENSOR_PARALLEL_SIZE": layout.expert_tp,
        "SEQUENCE_PARALLELISM": layout.splits_sequence,
        "USE_DISTRIBUTED_OPTIMIZER": layout.distributed_optimizer,
        "USE_PRECISION_AWARE_OPTIMIZER": layout.use_precision_aware_optimizer,
        "NUM_MICRO_BATCHES": plan.num_micro_batches,
        "GRADIENT_CLIPPING": 1.0,
        "RECOMPUTE_ACTIVATIONS": recipe.recompute == "selective",
    }
    return {
        "ACCELERATE_USE_MEGATRON_LM": "true",
        **{f"MEGATRON_LM_{name}": str(value) for name, value in said.items()},
    }


def told(plan: Plan, accelerator: Any) -> None:
    """Configure nothing."""


def read_back(plan: Plan, accelerator: Any, model: Any) -> dict[str, Any]:
    """Check and describe the sizes of megatron-core's process groups."""
    from megatron.core import parallel_state

    degrees = plan.degrees
    found = {
        "tp": parallel_state.get_tensor_model_parallel_world_size(),
        "pp": parallel_state.get_pipeline_model_parallel_world_size(),
        "cp": parallel_state.get_context_parallel_world_size(),
        "ep": parallel_state.get_expert_model_parallel_world_size(),
        "data_parallel": parallel_state.get_data_parallel_world_size(),
    }
    for name, size in found.items():
        if size != getattr(degrees, name):
            raise contradicts(
                f"Megatron with {name}={getattr(degrees, name)}", f"Megatron with {name}={size}"
            )
    shown = ", ".join(f"{name} {size}" for name, size in found.items() if size > 1)
    return {"module": type(model).__name__, **found, "words": f"Megatron-LM ({shown or 'one rank'})"}
