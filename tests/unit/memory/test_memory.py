"""Tests of the memory model: properties on random plans, known identities, and one traced run."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from random_plans import GEMMA, LATENT, LLAMA, MOE, plans
from tests.requirements import examples, needs

import shardscope as ss
from shardscope.core.architecture import Architecture
from shardscope.core.plan import Plan
from shardscope.frameworks.registry import frameworks
from shardscope.memory.activations.forward import compute_layer_activations, find_modules, list_saved_tensors
from shardscope.memory.activations.modules.saved_tensors import Modules
from shardscope.memory.activations.rank_activations import RankActivations
from shardscope.memory.overheads import libraries as overheads
from shardscope.memory.report import MemoryReport
from shardscope.memory.state.lora import count_adapter_parameters, count_layer_adapters, find_adapters
from shardscope.memory.state.stages import Stage, count_layer_shard
from shardscope.prediction.memory import compute_phases

GIB = 2**30
NAMES = (
    "parameters", "gradients", "optimizer", "activations", "logits", "gather_buffers", "communication",
    "runtime", "fragmentation",
)  # fmt: skip
PHASES = ("rest", "forward", "backward", "optimizer", "initialisation")
ONE, EIGHT = (ss.Cluster.parse(f"{gpus}h100-sxm-80gb") for gpus in ("", "8x"))
LLAMA_8B = ss.models["llama-3.1-8b"]


def plan(arch: Architecture, layout: Any, cluster: Any = EIGHT, **recipe: Any) -> Plan:
    return Plan(arch, cluster, ss.Recipe(**recipe), layout)


def get_component_bytes(a_plan: Plan, component: str, phase: str = "optimizer") -> int:
    return a_plan.memory().at(phase)[component]  # type: ignore[arg-type]


# ---------------------------------------------------------------------------- properties of random plans


def list_stages(a_plan: Plan) -> list[Stage]:
    """Return the weights of every pipeline stage, first to last."""
    model = frameworks[a_plan.layout.framework].memory_model()
    shapes = model.find_shapes(a_plan)
    stages = [model.count_weights(a_plan, shape) for shape in shapes.kinds]
    return [stages[kind]._replace(number=number) for number, kind in enumerate(shapes.kind_of)]


@settings(max_examples=examples(150), deadline=None)
@given(plans())
@example(plan(LATENT, ss.Layout.zero(0), ONE))
@example(
    plan(
        replace(LLAMA, num_hidden_layers=17),
        ss.Layout.ddp(),
        ONE,
        seq_len=256,
        method="lora",
        recompute="offload",
    )
)
@example(
    plan(
        ss.models["llama-3-8b"],
        ss.Layout.zero(0, tp=8),
        seq_len=256,
        recompute="offload",
        global_batch_size=8,
    )
)
def test_fault_37_components_sum_to_the_total_in_every_phase(a_plan: Plan) -> None:
    report = a_plan.memory()
    assert tuple(report.components) == NAMES
    assert report.peak_bytes == sum(report.components.values())
    assert report.peak_bytes == max(stage.peak_bytes for stage in report.by_stage)
    assert len(report.by_stage) == a_plan.degrees.pp
    assert sum(stage.num_layers for stage in report.by_stage) == a_plan.architecture.num_hidden_layers
    for stage in report.by_stage:
        assert stage.peak_bytes == sum(stage.components.values())
        for moment in stage.phases:
            assert all(type(v) is int and v >= 0 for v in moment.components.values())
            assert moment.total == sum(moment.components.values()) <= stage.peak_bytes
    for phase in PHASES:
        assert tuple(report.at(phase)) == NAMES
    assert report.low_bytes <= report.peak_bytes <= report.high_bytes
    assert report.fits == (report.peak_bytes <= report.usable_bytes)
    assert report.timeline[0][0] == "initialisation"
    assert all(tuple(parts) == NAMES for _, _, parts in report.timeline)


@settings(max_examples=examples(100), deadline=None)
@given(plans())
@example(plan(LLAMA_8B, ss.Layout.zero(1), seq_len=9216, recompute="full", global_batch_size=8))
def test_the_band_covers_the_overheads_of_every_phase(a_plan: Plan) -> None:
    """The example's peak and band are those of the optimizer: the allocator still has what backward freed."""
    model, report = frameworks[a_plan.layout.framework].memory_model(), a_plan.memory()
    gpu = a_plan.cluster.gpu
    runtime = overheads.estimate_runtime(gpu.vendor, gpu.architecture)
    lows, highs = [], []
    for stage, found in zip(list_stages(a_plan), report.by_stage, strict=True):
        buffers = overheads.estimate_communication(
            model.compute_training_state(a_plan, stage).group_sizes, gpu.vendor
        )
        step = [moment.components for moment in found.phases if moment.phase != "initialisation"]
        freed = {name: max(p[name] for p in step) - min(p[name] for p in step) for name in NAMES[:6]}
        gaps = overheads.estimate_fragmentation(sum(freed.values()), a_plan.on_gpu).high
        for moment in found.phases:
            lost = moment.components["fragmentation"]
            tensors = moment.total - buffers.point - runtime.point - lost
            lows.append(tensors + buffers.low + runtime.low)
            more = 0 if moment.phase == "initialisation" else max(lost, gaps)
            highs.append(tensors + buffers.high + runtime.high + more)
    assert report.low_bytes == max(lows)
    capped = a_plan.on_gpu and report.fits
    assert report.high_bytes == (
        max(report.peak_bytes, min(max(highs), report.usable_bytes)) if capped else max(highs)
    )
    assert report.low_bytes <= report.peak_bytes <= report.high_bytes


