"""FSDP2's plain script: shards, copies, parts of matrices and of sequences, over PyTorch alone."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from shardscope.export.files import Absent, Exported
from shardscope.export.model import whole_model
from shardscope.export.script import SCRIPT_FILE, plain_script
from shardscope.export.stages import UNTIED, stage_constants
from shardscope.frameworks.fsdp2 import export_context
from shardscope.frameworks.fsdp2.export_stages import staged_imports, training
from shardscope.frameworks.fsdp2.limits import check_context, check_parallel, check_parts, check_pipeline
from shardscope.frameworks.fsdp2.projections import COLUMNS, HEAD_NORMS, ROWS
from shardscope.memory.building import is_drawn_in_parts

if TYPE_CHECKING:
    from shardscope.plan import Plan

IMPORTS = """
import zlib
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import _StridedShard
"""

SAVE_IMPORT = "from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict\n"

HEAD = '''
MESH = @@MESH@@  # copies x shards x tensor-parallel parts
RESHARD_AFTER_FORWARD = @@RESHARD@@
OFFLOAD = @@OFFLOAD@@  # whether shards live in host memory
IS_SMALL = @@IS_SMALL@@  # fresh weights are made whole on every rank, with the numbers that DDP has


def connect(device):
    """Meet the other ranks; gloo carries what lies in host memory."""
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")


def disconnect():
    """Leave the other ranks."""
    dist.destroy_process_group()
'''

TRAINING = '''
class Training:
    """Parameters, gradients and optimizer state in shards; each decoder layer is gathered as it runs."""

    def __init__(self, name, device, rate):
        mesh = init_device_mesh(device.type, MESH, mesh_dim_names=("replicate", "shard", "tp"))
        whole = name or IS_SMALL
        model = build_model(name) if whole else without_memory(lambda: build_model(name))
        options = {
            "mesh": mesh["replicate", "shard"] if MESH[0] > 1 else mesh["shard"],
            "mp_policy": MixedPrecisionPolicy(
                param_dtype=COMPUTE, reduce_dtype=torch.float32 if COMPUTE else None
            ),
            "offload_policy": CPUOffloadPolicy(device.type == "cuda") if OFFLOAD else OffloadPolicy(),
        }
@@CUT@@        for layer in decoder_layers(model):
            fully_shard(layer, reshard_after_forward=RESHARD_AFTER_FORWARD, **options)
        fully_shard(model, **options)
        if not whole:
            fill(model, torch.device("cpu") if OFFLOAD else device, device)
        self.model = model.train()
        self.optimizer = build_optimizer(model.parameters(), rate, torch.device("cpu") if OFFLOAD else device)
        self.scaler = torch.amp.GradScaler(device.type, init_scale=2.0**12, enabled=COMPUTE == torch.float16)

    def step(self, micro_batches):
        total = 0.0
        for index, micro in enumerate(micro_batches):
            is_last = index == len(micro_batches) - 1
            self.model.set_is_last_backward(is_last)
            if MESH[0] > 1:
                self.model.set_requires_all_reduce(is_last)
            @@LOSS@@
            total += loss.item()
        self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_GRAD_NORM)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        return total

    def save(self, folder):
        """Gathered tensor by tensor, in the first rank's host memory."""
        options = StateDictOptions(full_state_dict=True, cpu_offload=True@@FROZEN@@)
        weights = get_model_state_dict(self.model, options=options)
@@UNTIED@@        if dist.get_rank() == 0:
            self.model.config.use_cache = True  # off while training
            self.model.save_pretrained(folder, state_dict=weights)
'''

FILL = '''
def without_memory(make):
    """``make()`` with parameters that have no values yet; buffers, such as rotary tables, are real."""
    register = torch.nn.Module.register_parameter

    def on_meta(module, name, parameter):
        if parameter is not None and not parameter.is_meta:
            parameter = torch.nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    torch.nn.Module.register_parameter = on_meta
    try:
        return make()
    finally:
        torch.nn.Module.register_parameter = register


