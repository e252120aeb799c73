"""Curves measured on a machine, and the rates that a prediction takes from them.

``ss.calibrate()`` measures them (``runs/calibrate/``), ``store.py`` stores them, :func:`select_rates` selects
those that match a cluster.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import datetime
from statistics import median
from typing import TYPE_CHECKING, Literal, Self, get_args

from shardscope.core.cluster import PRECISIONS
from shardscope.core.errors import Value, check_choice, check_integer, check_number, check_printable, refuse
from shardscope.core.html_table import render_html_table
from shardscope.core.serialization import Serializable

if TYPE_CHECKING:
    import pandas as pd

    from shardscope.core.cluster import Cluster
    from shardscope.timing.rates import Rates

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"]
COLLECTIVES: tuple[Collective, ...] = get_args(Collective)
DIRECTIONS = ("to_gpu", "to_host")
MAX_SECONDS = 3_600.0
"""Maximum time of one measured call."""
MAX_BYTES = 2**45
MAX_POINTS = 1_000
MAX_RANKS = 1_024


def _check_seconds(owner: str, value: object) -> None:
    check_number(f"{owner}.seconds", value, low=1e-9, high=MAX_SECONDS)


@dataclass(frozen=True, kw_only=True)
class MatrixProduct(Serializable):
    """Measured matmul of a ``rows`` x ``inner`` by an ``inner`` x ``columns`` matrix."""

    precision: str
    """"fp32", "tf32", "bf16" or "fp16"."""
    rows: int
    inner: int
    columns: int
    seconds: float
    """Seconds of one matmul, while all ranks multiply: a third of one forward matmul and backward's two."""

    def __post_init__(self) -> None:
        check_choice("MatrixProduct.precision", self.precision, PRECISIONS)
        for name in ("rows", "inner", "columns"):
            check_integer(f"MatrixProduct.{name}", getattr(self, name), low=1, high=2**20)
        _check_seconds("MatrixProduct", self.seconds)

    @property
    def flops_per_second(self) -> float:
        """FLOP/s, with 2 x rows x inner x columns FLOPs per matmul."""
        return 2.0 * self.rows * self.inner * self.columns / self.seconds


@dataclass(frozen=True, kw_only=True)
class AttentionPass(Serializable):
    """Measured causal attention in one precision, forward and backward (scaled_dot_product_attention)."""

    precision: str
    seq_len: int
    num_heads: int
    """Heads, summed over all sequences of the batch."""
    head_dim: int
    forward_seconds: float
    backward_seconds: float

    def __post_init__(self) -> None:
        check_choice("AttentionPass.precision", self.precision, PRECISIONS)
        for name in ("seq_len", "num_heads", "head_dim"):
            check_integer(f"AttentionPass.{name}", getattr(self, name), low=1, high=2**24)
        for name in ("forward_seconds", "backward_seconds"):
            check_number(f"AttentionPass.{name}", getattr(self, name), low=1e-9, high=MAX_SECONDS)

    @property
    def flops_forward(self) -> float:
        """FLOPs of two matmuls, of which causal attention needs one half (Dao 2023, section 4.1)."""
        return 2.0 * self.num_heads * self.seq_len**2 * self.head_dim

    @property
    def flops_backward(self) -> float:
        """FLOPs of five matmuls (Dao 2023: 2.5 times the forward's)."""
        return 2.5 * self.flops_forward


@dataclass(frozen=True, kw_only=True)
class MemoryPass(Serializable):
    """Measured memory-bound operator: a sum of two tensors."""

    num_bytes: int
    """Bytes read and written."""
    seconds: float
    """Seconds while all ranks do the same."""

    def __post_init__(self) -> None:
        check_integer("MemoryPass.num_bytes", self.num_bytes, low=1, high=MAX_BYTES)
        _check_seconds("MemoryPass", self.seconds)