@pytest.mark.parametrize(
    ("gpus", "seq_len", "fits"), [("8xh100-sxm-80gb", 8192, True), ("8xh100-sxm-80gb", 32768, False)]
)
def test_the_band_ends_at_the_gpu_memory_if_the_peak_fits(gpus: str, seq_len: int, fits: bool) -> None:
    recipe = ss.Recipe(seq_len=seq_len, global_batch_size=8)
    report = ss.Plan(LLAMA_8B, ss.Cluster.parse(gpus), recipe, ss.Layout.fsdp2()).memory()
    assert report.fits == fits
    assert (report.high_bytes == report.usable_bytes) == fits
    assert (report.high_bytes > report.usable_bytes) != fits


def test_host_memory_bands_are_not_limited_to_the_usable_bytes() -> None:
    """No allocator returns cached host memory."""
    assert overheads.limit_to_usable(12, 9, 10, on_gpu=False) == 12
    assert overheads.limit_to_usable(12, 9, 10, on_gpu=True) == 10
    assert overheads.limit_to_usable(12, 11, 10, on_gpu=True) == 12
    assert overheads.limit_to_usable(9, 9, 10, on_gpu=True) == 9


def test_plans_over_80_percent_of_a_gpu_are_tight() -> None:
    def predict_memory(seq_len: int) -> MemoryReport:
        recipe = ss.Recipe(seq_len=seq_len, global_batch_size=8)
        return ss.Plan(LLAMA_8B, ss.Cluster.parse("8xh100-sxm-80gb"), recipe, ss.Layout.fsdp2()).memory()

    found = {
        predict_memory(length).is_tight: predict_memory(length) for length in (2048, 4096, 6144, 7168, 8192)
    }
    assert found[True].peak_bytes > 0.8 * found[True].usable_bytes
    assert found[False].peak_bytes <= 0.8 * found[False].usable_bytes
    # A plan that does not fit is not tight.
    assert not predict_memory(32768).is_tight


@pytest.mark.parametrize("layout", [ss.Layout.ddp(), ss.Layout.fsdp2(), ss.Layout.zero(3), ss.Layout.zero(1)])
def test_activation_explanations_show_formula_and_terms(layout: ss.Layout) -> None:
    node = ss.Cluster.parse("8xh100-sxm-80gb")
    report = ss.Plan(LLAMA, node, ss.Recipe(global_batch_size=64), layout).memory()
    layers = f"{LLAMA.num_hidden_layers} layers × 4,096 tokens × ("
    num_phases = 0
    for moment in report.worst_stage.phases:
        words = moment.terms["activations"].explain() if "activations" in moment.terms else ""
        if moment.fraction in (0.34, 0.35):
            assert layers in words
            assert "KiB norms and residuals" in words
            assert "Korthikanti" in words
            num_phases += 1
    assert num_phases == 2


