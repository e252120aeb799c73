"""Speeds of one machine: matmuls by size and precision, memory, links.

Built from the catalogue (catalog/efficiency.toml, by GPU generation) or from curves measured on the machine
itself. All step-time formulas take their speeds from here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, NamedTuple, cast

import numpy as np

from shardscope.catalog import links, load_efficiency
from shardscope.core.cluster import ASSUMED_LINK, ASSUMED_NETWORK
from shardscope.core.errors import find_similar, refuse
from shardscope.core.ops import maximum

if TYPE_CHECKING:
    from shardscope.core.cluster import Cluster, Gpu, Link


class MatrixRate(NamedTuple):
    """Matmul speed in one precision."""

    flops_per_second: float
    """Speed of large matmuls."""
    half_size: float
    """The 1 / (1/m + 1/k + 1/n) at which half of that speed is reached, fitted to measured matmuls."""
    peak_flops: float | None
    """Datasheet peak; None: unknown (a measured machine)."""
    balance: float = 0.0
    """The 1 / (1/m + 1/k + 1/n) below which a matmul is memory-bound; 0: included in the measured size
    effect."""
    unaligned_slowdown: float = 0.0
    """Relative slowdown of a matmul with a dimension that is not a multiple of 128 bytes."""

    def seconds(self, multiplied: float, moved: float, unaligned: float = 0) -> float:
        """Return the seconds of matmuls that multiply and move these numbers of elements.

        One m x k by k x n matmul multiplies ``multiplied`` = m k n pairs and moves ``moved`` = m k + k n + m
        n numbers. ``unaligned`` pairs are in matmuls with unaligned dimensions. Memory bandwidth is a lower
        bound of the time (the roofline of Williams et al. 2009), applied to the sum of several matmuls.
        Arrays give arrays.
        """
        counted = multiplied + self.half_size * moved + self.unaligned_slowdown * unaligned
        return 2 * maximum(counted, self.balance * moved) / self.flops_per_second


class AttentionRate(NamedTuple):
    """Speed of fused attention in one precision, in causal FLOPs."""

    forward: float
    """FLOP/s of its two forward matmuls."""
    backward: float
    """FLOP/s of its five backward matmuls, recomputed scores included."""
    half_keys: float
    """Sequence length in tokens at which half of these speeds is reached."""


FusedAttention = Literal["sdpa", "flash", "cudnn"]
"""Who runs fused attention: torch's ``scaled_dot_product_attention``, with kernels of its own choice;
FlashAttention; or cuDNN, chosen by Transformer Engine."""
MAX_SDPA_HEAD_DIM = 128
"""The widest head for which cuDNN's kernels under ``scaled_dot_product_attention`` were measured."""


class Passes(NamedTuple):
    """Bytes moved by operators per byte saved for backward, and number of kernels."""

    forward: float
    backward: float
    kernels_forward: float
    """Kernels of one layer's forward."""
    kernels_backward: float
    kernels_experts_forward: float
    """Kernels that routed experts add to a layer's forward."""
    kernels_experts_backward: float
    kernels_eager_forward: float
    """Kernels that eager attention adds to a layer's forward."""
    kernels_eager_backward: float
    kernels_norm_forward: float
    """Kernels of each norm beyond a layer's two: of queries, of keys, of an output."""
    kernels_norm_backward: float
    kernels_latent_forward: float
    """Kernels that latent attention without a query rank adds to a layer's forward, its norm included."""
    kernels_latent_backward: float
    kernels_shared_forward: float
    """Kernels of a shared expert."""
    kernels_shared_backward: float
    kernels_ends_forward: float
    """Kernels of embedding, final norm, head and loss."""
    kernels_ends_backward: float
    kernels_loss_chunk: float
    """Kernels that each chunk of a fused linear cross-entropy adds to forward."""
    host_factor: float
    """Host time of one kernel of these modules, relative to transformers': the Python around it."""
    slowdown: float
    """Time of these operators relative to that of moving their bytes at the memory's bandwidth."""


class CheckpointCalls(NamedTuple):
    """Host time of a layer's operators under torch's checkpoint, or its hooks, relative to without."""

    forward: float
    """In the forward, which saves only what the checkpoint keeps."""
    repeated: float
    """In the forward that backward repeats."""
    backward: float
    """In the rest of backward."""


