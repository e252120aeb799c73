"""``train.py``: a plan as a plain script over PyTorch and transformers, without Shardscope."""

from __future__ import annotations

import json
import pprint
import re
from collections.abc import Mapping
from importlib import resources
from typing import TYPE_CHECKING, Any

from shardscope.export.files import Absent, Exported, described
from shardscope.export.text import WIDTH
from shardscope.memory.head import loss_in_force
from shardscope.memory.lora import adapter_targets

if TYPE_CHECKING:
    from shardscope.plan import Plan

SCRIPT_FILE = "train.py"

TRAINED: Mapping[str, tuple[object, ...]] = {
    "method": ("full", "lora"),
    "quantization": (None,),
    "precision": ("bf16-mixed", "fp16-mixed", "bf16", "fp32"),
    "recompute": ("none", "selective", "full"),
    "kernels": (None, "transformers"),
    "packing": (False,),
    "expert_capacity_factor": (None,),
}
"""What the script does of a recipe. Of others there is no script, rather than one that trains otherwise."""

OPTIMIZERS = {
    "adamw": 'torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=device.type in ("cuda", "cpu"))',
    "adamw_foreach": "torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), foreach=True)",
    "sgd": "torch.optim.SGD(groups, lr=rate, momentum=0.9)",
    "adafactor": "torch.optim.Adafactor(groups, lr=rate)",
}

GROUPS = """\
    parameters = [parameter for parameter in parameters if parameter.requires_grad]
    matrices = [parameter for parameter in parameters if parameter.ndim >= 2]
    vectors = [parameter for parameter in parameters if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    groups = [group for group in groups if group["params"]]"""
"""Of every script's ``build_optimizer``: what decays, and what does not."""

OPTIMIZER = '''
def build_optimizer(parameters, rate, device):
    """The plan's optimizer; vectors (norms, biases) are not decayed."""
@@GROUPS@@
    return @@MAKE@@

'''

OWN_IMPORTS = ("import argparse", "import functools", "import math", "import os", "import time")
"""Of the standard library, in every script."""
ATTENTION = {None: None, "flash": "flash_attention_2", "eager": "eager", "sdpa": "sdpa"}
TYPES = {"bf16-mixed": "torch.bfloat16", "fp16-mixed": "torch.float16"}


def why_none(plan: Plan, optimizers: Mapping[str, object] = OPTIMIZERS) -> str | None:
    """Why a plain script does not train this recipe, naming the field; None where it does."""
    recipe = plan.recipe
    for field, values in (*TRAINED.items(), ("optimizer", tuple(optimizers))):
        if getattr(recipe, field) not in values:
            listed = ", ".join(map(repr, values))
            return f"Recipe.{field} is {getattr(recipe, field)!r}, and a plain script has {listed}"
    if loss_in_force(plan) != "full":
        return f"Recipe.loss is {loss_in_force(plan)!r}, and a plain script has 'full'"
    return None


def template(name: str) -> str:
    """A text that lies beside this file."""
    return resources.files("shardscope.export").joinpath(f"{name}.txt").read_text(encoding="utf-8")


def whole_model(layers: str = "decoder_layers") -> str:
    """How a script makes its model with transformers; the function ``layers`` says what is recomputed."""
    return template("model.py").replace("@@LAYERS@@", layers)


