"""Which run a trace is of, in words: the title of the Trace tab, and how two traced runs differ."""

from __future__ import annotations

from html import escape

import shardscope as ss
from shardscope.core.number_format import format_count
from shardscope.planner.advice.descriptions import name_plan
from shardscope.planner.differences import find_differences
from shardscope.runs.summaries import summarize
from shardscope.trace import Trace
from shardscope_widgets.kit.display_names import describe_devices, name_model
from shardscope_widgets.run import runs_table


def render_title(trace: Trace, run: ss.Run | None) -> str:
    """Return the run of ``trace`` or its file, the start, and the plan or the number of ranks as HTML.

    The page around it may be about another plan, and the trace may be that of an earlier run.
    """
    name = escape(runs_table.make_printable(run.name if run is not None else trace.name))
    when = runs_table.format_time(run.created) if run is not None else ""
    title = f"Trace of <b>{name}</b>" + (f", {escape(when)}" if when else "")
    plan = trace.plan
    if plan is None:
        what = f"{format_count(len(trace.ranks), 'rank')}, of no known plan"
    else:
        # A function of the user's own may train another model than the plan's.
        what = "" if trace.trains_the_plan else "a function of your own, launched with the plan "
        model, devices = name_model(plan.architecture), describe_devices(plan.cluster)
        what += f"<b>{escape(model)}</b> on <b>{escape(devices)}</b> with "
        what += f"<b>{escape(name_plan(plan, plan.recipe))}</b>"
    return f"<p class='ss-trace-title'>{title}: {what}</p>"


def name_run(run: ss.Run) -> str:
    """Return a run's name and plan for a list, as text."""
    return f"{runs_table.make_printable(run.name)} · {runs_table.describe_plan(summarize(run.folder, run))}"


def describe_differences(trace: Trace, other: Trace) -> str:
    """Return the settings in which two traced runs differ as a sentence; empty if none is known to."""
    if trace.plan is None or other.plan is None:
        if trace.world_size == other.world_size:
            return ""
        here, there = (format_count(one.world_size, "rank") for one in (trace, other))
        return f"This trace is of {here}, the other of {there}."
    texts = []
    is_other_model = False
    for difference in find_differences(trace.plan, other.plan):
        text = str(difference)
        if difference.field == "model":
            names = [name_model(plan.architecture) for plan in (trace.plan, other.plan)]
            is_other_model = True
            if names[0] == names[1]:
                counts = [plan.architecture.num_parameters for plan in (trace.plan, other.plan)]
                names = [f"{names[0]} of {count:,} parameters" for count in counts]
            text = f"model {' → '.join(names)}"
            if names[0] == names[1]:
                text = "another model of the same name and size"
        elif difference.field == "framework":
            # With the degrees of both, of which another framework's are no difference of their own.
            layouts = [name_plan(plan, plan.recipe) for plan in (trace.plan, other.plan)]
            text = f"framework {' → '.join(layouts)}"
        elif difference.field == "GPUs":
            devices = [describe_devices(plan.cluster) for plan in (trace.plan, other.plan)]
            if devices[0] == devices[1]:
                continue  # other memory of a machine with the same name
            text = " → ".join(devices)
        texts.append(text)
    if not texts:
        return ""
    caution = " Times of different models are of different work." if is_other_model else ""
    return f"The other run differs: {'; '.join(texts)}.{caution}"
