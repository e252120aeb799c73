"""The numbers in the Studio's header: a plan's rate and cost, or why they are unknown."""

from __future__ import annotations

from html import escape

from shardscope_widgets.kit.display_names import name_rate_unit
from shardscope_widgets.kit.numbers import format_dollars, format_short
from shardscope_widgets.time.rows import ShownStep
from shardscope_widgets.time.table import MODEL_FLOPS, describe_price

DASH = "–"


def render_rates(shown: ShownStep) -> str:
    """Return three numbers as HTML, each below its unit; a dash has the reason for a missing number."""
    report, reason = shown.report, shown.step.why_no_rates
    units = (f"tokens/s per {name_rate_unit(shown.plan.cluster)}", "MFU", "per M tokens")
    if report is None or reason:
        numbers = [(DASH, unit, reason) for unit in units]
    else:
        cost, mfu = report.cost_per_token, report.mfu
        share = DASH if mfu is None else _format_percent(mfu)
        why_mfu = "the peak FLOP/s in this precision are unknown" if mfu is None else MODEL_FLOPS
        numbers = [
            (format_short(report.tokens_per_second_per_gpu), units[0], "predicted"),
            (share, units[1], why_mfu),
            (DASH if cost is None else format_dollars(1e6 * cost), units[2], describe_price(shown)),
        ]
    return f"<div class='ss-rates'>{''.join(_render_rate(*number) for number in numbers)}</div>"


def _render_rate(value: str, unit: str, why: str) -> str:
    hint = escape(why, quote=True)
    # A dash alone is meaningless to a screen reader.
    reason = f"<span class='ss-off-screen'> {escape(why)}</span>" if value == DASH else ""
    return f"<span title='{hint}'><b>{escape(value)}</b> <span>{unit}</span>{reason}</span>"


def _format_percent(share: float) -> str:
    """Return ``39 %``, or ``< 1 %`` for what would round to zero."""
    return f"{100 * share:.0f} %" if share >= 0.005 else "< 1 %"
