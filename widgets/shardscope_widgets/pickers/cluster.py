"""The cluster picker: GPU type, count, nodes, or this machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

import ipywidgets as widgets
import traitlets

import shardscope as ss
from shardscope.core.errors import FieldError
from shardscope.core.serialization import replace_fields
from shardscope_widgets.kit import controls
from shardscope_widgets.kit.display_names import (
    count_devices,
    describe_devices,
    format_name,
)
from shardscope_widgets.pickers.base import NO_CHANGES, Picker, Row, parse_bytes, parse_number, parse_size
from shardscope_widgets.pickers.schedulers import Queue

GIB = 2**30
UNKNOWN_HOST_MEMORY = "The host memory of this node type is unknown. Enter it to check plans that offload."
UNITS = {"host_memory_bytes": GIB, "nvme_bytes": GIB, "nvme_bandwidth_bytes_per_second": 10**9}
"""Factors of the typed units: bytes per GiB, bytes per second per GB/s."""
MAX_ANSWER = 29
"""Number of characters that the line of a folded question shows of its answer."""
ANYWHERE, THIS_MACHINE, UNDECIDED = "", "this machine", ""
"""Values of the two menus that are no queue and no GPU type."""


class ClusterPicker(Picker):
    """The GPU inventory. "Use this machine" fills in the local hardware.

    A node's host memory and NVMe as typed by the user override the catalogue's values; if left empty, they
    are unknown. :meth:`offer_queues` adds a menu of the queues of schedulers, such as Slurm's partitions.
    """

    place = traitlets.Unicode(ANYWHERE, help="THIS_MACHINE, a queue's label, or ANYWHERE.")

    def __init__(self, text: str = "8xh100-sxm-80gb") -> None:
        cluster = ss.Cluster.parse(text)
        self.machine = ss.Cluster.detect()
        self._known = {name: ss.gpus[name] for name in ss.gpus}
        # This machine may have a GPU type that the catalogue lacks.
        self._known.setdefault(self.machine.gpu.name, self.machine.gpu)
        self.type = controls.create_dropdown(
            options=list(self._known), value=cluster.gpu.name, tooltip="GPU type"
        )
        self.count = controls.create_text_box(cluster.gpus_per_node, "GPUs, or CPU ranks, in each node")
        self.nodes = controls.create_text_box(cluster.num_nodes, "Number of nodes")
        for number in (self.count, self.nodes):
            number.add_class("ss-short")
        self.host = controls.create_text_box("", "Host memory of each node in GiB; empty: unknown", "64px")
        # Both units have to stand beside their boxes in one line of the panel.
        self.nvme = controls.create_text_box("", "NVMe capacity of each node in GiB; empty: unknown", "52px")
        self.speed = controls.create_text_box(
            "", "NVMe read bandwidth of each node in GB/s; empty: unknown", "36px"
        )
        for number in (self.nvme, self.speed):
            number.add_class("ss-short")
        self.hint = controls.create_html("", "ss-hint")
        self.host_hint = controls.create_html(UNKNOWN_HOST_MEMORY, "ss-hint")
        self.more = controls.create_button("More options", "ss-link", icon="chevron-right")
        self.more.on_click(self._show_more)
        self._is_open = False
        self.use_machine = controls.create_button(
            "Use this machine", "ss-link", tooltip=f"This machine: {self.machine}"
        )
        self._queues: dict[str, Queue] = {}
        self.where = controls.create_dropdown(options=[("any", ANYWHERE)], tooltip="Where the GPUs are")
        self._where_row = Row("Where", self.where)
        # Only for a queue whose GPU type has several memory sizes or form factors in the catalogue.
        self.kind = controls.create_dropdown(options=[("choose", UNDECIDED)], tooltip="Which GPUs these are")
        self._kind_row = Row("Which", self.kind)
        for row in (self._where_row, self._kind_row):
            row.show(False)
        self.idle = controls.create_html("", "ss-hint", "ss-off")
        # The unit stands in the column of names: behind the box it would leave no room for five digits.
        counts = self._counts = Row(
            "GPUs", self.count, controls.create_label("×"), self.nodes, controls.create_label("nodes")
        )
        self._host_row = host = Row("Host memory", self.host, controls.create_label("GiB per node"))
        self._nvme_row = nvme = Row(
            "NVMe", self.nvme, controls.create_label("GiB"), self.speed, controls.create_label("GB/s")
        )
        super().__init__(
            {
                "where": self._where_row,
                "inventory": self._kind_row,
                "gpu": Row("Type", self.type),
                "gpus_per_node": counts,
                "num_nodes": counts,
                "host_memory_bytes": host,
                "nvme_bytes": nvme,
                "nvme_bandwidth_bytes_per_second": nvme,
            },
            widgets.VBox(
                [self.host_hint, self.more, self.hint, self.idle, self.use_machine],
                layout=controls.share_layout(align_items="flex-start"),
            ),
        )
        self._filling = False
        self._base = cluster
        """Source of the values without an input; its sizes are exact, those of the inputs rounded."""
        self._show_node()
        self.use_machine.on_click(lambda _: self.set_value(self.machine))
        # Not read directly: a new type first replaces the node's links and memory.
        self.type.observe(self._reset_node, "value")
        self.where.observe(self._choose_place, "value")
        self.kind.observe(self._use_queue, "value")
        for control in (self.count, self.nodes, self.host, self.nvme, self.speed):
            control.observe(self.read, "value")
        self.read()

    def _show_more(self, _: object) -> None:
        self._is_open = not self._is_open
        self._fit_rows()

    def _fit_rows(self) -> None:
        """Show the memory inputs when requested, when a size is unknown, or when they have a message."""
        cluster = self.value
        is_unknown = cluster is not None and cluster.host_memory_bytes is None and cluster.gpu.name != "cpu"
        self.more.icon = "chevron-down" if self._is_open else "chevron-right"
        for row, wanted in ((self._host_row, is_unknown), (self._nvme_row, False)):
            is_shown = self._is_open or wanted or bool(row.message)
            controls.show_if(row, is_shown)
        controls.show_if(self.host_hint, is_unknown)

    def _show_error_at_input(self, error: Exception) -> None:
        super()._show_error_at_input(error)
        if isinstance(error, FieldError) and self._kind_row.message:
            name = self._queues[self.place].scheduler.name
            short = f"Choose one: {name}'s name for these GPUs fits several types."
            self._kind_row.show(True)
            self._kind_row.show_error(str(error), short=short)
        self._fit_rows()

    # ---- where the GPUs are

    def offer_queues(self, queues: Sequence[Queue]) -> None:
        """Offer ``queues`` as places; without any, the menu is hidden. The chosen place stays."""
        self._queues = {queue.label: queue for queue in queues}
        options = [("any", ANYWHERE), (f"this machine · {self.machine}", THIS_MACHINE)]
        options += [(f"{label} · {queue.description}", label) for label, queue in self._queues.items()]
        self._filling = True
        try:
            place = self.place if self.place in dict(options).values() else ANYWHERE
            if list(self.where.options) != options:
                # Setting the options selects the first one.
                self.where.options = options
            self.where.value = self.place = place
        finally:
            self._filling = False
        self._where_row.show(bool(queues))
        self.use_machine.layout = controls.share_layout(**({"display": "none"} if queues else {}))
        self._show_queue()

    @property
    def has_queues(self) -> bool:
        """Return whether queues are offered."""
        return bool(self._queues)

    def _choose_place(self, change: object) -> None:
        if self._filling:
            return
        self.place = self.where.value
        queue = self._queues.get(self.place)
        if queue is not None:
            options = [("choose", UNDECIDED), *((name, name) for name in queue.gpu_candidates)]
            # The type that the plan has is the user's answer, if this queue may have it.
            is_known = self.type.value in queue.gpu_candidates
            self._filling = True
            try:
                self.kind.options = options
                self.kind.value = self.type.value if is_known else UNDECIDED
            finally:
                self._filling = False
        self._show_queue()
        if self.place == THIS_MACHINE:
            self.set_value(self.machine)
        elif queue is not None:
            self._use_queue()
        else:
            self.read()

    def _use_queue(self, change: object = None) -> None:
        """Set the inputs to the inventory of the chosen queue, or show that its GPU type is not known."""
        queue = self._queues.get(self.place)
        if queue is None or self._filling:
            return
        try:
            cluster = queue.build_cluster(self.kind.value or None)
        except ValueError:
            self.read()  # Raises it again, and shows it.
        else:
            self.set_value(cluster)

    def _show_queue(self) -> None:
        queue = self._queues.get(self.place)
        self._kind_row.show(queue is not None and len(queue.gpu_candidates) > 1)
        self.idle.value = "" if queue is None else escape(f"{queue.label} has {queue.description}")
        controls.show_if(self.idle, queue is not None)

    def _leave_place(self) -> None:
        """Let the GPUs be anywhere: their type is no longer that of the chosen place."""
        self.place = self.where.value = ANYWHERE
        self._show_queue()

    def build_value(self, changes: Mapping[str, object] = NO_CHANGES) -> ss.Cluster:
        """Return the cluster given by the inputs, except for ``changes`` by field."""
        queue = self._queues.get(self.place)
        if queue is not None and self.kind.value == UNDECIDED and len(queue.gpu_candidates) != 1:
            queue.build_cluster(None)  # Raises ValueError if it needs a GPU type.
        values: dict[str, object] = {
            "gpus_per_node": parse_number(self.count.value),
            "num_nodes": parse_number(self.nodes.value),
            **changes,
        }
        # CPU ranks of several nodes have no catalogue entry with links: Cluster.parse builds them.
        if self._base.gpu.name == "cpu" and values["num_nodes"] != 1:
            return ss.Cluster.parse(f"{values['num_nodes']}x{values['gpus_per_node']}xcpu")
        # A value that still reads as it was shown stays exact: the inputs show at most ten digits.
        typed = {
            name: _parse_input(name, box.value)
            for name, box in self._node.items()
            if name not in changes and box.value != _format_input(name, getattr(self._base, name))
        }
        return replace_fields(self._base, {**typed, **values})

    def set_value(self, cluster: ss.Cluster) -> None:
        """Set the inputs to ``cluster``, as one change."""
        self._filling = True
        try:
            # A Dropdown rejects values that are not among its options.
            if cluster.gpu.name not in ss.gpus:
                self._known[cluster.gpu.name] = cluster.gpu
                self.type.options = list(self._known)
            if self.place != ANYWHERE and cluster.gpu.name != self._find_type_of_place():
                self._leave_place()
            self.type.value = cluster.gpu.name
            self.count.value, self.nodes.value = str(cluster.gpus_per_node), str(cluster.num_nodes)
            self._base = cluster
            self._show_node()
        finally:
            self._filling = False
        self.read()

    def _find_type_of_place(self) -> str:
        """Return the GPU type of the chosen place; empty if it is not known."""
        if self.place == THIS_MACHINE:
            return self.machine.gpu.name
        candidates = self._queues[self.place].gpu_candidates
        return self.kind.value if len(candidates) > 1 else candidates[0] if candidates else "cpu"

    @property
    def boxes(self) -> dict[str, widgets.ValueWidget]:
        """See :class:`Picker`."""
        return {"gpu": self.type, "gpus_per_node": self.count, "num_nodes": self.nodes, **self._node}

    @property
    def _node(self) -> dict[str, widgets.Text]:
        """The resources of each node by field."""
        return {
            "host_memory_bytes": self.host,
            "nvme_bytes": self.nvme,
            "nvme_bandwidth_bytes_per_second": self.speed,
        }

    def _show_node(self) -> None:
        for name, box in self._node.items():
            box.value = _format_input(name, getattr(self._base, name))

    def _reset_node(self, change: object) -> None:
        """Reset the node's resources to those of the new GPU type, whose hosts and links differ."""
        if self._filling:
            return
        self._filling = True
        try:
            # Host memory, NVMe and links are those of the new type's usual node, not of the previous one.
            self._base = ss.Cluster.of(self._known[self.type.value], 1)
            self._show_node()
            if self.place != ANYWHERE and self.type.value != self._find_type_of_place():
                self._leave_place()
        finally:
            self._filling = False
        self.read()

    def read(self, change: object = None) -> None:
        """Read the inputs and show how the GPUs are connected."""
        # While inputs are set one by one, only their final state is a cluster.
        if getattr(self, "_filling", False):
            return
        super().read(change)
        self._fit_rows()
        cluster = self.value
        if cluster is None:
            return
        self.answer = _summarize_cluster(cluster)
        is_cpu = cluster.gpu.name == "cpu"
        self._counts.name.value = "Ranks" if is_cpu else "GPUs"
        if is_cpu:
            memory = f"{cluster.gpu.memory_bytes / 2**30:.1f} GiB"
            self.hint.value = (
                f"{count_devices(cluster)} share {memory} of this host"
                if cluster.num_nodes == 1
                else f"Each node is taken to have {memory}, as this machine has"
            )
            return
        inside = cluster.intra_node_link
        hint = (
            f"{format_name(inside.name)}: {inside.bandwidth_bytes_per_second / 1e9:,.0f} GB/s per direction"
        )
        if cluster.num_nodes > 1:
            across = cluster.inter_node_link
            speed = f"{across.bandwidth_bytes_per_second / 1e9:,.3g} GB/s between nodes"
            hint += f" · {format_name(across.name)}: {speed}"
        self.hint.value = hint


