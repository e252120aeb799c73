"""The right side of the Studio's head: how fast a plan is and what it costs, or why that is not known."""

from __future__ import annotations

from html import escape

from shardscope_widgets.kit.numbers import dollars, short, three
from shardscope_widgets.kit.words import title
from shardscope_widgets.time.rows import ShownStep
from shardscope_widgets.time.table import MODEL_FLOPS

DASH = "–"


def rates(shown: ShownStep) -> str:
    """Three numbers as HTML; a dash says on hover why there is none."""
    report = shown.report
    if report is None:
        why = shown.refusal
        numbers = [(DASH, unit, why) for unit in ("TFLOP/s per GPU", "tokens/s per GPU", "per M tokens")]
    else:
        cost, gpu = report.cost_per_token, shown.plan.cluster.gpu
        price = (
            f"the price of {title(gpu.name)} is not known"
            if cost is None
            else f"${gpu.price_per_hour_usd or 0:,.2f} an hour for each GPU, read on {gpu.price_date}"
        )
        numbers = [
            (three(report.tflops_per_gpu), "TFLOP/s per GPU", MODEL_FLOPS),
            (short(report.tokens_per_second_per_gpu), "tokens/s per GPU", "predicted"),
            (DASH if cost is None else dollars(1e6 * cost), "per M tokens", price),
        ]
    cells = "".join(
        f"<span title='{escape(why, quote=True)}'><b>{value}</b> {unit}</span>"
        for value, unit, why in numbers
    )
    return f"<div class='ss-rates'>{cells}</div>"
