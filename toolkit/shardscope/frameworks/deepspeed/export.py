"""DeepSpeed's files: its JSON, Accelerate's YAML and the Trainer's arguments around that, a plain script."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from shardscope.export.commands import started
from shardscope.export.files import PLAN_FILE, Absent, Exported, described
from shardscope.export.script import GROUPS, OPTIMIZERS, SCRIPT_FILE, plain_script
from shardscope.export.unsaid import unsaid
from shardscope.frameworks.accelerate.export import launched, none_of_it
from shardscope.frameworks.accelerate.training_arguments import ARGUMENTS_FILE, training_arguments
from shardscope.frameworks.deepspeed.config import deepspeed_config
from shardscope.frameworks.deepspeed.zeropp import QUANTIZED

if TYPE_CHECKING:
    from shardscope.plan import Plan

CONFIG_FILE = "ds_config.json"
OWN_KEY = "shardscope"
"""DeepSpeed's parser leaves top-level keys alone that it does not know; JSON has no comments."""
NOT_IN_CONFIG = ("pp", "ep")
"""Degrees that DeepSpeed takes from the model: ``PipelineModule(num_stages=...)``, ``MoE(ep_size=...)``."""


def files(plan: Plan) -> list[Exported | Absent]:
    """What an export of a DeepSpeed plan writes beside its JSON."""
    return [_config(plan), *_accelerate(plan), _trainer(plan), *started(plan, _script(plan))]


def _written(plan: Plan) -> set[str]:
    """Fields of the layout that the JSON has; of others the stage, or a device, has no use."""
    layout: Any = plan.layout
    found = {"stage", "tp", "contiguous_gradients", "overlap_comm", "reduce_bucket_size"}
    found |= {"allgather_bucket_size", "offload_optimizer", "offload_params"}
    if layout.stage == 3:
        found |= {field.name for field in fields(layout) if field.name.startswith("stage3_")}
        found |= {"sub_group_size", "zero_hpz_partition_size", *QUANTIZED}
    if layout.offload_optimizer or layout.offload_params:
        found.add("pin_memory")
    for device, prefix in (
        (layout.offload_optimizer, "offload_optimizer_"),
        (layout.offload_params, "offload_params_"),
    ):
        if device == "nvme":
            found |= {field.name for field in fields(layout) if field.name.startswith(prefix)}
    return found


def _elsewhere(plan: Plan) -> set[str]:
    """Fields of the layout that are in the JSON, which the other files name."""
    return {field.name for field in fields(plan.layout)} - set(NOT_IN_CONFIG)


def _config(plan: Plan) -> Exported:
    said = {"micro_batch_size", "global_batch_size"}
    if plan.recipe.precision != "bf16":  # one with bf16-mixed in DeepSpeed's words
        said.add("precision")
    everything = {field.name for field in fields(plan.layout)}
    own = {
        "what": f"{described(plan)}. Written from the {PLAN_FILE} beside it.",
        "layout": {
            **{name: getattr(plan.layout, name) for name in NOT_IN_CONFIG},
            **dict(unsaid(plan, {field.name for field in fields(plan.recipe)}, _written(plan))),
        },
        "not_said_here": dict(unsaid(plan, said, everything)),
    }
    values = {OWN_KEY: own, **deepspeed_config(plan)}
    return Exported(
        name=CONFIG_FILE, what="deepspeed.initialize(config=...)", text=json.dumps(values, indent=2) + "\n"
    )


SMALL_BYTES = 2**30
"""In fp32; larger fresh models are never whole in a script."""
ON_CPU = "on CPU ranks Accelerate's DeepSpeed plugin silently trains with DDP instead."


def _accelerate(plan: Plan) -> list[Exported | Absent]:
    if not plan.on_gpu:
        return [*none_of_it(ON_CPU)]
    if plan.degrees.pp > 1:
        return [*none_of_it(f"Accelerate has no pipeline engine, and the plan has pp={plan.degrees.pp}.")]
    layout: Any = plan.layout
    section: dict[str, Any] = {
        "deepspeed_config_file": CONFIG_FILE,
        "zero3_init_flag": layout.stage == 3,
    }
    if plan.cluster.num_nodes > 1:
        section["deepspeed_multinode_launcher"] = "standard"
    return [
        *launched(
            plan,
            "DEEPSPEED",
            {"deepspeed_config": section},
            said=("micro_batch_size", "global_batch_size", "precision"),
            layout=_elsewhere(plan),
            notes=(f"Stage, offloading, batches and precision are in {CONFIG_FILE}.",),
            mixed_precision=False,
        )
    ]


