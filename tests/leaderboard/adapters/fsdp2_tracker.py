"""torch's ``FSDPMemTracker`` with transformers' model, sharded by ``fully_shard``, on fake tensors.

It runs the model's operators, as a rehearsal does, instead of a formula. It tracks two steps; the peak is the
second one's, when the optimizer's states exist from the start. The process group is torch's fake one, and the
tensors are on the CPU, whose fused attention saves the same tensors as the GPU's. transformers' check for
fake tensors is disabled, because it creates attention masks for them that no real run has.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from functools import partial
from importlib.metadata import version
from unittest.mock import patch

import torch
import torch.distributed as dist
from protocol import ADAM, Answer, Plan, refuse, refuse_other_recipes, serve
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, masking_utils


def estimate(plan: Plan) -> Answer:
    """Return the peak of all tensors of one rank."""
    layout, recipe, degrees = plan.layout, plan.recipe, plan.degrees
    refuse({"tracks memory only": plan.is_timed, "tracks FSDP2 only": layout.framework != "fsdp2"})
    refuse({
        "set up without tensor, pipeline, context or expert parallelism": (
            max(degrees.tp, degrees.pp, degrees.cp, degrees.ep) > 1
        ),
        "set up without offload": layout.offload is not None,
        "set up with all layers recomputed or none": (
            recipe.recompute not in ("none", "full") or recipe.recompute_interval > 1
        ),
        "set up with transformers' own modules, SDPA and full loss": (
            (recipe.kernels or "transformers") != "transformers"
            or (recipe.attention or "sdpa") != "sdpa"
            or (recipe.loss or "full") != "full"
        ),
        "set up with one micro-batch: on the CPU no reduction buffers of an earlier one stay": (
            plan.num_micro_batches > 1
        ),
        "set up without experts, whose matmuls use other kernels on the CPU": (
            plan.architecture.mixture_of_experts is not None
        ),
        "set up without packing and dropout": recipe.packing or recipe.dropout > 0,
        "transformers has no config of this model": plan.hf_config is None,
    })  # fmt: skip
    refuse_other_recipes(plan, ADAM, ("bf16-mixed",))
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=plan.world_size)
    try:
        return {"tensors": _track(plan, _build_mesh(plan))}
    finally:
        dist.destroy_process_group()


def _build_mesh(plan: Plan) -> DeviceMesh:
    shard = plan.degrees.shard
    if plan.world_size == shard:
        return init_device_mesh("cpu", (shard,), mesh_dim_names=("shard",))
    shape = (plan.world_size // shard, shard)
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))


def _track(plan: Plan, mesh: DeviceMesh) -> int:
    recipe = plan.recipe
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    with ExitStack() as stack:
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(patch.object(masking_utils, "is_tracing", lambda tensor=None: False))
        stack.enter_context(
            patch.object(masking_utils, "find_packed_sequence_indices", lambda positions: None)
        )
        values = {**json.loads(plan.hf_config), "attn_implementation": "sdpa", "use_cache": False}
        config = AutoConfig.for_model(**values)
        for name, value in vars(config).items():
            if "drop" in name and isinstance(value, float):  # GPT-2's defaults.
                setattr(config, name, 0.0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        layers = next(module for module in model.modules() if isinstance(module, torch.nn.ModuleList))
        if recipe.recompute == "full":
            for layer in layers:
                layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
        reshards = plan.layout.reshard_after_forward
        for module in (*layers, model):
            fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=reshards)
        kind = {"adamw": {}, "adamw_foreach": {"foreach": True}, "adamw_fused": {"fused": True}}
        optimizer = torch.optim.AdamW(model.parameters(), **kind[recipe.optimizer])
        tokens = torch.zeros(recipe.micro_batch_size, recipe.seq_len, dtype=torch.long)
        tracker = FSDPMemTracker(model, optimizer)
        tracker.track_inputs((tokens,))
        for _ in range(2):
            with tracker:
                model(tokens, labels=tokens).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            tracker.reset_mod_stats()
        return max(device["Total"] for device in tracker.get_tracker_snapshot("peak").values())


if __name__ == "__main__":
    serve(estimate, version("torch"))
