"""The background search for the cheapest changes that make a plan fit, shared by all its buttons."""

from __future__ import annotations

import shardscope as ss
from shardscope.planner.repairs.make_it_fit import Fit, make_it_fit
from shardscope_widgets.kit.background_calls import LatestRequest

Result = Fit | Exception | None
"""The changes that make the plan fit, None if there are none, or the exception raised by the search."""


class FitSearch(LatestRequest[ss.Plan, Fit | None]):
    """A search for one plan at a time, the latest requested. A large cluster takes seconds."""

    def __init__(self) -> None:
        super().__init__(make_it_fit, "shardscope-make-it-fit")
