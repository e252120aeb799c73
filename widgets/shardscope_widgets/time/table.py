"""The step chart in words: rates with their conventions, every part with its formula, every collective."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from html import escape

from shardscope.memory.words import gib
from shardscope.timing.report import PARTS, StepReport
from shardscope_widgets.kit.numbers import Scale, dollars, short, three
from shardscope_widgets.kit.theme import PART_COLOURS, PART_PATTERNS, PATTERN_CLASSES
from shardscope_widgets.kit.words import device_count, title
from shardscope_widgets.time.rows import ShownStep, residual_words

MODEL_FLOPS = "model FLOPs: causal attention, no recomputation"
FULL_ATTENTION = "model FLOPs where attention counts every key, as Megatron's and PaLM's papers do"
HARDWARE = "all FLOPs that a GPU executes, recomputed ones included"
KWH_JOULES = 3.6e6


def caption(shown: ShownStep) -> str:
    """Under the chart: which stage, which constants; or why there is no prediction."""
    report = shown.report
    if report is None:
        return f"<span class='ss-error' role='alert'>{escape(shown.refusal)}</span>"
    plan = shown.plan
    stages = f", the slowest of {plan.degrees.pp} pipeline stages" if plan.degrees.pp > 1 else ""
    batches = plan.num_micro_batches
    whole = f"one optimizer step of {report.num_tokens:,} tokens on {device_count(plan.cluster)}{stages}"
    whole += f", {batches:,} micro-batch{'es' if batches > 1 else ''} a rank"
    return " · ".join(escape(each) for each in (whole, report.calibration, residual_words(plan)) if each)


def figures(shown: ShownStep) -> str:
    """Rates and prices: each says on hover what it counts; a dash says why there is no number."""
    report = shown.report
    if report is None:
        return ""
    peak = None if report.peak_flops is None else report.peak_flops / 1e12
    against = "" if peak is None else f", of the datasheet's {three(peak)} TFLOP/s"
    gpu = shown.plan.cluster.gpu
    no_price = f"the price of {title(gpu.name)} is not known"
    no_watts = f"the power limit of {title(gpu.name)} is not known"
    cost, joules, mfu = report.cost_per_token, report.joules_per_token, report.mfu
    return _grid(
        [
            ("tokens/s", short(report.tokens_per_second), "all GPUs together"),
            ("tokens/s per GPU", short(report.tokens_per_second_per_gpu), "of one GPU"),
            (
                "$ per M tokens",
                _or(cost, lambda c: dollars(1e6 * c)),
                _or_words(cost, _price(shown), no_price),
            ),
            (
                "kWh per M tokens",
                _or(joules, lambda j: three(1e6 * j / KWH_JOULES)),
                _or_words(joules, "the GPUs at their power limit", no_watts),
            ),
            ("TFLOP/s per GPU", three(report.tflops_per_gpu), MODEL_FLOPS),
            (
                "MFU",
                _or(mfu, lambda share: f"{three(100 * share)} %"),
                _or_words(mfu, MODEL_FLOPS + against, "the GPU's peak in this precision is not known"),
            ),
            ("TFLOP/s, full attention", three(report.tflops_per_gpu_full_attention), FULL_ATTENTION),
            ("TFLOP/s, hardware", three(report.hardware_tflops_per_gpu), HARDWARE),
        ]
    ) + (
        f"<div class='ss-hint'>MFU and TFLOP/s count {MODEL_FLOPS}{against} "
        "(Chowdhery et al. 2022, appendix B).</div>"
    )


def _price(shown: ShownStep) -> str:
    gpu = shown.plan.cluster.gpu
    if gpu.price_per_hour_usd is None:
        return ""
    return f"${gpu.price_per_hour_usd:,.2f} an hour for each GPU, read on {gpu.price_date}"


def _or(value: float | None, words: Callable[[float], str]) -> str:
    return "–" if value is None else words(value)


def _or_words(value: float | None, known: str, unknown: str) -> str:
    return unknown if value is None else known


def _grid(entries: Iterable[tuple[str, str, str]]) -> str:
    cells = "".join(
        f"<div title='{escape(why, quote=True)}'><b>{escape(value)}</b> <span>{escape(name)}</span></div>"
        for name, value, why in entries
    )
    return f"<div class='ss-figures'>{cells}</div>"


def table(shown: ShownStep) -> str:
    """Every part with its time, share and what is hidden of it; opening a row explains it."""
    report = shown.report
    if report is None:
        return ""
    scale = shown.scale
    busy = [name for name in PARTS if report.parts[name] or report.hidden[name]]
    idle = [name.replace("_", " ") for name in PARTS if name not in busy]
    rows = "".join(_row(report, name, scale) for name in busy)
    nothing = f"<div class='ss-hint'>No time goes to {', '.join(idle)}.</div>" if idle else ""
    return (
        "<h2>One step <span class='ss-hint'>open a row for its formula</span></h2>"
        "<div class='ss-legend ss-tiers' style='--ss-columns:3'>"
        f"<div class='ss-titles'><i></i><span>{scale.unit}</span><em>exposed</em><em>share</em>"
        f"<em>hidden</em></div>{rows}</div>{nothing}{_collectives(report, scale)}"
    )


def _row(report: StepReport, name: str, scale: Scale) -> str:
    exposed, hidden = report.parts[name], report.hidden[name]
    why = report.explain(name).partition(" = ")[2]
    numbers = f"<em>{scale.show(exposed)}</em><em>{100 * exposed / report.seconds:.0f} %</em>"
    numbers += f"<em>{scale.show(hidden)}</em>"
    return (
        f"<details name='ss-step-why'><summary>{swatch(name)}<span>{name.replace('_', ' ')}</span>"
        f"{numbers}</summary><p>{escape(why)}</p></details>"
    )


def swatch(name: str) -> str:
    """The part's colour and pattern, as the chart has them."""
    pattern = PATTERN_CLASSES.get(PART_PATTERNS.get(name, ""), "")
    return f"<i class='{pattern}' style='background-color:{PART_COLOURS[name]}'></i>"


def _collectives(report: StepReport, scale: Scale) -> str:
    """What is sent, over which link, and how much of it the step waits for; and the copies made for it."""
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
        "<h2>What is sent <span class='ss-hint'>in one step, by one rank, with the copies made for it; "
        "what is exposed adds up to the parts above</span></h2>"
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
