"""Widgets for ``shardscope``'s reports, plans and runs: the Studio, and one package for each view.

Each view can be displayed alone as the last line of a cell; ``Studio()`` combines them all.
"""

from shardscope_widgets.finetune import ChatView, FinetuneView
from shardscope_widgets.memory.view import MemoryView
from shardscope_widgets.plans.advice_view import AdviceView
from shardscope_widgets.plans.ranking_view import RankingView
from shardscope_widgets.run.view import RunView
from shardscope_widgets.studio import Studio
from shardscope_widgets.teach.guided_view import GuidedView
from shardscope_widgets.teach.roofline_view import RooflineView
from shardscope_widgets.teach.schedule_view import ScheduleView
from shardscope_widgets.teach.sharding_view import ShardingView
from shardscope_widgets.time.view import StepView
from shardscope_widgets.trace import TraceView

__all__ = [
    "AdviceView",
    "ChatView",
    "FinetuneView",
    "GuidedView",
    "MemoryView",
    "RankingView",
    "RooflineView",
    "RunView",
    "ScheduleView",
    "ShardingView",
    "StepView",
    "Studio",
    "TraceView",
]
