"""Accelerate's plugins, one class for each framework: how a plan configures it, and whether the model that a
script prepared is as planned.

Accelerate reads environment variables when a script creates ``Accelerator()``; each plugin sets its own. This
module imports torch inside of functions only: a notebook kernel checks a plan before launching.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from shardscope.core.errors import refuse
from shardscope.core.number_format import format_count
from shardscope.frameworks.accelerate import limits
from shardscope.frameworks.accelerate.plugin_fields import TITLE
from shardscope.frameworks.deepspeed.files.config import build_deepspeed_config
from shardscope.frameworks.deepspeed.layout import ZeroLayout
from shardscope.frameworks.formats.accelerate_config import MIXED
from shardscope.frameworks.fsdp2.layout import get_layout, get_reshard_after_forward
from shardscope.frameworks.megatron.layout import MegatronLayout

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator
    from torch.distributed.tensor import DTensor

    from shardscope.core.plan import Plan

PREFIXES = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_", "MEGATRON_LM_")
"""Prefixes of the variables that Accelerate reads; inherited ones would change the run."""
INHERITED = ("ACCELERATE_USE_CPU",)
"""Inherited variables to keep: the launcher sets this one for CPU ranks."""

Record = dict[str, object]
"""Entries of the run's record ``engine``."""


class Plugin:
    """One framework under Accelerate. This class configures nothing."""

    def check_installed(self, plan: Plan) -> None:
        """Raise ``ValueError`` if this machine lacks a package that Accelerate needs for ``plan``.

        By default the engine's own requirements suffice.
        """

    def list_distributed_types(self, plan: Plan) -> tuple[str, ...]:
        """Return the ``accelerate.DistributedType`` names that an ``Accelerator()`` of this plan may have."""
        raise NotImplementedError

    def build_environment(self, plan: Plan, folder: Path) -> dict[str, str]:
        """Return the variables for Accelerate, and write the files that they name into ``folder``."""
        return {}

    def configure(self, plan: Plan, accelerator: Accelerator) -> None:
        """Set on a new ``Accelerator`` what environment variables cannot express."""

    def describe_model(
        self, plan: Plan, accelerator: Accelerator, model: torch.nn.Module
    ) -> tuple[str, Record]:
        """Return a sentence about the prepared ``model`` and its entries of the run's record.

        Raises ``RuntimeError`` if it contradicts the plan.
        """
        raise NotImplementedError


class DdpPlugin(Plugin):
    """DDP, which Accelerate uses without a plugin and without variables."""

    def list_distributed_types(self, plan: Plan) -> tuple[str, ...]:
        """Return the types for the device; one rank may also run without distribution."""
        kind = "MULTI_GPU" if plan.on_gpu else "MULTI_CPU"
        return (kind, "NO") if plan.world_size == 1 else (kind,)

    def describe_model(
        self, plan: Plan, accelerator: Accelerator, model: torch.nn.Module
    ) -> tuple[str, Record]:
        """Check and describe the DDP wrapper and its ranks; a single rank may have no wrapper."""
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel

        kind = type(model).__name__
        if not isinstance(model, DistributedDataParallel):
            if plan.world_size > 1:
                raise make_contradiction("DDP", kind, "pass the model to accelerator.prepare")
            return f"one rank, {kind} without a wrapper", {"module": kind, "data_parallel": 1}
        num_ranks = dist.get_world_size(model.process_group)
        if num_ranks != plan.world_size:
            raise make_contradiction(f"DDP over {plan.world_size} ranks", f"DDP over {num_ranks}")
        return f"DDP: {kind} over {format_count(num_ranks, 'rank')}", {
            "module": kind,
            "data_parallel": num_ranks,
            "bucket_cap_bytes": int(model.bucket_bytes_cap),
            "gradient_as_bucket_view": bool(model.gradient_as_bucket_view),
        }


