"""The GPU inventory: GPU type, GPUs per node, nodes, and the links inside and between them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import date
from types import MappingProxyType
from typing import Literal, Self

from shardscope.core.errors import (
    Value,
    check_choice,
    check_flag,
    check_integer,
    check_mapping,
    check_number,
    check_printable,
    convert_numpy_number,
    find_similar,
    refuse,
)
from shardscope.core.fixes import refuse_unknown_keywords
from shardscope.core.serialization import Serializable, read_parts

MAX_BYTES = 2**50
"""1 PiB: more than any one node has of anything."""
MAX_GIB_OF_GPU, MAX_GIB_OF_HOST = 1023, 2**16 - 1
"""Where a number that is too small for bytes is still one of GiB: 24,564 is the MiB of an RTX 4090."""

MAX_NODES = 100_000

ASSUMED_LINK = "pcie-4-x16"
ASSUMED_NETWORK = "ethernet-25g, assumed"
"""Links that :meth:`Cluster.of` assumes inside a node and between nodes if they are unknown."""
PRECISIONS = ("bf16", "fp16", "fp32", "tf32", "fp8")
VENDORS = ("nvidia", "amd", "cpu")


@refuse_unknown_keywords
@dataclass(frozen=True, kw_only=True)
class Link(Serializable):
    """A link between GPUs, nodes, or a GPU and its host. Raises ``ValueError`` for bad values."""

    name: str
    """Name in links.toml, or a name of the user's choice."""
    bandwidth_bytes_per_second: float
    """Bytes/s that one GPU sends (one direction, full duplex)."""
    latency_seconds: float
    """Seconds of one small message."""

    def __post_init__(self) -> None:
        check_printable("Link.name", self.name, Value("my-gpu"))
        check_number("Link.bandwidth_bytes_per_second", self.bandwidth_bytes_per_second, low=1e6, high=1e14)
        check_number("Link.latency_seconds", self.latency_seconds, low=0.0, high=1.0)


BEFORE_AMPERE = ("volta", "turing")
"""GPU generations without bf16 and without torch's flash attention."""


@refuse_unknown_keywords
@dataclass(frozen=True, kw_only=True)
class Gpu(Serializable):
    """One GPU type. Unknown figures are None, never guessed. Raises ``ValueError`` for bad values."""

    name: str
    """Name in gpus.toml ("h100-sxm-80gb"); for an unknown GPU, the driver's name in that spelling."""
    vendor: str
    """"nvidia", "amd" or "cpu"."""
    architecture: str | None = None
    """GPU generation: "hopper", "blackwell-rtx", "cdna3"."""
    memory_bytes: int
    """Installed memory (80 GiB for h100-sxm-80gb); for "cpu", the host memory for all ranks together."""
    usable_bytes: int
    """Memory without the driver's reserve: ``torch.cuda.get_device_properties(0).total_memory``."""
    memory_is_shared: bool = False
    """Whether all ranks of a node share that memory (CPU ranks): see :attr:`Cluster.usable_bytes_per_gpu`."""
    peak_flops: Mapping[str, float] = field(default_factory=dict, hash=False)
    """Precision -> dense FLOP/s with FP32 accumulation from the datasheet; known precisions only."""
    memory_bandwidth_bytes_per_second: float | None = None
    """Bytes/s between the GPU and its memory."""
    link: str | None = None
    """Name in links.toml of the link between the GPUs of one node."""
    tdp_watts: float | None = None
    """Power limit of the GPU."""
    price_per_hour_usd: float | None = None
    """Price of one GPU for one hour, in US dollars."""
    price_date: str | None = None
    """Date on which the price was read, "2026-11-20"; prices change quickly."""

    def __post_init__(self) -> None:
        check_printable("Gpu.name", self.name, Value("my-gpu"))
        check_choice("Gpu.vendor", self.vendor, VENDORS)
        for optional in ("architecture", "link"):
            if getattr(self, optional) is not None:
                check_printable(f"Gpu.{optional}", getattr(self, optional), Value("my-gpu"))
        # NVIDIA writes "Hopper"; formulas, rates and attention kernels are looked up by the catalogue's name.
        if self.architecture is not None:
            object.__setattr__(self, "architecture", self.architecture.lower())
        # The driver reserves a part of the memory, so ``usable_bytes`` is at most ``memory_bytes``.
        memory = _check_bytes("Gpu.memory_bytes", self.memory_bytes, low=2**20, max_gib=MAX_GIB_OF_GPU)
        _check_bytes("Gpu.usable_bytes", self.usable_bytes, low=2**20, max_gib=MAX_GIB_OF_GPU, high=memory)
        check_flag("Gpu.memory_is_shared", self.memory_is_shared)
        if not isinstance(self.peak_flops, Mapping):
            refuse(
                "Gpu.peak_flops",
                self.peak_flops,
                f"a mapping of {', '.join(PRECISIONS)} to FLOP/s",
                Value({}),
            )
        # Copied and made read-only, so that the frozen dataclass cannot change.
        peaks = {
            check_choice("Gpu.peak_flops precision", precision, PRECISIONS): check_number(
                f"Gpu.peak_flops[{precision!r}]", value, low=1e6, high=1e18
            )
            for precision, value in self.peak_flops.items()
        }
        object.__setattr__(self, "peak_flops", MappingProxyType(peaks))
        # The bounds catch other units, such as 3,350 (GB/s) for bytes/s.
        for name, low, high in (
            ("memory_bandwidth_bytes_per_second", 1e6, 1e15),
            ("tdp_watts", 1.0, 1e5),
            ("price_per_hour_usd", 0.0, 1e5),
        ):
            if getattr(self, name) is not None:
                check_number(f"Gpu.{name}", getattr(self, name), low=low, high=high)
        self._check_price_date()

    @property
    def has_flash_attention(self) -> bool:
        """Return whether torch has flash attention for this GPU: sm80 or newer.

        Source: torch, aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, ``check_sm_version``.
        """
        return self.architecture not in BEFORE_AMPERE

    def _check_price_date(self) -> None:
        day = self.price_date
        if day is None and self.price_per_hour_usd is None:
            return
        try:
            good = isinstance(day, str) and date.fromisoformat(day).isoformat() == day
        except ValueError:
            good = False
        if not good:
            refuse(
                "Gpu.price_date", day, "the day of the price, as YYYY-MM-DD", Value(date.today().isoformat())
            )

    def __reduce__(self) -> tuple[object, ...]:
        return type(self).from_dict, (self.to_dict(),)  # pickle and copy refuse a read-only mapping