def test_terms_of_an_explanation_sum_to_its_total() -> None:
    """The terms are added up as displayed, each rounded."""
    node = ss.Cluster.parse("8xh100-sxm-80gb")
    plan = ss.Plan(LLAMA, node, ss.Recipe(global_batch_size=64), ss.Layout.fsdp2())
    num_explanations = 0
    for moment in plan.memory().worst_stage.phases:
        for name in ("activations", "gather_buffers"):
            term = moment.terms.get(name)
            parts = (
                re.findall(r"(-?) ?([\d.,]+(?:e-\d+)?) GiB", term.explain().partition(" · ")[0])
                if term
                else []
            )
            if moment.phase != "backward" or len(parts) < 2:
                continue
            sum_of_terms = sum(float(f"{sign}{number.replace(',', '')}") for sign, number in parts)
            assert sum_of_terms == pytest.approx(term.num_bytes / GIB, rel=0.02, abs=0.02), term.explain()
            num_explanations += 1
    assert num_explanations > 10


@settings(max_examples=examples(60), deadline=None)
@given(plans())
def test_every_explanation_states_the_bytes_of_its_component(a_plan: Plan) -> None:
    report = a_plan.memory()
    for name, value in report.components.items():
        text = report.explain(name)
        assert text.startswith(name)
        assert len(text) > len(name) + 10
        if value:
            shown = float(text.split(",", 1)[1].split(" GiB")[0].replace(",", ""))
            assert math.isclose(shown, value / GIB, rel_tol=0.06)


@settings(max_examples=examples(60), deadline=None)
@given(plans())
def test_a_plan_from_json_has_the_same_memory(a_plan: Plan) -> None:
    again = Plan.from_json(a_plan.to_json())
    assert again == a_plan
    assert [s.components for s in again.memory().by_stage] == [s.components for s in a_plan.memory().by_stage]


@settings(max_examples=examples(60), deadline=None)
@given(plans())
def test_recomputation_reduces_saved_activations(a_plan: Plan) -> None:
    # Megatron's end of forward has temporaries too: test_megatron_memory.py has its layers.
    assume(a_plan.layout.framework != "megatron")
    # FlashAttention, and packing with it, is not recomputed selectively; compiled layers are not at all.
    kernels = None if a_plan.kernels == "compiled" else a_plan.recipe.kernels
    plain = replace(a_plan.recipe, attention=None, packing=False, recompute_interval=1, kernels=kernels)
    kept = {}
    for how in ("none", "selective", "full"):
        try:
            again = replace(a_plan, recipe=replace(plain, recompute=how))
        except ValueError:  # Of stage 3 with parameters on NVMe what is read ahead depends on it.
            assume(False)
        kept[how] = [
            max(one.components["activations"] for one in stage.phases if one.phase == "forward")
            for stage in again.memory().by_stage
        ]
    assert all(none >= full for none, full in zip(kept["none"], kept["full"], strict=True))
    if not a_plan.recipe.has_adapters:
        # Adapters' own products, which selective recomputation keeps, can outweigh what it drops.
        assert all(none >= some for none, some in zip(kept["none"], kept["selective"], strict=True))
    assert all(some >= full for some, full in zip(kept["selective"], kept["full"], strict=True))


@given(st.sampled_from((LLAMA, MOE, LATENT, GEMMA)), st.integers(0, 3), st.sampled_from(("full", "lora")))
@settings(max_examples=examples(40), deadline=None)
def test_state_does_not_rise_with_more_shards(arch: Architecture, power: int, method: str) -> None:
    few, many = (ss.Cluster.parse(f"{2**n}xh100-sxm-80gb") for n in (power, power + 1))
    for layout in (ss.Layout.fsdp2(), *(ss.Layout.zero(stage) for stage in range(4))):
        for name in ("parameters", "gradients", "optimizer"):
            smaller, larger = (
                get_component_bytes(plan(arch, layout, c, method=method), name) for c in (many, few)
            )
            assert smaller <= larger


