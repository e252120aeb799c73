"""Text of ``StepReport.explain``: each part's formula and its source."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardscope.memory.activations.forward import find_modules
from shardscope.memory.activations.modules.attention import is_unfused
from shardscope.timing.layers import HALF_PEAKS, PEAKS, find_attention_kernels
from shardscope.timing.matmul import count_attention_keys

if TYPE_CHECKING:
    from shardscope.core.plan import Plan
    from shardscope.core.recipe import Recipe
    from shardscope.memory.activations.modules.saved_tensors import Modules
    from shardscope.timing.rates import CheckpointCalls, Rates
    from shardscope.timing.report import Part


def explain_part(part: Part, plan: Plan, rates: Rates, suffix: str) -> str:
    """Return the formula of one part with its numbers, followed by ``suffix`` and the rates' source."""
    recipe, degrees = plan.recipe, plan.degrees
    precision = PEAKS[recipe.precision]
    rate, passes = rates.get_matmul_rate(precision), rates.get_passes(plan.kernels)
    # With a capacity, the tokens beyond it are dropped, so it replaces the imbalance (Fedus et al. 2021).
    load = recipe.expert_capacity_factor or recipe.expert_imbalance
    calls = rates.get_checkpoint_calls(recipe.recompute, plan.kernels)
    longer = "" if passes.slowdown == 1 else f"{passes.slowdown:g} times as long as "
    memory = f"{rates.get_memory_bandwidth() / 1e12:.2f} TB/s"
    formulas: dict[Part, str] = {
        "matrices": (
            f"2 FLOPs for each pair of numbers, forward once and backward twice, at "
            f"{rate.flops_per_second / 1e12:,.0f} TFLOP/s in {precision}, or as long as memory moves what is "
            f"multiplied: where 1 / (1/m + 1/k + 1/n) is below {rate.balance:.0f} (Williams et al. 2009)"
        ),
        "attention": _describe_attention(plan, rates) if part == "attention" else "",
        "elementwise": (
            f"{passes.forward:g} bytes moved forward and {passes.backward:g} backward for each byte that the "
            f"{plan.kernels} modules save, {longer}at {memory}, or as long as the host takes to start the "
            f"kernels{_describe_host(recipe, calls)}"
        ),
        "loss": f"logits, their fp32 copies and gradients written and read once at {memory}",
        "recomputation": _describe_recomputation(recipe, calls),
        "tensor_parallel": (
            f"tp={degrees.tp}: two reductions a layer forward and two backward (Shoeybi et al. 2019, figure "
            f"4; Korthikanti et al. 2022, section 4.2.2){_describe_shared_heads(plan)}"
        ),
        "context_parallel": (
            f"cp={degrees.cp}: keys and values to all ranks, their gradients back (Liu et al. 2023); joining "
            "the outputs is in elementwise"
        ),
        "expert_parallel": (
            f"ep={degrees.ep}: tokens to their experts and back (Lepikhin et al. 2020), of the rank whose "
            f"experts get {load:g} times their even share"
        ),
        "pipeline_transfers": f"pp={degrees.pp}: hidden states forward, their gradients back",
        "gathers": "parameters all-gathered, or cast by autocast, then staged (Rajbhandari et al. 2020)",
        "gradients": "gradients added up, staged and reduced over data-parallel ranks (Li et al. 2020)",
        "bubble": (
            f"all other stages' time for one micro-batch / vpp={degrees.vpp}: of equal ones (pp - 1) / (vpp "
            f"x {plan.num_micro_batches} micro-batches) (Narayanan et al. 2021, section 2.2)"
        ),
        "optimizer": f"all that {recipe.optimizer} and clipping read and write, at {memory}",
        "offload": (
            f"{rates.host.bytes_per_second / 1e9:.1f} GB/s to the host, which updates "
            f"{rates.host_updates_per_second / 1e9:.1f} billion weights per second (Ren et al. 2021)"
            + ("; no arithmetic runs while activations are copied" if recipe.recompute == "offload" else "")
        ),
    }
    return f"{formulas[part]}{suffix} · {rates.source}"


def _describe_shared_heads(plan: Plan) -> str:
    """Return the all-gather of ranks that share a key/value head, if Megatron-core does one."""
    arch, tp = plan.architecture, plan.degrees.tp
    heads = arch.num_key_value_heads
    if plan.kernels != "megatron" or arch.latent_attention is not None or tp <= heads:
        return ""
    return f", and queries, keys and values to all ranks, as tp exceeds the {heads} key/value heads"


def _describe_attention(plan: Plan, rates: Rates) -> str:
    """Return which scores are computed, and at what rate."""
    arch, modules = plan.architecture, find_modules(plan)
    if is_unfused(arch, modules):
        return (
            "every score, masked or not, as two plain matmuls forward and four backward, at the rate of "
            "other matmuls"
        )
    # In a precision of its own: attention never runs in fp8.
    kernels = find_attention_kernels(arch, modules)
    rate = rates.get_attention_rate(HALF_PEAKS[plan.recipe.precision], kernels)
    return (
        f"fused kernels at {rate.forward / 1e12:,.0f} TFLOP/s forward and, five products, "
        f"{rate.backward / 1e12:,.0f} backward (Dao 2023): {_describe_scores(plan, modules)}"
    )


def _describe_scores(plan: Plan, modules: Modules) -> str:
    """Return which scores a fused kernel computes."""
    arch, seq_len = plan.architecture, plan.recipe.seq_len
    keys, num_sliding = count_attention_keys(arch, modules), arch.sliding_window_layers
    everything = "all scores, as kernels skip nothing that a mask hides"
    if keys.full == seq_len:
        return everything
    if not num_sliding or keys.sliding == keys.full:
        return "causal scores"
    sliding = everything if keys.sliding == seq_len else "those of the window"
    in_layers = f"in {num_sliding} layers with a window of {arch.sliding_window:,} tokens {sliding}"
    return in_layers if num_sliding == arch.num_hidden_layers else f"causal scores, and {in_layers}"


def _describe_host(recipe: Recipe, calls: CheckpointCalls) -> str:
    """Return how much longer the host takes for each operator, outside of what is recomputed."""
    phases = (("forward", calls.forward), ("backward", calls.backward))
    slower = [f"{factor:g} times as long {phase}" for phase, factor in phases if factor != 1]
    return f" ({' and '.join(slower)} with recompute={recipe.recompute!r})" if slower else ""


def _describe_recomputation(recipe: Recipe, calls: CheckpointCalls) -> str:
    """Return descriptions of everything that is recomputed."""
    descriptions = []
    if recipe.recompute in ("full", "selective"):
        interval = recipe.recompute_interval
        which = "every layer" if interval == 1 else f"one layer of {interval}"
        slower = f" (the host starts its kernels in {calls.repeated:g} times the usual time)"
        descriptions.append(
            f"{recipe.recompute} recomputation of {which}{slower if calls.repeated != 1 else ''}"
        )
    if recipe.loss == "chunked":
        descriptions.append("the chunked loss's logits, made again in backward")
    return " + ".join(descriptions) or "nothing is recomputed"