@refuse_unknown_keywords
@dataclass(frozen=True, kw_only=True)
class Cluster(Serializable):
    """The GPU inventory: ``num_nodes`` equal nodes of ``gpus_per_node`` equal GPUs.

    Create one with :meth:`parse` or :meth:`detect`. Raises ``ValueError`` with the field, the value, what is
    allowed and the nearest fix.
    """

    gpu: Gpu
    """The GPU type."""
    gpus_per_node: int
    """GPUs (for "cpu", ranks) in one node."""
    num_nodes: int = 1
    """Number of nodes."""
    intra_node_link: Link
    """Link between the GPUs of one node."""
    inter_node_link: Link
    """Link between nodes, bandwidth per GPU."""
    host_link: Link
    """Link between a GPU and its host's memory, used by offloading."""
    host_memory_bytes: int | None = None
    """Host memory of one node; None: unknown."""
    nvme_bytes: int | None = None
    """NVMe space of one node; None: unknown."""
    nvme_bandwidth_bytes_per_second: float | None = None
    """Read bandwidth of one node's NVMe; None: unknown."""

    def __post_init__(self) -> None:
        if not isinstance(self.gpu, Gpu):
            from shardscope.catalog import gpus  # circular import

            gpu = find_similar(self.gpu, gpus) or "h100-sxm-80gb"
            refuse("Cluster.gpu", self.gpu, "a Gpu", f"ss.gpus[{gpu!r}]")
        for name, usual in (
            ("intra_node_link", "nvlink-4"),
            ("inter_node_link", "infiniband-ndr"),
            ("host_link", "pcie-5-x16"),
        ):
            value = getattr(self, name)
            if not isinstance(value, Link):
                from shardscope.catalog import links  # circular import

                link = (find_similar(value, links) if value else None) or usual
                refuse(f"Cluster.{name}", value, "a Link", f"shardscope.catalog.links[{link!r}]")
        check_integer("Cluster.gpus_per_node", self.gpus_per_node, low=1, high=1_024)
        check_integer("Cluster.num_nodes", self.num_nodes, low=1, high=MAX_NODES)
        for name in ("host_memory_bytes", "nvme_bytes"):
            if getattr(self, name) is not None:
                _check_bytes(f"Cluster.{name}", getattr(self, name), low=0)
        speed = self.nvme_bandwidth_bytes_per_second
        if speed is not None:
            check_number("Cluster.nvme_bandwidth_bytes_per_second", speed, low=1e6, high=1e13)

    @property
    def num_gpus(self) -> int:
        """Number of GPUs of all nodes, the world size."""
        return self.gpus_per_node * self.num_nodes

    @property
    def usable_bytes_per_gpu(self) -> int:
        """Bytes that one rank may use: the GPU's, or an equal share of memory that a node's ranks share."""
        return self.gpu.usable_bytes // (self.gpus_per_node if self.gpu.memory_is_shared else 1)

    @property
    def price_per_hour_usd(self) -> float | None:
        """Price of all GPUs for one hour, in US dollars; None if the GPU's price is unknown."""
        price = self.gpu.price_per_hour_usd
        return None if price is None else price * self.num_gpus

    def __str__(self) -> str:
        nodes = f"{self.num_nodes}x" if self.num_nodes > 1 else ""
        return f"{nodes}{self.gpus_per_node}x{self.gpu.name}"

    @classmethod
    def from_dict(cls, data: Mapping[str, object]) -> Self:
        """Create one from ``to_dict``'s output. Raises ``ValueError`` for unknown, missing or bad values."""
        check_mapping(cls.__name__, data)
        kinds = {"gpu": Gpu, "intra_node_link": Link, "inter_node_link": Link, "host_link": Link}
        return super().from_dict(read_parts(data, kinds))

    @classmethod
    def of(cls, gpu: Gpu, gpus_per_node: int, num_nodes: int = 1) -> Cluster:
        """Create a cluster of ``gpu`` with its usual links and host from the catalogue.

        A GPU outside of the catalogue gets PCIe 4.0, unless it names another link, and 25 Gb/s Ethernet. That
        is enough for ``plan.memory()``; ``plan.step()`` and ``search`` raise ``ValueError`` where they depend
        on an assumed link, between its GPUs or between nodes. Set the real links with
        ``dataclasses.replace``. Raises ``ValueError`` for bad values.
        """
        from shardscope.catalog import links, load_table  # circular import
        from shardscope.machine.host import get_host_memory_bytes

        if not isinstance(gpu, Gpu):
            refuse("Cluster.gpu", gpu, "a Gpu", "ss.gpus['h100-sxm-80gb']")
        # An unknown GPU has no entry, so that every look-up below falls back to the assumed link.
        entry = load_table("gpus").get(gpu.name, {})
        across = links[entry.get("inter_node_link", "ethernet-25g")]
        host_memory = get_host_memory_bytes() if gpu.name == "cpu" else entry.get("host_memory_bytes")
        # A rack of GB200 NVL72 is one node of 72 GPUs for NVLink, and 18 hosts.
        if host_memory is not None and "host_gpus" in entry:
            host_memory *= -(-gpus_per_node // entry["host_gpus"])
        # The assumed network has a name of its own, by which ``timing/rates.py`` (check_links) refuses to
        # predict a step from it.
        return cls(
            gpu=gpu,
            gpus_per_node=gpus_per_node,
            num_nodes=num_nodes,
            intra_node_link=links[gpu.link if gpu.link and gpu.link in links else ASSUMED_LINK],
            inter_node_link=across if entry else replace(across, name=ASSUMED_NETWORK),
            host_link=links[entry.get("host_link", "pcie-4-x16")],
            host_memory_bytes=host_memory,
        )

    @classmethod
    def parse(cls, text: str) -> Cluster:
        """Parse nodes x GPUs x type: "4x8xh100-sxm-80gb".

        "8xh100-sxm-80gb" is one node, "h100-sxm-80gb" one GPU, "2xcpu" two CPU ranks on this machine,
        "2x1xcpu" one on each of two nodes. Case and spaces do not matter. Raises ``ValueError`` for other
        text, with the GPU of the nearest name if there is one.
        """
        from shardscope.catalog import gpus

        form = "nodes x GPUs x type, as '4x8xh100-sxm-80gb', '8xh100-sxm-80gb' or '2xcpu'"
        if not isinstance(text, str):
            refuse("cluster", text, form, Value("8xh100-sxm-80gb"))
        # Remove all whitespace, and accept the multiplication sign.
        squeezed = re.sub(r"\s+", "", text.lower().replace("×", "x"))
        # GPU names start with a letter and may contain an x (rtx-4090): only leading counts are split.
        match = re.fullmatch(r"((?:[0-9]{1,9}x){0,2})([a-z][a-z0-9.-]*)", squeezed)
        if not match:
            fix = _find_similar_cluster(text) or "8xh100-sxm-80gb"
            mixed = "; all GPUs of a plan are of one type" if re.search("[,;+]", text) else ""
            refuse("cluster", text, f"{form}{mixed}", Value(fix))
        counts = [int(count) for count in match[1].split("x") if count]
        # The last count is GPUs per node: "4x8x..." is four nodes of eight.
        per_node, nodes = (counts or [1])[-1], counts[0] if len(counts) == 2 else 1
        if match[2] not in gpus:
            similar = _find_similar_cluster(text)
            own = "Cluster.of(Gpu(...), gpus_per_node), of its own figures (shardscope.core.cluster.Gpu)"
            allowed, problem = f"{form}; types: {', '.join(gpus)}", f"{match[2]} is not in the catalogue"
            refuse("cluster", text, allowed, Value(similar) if similar else own, problem=problem)
        return cls.of(gpus[match[2]], per_node, nodes)

    @classmethod
    def detect(cls) -> Cluster:
        """Describe this machine: its NVIDIA GPUs as NVML reports them, or up to two CPU ranks without any.

        CUDA is not initialized and torch not imported, so ranks may still fork from this process.
        ``CUDA_VISIBLE_DEVICES`` is parsed as CUDA parses it. If GPUs differ, the largest group of equal ones
        is used, because a plan needs equal ranks; choose another group with ``CUDA_VISIBLE_DEVICES``. A GPU
        outside of the catalogue has the driver's figures, and None for all others. AMD GPUs, and MIG slices
        named by UUID, are not detected; use :meth:`parse`.
        """
        from shardscope.machine.detection import detect_cluster

        return detect_cluster()


def _check_bytes(
    field: str, value: object, *, low: int, max_gib: int = MAX_GIB_OF_HOST, high: int = MAX_BYTES
) -> int:
    """Return ``value`` as an int. Raises ``ValueError`` unless it is an integer from ``low`` to ``high``.

    A number that is too small for bytes is refused, and its fix takes it for GiB up to ``max_gib``, above for
    the MiB that ``nvidia-smi`` prints.
    """
    number = convert_numpy_number(value)
    if isinstance(number, int | float) and not isinstance(number, bool) and 0 < number < 2**20:
        unit = 2**30 if number <= max_gib else 2**20
        allowed = f"bytes, {'0 or ' if not low else ''}a whole number from {2**20:,} to {high:,}"
        refuse(field, number, allowed, Value(min(max(round(number * unit), 2**20), high)))
    return check_integer(field, value, low=low, high=high)


def _find_similar_cluster(text: str) -> str | None:
    """Return the valid text that another spelling means: that of nvidia-smi, "4*8*h100", "h100:8"; or None.

    Of a list of several kinds of GPUs it is the first one.
    """
    from shardscope.catalog import gpus, load_table  # circular import

    first = re.split("[,;+]", text.lower().replace("×", "x"))[0]
    rest = re.sub(r"\b(nodes?|gpus?)\b", "", first).strip()
    counts = []
    while match := re.match(r"([0-9]{1,6})(?:\s*[x*:]\s*|\s+)(?=[0-9a-z])", rest):
        counts.append(match[1])
        rest = rest[match.end() :]
    # Slurm and SkyPilot write the number of GPUs behind their type. Four digits are part of a name: rtx4090.
    while match := re.search(r"\s*[x*:]\s*([0-9]{1,3})$", rest):
        counts.append(match[1])
        rest = rest[: match.start()]
    if len(counts) > 2 or "0" in counts or not re.match("[a-z]|[0-9]{3,4}", rest):
        return None
    amount, name = "".join(f"{count}x" for count in counts), re.sub(r"[\s_-]+", "-", rest)
    for known, entry in load_table("gpus").items():
        if any(name == driver.lower().replace(" ", "-") for driver in entry["driver_names"]):
            return amount + known
    # GPUs of the same model number, and of those the one that shares most words: "a100 40", "4090".
    words = {written for word in name.split("-") for written in (word, f"{word}gb")}
    same_model = [
        known for known in gpus if any(_is_model(word) and word in words for word in known.split("-")[:2])
    ]
    name = re.sub(r"^((nvidia|amd|tesla|instinct|geforce)-)+", "", name)
    similar = max(same_model, key=lambda known: len(words & set(known.split("-"))), default=None)
    similar = similar or find_similar(name, gpus)
    return None if similar is None else amount + similar


def _is_model(word: str) -> bool:
    """Return whether a word of a GPU's name is a model number, as "h100", "4090" and not "rtx" or "80gb"."""
    return re.search("[0-9]", word) is not None and not word.endswith("gb")


def choose_mixed_precision(gpu: Gpu) -> Literal["bf16-mixed", "fp16-mixed"]:
    """Return the mixed precision that the GPU's matrix units support: fp16 before Ampere, else bf16."""
    return "fp16-mixed" if gpu.architecture in BEFORE_AMPERE else "bf16-mixed"


def name_device(cluster: Cluster) -> str:
    """Return the name of one rank's device: GPU or CPU rank."""
    return "CPU rank" if cluster.gpu.vendor == "cpu" else "GPU"