@settings(max_examples=examples(150), deadline=None)
@given(st.sampled_from(("deepspeed", "megatron", "fsdp2")).flatmap(plans))
def test_shards_of_all_ranks_sum_to_the_optimizer_state(a_plan: Plan) -> None:
    fields, recipe = a_plan.layout.__dataclass_fields__, a_plan.recipe
    here = {name: None for name in ("offload", "offload_optimizer", "offload_params") if name in fields}
    a_plan = replace(a_plan, layout=replace(a_plan.layout, **here))
    half = recipe.precision != "fp32"
    # Adafactor may keep rows and columns only, which are next to nothing.
    moments = {"sgd": 1, "lion": 1, "adafactor": 0}.get(recipe.optimizer, 2)
    sharded = a_plan.layout.framework == "fsdp2"
    number = 2 if sharded and recipe.precision == "bf16" else 4
    each = moments * (1 if recipe.optimizer == "adamw_8bit" else number) + 4 * half * (not sharded)
    lora = recipe.has_adapters
    trained = (
        count_adapter_parameters(a_plan.architecture, recipe) if lora else a_plan.architecture.num_parameters
    )
    ranks = a_plan.world_size // a_plan.degrees.pp
    held = sum(stage.at("rest").components["optimizer"] for stage in a_plan.memory().by_stage)
    assert held * ranks >= each * trained


# -------------------------------------------------------------------------------------------- identities


def compute_bytes_per_parameter(a_plan: Plan, num_parameters: int) -> dict[str, float]:
    rest, done = a_plan.memory().at("rest"), a_plan.memory().at("backward")
    return {
        "parameters": rest["parameters"] / num_parameters,
        "gradients": done["gradients"] / num_parameters,
        "optimizer": rest["optimizer"] / num_parameters,
    }


def test_ddp_needs_sixteen_bytes_per_parameter() -> None:
    one_micro_batch = plan(LLAMA, ss.Layout.ddp(), global_batch_size=8)
    found = compute_bytes_per_parameter(one_micro_batch, LLAMA.num_parameters)
    assert found == {"parameters": 4, "gradients": 4, "optimizer": 8}
    # Before the last micro-batch no_sync leaves gradients beside the buckets.
    assert compute_bytes_per_parameter(plan(LLAMA, ss.Layout.ddp()), LLAMA.num_parameters)["gradients"] == 8
    half = plan(LLAMA, ss.Layout.ddp(), precision="bf16", global_batch_size=8)
    assert sum(compute_bytes_per_parameter(half, LLAMA.num_parameters).values()) == 8
    assert (
        compute_bytes_per_parameter(plan(LLAMA, ss.Layout.ddp(), optimizer="sgd"), LLAMA.num_parameters)[
            "optimizer"
        ]
        == 4
    )


def test_ddp_gradient_buckets_exist_in_every_phase() -> None:
    report = plan(LLAMA, ss.Layout.ddp(), global_batch_size=8).memory()
    assert {report.at(phase)["gradients"] for phase in PHASES} == {4 * LLAMA.num_parameters}  # type: ignore[arg-type]


def test_megatron_needs_18_bytes_or_6_plus_12_over_dp() -> None:
    arch = replace(LLAMA, vocab_size=32_000)
    assert arch.vocab_size % 128 == 0
    with_it = compute_bytes_per_parameter(plan(arch, ss.Layout.megatron()), arch.num_parameters)
    without = compute_bytes_per_parameter(
        plan(arch, ss.Layout.megatron(distributed_optimizer=False)), arch.num_parameters
    )
    assert without == {"parameters": 2, "gradients": 4, "optimizer": 12}
    assert with_it == {"parameters": 2, "gradients": 4, "optimizer": pytest.approx(12 / 8)}


