"""Every public view with something to show, for tests that open them without a kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.unit.fake_runs import FakeRun, record

import shardscope as ss
import shardscope_widgets as sw

PLAN = ss.Plan(
    ss.models["llama-3.1-8b"],
    ss.Cluster.parse("8xh100-sxm-80gb"),
    ss.Recipe(global_batch_size=16, recompute="selective"),
    ss.Layout.fsdp2(),
)
PIPELINE = ss.Plan(PLAN.architecture, PLAN.cluster, PLAN.recipe, ss.Layout.megatron(pp=4))
SMALL = (ss.models["gpt2"], PLAN.cluster, ss.Recipe(seq_len=512))


class TunedRun(FakeRun):
    """A run with a model, of which nobody has asked anything yet."""

    recorded_base = {"weights": "/models/base"}  # noqa: RUF012

    def __init__(self, records: list[dict[str, Any]]) -> None:
        super().__init__(records)
        self.model = self.folder

    def chat(self, *, base: bool = False) -> Any:
        raise RuntimeError("no model")


VIEWS: dict[str, Callable[[], Any]] = {
    "AdviceView": lambda: sw.AdviceView(ss.recommend(*SMALL)),
    "ChatView": lambda: sw.ChatView(TunedRun([])),  # type: ignore[arg-type]
    "FinetuneView": sw.FinetuneView,
    "GuidedView": lambda: sw.GuidedView(PLAN),
    "MemoryView": lambda: sw.MemoryView(PLAN),
    "RankingView": lambda: sw.RankingView(ss.search(*SMALL)),
    "RooflineView": lambda: sw.RooflineView(PLAN),
    "RunView": lambda: sw.RunView(FakeRun([record(step=step, loss=9.0 - step) for step in range(3)])),  # type: ignore[arg-type]
    "ScheduleView": lambda: sw.ScheduleView(PIPELINE),
    "ShardingView": lambda: sw.ShardingView(PLAN),
    "StepView": lambda: sw.StepView(PLAN),
    "Studio": sw.Studio,
}
"""All but the trace's, whose page has tests of its own (``tests/unit/widgets/trace``)."""
WITH_CHARTS = set(VIEWS) - {"AdviceView", "ChatView", "FinetuneView"}