def plain_script(
    plan: Plan,
    framework: str,
    imports: str,
    notes: str,
    optimizers: Mapping[str, str] = OPTIMIZERS,
    model: str | None = None,
) -> Exported | Absent:
    """The script, with the framework's own part and imports in it; or why there is none.

    ``framework`` defines ``connect(device)`` and a class ``Training`` with ``step(micro_batches)``, which
    gives the ranks' shares of the loss: their mean is the step's. ``model`` is how the model is made.
    """
    why = why_none(plan, optimizers)
    if why is not None:
        return Absent(name=SCRIPT_FILE, why=f"{why}.")
    try:
        config = _config(plan)
    except ModuleNotFoundError as missing:
        why = f'transformers spells the config of the model: pip install "shardscope[train]" ({missing})'
        return Absent(name=SCRIPT_FILE, why=why)
    recipe, cluster = plan.recipe, plan.cluster
    if "def build_optimizer(" not in framework:
        made = OPTIMIZER.lstrip("\n").replace("@@GROUPS@@", GROUPS)
        framework = made.replace("@@MAKE@@", optimizers[recipe.optimizer]) + framework
    many = cluster.num_nodes > 1
    text = template("train.py").replace("@@MODEL@@\n", model or whole_model())
    parts = {
        "DESCRIBED": described(plan).replace("\\", "/").replace('"""', "'''"),
        "COMMAND": "./torchrun.sh" if many else f"torchrun --nproc-per-node {cluster.gpus_per_node} train.py",
        "NOTES": notes,
        "IMPORTS": _with_own(imports),
        "CONFIG": pprint.pformat(config, width=WIDTH, sort_dicts=False),
        "ATTENTION": repr(ATTENTION[recipe.attention]),
        "WORLD_SIZE": repr(plan.world_size),
        "TOGETHER": repr(plan.degrees.tp * plan.degrees.cp),
        "DATA_RANKS": repr(plan.degrees.data_parallel),
        "SEQ_LEN": repr(recipe.seq_len),
        "MICRO_BATCH_SIZE": repr(recipe.micro_batch_size),
        "NUM_MICRO_BATCHES": repr(plan.num_micro_batches),
        "COMPUTE": TYPES.get(recipe.precision, "None"),
        "PARAMETERS": "torch.bfloat16" if recipe.precision == "bf16" else "torch.float32",
        "LORA": _lora(plan),
        "RECOMPUTE": repr(recipe.recompute),
        "RECOMPUTE_INTERVAL": repr(recipe.recompute_interval),
        "DEVICE": "f\"cuda:{os.environ['LOCAL_RANK']}\"" if plan.on_gpu else '"cpu"',
        "FRAMEWORK": framework.strip("\n") + "\n",
    }
    # In one pass: a name of the architecture may look like a place to be filled.
    text = re.sub("@@([A-Z_]+)@@", lambda place: parts[place[1]], text)
    text = re.sub(r"\n{2,}(?=class |def |@)", "\n\n\n", text)  # parts end as they like
    return Exported(name=SCRIPT_FILE, what="a plain script that trains the plan", text=text)


def _with_own(imports: str) -> str:
    """``imports``, of which the standard library's come first, and what every script needs."""
    standard, _, others = imports.strip("\n").partition("\n\n")
    lines = {*OWN_IMPORTS, *standard.splitlines()}
    return "\n".join(sorted(lines, key=lambda line: (line.startswith("from"), line))) + f"\n\n{others}"


def _lora(plan: Plan) -> str:
    """Arguments of ``LoraConfig`` as Python text; None without adapters."""
    recipe = plan.recipe
    if not recipe.has_adapters:
        return "None"
    values = {
        "r": recipe.adapter_rank,
        "lora_alpha": 2 * recipe.adapter_rank,
        "lora_dropout": recipe.lora_dropout,
        "target_modules": list(adapter_targets(plan.architecture, recipe)),
    }
    return pprint.pformat(values, width=WIDTH, sort_dicts=False)


def _config(plan: Plan) -> dict[str, Any]:
    """Keyword arguments of ``AutoConfig.for_model``, model_type among them."""
    from shardscope.training.model import DROPOUTS, config_values
    from shardscope.unknown_family import UnknownFamily

    architecture = plan.architecture
    if isinstance(architecture, UnknownFamily):
        stored: dict[str, Any] = json.loads(architecture.config_json)
        return stored
    from transformers import AutoConfig

    known = AutoConfig.for_model(architecture.model_type).to_dict()
    dropouts = {name: plan.recipe.dropout for name in DROPOUTS if name in known}
    return {"model_type": architecture.model_type, **config_values(architecture), **dropouts}
