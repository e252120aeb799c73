"""Claims about memory: the training state of 70B, the savings of ZeRO, and what fits on a node or one GPU."""

from __future__ import annotations

from shardscope.core.layout import Layout
from shardscope.core.precision import FP32, HALF
from shardscope.planner.claims.claim import Claim, Number
from shardscope.planner.claims.claim_plans import GB, add_nvme, build_plan, compute_training_state_gb
from shardscope.planner.memory_needs import fits

MIXED = {"weights": HALF, "gradients": HALF, "master": FP32, "moments": 2 * FP32}
"""Bytes per parameter in mixed precision with Adam (Rajbhandari et al. 2020, section 3.1): 2 + 2 + 12."""
SEVENTY = 70e9


def check_70b_training_state() -> Claim:
    """Check 840 GB for 70B: they omit the fp32 master weights."""
    # The claim adds up only without fp32 master weights; its "560 Adam" is said to include them.
    without_master = (MIXED["weights"] + MIXED["gradients"] + MIXED["moments"]) * SEVENTY / GB
    total = sum(MIXED.values()) * SEVENTY / GB
    moments, master = MIXED["moments"] * SEVENTY / GB, MIXED["master"] * SEVENTY / GB
    # The same by the full prediction, over enough ranks that rounding of shards does not show.
    ranks = 64
    sharded = build_plan("llama-3.1-70b", f"8x{ranks // 8}xh100-sxm-80gb", Layout.zero(stage=3))
    real = sum(compute_training_state_gb(sharded).values()) * ranks
    needed = Number("training state of 70e9 parameters", 840.0, total, "GB")
    return Claim(
        name="70b-needs-840-gb",
        statement="70B needs 840 GB: 140 weights, 140 gradients, 560 Adam "
        "(fp32 master, first and second moments)",
        numbers=(
            needed,
            Number("both moments", 560.0, moments, "GB"),
            Number("moments and master", 560.0, moments + master, "GB"),
            Number("without the master", 840.0, without_master, "GB"),
            Number("Llama 3.1 70B over 64 GPUs, by plan.memory()", None, real, "GB"),
        ),
        verdict="right" if needed.holds else "wrong",
        why=f"560 GB are the two fp32 moments alone; the fp32 master is {master:,.0f} GB more, and "
        f"{total:,.0f} GB in all: 16 bytes a parameter (Rajbhandari et al. 2020, section 3.1).",
    )


def check_70b_on_four_gpus() -> Claim:
    """Check 70B on four GPUs of 96 GB: they hold a third of the training state."""
    # H20 has 96 GB, as the claim says; ZeRO-2 for its second half, the weights that are not sharded.
    plan = build_plan("llama-3.1-70b", "4xh20-96gb", Layout.zero(stage=3), recompute="full")
    state = compute_training_state_gb(plan)
    second = build_plan("llama-3.1-70b", "4xh20-96gb", Layout.zero(stage=2), recompute="full")
    weights = compute_training_state_gb(second)["parameters"]
    gpu_memory = plan.cluster.gpu.memory_bytes / GB
    usable = plan.cluster.gpu.usable_bytes / GB
    state_bytes = sum(state.values())
    return Claim(
        name="four-96-gb-cards-train-70b",
        statement="4 x 96 GB trains 70B in full with ZeRO-3 at 35 + 35 GB a GPU; "
        "ZeRO-2 keeps 140 GB of weights",
        numbers=(
            Number("training state a GPU with ZeRO-3", 70.0, state_bytes, "GB"),
            Number("weights a GPU with ZeRO-3", 35.0, state["parameters"], "GB"),
            Number("gradients a GPU with ZeRO-3", 35.0, state["gradients"], "GB"),
            Number("optimizer a GPU with ZeRO-3", 0.0, state["optimizer"], "GB"),
            Number("weights a GPU with ZeRO-2", 140.0, weights, "GB"),
            Number("the GPU", 96.0, gpu_memory, "GB"),
        ),
        verdict="right" if state_bytes <= usable else "wrong",
        why=f"35 + 35 GB are weights and gradients; the optimizer's {state['optimizer']:,.0f} GB make it "
        f"{state_bytes:,.0f} GB on each GPU, of which a GPU has {usable:,.0f} to give. ZeRO-2's "
        f"{weights:,.0f} GB of weights alone are more than the GPU has.",
    )


