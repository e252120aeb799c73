"""Text of the time view: rates with their conventions, every part with its formula, every collective."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from html import escape
from typing import NamedTuple

from shardscope.core.cluster import name_device
from shardscope.core.number_format import Scale, format_gib
from shardscope.timing.report import PARTS, StepReport, format_part
from shardscope_widgets.kit.display_names import count_devices, format_name, name_rate_unit
from shardscope_widgets.kit.numbers import format_dollars, format_short, format_three_digits
from shardscope_widgets.kit.part_table import NOT_REPORTED, Column, PartRow, add_sign, render_part_table
from shardscope_widgets.kit.theme import PART_COLOURS, PART_PATTERNS, PATTERN_CLASSES
from shardscope_widgets.time.rows import PlanStep, ShownStep, describe_residual

MODEL_FLOPS = "model FLOPs: causal attention, no recomputation"
FULL_ATTENTION = "model FLOPs where attention counts every key, as Megatron's and PaLM's papers do"
HARDWARE = "all FLOPs that are executed, recomputed ones included"
KWH_JOULES = 3.6e6


def write_caption(shown: ShownStep, calibrate_button: str = "") -> str:
    """Return the caption of the chart: tokens, GPUs, the constants; or why there is no prediction.

    ``calibrate_button`` is the label of the button that measures this machine, if it is shown.
    """
    report = shown.report
    if report is None:
        refusal = shown.refusal
        if shown.step.is_uncalibrated and calibrate_button:
            refusal += f' Press "{calibrate_button}".'
        elif shown.step.is_uncalibrated:
            refusal += " ss.calibrate() on such a machine measures them."
        return f"<span class='ss-error' role='alert'>{escape(refusal)}</span>"
    plan = shown.plan
    stages = f", the slowest of {plan.degrees.pp} pipeline stages" if plan.degrees.pp > 1 else ""
    batches = plan.num_micro_batches
    summary = f"one optimizer step of {report.num_tokens:,} tokens on {count_devices(plan.cluster)}{stages}"
    summary += f", {batches:,} micro-batch{'es' if batches > 1 else ''} per rank"
    return " · ".join(escape(part) for part in (summary, report.calibration, describe_residual(plan)) if part)


class Rate(NamedTuple):
    """A number derived from the seconds of a step."""

    name: str
    format: Callable[[float], str]
    compute: Callable[[StepReport], float | None]
    why: str
    unknown: str = ""
    """Why it may be unknown."""
    is_step_time: bool = False
    """Whether it is the step time itself: a plan that does not fit keeps it, because the chart shows its
    parts, and a measured run has it even if there is no prediction."""


def _list_rates(shown: ShownStep) -> list[Rate]:
    report = shown.report
    peak = None if report is None or report.peak_flops is None else report.peak_flops / 1e12
    against = "" if peak is None else f", of the datasheet's {format_three_digits(peak)} TFLOP/s"
    cluster = shown.plan.cluster
    gpu, device, unit = format_name(cluster.gpu.name), name_device(cluster), name_rate_unit(cluster)
    convention = f"MFU and TFLOP/s count {MODEL_FLOPS}{against} (Chowdhery et al. 2022, appendix B)."
    # Publications count attention and recomputation in three ways: the row gives all, to be compared with
    # any.
    other_conventions = ""
    if report is not None:
        full_attention = format_three_digits(report.tflops_per_gpu_full_attention)
        hardware = format_three_digits(report.hardware_tflops_per_gpu)
        other_conventions = (
            f" TFLOP/s, full attention: {full_attention}, {FULL_ATTENTION}."
            f" TFLOP/s, hardware: {hardware}, {HARDWARE}."
        )
    return [
        Rate("tokens/s", format_short, lambda r: r.tokens_per_second, f"Of all {device}s together."),
        Rate(
            f"tokens/s per {unit}", format_short, lambda r: r.tokens_per_second_per_gpu, f"Of each {device}."
        ),
        Rate(
            "MFU, %",
            format_three_digits,
            lambda r: None if r.mfu is None else 100 * r.mfu,
            convention,
            "The peak FLOP/s in this precision are unknown.",
        ),
        Rate(
            f"TFLOP/s per {unit}",
            format_three_digits,
            lambda r: r.tflops_per_gpu,
            convention + other_conventions,
        ),
        Rate(
            "$ per M tokens",
            format_dollars,
            lambda r: None if r.cost_per_token is None else 1e6 * r.cost_per_token,
            describe_price(shown) + ".",
            f"The price of {gpu} is unknown.",
        ),
        Rate(
            "kWh per M tokens",
            format_three_digits,
            lambda r: None if r.joules_per_token is None else 1e6 * r.joules_per_token / KWH_JOULES,
            f"If each {device} draws its power limit.",
            f"The power limit of {gpu} is unknown.",
        ),
    ]


def describe_price(shown: ShownStep) -> str:
    """Return the price on which dollar amounts are based, or that it is unknown."""
    gpu = shown.plan.cluster.gpu
    if gpu.price_per_hour_usd is None:
        return f"the price of {format_name(gpu.name)} is unknown"
    return f"${gpu.price_per_hour_usd:,.2f} per GPU-hour (list price of {gpu.price_date})"


def render_rate_table(shown: ShownStep) -> str:
    """Return seconds, rates and prices: predicted, measured, and of each pinned plan with the difference.

    A plan that does not fit has no rates: a dash, with the reason in the expanded row.
    """
    if shown.report is None and shown.measured is None and not shown.pins:
        return ""
    columns = [
        Column("predicted", shown.step.why_no_rates),
        Column("measured", is_empty=shown.measured is None),
    ]
    for index, pin in enumerate(shown.pins):
        columns += Column.for_pin(index, pin.name)
    step_time = Rate(
        f"one step, {shown.scale.unit}",
        shown.scale.format,
        lambda r: r.seconds,
        _describe_step(shown),
        is_step_time=True,
    )
    rows = [_build_rate_row(shown, rate) for rate in (step_time, *_list_rates(shown))]
    return render_part_table("rates and prices", columns, rows)


def _describe_step(shown: ShownStep) -> str:
    sentences = "The sum of the parts below."
    if shown.step.lacks:
        device = name_device(shown.plan.cluster)
        sentences = f"{shown.step.lacks} Its seconds are those of a {device} with enough memory."
    if shown.measured:
        sentences += f" Measured: the median of {shown.measured.num_steps:,} steps."
    return sentences


def _build_rate_row(shown: ShownStep, rate: Rate) -> PartRow:
    def compute_value(step: PlanStep) -> float | None:
        # A rate or a price of a plan that runs out of memory would be misleading.
        if step.report is None or (step.lacks and not rate.is_step_time):
            return None
        return rate.compute(step.report)

    def format_cell(step: PlanStep) -> str | tuple[str, str]:
        amount = compute_value(step)
        return (
            rate.format(amount) if amount is not None else (NOT_REPORTED, step.why_no_rates or rate.unknown)
        )

    current = compute_value(shown.step)
    cells = [format_cell(shown.step), _format_measured(shown, rate)]
    for pin in shown.pins:
        pinned = compute_value(pin.step)
        cells.append(format_cell(pin.step))
        if current is None or pinned is None:
            cells.append("")
        else:
            cells.append(add_sign(current - pinned, rate.format(abs(current - pinned))))
    why = rate.why if current is not None else shown.step.why_no_rates or rate.unknown
    return PartRow(rate.name, rate.name, cells, f"<p>{escape(why)}</p>")


def _format_or_dash(value: float | None, rate: Rate) -> str:
    return NOT_REPORTED if value is None else rate.format(value)


def _format_measured(shown: ShownStep, rate: Rate) -> str:
    """Return the rate at the measured seconds: a finished run did fit."""
    measured, report = shown.measured, shown.report
    if measured is None:
        return ""
    if report is None:
        return rate.format(measured.seconds) if rate.is_step_time else NOT_REPORTED
    # The parts contain all seconds of the report: scaled, they sum to the measured step.
    factor = measured.seconds / report.seconds
    scaled = replace(report, parts={name: seconds * factor for name, seconds in report.parts.items()})
    return _format_or_dash(rate.compute(scaled), rate)


def render_part_rows(shown: ShownStep) -> str:
    """Return the table of parts: exposed seconds, their share, overlapped seconds, and the pinned plans."""
    report = shown.report
    if report is None:
        return ""
    scale = shown.scale
    pinned = [pin for pin in shown.pins if pin.step.report is not None]
    reports = [report, *(pin.step.report for pin in pinned if pin.step.report is not None)]
    # A part that only a pinned plan has keeps its row, for the comparison.
    busy = [name for name in PARTS if any(other.parts[name] or other.hidden[name] for other in reports)]
    busy.sort(key=lambda name: -report.parts[name])
    idle = [format_part(name) for name in PARTS if name not in busy]
    columns = [
        Column("exposed", "the step waits for it"),
        Column("share", "of the step"),
        Column("overlapped", "runs during compute: the step does not wait for it"),
    ]
    for pin in pinned:
        number, difference = Column.for_pin(shown.pins.index(pin), pin.name)
        # Unpin buttons are in the table of rates above.
        columns += [number._replace(unpin=None), difference]
    rows = []
    for name in busy:
        current = report.parts[name]
        cells = [
            scale.format(current),
            f"{100 * current / report.seconds:.0f} %",
            scale.format(report.hidden[name]),
        ]
        for other in reports[1:]:
            seconds = other.parts[name]
            cells += [
                scale.format(seconds),
                add_sign(current - seconds, scale.format(abs(current - seconds))),
            ]
        # "name = formula"; the row already shows the name.
        why = report.explain(name, scale).partition(" = ")[2] or "no time in this plan"
        rows.append(PartRow(name, format_part(name), cells, f"<p>{escape(why)}</p>", render_swatch(name)))
    nothing = f"<div class='ss-hint'>No time in this plan: {', '.join(idle)}.</div>" if idle else ""
    table = render_part_table(f"{scale.unit}, of one step", columns, rows)
    return f"{table}{nothing}{_render_collectives(report, scale)}"


def render_swatch(name: str) -> str:
    """Return the part's colour and pattern as in the chart."""
    pattern = PATTERN_CLASSES.get(PART_PATTERNS.get(name, ""), "")
    return f"<i class='ss-mark {pattern}' style='background-color:{PART_COLOURS[name]}'></i>"


