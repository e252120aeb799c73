"""DeepSpeed's plain script: ZeRO, pipeline stages or experts, over DeepSpeed and transformers alone."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from shardscope.export.files import Absent, Exported
from shardscope.export.model import whole_model
from shardscope.export.optimizer import GROUPS, OPTIMIZERS
from shardscope.export.saving import SAVE_PART
from shardscope.export.script import SCRIPT_FILE, plain_script
from shardscope.export.stages import stage_constants
from shardscope.frameworks.deepspeed import export_experts, export_stages
from shardscope.frameworks.deepspeed.limits import OPTIMIZERS as TRAINED_OPTIMIZERS
from shardscope.frameworks.deepspeed.limits import check_degrees, check_loss, check_whole
from shardscope.memory.building import is_drawn_in_parts

if TYPE_CHECKING:
    from shardscope.plan import Plan

IMPORTS = """
import json
import sys
import deepspeed
"""
TOLD_IMPORT = "from transformers.integrations import HfDeepSpeedConfig\n"

HEAD = '''
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

'''

TRAINING = '''
class Training:
    """DeepSpeed shards what its stage says; it takes its step after the last micro-batch."""

    def __init__(self, name, device, rate):
        stage = CONFIG["zero_optimization"]["stage"]
        if stage == 3 and not IS_SMALL:
            self.told = HfDeepSpeedConfig(CONFIG)  # transformers asks it, and cuts tensors as they are made
        model = @@SPREAD@@.train()
        CONFIG["gradient_clipping"] = @@CLIPPING@@
        offloads = "offload_optimizer" in CONFIG["zero_optimization"]
        optimizer = build_optimizer(model.parameters(), rate, device, offloads)
        if stage == 3 and IS_SMALL:
            half = torch.bfloat16 if "bf16" in CONFIG else torch.float16 if "fp16" in CONFIG else PARAMETERS
            for parameter in model.parameters():
                parameter.data = parameter.data.to(half)
            deepspeed.zero.Init(module=model, config_dict_or_path=CONFIG)  # a dtype would not be kept to
@@SHAPES@@@@HOOK@@        made = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)
        self.engine, self.optimizer = made[:2]

    def step(self, micro_batches):
        total = 0.0
        for micro in micro_batches:
            loss = self.engine(input_ids=micro, labels=micro).loss
            self.engine.backward(loss)
            self.engine.step()
            total += loss.item() / len(micro_batches)
        return total
'''

SAVE = '''
    def save(self, folder):
        """Gathered tensor by tensor, in the first rank's host memory, in the type that forward reads."""
        weights = {}
        for name, parameter in self.engine.module.named_parameters():
            with deepspeed.zero.GatheredParameters([parameter]):
                if dist.get_rank() == 0:
                    weights[name] = parameter.detach().cpu().clone()
        if dist.get_rank() == 0:
            self.engine.module.config.use_cache = True  # off while training
            self.engine.module.save_pretrained(folder, state_dict=weights)
'''

JOIN_IMPORTS = "from deepspeed.utils import groups\n"
SHAPES = """\
        self.shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
"""
SAVE_CUT = '''
    def save(self, folder):
        """Parts are joined tensor by tensor, in the first rank's host memory, as forward reads them."""
        weights, group = {}, groups.get_tensor_model_parallel_group()
        for name, parameter in self.engine.module.named_parameters():
            mine, whole = parameter.detach().contiguous(), self.shapes[name]
            for axis in [axis for axis, size in enumerate(mine.shape) if size != whole[axis]]:
                parts = [torch.empty_like(mine) for _ in range(TOGETHER)]
                dist.all_gather(parts, mine, group=group)
                mine = torch.cat(parts, dim=axis)
            if dist.get_rank() == 0:
                weights[name] = mine.cpu().clone()
        if dist.get_rank() == 0:
            self.engine.module.config.use_cache = True  # off while training
            self.engine.module.save_pretrained(folder, state_dict=weights)
