"""How fast this machine is: matrix products by size and precision, memory, links.

One small type, made from the catalogue (catalog/efficiency.toml, by GPU generation) or from curves that were
measured on the machine itself. Every formula of the step's time reads its speeds here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from shardscope.catalog import entries, links
from shardscope.core.arrays.arithmetic import largest
from shardscope.core.cluster import ASSUMED_LINK, ASSUMED_NETWORK
from shardscope.core.errors import refuse

if TYPE_CHECKING:
    from shardscope.core.cluster import Cluster, Gpu, Link


class MatrixRate(NamedTuple):
    """How fast products of two matrices are in one precision."""

    flops_per_second: float
    """What large ones reach."""
    half_size: float
    """Where 1 / (1/m + 1/k + 1/n) is this, half of it is reached: what measured products say of size."""
    peak_flops: float | None
    """The datasheet's; None: not known (a measured machine)."""
    balance: float = 0.0
    """Where that is this, memory takes as long to move what is multiplied; 0: measured with the rest."""
    slower_unaligned: float = 0.0
    """How much longer a product takes of which an edge is no multiple of 128 bytes, as a share."""

    def seconds(self, multiplied: Any, moved: Any, unaligned: Any = 0) -> Any:
        """Seconds of products that multiply ``multiplied`` pairs of numbers and move ``moved`` numbers.

        Of one m x k by k x n that is m k n and m k + k n + m n. ``unaligned`` of the pairs are in products
        that miss the matrix units' multiple. No product is faster than memory moves it (the roofline of
        Williams et al. 2009); of several, memory is asked for all of them together. Arrays give arrays.
        """
        counted = multiplied + self.half_size * moved + self.slower_unaligned * unaligned
        return 2 * largest(counted, self.balance * moved) / self.flops_per_second


class AttentionRate(NamedTuple):
    """How fast fused attention is in one precision, by the FLOPs that a causal mask leaves."""

    forward: float
    """FLOP/s of its two products."""
    backward: float
    """FLOP/s of its five: scores are computed again."""
    half_keys: float
    """Tokens of a sequence at which half of that is reached."""


class Passes(NamedTuple):
    """Bytes that operators move for each byte that they save for backward, and how many kernels they are."""

    forward: float
    backward: float
    kernels_forward: float
    """Of one layer."""
    kernels_backward: float
    kernels_experts_forward: float
    """Those that routed experts add to a layer."""
    kernels_experts_backward: float


class LinkRate(NamedTuple):
    """How fast one link is, as collectives meet it."""

    name: str
    bytes_per_second: float
    """What one GPU sends, one way."""
    latency_seconds: float
    """One step of a ring with a small message."""


class MeasuredCalls(NamedTuple):
    """One collective as it was measured on this machine, by size."""

    ranks: int
    """In the group, on one node."""
    log_bytes: tuple[float, ...]
    """Natural logarithms of the whole vector's bytes, rising."""
    log_seconds: tuple[float, ...]
    """Of one call."""

    def seconds(self, num_bytes: Any, messages: Any) -> Any:
        """One vector in ``messages`` calls: on a line of logarithms, past its end at the last speed."""
        sizes, seconds = self.log_bytes, self.log_seconds
        size = largest(np.log(largest(num_bytes / messages, 1.0)), sizes[0])
        # A bend at each measured size, for columns of plans know no np.interp.
        found: Any = seconds[0]
        slope = 0.0
        for index, at in enumerate(sizes):
            after = 1.0
            if index + 1 < len(sizes):
                after = (seconds[index + 1] - seconds[index]) / (sizes[index + 1] - at)
            found = found + (after - slope) * largest(size - at, 0.0)
            slope = after
        return messages * np.exp(found)


@dataclass(frozen=True, kw_only=True)
class Rates:
    """The speeds of one cluster."""

    matrices: Mapping[str, MatrixRate]
    """By precision: "bf16", "fp16", "fp8", "fp32", "tf32", as far as they are known."""
    attention: Mapping[str, AttentionRate]
    """Fused attention, by precision."""
    cudnn_attention: Mapping[str, AttentionRate]
    """cuDNN's, which Transformer Engine takes from Hopper on; empty where it takes FlashAttention too."""
    memory_bytes_per_second: float | None
    """What operators reach that only read and write; None: not known."""
    kernel_seconds: float
    """What the host takes to start one kernel."""
    operators: Mapping[str, Passes]
    """By ``Recipe.kernels``."""
    inside: LinkRate
    """Between the GPUs of a node."""
    collectives: Mapping[str, MeasuredCalls] = field(default_factory=dict)
    """By name, for groups inside a node of as many ranks as were measured; others go by their links."""
    between: LinkRate
    """Between nodes, per GPU."""
    host: LinkRate
    """Between a GPU and its host."""
    host_updates_per_second: float
    """Parameters that one node's host updates in a second, all its ranks together."""
    source: str
    """Where these come from, in words."""

    def __hash__(self) -> int:
        # Looked up with every collective: by what tells machines apart, and not field by field.
        return hash((self.source, self.memory_bytes_per_second))

    def matrix(self, precision: str) -> MatrixRate:
        """Products in ``precision``. Raises ``ValueError`` where their speed is not known."""
        found = self.matrices.get(precision)
        if found is None:
            halves = [name for name in ("bf16", "fp16") if name in self.matrices]
            refuse(
                f"Gpu.peak_flops[{precision!r}]",
                None,
                "the GPU's dense FLOP/s in this precision, or a calibration of the machine"
                + (f"; its matrix units have {' and '.join(halves)}" if halves else ""),
                f"Recipe(precision='{halves[0]}-mixed')" if halves else "ss.calibrate()",
            )
        return found

    def attend(self, precision: str, kernels: str) -> AttentionRate:
        """Fused attention of these modules in ``precision``, whose products' speed is known."""
        self.matrix(precision)
        own = self.cudnn_attention.get(precision) if kernels == "megatron" else None
        return own or self.attention[precision]

    def passes(self, kernels: str) -> Passes:
        """Operators of these modules."""
        return self.operators[kernels]

    def memory(self) -> float:
        """Bytes a second of memory-bound operators. Raises ``ValueError`` where that is not known."""
        if self.memory_bytes_per_second is None:
            refuse(
                "Gpu.memory_bandwidth_bytes_per_second",
                None,
                "the bandwidth between the GPU and its memory, or a calibration of the machine",
                "ss.calibrate()",
            )
        return self.memory_bytes_per_second


