"""Plans drawn, by seed, over the whole space of a framework: families, sizes, recipes and layouts.

Sizes are a real model's in width and a small one's in depth: what is rehearsed costs time by the number of
operators, and layers repeat each other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

from shardscope.core.architecture import Architecture, LatentAttention, MixtureOfExperts
from shardscope.core.cluster import Cluster
from shardscope.core.layout import Layout
from shardscope.core.plan import Plan
from shardscope.core.recipe import Recipe

CLUSTERS = ("h100-sxm-80gb", "2xh100-sxm-80gb", "8xa100-sxm-80gb", "6xh100-sxm-80gb", "4x8xh100-sxm-80gb")
GPT2: dict[str, Any] = {
    "norm": "layernorm",
    "gated_mlp": False,
    "position_embedding": "learned",
    "tie_word_embeddings": True,
    "attention_bias": True,
    "attention_output_bias": True,
    "mlp_bias": True,
}
FAMILIES = (
    *("llama",) * 3,
    *("mistral", "qwen2", "qwen3", "gemma2", "phi3", "gpt2"),
    *("mixtral", "qwen3_moe", "deepseek_v3"),
)
"""Drawn evenly: a dense Llama is what most people train."""


def draw_architecture(draw: Random) -> Architecture:
    """Draw a few layers of one family, in sizes like those of published models."""
    family = draw.choice(FAMILIES)
    head_dim = draw.choice((64, 128))
    heads = draw.choice((8, 12, 16, 32))
    grouped = family not in ("gpt2", "deepseek_v3") and draw.random() < 0.7
    hidden = heads * head_dim
    values: dict[str, Any] = {
        "name": f"sampled {family}",
        "model_type": family,
        "hidden_size": hidden,
        "intermediate_size": hidden * 4
        if family == "gpt2"
        else 64 * round(hidden * draw.uniform(2, 4.5) / 64),
        "num_hidden_layers": draw.choice((1, 2, 3, 4, 6, 8)),
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 4 if grouped else heads,
        "head_dim": head_dim,
        "vocab_size": draw.choice((8_003, 32_000, 50_257, 128_256, 151_936)),
        "max_position_embeddings": 16_384,
        "tie_word_embeddings": draw.random() < 0.4,
    }
    if family == "gpt2":
        values |= GPT2
    if family == "qwen2":
        values["attention_bias"] = True
    if family.startswith("qwen3"):
        values["qk_norm"] = True
    if family == "gemma2":
        layers = values["num_hidden_layers"]
        values |= {"norms_per_layer": 4, "tie_word_embeddings": True}
        values |= {"sliding_window": 1024, "sliding_window_layers": layers // 2}
    if family == "mistral" and draw.random() < 0.4:
        values |= {"sliding_window": 1024, "sliding_window_layers": values["num_hidden_layers"]}
    if family in ("mixtral", "qwen3_moe", "deepseek_v3"):
        values["mixture_of_experts"] = _draw_experts(draw, family, values["intermediate_size"])
    if family == "deepseek_v3":
        values["latent_attention"] = LatentAttention(
            q_lora_rank=draw.choice((None, 768)),
            kv_lora_rank=512,
            qk_nope_head_dim=head_dim,
            qk_rope_head_dim=64,
            v_head_dim=head_dim,
        )
        values["head_dim"] = 64
    return Architecture(**values)


def _draw_experts(draw: Random, family: str, width: int) -> MixtureOfExperts:
    narrow = 64 * draw.choice((6, 12, 22))
    return MixtureOfExperts(
        num_experts=8 if family == "mixtral" else draw.choice((16, 64)),
        num_experts_per_tok=draw.choice((2, 4)),
        moe_intermediate_size=width if family == "mixtral" else narrow,
        shared_expert_intermediate_size=narrow if family == "deepseek_v3" else 0,
        first_k_dense_replace=1 if family == "deepseek_v3" else 0,
    )


def draw_recipe(draw: Random, data_parallel: int) -> Recipe:
    """Draw precision, method, recomputation, optimizer and batch."""
    micro = draw.choice((1, 1, 2, 4))
    method = draw.choice(("full", "full", "full", "lora"))
    return Recipe(
        seq_len=draw.choice((128, 512, 1024, 2048, 4096, 8192)),
        micro_batch_size=micro,
        global_batch_size=micro * data_parallel * draw.choice((1, 1, 1, 2, 4)),
        method=method,
        precision=draw.choice(("bf16-mixed",) * 4 + ("bf16", "bf16", "fp16-mixed", "fp32")),
        optimizer=draw.choice(("adamw", "adamw", "adamw", "sgd")),
        recompute=draw.choice(("none", "none", "selective", "full")),
        lora_rank=draw.choice((None, 8, 64)) if method == "lora" else None,
    )


def draw_ddp(draw: Random, world_size: int) -> Layout:
    """Return the only DDP layout."""
    return Layout.ddp()


def draw_fsdp2(draw: Random, world_size: int) -> Layout:
    """Draw replicas, and whether all-gathered parameters are resharded after forward."""
    copies = [degree for degree in (1, 1, 1, 2, 4) if world_size % degree == 0]
    replicate = draw.choice(copies)
    shard = world_size // replicate
    nodes = [degree for degree in (2, 8) if shard % degree == 0 and degree < shard]
    reshard = draw.choice((True, True, True, False, *nodes[:1]))
    return Layout.fsdp2(replicate=replicate, reshard_after_forward=reshard)


def fsdp2_tp(draw: Random, world_size: int) -> Layout:
    """FSDP2 over tensor-parallel ranks, of which :func:`draw_fsdp2` draws none."""
    replicate = draw.choice([degree for degree in (1, 1, 1, 2) if world_size % degree == 0])
    return Layout.fsdp2(
        tp=draw.choice((2, 2, 4, 8)),
        replicate=replicate,
        reshard_after_forward=draw.choice((True, True, False)),
    )


def fsdp2_pp(draw: Random, world_size: int) -> Layout:
    """FSDP2 in pipeline stages, of which :func:`draw_fsdp2` draws none."""
    return Layout.fsdp2(
        pp=draw.choice((2, 2, 4, 8)),
        replicate=draw.choice([degree for degree in (1, 1, 1, 2) if world_size % degree == 0]),
        reshard_after_forward=draw.choice((True, True, False)),
    )


def draw_deepspeed(draw: Random, world_size: int) -> Layout:
    """Draw a ZeRO stage, and buckets smaller than a model and larger."""
    return Layout.zero(
        stage=draw.choice((0, 1, 2, 2, 3, 3, 3)),
        reduce_bucket_size=draw.choice((500_000_000, 500_000_000, 100_000_000, 20_000_000)),
        overlap_comm=draw.choice((None, None, True, False)),
        stage3_prefetch_bucket_size=draw.choice((50_000_000, 50_000_000, 5_000_000)),
        stage3_max_reuse_distance=draw.choice((1_000_000_000, 1_000_000_000, 100_000_000)),
    )


def deepspeed_offload(draw: Random, world_size: int) -> Layout:
    """ZeRO with the optimizer, the parameters or both in host memory."""
    stage = draw.choice((1, 2, 3, 3))
    parameters = draw.choice((None, "cpu")) if stage == 3 else None
    return Layout.zero(
        stage=stage,
        offload_params=parameters,
        offload_optimizer=draw.choice((None, "cpu")) if parameters else "cpu",
        overlap_comm=draw.choice((None, None, True, False)),
        reduce_bucket_size=draw.choice((500_000_000, 100_000_000)),
        stage3_prefetch_bucket_size=draw.choice((50_000_000, 5_000_000)),
        sub_group_size=draw.choice((1_000_000_000, 50_000_000)),
    )


def deepspeed_nvme(draw: Random, world_size: int) -> Layout:
    """Draw ZeRO-3 with the optimizer, the parameters or both in files, unlike :func:`draw_deepspeed`."""
    state, weights = draw.choice((("nvme", None), (None, "nvme"), ("nvme", "nvme"), ("cpu", "nvme")))
    return Layout.zero(
        3,
        offload_optimizer=state,  # type: ignore[arg-type]
        offload_params=weights,  # type: ignore[arg-type]
        offload_params_max_in_cpu=draw.choice((1_000_000_000, 0, 0, 30_000_000)),
        offload_params_buffer_count=draw.choice((5, 5, 12)),
        reduce_bucket_size=draw.choice((500_000_000, 50_000_000)),
        stage3_prefetch_bucket_size=draw.choice((50_000_000, 5_000_000)),
        sub_group_size=draw.choice((1_000_000_000, 50_000_000)),
    )


def deepspeed_tp(draw: Random, world_size: int) -> Layout:
    """ZeRO 0 to 2 over tensor-parallel ranks (AutoTP)."""
    return Layout.zero(
        stage=draw.choice((0, 1, 2)),
        tp=draw.choice((2, 2, 4, 8)),
        reduce_bucket_size=draw.choice((500_000_000, 100_000_000)),
        overlap_comm=draw.choice((None, None, True)),
    )


def draw_megatron(draw: Random, world_size: int) -> Layout:
    """Draw tensor, pipeline and expert parallelism, chunks, sequence parallelism, distributed optimizer."""
    tp, pp = draw.choice((1, 1, 2, 2, 4, 8)), draw.choice((1, 1, 2, 4))
    return Layout.megatron(
        tp=tp,
        pp=pp,
        vpp=draw.choice((1, 2)) if pp > 1 else 1,
        ep=draw.choice((1, 1, 2, 4)),
        etp=draw.choice((None, None, 1)),
        sequence_parallel=draw.choice((None, None, False)) if tp > 1 else None,
        distributed_optimizer=draw.choice((True, True, True, False)),
    )


def megatron_pp(draw: Random, world_size: int) -> Layout:
    """Draw Megatron in pipeline stages that a small model can be cut into (:func:`draw_megatron`: few)."""
    pp = draw.choice((2, 2, 2, 4, 4, 8))
    tp = draw.choice((1, 1, 2, 4))
    return Layout.megatron(
        tp=tp,
        pp=pp,
        vpp=draw.choice((1, 1, 2, 3)),
        ep=draw.choice((1, 1, 2, 4)),
        etp=draw.choice((None, None, 1)),
        sequence_parallel=draw.choice((None, None, False)) if tp > 1 else None,
        distributed_optimizer=draw.choice((True, True, False)),
    )


def make_runnable(layout: Layout, arch: Architecture, drawn: Recipe) -> Layout:
    """Drop what does not run: megatron-core's distributed optimizer is Adam's, and tp splits no
    experts that have biases. So each index keeps the plan that it was before such plans were refused."""
    if layout.framework != "megatron":
        return layout
    changes: dict[str, Any] = {}
    if drawn.optimizer != "adamw":
        changes["distributed_optimizer"] = False
    if arch.num_moe_layers and (arch.attention_output_bias or arch.mlp_bias):
        changes["etp"] = 1
    return replace(layout, **changes)


LAYOUTS: dict[str, Callable[[Random, int], Layout]] = {
    "ddp": draw_ddp,
    "fsdp2": draw_fsdp2,
    "fsdp2-tp": fsdp2_tp,
    "fsdp2-pp": fsdp2_pp,
    "deepspeed": draw_deepspeed,
    "deepspeed-offload": deepspeed_offload,
    "deepspeed-nvme": deepspeed_nvme,
    "deepspeed-tp": deepspeed_tp,
    "megatron": draw_megatron,
    "megatron-pp": megatron_pp,
}
"""How each framework's layouts are drawn: ``f(draw, world_size)``. A framework adds itself here, and behind a
hyphen a part of its space that has a sample of its own."""


def sample_plans(framework: str, seed: int, count: int) -> list[Plan]:
    """Sample ``count`` plans of one framework; the same seed gives the same ones, a larger count more."""
    plans: list[Plan] = []
    draw = Random(f"{framework} {seed}")
    while len(plans) < count:
        cluster = Cluster.parse(draw.choice(CLUSTERS))
        layout, arch = LAYOUTS[framework](draw, cluster.num_gpus), draw_architecture(draw)
        try:
            free = layout.compute_degrees(arch, cluster, Recipe())
            drawn = draw_recipe(draw, free.data_parallel)
            plans.append(Plan(arch, cluster, drawn, make_runnable(layout, arch, drawn)))
        except ValueError:
            continue
    return plans
