"""Which plan to start with, and the questions on the way to it: ``ss.recommend`` as a person reads it."""

from __future__ import annotations

from collections.abc import Callable

import traitlets

import shardscope as ss
from shardscope.planner.abilities import abilities
from shardscope.planner.advice import Advice
from shardscope_widgets import shared
from shardscope_widgets.advice_html import advised, matrix, otherwise, path
from shardscope_widgets.clickable import Clickable, IgnoredError
from shardscope_widgets.sheet import Sheet
from shardscope_widgets.view import View


class AdviceView(View):
    """The path that advice took, with the numbers at each turn, and what each framework supports.

    A button applies a plan: ``on_apply`` gets it, and :attr:`plan` has it.
    """

    plan = traitlets.Any(allow_none=True, default_value=None, help="The plan that was applied last.")

    def __init__(
        self, advice: Advice | None = None, *, on_apply: Callable[[ss.Plan], None] | None = None
    ) -> None:
        self.advice: Advice | None = None
        self._on_apply = on_apply
        self.words = Clickable(self._act)
        self.matrix = shared.html()
        super().__init__([Sheet(), self.words, self.matrix])
        for name in ("ss-root", "ss-view", "ss-advice"):
            self.add_class(name)
        if advice is not None:
            self.show(advice)

    def show(self, advice: Advice) -> None:
        """Draw advice; the table of what frameworks support is the same for all."""
        self.advice = advice
        self.words.value = advised(advice) + path(advice) + otherwise(advice)
        if not self.matrix.value:
            self.matrix.value = matrix(abilities())

    def freeze(self, frozen: bool) -> None:
        """Let nothing be pressed, and look so: what is shown is no answer to what is asked now."""
        self.words.frozen = frozen
        (self.add_class if frozen else self.remove_class)("ss-old")

    def _act(self, act: str) -> None:
        plan = self._plan_of(act)
        if plan is None:
            raise IgnoredError(act)
        self.plan = plan
        if self._on_apply is not None:
            self._on_apply(plan)

    def _plan_of(self, act: str) -> ss.Plan | None:
        advice = self.advice
        if advice is None:
            return None
        if act == "plan":
            return advice.plan
        if act == "fastest":
            return advice.fastest
        # A click may come late: after it was sent, other advice may have been drawn.
        index = int(act) if act.isdigit() else len(advice.alternatives)
        return advice.alternatives[index][0] if index < len(advice.alternatives) else None
