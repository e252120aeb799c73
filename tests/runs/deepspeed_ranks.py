"""One CPU rank of real ZeRO over gloo: its engine, its rows, and what DeepSpeed's tensors hold by stage."""

from __future__ import annotations

import os
from typing import Any

from single_process import RATE, whole_batch


def set_up_engine(ctx: Any, plan: Any, seed: int = 0) -> Any:
    """Return an engine of ``plan``, which is the context's from now on, with weights of ``seed``."""
    from shardscope.frameworks.engines import get_engine_class
    from shardscope.training.model.model import build_model

    ctx.plan = plan
    engine = ctx.engine = get_engine_class(plan)(ctx)
    engine.learning_rate, engine.seed = RATE, seed
    engine.setup(lambda: build_model(plan.architecture))
    return engine


def take_rank_rows(engine: Any, step: int) -> dict[str, Any]:
    """Return this data rank's rows of a step's batch."""
    rows = whole_batch(step).items()
    return {name: tensor.chunk(engine.num_data_ranks)[engine.data_rank] for name, tensor in rows}


def held_by_stage(ctx: Any) -> dict[str, Any]:
    """Return the state bytes by ZeRO stage, for the architecture, recipe and bucket of ``ctx.plan``."""
    os.environ.update(DS_ACCELERATOR="cpu", RANK=str(ctx.rank), LOCAL_RANK=str(ctx.rank), WORLD_SIZE="2")
    import deepspeed
    import torch
    from deepspeed.accelerator import get_accelerator

    import shardscope as ss
    from shardscope.frameworks.deepspeed.engine.launching import connect_deepspeed
    from shardscope.frameworks.deepspeed.files.config import build_deepspeed_config
    from shardscope.training.model.model import build_model

    # Nothing is compiled: gloo does without DeepSpeed's shared-memory collectives.
    get_accelerator().create_op_builder = lambda name: None
    connect_deepspeed("gloo", ctx.rank)
    results: dict[str, Any] = {}
    plan = ctx.plan
    for stage in (1, 2, 3):
        config = build_deepspeed_config(
            ss.Plan(plan.architecture, plan.cluster, plan.recipe, ss.Layout.zero(stage))
        )
        config["zero_optimization"]["reduce_bucket_size"] = plan.layout.reduce_bucket_size
        config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
        model = build_model(plan.architecture)
        # Vectors do not decay, as in the engine's runs: a group of their own, and so a flat buffer.
        groups = [
            {"params": [p for p in model.parameters() if p.ndim >= 2]},
            {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
        ]
        engine, optimizer, _, _ = deepspeed.initialize(model=model, model_parameters=groups, config=config)
        shape = (plan.recipe.micro_batch_size, plan.recipe.seq_len)
        ids = torch.randint(0, plan.architecture.vocab_size, shape)
        losses = []
        for _ in range(2):
            loss = engine(input_ids=ids, labels=ids).loss
            engine.backward(loss)
            kept = kept_gradients(optimizer)
            engine.step()
            losses.append(float(loss))
        assert losses[1] < losses[0]
        results[str(stage)] = {**measure_state_bytes(optimizer), "gradients": kept}
        engine.destroy()
    return results


def count_storage_bytes(tensors: Any) -> int:
    """Return the bytes of the storages under ``tensors``, each counted once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def kept_gradients(optimizer: Any) -> int:
    """Return the bytes of gradients that still exist when the optimizer begins."""
    buffer = getattr(optimizer, "grad_partitions_flat_buffer", None)
    if buffer is not None:
        return count_storage_bytes([buffer])
    return count_storage_bytes(t for group in optimizer.averaged_gradients.values() for t in group)


def measure_state_bytes(optimizer: Any) -> dict[str, int]:
    """Return the bytes of parameters, optimizer and staging buffers that live through steps."""
    flat = getattr(optimizer, "bit16_groups_flat", None) or [optimizer.lp_param_buffer]
    main = getattr(optimizer, "single_partition_of_fp32_groups", None)
    main = main or optimizer.fp32_partitioned_groups_flat
    moments = [v for s in optimizer.optimizer.state.values() for v in s.values() if v.numel() > 1]
    buffers = [bucket.buffer for bucket in optimizer.ipg_buckets.values()]
    kept = [buffer for buffer in buffers if not isinstance(buffer, list) and buffer is not None]
    return {
        "parameters": count_storage_bytes(flat),
        "optimizer": count_storage_bytes([*main, *moments]),
        "bucket": count_storage_bytes(kept),
    }