class LinkRate(NamedTuple):
    """Effective speed of one link in collectives."""

    name: str
    bytes_per_second: float
    """One-way bandwidth per GPU."""
    latency_seconds: float
    """Time of one ring step with a small message."""


class MeasuredCalls(NamedTuple):
    """Measured times of one collective on this machine, by size."""

    ranks: int
    """Number of ranks in the group, on one node."""
    log_bytes: tuple[float, ...]
    """Natural logarithms of the full vector's bytes, increasing."""
    log_seconds: tuple[float, ...]
    """Natural logarithms of the seconds of one call."""

    def seconds(self, num_bytes: float, messages: float) -> float:
        """Return the seconds of one vector in ``messages`` calls.

        Interpolates linearly in logarithms; larger sizes continue at the last bandwidth.
        """
        sizes, seconds = self.log_bytes, self.log_seconds
        # At least one byte: the logarithm of 0 is no number, and columns of plans may have 0 bytes.
        size = maximum(cast("float", np.log(maximum(num_bytes / messages, 1.0))), sizes[0])
        # A sum of kinks at the measured sizes, because columns of plans do not support np.interp.
        log_of_call = seconds[0]
        slope = 0.0
        for index, at in enumerate(sizes):
            # Past the largest size, time grows in proportion to bytes: slope 1 in logarithms.
            after = 1.0
            if index + 1 < len(sizes):
                after = (seconds[index + 1] - seconds[index]) / (sizes[index + 1] - at)
            log_of_call = log_of_call + (after - slope) * maximum(size - at, 0.0)
            slope = after
        return messages * cast("float", np.exp(log_of_call))


_NO_CHECKPOINT = CheckpointCalls(1.0, 1.0, 1.0)


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Speeds of one cluster."""

    matrices: Mapping[str, MatrixRate]
    """By precision: "bf16", "fp16", "fp8", "fp32", "tf32", as far as known."""
    flash_attention: Mapping[str, AttentionRate]
    """FlashAttention's kernels, by precision; in fp32, torch's memory-efficient ones."""
    cudnn_attention: Mapping[str, AttentionRate]
    """cuDNN's attention, used by Transformer Engine from Hopper on; empty if it uses FlashAttention too."""
    sdpa: Mapping[str, AttentionRate]
    """What torch's ``scaled_dot_product_attention`` chooses for heads of at most
    :data:`MAX_SDPA_HEAD_DIM`: cuDNN's or FlashAttention's; or what was measured of it."""
    memory_bytes_per_second: float | None
    """Bandwidth of memory-bound operators; None: unknown."""
    kernel_seconds: float
    """Host time of one kernel launch."""
    operators: Mapping[str, Passes]
    """By ``Recipe.kernels``."""
    checkpoints: Mapping[str, CheckpointCalls]
    """By ``Recipe.recompute``, of torch's checkpoint and of its hooks for saved tensors."""
    inside: LinkRate
    """Between the GPUs of a node."""
    collectives: Mapping[str, MeasuredCalls] = field(default_factory=dict)
    """Measured collectives by name, for intra-node groups of the measured size; others use link rates."""
    between: LinkRate
    """Between nodes, per GPU."""
    host: LinkRate
    """Between a GPU and its host."""
    host_updates_per_second: float
    """Parameters updated per second by one node's CPU, all its ranks together."""
    source: str
    """Source of these speeds, as text for the user."""

    def __hash__(self) -> int:
        # Used as cache key of every collective: hashing the distinguishing fields only is faster.
        return hash((self.source, self.memory_bytes_per_second))

    def get_matmul_rate(self, precision: str) -> MatrixRate:
        """Return the matmul rate of ``precision``. Raise ``ValueError`` if it is unknown."""
        rate = self.matrices.get(precision)
        if rate is None:
            halves = [name for name in ("bf16", "fp16") if name in self.matrices]
            refuse(
                f"Gpu.peak_flops[{precision!r}]",
                None,
                "the GPU's dense FLOP/s in this precision, or a calibration of the machine"
                + (f"; its matrix units have {' and '.join(halves)}" if halves else ""),
                f"Recipe(precision='{halves[0]}-mixed')" if halves else "ss.calibrate()",
                f"The {precision} FLOP/s of this device are unknown",
            )
        return rate

    def get_attention_rate(self, precision: str, kernels: FusedAttention) -> AttentionRate:
        """Return the rate of these fused attention kernels.

        Raises ``ValueError`` if the matmul or the attention rate of ``precision`` is unknown.
        """
        self.get_matmul_rate(precision)
        rates = {"cudnn": self.cudnn_attention, "sdpa": self.sdpa, "flash": self.flash_attention}[kernels]
        rate = rates.get(precision) or self.flash_attention.get(precision)
        if rate is None:
            # A calibration that was cut short, or written by hand, may have matmuls without attention.
            measured = ", ".join(self.sdpa) or "none"
            allowed = f"a precision whose attention was measured here ({measured}), or a complete calibration"
            refuse("Recipe.precision", precision, allowed, "ss.calibrate()")
        return rate

    def get_passes(self, kernels: str) -> Passes:
        """Return the memory passes of these modules' operators."""
        return self.operators[kernels]

    def get_checkpoint_calls(self, recompute: str, kernels: str) -> CheckpointCalls:
        """Return the host time of operators by ``Recipe.recompute``: 1 without torch's checkpoint and hooks.

        Megatron has a checkpoint of its own. Compiled layers were not timed.
        """
        calls = self.checkpoints.get(recompute)
        return calls if calls and kernels in ("transformers", "liger") else _NO_CHECKPOINT

    def get_memory_bandwidth(self) -> float:
        """Return the bandwidth of memory-bound operators. Raise ``ValueError`` if it is unknown."""
        if self.memory_bytes_per_second is None:
            refuse(
                "Gpu.memory_bandwidth_bytes_per_second",
                None,
                "the bandwidth between the GPU and its memory, or a calibration of the machine",
                "ss.calibrate()",
            )
        return self.memory_bytes_per_second