def _summarize_cluster(cluster: ss.Cluster) -> str:
    """Return ``8 × H100 80 GB, NVLink 4``, or for several nodes ``64 × H100 80 GB, 8 nodes``.

    Where that is too long for the line of a folded question, only the number of GPUs.
    """
    if cluster.gpu.name == "cpu":
        return describe_devices(cluster)
    name = format_name(cluster.gpu.name).replace(" SXM", "").replace(" PCIe", "")
    if cluster.num_nodes > 1:
        gpus = f"{cluster.num_gpus:,} × {name}"
        whole = f"{gpus}, {cluster.num_nodes:,} nodes"
        return whole if len(whole) <= MAX_ANSWER else gpus
    return f"{cluster.num_gpus} × {name}, {format_name(cluster.intra_node_link.name)}"


def _format_input(name: str, value: float | None) -> str:
    """Return ``2,048``, or empty text if the value is unknown."""
    return "" if value is None else f"{value / UNITS[name]:,.10g}"


def _parse_input(name: str, text: str) -> float | None:
    """Return the input in bytes, or bytes per second; None if empty. Raises ``ValueError``."""
    if not text.strip():
        return None
    field = f"Cluster.{name}"
    if UNITS[name] == GIB:
        return parse_bytes(field, text)
    return parse_size(field, text, "GB/s", 0.001, 10_000, 10) * UNITS[name]
