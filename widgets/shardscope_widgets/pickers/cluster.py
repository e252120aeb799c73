"""Which GPUs: type, count, nodes, or this machine."""

from __future__ import annotations

import ipywidgets as widgets

import shardscope as ss
from shardscope_widgets import shared
from shardscope_widgets.pickers.base import Picker, Row, typed_number
from shardscope_widgets.words import device_count, title


class ClusterPicker(Picker):
    """The GPU inventory. "Use this machine" fills in what is here."""

    heading = "GPUs"

    def __init__(self, text: str = "8xh100-sxm-80gb") -> None:
        cluster = ss.Cluster.parse(text)
        self.machine = ss.Cluster.detect()
        self._known = {name: ss.gpus[name] for name in ss.gpus}
        self._known.setdefault(self.machine.gpu.name, self.machine.gpu)
        self.type = shared.dropdown(options=list(self._known), value=cluster.gpu.name, tooltip="GPU type")
        self.count = shared.text(cluster.gpus_per_node, "GPUs in each node", "48px")
        self.nodes = shared.text(cluster.num_nodes, "Nodes", "40px")
        self.hint = shared.html("", "ss-hint")
        self.use_machine = shared.button("Use this machine", "ss-link", tooltip=f"Here: {self.machine}")
        counts = Row("Count", self.count, shared.label("GPUs ×"), self.nodes, shared.label("nodes"))
        super().__init__(
            {"gpu": Row("Type", self.type), "gpus_per_node": counts, "num_nodes": counts},
            widgets.VBox([self.hint, self.use_machine], layout=shared.layout(align_items="flex-start")),
        )
        self._filling = False
        self.use_machine.on_click(lambda _: self.fill(self.machine))
        for control in (self.type, self.count, self.nodes):
            control.observe(self.read, "value")
        self.read()

    def make(self) -> ss.Cluster:
        """The cluster that the inputs describe."""
        gpu = self._known[self.type.value]
        if gpu.name == "cpu" and typed_number(self.nodes.value) != 1:
            return ss.Cluster.parse(f"{self.nodes.value}x{self.count.value}xcpu")
        return ss.Cluster.of(gpu, typed_number(self.count.value), typed_number(self.nodes.value))

    def fill(self, cluster: ss.Cluster) -> None:
        """Set the inputs to ``cluster``, as one change."""
        self._filling = True
        try:
            self._known.setdefault(cluster.gpu.name, cluster.gpu)
            self.type.value = cluster.gpu.name
            self.count.value, self.nodes.value = str(cluster.gpus_per_node), str(cluster.num_nodes)
        finally:
            self._filling = False
        self.read()

    def read(self, change: object = None) -> None:
        """Take the inputs over and say how the GPUs are connected."""
        if getattr(self, "_filling", False):
            return
        super().read(change)
        cluster = self.value
        if cluster is None:
            return
        if cluster.gpu.name == "cpu":
            self.hint.value = (
                f"{device_count(cluster)} share {cluster.gpu.memory_bytes / 2**30:.1f} GiB of this host"
            )
            return
        inside = cluster.intra_node_link
        words = f"{title(inside.name)}: {inside.bandwidth_bytes_per_second / 1e9:,.0f} GB/s each way"
        if cluster.num_nodes > 1:
            across = cluster.inter_node_link
            words += (
                f" · {title(across.name)}: {across.bandwidth_bytes_per_second / 1e9:,.3g} GB/s between nodes"
            )
        self.hint.value = words
