"""Plans that the Megatron-core engine can train. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from shardscope.core.errors import refuse
from shardscope.frameworks.limits import check_recipe, is_missing
from shardscope.frameworks.megatron.config_limits import check_computed
from shardscope.frameworks.megatron.hf_names import check_mapped
from shardscope.frameworks.megatron.layout import get_layout

if TYPE_CHECKING:
    from shardscope.core.plan import Plan

TRAINED = {
    "method": ("full",),
    "quantization": (None,),
    "precision": ("bf16-mixed", "fp16-mixed", "bf16", "fp32"),
    "optimizer": ("adamw", "sgd"),
    "kernels": (None, "megatron"),
    "attention": (None, "eager"),
    "loss": (None, "full"),
    "dropout": (0.0,),
    "packing": (False,),
    "recompute_interval": (1,),
    "expert_capacity_factor": (None,),
}
"""Recipe values that the engine supports, by field; the torch engines support other ones."""

INSTALL = 'pip install --no-build-isolation "transformer_engine[pytorch]"'


def check_plan(plan: Plan) -> None:
    """Raise ``ValueError`` for a plan that the engine cannot run, naming one that can if there is one."""
    layout = get_layout(plan)
    if is_missing("megatron"):
        refuse(
            "Layout.framework",
            layout.framework,
            "'ddp', 'fsdp2' to train until megatron-core is installed",
            'pip install "shardscope[megatron]"',
        )
    check_trainable(plan)
    if layout.cp > 1:
        _check_transformer_engine(layout.cp)


def check_trainable(plan: Plan) -> None:
    """Raise ``ValueError`` for a plan that the engine never runs, whatever packages are installed."""
    layout = get_layout(plan)
    if layout.cp > 1:
        _check_context_device(plan, layout.cp)
    for name, why in (
        ("use_precision_aware_optimizer", "it is Transformer Engine's Adam"),
        ("tp_comm_overlap", "it is Transformer Engine's user buffers"),
    ):
        if getattr(layout, name):
            refuse(
                f"Layout.{name}",
                True,
                f"False to train here: {why}, which this engine does not call yet",
                {name: False},
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
            {"layout": "fsdp2"},
        )
    check_recipe(plan.recipe, TRAINED)


def _check_transformer_engine(cp: int) -> None:
    if is_missing("transformer_engine"):
        refuse(
            "Layout.cp",
            cp,
            "1 to train with Megatron-core until Transformer Engine, whose attention is its context "
            f"parallelism, is installed: {INSTALL}; fsdp2 needs none of it",
            {"layout": "fsdp2", "cp": cp},
        )


def _check_context_device(plan: Plan, cp: int) -> None:
    """Raise ``ValueError`` on CPU ranks, where Transformer Engine has no context parallelism.

    Its kernels on GPUs are checked by the layout (``check_attention``).
    """
    if not plan.on_gpu:
        refuse(
            "Layout.cp",
            cp,
            "1 to train with Megatron-core on CPU ranks: its context parallelism is Transformer Engine's "
            f"attention, whose kernels for it need a GPU (there: {INSTALL}); fsdp2 needs none of it",
            {"layout": "fsdp2", "cp": cp},
        )


def check_config(plan: Plan, config: Mapping[str, object]) -> None:
    """Raise ``ValueError`` if megatron-core would compute another model than ``config`` (a config.json)."""
    check_computed(config)
