"""``ScheduleView``: a plan's pipeline schedule, block by block, with the memory of each stage."""

from __future__ import annotations

from html import escape

import shardscope as ss
from shardscope.core.number_format import Scale, format_gib
from shardscope.memory.report import COMPONENTS
from shardscope.prediction.schedule import SIMULATED, PipelineSchedule, compute_schedule
from shardscope.timing.pipeline import NAMES, Schedule, find_schedule
from shardscope.timing.report import format_seconds
from shardscope_widgets.kit import controls
from shardscope_widgets.kit.theme import BLOCK_COLOURS, COMPONENT_COLOURS
from shardscope_widgets.teach.schedule_figure import create_schedule_figure, draw_schedule, mix_with_white
from shardscope_widgets.teach.stepped_view import SteppedView
from shardscope_widgets.teach.teaching_view import render_key, write_heading

NOTES = {
    "forward": "The number is the micro-batch",
    "backward": "With recomputation, if the plan has any",
    "send": "The stage waits for a transfer from or to an adjacent stage",
    "communication": "Collectives that overlap with no arithmetic",
    "bubble": "The stage waits for others",
    "update": "All-gathers and reductions of the training state that overlap with nothing, and the optimizer",
}


class ScheduleView(SteppedView):
    """A plan's pipeline schedule over time, step by step, and the memory of each stage at that moment.

    ``schedule`` shows the same stages under another one, for comparison: ``"gpipe"``, ``"1f1b"`` or
    ``"interleaved"``. A plan without a pipeline shows its micro-batches one after another. The arrow
    keys, Home, End and the space bar walk through it.
    """

    title = "Pipeline schedule"

    def __init__(self, plan: ss.Plan | None = None, *, schedule: Schedule | None = None) -> None:
        self.shown: PipelineSchedule | None = None
        self.key, self.table = controls.create_html(), controls.create_html()
        choice = controls.create_segments([("", None)], "Schedule")
        super().__init__(choice, create_schedule_figure(), self.key, self.table)
        if plan is not None:
            self.show(plan, schedule=schedule)

    def show(self, plan: ss.Plan, *, schedule: Schedule | None = None) -> None:
        """Draw another plan, under its own schedule or under ``schedule``.

        Raises ``ValueError`` for a schedule that the plan's stages cannot run.
        """
        self._check_shown(plan, ss.Plan)
        if schedule is not None:
            compute_schedule(plan, schedule)
        self.plan = plan
        own = find_schedule(plan)
        options = [(NAMES[name], name) for name in _list_schedules(plan)]
        notes = [f"{label}: {'of the plan' if name == own else 'for comparison'}" for label, name in options]
        self._offer(options, schedule or own, notes)
        self._draw_choice()

    def _draw_choice(self) -> None:
        """Draw the plan under the chosen schedule."""
        assert self.plan is not None
        try:
            self.shown = compute_schedule(self.plan, self.choice.value)
        except ValueError as error:  # A figure of the GPU that nobody published.
            self.shown = None
            self._refuse(self.plan, f"The schedule cannot be drawn: {error}")
            return
        self.heading.value = write_heading(self.plan, _write_sentences(self.shown))
        draw_schedule(self.figure, self.shown)
        self.key.value = _render_key(self.shown)
        self.table.value = _render_table(self.shown)


def _list_schedules(plan: ss.Plan) -> list[Schedule]:
    """Return the schedules that the plan's stages can run."""
    names: list[Schedule] = []
    for name in SIMULATED if find_schedule(plan) else ():
        try:
            compute_schedule(plan, name)
        except ValueError:
            continue
        names.append(name)
    return names


def _write_sentences(shown: PipelineSchedule) -> list[str]:
    plan = shown.plan
    count = f"{shown.num_micro_batches:,} micro-batch{'' if shown.num_micro_batches == 1 else 'es'}"
    if shown.schedule is None:
        return [
            f"No pipeline (pp = 1): a rank runs all layers, {count} one after "
            "another, without bubbles and without transfers between stages.",
            f"A step takes {format_seconds(shown.seconds)}.",
        ]
    name = NAMES[shown.schedule]
    chunks = f" in {shown.num_chunks} chunks each" if shown.num_chunks > 1 else ""
    sentences = [
        f"{name[0].upper()}{name[1:]} on {shown.num_stages} stages{chunks}, {count}: "
        f"a step of {format_seconds(shown.seconds)}, of which stage {shown.slowest_stage}, the slowest, "
        f"waits {format_seconds(shown.bubble_seconds)}.",
        _write_formula(shown),
    ]
    if shown.schedule != find_schedule(plan):
        sentences.append("For comparison only: the plan runs another schedule, with the same stages.")
    return sentences


