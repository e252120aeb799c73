"""What the Megatron-core engine runs of what can be planned. No torch here."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from shardscope.frameworks.limits import check_recipe
from shardscope.frameworks.megatron.config_limits import check_computed
from shardscope.frameworks.megatron.hf_names import check_mapped
from shardscope.validation import refuse

if TYPE_CHECKING:
    from shardscope.plan import Plan

TRAINED = {
    "method": ("full",),
    "quantization": (None,),
    "precision": ("bf16-mixed", "fp16-mixed", "bf16", "fp32"),
    "optimizer": ("adamw", "sgd"),
    "kernels": (None, "transformers"),
    "attention": (None, "eager"),
    "loss": (None, "full"),
    "dropout": (0.0,),
    "packing": (False,),
    "recompute_interval": (1,),
    "expert_capacity_factor": (None,),
}
"""What the engine runs of a recipe; torch's engines run other methods, optimizers and losses."""


def check_plan(plan: Plan) -> None:
    """Raise ``ValueError`` for what the engine cannot run, naming one that can where there is one."""
    layout: Any = plan.layout
    if importlib.util.find_spec("megatron") is None:
        refuse(
            "Layout.framework",
            layout.framework,
            "'ddp', 'fsdp2' to train until megatron-core is installed",
            'pip install "shardscope[megatron]"',
        )
    check_trainable(plan)


def check_trainable(plan: Plan) -> None:
    """The same for what it never runs, whatever is installed here."""
    layout: Any = plan.layout
    if layout.cp > 1:
        refuse(
            "Layout.cp",
            layout.cp,
            "1 to train with Megatron-core here: its context parallelism is Transformer Engine's attention, "
            "which this engine does not call yet; fsdp2's splits sequences",
            f"layout=Layout.fsdp2(cp={layout.cp})",
        )
    for name, why in (
        ("use_precision_aware_optimizer", "it is Transformer Engine's Adam"),
        ("tp_comm_overlap", "it is Transformer Engine's user buffers"),
    ):
        if getattr(layout, name):
            refuse(
                f"Layout.{name}",
                True,
                f"False to train here: {why}, which this engine does not call yet",
                f"{name}=False",
            )
    arch = plan.architecture
    check_mapped(arch)
    if arch.mixture_of_experts is not None:
        chosen = arch.mixture_of_experts.num_experts_per_tok
        check_computed({"model_type": arch.model_type, "num_experts_per_tok": chosen})
    if arch.sliding_window_layers and plan.recipe.seq_len > (arch.sliding_window or 0):
        refuse(
            "Recipe.seq_len",
            plan.recipe.seq_len,
            f"at most the window of {arch.sliding_window} tokens with Megatron-core, whose layers here "
            "attend to everything",
            "layout=Layout.fsdp2()",
        )
    check_recipe(plan.recipe, TRAINED)


def check_config(plan: Plan, config: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` where the model of ``config``, a config.json, would train as another one."""
    check_computed(config)
