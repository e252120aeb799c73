"""Random plans that can run, and the bad values that every number must refuse."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from shardscope.architecture import Architecture, LatentAttention, MixtureOfExperts
from shardscope.cluster import Cluster
from shardscope.frameworks.registry import frameworks
from shardscope.layout import Layout
from shardscope.plan import Plan
from shardscope.recipe import Recipe

NOT_NUMBERS: tuple[Any, ...] = (
    math.nan,
    math.inf,
    -math.inf,
    True,
    False,
    "8",
    b"8",
    1.5,
    1e30,
    [8],
    {},
    object(),
)
"""What no whole number may be."""
OUT_OF_RANGE: tuple[Any, ...] = (-1, 0, 10**30)

LLAMA = Architecture.of_size("1b")
MOE = replace(
    LLAMA,
    name="experts",
    model_type="mixtral",
    intermediate_size=1024,
    mixture_of_experts=MixtureOfExperts(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=1024),
)
LATENT = replace(
    MOE,
    name="latent",
    model_type="deepseek_v3",
    num_hidden_layers=16,
    latent_attention=LatentAttention(
        q_lora_rank=96, kv_lora_rank=64, qk_nope_head_dim=64, qk_rope_head_dim=32, v_head_dim=64
    ),
    mixture_of_experts=MixtureOfExperts(
        num_experts=16,
        num_experts_per_tok=4,
        moe_intermediate_size=256,
        shared_expert_intermediate_size=512,
        first_k_dense_replace=2,
    ),
)
GEMMA = replace(
    LLAMA,
    name="capped",
    model_type="gemma2",
    norms_per_layer=4,
    tie_word_embeddings=True,
    num_hidden_layers=12,
    sliding_window=4096,
    sliding_window_layers=6,
)
ARCHITECTURES = (LLAMA, MOE, LATENT, GEMMA)
CLUSTERS = tuple(
    Cluster.parse(text)
    for text in ("h100-sxm-80gb", "2xcpu", "8xa100-sxm-80gb", "6xh100-sxm-80gb", "4x8xh100-sxm-80gb")
)


@st.composite
def recipes(draw: Any, max_data_parallel: int = 1) -> Recipe:
    """Recipes whose global batch any data-parallel degree up to 32 (or 6) divides."""
    method = draw(st.sampled_from(("full", "lora")))
    micro = draw(st.sampled_from((1, 2, 3)))
    return Recipe(
        seq_len=draw(st.sampled_from((256, 1024, 4096))),
        micro_batch_size=micro,
        global_batch_size=micro * 96 * draw(st.sampled_from((1, 4))),
        method=method,
        precision=draw(st.sampled_from(("bf16-mixed", "fp16-mixed", "bf16", "fp32"))),
        optimizer=draw(st.sampled_from(("adamw", "sgd"))),
        recompute=draw(st.sampled_from(("none", "selective", "full"))),
        lora_rank=draw(st.sampled_from((None, 4, 64))) if method == "lora" else None,
    )


@st.composite
def plans(draw: Any, framework: str | None = None) -> Plan:
    """Plans of every framework that can run, as the Studio's picker would make them."""
    name = framework or draw(st.sampled_from(sorted(frameworks)))
    recipe = draw(recipes())
    if name == "megatron":
        recipe = replace(recipe, method="full", lora_rank=None)
    arch, cluster = draw(st.sampled_from(ARCHITECTURES)), draw(st.sampled_from(CLUSTERS))
    layout: Layout = frameworks[name].layout_class()
    for field in layout.choices:
        offered = layout.offered(arch, cluster, recipe)[field]
        wanted = {f: getattr(layout, f) for f in layout.choices} | {field: draw(st.sampled_from(offered))}
        layout = layout.fitted(wanted, arch, cluster, recipe)
    return Plan(arch, cluster, recipe, layout)
