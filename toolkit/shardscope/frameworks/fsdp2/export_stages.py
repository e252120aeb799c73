"""FSDP2's plain script of pipeline stages: ``torch.distributed.pipelining`` over shards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardscope.export.saving import IMPORTS as SAVE_IMPORTS
from shardscope.export.saving import SAVE_PART
from shardscope.export.stages import UNTIED, stages

if TYPE_CHECKING:
    from shardscope.plan import Plan

TRAINING = '''
class Training:
    """Each stage's layers in shards over its own ranks; the schedule sends hidden states and gradients."""

    def __init__(self, name, device, rate):
        mesh = init_device_mesh(device.type, (PP, *MESH), mesh_dim_names=("pp", "replicate", "shard", "tp"))
        self.stages, self.device = mesh["pp"].get_group(), device
        whole = name or IS_SMALL
        model = build_model(name) if whole else without_memory(lambda: build_model(name))
        self.config = model.config
        options = {
            "mesh": mesh["replicate", "shard"] if MESH[0] > 1 else mesh["shard"],
            "mp_policy": MixedPrecisionPolicy(
                param_dtype=COMPUTE, reduce_dtype=torch.float32 if COMPUTE else None
            ),
            "offload_policy": CPUOffloadPolicy(device.type == "cuda") if OFFLOAD else OffloadPolicy(),
        }
        home = torch.device("cpu") if OFFLOAD else device
        numbers = range(STAGE, len(LAYERS), PP)
        self.model = torch.nn.ModuleList(Stage(model, number@@MESH_ARGUMENT@@) for number in numbers)
        for chunk in self.model:
@@CUT@@            for layer in chunk.model.model.layers:
                fully_shard(layer, reshard_after_forward=RESHARD_AFTER_FORWARD, **options)
            fully_shard(chunk, **options)
            if not whole:
                fill(chunk.model, home, device)
        self.model.train()