@dataclass(frozen=True, kw_only=True)
class HostCopy(Serializable):
    """Measured copy between pinned host memory and a GPU, while all GPUs copy."""

    direction: str
    """"to_gpu" or "to_host"."""
    num_bytes: int
    seconds: float

    def __post_init__(self) -> None:
        check_choice("HostCopy.direction", self.direction, DIRECTIONS)
        check_integer("HostCopy.num_bytes", self.num_bytes, low=1, high=MAX_BYTES)
        _check_seconds("HostCopy", self.seconds)


@dataclass(frozen=True, kw_only=True)
class CollectiveCall(Serializable):
    """Measured collective over all ranks of the calibration; "send" is one message to the next rank."""

    collective: Collective
    num_bytes: int
    """Bytes of the full vector: each rank's output of an all-gather, or its input to a reduction."""
    seconds: float

    def __post_init__(self) -> None:
        check_choice("CollectiveCall.collective", self.collective, COLLECTIVES)
        check_integer("CollectiveCall.num_bytes", self.num_bytes, low=1, high=MAX_BYTES)
        _check_seconds("CollectiveCall", self.seconds)


_curves: dict[str, type[Serializable]] = {
    "matrix_products": MatrixProduct,
    "attention": AttentionPass,
    "memory_passes": MemoryPass,
    "host_copies": HostCopy,
    "collectives": CollectiveCall,
}


