"""Which plan to start with, and the questions on the way to it: ``ss.recommend`` as a person reads it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import traitlets

import shardscope as ss
from shardscope.planner.abilities import abilities
from shardscope.planner.advice import Advice
from shardscope_widgets.kit import controls
from shardscope_widgets.kit.background_work import Progress, WorkPanel
from shardscope_widgets.kit.clickable import Clickable, IgnoredError
from shardscope_widgets.kit.sheet import Sheet
from shardscope_widgets.kit.view import View
from shardscope_widgets.plans.advice_html import advised, disagrees, matrix, otherwise, path


def _with_a_search(advice: Advice, progress: Progress) -> Advice:
    """The same advice, once it knows what a search over all layouts says."""
    progress("setting a search beside it", 0.5)
    _ = advice.disagreement  # Kept by it: drawing asks again.
    progress("drawing", 1.0)
    return advice


class AdviceView(View):
    """The path that advice took, with the numbers at each turn, and what each framework supports.

    :meth:`ask` asks in the background; ``AdviceView(advice)`` shows what ``ss.recommend`` returned.
    A button applies a plan: ``on_apply`` gets it, and :attr:`plan` has it.
    """

    plan = traitlets.Any(allow_none=True, default_value=None, help="The plan that was applied last.")

    def __init__(
        self,
        advice: Advice | None = None,
        *,
        on_apply: Callable[[ss.Plan], None] | None = None,
        work: WorkPanel | None = None,
    ) -> None:
        """``work`` is where the questions show how far they are, if that is not above the advice."""
        self.advice: Advice | None = None
        self._on_apply = on_apply
        self._ask_again: Callable[[], None] | None = None
        self.work = work or WorkPanel("Ask again", "Ask the same once more", self._press)
        own = [] if work else [self.work, self.work.words]
        if own:
            self.work.offer(False)  # Until there is a question.
        self.words = Clickable(self._act)
        self.matrix = controls.html()
        super().__init__([Sheet("plans"), *own, self.words, self.matrix])
        for name in ("ss-root", "ss-view", "ss-advice"):
            self.add_class(name)
        if advice is not None:
            self.show(advice)

    def ask(
        self,
        arch: ss.Architecture,
        cluster: ss.Cluster,
        recipe: ss.Recipe,
        familiar_with: Iterable[str] = (),
        *,
        on_found: Callable[[], None] | None = None,
    ) -> None:
        """Ask ``ss.recommend`` in the background and show what it advises; then call ``on_found``.

        Returns at once. Does nothing while it is asked already. What ``ss.recommend`` raises is read beside
        the button.
        """

        def work(progress: Progress) -> Advice:
            progress("asking", 0.0)
            advice = ss.recommend(arch, cluster, recipe, familiar_with)
            self._draw(advice)
            if on_found is not None:
                on_found()
            return _with_a_search(advice, progress)

        self._ask_again = partial(self.ask, arch, cluster, recipe, familiar_with, on_found=on_found)
        self.work.offer(True)
        self.work.start(work, self._draw_all, lambda _, seconds: "")

    def show(self, advice: Advice) -> None:
        """Draw advice at once, and in the background set a search beside it, which takes seconds."""
        self._draw(advice)
        self.work.start(partial(_with_a_search, advice), self._draw_all, lambda _, seconds: "")

    def _draw_all(self, advice: Advice) -> None:
        if advice is self.advice:
            self._draw(advice, disagrees(advice))

    def _draw(self, advice: Advice, beside: str = "") -> None:
        """``beside`` is what a search says; the table of what frameworks support is the same for all."""
        self.advice = advice
        self.words.value = advised(advice) + beside + path(advice) + otherwise(advice)
        if not self.matrix.value:
            self.matrix.value = matrix(abilities())

    def freeze(self, frozen: bool) -> None:
        """Let nothing be pressed, and look so: what is shown is no answer to what is asked now."""
        self.words.frozen = frozen
        (self.add_class if frozen else self.remove_class)("ss-old")

    def _press(self) -> None:
        if self._ask_again is not None:
            self._ask_again()

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
