"""``GuidedView``: a plan's memory or time view, with steps that say what changes and what to watch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from html import escape
from typing import Literal, NamedTuple

import ipywidgets as widgets

import shardscope as ss
from shardscope.catalog import links
from shardscope.core.errors import check_choice
from shardscope.timing.report import format_part, format_seconds
from shardscope_widgets.kit import controls
from shardscope_widgets.kit.numbers import format_size
from shardscope_widgets.memory.view import MemoryView
from shardscope_widgets.teach.stepped_chart import Frame, SteppedChart
from shardscope_widgets.teach.teaching_view import TeachingView, write_heading
from shardscope_widgets.time.view import StepView

Topic = Literal["memory", "time"]
TOPICS: tuple[Topic, ...] = ("memory", "time")
STATE = ("parameters", "gradients", "optimizer")
SLOW_LINK = "pcie-4-x16"


class GuideStep(NamedTuple):
    """One change of the plan, and what it does."""

    plan: ss.Plan
    words: str


class GuidedView(TeachingView):
    """A plan's memory (``topic="memory"``) or its step time (``"time"``), change by change.

    Each step changes one thing of the plan and says in a sentence what to watch; the plan itself stays pinned
    beside it. The arrow keys, Home and End walk through the steps. Changes that the plan cannot have are left
    out.
    """

    title = "Guided steps"

    def __init__(self, plan: ss.Plan | None = None, topic: Topic = "memory") -> None:
        self.topic = check_choice("topic", topic, TOPICS)
        self.heading = controls.create_html()
        self.steps: list[GuideStep] = []
        self.stepper = SteppedChart()
        self.stepper.label = ""  # It has steps, and draws nothing.
        self.stepper._config = {"displayModeBar": False, "responsive": True}
        self.stepper.observe(self._show_step, "step")
        # Without a kernel nothing could follow these steps: exports have the sentence alone.
        guide = widgets.Box([self.stepper], layout=controls.share_layout())
        guide.add_class("ss-guide")
        self.words = controls.create_html("", "ss-guide-words")
        self.view: MemoryView | StepView = MemoryView() if topic == "memory" else StepView()
        super().__init__(self.heading, guide, self.words, self.view)
        if plan is not None:
            self.show(plan)

    @property
    def step(self) -> int:
        """Index of the shown step; set it to go to another."""
        return int(self.stepper.step)

    @step.setter
    def step(self, step: int) -> None:
        self.stepper.step = step

    def show(self, plan: ss.Plan) -> None:
        """Start with another plan."""
        self._check_shown(plan, ss.Plan)
        self.plan = plan
        self.heading.value = write_heading(plan, [])
        try:
            list_steps = _list_memory_steps if self.topic == "memory" else _list_time_steps
            self.steps = list(list_steps(plan))
        except ValueError as error:  # A figure of the GPU that nobody published.
            self.steps = [GuideStep(plan, f"There are no steps: {error}")]
        self.stepper.draw_steps([], {"height": 10}, [Frame(step.words) for step in self.steps])
        self.view.pins = ()
        self._show_step(None)

    def _show_step(self, _: object) -> None:
        if not self.steps or self.plan is None:
            return
        shown = self.steps[self.step]
        self.words.value = f"<p data-said='step'>{escape(shown.words)}</p>"
        self.view.show(shown.plan)
        # The plan itself, for comparison with what was changed.
        self.view.pins = () if shown.plan == self.plan else (self.plan,)
        self.view.show(shown.plan)


def _change_recipe(plan: ss.Plan, **changes: object) -> Callable[[], ss.Plan]:
    return lambda: replace(plan, recipe=replace(plan.recipe, **changes))  # type: ignore[arg-type]


def _change_sharding(plan: ss.Plan) -> tuple[str, Callable[[], ss.Plan]]:
    whole = ss.Layout.ddp()
    if plan.layout == whole:
        return "Shard everything: FSDP2", lambda: replace(plan, layout=ss.Layout.fsdp2())
    return "Shard nothing: DDP", lambda: replace(plan, layout=whole)


def _try_changes(
    changes: Sequence[tuple[str, Callable[[], ss.Plan]]],
) -> Iterator[tuple[str, ss.Plan]]:
    """Yield the changes that the plan can have."""
    for text, make in changes:
        try:
            yield text, make()
        except ValueError:
            continue


def _list_memory_steps(plan: ss.Plan) -> Iterator[GuideStep]:
    recipe, before = plan.recipe, plan.memory().components
    largest = max(before, key=lambda name: before[name])
    total = format_size(sum(before.values()))
    yield GuideStep(
        plan,
        f"This is the plan. At its peak a rank has {total}; watch the longest part, "
        f"{largest.replace('_', ' ')} with {format_size(before[largest])}.",
    )
    again = "none" if recipe.recompute == "full" else "full"
    recomputed = (
        "Keep all activations instead of recomputing them"
        if again == "none"
        else "Recompute every layer in backward"
    )
    changes = [
        (
            "Take micro-batches twice as large",
            _change_recipe(
                plan,
                micro_batch_size=2 * recipe.micro_batch_size,
                global_batch_size=2 * recipe.global_batch_size,
            ),
        ),
        ("Take sequences twice as long", _change_recipe(plan, seq_len=2 * recipe.seq_len)),
        (recomputed, _change_recipe(plan, recompute=again)),
        _change_sharding(plan),
        ("Train adapters only (LoRA)", _change_recipe(plan, method="lora")),
        ("Keep the optimizer state in 8 bits", _change_recipe(plan, optimizer="adamw_8bit")),
    ]
    for text, changed in _try_changes(changes):
        after = changed.memory().components
        yield GuideStep(changed, f"{text}. {_compare_bytes(before, after)}")


def _compare_bytes(before: Mapping[str, int], after: Mapping[str, int]) -> str:
    """Return the components that a change moves most, and whether the state moves with them."""
    moved = sorted(before, key=lambda name: -abs(after[name] - before[name]))
    names = [name for name in moved if abs(after[name] - before[name]) > 0.02 * max(before.values())][:3]
    if not names:
        return "Watch: nothing changes at the peak."
    watched = ", ".join(
        f"{name.replace('_', ' ')} {format_size(before[name])} → {format_size(after[name])}" for name in names
    )
    stays = "" if set(names) & set(STATE) else "; parameters, gradients and optimizer state stay"
    return f"Watch {watched}{stays}."


def _list_time_steps(plan: ss.Plan) -> Iterator[GuideStep]:
    recipe, cluster, report = plan.recipe, plan.cluster, plan.step()
    largest = max(report.parts, key=lambda part: report.parts[part])
    yield GuideStep(
        plan,
        f"This is the plan: {format_seconds(report.seconds)} a step. Watch the longest part, "
        f"{format_part(largest)} with {format_seconds(report.parts[largest])}; hatched parts are overlapped.",
    )
    again = "none" if recipe.recompute == "full" else "full"
    recomputed = "Recompute nothing" if again == "none" else "Recompute every layer in backward"
    slow = links[SLOW_LINK]
    changes = [
        (
            "Take larger micro-batches, half as many",
            _change_recipe(plan, micro_batch_size=2 * recipe.micro_batch_size),
        ),
        (
            "Take twice the global batch",
            _change_recipe(plan, global_batch_size=2 * recipe.global_batch_size),
        ),
        (recomputed, _change_recipe(plan, recompute=again)),
        (
            "Connect the GPUs of a node by PCIe 4.0",
            lambda: replace(plan, cluster=replace(cluster, intra_node_link=slow)),
        ),
        _change_sharding(plan),
    ]
    for text, changed in _try_changes(changes):
        after = changed.step()
        moved = sorted(report.parts, key=lambda part: -abs(after.parts[part] - report.parts[part]))
        watched = ", ".join(
            f"{format_part(part)} {format_seconds(report.parts[part])} → {format_seconds(after.parts[part])}"
            for part in moved[:2]
            if abs(after.parts[part] - report.parts[part]) > 0.001 * report.seconds
        )
        speed = 100 * (after.tokens_per_second / report.tokens_per_second - 1)
        rate = f"{abs(speed):.0f} % {'more' if speed >= 0 else 'fewer'} tokens/s"
        fits = "" if changed.memory().fits else ", and it does not fit"
        yield GuideStep(changed, f"{text}. Watch {watched or 'how little changes'}: {rate}{fits}.")