def fill(model, home, device):
    """Memory and fresh weights for this rank's shards: no rank ever holds the model whole."""
    names = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.to_empty(device=home)
    for first, *others in names.values():  # a tied weight is one parameter with two names
        for other in others:
            owner, _, leaf = other.rpartition(".")
            setattr(model.get_submodule(owner), leaf, model.get_parameter(first))
    for name, buffer in model.named_buffers():
        buffer.data = buffers[name].to(device)
    std = getattr(model.config, "initializer_range", 0.02)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            generator = torch.Generator(device=device).manual_seed(zlib.crc32(name.encode()))
            own, mesh = parameter.to_local(), parameter.device_mesh
            if parameter.ndim < 3:
                own.copy_(own_part(drawn(name, parameter, std, generator, parameter.shape), parameter))
                continue
            first = -(-parameter.shape[0] // mesh.size(mesh.ndim - 1)) * mesh.get_local_rank(mesh.ndim - 1)
            for place in range(parameter.shape[0]):  # experts' matrices in a stack, one by one
                matrix = drawn(name, parameter, std, generator, parameter.shape[1:])
                if first <= place < first + len(own):
                    own[place - first].copy_(matrix)


def own_part(whole, parameter):
    """This rank's shard of ``whole``: equal chunks, the last ones short or empty."""
    for axis, placement in reversed(list(enumerate(parameter.placements))):
        if isinstance(placement, Shard | _StridedShard):
            chunks = whole.chunk(parameter.device_mesh.size(axis), dim=placement.dim)
            index = parameter.device_mesh.get_local_rank(axis)
            whole = chunks[index] if index < len(chunks) else whole.narrow(placement.dim, 0, 0)
    return whole


def drawn(name, parameter, std, generator, shape):
    """One tensor's fresh numbers, the same on every rank."""
    whole = torch.empty(shape, dtype=parameter.dtype, device=generator.device)
    if name.endswith("bias") or "lora_B" in name:
        return whole.zero_()
    if "lora_A" in name:  # kaiming_uniform_(a=sqrt(5)), as peft's
        return whole.uniform_(-(shape[-1] ** -0.5), shape[-1] ** -0.5, generator=generator)
    return whole.fill_(1.0) if parameter.ndim < 2 else whole.normal_(0.0, std, generator=generator)
'''

PLAIN_LOSS = """loss = self.model(input_ids=micro, labels=micro).loss / len(micro_batches)
            self.scaler.scale(loss).backward()"""
CUT_LOSS = """with loss_parallel():
                loss = self.model(input_ids=micro, labels=micro).loss.to_local() / len(micro_batches)
                self.scaler.scale(loss).backward()"""

CUT_IMPORTS = """
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
"""

CUT = '''

def cut(model, mesh):
    """Tensor-parallel parts: projections by columns, then by rows; norms and the stream by the sequence."""
@@TIED@@    outer = {
        "model.embed_tokens": RowwiseParallel(
            input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=False
        ),
        "model.norm": SequenceParallel(),
        "lm_head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }
@@HERE@@    parallelize_module(model, mesh, outer, src_data_rank=None)
    for layer in decoder_layers(model):
        parallelize_module(layer, mesh, layer_plan(layer), src_data_rank=None)
@@TIE@@

def layer_plan(layer):
    """Whole sequences exist inside attention and feed-forward alone."""
    plan = {}
    for name, module in layer.named_modules():
        leaf = name.rpartition(".")[2]
        if leaf in @@COLUMNS@@:
            plan[name] = ColwiseParallel()
        elif leaf in @@ROWS@@:
            plan[name] = RowwiseParallel(output_layouts=Shard(1), use_local_output=False)
        elif leaf in @@HEAD_NORMS@@:
            plan[name] = SequenceParallel(sequence_dim=2, use_local_output=True)
        elif "." not in name and leaf.endswith("norm"):
            plan[name] = SequenceParallel()
        elif leaf == "self_attn":
            plan[name] = PrepareModuleInput(
                input_kwarg_layouts={"hidden_states": Shard(1)},
                desired_input_kwarg_layouts={"hidden_states": Replicate()},
            )
        elif leaf == "mlp":
            plan[name] = PrepareModuleInput(
                input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
            )
    return plan
'''

NOTES = """Fresh weights of a large model are drawn shard by shard, so no rank holds it whole; a checkpoint
(--model) is read whole by every rank into host memory first. What the plan does not hold (rotary base,
epsilons) is its family's own."""


OF_WHOLE = {
    "@@TIED@@": "    tied = model.lm_head.weight is model.model.embed_tokens.weight\n",
    "@@HERE@@": "",
    "@@TIE@@": "    if tied:\n        model.lm_head.weight = model.model.embed_tokens.weight\n",
}
OF_STAGE = {
    "@@TIED@@": "",
    "@@HERE@@": """\
    present = {name for name, module in model.named_modules() if any(True for _ in module.parameters())}
    outer = {name: style for name, style in outer.items() if name in present}
""",
    "@@TIE@@": "",
}
"""What :data:`CUT` does besides, to a model that has both ends and to a stage."""


def script(plan: Plan, reshard: bool | int) -> Exported | Absent:
    """The script, or why there is none; ``reshard`` is ``fully_shard``'s ``reshard_after_forward``."""
    layout: Any = plan.layout
    degrees = plan.degrees
    is_cut, is_staged, is_split = degrees.tp > 1, degrees.pp > 1, degrees.cp > 1
    try:
        if is_split:
            check_context(plan)
        if is_cut:
            check_parallel(plan)
        if is_staged:
            check_pipeline(plan)
        check_parts(plan)
    except ValueError as refusal:
        return Absent(name=SCRIPT_FILE, why=str(refusal))
    part, imports, layers = HEAD, IMPORTS, "decoder_layers"
    if is_staged:
        part = stage_constants(plan) + part + training(plan)
        imports += staged_imports(plan)
        layers = "own_layers"
    else:
        cut = '        cut(model, mesh["tp"])\n' if is_cut else ""
        loss = CUT_LOSS if is_cut else PLAIN_LOSS
        if is_split:
            cut, loss = export_context.SET_UP, export_context.LOSS
            part += export_context.ring_of(plan)
            imports += export_context.context_imports(plan)
        imports += SAVE_IMPORT
        part += TRAINING.replace("@@CUT@@", cut).replace("@@LOSS@@", loss)
        part = part.replace("@@FROZEN@@", ", ignore_frozen_params=True" if plan.recipe.has_adapters else "")
        part = part.replace("@@UNTIED@@", UNTIED if plan.architecture.tie_word_embeddings else "")
    part += FILL
    if is_cut:
        part, imports = part + CUT, imports + CUT_IMPORTS
    for place, text in (OF_STAGE if is_staged else OF_WHOLE).items():
        part = part.replace(place, text)
    for name, value in {
        "MESH": (degrees.replicate, degrees.shard * degrees.cp, degrees.tp),
        "RESHARD": reshard,
        "OFFLOAD": layout.offload == "cpu",
        "IS_SMALL": not is_drawn_in_parts(plan),
        "COLUMNS": COLUMNS,
        "ROWS": ROWS,
        "HEAD_NORMS": HEAD_NORMS,
    }.items():
        part = part.replace(f"@@{name}@@", repr(value))
    model = partial(whole_model, layers=layers, shards=True)
    return plain_script(plan, part, imports, NOTES, make_model=model)
