"""Curves that were measured on a machine itself, and the rates that a prediction takes from them.

``ss.calibrate()`` measures them (``runs/calibrate/``), ``store.py`` keeps them, :func:`rates_for` finds those
that fit a cluster.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

from shardscope.core.cluster import PRECISIONS
from shardscope.core.errors import Value, one_of, real_number, refuse, whole_number
from shardscope.core.html_table import html_table
from shardscope.core.serialization import JsonNoun

if TYPE_CHECKING:
    import pandas as pd

    from shardscope.core.cluster import Cluster
    from shardscope.timing.rates import Rates

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"]
COLLECTIVES: tuple[Collective, ...] = get_args(Collective)
DIRECTIONS = ("to_gpu", "to_host")
MAX_SECONDS = 3_600.0
"""No single measured call takes longer."""
MAX_BYTES = 2**45
MAX_POINTS = 1_000
MAX_RANKS = 1_024


def _seconds(owner: str, value: object) -> None:
    real_number(f"{owner}.seconds", value, low=1e-9, high=MAX_SECONDS)


@dataclass(frozen=True, kw_only=True)
class MatrixProduct(JsonNoun):
    """One product of a ``rows`` x ``inner`` by an ``inner`` x ``columns`` matrix."""

    precision: str
    """"fp32", "tf32", "bf16" or "fp16"."""
    rows: int
    inner: int
    columns: int
    seconds: float
    """Of one product, while all ranks multiply: a third of a forward's and its backward's two."""

    def __post_init__(self) -> None:
        one_of("MatrixProduct.precision", self.precision, PRECISIONS)
        for name in ("rows", "inner", "columns"):
            whole_number(f"MatrixProduct.{name}", getattr(self, name), low=1, high=2**20)
        _seconds("MatrixProduct", self.seconds)

    @property
    def flops_per_second(self) -> float:
        """2 x rows x inner x columns FLOPs in these seconds."""
        return 2.0 * self.rows * self.inner * self.columns / self.seconds


@dataclass(frozen=True, kw_only=True)
class AttentionPass(JsonNoun):
    """Causal attention of one precision, forward and backward, by torch's scaled_dot_product_attention."""

    precision: str
    seq_len: int
    num_heads: int
    """Heads of all sequences of the batch together."""
    head_dim: int
    forward_seconds: float
    backward_seconds: float

    def __post_init__(self) -> None:
        one_of("AttentionPass.precision", self.precision, PRECISIONS)
        for name in ("seq_len", "num_heads", "head_dim"):
            whole_number(f"AttentionPass.{name}", getattr(self, name), low=1, high=2**24)
        for name in ("forward_seconds", "backward_seconds"):
            real_number(f"AttentionPass.{name}", getattr(self, name), low=1e-9, high=MAX_SECONDS)

    @property
    def flops_forward(self) -> float:
        """Two products, of which causal attention needs one half (Dao 2023, section 4.1)."""
        return 2.0 * self.num_heads * self.seq_len**2 * self.head_dim

    @property
    def flops_backward(self) -> float:
        """Five products (Dao 2023: 2.5 times the forward's)."""
        return 2.5 * self.flops_forward


@dataclass(frozen=True, kw_only=True)
class MemoryPass(JsonNoun):
    """One operator that only reads and writes: a sum of two tensors."""

    num_bytes: int
    """Read and written."""
    seconds: float
    """While all ranks do the same."""

    def __post_init__(self) -> None:
        whole_number("MemoryPass.num_bytes", self.num_bytes, low=1, high=MAX_BYTES)
        _seconds("MemoryPass", self.seconds)


@dataclass(frozen=True, kw_only=True)
class HostCopy(JsonNoun):
    """One copy between pinned host memory and a GPU, while all GPUs copy."""

    direction: str
    """"to_gpu" or "to_host"."""
    num_bytes: int
    seconds: float

    def __post_init__(self) -> None:
        one_of("HostCopy.direction", self.direction, DIRECTIONS)
        whole_number("HostCopy.num_bytes", self.num_bytes, low=1, high=MAX_BYTES)
        _seconds("HostCopy", self.seconds)


@dataclass(frozen=True, kw_only=True)
class CollectiveCall(JsonNoun):
    """One collective over all ranks of the calibration; "send" is one message from rank to neighbour."""

    collective: Collective
    num_bytes: int
    """The whole vector: what each rank has after a gather, or before a reduction."""
    seconds: float

    def __post_init__(self) -> None:
        one_of("CollectiveCall.collective", self.collective, COLLECTIVES)
        whole_number("CollectiveCall.num_bytes", self.num_bytes, low=1, high=MAX_BYTES)
        _seconds("CollectiveCall", self.seconds)


_curves: dict[str, type[Any]] = {
    "matrix_products": MatrixProduct,
    "attention": AttentionPass,
    "memory_passes": MemoryPass,
    "host_copies": HostCopy,
    "collectives": CollectiveCall,
}