def _render_collectives(report: StepReport, scale: Scale) -> str:
    """Return the table of collectives: bytes, link, seconds, exposed seconds, with their staging copies."""
    if not report.sent:
        return ""
    rows = [
        _render_collective(
            call.part,
            call.collective.replace("_", "-"),
            (f"{call.ranks:,}", format_name(call.link), format_gib(call.num_bytes)),
            (scale.format(call.seconds), scale.format(call.exposed_seconds)),
        )
        for call in report.sent
    ]
    # Without the copies, the exposed times would not add up to the parts.
    for part, seconds in report.staged.items():
        copied = _render_collective(
            part, "staging copies", ("–", "device memory", "–"), 2 * (scale.format(seconds),)
        )
        # Copies stand below the last collective of their part: its exposed times add up to the part's.
        last = max((index for index, call in enumerate(report.sent) if call.part == part), default=-1)
        rows[last] += copied
    return (
        "<h2>Communication <span class='ss-hint'>per rank and step; the exposed times "
        "add up to the parts above</span></h2>"
        "<div class='ss-scroll' tabindex='0' role='group' aria-label='Communication'>"
        "<table class='ss-table'><thead><tr><th>part</th>"
        "<th class='ss-text'>collective</th><th>ranks</th><th class='ss-text'>link</th><th>GiB</th>"
        f"<th>time, {scale.unit}</th><th>exposed, {scale.unit}</th></tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _render_collective(part: str, what: str, how: tuple[str, str, str], times: tuple[str, ...]) -> str:
    ranks, over, moved = how
    return (
        f"<tr><td>{escape(format_part(part))}</td><td class='ss-text'>{escape(what)}</td>"
        f"<td>{ranks}</td>"
        f"<td class='ss-text'>{escape(over)}</td><td>{moved}</td>"
        + "".join(f"<td>{time}</td>" for time in times)
        + "</tr>"
    )
