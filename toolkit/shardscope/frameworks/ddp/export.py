"""DDP's files: Accelerate's YAML, the Trainer's arguments, commands, and a plain script."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardscope.export.commands import started
from shardscope.export.files import Absent, Exported
from shardscope.export.optimizer import OPTIMIZERS
from shardscope.export.script import plain_script
from shardscope.frameworks.accelerate.export import launched, none_of_it
from shardscope.frameworks.accelerate.training_arguments import training_arguments

if TYPE_CHECKING:
    from shardscope.plan import Plan

IMPORTS = """
from contextlib import nullcontext
from torch.nn.parallel import DistributedDataParallel
"""

PART = '''
def connect(device):
    """Meet the other ranks."""
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")


def disconnect():
    """Leave the other ranks."""
    dist.destroy_process_group()


class Training:
    """Every rank holds the whole model; gradients are averaged while the backward pass goes on."""

    def __init__(self, name, device, rate):
        ids = [device] if device.type == "cuda" else None
        model = build_model(name).to(device).train()
        self.model = DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True)
        self.optimizer = build_optimizer(@@OVER@@)
        self.scaler = torch.amp.GradScaler(device.type, init_scale=2.0**12, enabled=COMPUTE == torch.float16)

    def step(self, micro_batches):
        total = 0.0
        for index, micro in enumerate(micro_batches):
            is_last = index == len(micro_batches) - 1
            mixed = torch.autocast(micro.device.type, dtype=COMPUTE) if COMPUTE else nullcontext()
            with nullcontext() if is_last else self.model.no_sync():
                with mixed:
                    loss = self.model(input_ids=micro, labels=micro).loss / len(micro_batches)
                self.scaler.scale(loss).backward()
            total += loss.item()
        self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_GRAD_NORM)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        return total

    def save(self, folder):
        if dist.get_rank() == 0:
            self.model.module.config.use_cache = True  # off while training
            self.model.module.save_pretrained(folder)
'''

NOTES = """Each rank makes the whole model in host memory, then moves it to its device. Weights are fresh
unless --model names a checkpoint; what the plan does not hold (rotary base, epsilons) is its family's own."""


def files(plan: Plan) -> list[Exported | Absent]:
    """What an export of a DDP plan writes beside its JSON."""
    one = plan.world_size == 1
    kind = "NO" if one else "MULTI_GPU" if plan.on_gpu else "MULTI_CPU"
    over = "model, rate" if plan.recipe.optimizer == "muon" else "self.model.parameters(), rate, device"
    part = PART.replace("@@OVER@@", over)
    script = plain_script(plan, part, IMPORTS, NOTES, optimizers=(*OPTIMIZERS, "muon"))
    launch: list[Exported | Absent] = [
        *launched(plan, kind, {}, notes=("Each process is one replica: DistributedDataParallel.",))
    ]
    if kind == "MULTI_CPU":
        why = "on CPUs accelerate launch starts one process, however many it is told, unless under MPI."
        launch = [*none_of_it(why)]
    return [
        *launch,
        training_arguments(plan, {}, eight_bit="adamw_bnb_8bit"),
        *started(plan, script),
    ]