'''

OPTIMIZER = '''
def build_optimizer(parameters, rate, device, offloads):
    """The plan's optimizer; DeepSpeed's own Adam where its state lives on the host.

    Vectors (norms, biases) are not decayed."""
@@GROUPS@@
@@APART@@    if offloads:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        return DeepSpeedCPUAdam(groups, lr=rate, betas=(0.9, 0.95))
    return @@MAKE@@


def num_axes(parameter):
    """Of the tensor, of which stage 3 has left one axis."""
    return len(getattr(parameter, "ds_shape", parameter.shape))

'''

CUT_GROUPS = GROUPS.replace("parameter.ndim", "num_axes(parameter)")

NOTES = """Stage, offloading, batches and precision are read from ds_config.json. With stage 3 each tensor
of a large model is cut as it is made. What the plan does not hold (rotary base, epsilons) is its
family's own."""


def script(plan: Plan) -> Exported | Absent:
    """The script, or why there is none."""
    layout: Any = plan.layout
    degrees, recipe = plan.degrees, plan.recipe
    try:
        check_degrees(plan)
        if layout.stage == 0:
            check_whole(plan)
        check_loss(plan)
    except ValueError as refusal:
        return Absent(name=SCRIPT_FILE, why=str(refusal))
    if layout.offload_optimizer and recipe.optimizer != "adamw":
        why = f"with offload_optimizer DeepSpeed has Adam alone, and the plan {recipe.optimizer!r}."
        return Absent(name=SCRIPT_FILE, why=why)
    # Without ZeRO around it, the optimizer is torch's own, and a norm is one rank's.
    by_hand = layout.stage == 0 and recipe.precision == "fp32"
    part, imports, layers = HEAD, IMPORTS, "decoder_layers"
    if degrees.pp > 1:
        part = stage_constants(plan) + HEAD + export_stages.training(plan, by_hand=by_hand)
        imports += export_stages.IMPORTS
        layers = "own_layers"
    elif degrees.ep > 1:
        part += export_experts.EXPERTS.replace("@@EP@@", repr(degrees.ep))
        part += zero(export_experts.SAVE, spread=True, by_hand=by_hand) + SAVE_PART
        part = part.replace("@@SHAPES@@", "")
        imports += TOLD_IMPORT + export_experts.IMPORTS + (export_experts.CLIP_IMPORT if by_hand else "")
    else:
        imports += TOLD_IMPORT + (JOIN_IMPORTS if degrees.tp > 1 else "")
        part += zero(SAVE_CUT if degrees.tp > 1 else SAVE, spread=False, by_hand=False)
        part = part.replace("@@SHAPES@@", SHAPES if degrees.tp > 1 else "")
    makes = {name: make for name, make in OPTIMIZERS.items() if name in TRAINED_OPTIMIZERS}
    optimizer = OPTIMIZER.replace("@@GROUPS@@", CUT_GROUPS).replace(
        "@@MAKE@@", makes.get(recipe.optimizer, "")
    )
    part += optimizer.replace("@@APART@@", export_experts.APART if degrees.ep > 1 else "")
    is_small = not is_drawn_in_parts(plan)
    part = part.replace("@@IS_SMALL@@", repr(is_small))
    model = partial(whole_model, layers=layers)
    return plain_script(plan, part, imports, NOTES, optimizers=tuple(makes), make_model=model)


def zero(save: str, *, spread: bool, by_hand: bool) -> str:
    """``Training`` of whole models, experts spread or not; gradients clipped by hand, or by DeepSpeed."""
    text = TRAINING.replace(
        "@@SPREAD@@", "spread_experts(build_model(name))" if spread else "build_model(name)"
    )
    text = text.replace("@@CLIPPING@@", "0.0" if by_hand else "MAX_GRAD_NORM")
    text = text.replace("@@HOOK@@", export_experts.HOOK if by_hand else "")
    return text + save + (export_experts.CLIP if by_hand else "")
