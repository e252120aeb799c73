"""Modelled code of publishers: kernels and hooks that ran but are not part of a plan, by phase.

Each piece is modelled from its source code, and changes only the phases in which it takes memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Literal

from tests.accuracy.kbit import kbit_training
from tests.accuracy.qwen_code import no_ddp, zero2_over_gptq
from tests.accuracy.rows import Row, join_fields, read_number

from shardscope import Plan, Recipe
from shardscope.core.precision import FP32, widths
from shardscope.frameworks.registry import frameworks
from shardscope.memory.activations.modules.attention import get_attention_widths as attention_widths
from shardscope.memory.overheads.band import compute_band
from shardscope.memory.overheads.libraries import Band, estimate_communication
from shardscope.memory.report import Component, MemoryReport, PhaseMemory, StageMemory, Term

OwnCode = Literal[
    "no_buckets",
    "unsloth_loss",
    "rotary_caches",
    "fsdp1_hooks",
    "bf16_optimizer",
    "torchtitan_policy",
    "kbit_training",
    "no_ddp",
    "zero2_over_gptq",
]
_LATE = 0.9
"""Phases of backward after this fraction of the step belong to the stage's first layers."""
_Change = Callable[[Plan, tuple[PhaseMemory, ...]], tuple[PhaseMemory, ...]]


def own_code(row: Row, framework: str, recipe: Recipe) -> tuple[OwnCode, ...]:
    """Return the modelled code that the row's source ran."""
    results: list[OwnCode] = []
    table = join_fields(row, "table")
    if table == "baseline-peft-bnb" and framework == "one GPU":
        results.append("kbit_training")
    if framework == "one GPU" and recipe.method == "full" and read_number(row, "grad_accum") == 1:
        results.append("no_buckets")
    if "foak" in table and "liger" not in table:
        results.append("unsloth_loss")
    if "refs/a100_80gb.csv" in str(row.get("source_url")) and "tral" in join_fields(row, "model"):
        results.append("rotary_caches")
    if framework == "FSDP1" and recipe.has_adapters and recipe.recompute == "full":
        results.append("fsdp1_hooks")
    if framework == "Megatron-DeepSpeed" and recipe.precision == "bf16-mixed":
        results.append("bf16_optimizer")
    if is_torchtitan(row) and "selective" in join_fields(row, "activation_checkpointing"):
        results.append("torchtitan_policy")
    if "QwenLM/Qwen@" in str(row.get("source_url")) and framework == "one GPU" and recipe.has_adapters:
        results.append("zero2_over_gptq" if recipe.method == "qlora" else "no_ddp")
    return tuple(results)


def is_four_bit(row: Row) -> bool:
    """Return whether a frozen base is in 4 bits."""
    text = join_fields(row, "qlora")
    return text not in ("", "false", "none") and not ("8" in text and "4" not in text)


def is_torchtitan(row: Row) -> bool:
    """Return whether torchtitan's own model and checkpoint policy ran."""
    return "pytorch/torchtitan" in str(row.get("source_url"))


def is_moonlight_recipe(row: Row) -> bool:
    """Return whether Megatron-Bridge's recipe for Moonlight ran, with its precision-aware optimizer."""
    return is_bridge(row) and "moonlight" in join_fields(row, "model")


def is_bridge(row: Row) -> bool:
    """Return whether Megatron-Bridge's pages have the row."""
    return "NVIDIA-NeMo/Megatron-Bridge" in str(row.get("source_url"))


def add_own_code(plan: Plan, report: MemoryReport, own: tuple[OwnCode, ...]) -> MemoryReport:
    """Return the report with the memory of the source's own code."""
    if not own:
        return report
    stages = tuple(_add_own_code_to_stage(plan, stage, own) for stage in report.by_stage)
    worst = max(stages, key=lambda stage: stage.peak_bytes)
    return replace(
        report,
        find_stages=lambda: stages,
        worst_stage=worst,
        find_band=lambda: compute_band(plan, with_communication(plan, stages)),
    )