class Fsdp2Plugin(Plugin):
    """``FullyShardedDataParallelPlugin`` version 2, with ``ParallelismConfig`` for the mesh."""

    def list_distributed_types(self, plan: Plan) -> tuple[str, ...]:
        """Return the one distributed type of all meshes."""
        return ("FSDP",)

    def build_environment(self, plan: Plan, folder: Path) -> dict[str, str]:
        """Return the variables for ``FullyShardedDataParallelPlugin`` (accelerate/utils/dataclasses.py) and
        ``ParallelismConfig`` (accelerate/parallelism_config.py)."""
        degrees, recipe = plan.degrees, plan.recipe
        checkpointing = recipe.recompute == "full" and recipe.recompute_interval == 1
        return {
            "ACCELERATE_USE_FSDP": "true",
            "FSDP_VERSION": "2",
            "FSDP_RESHARD_AFTER_FORWARD": _render_flag(get_reshard_after_forward(plan)),
            "FSDP_OFFLOAD_PARAMS": _render_flag(get_layout(plan).offload == "cpu"),
            "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
            "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
            # Weights are broadcast from rank 0, so ranks need not use the same seed.
            "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
            "FSDP_ACTIVATION_CHECKPOINTING": _render_flag(checkpointing),
            "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
            "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": str(degrees.replicate),
            "PARALLELISM_CONFIG_DP_SHARD_SIZE": str(degrees.shard),
            "PARALLELISM_CONFIG_TP_SIZE": str(degrees.tp),
            "PARALLELISM_CONFIG_CP_SIZE": str(degrees.cp),
            "PARALLELISM_CONFIG_CP_BACKEND": "torch",
        }

    def configure(self, plan: Plan, accelerator: Accelerator) -> None:
        """Set fp32 gradient reduction, as the plan assumes; environment variables cannot express it."""
        from torch import float32
        from torch.distributed.fsdp import MixedPrecisionPolicy

        # Accelerate's default is one dtype for parameters, reduction and outputs (set_mixed_precision in
        # accelerate/utils/dataclasses.py). A script that sets another policy keeps it.
        plugin = accelerator.state.fsdp_plugin
        policy = plugin.mixed_precision_policy
        if policy is not None and policy == MixedPrecisionPolicy(*[policy.param_dtype] * 3):
            plugin.mixed_precision_policy = MixedPrecisionPolicy(
                param_dtype=policy.param_dtype, reduce_dtype=float32, output_dtype=policy.output_dtype
            )

    def describe_model(
        self, plan: Plan, accelerator: Accelerator, model: torch.nn.Module
    ) -> tuple[str, Record]:
        """Check and describe the DTensors' mesh, the shards' device, and resharding after forward."""
        from torch.distributed.fsdp import FSDPModule

        from shardscope.training.optimizers.gradients import local_shard

        parameters = self._check_shards(plan, model)
        device = self._check_device(plan, accelerator, parameters)
        reshards = self._check_resharding(plan, model)
        # The record has what Accelerate built, not what the plan asked for.
        assert isinstance(model, FSDPModule)
        policy = model._get_fsdp_state()._mp_policy
        mesh = next(iter(parameters.values())).device_mesh
        # Axes of the mesh: replicas, shards (cp included), tp.
        num_shards = mesh.shape[-2] if plan.degrees.tp > 1 else mesh.shape[-1]
        sentence = (
            f"FSDP2: all {len(parameters)} parameter tensors are DTensors, sharded over "
            f"{format_count(num_shards, 'rank')}"
        )
        return sentence, {
            "module": type(model).__name__,
            "mesh_shape": list(mesh.shape),
            "mesh_axes": list(mesh.mesh_dim_names or ()),
            "num_sharded_tensors": len(parameters),
            "num_weights_here": sum(local_shard(tensor).numel() for tensor in parameters.values()),
            "placements": dict(Counter(str(tuple(tensor.placements)) for tensor in parameters.values())),
            "reshard_after_forward": {str(value): number for value, number in reshards.items()},
            "parameters_on": device,
            "param_dtype": str(policy.param_dtype).removeprefix("torch."),
            "reduce_dtype": str(policy.reduce_dtype).removeprefix("torch."),
        }

    def _check_shards(self, plan: Plan, model: torch.nn.Module) -> dict[str, DTensor]:
        """Return the parameters by name, all of them DTensors that are sharded over the planned mesh."""
        from torch.distributed.tensor import DTensor, Shard

        parameters: dict[str, DTensor] = {}
        unsharded: list[str] = []
        for name, parameter in model.named_parameters():
            if isinstance(parameter, DTensor):
                parameters[name] = parameter
            else:
                unsharded.append(name)
        if unsharded:
            num_unsharded = format_count(len(unsharded), "parameter")
            raise make_contradiction(
                "FSDP2", f"a model with {num_unsharded} that are not sharded ({', '.join(unsharded[:3])})"
            )
        planned_mesh = self._get_mesh_shape(plan)
        for name, tensor in parameters.items():
            mesh = tuple(tensor.device_mesh.shape)
            is_sharded = any(isinstance(placement, Shard) for placement in tensor.placements)
            if mesh != planned_mesh or not is_sharded:
                raise make_contradiction(
                    f"shards over a mesh of {planned_mesh}", f"{name} {tensor.placements} over {mesh}"
                )
        return parameters

    def _check_device(self, plan: Plan, accelerator: Accelerator, parameters: Mapping[str, DTensor]) -> str:
        """Return the device type of all shards: with CPU offloading they are in host memory."""
        from shardscope.training.optimizers.gradients import local_shard

        devices = {local_shard(tensor).device.type for tensor in parameters.values()}
        planned: str = "cpu" if get_layout(plan).offload == "cpu" else accelerator.device.type
        if devices != {planned}:
            raise make_contradiction(f"shards on {planned}", f"shards on {' and '.join(sorted(devices))}")
        return planned

    def _check_resharding(self, plan: Plan, model: torch.nn.Module) -> Counter[bool]:
        """Return the number of parameter groups that are resharded after forward, and of those that are not.

        The root, and the head with its norm, are never resharded: backward needs them at once. One resharded
        group among several therefore shows that the layers are.
        """
        reshards = self._count_resharding(model)
        is_resharded, is_planned = reshards[True] > 0, bool(get_reshard_after_forward(plan))
        if is_resharded != is_planned and reshards.total() > 1:
            raise make_contradiction(
                f"reshard_after_forward={is_planned}", f"reshard_after_forward={is_resharded}"
            )
        return reshards

    def _get_mesh_shape(self, plan: Plan) -> tuple[int, ...]:
        """Return the shape of Accelerate's mesh: replicas, shards (including cp), tp; without axes of 1."""
        degrees = plan.degrees
        replicas = (degrees.replicate,) if degrees.replicate > 1 else ()
        tensor_parallel = (degrees.tp,) if degrees.tp > 1 else ()
        return (*replicas, degrees.shard * degrees.cp, *tensor_parallel)

    def _count_resharding(self, model: torch.nn.Module) -> Counter[bool]:
        """Count the parameter groups that are resharded after forward, and those that are not."""
        from shardscope.frameworks.fsdp2.engine.inspection import list_groups

        groups = (group for module in model.modules() for group in list_groups(module))
        return Counter(group.post_forward_mesh_info is not None for group in groups)