@lru_cache(maxsize=64)
def rates_of(cluster: Cluster) -> Rates:
    """The speeds of ``cluster`` by the catalogue."""
    table, gpu = entries("efficiency"), cluster.gpu
    generation = gpu.architecture or "default"
    products = _of(table["matrices"], generation)
    bandwidth = gpu.memory_bandwidth_bytes_per_second
    memory = bandwidth and bandwidth * _of(table["memory"], generation)["share"]
    known = generation if _own(table["matrices"], generation) else "generations without figures of their own"
    return Rates(
        matrices=MappingProxyType(
            {precision: _matrix(precision, gpu, products, memory) for precision in gpu.peak_flops}
        ),
        attention=_attention(gpu.peak_flops, _of(table["attention"], generation)),
        cudnn_attention=_attention(gpu.peak_flops, _own(table["cudnn_attention"], generation)),
        memory_bytes_per_second=memory,
        kernel_seconds=_of(table["launch"], generation)["seconds_per_kernel"],
        operators=MappingProxyType(
            {
                kernels: Passes(*(counted[field] for field in Passes._fields))
                for kernels, counted in table["passes"].items()
            }
        ),
        inside=_link(cluster.intra_node_link, table["link"]["inside"]),
        between=_link(cluster.inter_node_link, table["link"]["between"]),
        host=_link(cluster.host_link, table["link"]["host"]),
        host_updates_per_second=table["host_update"]["parameters_per_second"],
        source=f"the catalogue's constants for {known}",
    )


_NETWORKS = ("infiniband", "roce", "ethernet")


def check_links(cluster: Cluster, rates: Rates) -> None:
    """Raise ``ValueError`` where GPUs of one node, or nodes, have a link that nobody named or measured.

    :meth:`Cluster.of` puts PCIe 4.0 between GPUs whose entry has none, and Ethernet between nodes of GPUs
    that the catalogue does not have: enough to make a plan, but a guess of its speed.
    """
    if cluster.num_nodes > 1 and cluster.inter_node_link.name == ASSUMED_NETWORK:
        networks = ", ".join(name for name in links if name.startswith(_NETWORKS))
        refuse(
            "Cluster.inter_node_link",
            ASSUMED_NETWORK,
            f"the link between nodes, one of {networks}, or a Link of your own",
            "dataclasses.replace(cluster, inter_node_link=shardscope.catalog.links['infiniband-ndr'])",
        )
    name = cluster.gpu.link
    if cluster.gpus_per_node == 1 or name in links or cluster.intra_node_link.name != ASSUMED_LINK:
        return
    if rates.inside == rates_of(cluster).inside:
        refuse(
            "Gpu.link",
            name,
            f"the link between GPUs of one node, one of {', '.join(links)}; or another intra_node_link of "
            "the cluster, or a calibration of the machine",
            {"link": ASSUMED_LINK},
        )


_MOVED_BYTES = {"fp8": 4 / 3, "bf16": 2, "fp16": 2, "fp32": 4, "tf32": 4}
"""Bytes of a number that a product moves, the mean of both operands and what it puts out (from fp8: bf16)."""


def _matrix(precision: str, gpu: Gpu, fitted: Mapping[str, Any], memory: float | None) -> MatrixRate:
    """Products at a share of the peak, as long as memory and the card's power limit keep up with them.

    Without a known bandwidth, which a step needs anyway, nothing is said of that. Of a narrower type a FLOP
    takes as much less energy as its peak is higher.
    """
    peak = gpu.peak_flops[precision]
    reached = peak * fitted["share"]
    half_peak = gpu.peak_flops.get("bf16")
    if "joules_per_flop" in fitted and gpu.tdp_watts and half_peak:
        reached = min(reached, gpu.tdp_watts / fitted["joules_per_flop"] * peak / half_peak)
    balance = _MOVED_BYTES[precision] * reached / 2 / memory if memory else 0.0
    return MatrixRate(reached, fitted["half_size"], peak, balance, fitted.get("slower_unaligned", 0.0))


def _link(link: Link, reached: Mapping[str, Any]) -> LinkRate:
    return LinkRate(
        link.name,
        link.bandwidth_bytes_per_second * reached["share"],
        link.latency_seconds * reached["latency_factor"],
    )


def _attention(peaks: Mapping[str, float], reached: Mapping[str, Any] | None) -> Mapping[str, AttentionRate]:
    if reached is None:
        return MappingProxyType({})
    return MappingProxyType(
        {
            precision: AttentionRate(
                peak * reached["forward"], peak * reached["backward"], reached["half_keys"]
            )
            for precision, peak in peaks.items()
        }
    )


def _of(table: Mapping[str, Any], generation: str) -> Mapping[str, Any]:
    found: Mapping[str, Any] = _own(table, generation) or table["default"]
    return found


def _own(table: Mapping[str, Any], generation: str) -> Mapping[str, Any] | None:
    """What is known of the generation, or of the one that it refines: "blackwell" of "blackwell-ultra"."""
    return table.get(generation) or table.get(generation.split("-")[0])