def with_communication(
    plan: Plan, stages: Iterable[StageMemory]
) -> list[tuple[tuple[PhaseMemory, ...], Band]]:
    """Return each stage's phases and communication buffers, from which the product computes its band."""
    model, vendor = frameworks[plan.layout.framework].memory_model(), plan.cluster.gpu.vendor
    shapes = model.find_shapes(plan)
    states = [model.compute_training_state(plan, model.count_weights(plan, shape)) for shape in shapes.kinds]
    return [
        (stage.phases, estimate_communication(states[shapes.kind_of[stage.stage]].group_sizes, vendor))
        for stage in stages
    ]


def _add_own_code_to_stage(plan: Plan, stage: StageMemory, own: tuple[OwnCode, ...]) -> StageMemory:
    moments = stage.phases
    for name in own:
        moments = _CHANGES[name](plan, moments)
    return replace(stage, find_phases=lambda: moments, find_peak=None)


def _no_buckets(plan: Plan, moments: tuple[PhaseMemory, ...]) -> tuple[PhaseMemory, ...]:
    """One GPU without DDP: no gradients between an optimizer step and the next backward.

    DDP's buckets stay allocated; the Trainer's ``model.zero_grad()`` frees gradients (``set_to_none``). The
    head's gradient comes first, and is alive during the backward of the last layers.
    """
    arch = plan.architecture
    head = arch.vocab_size * arch.hidden_size * widths[plan.recipe.precision].compute
    results = []
    for moment in moments:
        here = moment.components["gradients"]
        if moment.phase in ("initialisation", "rest", "forward") or moment.components["logits"]:
            here = 0
        elif moment.phase == "backward" and moment.fraction < _LATE:
            here = min(here, head)
        results.append(_add_bytes(moment, {"gradients": here}))
    return tuple(results)


def _unsloth_loss(plan: Plan, moments: tuple[PhaseMemory, ...]) -> tuple[PhaseMemory, ...]:
    """Unsloth's cross entropy in transformers 4.45: fp32 logits and their shifted copy.

    Its kernel keeps the row's log-sum-exp only and writes the gradient over the shifted logits
    (foundation-model-stack/fms-acceleration, fms_acceleration_foak/kernels/unsloth/cross_entropy_loss.py);
    backward then copies that into one of all positions. Before, while the head's other tensors are still
    there, the half-precision logits and their fp32 copy.
    """
    each = plan.architecture.vocab_size * plan.recipe.micro_batch_size * plan.recipe.seq_len
    half = widths[plan.recipe.precision].compute
    sizes = {"forward": (half + FP32) * each, "backward": 2 * FP32 * each}
    return tuple(
        _add_bytes(moment, {"logits": sizes[moment.phase]}) if moment.components["logits"] else moment
        for moment in moments
    )


def _rotary_caches(plan: Plan, moments: tuple[PhaseMemory, ...]) -> tuple[PhaseMemory, ...]:
    """Mistral and Mixtral in transformers of early 2024: rotary caches of 32,768 positions in each layer.

    modeling_mistral.py, ``_set_cos_sin_cache(seq_len=max_position_embeddings)``, once a layer: buffers, which
    no framework shards.
    """
    arch, c = plan.architecture, widths[plan.recipe.precision].compute
    caches = arch.num_hidden_layers * arch.max_position_embeddings * arch.head_dim * 2 * c
    return tuple(
        _add_bytes(moment, {"parameters": moment.components["parameters"] + caches}) for moment in moments
    )


