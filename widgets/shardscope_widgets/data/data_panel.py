"""The lines below the data input: what the data is, its preview, and a better sequence length."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path

import traitlets

import shardscope as ss
from shardscope.core.number_format import format_count
from shardscope.training.examples.preview import LengthAdvice, Preview
from shardscope.training.tasks.recommended_length import recommend_length
from shardscope_widgets.kit.background_calls import LatestRequest, call_in_loop, find_running_loop
from shardscope_widgets.kit.clickable import Clickable, IgnoredError

READING = "<p role='status'>Reading the data…</p>"
PAIRS = "Preference pairs: trained by DPO"
WHY_PAIRS = (
    "Each row has a chosen and a rejected answer: direct preference optimization (Rafailov et al. 2023) "
    "raises the probability of the first over the second, and holds the model to the one it started from."
)
SHOW, SHORTEN = "preview", "seq_len"
"""Actions of the two buttons."""
Stamp = tuple[int, int]
"""Time of change and size of a file, by which an edited file is known."""


@dataclass(frozen=True, kw_only=True)
class DataQuestion:
    """Data to read, and the sequence length to which it is cut."""

    task: ss.Finetune
    seq_len: int
    stamp: Stamp
    is_cpu: bool
    """Whether ranks are CPU ranks, for which shorter rows are recommended."""
    validation: object = None
    """The user's validation data, whose rows are compared; None: not set."""

    def is_same_data(self, other: DataQuestion | None) -> bool:
        """Return whether ``other`` is about the same rows for the same ranks, at any sequence length."""
        if other is None:
            return False
        return (self.task, self.stamp, self.is_cpu) == (other.task, other.stamp, other.is_cpu)


class DataPanel(Clickable):
    """Format and number of rows of a file of examples, read in the background.

    Preference pairs are read as such, whatever the objective of the task.

    ``on_length`` is called with a better sequence length when its button is pressed. ``hold_out(task,
    preview)`` returns the task with the validation that its data allow: its rows are compared with
    the others.
    """

    preview = traitlets.Any(allow_none=True, default_value=None, help="The data as it was last read.")
    problem = traitlets.Any(
        allow_none=True,
        default_value=None,
        help="The ValueError of data that is wrong, or of the validation data; the latter have a preview.",
    )

    def __init__(
        self,
        on_length: Callable[[int], None],
        hold_out: Callable[[ss.Finetune, Preview], ss.Finetune] = lambda task, preview: task,
    ) -> None:
        super().__init__(self._handle_action, "ss-data")
        self.on_show: Callable[[], None] | None = None
        """Called by the Preview button; set by the view that shows the preview."""
        self._on_length = on_length
        self._hold_out = hold_out
        self._reader = LatestRequest(self._read_preview, "shardscope-data")
        self._question: DataQuestion | None = None
        self._advice: LengthAdvice | None = None
        self._plan: ss.Plan | None = None

    @property
    def is_reading(self) -> bool:
        """Return whether there is data of which nothing is known yet."""
        return self._question is not None and self.preview is None and self.problem is None

    def set_task(self, task: ss.Finetune | None, plan: ss.Plan | None, validation: object = None) -> None:
        """Read the examples of ``task`` at the sequence length of ``plan``; None: there are none to read.

        With another ``validation`` they are read and compared again.
        """
        question = None
        if task is not None and plan is not None:
            question = DataQuestion(
                task=task,
                seq_len=plan.recipe.seq_len,
                stamp=_stamp(task.data),
                is_cpu=plan.cluster.gpu.vendor == "cpu",
                validation=validation,
            )
            self._plan = plan
        if question == self._question:
            return
        before, self._question = self._question, question
        if question is None or not question.is_same_data(before):
            self._show_result(None)
        elif before is not None and before.validation != validation:
            # An error of validation data that are other ones now.
            self.problem = None if self.preview is not None else self.problem
        if question is not None:
            # After the cell or the input's handler that calls this, so that it is shown first.
            call_in_loop(find_running_loop(), lambda: self._read(question))

    def _read(self, question: DataQuestion) -> None:
        if question == self._question:
            _import_libraries()
            self._reader.request(question, lambda result: self._receive(question, result))

    def _read_preview(self, question: DataQuestion) -> tuple[Preview, ValueError | None]:
        """Return the preview, and the error of the validation data if they are wrong."""
        preview = _read_preview(question)
        try:
            task = self._hold_out(question.task.match_objective(), preview)
            return replace(preview, num_shared_rows=task.count_shared_rows()), None
        except ValueError as error:
            return preview, error

    def _receive(self, question: DataQuestion, result: tuple[Preview, ValueError | None] | Exception) -> None:
        if question != self._question:  # The input was changed meanwhile.
            return
        if isinstance(result, tuple):
            self._show_result(*result)
        elif isinstance(result, ValueError):
            self._show_result(None, result)
        else:
            problem = ValueError(f"The data cannot be read: {type(result).__name__}: {result}")
            self._show_result(None, problem)

    def _show_result(self, preview: Preview | None, problem: ValueError | None = None) -> None:
        self._advice = None
        if preview is not None and self._plan is not None:
            self._advice = recommend_length(self._plan, preview)
        # An error is shown at the input, above this panel.
        is_shown = self._question is not None and (preview is not None or problem is None)
        self.value = _render_lines(preview, self._advice) if is_shown else ""
        # Last: their observers read the rest, and both at once.
        with self.hold_trait_notifications():
            self.preview = preview
            self.problem = problem

    @property
    def advice(self) -> LengthAdvice | None:
        """A better sequence length for the data; None if the plan's is good."""
        return self._advice

    def use_length(self) -> None:
        """Change the plan to the recommended sequence length."""
        if self._advice is None:
            raise IgnoredError(SHORTEN)
        self._on_length(self._advice.seq_len)

    def _handle_action(self, act: str) -> None:
        if act == SHOW and self.preview is not None and self.on_show is not None:
            self.on_show()
        elif act == SHORTEN:
            self.use_length()
        else:
            raise IgnoredError(act)


