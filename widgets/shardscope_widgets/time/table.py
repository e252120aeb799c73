"""Text of the time view: rates with their conventions, every part with its formula, every collective."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from html import escape
from typing import NamedTuple

from shardscope.core.number_format import gib
from shardscope.timing.report import PARTS, StepReport
from shardscope_widgets.kit.numbers import Scale, dollars, short, three
from shardscope_widgets.kit.part_table import NOT_REPORTED, Column, PartRow, part_table, signed
from shardscope_widgets.kit.theme import PART_COLOURS, PART_PATTERNS, PATTERN_CLASSES
from shardscope_widgets.kit.words import device_count, title
from shardscope_widgets.time.rows import PlanStep, ShownStep, residual_words

MODEL_FLOPS = "model FLOPs: causal attention, no recomputation"
FULL_ATTENTION = "model FLOPs where attention counts every key, as Megatron's and PaLM's papers do"
HARDWARE = "all FLOPs that a GPU executes, recomputed ones included"
KWH_JOULES = 3.6e6


def caption(shown: ShownStep) -> str:
    """Return the caption of the chart: tokens, GPUs, the constants; or why there is no prediction."""
    report = shown.report
    if report is None:
        return f"<span class='ss-error' role='alert'>{escape(shown.refusal)}</span>"
    plan = shown.plan
    stages = f", the slowest of {plan.degrees.pp} pipeline stages" if plan.degrees.pp > 1 else ""
    batches = plan.num_micro_batches
    whole = f"one optimizer step of {report.num_tokens:,} tokens on {device_count(plan.cluster)}{stages}"
    whole += f", {batches:,} micro-batch{'es' if batches > 1 else ''} a rank"
    return " · ".join(escape(each) for each in (whole, report.calibration, residual_words(plan)) if each)


class Rate(NamedTuple):
    """A number derived from the seconds of a step."""

    name: str
    words: Callable[[float], str]
    of: Callable[[StepReport], float | None]
    why: str
    unknown: str = ""
    """Why it may be unknown."""


def _rates(shown: ShownStep) -> list[Rate]:
    report = shown.report
    peak = None if report is None or report.peak_flops is None else report.peak_flops / 1e12
    against = "" if peak is None else f", of the datasheet's {three(peak)} TFLOP/s"
    gpu = title(shown.plan.cluster.gpu.name)
    convention = f"MFU and TFLOP/s count {MODEL_FLOPS}{against} (Chowdhery et al. 2022, appendix B)."
    others = ""
    if report is not None:
        others = (
            f" TFLOP/s, full attention: {three(report.tflops_per_gpu_full_attention)}, {FULL_ATTENTION}."
            f" TFLOP/s, hardware: {three(report.hardware_tflops_per_gpu)}, {HARDWARE}."
        )
    return [
        Rate("tokens/s", short, lambda r: r.tokens_per_second, "All GPUs together."),
        Rate("tokens/s per GPU", short, lambda r: r.tokens_per_second_per_gpu, "Of one GPU."),
        Rate(
            "MFU, %",
            three,
            lambda r: None if r.mfu is None else 100 * r.mfu,
            convention,
            "The GPU's peak in this precision is not known.",
        ),
        Rate("TFLOP/s per GPU", three, lambda r: r.tflops_per_gpu, convention + others),
        Rate(
            "$ per M tokens",
            dollars,
            lambda r: None if r.cost_per_token is None else 1e6 * r.cost_per_token,
            price_words(shown) + ".",
            f"The price of {gpu} is not known.",
        ),
        Rate(
            "kWh per M tokens",
            three,
            lambda r: None if r.joules_per_token is None else 1e6 * r.joules_per_token / KWH_JOULES,
            "The GPUs at their power limit.",
            f"The power limit of {gpu} is not known.",
        ),
    ]


def price_words(shown: ShownStep) -> str:
    """Return the price on which dollar amounts are based, or that it is unknown."""
    gpu = shown.plan.cluster.gpu
    if gpu.price_per_hour_usd is None:
        return f"the price of {title(gpu.name)} is not known"
    return f"${gpu.price_per_hour_usd:,.2f} an hour for each GPU, read on {gpu.price_date}"


def rate_table(shown: ShownStep) -> str:
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
        columns += Column.of_pin(index, pin.name)
    # A plan that does not fit keeps its seconds: the chart shows their parts.
    seconds = Rate(f"one step, {shown.scale.unit}", shown.scale.show, lambda r: r.seconds, _step_words(shown))
    rows = [_rate_row(shown, seconds, even_if_it_lacks=True)]
    rows += [_rate_row(shown, rate) for rate in _rates(shown)]
    return part_table("rates and prices", columns, rows)


def _step_words(shown: ShownStep) -> str:
    words = "The sum of the parts below."
    if shown.step.lacks:
        words = f"{shown.step.lacks} Its seconds are those of a GPU with enough memory."
    if shown.measured:
        words += f" Measured: the median of {shown.measured.num_steps:,} steps."
    return words


def _rate_row(shown: ShownStep, rate: Rate, even_if_it_lacks: bool = False) -> PartRow:
    def value(step: PlanStep) -> float | None:
        if step.report is None or (step.lacks and not even_if_it_lacks):
            return None
        return rate.of(step.report)

    def cell(step: PlanStep) -> str | tuple[str, str]:
        amount = value(step)
        return rate.words(amount) if amount is not None else (NOT_REPORTED, step.why_no_rates or rate.unknown)

    here = value(shown.step)
    cells = [cell(shown.step), _measured_cell(shown, rate)]
    for pin in shown.pins:
        there = value(pin.step)
        cells.append(cell(pin.step))
        if here is None or there is None:
            cells.append("")
        else:
            cells.append(signed(here - there, rate.words(abs(here - there))))
    why = rate.why if here is not None else shown.step.why_no_rates or rate.unknown
    return PartRow(rate.name, rate.name, cells, f"<p>{escape(why)}</p>")


def _words_or_dash(value: float | None, rate: Rate) -> str:
    return NOT_REPORTED if value is None else rate.words(value)


def _measured_cell(shown: ShownStep, rate: Rate) -> str:
    """Return the rate at the measured seconds: a finished run did fit."""
    measured, report = shown.measured, shown.report
    if measured is None:
        return ""
    if report is None:
        return rate.words(measured.seconds) if rate.words == shown.scale.show else NOT_REPORTED
    # The parts contain all seconds of the report: scaled, they sum to the measured step.
    factor = measured.seconds / report.seconds
    scaled = replace(report, parts={name: seconds * factor for name, seconds in report.parts.items()})
    return _words_or_dash(rate.of(scaled), rate)


def part_rows(shown: ShownStep) -> str:
    """Return the table of parts: exposed seconds, their share, overlapped seconds, and the pinned plans."""
    report = shown.report
    if report is None:
        return ""
    scale = shown.scale
    pinned = [pin for pin in shown.pins if pin.step.report is not None]
    reports = [report, *(pin.step.report for pin in pinned if pin.step.report is not None)]
    busy = [name for name in PARTS if any(one.parts[name] or one.hidden[name] for one in reports)]
    busy.sort(key=lambda name: -report.parts[name])
    idle = [name.replace("_", " ") for name in PARTS if name not in busy]
    columns = [
        Column("exposed", "the step waits for it"),
        Column("share", "of the step"),
        Column("overlapped", "with arithmetic: the step does not wait for it"),
    ]
    for pin in pinned:
        number, difference = Column.of_pin(shown.pins.index(pin), pin.name)
        columns += [number._replace(unpin=None), difference]
    rows = []
    for name in busy:
        here = report.parts[name]
        cells = [scale.show(here), f"{100 * here / report.seconds:.0f} %", scale.show(report.hidden[name])]
        for one in reports[1:]:
            there = one.parts[name]
            cells += [scale.show(there), signed(here - there, scale.show(abs(here - there)))]
        why = report.explain(name).partition(" = ")[2] or "no time in this plan"
        rows.append(PartRow(name, name.replace("_", " "), cells, f"<p>{escape(why)}</p>", swatch(name)))
    nothing = f"<div class='ss-hint'>No time goes to {', '.join(idle)}.</div>" if idle else ""
    return f"{part_table(f'{scale.unit}, of one step', columns, rows)}{nothing}{_collectives(report, scale)}"


def swatch(name: str) -> str:
    """Return the part's colour and pattern as in the chart."""
    pattern = PATTERN_CLASSES.get(PART_PATTERNS.get(name, ""), "")
    return f"<i class='ss-mark {pattern}' style='background-color:{PART_COLOURS[name]}'></i>"