def _fsdp1_hooks(plan: Plan, moments: tuple[PhaseMemory, ...]) -> tuple[PhaseMemory, ...]:
    """FSDP1 with frozen weights and reentrant checkpoints, which were the Trainer's default.

    To reshard frozen weights FSDP1 hooks their layer's inputs (torch/distributed/fsdp/_runtime_utils.py,
    ``_register_post_backward_reshard_only_hook``) and keeps the hook until backward ends. It holds the
    inputs' gradient accumulators (torch/autograd/graph.py, ``register_multi_grad_hook``): in a reentrant
    checkpoint those of detached leaves, so each layer's input and its gradient stay. When backward reaches
    the first layer, all but its own and the gradient that comes in are there beside what it needs.
    """
    arch, recipe = plan.architecture, plan.recipe
    tokens = recipe.micro_batch_size * recipe.seq_len
    kept = 2 * (arch.num_hidden_layers - 2) * tokens * arch.hidden_size * widths[recipe.precision].compute
    last = [moment for moment in moments if moment.phase == "backward" and moment.fraction > _LATE]
    fullest = max(last, key=lambda moment: moment.components["activations"])
    more: dict[Component, int] = {"activations": fullest.components["activations"] + kept}
    return tuple(_add_bytes(moment, more) if moment is fullest else moment for moment in moments)


def _bf16_optimizer(plan: Plan, moments: tuple[PhaseMemory, ...]) -> tuple[PhaseMemory, ...]:
    """DeepSpeed's BF16_Optimizer in its pipeline: unsharded gradients in fp32 and in half precision.

    deepspeed/runtime/bf16_optimizer.py (``fp32_groups_gradients_flat``), and pipe/engine.py, which adds each
    micro-batch's with ``clear_lp_grads=False``: 2 + 4 bytes where Megatron-core's own buffer has 4.
    """
    return tuple(_scale_component(moment, "gradients", 3, 2) for moment in moments)


def _torchtitan_policy(plan: Plan, moments: tuple[PhaseMemory, ...]) -> tuple[PhaseMemory, ...]:
    """torchtitan's per-operator selective checkpointing: saves attention's output and every second matmul.

    parallelize_llama.py (``_save_list``, ``_get_custom_policy``): of a layer's seven products those of the
    query, the value, the gate and the MLP's output, with what fused attention returns; the rest is played
    again from the layer's input, as if all of it were. The plan says ``selective``, which keeps all
    seven.
    """
    arch, recipe = plan.architecture, plan.recipe
    again = Plan(arch, plan.cluster, replace(recipe, recompute="full"), plan.layout).memory()
    moments = again.worst_stage.phases
    width, c = attention_widths(arch), widths[recipe.precision].compute
    products = width.query + width.value + arch.intermediate_size + arch.hidden_size
    each = (products + width.output) * c + FP32 * arch.num_attention_heads
    kept = each * (arch.num_hidden_layers - 1) * recipe.micro_batch_size * recipe.seq_len
    return tuple(
        _add_bytes(moment, {"activations": moment.components["activations"] + kept})
        if moment.phase == "forward" or (moment.phase == "backward" and moment.fraction < _LATE)
        else moment
        for moment in moments
    )


def _scale_component(moment: PhaseMemory, name: Component, times: int, over: int) -> PhaseMemory:
    return _add_bytes(moment, {name: moment.components[name] * times // over})


def describe(name: OwnCode) -> str:
    """Return the first line of the docstring of a piece."""
    return str(_CHANGES[name].__doc__).strip().splitlines()[0]


def _add_bytes(moment: PhaseMemory, more: Mapping[Component, int]) -> PhaseMemory:
    terms = dict(moment.terms)
    terms.update({name: Term(num_bytes, lambda: "the source's own code") for name, num_bytes in more.items()})
    return PhaseMemory.from_terms(moment.phase, moment.fraction, terms)


_CHANGES: dict[OwnCode, _Change] = {
    "no_buckets": _no_buckets,
    "unsloth_loss": _unsloth_loss,
    "rotary_caches": _rotary_caches,
    "fsdp1_hooks": _fsdp1_hooks,
    "bf16_optimizer": _bf16_optimizer,
    "torchtitan_policy": _torchtitan_policy,
    "kbit_training": kbit_training,
    "no_ddp": no_ddp,
    "zero2_over_gptq": zero2_over_gptq,
}
