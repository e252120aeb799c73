"""The numbers in the Studio's header: a plan's rate and cost, or why they are unknown."""

from __future__ import annotations

from html import escape

from shardscope_widgets.kit.numbers import format_dollars, format_short
from shardscope_widgets.time.rows import ShownStep
from shardscope_widgets.time.table import MODEL_FLOPS, describe_price

DASH = "–"
UNITS = ("tokens/s per GPU", "MFU", "per M tokens")


def render_rates(shown: ShownStep) -> str:
    """Return three numbers as HTML, each below its unit; a dash has the reason for a missing number."""
    report, reason = shown.report, shown.step.why_no_rates
    if report is None or reason:
        numbers = [(DASH, unit, reason) for unit in UNITS]
    else:
        cost, mfu = report.cost_per_token, report.mfu
        share = DASH if mfu is None else _format_percent(mfu)
        why_mfu = "the GPU's peak in this precision is unknown" if mfu is None else MODEL_FLOPS
        numbers = [
            (format_short(report.tokens_per_second_per_gpu), UNITS[0], "predicted"),
            (share, UNITS[1], why_mfu),
            (DASH if cost is None else format_dollars(1e6 * cost), UNITS[2], describe_price(shown)),
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