@@TIE@@        self.optimizer = build_optimizer(self.model.parameters(), rate, home)
        self.scaler = @@SCALER@@
        self.schedule = @@SCHEDULE@@(
            @@STAGES@@,
            NUM_MICRO_BATCHES,
            loss_fn=self.loss,
            scale_grads=False,
        )

    def stage(self, chunk, number, device, hidden_size):
        """Shapes are told, so that stages need not ask each other for them."""
        kind = COMPUTE or PARAMETERS
        ids = torch.empty(MICRO_BATCH_SIZE, SEQ_LEN, dtype=torch.int64, device="meta")
        hidden, logits = (
            torch.empty(MICRO_BATCH_SIZE, length, width, dtype=kind, device="meta", requires_grad=True)
            for length, width in ((SEQ_LEN // TOGETHER, hidden_size), (SEQ_LEN, MODEL_CONFIG["vocab_size"]))
        )
        given, gives = ids if chunk.is_first else hidden, logits if chunk.is_last else hidden
        return PipelineStage(
            chunk, number, len(LAYERS), device, input_args=given, output_args=gives, group=self.stages
        )

    def loss(self, logits, labels):
        model = self.model[-1].model
        loss = model.loss_function(logits=logits, labels=labels, vocab_size=MODEL_CONFIG["vocab_size"])
        loss = loss@@WHOLE_LOSS@@ / NUM_MICRO_BATCHES
        self.total += loss.detach()
        return self.scaler.scale(loss)

    def step(self, micro_batches):
        rows = micro_batches.flatten(0, 1)
        self.total = torch.zeros((), device=rows.device)
        given = (rows,) if STAGE == 0 else ()
        labels = {"target": rows} if STAGE == PP - 1 else {}
@@RUN@@
@@SUM_TIED@@        self.scaler.unscale_(self.optimizer)
        self.clip(rows.device)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        return self.total.item() * PP  # the last stage's, of PP that have a share

    def clip(self, device):
        """By the norm over all stages."""
        parameters = list(self.model.parameters())
        gradients = [parameter.grad for parameter in parameters@@COUNTED@@]
        norm = torch.nn.utils.get_total_norm(gradients).full_tensor().to(device)
        squares = norm**2
        dist.all_reduce(squares, group=self.stages)
        torch.nn.utils.clip_grads_with_norm_(parameters, MAX_GRAD_NORM, squares.sqrt())

    def save(self, folder):
        """Each stage gathers its layers tensor by tensor, in the host memory of its first rank."""
        weights = {}
        for name, own in [item for chunk in self.model for item in chunk.model.state_dict().items()]:
            own = own.to(self.device)
            whole = own.full_tensor() if hasattr(own, "full_tensor") else own
            if dist.get_rank() % (WORLD_SIZE // PP) == 0:
                weights[name] = whole.to("cpu", copy=True)
@@UNTIED@@        save_part(folder, self.config, weights, STAGE, PP)
'''

PLAIN_RUN = """\
        self.schedule.step(*given, **labels, return_outputs=False)
"""
CUT_RUN = """\
        with loss_parallel():
            self.schedule.step(*given, **labels, return_outputs=False)
"""

TIE = """\
        self.tied, self.both = self.tied_parts()
        if self.tied is not None:
            dist.broadcast(self.tied.to_local(), group=self.both, group_src=0)
"""
SUM_TIED = """\
        if self.tied is not None:
            dist.all_reduce(self.tied.grad.to_local(), group=self.both)
"""
TIED = '''
    def tied_parts(self):
        """This stage's copy of a tied embedding, if it has one, and the two ranks with this part of it."""
        each = WORLD_SIZE // PP
        pairs = [dist.new_group([place, WORLD_SIZE - each + place]) for place in range(each)]
        first, last = self.model[0].model.model.embed_tokens, self.model[-1].model.lm_head
        copies = {0: first, PP - 1: last}
        return copies[STAGE].weight if STAGE in copies else None, pairs[dist.get_rank() % each]
'''
COUNTED = " if STAGE == 0 or parameter is not self.tied"

MANY = """\
[
                @@MADE@@
                for chunk, number in zip(self.model, numbers)
            ]"""
SCALER = "torch.amp.GradScaler(device.type, init_scale=2.0**12, enabled=COMPUTE == torch.float16)"
OF_STAGES = "StagesScaler(device, self.stages)"
STAGES_SCALER = '''

class StagesScaler(torch.amp.GradScaler):
    """An overflow on one stage is one on all: they skip the same steps."""

    def __init__(self, device, stages):
        super().__init__(device.type, init_scale=2.0**12)
        self.stages = stages
        self.scale(torch.zeros((), device=device))  # made with the first loss, which the last stage has

    def unscale_(self, optimizer):
        super().unscale_(optimizer)
        for found in self._found_inf_per_device(optimizer).values():
            dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self.stages)
'''

ENTERS = """\
        if not self.is_first:  # stages send plain tensors: each rank its own part of the sequence
            x = DTensor.from_local(x, self.mesh, [Shard(1)], run_check=False)
"""
CUT_LEAVES = """\
        if self.is_last:
            return found.logits
        return found.last_hidden_state.redistribute(placements=[Shard(1)]).to_local()
"""

WITH_MESH = {
    "(self, model, number):": "(self, model, number, mesh):",
    "super().__init__()\n": "super().__init__()\n        self.mesh = mesh\n",
}


def schedule_of(plan: Plan) -> str:
    """torch's own name of the plan's schedule."""
    layout: Any = plan.layout
    many = "Interleaved" if plan.degrees.vpp > 1 else ""
    return f"Schedule{many}{layout.pipeline_schedule}"


def staged_imports(plan: Plan) -> str:
    """What stages import beside whole models."""
    tensor = "from torch.distributed.tensor import DTensor\n" if plan.degrees.tp > 1 else ""
    pipelining = f"from torch.distributed.pipelining import PipelineStage, {schedule_of(plan)}\n"
    return f"import copy\n{pipelining}{tensor}{SAVE_IMPORTS}"


def training(plan: Plan) -> str:
    """The classes ``Stage`` and ``Training`` of ``plan``."""
    degrees, is_cut = plan.degrees, plan.degrees.tp > 1
    tied, fp16 = plan.architecture.tie_word_embeddings, plan.recipe.precision == "fp16-mixed"
    made = "self.stage(chunk, number, device, model.config.hidden_size)"
    listed = MANY.replace("@@MADE@@", made)
    parts = {
        "MESH_ARGUMENT": ', mesh["tp"]' if is_cut else "",
        "CUT": '            cut(chunk.model, mesh["tp"])\n' if is_cut else "",
        "TIE": TIE if tied else "",
        "SUM_TIED": SUM_TIED if tied else "",
        "COUNTED": COUNTED if tied else "",
        "UNTIED": UNTIED if tied else "",
        "SCALER": OF_STAGES if fp16 else SCALER,
        "SCHEDULE": schedule_of(plan),
        "STAGES": listed if degrees.vpp > 1 else made.replace("chunk, number", "self.model[0], STAGE"),
        "WHOLE_LOSS": ".to_local()" if is_cut else "",
        "RUN": (CUT_RUN if is_cut else PLAIN_RUN).rstrip("\n"),
    }
    text = TRAINING
    for name, value in parts.items():
        text = text.replace(f"@@{name}@@", value)
    stage = stages(plan)
    if is_cut:
        stage = stages(plan, enters=ENTERS, leaves=CUT_LEAVES)
        for plain, cut in WITH_MESH.items():
            stage = stage.replace(plain, cut)
    return stage + text + (TIED if tied else "") + (STAGES_SCALER if fp16 else "") + SAVE_PART
