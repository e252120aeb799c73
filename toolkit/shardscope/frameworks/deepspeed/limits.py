"""Limits of the DeepSpeed engine. Imports no torch: notebooks check them before a launch."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from ctypes.util import find_library
from pathlib import Path
from typing import TYPE_CHECKING

from shardscope.core.errors import refuse
from shardscope.families.registry import list_families_with
from shardscope.frameworks.deepspeed.layout import NVME_VARIABLE, ZeroLayout, check_not_quantized, get_layout
from shardscope.frameworks.limits import TRAINED, can_train_here, check_recipe, check_staged, is_missing
from shardscope.machine.host import multiplies_in_fp16
from shardscope.machine.user_folders import expand_home
from shardscope.memory.activations.head import resolve_loss

if TYPE_CHECKING:
    from shardscope.core.plan import Plan

OPTIMIZERS = ("adamw", "sgd", "adafactor")
"""DeepSpeed runs them over its flat buffers; offloaded AdamW is its own ``DeepSpeedCPUAdam``."""
AUTOTP_TRAINED = list_families_with("autotp_training")
"""Families that AutoTP shards by transformers' own plan, compared with a single process in
``tests/runs/test_deepspeed_tensor_parallel.py``."""
AUTOTP_RECIPES: Mapping[str, tuple[object, ...]] = {**TRAINED, "optimizer": ("adamw", "sgd")}
"""Supported recipe values with tp > 1: these optimizers are elementwise, so they work on sharded matrices."""


def check_plan(plan: Plan) -> None:
    """Raise ``ValueError`` for plans that the engine cannot run."""
    layout = get_layout(plan)
    if is_missing("deepspeed"):
        refuse("Layout.framework", "deepspeed", "one that is installed here", "pip install deepspeed")
    _check_degrees(plan)
    if layout.stage == 0:
        _check_stage_0(plan)
    check_recipe(plan.recipe, {**TRAINED, "optimizer": OPTIMIZERS})
    _check_loss(plan)
    # What this machine lacks comes last: errors of the plan itself are the same on every machine.
    if not plan.on_gpu:
        check_cpu_ranks(layout)
        _check_processor(plan.recipe.precision)
    if not can_train_here():
        return
    if "nvme" in (layout.offload_optimizer, layout.offload_params):
        _check_nvme()
    if layout.offload_optimizer and plan.recipe.optimizer == "adamw":
        _check_compiler("cpu_adam", "Layout.offload_optimizer", layout.offload_optimizer)


def check_cpu_ranks(layout: ZeroLayout) -> None:
    """Raise ``ValueError`` for layouts that DeepSpeed runs on GPUs only."""
    check_not_quantized(layout, "on CPU ranks: DeepSpeed quantizes in CUDA kernels (QuantizerBuilder)")


def _check_processor(precision: str) -> None:
    """Raise ``ValueError`` for fp16 on a CPU without it (``CPU_Accelerator.is_fp16_supported``)."""
    if precision == "fp16-mixed" and multiplies_in_fp16() is False:
        refuse(
            "Recipe.precision",
            precision,
            "'fp32', 'bf16', 'bf16-mixed' on CPU ranks of a processor without AVX512-FP16, as this one is: "
            "there DeepSpeed itself refuses fp16",
            {"precision": "bf16-mixed"},
        )


def _check_loss(plan: Plan) -> None:
    """Raise ``ValueError`` for a loss that the ZeRO stage does not support."""
    layout = get_layout(plan)
    if resolve_loss(plan) == "chunked" and layout.stage == 3:
        refuse(
            "Recipe.loss",
            "chunked",
            "'full' in stage 3, which all-gathers a weight when its own module runs: a chunked loss does "
            "not run the head's. fsdp2 runs it",
            {"loss": "full"},
        )


def _check_degrees(plan: Plan) -> None:
    """Raise ``ValueError`` for degrees that cannot be trained, or not with this model."""
    layout = get_layout(plan)
    if layout.tp > 1:
        _check_auto_tp(plan, layout)
    if layout.ep > 1:
        check_experts(plan)
    if layout.pp > 1:
        check_pipeline(plan)


def _check_auto_tp(plan: Plan, layout: ZeroLayout) -> None:
    """Raise ``ValueError`` for plans that DeepSpeed's AutoTP, with transformers' plans, cannot run."""
    arch, recipe = plan.architecture, plan.recipe
    # Combinations with other options that no test compares with a single process.
    if layout.pp > 1:
        refuse(
            "Layout.tp", layout.tp, "1 with pp > 1: AutoTP inside pipeline stages is not tested", {"tp": 1}
        )
    if layout.offload_optimizer:
        why = "None with tp > 1: AutoTP with offloading is not tested"
        refuse("Layout.offload_optimizer", layout.offload_optimizer, why, {"offload_optimizer": None})
    if arch.model_type not in AUTOTP_TRAINED:
        refuse(
            "Architecture.model_type",
            arch.model_type,
            f"{', '.join(AUTOTP_TRAINED)} with tp > 1: AutoTP is tested with no others",
            {"tp": 1},
        )
    # Combinations that DeepSpeed 0.19 trains incorrectly.
    if layout.stage == 0 and recipe.precision != "fp32":
        why = "1 or 2 in half precision with tp > 1: in stage 0 DeepSpeed's gradient norm is up to 20 % off"
        refuse("Layout.stage", 0, why, {"stage": 1})
    if recipe.recompute == "selective":
        refuse(
            "Recipe.recompute",
            "selective",
            "'none', 'full', 'offload' with tp > 1: AutoTP all-reduces in place the matmul output that "
            "selective recomputation saves (RowParallel.forward), so that it would be reduced twice",
            {"recompute": "full"},
        )
    # check_heads has checked the numbers of heads.
    for field in ("intermediate_size", "vocab_size"):
        if getattr(arch, field) % layout.tp:
            refuse(
                "Layout.tp",
                layout.tp,
                f"a divisor of {arch.name}'s {field}={getattr(arch, field)}: all shards must be equal",
                {"tp": 1},
            )
    check_recipe(recipe, AUTOTP_RECIPES)


def check_experts(plan: Plan) -> None:
    """Raise ``ValueError`` for plans that DeepSpeed's MoE layers, which replace transformers', cannot run."""
    arch, recipe = plan.architecture, plan.recipe
    experts = arch.mixture_of_experts
    supported = list_families_with("deepspeed_moe")
    if arch.model_type not in supported:
        why = (
            f"{', '.join(supported)} with ep > 1: DeepSpeed's MoE layer routes as Mixtral's does; "
            "megatron runs others"
        )
        refuse("Architecture.model_type", arch.model_type, why, {"ep": 1})
    if experts is not None and experts.num_experts_per_tok < 2:
        refuse(
            "Architecture.mixture_of_experts.num_experts_per_tok",
            experts.num_experts_per_tok,
            "2 or more with ep > 1: DeepSpeed multiplies a single expert's output by its probability "
            "(top1gating), Mixtral by 1",
            {"ep": 1},
        )
    if plan.degrees.pp > 1:
        why = "1 with pp > 1: experts inside DeepSpeed's pipeline stages are not supported"
        refuse("Layout.ep", plan.degrees.ep, why, {"ep": 1})
    if recipe.method != "full":
        why = "'full' with ep > 1: peft does not support DeepSpeed's experts"
        refuse("Recipe.method", recipe.method, why, {"ep": 1})


def _check_stage_0(plan: Plan) -> None:
    """Raise ``ValueError`` for plans that DeepSpeed 0.19 trains incorrectly with stage 0."""
    precision, why = plan.recipe.precision, ""
    if precision == "fp16-mixed":
        why = (
            "1 to 3 to train in fp16: in stage 0 DeepSpeed does not scale the loss, but divides gradients by "
            "the scale (deepspeedai/DeepSpeed#8393)"
        )
    elif precision != "fp32" and plan.degrees.pp > 1:
        why = (
            "1 to train in bf16 with pp > 1: there DeepSpeed partitions the optimizer state in stage 0 too "
            "(BF16_Optimizer), and its checkpoints contain only one rank's partition"
        )
    elif precision != "fp32" and plan.degrees.ep > 1:
        why = (
            "1 or 2 to train in bf16 with ep > 1: in stage 0 DeepSpeed clips by a gradient norm without the "
            "experts (FP16_UnfusedOptimizer.step)"
        )
    if why:
        refuse("Layout.stage", 0, why, {"stage": 1})


def check_pipeline(plan: Plan) -> None:
    """Raise ``ValueError`` for plans that DeepSpeed's pipeline module cannot run."""
    check_staged(plan)
    if resolve_loss(plan) != "full":
        refuse(
            "Recipe.loss",
            plan.recipe.loss,
            "'full' with pp > 1, where DeepSpeed's schedule computes the loss from all logits",
            {"loss": "full"},
        )