class DeepSpeedPlugin(Plugin):
    """``DeepSpeedPlugin`` with the plan's DeepSpeed configuration file."""

    def list_distributed_types(self, plan: Plan) -> tuple[str, ...]:
        """Return the one distributed type of all ZeRO stages."""
        return ("DEEPSPEED",)

    def build_environment(self, plan: Plan, folder: Path) -> dict[str, str]:
        """Write the configuration file, and return the variables for ``DeepSpeedPlugin`` that name it
        (accelerate/utils/dataclasses.py)."""
        assert isinstance(plan.layout, ZeroLayout)
        config = build_deepspeed_config(plan, nvme_folder=str(folder / "nvme"))
        # Accelerate replaces "auto" by 1.0: under DeepSpeed a script's own clip_grad_norm_ does nothing.
        config["gradient_clipping"] = "auto"
        # One file for each rank: ranks of a node share the folder.
        file = folder / f"ds_config-{os.environ.get('RANK', '0')}.json"
        file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        return {
            "ACCELERATE_USE_DEEPSPEED": "true",
            "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(file),
            "ACCELERATE_DEEPSPEED_ZERO3_INIT": _render_flag(plan.layout.stage == 3),
        }

    def describe_model(
        self, plan: Plan, accelerator: Accelerator, model: torch.nn.Module
    ) -> tuple[str, Record]:
        """Check and describe stage, offloading, partitions and ranks of DeepSpeed's engine."""
        from deepspeed import DeepSpeedEngine

        from shardscope.frameworks.deepspeed.engine import inspection

        if not isinstance(model, DeepSpeedEngine):
            raise make_contradiction("DeepSpeed", type(model).__name__)
        tp = max(1, int(model.autotp_size()))
        if tp != plan.degrees.tp:
            raise make_contradiction(f"DeepSpeed with tp={plan.degrees.tp}", f"DeepSpeed with tp={tp}")
        # The same checks as for Shardscope's own engine. autotp_size is 0 without tensor parallelism.
        record = inspection.read_back(plan, model)
        return " ".join(inspection.describe_built(record, "").split()), {**record, "tp": tp}


