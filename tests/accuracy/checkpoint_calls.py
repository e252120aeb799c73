"""``python -m tests.accuracy.checkpoint_calls``: host time of a layer's operators under torch's checkpoint.

Prints what ``[checkpoint]`` in catalog/efficiency.toml has. A tiny model on CPU does next to no arithmetic,
so that a layer takes what Python, dispatcher and autograd take: twelve layers less four, by eight.
"""

from __future__ import annotations

import time

FEW, MANY = 4, 12
_REPEATS = 15


def time_layer(recompute: str) -> tuple[float, float]:
    """Return a layer's seconds forward and backward, recomputation included."""
    few, many = (_time_model(recompute, num_layers) for num_layers in (FEW, MANY))
    forward, backward = ((high - low) / (MANY - FEW) for low, high in zip(few, many, strict=True))
    return forward, backward


def _time_model(recompute: str, num_layers: int) -> tuple[float, float]:
    import torch
    import transformers

    from shardscope.training.model.recompute import apply_recompute

    config = transformers.Qwen3Config(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=num_layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        vocab_size=64,
    )
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="sdpa", dtype=torch.bfloat16
    )
    model.train()
    apply_recompute(model, recompute)
    ids = torch.randint(0, 64, (1, 8))
    forwards, backwards = [], []
    for _ in range(_REPEATS):
        begin = time.perf_counter()
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        between = time.perf_counter()
        loss.backward()
        backwards.append(time.perf_counter() - between)
        forwards.append(between - begin)
        model.zero_grad()
    return min(forwards), min(backwards)


def main() -> None:
    import torch

    torch.set_num_threads(1)
    forward, backward = time_layer("none")
    print(f"none: forward {1e6 * forward:.0f} us, backward {1e6 * backward:.0f} us a layer")
    for recompute in ("full", "selective"):
        saving, both = time_layer(recompute)
        print(f"{recompute}: forward = {saving / forward:.1f}, repeated = {(both - backward) / forward:.1f}")
    saving, fetching = time_layer("offload")
    print(f"offload: forward = {saving / forward:.1f}, backward = {fetching / backward:.1f}")


if __name__ == "__main__":
    main()
