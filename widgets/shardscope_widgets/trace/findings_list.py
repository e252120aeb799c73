"""The sentences of ``trace.summary()`` as a list: each moves the view, and may apply a changed plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

import shardscope as ss
from shardscope.timing.report import format_seconds
from shardscope.trace.summary.summary import Sentence
from shardscope_widgets.kit.clickable import Clickable, IgnoredError
from shardscope_widgets.kit.numbers import keep_units

NUM_SHOWN = 3
"""Sentences shown below the first paragraph until all are requested: the drawing below stays in sight."""
TOGGLE = "all"


class FindingsList(Clickable):
    """Findings about the trace, most important first.

    ``on_show`` receives the sentence whose "Show" was pressed, ``on_apply`` one with a changed plan.
    """

    def __init__(self, on_show: Callable[[Sentence], None], on_apply: Callable[[ss.Plan], None]) -> None:
        self._on_show, self._on_apply = on_show, on_apply
        self._sentences: Sequence[Sentence] = ()
        self._shows_all = False
        super().__init__(self._handle_action, "ss-findings-of-trace")

    def show_hint(self, text: str, *, saved: str = "") -> None:
        """Show ``text`` instead of sentences; a saved notebook has ``saved`` in its place."""
        self._sentences = ()
        attribute = f" data-saved='{escape(saved, quote=True)}'" if saved else ""
        self.value = f"<p class='ss-hint'{attribute}>{escape(text)}</p>" if text else ""

    def show_sentences(self, sentences: Sequence[Sentence]) -> None:
        """Show these sentences; those about the whole trace at the beginning are one paragraph."""
        self._sentences, self._shows_all = tuple(sentences), False
        self._render_list()

    def _render_list(self) -> None:
        num_leading = _count_leading(self._sentences)
        lead = " ".join(sentence.text for sentence in self._sentences[:num_leading])
        items = list(enumerate(self._sentences))[num_leading:]
        num_hidden = len(items) - NUM_SHOWN
        # One more line is shorter than a button that shows it.
        is_long = num_hidden > 1
        shown = items if self._shows_all or not is_long else items[:NUM_SHOWN]
        rows = "".join(_render_item(number, sentence) for number, sentence in shown)
        html = f"<p class='ss-lead'>{keep_units(escape(lead))}</p>" if lead else ""
        html += f"<ol>{rows}</ol>" if rows else ""
        if is_long:
            label = "Show fewer" if self._shows_all else f"Show {num_hidden} more"
            html += (
                f"<button type='button' class='ss-more' data-act='{TOGGLE}' "
                f"aria-expanded='{str(self._shows_all).lower()}'>{label}</button>"
            )
        self.value = html

    def _handle_action(self, act: str) -> None:
        if act == TOGGLE:
            self._shows_all = not self._shows_all
            self._render_list()
            return
        verb, _, number = act.partition(":")
        # The list may have changed since the click was sent.
        if not (number.isascii() and number.isdecimal() and int(number) < len(self._sentences)):
            raise IgnoredError(act)
        sentence = self._sentences[int(number)]
        if verb == "show" and can_show(sentence):
            self._on_show(sentence)
        elif verb == "apply" and sentence.plan is not None:
            self._on_apply(sentence.plan)
        else:
            raise IgnoredError(act)


def can_show(sentence: Sentence) -> bool:
    """Return whether the sentence is about an interval of the trace."""
    return sentence.start_seconds is not None and sentence.end_seconds is not None


def _count_leading(sentences: Sequence[Sentence]) -> int:
    """Return the number of sentences at the beginning without a place in the trace: its size and shares."""
    for number, sentence in enumerate(sentences[:2]):
        if can_show(sentence) or sentence.plan is not None:
            return number
    return min(2, len(sentences))


def _render_item(number: int, sentence: Sentence) -> str:
    text = keep_units(escape(sentence.text))
    spoken = escape(sentence.text, quote=True)
    apply = show = ""
    if sentence.plan is not None:
        gain = "" if sentence.gain_seconds is None else format_seconds(sentence.gain_seconds)
        label = f"Apply this plan: predicted gain {keep_units(escape(gain))}" if gain else "Apply this plan"
        apply = f"<button type='button' class='ss-act' data-act='apply:{number}'>{label}</button>"
    if can_show(sentence):
        show = (
            f"<button type='button' class='ss-act' data-act='show:{number}' "
            f"aria-label='Show in the trace: {spoken}'>Show</button>"
        )
    return f"<li><div>{text}{apply}</div>{show}</li>"