def test_megatron_pads_the_vocabulary_and_copies_a_tied_embedding() -> None:
    odd = replace(LLAMA, vocab_size=32_001)
    padded = plan(odd, ss.Layout.megatron(tp=2))
    per_rank = -(-32_001 // 256) * 256 // 2 * odd.hidden_size
    even = plan(replace(odd, vocab_size=256 * 125), ss.Layout.megatron(tp=2))
    grown = get_component_bytes(padded, "parameters") - get_component_bytes(even, "parameters")
    assert grown == 2 * 2 * (per_rank - 16_000 * odd.hidden_size)
    tied = replace(LLAMA, tie_word_embeddings=True)
    one = plan(tied, ss.Layout.megatron()).memory().by_stage
    two = plan(tied, ss.Layout.megatron(pp=2)).memory().by_stage
    whole = sum(stage.at("rest").components["parameters"] for stage in two)
    assert whole - one[0].at("rest").components["parameters"] == 2 * tied.embedding_parameters


@pytest.mark.parametrize(
    ("precision", "layout", "frozen", "trained"),
    [
        # Frozen weights have no fp32 original: 2 bytes a frozen weight, 16 a trained one.
        ("bf16-mixed", ss.Layout.ddp(), 2, (4, 4, 8)),
        ("fp16-mixed", ss.Layout.ddp(), 2, (4, 4, 8)),
        ("bf16-mixed", ss.Layout.fsdp2(shard=1, replicate=8), 2, (4, 4, 8)),
        ("fp16-mixed", ss.Layout.fsdp2(shard=1, replicate=8), 2, (4, 4, 8)),
        ("bf16-mixed", ss.Layout.zero(0), 2, (2, 2, 12)),
        ("bf16", ss.Layout.ddp(), 2, (2, 2, 4)),
        ("fp32", ss.Layout.ddp(), 4, (4, 4, 8)),
    ],
)
def test_only_adapters_have_gradients_and_optimizer_state(
    precision: str, layout: ss.Layout, frozen: int, trained: tuple[int, int, int]
) -> None:
    a_plan = plan(LLAMA, layout, method="lora", lora_rank=8, precision=precision)
    adapters = count_adapter_parameters(LLAMA, a_plan.recipe)
    done, rest = a_plan.memory().at("optimizer"), a_plan.memory().at("rest")
    assert done["parameters"] == frozen * LLAMA.num_parameters + trained[0] * adapters
    assert (done["gradients"], rest["optimizer"]) == (trained[1] * adapters, trained[2] * adapters)


def test_lora_of_8b_has_15_gib_of_bf16_weights() -> None:
    """Frozen weights are in bf16: 8.03 billion weights of 2 bytes, not of 4."""
    report = plan(LLAMA_8B, ss.Layout.ddp(), method="lora").memory()
    assert report.components["parameters"] / GIB == pytest.approx(15.0, abs=0.1)
    assert "× 2 bytes" in report.explain("parameters")
    sharded = plan(LLAMA_8B, ss.Layout.fsdp2(), method="lora").memory()
    assert sharded.components["parameters"] / GIB == pytest.approx(15.0 / 8, abs=0.1)
    assert "× 2 bytes" in sharded.explain("parameters")


@pytest.mark.parametrize("family", ["llama", "gpt2", "deepseek_v3", "mixtral", "phi3"])
def test_adapter_parameters_equal_those_of_peft(family: str) -> None:
    needs("peft")
    torch = needs("torch")
    from shardscope.planner.cpu_trial import build_cpu_trial
    from shardscope.training.model.lora import add_adapters
    from shardscope.training.model.model import build_model

    named = {
        "llama": "llama-3.1-8b",
        "deepseek_v3": "deepseek-v3",
        "mixtral": "mixtral-8x7b",
        "phi3": "phi-3-mini",
    }
    big = plan(ss.models[named.get(family, family)], ss.Layout.ddp(), seq_len=512, method="lora", lora_rank=4)
    small = build_cpu_trial(big).plan
    with torch.device("meta"):
        model = add_adapters(build_model(small.architecture), small.architecture, small.recipe)
    counted = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert get_component_bytes(small, "gradients") == 4 * counted


# ----------------------------------------------------------------------------------------------- shards


@pytest.mark.parametrize("num_shards", [1, 2, 3, 7, 8, 64])
@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen2.5-0.5b", "mixtral-8x7b", "deepseek-v3", "gpt2"])
def test_fsdp2_shard_sizes_equal_torch_chunk(name: str, num_shards: int) -> None:
    torch = needs("torch")
    arch = ss.models[name]
    for layer in {0, arch.num_hidden_layers - 1}:
        worst = 0
        for _, _, shape in arch.layer_shapes(layer):
            first = torch.empty(shape, device="meta").chunk(num_shards, dim=0)[0]
            worst += first.numel()
        shard = count_layer_shard(arch, arch.is_moe_layer(layer), 1, 1, num_shards)
        assert shard.dense_padded + shard.experts_padded == worst


@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen2.5-0.5b", "gpt2", "mixtral-8x7b"])
def test_fsdp2_shards_sum_to_the_whole_model(name: str, method: str) -> None:
    torch = needs("torch")
    arch, cluster = ss.models[name], ss.Cluster.parse("3xh100-sxm-80gb")
    a_plan = plan(arch, ss.Layout.fsdp2(), cluster, global_batch_size=63, seq_len=512, method=method)
    shapes = [shape for _, _, shape in arch.outer_shapes]
    shapes += [s for i in range(arch.num_hidden_layers) for _, _, s in arch.layer_shapes(i)]
    weights = sum(torch.empty(shape, device="meta").chunk(3)[0].numel() for shape in shapes)
    found = find_adapters(arch, a_plan.recipe)
    adapters = sum(
        count_layer_adapters(arch, found, arch.is_moe_layer(i), 3)[1]
        for i in range(arch.num_hidden_layers)
        if found is not None
    )
    assert get_component_bytes(a_plan, "parameters") == (2 if adapters else 4) * weights + 4 * adapters
    assert get_component_bytes(a_plan, "gradients") == 4 * (adapters or weights)


def test_llama_8b_under_fsdp2_equals_the_memory_tracker() -> None:
    """torch's FSDPMemTracker counted 46.60 GiB at the peak of the second step on fake tensors."""
    report = plan(LLAMA_8B, ss.Layout.fsdp2(shard=8), global_batch_size=8).memory()
    at_head = next(m for m in report.by_stage[0].phases if m.phase == "backward").components
    gib = {name: value / GIB for name, value in at_head.items()}
    assert gib["parameters"] == pytest.approx(3.74, abs=0.01)
    assert gib["optimizer"] == pytest.approx(7.48, abs=0.01)
    assert gib["gather_buffers"] == pytest.approx(1.96 + 0.41, abs=0.01)
    # On fake tensors transformers saves a mask, copied in each layer, and repeats keys and values for all
    # heads; on real ones it does neither (test_rehearsal.py has the trace with and without).
    repeated = 32 * 4096 * 2 * (2 * (4096 - 1024) + 4096) / GIB
    assert gib["activations"] + gib["logits"] + repeated == pytest.approx(29.10 + 3.91, abs=0.05)
    tensors = report.peak_bytes / GIB - gib["communication"] - gib["runtime"] - gib["fragmentation"]
    assert tensors + repeated == pytest.approx(46.60, abs=0.1)


# ------------------------------------------------------------------------------------------- activations


@pytest.mark.parametrize("tp", [1, 8, 16, 64])
def test_megatron_ranks_hold_at_least_one_key_value_head(tp: int) -> None:
    arch = ss.models["llama-3.1-70b"]
    modules = Modules("megatron", False, 2, 2048)
    found = compute_layer_activations(arch, False, modules, "none", tp, tp).attention
    query_and_output, statistics = 2 * 2 * 64 * 128 // tp, 4 * 64 // tp
    assert found == query_and_output + statistics + 2 * 2 * max(1, 8 // tp) * 128
    # linear_qkv itself is cut evenly; its output is gathered where a head lies on several ranks.
    shard = count_layer_shard(arch, False, tp, 1, 1)
    norms = 2 * arch.hidden_size
    assert (shard.dense - norms) * tp == sum(arch.layer_matrix_parameters(0).values())


def test_saved_tensors_on_a_gpu_equal_those_counted_on_a_cpu() -> None:
    modules = find_modules(plan(LLAMA_8B, ss.Layout.fsdp2()))
    h, f, q, kv = 4096, 14_336, 4096, 1024
    by_hand = 2 * (4 * h + 4 + 2 * h + 2 * h) + 2 * 2 * q + 2 * 2 * kv + 4 * 32 + 8 * f
    assert sum(t.bytes_per_token for t in list_saved_tensors(LLAMA_8B, False, modules)) == by_hand


def test_unfused_attention_memory_is_quadratic_in_seq_len() -> None:
    def count_attention_bytes(arch: Architecture, seq_len: int) -> int:
        tensors = list_saved_tensors(arch, False, Modules("transformers", False, 2, seq_len))
        return seq_len * sum(t.bytes_per_token for t in tensors if t.operator == "attention")

    assert count_attention_bytes(LLAMA, 4096) == 2 * count_attention_bytes(LLAMA, 2048)
    scores = GEMMA.num_attention_heads * (2 + 4 + 2)
    assert count_attention_bytes(GEMMA, 4096) - 2 * count_attention_bytes(GEMMA, 2048) == scores * (
        4096**2 - 2 * 2048**2
    )


def test_expert_parallelism_keeps_the_total_number_of_tokens() -> None:
    kept = [
        plan(MOE, ss.Layout.megatron(ep=ep)).memory().by_stage[0].phases[3].components["activations"]
        for ep in (1, 8)
    ]
    assert kept[0] == kept[1]
    parameters = [get_component_bytes(plan(MOE, ss.Layout.megatron(ep=ep)), "parameters") for ep in (1, 8)]
    assert parameters[0] - parameters[1] == 2 * MOE.parameter_groups["experts"] * 7 // 8


def test_the_first_stage_has_the_most_micro_batches_in_flight() -> None:
    cluster = ss.Cluster.parse("4xh100-sxm-80gb")
    even = plan(replace(LLAMA, num_hidden_layers=16), ss.Layout.megatron(pp=4), cluster)
    kept = [s.at("forward").components["activations"] for s in even.memory().by_stage]
    # Angles, token ids and tensors sent between stages come on top.
    assert [kept[0] / k for k in (kept[1], kept[2])] == pytest.approx([4 / 3, 2.0], rel=0.03)
    interleaved = plan(replace(LLAMA, num_hidden_layers=16), ss.Layout.megatron(pp=4, vpp=2), cluster)
    more = interleaved.memory().by_stage[0].at("forward").components["activations"]
    # Narayanan et al. 2021, section 2.2: 1 + (p - 1) / (p v) as much.
    assert more / kept[0] == pytest.approx(1 + 3 / 8, rel=0.03)


def test_405b_over_16_uneven_stages() -> None:
    cluster = ss.Cluster.parse("128x8xh100-sxm-80gb")
    report = plan(
        ss.models["llama-3.1-405b"], ss.Layout.megatron(tp=8, pp=16), cluster, global_batch_size=256
    ).memory()
    assert [stage.num_layers for stage in report.by_stage] == [7, *[8] * 14, 7]
    frame = report.to_frame()
    assert list(frame.columns) == ["layers", *NAMES, "peak_bytes"]
    assert (frame[list(NAMES)].sum(axis=1) == frame["peak_bytes"]).all()


# ------------------------------------------------------------------------------ host memory and precision


def test_offload_moves_bytes_to_host_memory() -> None:
    p = LLAMA.num_parameters
    fsdp = plan(LLAMA, ss.Layout.fsdp2(offload="cpu")).memory()
    assert fsdp.host_bytes == pytest.approx(16 * p / 8, rel=1e-3)
    assert fsdp.components["optimizer"] == 0
    assert "host memory" in fsdp.explain("optimizer")


def test_cpu_ranks_share_the_host_and_have_no_cuda() -> None:
    two = ss.Cluster.parse("2xcpu")
    report = plan(LLAMA, ss.Layout.fsdp2(offload="cpu"), two).memory()
    assert report.usable_bytes == two.gpu.usable_bytes // 2
    assert report.components["communication"] == report.components["fragmentation"] == 0
    assert "CUDA" not in report.explain("runtime")
    # The host's memory is the ranks' own: offloading moves nothing.
    assert report.host_bytes == 0
    assert report.at("rest")["optimizer"] > 0


def test_weight_and_moment_bytes_follow_the_precision() -> None:
    for precision, (weight, moment) in {
        "bf16-mixed": (4, 8), "fp16-mixed": (4, 8), "bf16": (2, 4), "fp32": (4, 8),
    }.items():  # fmt: skip
        found = compute_bytes_per_parameter(
            plan(LLAMA, ss.Layout.ddp(), precision=precision), LLAMA.num_parameters
        )
        assert (found["parameters"], found["optimizer"]) == (weight, moment)


@pytest.mark.parametrize("bad", ["nothing", "", None, 3, "Parameters"])
def test_unknown_component_and_phase_names_are_rejected(bad: Any) -> None:
    report = plan(LLAMA, ss.Layout.ddp()).memory()
    with pytest.raises(ValueError, match="component is"):
        report.explain(bad)
    with pytest.raises(ValueError, match="phase is"):
        report.at(bad)


def test_a_report_is_displayed_as_text_and_html() -> None:
    report = plan(LLAMA_8B, ss.Layout.fsdp2()).memory()
    assert "GiB" in repr(report)
    html = report.to_html()
    assert "<script" not in html
    assert all(name.replace("_", " ") in html for name in NAMES)


@pytest.mark.parametrize("name", sorted(frameworks))
def test_a_prediction_is_fast(name: str) -> None:
    """A prediction takes about 200 µs on a quiet machine; the limit is ten times that."""
    import time

    a_plan = plan(LLAMA_8B, frameworks[name].layout_class())
    a_plan.memory()
    best = math.inf
    for _ in range(50):
        start = time.perf_counter()
        a_plan.memory()
        best = min(best, time.perf_counter() - start)
    assert best < 2e-3


# ------------------------------------------------------------------------------ many stages, shared work


@settings(max_examples=examples(100), deadline=None)
@given(plans(), st.sampled_from((1, 2, 4, 6)), st.sampled_from((1, 2)))
def test_sharing_work_between_stages_changes_no_result(a_plan: Plan, pp: int, vpp: int) -> None:
    if "pp" in a_plan.layout.__dataclass_fields__:
        changes = {"pp": pp} | (
            {"vpp": vpp} if "vpp" in a_plan.layout.__dataclass_fields__ and pp > 1 else {}
        )
        try:
            a_plan = replace(a_plan, layout=replace(a_plan.layout, **changes))
        except ValueError:
            assume(False)
    model = frameworks[a_plan.layout.framework].memory_model()
    report = a_plan.memory()
    rank = RankActivations(a_plan, find_modules(a_plan))
    for stage, found in zip(list_stages(a_plan), report.by_stage, strict=True):
        alone = sorted(
            compute_phases(rank, stage, model.compute_training_state(a_plan, stage)),
            key=lambda moment: moment.fraction,
        )
        assert [moment.components for moment in found.phases] == [moment.components for moment in alone]
        for ours, theirs in zip(found.phases, alone, strict=True):
            assert {name: term.explain() for name, term in ours.terms.items()} == {
                name: term.explain() for name, term in theirs.terms.items()
            }
    assert report.worst_stage is max(report.by_stage, key=lambda stage: stage.peak_bytes)


@pytest.mark.parametrize("name", ["llama-3.1-405b", "deepseek-v3"])
def test_layers_of_all_stages_sum_to_the_model(name: str) -> None:
    """Stages that share shapes still sum to the whole model."""
    arch = ss.models[name]
    a_plan = plan(arch, ss.Layout.fsdp2(pp=16), ss.Cluster.parse("4x8xh100-sxm-80gb"), global_batch_size=64)
    stages = list_stages(a_plan)
    assert [stage.number for stage in stages] == list(range(16))
    assert [stage.num_layers for stage in stages] == list(a_plan.stage_layers)
    assert sum(stage.num_moe_layers for stage in stages) == arch.num_moe_layers
    assert sum(stage.base for stage in stages) == arch.num_parameters
