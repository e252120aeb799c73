"""``train.py``: a plan as a plain script over PyTorch and transformers, without Shardscope."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from importlib import resources
from typing import TYPE_CHECKING

from shardscope.export.files import Absent, Exported, described
from shardscope.export.imports import imports_of
from shardscope.export.model import LAYERS, Model, whole_model
from shardscope.export.optimizer import OPTIMIZERS, optimizer_of
from shardscope.export.source import model_config
from shardscope.export.text import literal
from shardscope.memory.head import loss_in_force
from shardscope.planner.preflight.usual_rates import rate_near
from shardscope.training.finetune import ADAPTER_RATE, FULL_RATE
from shardscope.training.pretrain import Pretrain

if TYPE_CHECKING:
    from shardscope.plan import Plan

SCRIPT_FILE = "train.py"

TRAINED: Mapping[str, tuple[object, ...]] = {
    "method": ("full", "lora", "qlora"),
    "precision": ("bf16-mixed", "fp16-mixed", "bf16", "fp32"),
    "recompute": ("none", "selective", "full", "offload"),
    "kernels": (None, "transformers", "compiled"),
    "packing": (False,),
    "expert_capacity_factor": (None,),
}
"""What the script does of a recipe. Of others there is no script, rather than one that trains otherwise."""
LOSSES = ("full", "chunked")

IMPORTS = """
import argparse
import functools
import math
import os
import time
from pathlib import Path
import numpy
import torch
import torch.distributed as dist
from tokenizers import Tokenizer
from transformers import AutoTokenizer
"""
"""In every script."""


def why_none(plan: Plan, optimizers: Collection[str] = tuple(OPTIMIZERS)) -> str | None:
    """Why a plain script does not train this recipe, naming the field; None where it does."""
    recipe = plan.recipe
    for field, values in (*TRAINED.items(), ("optimizer", tuple(optimizers))):
        if getattr(recipe, field) not in values:
            listed = ", ".join(map(repr, values))
            return f"Recipe.{field} is {getattr(recipe, field)!r}, and a plain script has {listed}"
    loss = loss_in_force(plan)
    return None if loss in LOSSES else f"Recipe.loss is {loss!r}, and a plain script has 'full', 'chunked'"


def template(name: str) -> str:
    """A text that lies beside this file."""
    return resources.files("shardscope.export").joinpath(f"{name}.txt").read_text(encoding="utf-8")


def plain_script(
    plan: Plan,
    framework: str,
    imports: str,
    notes: str,
    *,
    optimizers: Collection[str] = tuple(OPTIMIZERS),
    make_model: Callable[[Plan], Model] = whole_model,
) -> Exported | Absent:
    """The script, with the framework's own part and imports in it; or why there is none.

    ``framework`` defines ``connect(device)`` and a class ``Training`` with ``step(micro_batches)``, which
    gives the ranks' shares of the loss, whose mean is the step's, and ``save(folder)``. ``make_model`` says
    how the model is made, ``optimizers`` which of a recipe there are; ``framework`` may have a
    ``build_optimizer`` of its own.
    """
    why = why_none(plan, optimizers)
    if why is not None:
        return Absent(name=SCRIPT_FILE, why=f"{why}.")
    try:
        config, model = model_config(plan), make_model(plan)
    except ModuleNotFoundError as missing:
        why = f'transformers spells the config of the model: pip install "shardscope[train]" ({missing})'
        return Absent(name=SCRIPT_FILE, why=why)
    recipe, cluster = plan.recipe, plan.cluster
    if "def build_optimizer(" not in framework:
        framework = optimizer_of(recipe.optimizer) + framework
    many = cluster.num_nodes > 1
    text = template("train.py").replace("@@MODEL@@\n", model.text)
    parts = {
        "DESCRIBED": described(plan).replace("\\", "/").replace('"""', "'''"),
        "COMMAND": "./torchrun.sh" if many else f"torchrun --nproc-per-node {cluster.gpus_per_node} train.py",
        "NOTES": notes,
        "IMPORTS": imports_of(IMPORTS, imports, model.imports),
        "CONFIG": literal(config),
        "WORLD_SIZE": repr(plan.world_size),
        "TOGETHER": repr(plan.degrees.tp * plan.degrees.cp),
        "DATA_RANKS": repr(plan.degrees.data_parallel),
        "SEQ_LEN": repr(recipe.seq_len),
        "MICRO_BATCH_SIZE": repr(recipe.micro_batch_size),
        "NUM_MICRO_BATCHES": repr(plan.num_micro_batches),
        "FRESH_RATE": repr(rate_near(Pretrain.learning_rate, plan)),
        "MODEL_RATE": repr(ADAPTER_RATE if recipe.has_adapters else FULL_RATE),
        "DEVICE": "f\"cuda:{os.environ['LOCAL_RANK']}\"" if plan.on_gpu else '"cpu"',
        "FRAMEWORK": framework.strip("\n") + "\n",
    }
    # In one pass: a name of the architecture may look like a place to be filled.
    text = re.sub("@@([A-Z_]+)@@", lambda place: parts[place[1]], text)
    if text.count("decoder_layers(") == 1:
        text = text.replace(LAYERS, "")  # nothing calls it
    return Exported(
        name=SCRIPT_FILE,
        what="a plain script that trains the plan",
        text=re.sub(r"\n{2,}(?=class |def |@)", "\n\n\n", text),  # parts end as they like
    )
