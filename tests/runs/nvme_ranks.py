"""One CPU rank of real ZeRO-3 with NVMe offload: prints what it has in files and in host memory, as JSON."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any


def main(plan_json: str, folder: str, prefetch: str, buffers: str) -> None:
    import deepspeed
    import torch

    # It looks at how tensors are made, so it has to come before zero.Init makes them in its own way.
    import torch._dynamo
    from transformers import AutoConfig, AutoModelForCausalLM

    import shardscope as ss
    from shardscope.frameworks.deepspeed.extensions import load_extension
    from shardscope.frameworks.deepspeed.files.config import build_deepspeed_config
    from shardscope.training.model.model import config_values

    # Built once for all: one that was killed while DeepSpeed built it leaves a lock, which others wait for.
    load_extension("async_io")
    # As in a run: DeepSpeed's own gloo collectives would be compiled, and a killed compiler leaves its lock.
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None
    deepspeed.init_distributed("gloo")
    plan = ss.Plan.from_json(plan_json)
    config = build_deepspeed_config(plan, nvme_folder=folder)
    # What a plan would refuse can be seen to fail.
    config["zero_optimization"]["stage3_prefetch_bucket_size"] = int(prefetch)
    if "offload_param" in config["zero_optimization"]:
        config["zero_optimization"]["offload_param"]["buffer_count"] = int(buffers)
    # torch's Adam in place of DeepSpeed's own, which has to be compiled: its moments are the same.
    config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
    config["zero_force_ds_cpu_optimizer"] = False
    with deepspeed.zero.Init(config_dict_or_path=config):
        values = AutoConfig.for_model(plan.architecture.model_type, **config_values(plan.architecture))
        model = AutoModelForCausalLM.from_config(values, dtype=torch.bfloat16)
    engine, optimizer, _, _ = deepspeed.initialize(
        model=model, model_parameters=in_groups(list(model.parameters())), config=config
    )
    ids = torch.randint(0, plan.architecture.vocab_size, (1, plan.recipe.seq_len))
    losses = []
    for _ in range(3):
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        waiting = count_unswapped_bytes(optimizer)
        engine.step()
        losses.append(float(loss))
    assert losses[-1] < losses[0], losses
    rank = torch.distributed.get_rank()
    found = {
        "files": sum(file.stat().st_size for file in Path(folder).rglob(f"rank{rank}/*")),
        "host": on_host(optimizer, model),
        "waiting": waiting,
    }
    print(json.dumps(found), flush=True)
    # Ranks leave together: one that is gone while its peer still talks to it aborts that peer at times.
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def in_groups(parameters: list[Any]) -> list[dict[str, Any]]:
    """Vectors, which do not decay, in a group of their own as a run has them: groups are swapped apart."""
    # zero.Init has cut tensors by now, and keeps their shapes aside.
    vectors = [parameter for parameter in parameters if len(parameter.ds_shape) < 2]
    matrices = [parameter for parameter in parameters if len(parameter.ds_shape) >= 2]
    return [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]


def count_storage_bytes(tensors: Any) -> int:
    """Return the bytes of the storages under ``tensors``, each counted once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def count_unswapped_bytes(optimizer: Any) -> int:
    """Count the bytes of fp32 gradients that are in no file when backward has ended."""
    swapper = optimizer.optimizer_swapper
    if swapper is None:
        return 0
    return count_storage_bytes(
        gradient
        for info in swapper.swap_params_info.values()
        for gradient in info.unswapped_gradients.values()
    )


def too_small_for_files(optimizer: Any) -> list[Any]:
    """Main copies, their gradients and moments of the sub-groups that are never swapped."""
    flat = optimizer.fp32_partitioned_groups_flat
    stay = [flat[index] for index in range(len(flat)) if not optimizer._swappable_optimizer_subgroup(index)]
    moments = [
        optimizer.optimizer.state[weight][name] for weight in stay for name in ("exp_avg", "exp_avg_sq")
    ]
    return [*stay, *(weight.grad for weight in stay), *moments]


def on_host(optimizer: Any, model: Any) -> int:
    """Count the bytes that would be in host memory between two steps if there were a GPU."""
    held = [optimizer.grad_partitions_flat_buffer] if optimizer.offload_optimizer else []
    if optimizer.swap_optimizer:
        held += optimizer.optimizer_swapper.swap_buffer_manager.all_buffers
        held += too_small_for_files(optimizer)
    held += [flat for flat in optimizer.param_groups_fp16_flat_cpu_memory if flat.numel() > 1]
    parameters = list(model.parameters())
    swapper = parameters[0].nvme_swapper
    if swapper is not None:
        held.append(swapper.buffers)
        if swapper.partitioned_swap_buffer is not None:
            held.append(swapper.partitioned_swap_buffer)
        held += [p.ds_tensor for p in parameters if p.ds_tensor.numel() > 1]
    return count_storage_bytes(held)


if __name__ == "__main__":
    main(*sys.argv[1:])