def _collectives(report: StepReport, scale: Scale) -> str:
    """Return the table of collectives: bytes, link, seconds, exposed seconds, with their staging copies."""
    if not report.sent:
        return ""
    rows = [
        _sent_row(
            call.part,
            call.collective.replace("_", "-"),
            (f"{call.ranks:,}", title(call.link), gib(call.num_bytes)),
            (scale.show(call.seconds), scale.show(call.exposed_seconds)),
        )
        for call in report.sent
    ]
    for part, seconds in report.staged.items():
        copied = _sent_row(part, "copies", ("–", "its own memory", "–"), 2 * (scale.show(seconds),))
        last = max(index for index, call in enumerate(report.sent) if call.part == part)
        rows[last] += copied
    return (
        "<h2>Communication <span class='ss-hint'>of one rank in one step, with its staging copies; "
        "exposed times add up to the parts above</span></h2>"
        "<div class='ss-scroll' tabindex='0'><table class='ss-table'><thead><tr><th>for</th>"
        "<th class='ss-text'>collective</th><th>ranks</th><th class='ss-text'>over</th><th>GiB</th>"
        f"<th>takes, {scale.unit}</th><th>exposed, {scale.unit}</th></tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _sent_row(part: str, what: str, how: tuple[str, str, str], times: tuple[str, ...]) -> str:
    ranks, over, moved = how
    return (
        f"<tr><td>{escape(part.replace('_', ' '))}</td><td class='ss-text'>{escape(what)}</td>"
        f"<td>{ranks}</td>"
        f"<td class='ss-text'>{escape(over)}</td><td>{moved}</td>"
        + "".join(f"<td>{time}</td>" for time in times)
        + "</tr>"
    )