@lru_cache(maxsize=64)
def look_up_rates(cluster: Cluster) -> Rates:
    """Return the catalogue's speeds of ``cluster``."""
    table, gpu = load_efficiency(), cluster.gpu
    generation = gpu.architecture or "default"
    products = _get_or_default(table["matrices"], generation)
    bandwidth = gpu.memory_bandwidth_bytes_per_second
    # An unknown bandwidth stays None: get_memory_bandwidth raises the error if a step needs it.
    memory = bandwidth and bandwidth * _get_or_default(table["memory"], generation)["share"]
    flash = _build_attention_rates(gpu.peak_flops, _get_or_default(table["attention"], generation))
    cudnn = _build_attention_rates(gpu.peak_flops, _get_generation(table["cudnn_attention"], generation))
    halves = {name: rate for name, rate in cudnn.items() if name in ("bf16", "fp16")}
    # Datasheet figures of the cluster times the share that training steps reach, one section of
    # efficiency.toml for each kind of work.
    return Rates(
        matrices=MappingProxyType(
            {precision: _build_matmul_rate(precision, gpu, products, memory) for precision in gpu.peak_flops}
        ),
        flash_attention=flash,
        cudnn_attention=cudnn,
        sdpa=MappingProxyType({**flash, **halves}) if prefers_cudnn_attention(gpu) else flash,
        memory_bytes_per_second=memory,
        kernel_seconds=_get_or_default(table["launch"], generation)["seconds_per_kernel"],
        operators=_build_passes(_get_or_default(table["unfused"], generation)["slowdown"]),
        checkpoints=MappingProxyType(
            {
                name: CheckpointCalls(timed["forward"], timed["repeated"], timed["backward"])
                for name, timed in table["checkpoint"].items()
            }
        ),
        inside=_build_link_rate(cluster.intra_node_link, table["link"]["inside"]),
        between=_build_link_rate(cluster.inter_node_link, table["link"]["between"]),
        host=_build_link_rate(cluster.host_link, table["link"]["host"]),
        host_updates_per_second=table["host_update"]["default"]["parameters_per_second"],
        source=_describe_figures(gpu.architecture, table["matrices"]),
    )


def prefers_cudnn_attention(gpu: Gpu) -> bool:
    """Return whether ``scaled_dot_product_attention`` takes cuDNN's kernels in bf16 and fp16.

    It does on compute capability 9.0, 10.0 and 10.3.

    Source: torch 2.13, aten/src/ATen/native/transformers/cuda/sdp_utils.cpp,
    ``check_prefer_cudnn_attention``, with cuDNN above 9.15.0, as in torch's CUDA 13 wheels from 2.11 on;
    seen in profiles of torch 2.11 on an H100. With a mask too (pytorch issue 196678).
    """
    return gpu.architecture in ("hopper", "blackwell", "blackwell-ultra")