def check_zero_savings() -> Claim:
    """Check ZeRO's savings: 4x and 8x apply to all state with many ranks; sharded parts shrink by the number
    of ranks."""
    # The paper's model, on few GPUs and on so many that sharded parts nearly vanish.
    few, many = _by_stage(64), _by_stage(1024)
    optimizer = few[0]["optimizer"] / few[1]["optimizer"]
    gradients = few[0]["gradients"] / few[2]["gradients"]
    few_whole = [sum(state.values()) for state in few]
    many_whole = [sum(state.values()) for state in many]
    less = "times less"
    # The claim names the optimizer and the gradients alone. In the paper, 4x and 8x are of all state.
    parts = (
        Number("optimizer, stage 1 over 64 GPUs", 4.0, optimizer, less),
        Number("gradients, stage 2 over 64 GPUs", 8.0, gradients, less),
    )
    limits = (
        Number("all state, stage 1 over 1,024 GPUs", 4.0, many_whole[0] / many_whole[1], less),
        Number("all state, stage 2 over 1,024 GPUs", 8.0, many_whole[0] / many_whole[2], less),
    )
    parts_hold, limits_hold = (all(one.holds for one in some) for some in (parts, limits))
    return Claim(
        name="zero-saves-4x-and-8x",
        statement="ZeRO-1 saves 4x on optimizer states, ZeRO-2 8x on gradients",
        numbers=(
            *parts,
            Number("all state, stage 1 over 64 GPUs", 4.0, few_whole[0] / few_whole[1], less),
            Number("all state, stage 2 over 64 GPUs", 8.0, few_whole[0] / few_whole[2], less),
            *limits,
        ),
        verdict="right" if parts_hold else "half right" if limits_hold else "wrong",
        why="4x and 8x are the paper's limits of the whole state for many GPUs, 16 / (4 + 12/N) and "
        "16 / (2 + 14/N) (Rajbhandari et al. 2020, figure 1); what a stage shards falls by N. "
        f"DeepSpeed keeps slightly more gradients, {few[2]['gradients']:.2f} GB of {few[0]['gradients']:.1f}"
        ": the rank that owns a part of the embedding keeps its gradient whole.",
    )


def _by_stage(ranks: int) -> list[dict[str, float]]:
    """Return the training state of the paper's 7.5B model for ZeRO's stages 0 to 2."""
    return [
        compute_training_state_gb(
            build_plan(
                "megatron-gpt-7.5b",
                f"{ranks // 8}x8xa100-sxm-80gb",
                Layout.zero(stage=stage),
                seq_len=1024,
                global_batch_size=1024,
                recompute="full",
            )
        )
        for stage in range(3)
    ]


# ---- Claims about models that fit: LoRA of 70B on one node, 175B on one GPU


YEAR_DAYS = 365.25


def check_70b_lora_on_one_node() -> Claim:
    """Check LoRA of 70B on one node: frozen bf16 weights over eight GPUs leave most memory for
    activations."""
    plan = build_plan("llama-3.1-70b", "8xh100-sxm-80gb", Layout.fsdp2(), method="lora", recompute="full")
    report = plan.memory()
    full = build_plan("llama-3.1-70b", "8xh100-sxm-80gb", Layout.fsdp2(), recompute="full").memory()
    has_room = fits(plan, report)
    return Claim(
        name="70b-lora-fits-on-8xh100",
        statement="70B LoRA fits on 8 x H100 with FSDP2",
        numbers=(
            Number("peak a GPU, LoRA", None, report.peak_bytes / GB, "GB"),
            Number("usable of a GPU", 80.0, report.usable_bytes / GB, "GB"),
            Number("peak a GPU, full training", None, full.peak_bytes / GB, "GB"),
        ),
        verdict="right" if has_room else "wrong",
        why=f"Frozen weights are {plan.architecture.num_parameters * 2 / 8 / GB:.1f} GB a GPU in bf16 and "
        f"have neither gradients nor moments: {report.peak_bytes / GB:.0f} GB at the peak with 4,096 tokens "
        f"and recomputation. Full training would take {full.peak_bytes / GB:.0f}.",
    )


def check_175b_on_one_gpu() -> Claim:
    """Check 175B on one GPU with NVMe offload: it fits layer by layer, but training would take very long."""
    layout = Layout.zero(stage=3, offload_optimizer="nvme", offload_params="nvme")
    plan = add_nvme(
        build_plan(
            "gpt-3-175b", "a100-sxm-80gb", layout, seq_len=2048, recompute="full", global_batch_size=32
        )
    )
    report, step = plan.memory(), plan.step()
    has_room = fits(plan, report)
    # 300 billion tokens: GPT-3's training set (Brown et al. 2020, table 2.1).
    years = step.days(300e9) / YEAR_DAYS
    return Claim(
        name="175b-on-one-gpu-with-nvme",
        statement="175B trains on one GPU with NVMe offload",
        numbers=(
            Number("peak on the GPU", 80.0, report.peak_bytes / GB, "GB"),
            Number("host memory", None, report.host_bytes / GB, "GB"),
            Number("NVMe", None, report.nvme_bytes / GB, "GB"),
            Number("throughput", None, step.tokens_per_second, "tokens/s"),
            Number("GPT-3's 300e9 tokens", None, years, "years"),
        ),
        verdict="right" if has_room else "wrong",
        why=f"ZeRO-3 gathers a layer at a time, so that {report.peak_bytes / GB:.0f} GB of the GPU, "
        f"{report.host_bytes / GB:,.0f} GB of host memory and {report.nvme_bytes / 1e12:.1f} TB of NVMe are "
        f"enough. At {step.tokens_per_second:,.0f} tokens/s it is for fine-tuning: what GPT-3 was trained on "
        f"would take {years:,.0f} years.",
    )