@dataclass(frozen=True, kw_only=True)
class Calibration(JsonNoun):
    """What one machine's ranks were measured to do, how, and when. Raises ``ValueError`` for bad values.

    Each time is the first quartile of several calls, on the slowest rank, while all ranks do the same: what a
    synchronous step waits for on a machine that nothing else keeps busy. Of what CPU ranks compute it is the
    processor's time; of collectives, the fastest call.
    """

    machine: str
    """The host's name."""
    processor: str
    """The host's processor, as the system names it."""
    num_cores: int
    """Cores that the ranks could use together."""
    gpu: str
    """The GPU type's name; "cpu" for CPU ranks."""
    num_ranks: int
    """Ranks that measured at the same time."""
    threads_per_rank: int
    """Threads that torch's operators used on each rank's host side."""
    backend: str
    """What carried the collectives: "gloo" or "nccl"."""
    torch_version: str
    measured_at: str
    """When it began: ISO 8601, with its offset from UTC."""
    measuring_seconds: float
    """How long it took, the start of its processes included."""
    load: float
    """Runnable processes for each core in the minute before: well above 0, others disturbed the measuring."""
    kernel_seconds: float
    """What one operator of a transformers layer takes to be started, its modules' Python included."""
    host_updates_per_second: float
    """Parameters that torch's fused AdamW updates in host memory in a second, all ranks together."""
    matrix_products: tuple[MatrixProduct, ...]
    attention: tuple[AttentionPass, ...]
    memory_passes: tuple[MemoryPass, ...]
    host_copies: tuple[HostCopy, ...] = ()
    """Empty for CPU ranks, whose memory is the host's."""
    collectives: tuple[CollectiveCall, ...] = ()
    """Empty for one rank."""

    def __post_init__(self) -> None:
        for name in ("machine", "processor", "gpu", "backend", "torch_version"):
            _text(f"Calibration.{name}", getattr(self, name))
        whole_number("Calibration.num_cores", self.num_cores, low=1, high=2**20)
        whole_number("Calibration.num_ranks", self.num_ranks, low=1, high=MAX_RANKS)
        whole_number("Calibration.threads_per_rank", self.threads_per_rank, low=1, high=2**20)
        _moment("Calibration.measured_at", self.measured_at)
        real_number("Calibration.measuring_seconds", self.measuring_seconds, low=0.0, high=1e6)
        real_number("Calibration.load", self.load, low=0.0, high=1e6)
        real_number("Calibration.kernel_seconds", self.kernel_seconds, low=1e-9, high=1.0)
        real_number("Calibration.host_updates_per_second", self.host_updates_per_second, low=1.0, high=1e15)
        for name, point in _curves.items():
            points = getattr(self, name)
            if not isinstance(points, tuple) or not all(isinstance(each, point) for each in points):
                refuse(f"Calibration.{name}", points, f"a tuple of {point.__name__}", "ss.calibrate()")
            if len(points) > MAX_POINTS:
                refuse(f"Calibration.{name}", len(points), f"at most {MAX_POINTS} points", "ss.calibrate()")
        for name in ("matrix_products", "memory_passes"):
            if not getattr(self, name):
                refuse(f"Calibration.{name}", (), "at least one measured point", "ss.calibrate()")

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The calibration that ``to_dict`` described. Raises ``ValueError`` for unknown or bad values."""
        given = dict(data)
        for name, point in _curves.items():
            points = given.get(name, [])
            if not isinstance(points, list | tuple) or not all(isinstance(each, Mapping) for each in points):
                refuse(f"Calibration.{name}", points, f"a list of {point.__name__}", "ss.calibrate()")
            given[name] = tuple(point.from_dict(each) for each in points)
        return super().from_dict(given)

    @property
    def source(self) -> str:
        """Where rates of this calibration come from, in words."""
        ranks = f"{self.num_ranks} rank{'s' * (self.num_ranks > 1)} of {self.gpu}"
        day = datetime.fromisoformat(self.measured_at).strftime("%Y-%m-%d %H:%M %Z")
        busy = f"; the machine was busy, load {self.load:.1f} a core" if self.load > BUSY_LOAD else ""
        return f"the calibration of {self.machine} ({ranks}, {self.backend}) of {day}{busy}"

    def rates(self, cluster: Cluster) -> Rates:
        """The speeds of ``cluster`` as far as they were measured; the catalogue's for what was not."""
        from shardscope.timing.calibration.fit import fitted

        return fitted(self, cluster)

    def to_frame(self) -> pd.DataFrame:
        """One row a measured point: what, its size, its seconds."""
        import pandas as pd

        rows = []
        for curve in _curves:
            for point in getattr(self, curve):
                rows.append({"curve": curve, **{f.name: getattr(point, f.name) for f in fields(point)}})
        return pd.DataFrame(rows)

    def _repr_html_(self) -> str:
        rows = [(curve.replace("_", " "), len(getattr(self, curve))) for curve in _curves]
        return html_table(("measured", "points"), rows, str(self))

    def __str__(self) -> str:
        return f"{self.source}, in {self.measuring_seconds:.0f} s"


BUSY_LOAD = 0.5
"""Runnable processes a core above which the measured curves are said to be disturbed."""


def rates_for(cluster: Cluster) -> Rates:
    """The speeds of ``cluster``: as this machine was calibrated if it has such GPUs, or the catalogue's.

    Cheap enough for every step: files are read when they changed. Raises ``ValueError`` for a stored
    calibration that is damaged, naming its file.
    """
    from shardscope.timing.calibration.store import stored_rates
    from shardscope.timing.rates import rates_of

    return stored_rates(cluster) or rates_of(cluster)


def _text(field: str, value: object) -> None:
    if not isinstance(value, str) or not 1 <= len(value) <= 200 or not value.isprintable():
        refuse(field, value, "1 to 200 printable characters", "ss.calibrate()")


def _moment(field: str, value: object) -> None:
    try:
        aware = isinstance(value, str) and datetime.fromisoformat(value).tzinfo is not None
    except ValueError:
        aware = False
    if not aware:
        refuse(field, value, "a moment with its offset from UTC", Value("2026-11-21T13:00:00+00:00"))