def _check_nvme() -> None:
    """Raise ``ValueError`` without libaio, the built extension or a compiler, or a writable folder."""
    if find_library("aio") is None:
        refuse(
            "Layout.offload_optimizer or offload_params",
            "nvme",
            "'cpu' or None on this machine: DeepSpeed swaps through libaio, which is not installed",
            "apt install libaio-dev",
        )
    _check_compiler("async_io", "Layout.offload_optimizer or offload_params", "nvme")
    configured = os.environ.get(NVME_VARIABLE)
    if configured is None:
        return
    folder = expand_home(configured)
    if not folder.is_dir() or not _is_writable(folder):
        problem = "cannot be written" if folder.is_dir() else "is no folder"
        refuse(
            f"the environment variable {NVME_VARIABLE}",
            configured,
            f"a folder on the disk to swap to, in which this user can create files: this one {problem}",
            f"unset {NVME_VARIABLE}, so that ranks swap in the run's folder",
        )


def _is_writable(folder: Path) -> bool:
    """Return whether a file can be created in ``folder``.

    Creates one, because ``os.access`` returns True for root even on a read-only file system.
    """
    try:
        with tempfile.TemporaryDirectory(prefix=".shardscope-", dir=folder):
            return True
    except OSError:
        return False


def _check_compiler(extension: str, field: str, value: object) -> None:
    """Raise ``ValueError`` if ``extension`` must be built and ninja, a compiler or libaio.h is missing."""
    from shardscope.frameworks.deepspeed.extensions import is_built

    if is_built(extension):
        return
    missing = [tool for tool in ("ninja", os.environ.get("CXX", "c++")) if shutil.which(tool) is None]
    if extension == "async_io" and not Path("/usr/include/libaio.h").exists():
        missing.append("libaio.h")
    if missing:
        refuse(
            field,
            value,
            f"None on this machine: DeepSpeed compiles {extension}, and this machine has no "
            f"{', no '.join(missing)}",
            "apt install ninja-build g++ libaio-dev",
        )


def find_nvme_folder(run_folder: Path) -> Path:
    """Return the folder that the ranks of a run swap to."""
    configured = os.environ.get(NVME_VARIABLE)
    return expand_home(configured) / run_folder.name if configured else run_folder / "nvme"
