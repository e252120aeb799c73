"""What a person sees: widgets over ``shardscope``'s reports, plans and runs.

Each view stands alone and shows itself as the last line of a cell; ``Studio()`` is all of them on one bench.
"""

from shardscope_widgets.advice_view import AdviceView
from shardscope_widgets.memory_view import MemoryView
from shardscope_widgets.ranking_view import RankingView
from shardscope_widgets.run_view import RunView
from shardscope_widgets.step_view import StepView
from shardscope_widgets.studio import Studio
from shardscope_widgets.trace_view import TraceView

__all__ = ["AdviceView", "MemoryView", "RankingView", "RunView", "StepView", "Studio", "TraceView"]