def _write_formula(shown: PipelineSchedule) -> str:
    """Return the bubble's closed formula for equal stages and the bubble of this plan."""
    pp, vpp, number = shown.num_stages, shown.num_chunks, shown.num_micro_batches
    formula, values = "(pp − 1) / micro-batches", f"{pp - 1} / {number}"
    if vpp > 1:
        formula, values = "(pp − 1) / (chunks × micro-batches)", f"{pp - 1} / ({vpp} × {number})"
    share = 100 * (pp - 1) / (vpp * number)
    passes = sum(
        block.seconds
        for block in shown.get_stage(shown.slowest_stage)
        if block.kind in ("forward", "backward", "send")
    )
    own = 100 * shown.bubble_seconds / passes
    # Interleaving needs a micro-batch for each stage: with fewer, stages wait between a micro-batch's chunks.
    few = vpp > 1 and number < pp
    condition = "With equal stages" + (f" and at least {pp} micro-batches" if few else "")
    why = "there are fewer micro-batches than stages" if few else "stages are not equal"
    here = "" if abs(own - share) < 0.5 else f"; here it is {own:.0f} %, because {why}"
    return (
        f"{condition}, the bubble is {formula} = {values} = {share:.0f} % of a stage's passes "
        f"(Narayanan et al. 2021, section 2.2){here}."
    )


def _render_key(shown: PipelineSchedule) -> str:
    kinds = [kind for kind in NOTES if any(block.kind == kind for block in shown.blocks)]
    entries = []
    for kind in kinds:
        colour = BLOCK_COLOURS[kind]
        background = (
            f"repeating-linear-gradient(135deg,{colour} 0 2px,transparent 2px 5px)"
            if kind == "bubble"
            else colour
        )
        if shown.num_chunks > 1 and kind in ("forward", "backward"):
            background = f"linear-gradient(90deg,{mix_with_white(colour, 0.6)},{colour})"
        entries.append((background, kind, NOTES[kind]))
    if shown.num_chunks > 1:
        entries.append(("none", "pale: the first chunk", ""))
    sizes = [
        stage.at(phase).components
        for stage in shown.plan.memory().by_stage
        for phase in ("backward", "optimizer")
    ]
    memory = [
        (COMPONENT_COLOURS[name], name.replace("_", " "), "")
        for name in COMPONENTS
        if any(parts[name] for parts in sizes)
    ]
    return render_key(entries) + render_key(memory)


def _render_table(shown: PipelineSchedule) -> str:
    if shown.num_stages == 1:
        return ""
    stages = shown.plan.memory().by_stage
    waits = [
        sum(block.seconds for block in shown.get_stage(stage) if block.kind == "bubble")
        for stage in range(shown.num_stages)
    ]
    scale = Scale.for_column(waits)
    rows = "".join(
        f"<tr><th scope='row'>{stage}</th><td>{stages[stage].num_layers}</td>"
        f"<td>{scale.format(waits[stage])}</td>"
        f"<td>{shown.most_in_flight[stage]}</td><td>{format_gib(stages[stage].peak_bytes)}</td></tr>"
        for stage in range(shown.num_stages)
    )
    held = "chunks" if shown.num_chunks > 1 else "micro-batches"
    own = shown.schedule == find_schedule(shown.plan)
    note = "" if own else ", under the plan's own schedule"
    return (
        "<div class='ss-scroll' tabindex='0' role='group' aria-label='Memory of the stages'>"
        f"<table class='ss-table'><thead><tr><th scope='col'>stage</th><th scope='col'>layers</th>"
        f"<th scope='col'>waits, {scale.unit}</th><th scope='col'>most {held} in flight</th>"
        f"<th scope='col'>peak memory, GiB{escape(note)}</th></tr></thead><tbody>{rows}</tbody></table></div>"
    )