def _trainer(plan: Plan) -> Exported | Absent:
    if not plan.on_gpu:
        return Absent(name=ARGUMENTS_FILE, why=ON_CPU)
    if plan.degrees.pp > 1:
        why = f"the Trainer has no pipeline engine, and the plan has pp={plan.degrees.pp}."
        return Absent(name=ARGUMENTS_FILE, why=why)
    # Has to agree with ds_config.json (transformers/integrations/deepspeed.py, trainer_config_process).
    sections = {"deepspeed": CONFIG_FILE, "bf16": plan.recipe.precision in ("bf16", "bf16-mixed")}
    return training_arguments(plan, sections, said=("precision",), layout=_elsewhere(plan))


IMPORTS = """
import json
import os
import sys
import time
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers.integrations import HfDeepSpeedConfig
"""

PART = '''
CONFIG = json.loads((Path(__file__).parent / "ds_config.json").read_text())
IS_SMALL = @@IS_SMALL@@  # fresh weights are made whole on every rank, with the numbers that DDP has


def connect(device):
    """Meet the other ranks; on CPUs without reductions in shared memory, which would first be compiled."""
    if device.type == "cpu":
        sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
    deepspeed.init_distributed("nccl" if device.type == "cuda" else "gloo")


def disconnect():
    """End here: DeepSpeed keeps process groups, whose threads can abort an interpreter that is closing."""
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)


class Training:
    """DeepSpeed shards what its stage says; it takes its step after the last micro-batch."""

    def __init__(self, name, device, rate):
        stage = CONFIG["zero_optimization"]["stage"]
        if stage == 3 and not IS_SMALL:
            self.told = HfDeepSpeedConfig(CONFIG)  # transformers asks it, and cuts tensors as they are made
        model = build_model(name).train()
        CONFIG["gradient_clipping"] = MAX_GRAD_NORM
        offloads = "offload_optimizer" in CONFIG["zero_optimization"]
        optimizer = build_optimizer(model.parameters(), rate, device, offloads)
        if stage == 3 and IS_SMALL:
            half = torch.bfloat16 if "bf16" in CONFIG else torch.float16 if "fp16" in CONFIG else PARAMETERS
            for parameter in model.parameters():
                parameter.data = parameter.data.to(half)
            deepspeed.zero.Init(module=model, config_dict_or_path=CONFIG, dtype=half)
        made = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)
        self.engine, self.optimizer = made[:2]

    def step(self, micro_batches):
        total = 0.0
        for micro in micro_batches:
            loss = self.engine(input_ids=micro, labels=micro).loss
            self.engine.backward(loss)
            self.engine.step()
            total += loss.item() / len(micro_batches)
        return total


def build_optimizer(parameters, rate, device, offloads):
    """The plan's optimizer; DeepSpeed's own Adam where its state lives on the host.

    Vectors (norms, biases) are not decayed; ds_shape is a tensor's shape before stage 3 cut it."""
@@GROUPS@@
    if offloads:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        return DeepSpeedCPUAdam(groups, lr=rate, betas=(0.9, 0.95))
    return @@MAKE@@

'''

CUT_GROUPS = GROUPS.replace("parameter.ndim", 'len(getattr(parameter, "ds_shape", parameter.shape))')
"""Stage 3 has cut each tensor into one axis by then; ``ds_shape`` is what it was."""

NOTES = """Stage, offloading, batches and precision are read from ds_config.json. With stage 3 each tensor
of a large model is cut as it is made. What the plan does not hold (rotary base, epsilons) is its
family's own."""


def _script(plan: Plan) -> Exported | Absent:
    layout: Any = plan.layout
    for degree in ("tp", "pp", "ep"):
        if getattr(plan.degrees, degree) > 1:
            size = getattr(plan.degrees, degree)
            return Absent(
                name=SCRIPT_FILE, why=f"a plain script runs ZeRO, and the plan has {degree}={size}."
            )
    if layout.offload_optimizer and plan.recipe.optimizer != "adamw":
        why = f"with offload_optimizer DeepSpeed has Adam alone, and the plan {plan.recipe.optimizer!r}."
        return Absent(name=SCRIPT_FILE, why=why)
    makes = {name: make for name, make in OPTIMIZERS.items() if name != "adamw_foreach"}
    make = makes.get(plan.recipe.optimizer, "")
    part = PART.replace("@@GROUPS@@", CUT_GROUPS).replace("@@MAKE@@", make)
    is_small = 4 * plan.architecture.num_parameters <= SMALL_BYTES
    return plain_script(plan, part.replace("@@IS_SMALL@@", repr(is_small)), IMPORTS, NOTES, makes)
