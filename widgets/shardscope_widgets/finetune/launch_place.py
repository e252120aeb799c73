"""Choice of the machine for a one-click fine-tune: this one, or one node of a scheduler's queue."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import ipywidgets as widgets

import shardscope as ss
from shardscope_widgets.kit import controls
from shardscope_widgets.kit.background_calls import Debounced, LatestRequest
from shardscope_widgets.kit.display_names import format_name
from shardscope_widgets.pickers.schedulers import SCHEDULERS, Queue, find_queues
from shardscope_widgets.run.launching.launch_target import LaunchTarget

SEARCH_SECONDS = 0.5
"""Delay after the view's creation before schedulers are searched, so that it is drawn first."""
UNDECIDED = ""
"""Value of the menu of GPU types before the user has chosen one."""
UNDECIDED_OPTION = ("choose the type", UNDECIDED)


class LaunchPlace(widgets.VBox):
    """The menu of targets, hidden until a scheduler answers, and one of GPU types for a queue of several.

    ``on_change()`` is called after every change; ``on_options()`` when the user asks for the job's options.
    """

    def __init__(
        self, machine: ss.Cluster, *, on_change: Callable[[], None], on_options: Callable[[], None]
    ) -> None:
        self._machine, self._on_change = machine, on_change
        self._num_searches, self._is_filling = 0, False
        self.target = LaunchTarget(on_change=self._follow_target, on_options=on_options)
        self.kind = controls.create_dropdown(
            options=[UNDECIDED_OPTION], tooltip="Type of the GPUs, which their name leaves open"
        )
        self._kind_line = widgets.HBox(
            [controls.create_label("GPU"), self.kind], layout=controls.share_layout()
        )
        controls.add_classes(self._kind_line, "ss-launch-target", "ss-off")
        self.kind.observe(self._follow_kind, "value")
        self._queue_search = LatestRequest[int, list[Queue]](lambda _: find_queues(), "shardscope-queues")
        self._first_search = Debounced(self._search, SEARCH_SECONDS)
        self._is_stopped = False
        super().__init__([self.target.head, self._kind_line], layout=controls.share_layout())

    @property
    def cluster(self) -> ss.Cluster | None:
        """This machine, or one node of the queue; None while the type of its GPUs is not known."""
        queue = self.target.queue
        if queue is None:
            return self._machine
        try:
            return replace(queue.build_cluster(self.kind.value or None), num_nodes=1)
        except ValueError:
            return None

    @property
    def title(self) -> str:
        """Display name of the target."""
        queue = self.target.queue
        return "this machine" if queue is None else queue.label

    def search(self) -> None:
        """Search the queues of schedulers soon, in a thread, if any scheduler is here."""
        if any(scheduler.is_present() for scheduler in SCHEDULERS):
            self._first_search.request()

    def stop(self) -> None:
        """Ignore what is still being searched."""
        self._is_stopped = True

    def _search(self) -> None:
        self._num_searches += 1
        self._queue_search.request(self._num_searches, self._offer_queues)

    def _offer_queues(self, queues: list[Queue] | Exception) -> None:
        if not self._is_stopped and not isinstance(queues, Exception) and queues:
            self.target.offer_queues(queues)

    def _follow_target(self) -> None:
        if "_kind_line" not in vars(self):  # The target is being created.
            return
        queue = self.target.queue
        kinds = list(queue.gpu_candidates) if queue is not None and len(queue.gpu_candidates) > 1 else []
        options = [UNDECIDED_OPTION, *((format_name(name), name) for name in kinds)]
        if list(self.kind.options) != options:
            self._is_filling = True
            self.kind.options = options  # Selects the first one.
            self._is_filling = False
        controls.show_if(self._kind_line, kinds)
        self._on_change()

    def _follow_kind(self, change: object) -> None:
        if not self._is_filling:
            self._on_change()