def render_length_button(advice: LengthAdvice | None) -> str:
    """Return the button for ``advice`` as HTML, with its reason on hover; empty if there is none."""
    if advice is None:
        return ""
    return (
        f"<button type='button' class='ss-act' data-act='{SHORTEN}' title='{escape(advice.why, quote=True)}'>"
        f"Use a sequence length of {advice.seq_len:,}</button>"
    )


def _render_lines(preview: Preview | None, advice: LengthAdvice | None) -> str:
    if preview is None:
        return READING
    line = f"{format_count(preview.num_rows, 'row')}, {preview.format.short_title}"
    tooltip = escape(preview.sentences[0], quote=True)
    objective = f"<p title='{escape(WHY_PAIRS, quote=True)}'>{PAIRS}</p>" if preview.has_pairs else ""
    shared = f"<p>{escape(preview.shared_rows_sentence)}</p>" if preview.num_shared_rows else ""
    unread = "".join(
        f"<p>{escape(sentence)}</p>"
        for sentence in (preview.unread_files, preview.unread_columns_sentence)
        if sentence
    )
    lost = preview.lost_data_sentence
    lost = f"<p title='Preview names the rows'>{escape(lost)}</p>" if lost else ""
    refusal = "" if preview.refusal is None else f"<p>{escape(preview.refusal.summary)}.</p>"
    show = (
        f"<button type='button' class='ss-act' data-act='{SHOW}' "
        "title='Show which tokens the model learns, and how long the rows are'>Preview</button>"
    )
    buttons = f"<div>{show}{render_length_button(advice)}</div>"
    status = f"<p role='status' title='{tooltip}'>{escape(line)}</p>"
    return f"{status}{refusal}{lost}{unread}{objective}{shared}{buttons}"


def _stamp(data: object) -> Stamp:
    """Return when the file changed last, and its size; zeros for other data, and for a file that is gone."""
    try:
        status = Path(data).stat() if isinstance(data, Path) else None
    except OSError:
        status = None
    return (0, 0) if status is None else (status.st_mtime_ns, status.st_size)


def _import_libraries() -> None:
    """Import what the reader needs in the thread that runs the notebook's cells: some seconds, once.

    Another thread would import it while a cell imports the same. Transformers loads its modules when their
    names are first read, and two threads see each other's half-loaded ones ("cannot import name
    'AutoTokenizer'"). plotly reads ``pandas.Series`` as soon as ``sys.modules`` has pandas (plotly 6,
    ``_plotly_utils/basevalidators.py``, ``is_homogeneous_array``).
    """
    with contextlib.suppress(ImportError):  # The reader reports what is missing.
        import datasets  # noqa: F401
        import pandas  # noqa: F401
        from transformers import AutoTokenizer  # noqa: F401


def _read_preview(question: DataQuestion) -> Preview:
    # Windows always: whether they are packed is decided later, by the lengths of these rows.
    return question.task.match_objective().preview(seq_len=question.seq_len, packing=True)
