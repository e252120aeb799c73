"""Layout options that are set but not read by the framework, overlap that is switched off, and sequences
beyond the model's positions."""

from __future__ import annotations

from collections.abc import Iterator

from shardscope.core.finding import Finding
from shardscope.frameworks.registry import frameworks
from shardscope.planner.checks.case import Case, evaluate_variants, find_fastest, replace_plan_fields
from shardscope.planner.checks.number_format import format_percent


def check_unused_options(case: Case) -> Iterator[Finding]:
    """Report layout fields that differ from their defaults and have no effect."""
    plan = case.plan
    # Each framework knows which of its options depend on which others
    # (FrameworkDefaults.find_unused_options).
    unused = frameworks[plan.layout.framework].defaults().find_unused_options(plan)
    if not unused:
        return
    options = ", ".join(f"{name}={getattr(plan.layout, name)!r}" for name in unused)
    fields = plan.layout.__dataclass_fields__
    plain = {name: fields[name].default for name in unused}
    yield Finding(
        name="option-without-use",
        severity="hint",
        why=f"{options}: {plan.layout.title} reads {'it' if len(unused) == 1 else 'them'} only "
        f"{' and '.join(dict.fromkeys(unused.values()))}, and {len(unused)} of the layout's "
        f"options change{'s' if len(unused) == 1 else ''} nothing.",
        number=float(len(unused)),
        change=", ".join(f"{name}={value!r}" for name, value in plain.items()),
        plan=replace_plan_fields(plan, layout=plain),
    )


def check_rotary_positions(case: Case) -> Iterator[Finding]:
    """Report sequences longer than those for which a model with rotary positions was made.

    Learned positions have no more rows, and a plan beyond them is refused.
    """
    plan = case.plan
    arch, seq_len = plan.architecture, plan.recipe.seq_len
    limit = arch.max_position_embeddings
    # ALiBi was made for longer sequences than those of its training (Press et al. 2022).
    if arch.position_embedding != "rope" or seq_len <= limit:
        return
    yield Finding(
        name="longer-than-the-models-positions",
        severity="warning",
        why=f"seq_len={seq_len:,}, and {arch.name} was made for at most {limit:,} tokens "
        "(max_position_embeddings): beyond them its rotary angles are new to it, and its loss rises steeply "
        "(Chen et al. 2023, arXiv:2306.15595) until it has learned them.",
        number=float(seq_len),
        change=f"seq_len={limit}",
        plan=replace_plan_fields(plan, recipe={"seq_len": limit}),
    )


# ---- Collectives that are exposed, although the framework could overlap them with computation


WORTH = 0.005
"""Share of the step from which an option without cost is worth reporting."""


def check_overlap_options(case: Case) -> Iterator[Finding]:
    """Report options that overlap collectives and are off. A search keeps the framework's defaults for them,
    so that plans that it ranks may gain from this."""
    plan = case.plan
    options = frameworks[plan.layout.framework].defaults().find_overlap_options(plan)
    # The plan with the options on must still fit, and must gain measurably.
    fixed = find_fastest(evaluate_variants(plan, [({}, options)])) if options else None
    if fixed is None or case.compute_gain(fixed) < WORTH:
        return
    gain = case.compute_gain(fixed)
    option_text = ", ".join(f"{name}={value!r}" for name, value in options.items())
    yield Finding(
        name="collectives-not-overlapped",
        severity="hint",
        why=f"Each step waits for gradients and weights to travel, though {plan.layout.title} can send them "
        f"while it computes: it would be {format_percent(gain)} shorter.",
        number=100 * gain,
        change=option_text,
        plan=fixed.plan,
    )