@dataclass(frozen=True, kw_only=True)
class Calibration(Serializable):
    """Measurements of one machine's ranks, with their conditions. Raises ``ValueError`` for bad values.

    Each time is the first quartile of several calls, on the slowest rank, while all ranks do the same: what a
    synchronous step takes on an otherwise idle machine. Computation on CPU ranks is measured in CPU time; for
    collectives, the fastest call counts.
    """

    machine: str
    """Host name."""
    processor: str
    """Host processor, as named by the system."""
    num_cores: int
    """Number of cores available to all ranks together."""
    gpu: str
    """Name of the GPU type; "cpu" for CPU ranks."""
    num_ranks: int
    """Number of ranks that measured at the same time."""
    threads_per_rank: int
    """Number of intra-op CPU threads of torch per rank."""
    backend: str
    """Backend of the collectives: "gloo" or "nccl"."""
    torch_version: str
    measured_at: str
    """Start time: ISO 8601, with the offset from UTC."""
    measuring_seconds: float
    """Duration, process start included."""
    load: float
    """Runnable processes per core in the minute before: well above 0, other processes disturbed the
    measurement."""
    kernel_seconds: float
    """Host time to launch one operator of a transformers layer, the Python code of its modules included."""
    host_updates_per_second: float
    """Parameters updated per second by torch's fused AdamW in host memory, all ranks together."""
    matrix_products: tuple[MatrixProduct, ...]
    attention: tuple[AttentionPass, ...]
    memory_passes: tuple[MemoryPass, ...]
    host_copies: tuple[HostCopy, ...] = ()
    """Empty for CPU ranks, whose memory is the host's."""
    collectives: tuple[CollectiveCall, ...] = ()
    """Empty for one rank."""

    def __post_init__(self) -> None:
        # The file may have been edited or damaged: check every value before a prediction uses it.
        for name in ("machine", "processor", "gpu", "backend", "torch_version"):
            check_printable(f"Calibration.{name}", getattr(self, name), "ss.calibrate()")
        check_integer("Calibration.num_cores", self.num_cores, low=1, high=2**20)
        check_integer("Calibration.num_ranks", self.num_ranks, low=1, high=MAX_RANKS)
        check_integer("Calibration.threads_per_rank", self.threads_per_rank, low=1, high=2**20)
        _check_time("Calibration.measured_at", self.measured_at)
        check_number("Calibration.measuring_seconds", self.measuring_seconds, low=0.0, high=1e6)
        check_number("Calibration.load", self.load, low=0.0, high=1e6)
        check_number("Calibration.kernel_seconds", self.kernel_seconds, low=1e-9, high=1.0)
        check_number("Calibration.host_updates_per_second", self.host_updates_per_second, low=1.0, high=1e15)
        for name, kind in _curves.items():
            points = getattr(self, name)
            if not isinstance(points, tuple) or not all(isinstance(point, kind) for point in points):
                refuse(f"Calibration.{name}", points, f"a tuple of {kind.__name__}", "ss.calibrate()")
            if len(points) > MAX_POINTS:
                refuse(f"Calibration.{name}", len(points), f"at most {MAX_POINTS} points", "ss.calibrate()")
        # Without these two, no step has a time; the other curves have figures of the catalogue instead.
        for name in ("matrix_products", "memory_passes"):
            if not getattr(self, name):
                refuse(f"Calibration.{name}", (), "at least one measured point", "ss.calibrate()")

    @classmethod
    def from_dict(cls, data: Mapping[str, object]) -> Self:
        """Return the calibration from its ``to_dict``. Raise ``ValueError`` for unknown or bad values."""
        # JSON has lists of dicts; the constructor takes tuples of points.
        curves: dict[str, tuple[Serializable, ...]] = {}
        for name, kind in _curves.items():
            points = data.get(name, [])
            if not isinstance(points, list | tuple) or not all(
                isinstance(point, Mapping) for point in points
            ):
                refuse(f"Calibration.{name}", points, f"a list of {kind.__name__}", "ss.calibrate()")
            curves[name] = tuple(kind.from_dict(point) for point in points)
        return super().from_dict({**data, **curves})

    def find_bf16_slowdown(self) -> float | None:
        """Return how many times as long matmuls took in bf16 as in fp32: the median over shapes.

        None if no shape was measured in both.
        """
        seconds: dict[str, dict[tuple[int, int, int], float]] = {"fp32": {}, "bf16": {}}
        for one in self.matrix_products:
            seconds.setdefault(one.precision, {})[one.rows, one.inner, one.columns] = one.seconds
        both = seconds["fp32"].keys() & seconds["bf16"].keys()
        ratios = [seconds["bf16"][shape] / seconds["fp32"][shape] for shape in both]
        return median(ratios) if ratios else None

    @property
    def source(self) -> str:
        """Source of the rates of this calibration, as text for the user."""
        ranks = f"{self.num_ranks} rank{'s' * (self.num_ranks > 1)} of {self.gpu}"
        day = datetime.fromisoformat(self.measured_at).strftime("%Y-%m-%d %H:%M %Z")
        # Other processes make every figure too slow, and the user cannot see that in the figures.
        busy = f"; the machine was busy, load {self.load:.1f} a core" if self.load > BUSY_LOAD else ""
        return f"the calibration of {self.machine} ({ranks}, {self.backend}) of {day}{busy}"

    def rates(self, cluster: Cluster) -> Rates:
        """Return the measured speeds of ``cluster``, and the catalogue's for what was not measured."""
        from shardscope.timing.calibration.fit import fit_rates

        return fit_rates(self, cluster)

    def to_frame(self) -> pd.DataFrame:
        """Return one row per measured point: curve, size, seconds."""
        import pandas as pd

        rows = []
        for curve in _curves:
            for point in getattr(self, curve):
                rows.append({"curve": curve, **{f.name: getattr(point, f.name) for f in fields(point)}})
        return pd.DataFrame(rows)

    def _repr_html_(self) -> str:
        rows = [(curve.replace("_", " "), len(getattr(self, curve))) for curve in _curves]
        return render_html_table(("measured", "points"), rows, str(self))

    def __str__(self) -> str:
        return f"{self.source}, in {self.measuring_seconds:.0f} s"


BUSY_LOAD = 0.5
"""Runnable processes per core above which measured curves are reported as disturbed."""


def _check_time(field: str, value: object) -> None:
    # fromisoformat also accepts times without an offset, which another time zone would misread.
    try:
        aware = isinstance(value, str) and datetime.fromisoformat(value).tzinfo is not None
    except ValueError:
        aware = False
    if not aware:
        refuse(field, value, "a moment with its offset from UTC", Value("2026-11-21T13:00:00+00:00"))