def _describe_figures(generation: str | None, fitted: Mapping[str, Mapping[str, float]]) -> str:
    """Return the source of a GPU generation's figures in catalog/efficiency.toml, as text for the user."""
    if generation is None or _get_generation(fitted, generation) is None:
        return "default efficiency figures, because none were fitted for this GPU generation"
    if generation not in fitted:
        name = generation.split("-")[0].title()
        return f"efficiency figures for {name} GPUs of data centers: none were fitted for {generation}"
    name = generation.replace("-", " ").title()
    return f"efficiency figures for {name} GPUs, fitted to published runs"


_NETWORKS = ("infiniband", "roce", "ethernet")


def check_links(cluster: Cluster, rates: Rates) -> None:
    """Raise ``ValueError`` if the link between GPUs of a node, or between nodes, is only assumed.

    :meth:`Cluster.of` assumes PCIe 4.0 between GPUs whose entry has no link, and Ethernet between nodes of
    GPUs that are not in the catalogue: enough to make a plan, but a guess of its speed.
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
    # A calibration measures the link, whatever the cluster assumes; equal rates show that there was none.
    if rates.inside == look_up_rates(cluster).inside:
        refuse(
            "Gpu.link",
            name,
            f"the link between GPUs of one node, one of {', '.join(links)}; or another intra_node_link of "
            "the cluster, or a calibration of the machine",
            {"link": find_similar(name, links) or ASSUMED_LINK},
        )


MOVED_BYTES = {"fp8": 4 / 3, "bf16": 2, "fp16": 2, "fp32": 4, "tf32": 4}
"""Bytes per element moved by a matmul, the mean of both operands and the output (bf16 for fp8)."""


def _build_matmul_rate(
    precision: str, gpu: Gpu, fitted: Mapping[str, float], memory: float | None
) -> MatrixRate:
    """Return the matmul rate: a share of the peak, limited by memory bandwidth and power.

    Without a known bandwidth, which a step needs anyway, there is no memory limit. The energy per FLOP is
    inversely proportional to a dtype's peak.
    """
    peak = gpu.peak_flops[precision]
    reached = peak * fitted["share"]
    # efficiency.toml fits ``joules_per_flop`` in bf16; other precisions scale with their peaks.
    half_peak = gpu.peak_flops.get("bf16")
    if "joules_per_flop" in fitted and gpu.tdp_watts and half_peak:
        reached = min(reached, gpu.tdp_watts / fitted["joules_per_flop"] * peak / half_peak)
    # Chosen so that 2 x balance x moved / reached, the lower bound in ``MatrixRate.seconds``, is the time in
    # which memory moves these bytes.
    balance = MOVED_BYTES[precision] * reached / 2 / memory if memory else 0.0
    return MatrixRate(reached, fitted["half_size"], peak, balance, fitted.get("slower_unaligned", 0.0))


def _build_passes(unfused_slowdown: float) -> Mapping[str, Passes]:
    """Return each stack's passes; kernels of transformers' modules, which fuse nothing, take longer."""
    passes: dict[str, Passes] = {}
    for kernels, counted in load_efficiency()["passes"].items():
        figures = {**counted, "slowdown": unfused_slowdown if kernels == "transformers" else 1.0}
        passes[kernels] = Passes(*(figures[name] for name in Passes._fields))
    return MappingProxyType(passes)


def _build_link_rate(link: Link, reached: Mapping[str, float]) -> LinkRate:
    return LinkRate(
        link.name,
        link.bandwidth_bytes_per_second * reached["share"],
        link.latency_seconds * reached["latency_factor"],
    )


def _build_attention_rates(
    peaks: Mapping[str, float], reached: Mapping[str, float] | None
) -> Mapping[str, AttentionRate]:
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


def _get_or_default(table: Mapping[str, Mapping[str, float]], generation: str) -> Mapping[str, float]:
    return _get_generation(table, generation) or table["default"]


def _get_generation(table: Mapping[str, Mapping[str, float]], generation: str) -> Mapping[str, float] | None:
    """Return the generation's figures, or those of the one it refines: "blackwell" for "blackwell-ultra"."""
    return table.get(generation) or table.get(generation.split("-")[0])
