"""Random valid plans, and values that every numeric field must reject."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

import shardscope as ss
from shardscope.core.architecture import Architecture, LatentAttention, MixtureOfExperts
from shardscope.core.cluster import Cluster
from shardscope.core.errors import FieldError
from shardscope.core.layout import Layout
from shardscope.core.plan import Plan
from shardscope.core.recipe import CHOICES, OPEN_CHOICES, Recipe
from shardscope.frameworks.registry import frameworks
from shardscope.prediction.support import list_supported


class Stranger:
    """A value of an unknown type, with the same repr in every process, as test ids must have."""

    def __repr__(self) -> str:
        return "Stranger()"


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
    Stranger(),
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


def _one_of_each_family() -> tuple[Architecture, ...]:
    """The catalogue's first of each family, but those above and ALiBi, which no prediction knows."""
    results: dict[str, Architecture] = {}
    for arch in ss.models.values():
        if arch.position_embedding != "alibi":
            results.setdefault(arch.model_type, arch)
    # A law doubles the sequence, beyond where learned positions would end.
    return tuple(replace(arch, max_position_embeddings=2**14) for arch in results.values())


EVERY_FAMILY = (*[LLAMA] * 5, *ARCHITECTURES, *_one_of_each_family())
"""Llama more often: what can be chosen at all can be chosen with it."""
IN_MEGATRON = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gemma2", "deepseek_v3", "gpt2")
"""Families of which every plan with Megatron has a prediction."""
CLUSTERS = tuple(
    Cluster.parse(text)
    for text in ("h100-sxm-80gb", "2xcpu", "8xa100-sxm-80gb", "6xh100-sxm-80gb", "4x8xh100-sxm-80gb")
)


ANY_RECIPE: dict[str, tuple[Any, ...]] = {
    "method": CHOICES["method"],
    "precision": CHOICES["precision"],
    "optimizer": CHOICES["optimizer"],
    "recompute": CHOICES["recompute"],
    "recompute_interval": (1, 2, 5),
    "kernels": (None, *OPEN_CHOICES["kernels"]),
    "attention": (None, *OPEN_CHOICES["attention"]),
    "loss": (None, *OPEN_CHOICES["loss"]),
    "quantization": (None, *OPEN_CHOICES["quantization"]),
    "dropout": (0.0, 0.1),
    "packing": (False, True),
    "lora_rank": (None, 1, 4, 64),
    "lora_dropout": (0.0, 0.1),
    "expert_imbalance": (1.0, 1.5, 8.0),
    "expert_capacity_factor": (None, 0.5, 1.25),
}
"""Values of every field that says what is trained, the plainest first: to that hypothesis shrinks."""
ANY_OPTIONS: dict[str, dict[str, tuple[Any, ...]]] = {
    "ddp": {},
    "fsdp2": {"vpp": (1, 2), "reshard_after_forward": (True, 2, 4)},
    "deepspeed": {
        "reduce_bucket_size": (500_000_000, 20_000_000, 1_000_000),
        "allgather_bucket_size": (500_000_000, 1_000_000),
        "overlap_comm": (None, True, False),
        "contiguous_gradients": (True, False),
        "communication_data_type": (None, "fp32"),
        "sub_group_size": (1_000_000_000, 10_000_000),
        "stage3_prefetch_bucket_size": (50_000_000, 0),
        "stage3_param_persistence_threshold": (100_000, 0, 10_000_000),
        "stage3_max_live_parameters": (1_000_000_000, 0),
        "stage3_max_reuse_distance": (1_000_000_000, 0),
        "zero_hpz_partition_size": (1, 2, 8),
        "pin_memory": (True, False),
    },
    "megatron": {},
}
"""Fields of each framework's layouts that no picker offers."""


@st.composite
def recipes(draw: Any) -> Recipe:
    """Whatever a recipe can be by itself; no framework may run it."""
    return _vary_fields(draw, draw(sizes()), ANY_RECIPE, lambda recipe: None)


@st.composite
def plans(draw: Any, framework: str | None = None) -> Plan:
    """Plans of every framework that can run: a layout as the Studio's picker would make it, then each field
    of the recipe that it supports."""
    name = framework or draw(st.sampled_from(sorted(frameworks)))
    recipe = draw(sizes())
    families = [arch for arch in EVERY_FAMILY if name != "megatron" or arch.model_type in IN_MEGATRON]
    arch, cluster = draw(st.sampled_from(families)), draw(st.sampled_from(CLUSTERS))
    layout: Layout = frameworks[name].layout_class()
    for field in layout.choices:
        offered = layout.list_valid_values(arch, cluster, recipe)[field]
        wanted = {f: getattr(layout, f) for f in layout.choices} | {field: draw(st.sampled_from(offered))}
        layout = layout.find_nearest_valid(wanted, arch, cluster, recipe)
    layout = _vary_fields(
        draw, layout, ANY_OPTIONS[name], lambda changed: Plan(arch, cluster, recipe, changed)
    )
    linears = tuple(dict.fromkeys(target for target, _ in arch.lora_shapes))
    some = (None, linears[:1], linears[-1:], linears[-3:-1], linears)
    fields = ANY_RECIPE | {"lora_targets": some}
    for field in fields:
        if listed := list_supported(layout, field):
            fields[field] = tuple(value for value in fields[field] if value is None or value in listed)
    return Plan(
        arch,
        cluster,
        _vary_fields(draw, recipe, fields, lambda changed: Plan(arch, cluster, changed, layout)),
        layout,
    )


@st.composite
def sizes(draw: Any) -> Recipe:
    """Plain recipes whose global batch any data-parallel degree up to 32 (or 6) divides."""
    micro = draw(st.sampled_from((1, 2, 3)))
    return Recipe(
        seq_len=draw(st.sampled_from((256, 1024, 4096))),
        micro_batch_size=micro,
        global_batch_size=micro * 96 * draw(st.sampled_from((1, 4))),
    )


def _vary_fields(
    draw: Any, noun: Any, fields: dict[str, tuple[Any, ...]], check: Callable[[Any], object]
) -> Any:
    """``noun`` with each of ``fields`` drawn anew; a value that ``check`` or the noun refuses is left out.

    Drawing on, instead of rejecting the whole, keeps what rarely goes together from starving the rest.
    """
    for field, values in fields.items():
        if field.startswith("lora_") and not noun.has_adapters:
            continue
        # One draw in two is plain, so that a plan is special in a few things, not in all of them.
        value = draw(st.sampled_from((*values[:1] * (len(values) - 2), *values)))
        try:
            changed = replace(noun, **{field: value})
            check(changed)
        except FieldError:
            continue
        noun = changed
    return noun
