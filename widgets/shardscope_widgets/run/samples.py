"""Sample generations of a run: before, at the best validation loss, and at the latest step, side by side."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from math import isfinite
from types import MappingProxyType
from typing import TYPE_CHECKING

import shardscope as ss
from shardscope.core.number_format import format_count
from shardscope.records.folder import RunFolder
from shardscope_widgets.kit import controls
from shardscope_widgets.run.panels import is_number

if TYPE_CHECKING:
    from shardscope.records.samples import Sample

MAX_PROMPTS = 16
MAX_UNCUT = 60
"""Characters of an answer that two lines of a narrow column hold."""
MAX_CHARACTERS = 2000
"""Maximum characters of a text that are shown; ``run.samples()`` has all of them."""

BEST = " · best"
"""Mark of the step with the lowest validation loss."""


class RunSamples:
    """The samples of a run, in ``html``, which is empty for a task without prompts."""

    def __init__(self) -> None:
        self.html = controls.create_html()
        self._seen: object = None
        self._losses: dict[int, float] = {}
        """Validation loss by the number of steps before it."""

    def start_run(self, run: ss.Run) -> None:
        """Clear the previous run. Prompts that the task records are shown before their first answer."""
        self._seen, self._losses = None, {}
        prompts = (run.task_fields or {}).get("samples")
        known = [text for text in prompts if isinstance(text, str)] if isinstance(prompts, list) else []
        self.html.value = render_samples([], None, known) if prompts is not None else ""

    def add_records(self, records: Iterable[Mapping[str, object]]) -> None:
        """Add the validation losses among new metrics."""
        for record in records:
            loss, step = record.get("validation_loss"), record.get("step")
            if not is_number(loss) or not isfinite(loss) or not isinstance(step, int):
                continue
            # Both the loss before the first step and the one after it are logged at step 0.
            is_initial = step == 0 and 0 not in self._losses
            self._losses[0 if is_initial else step + 1] = loss

    def refresh(self, run: ss.Run) -> None:
        """Show the samples, if there are new ones or another is the best."""
        trained = [step for step in self._losses if step]
        best = min(trained, key=lambda step: self._losses[step], default=None)
        seen = (_find_size(run), best, len(self._losses))
        if seen == self._seen or not seen[0]:
            return
        self._seen = seen
        samples = run.samples()
        if samples:
            self.html.value = render_samples(samples, best, losses=self._losses)


def _find_size(run: ss.Run) -> int:
    try:
        return os.lstat(RunFolder(run.folder).samples).st_size
    except OSError:
        return 0


def render_samples(
    samples: Sequence[Sample],
    best: int | None,
    prompts: Sequence[str] = (),
    losses: Mapping[int, float] = MappingProxyType({}),
) -> str:
    """Return the samples as HTML. ``prompts`` are shown where there is no sample yet.

    ``losses`` are validation losses by step.
    """
    by_prompt: dict[str, dict[int, Sample]] = {prompt: {} for prompt in prompts[:MAX_PROMPTS]}
    for sample in samples:
        if sample["prompt"] in by_prompt or len(by_prompt) < MAX_PROMPTS:
            by_prompt.setdefault(sample["prompt"], {})[sample["step"]] = sample
    columns = _choose_columns(sorted({sample["step"] for sample in samples}), best)
    if not by_prompt:
        waiting = "<p class='ss-hint'>Generated before the first step.</p>"
        return f"<h2>Samples</h2><div class='ss-samples ss-waiting'>{waiting}</div>"
    heads = "".join(_render_head(title, losses.get(step)) for step, title in columns)
    rows = "".join(
        f"<tr class='ss-asked'><th scope='rowgroup' colspan='{len(columns)}'>"
        f"{_shorten_text(prompt)}</th></tr>"
        f"<tr>{''.join(_render_answer(answers.get(step), title) for step, title in columns)}</tr>"
        for prompt, answers in by_prompt.items()
    )
    return (
        "<h2>Samples</h2><div class='ss-samples' tabindex='0' role='region' aria-label='Samples'>"
        f"<table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _choose_columns(steps: Sequence[int], best: int | None) -> list[tuple[int, str]]:
    """Return the steps that are compared, with their titles: the first, the best and the latest."""
    if not steps:
        return [(0, "Before training")]
    first, latest = steps[0], steps[-1]
    columns = [(first, _name_step(first))]
    if best is not None and best in steps and best not in (first, latest):
        columns.append((best, f"{_name_step(best)}{BEST}"))
    if latest != first:
        columns.append((latest, f"{_name_step(latest)}{BEST * (best == latest)}"))
    return columns


def _render_head(title: str, loss: float | None) -> str:
    why = " title='The lowest validation loss so far'" if title.endswith(BEST) else ""
    known = "" if loss is None else f"<div class='ss-hint'>validation loss {loss:.3f}</div>"
    return f"<th scope='col'{why}>{escape(title).replace(BEST, ' · <b>best</b>')}{known}</th>"


def _name_step(step: int) -> str:
    return f"After {format_count(step, 'step')}" if step else "Before training"


def _render_answer(sample: Sample | None, title: str) -> str:
    """Return a cell; on a narrow page it carries the column's title itself."""
    label = f" data-label='{escape(title, quote=True)}'"
    if sample is None:
        return f"<td class='ss-hint'{label}>not generated yet</td>"
    answer = sample["text"].strip()
    if not sample["is_complete"]:  # It may end within a character, such as an emoji of several tokens.
        answer = answer.rstrip("\ufffd")
    text = _shorten_text(answer) or "<span class='ss-hint'>an empty answer</span>"
    cut = "" if sample["is_complete"] else "<span class='ss-hint' title='Cut at max_new_tokens'> …</span>"
    # Where room is short, only the first lines are shown: the tooltip has all of them.
    tooltip = f" title='{escape(answer[:MAX_CHARACTERS], quote=True)}'" if len(answer) > MAX_UNCUT else ""
    return f"<td{label}><span class='ss-answer'{tooltip}>{text}{cut}</span></td>"


def _shorten_text(text: str) -> str:
    """Return ``text`` as HTML, cut if it is long."""
    return escape(text if len(text) <= MAX_CHARACTERS else f"{text[:MAX_CHARACTERS]}…")
