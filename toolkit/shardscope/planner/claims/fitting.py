"""Claims about models that fit: LoRA of 70B on one node, 175B on one GPU."""

from __future__ import annotations

from shardscope.core.layout import Layout
from shardscope.planner.capacity import fits
from shardscope.planner.claims.claim import Claim, Number
from shardscope.planner.claims.settings import GB, plan_of, with_nvme

YEAR_DAYS = 365.25


def lora_on_a_node() -> Claim:
    """Check LoRA of 70B on one node: frozen bf16 weights over eight GPUs leave most memory for
    activations."""
    plan = plan_of("llama-3.1-70b", "8xh100-sxm-80gb", Layout.fsdp2(), method="lora", recompute="full")
    report = plan.memory()
    full = plan_of("llama-3.1-70b", "8xh100-sxm-80gb", Layout.fsdp2(), recompute="full").memory()
    has_room = fits(plan, report)
    return Claim(
        name="70b-lora-fits-on-8xh100",
        said="70B LoRA fits on 8 x H100 with FSDP2",
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


def one_gpu_with_nvme() -> Claim:
    """Check 175B on one GPU with NVMe offload: it fits layer by layer, but training would take very long."""
    layout = Layout.zero(stage=3, offload_optimizer="nvme", offload_params="nvme")
    plan = with_nvme(
        plan_of("gpt-3-175b", "a100-sxm-80gb", layout, seq_len=2048, recompute="full", global_batch_size=32)
    )
    report, step = plan.memory(), plan.step()
    has_room = fits(plan, report)
    years = step.days(300e9) / YEAR_DAYS
    return Claim(
        name="175b-on-one-gpu-with-nvme",
        said="175B trains on one GPU with NVMe offload",
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
