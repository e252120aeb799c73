"""Search for the queues of schedulers, which the GPU picker and the launch target then offer."""

from __future__ import annotations

from shardscope_widgets.kit.background_calls import Debounced, LatestRequest
from shardscope_widgets.pickers import ClusterPicker
from shardscope_widgets.pickers.schedulers import SCHEDULERS, Queue, find_queues
from shardscope_widgets.run.launching.launch_target import LaunchTarget

FIRST_SEARCH_SECONDS = 0.5
"""Delay after the Studio's creation before schedulers are searched, so that the Studio is drawn first."""


class QueueSearch:
    """Search in a thread, if any scheduler is here. What is idle changes, so it is repeated."""

    def __init__(self, cluster: ClusterPicker, target: LaunchTarget) -> None:
        self._cluster, self._target = cluster, target
        self._request = LatestRequest[int, list[Queue]](lambda _: find_queues(), "shardscope-queues")
        self._num_searches = 0
        self._later = Debounced(self.start, FIRST_SEARCH_SECONDS)

    def start_later(self) -> None:
        """Start the first search, after the Studio is drawn."""
        self._later.request()

    def start(self) -> None:
        """Start a search."""
        if any(scheduler.is_present() for scheduler in SCHEDULERS):
            self._num_searches += 1
            self._request.request(self._num_searches, self._offer)

    def _offer(self, queues: list[Queue] | Exception) -> None:
        # A closed Studio's picker has no comm.
        if self._cluster.comm is None or isinstance(queues, Exception):
            return
        if queues or self._cluster.has_queues:
            self._cluster.offer_queues(queues)
            self._target.offer_queues(queues)
