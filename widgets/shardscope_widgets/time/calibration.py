"""The button that calibrates this machine, so that predictions for it use measured curves."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import shardscope as ss
from shardscope_widgets.kit.background_work import Progress, WorkPanel

if TYPE_CHECKING:
    from shardscope.timing.calibration.curves import Calibration


class CalibratePanel(WorkPanel):
    """A button for ``ss.calibrate()``, for plans of this machine; ``on_done`` is called at the end."""

    def __init__(self, machine: ss.Cluster, on_done: Callable[[], None]) -> None:
        self._machine = machine
        self._on_done = on_done
        self._cluster: ss.Cluster | None = None
        super().__init__(
            "Measure this machine",
            "Benchmark matmuls, memory, links and collectives (about a minute) for more accurate predictions",
            self._start_calibration,
        )
        self.layout.display = "none"

    def show_for_plan(self, plan: ss.Plan) -> None:
        """Show the button if ``plan`` is for GPUs, or CPU ranks, of this machine."""
        cluster, machine = plan.cluster, self._machine
        is_here = (
            cluster.num_nodes == 1
            and cluster.gpu.name == machine.gpu.name
            and (cluster.gpus_per_node <= machine.gpus_per_node or not plan.on_gpu)
        )
        self._cluster = cluster if is_here else None
        self.layout.display = "" if is_here or self.is_busy else "none"

    def _start_calibration(self) -> None:
        cluster = self._cluster
        if cluster is None:
            return

        def calibrate(progress: Progress) -> Calibration:
            return ss.calibrate(cluster, progress=progress)

        self.start(calibrate, lambda _: self._on_done(), lambda _, seconds: f"Measured in {seconds:.0f} s.")
