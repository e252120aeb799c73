"""What a training step says of itself, once per step and rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardscope.training.accounting.tensors import device_bytes

if TYPE_CHECKING:
    from shardscope.training.engine import Engine


def step_metrics(
    engine: Engine, *, loss: float, learning_rate: float, num_tokens: int, seconds: float
) -> dict[str, Any]:
    """Names and values for ``ctx.log``.

    ``tokens_per_second`` is this rank's; steps are synchronous, so all ranks together make ``num_data_ranks``
    times as many. ``memory_bytes`` and ``peak_memory_bytes`` are the CUDA allocator's; on CPU ranks, which
    have no allocator to ask, the bytes of parameters, gradients and optimizer, and ``rss_bytes`` beside
    them.
    """
    metrics: dict[str, Any] = {
        "loss": loss,
        "learning_rate": learning_rate,
        "grad_norm": engine.grad_norm,
        "step_seconds": seconds,
        "tokens_per_second": num_tokens / seconds,
        "tokens_per_second_all_ranks": num_tokens * engine.num_data_ranks / seconds,
    }
    device = device_bytes(engine.ctx.device)
    if "allocated" in device:
        metrics["memory_bytes"] = device["allocated"]
        metrics["peak_memory_bytes"] = device["max_allocated"]
    else:
        metrics["memory_bytes"] = sum(engine.held_after_step.values())
        metrics["peak_memory_bytes"] = engine.peak_accounted_bytes
        metrics["rss_bytes"] = device["rss"]
    return metrics