class MegatronPlugin(Plugin):
    """``MegatronLMPlugin`` around an installed Megatron-LM."""

    def check_installed(self, plan: Plan) -> None:
        """Raise ``ValueError`` if Megatron-LM's training code is not installed."""
        if not has_megatron_lm():
            refuse(
                "Layout.framework",
                plan.layout.framework,
                "'ddp', 'fsdp2' or 'deepspeed' for a Script here: Accelerate's plugin needs "
                "megatron.training and megatron.legacy of Megatron-LM's repository, which the package "
                "megatron-core does not contain",
                "ss.launch(plan, ss.Pretrain()), whose engine needs megatron-core alone",
            )

    def list_distributed_types(self, plan: Plan) -> tuple[str, ...]:
        """Return the one distributed type of all degrees."""
        return ("MEGATRON_LM",)

    def build_environment(self, plan: Plan, folder: Path) -> dict[str, str]:
        """Return the variables for ``MegatronLMPlugin`` (accelerate/utils/dataclasses.py)."""
        assert isinstance(plan.layout, MegatronLayout)
        layout, degrees = plan.layout, plan.degrees
        options: dict[str, object] = {
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
            "RECOMPUTE_ACTIVATIONS": plan.recipe.recompute == "selective",
        }
        return {
            "ACCELERATE_USE_MEGATRON_LM": "true",
            **{f"MEGATRON_LM_{name}": str(value) for name, value in options.items()},
        }

    def describe_model(
        self, plan: Plan, accelerator: Accelerator, model: torch.nn.Module
    ) -> tuple[str, Record]:
        """Check and describe the sizes of megatron-core's process groups."""
        from megatron.core import parallel_state

        # ``data_parallel`` is what the others leave: it shows that world size and degrees agree.
        sizes = {
            "tp": parallel_state.get_tensor_model_parallel_world_size(),
            "pp": parallel_state.get_pipeline_model_parallel_world_size(),
            "cp": parallel_state.get_context_parallel_world_size(),
            "ep": parallel_state.get_expert_model_parallel_world_size(),
            "data_parallel": parallel_state.get_data_parallel_world_size(),
        }
        for name, size in sizes.items():
            planned = getattr(plan.degrees, name)
            if size != planned:
                raise make_contradiction(f"Megatron with {name}={planned}", f"Megatron with {name}={size}")
        degrees = ", ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
        return f"Megatron-LM ({degrees or 'one rank'})", {"module": type(model).__name__, **sizes}


PLUGINS: dict[str, Plugin] = {
    "ddp": DdpPlugin(),
    "fsdp2": Fsdp2Plugin(),
    "deepspeed": DeepSpeedPlugin(),
    "megatron": MegatronPlugin(),
}


def get_plugin(plan: Plan) -> Plugin:
    """Return the plugin of the plan's framework."""
    return PLUGINS[plan.layout.framework]


def has_megatron_lm() -> bool:
    """Return whether Megatron-LM's training code, which Accelerate's plugin calls, is installed.

    The plugin imports both packages (accelerate/utils/megatron_lm.py). From 0.17 on megatron-core's wheel has
    the first one, never the second.
    """
    try:
        return all(importlib.util.find_spec(f"megatron.{part}") for part in ("training", "legacy"))
    except ModuleNotFoundError:
        return False


def build_environment(plan: Plan, folder: Path, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return ``inherited`` with Accelerate's variables replaced by those of ``plan``."""
    # Variables of an earlier launch or of the shell would configure another plugin, or change this one.
    unrelated = {
        name: value
        for name, value in inherited.items()
        if not name.startswith(PREFIXES) or name.startswith(INHERITED)
    }
    precision = MIXED[plan.recipe.precision]
    common = {
        "ACCELERATE_MIXED_PRECISION": precision,
        # Accelerate prefers it to the number in the script.
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": str(plan.num_micro_batches),
    }
    if precision == "fp8":
        common["ACCELERATE_FP8_BACKEND"] = "AO"
    return {**unrelated, **common, **get_plugin(plan).build_environment(plan, folder)}


def check_plan(plan: Plan) -> None:
    """Raise ``ValueError`` for a plan that no script can run here, with an alternative as the fix."""
    # First what Accelerate cannot do anywhere, then what this machine lacks.
    limits.check_plan(plan)
    get_plugin(plan).check_installed(plan)
    precision = plan.recipe.precision
    if precision == "fp16-mixed" and not plan.on_gpu:
        refuse(
            "Recipe.precision",
            precision,
            f"'bf16-mixed', 'bf16' or 'fp32' for a Script on CPU ranks: there {TITLE} silently trains fp16 "
            "in fp32 (ss.Pretrain() and ctx.engine do train fp16)",
            {"precision": "bf16-mixed"},
        )
    if precision == "fp8-mixed" and importlib.util.find_spec("torchao") is None:
        refuse(
            "Recipe.precision",
            precision,
            f"'bf16-mixed' or another unless torchao is installed, which {TITLE} uses for 8-bit matmuls",
            "pip install torchao",
        )


def make_contradiction(planned: str, prepared: str, fix: str = "") -> RuntimeError:
    """Return the error for a script whose ``prepared`` model contradicts its plan."""
    return RuntimeError(
        f"the plan has {planned}, and the script has {prepared}" + (f": {fix}" if fix else "")
    )


def _render_flag(value: object) -> str:
    return str(bool(value)).lower()
