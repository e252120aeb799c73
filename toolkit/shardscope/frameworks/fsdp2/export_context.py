"""What FSDP2's plain script has of context parallelism: torch's own, and a ring for CPU ranks' kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardscope.frameworks.fsdp2.limits import MOVING_ROPES
from shardscope.memory.modules.attention import fused_attention

if TYPE_CHECKING:
    from shardscope.plan import Plan

IMPORTS = """
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._context_parallel import _attention
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
"""
CPU_IMPORTS = """
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
"""

SET_UP = """\
        shape = (WORLD_SIZE // CP, CP)
        self.parts = init_device_mesh(device.type, shape, mesh_dim_names=("data", "cp"))["cp"]
        check_split(model.config)
        model.config._attn_implementation = "ring"
"""

LOSS = """following = torch.nn.functional.pad(micro, (0, 1), value=-100)[:, 1:]
            here = torch.arange(SEQ_LEN, device=micro.device)  # inside, this rank's positions alone
            split = context_parallel(
                self.parts, buffers=[here], buffer_seq_dims=[0], no_restore_buffers={here}
            )
            with split, sdpa_kernel(RINGS):
                own = following[:, here]
                loss = self.model(
                    input_ids=micro[:, here],
                    position_ids=here[None],
                    labels=own,
                    shift_labels=own,
                    num_items_in_batch=len(micro) * (SEQ_LEN - 1),
                    use_cache=False,
                ).loss
                loss = loss * CP / len(micro_batches)  # ranks are averaged over, and parts add up
                self.scaler.scale(loss).backward()
            _attention._replaced_functions.clear()  # torch keeps one more for every entry"""

RING = '''

CP = @@CP@@  # ranks that have a part of each sequence
RINGS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]
REPEATS_KEYS = @@REPEATS_KEYS@@  # for kernels without grouped queries


def attend(module, query, key, value, attention_mask, **others):
    """Transformers' SDPA, under a name for which it makes no mask: a part's positions jump."""
    if REPEATS_KEYS:
        groups, module = query.shape[1] // key.shape[1], None
        key, value = repeat_kv(key, groups), repeat_kv(value, groups)
    return sdpa_attention_forward(module, query, key, value, None, **others)


AttentionInterface.register("ring", attend)


def check_split(said):
    """Stop at a model, ``said`` is its config, that would train as another one over parts of sequences."""
    ropes = getattr(said, "rope_parameters", None) or {}
    for rope in (ropes, *(one for one in ropes.values() if isinstance(one, dict))):
        if any(kind in str(rope.get("rope_type")) for kind in @@MOVING@@):
            raise SystemExit(f"each rank would take other rotary angles, those of its part's length: {rope}")
    window, kinds = getattr(said, "sliding_window", None), getattr(said, "layer_types", None)
    if window and SEQ_LEN >= window and (kinds is None or "sliding_attention" in kinds):
        raise SystemExit(f"the model attends to {window} tokens, and the ring to all {SEQ_LEN}")
'''

CPU_RING = '''

KERNEL = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
KERNEL_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def ring(kernel, args, kwargs):
    """Torch's ring around a CPU's kernel; it has rings around CUDA's."""
    call = DTensor._op_dispatcher.unwrap_to_op_info(kernel, args, kwargs)
    mesh, names = call.compute_mesh, [argument.name for argument in kernel._schema.arguments]
    given = {**dict(zip(names, call.local_args)), **call.local_kwargs}
    given.pop("attn_mask", None)
    if kernel is KERNEL:
        parts = _attention._templated_ring_attention(mesh.get_group(), 2, kernel, **given)
    else:
        parts = _attention._templated_ring_attention_backward(
            mesh.get_group(), 2, kernel, grad_out_name="grad_out", **given
        )
    return tuple(along_the_sequence(part, mesh) for part in parts)


def along_the_sequence(part, mesh):
    """A DTensor of which this rank has ``part``."""
    shape = torch.Size(size * (mesh.size() if dim == 2 else 1) for dim, size in enumerate(part.shape))
    spec = DTensorSpec(mesh, (Shard(2),), tensor_meta=TensorMeta(shape, part.stride(), part.dtype))
    return DTensor(part, spec, requires_grad=False)


for kernel in (KERNEL, KERNEL_BACKWARD):
    _attention.custom_ops.setdefault(kernel, ring)
'''


def context_imports(plan: Plan) -> str:
    """Import statements beside those of every script of FSDP2."""
    return IMPORTS if plan.on_gpu else CPU_IMPORTS + IMPORTS


def ring_of(plan: Plan) -> str:
    """The script's attention over sequences in parts."""
    half = plan.recipe.precision != "fp32"
    repeats = plan.on_gpu and not (half and fused_attention(plan) == "flash")
    text = RING.replace("@@CP@@", repr(plan.degrees.cp)).replace("@@REPEATS_KEYS@@", repr(repeats))
    text = text.replace("@@MOVING@@", repr(MOVING_ROPES))
    return text if plan.on_gpu else text + CPU_RING
