"""Models, GPUs, links and efficiency constants in TOML files, each figure with its source, and their
lookup.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from importlib import resources
from typing import Generic, Literal, TypedDict, TypeVar, overload

from shardscope.catalog.model_names import ModelNames
from shardscope.core.architecture import Architecture
from shardscope.core.cluster import Gpu, Link
from shardscope.core.errors import find_similar
from shardscope.core.html_table import render_html_table
from shardscope.machine.host import get_host_memory_bytes

T = TypeVar("T")
Kind = Literal["models", "gpus", "links"]

NOT_FIELDS = frozenset({
    "source", "nulls", "price_source", "usable_source", "latency_source", "host_source", "usable_gib",
    "driver_names", "host_link", "inter_node_link", "host_memory_bytes", "host_gpus",
})  # fmt: skip
"""Keys of a TOML entry that are no fields of the object: sources, and defaults of its cluster."""


class GpuEntry(TypedDict, total=False):
    """Keys of gpus.toml that are not fields of ``Gpu``, but describe its driver names and its usual node."""

    driver_names: list[str]
    usable_gib: float
    host_link: str
    inter_node_link: str
    host_memory_bytes: int
    host_gpus: int


class Catalogue(Mapping[str, T], Generic[T]):
    """A read-only mapping from names to objects, in the file's order.

    A model is also found by the Hub repository of its config, case-insensitively. Raises ``KeyError`` with
    the nearest name for an unknown one.
    """

    def __init__(
        self, kind: Kind, build: Callable[[str], T], columns: Mapping[str, Callable[[T], object]]
    ) -> None:
        """Create the mapping. ``build`` creates the object of a name; ``columns`` are its HTML table's."""
        self._kind = kind
        self._build = build
        self._columns = columns

    def __getitem__(self, key: str) -> T:
        name = self._find_name(key)
        if name is None:
            known = sorted(self)
            similar = (
                load_model_names().find_similar(key) if self._kind == "models" else find_similar(key, self)
            )
            nearest = f"; nearest: {similar!r}" if similar else ""
            # KeyError instead of ValueError, because Mapping.get relies on it.
            raise KeyError(
                f"{self._kind[:-1]} {key!r} is not in the catalogue{nearest}; known: {', '.join(known)}"
            )
        return self._build(name)

    def _find_name(self, key: object) -> str | None:
        if self._kind == "models":
            return load_model_names().find(key)
        return key if isinstance(key, str) and key in load_toml(self._kind) else None

    def __iter__(self) -> Iterator[str]:
        return iter(load_toml(self._kind))

    def __len__(self) -> int:
        return len(load_toml(self._kind))

    def __contains__(self, key: object) -> bool:
        return self._find_name(key) is not None

    def _repr_html_(self) -> str:
        rows = [(name, *(get_cell(self[name]) for get_cell in self._columns.values())) for name in self]
        return render_html_table(("name", *self._columns), rows)

    def __repr__(self) -> str:
        return f"<{self._kind} of Shardscope's catalogue: {', '.join(self)}>"


@overload
def load_table(kind: Literal["gpus"]) -> Mapping[str, GpuEntry]: ...
@overload
def load_table(kind: Literal["models", "links"]) -> Mapping[str, Mapping[str, object]]: ...
def load_table(kind: Kind) -> Mapping[str, GpuEntry] | Mapping[str, Mapping[str, object]]:
    """Return the entries of gpus.toml, models.toml or links.toml by name."""
    return load_toml(kind)


@cache
def load_efficiency() -> dict[str, dict[str, dict[str, float]]]:
    """Return the constants of efficiency.toml: section -> GPU generation, link or kernels -> name -> value.

    The result is cached; only the fitting of constants modifies it.
    """
    # Drop the sources: formulas take numbers only.
    return {
        section: {
            name: {key: value for key, value in entry.items() if isinstance(value, int | float)}
            for name, entry in entries.items()
        }
        for section, entries in load_toml("efficiency").items()
    }


@cache
def load_toml(name: str) -> dict[str, dict[str, dict[str, object]]]:
    """Return the content of a file of this package, sources included. Do not modify the result."""
    return tomllib.loads(resources.files(__name__).joinpath(f"{name}.toml").read_text("utf-8"))


@cache
def load_model_names() -> ModelNames:
    """Return the names of the catalogue's models, here and on the Hub."""
    return ModelNames(load_table("models"))


def get_config(name: str) -> dict[str, object]:
    """Return the config.json of a catalogue model, reduced to the keys that its entry has."""
    entry = load_table("models")[name]
    # TOML has no null, so an entry lists the keys that its config.json sets to null.
    nulls = entry.get("nulls", ())
    assert isinstance(nulls, list | tuple)
    return _drop_sources(entry) | dict.fromkeys(nulls)


@cache
def _build_model(name: str) -> Architecture:
    # from_hf takes the display name from ``_name_or_path``.
    return Architecture.from_hf({**get_config(name), "_name_or_path": name})


def _build_gpu(name: str) -> Gpu:
    # Every other GPU is cached; see _describe_host.
    return _describe_host() if name == "cpu" else _build_catalogue_gpu(name)


@cache
def _build_catalogue_gpu(name: str) -> Gpu:
    entry = load_table("gpus")[name]
    # In GiB, as CUDA's out-of-memory errors print the total capacity from which the figure was read.
    usable_bytes = round(entry["usable_gib"] * 2**30)
    return Gpu.from_dict({"name": name, "usable_bytes": usable_bytes, **_drop_sources(entry)})


def _describe_host() -> Gpu:
    """Return this host as a ``Gpu``. Not cached, because a container's memory limit may change."""
    memory = get_host_memory_bytes()
    sizes = {"memory_bytes": memory, "usable_bytes": memory, "memory_is_shared": True}
    return Gpu.from_dict({"name": "cpu", **sizes, **_drop_sources(load_table("gpus")["cpu"])})


@cache
def _build_link(name: str) -> Link:
    return Link.from_dict({"name": name, **_drop_sources(load_table("links")[name])})


def _drop_sources(entry: Mapping[str, object]) -> dict[str, object]:
    """Return the fields of the object that a TOML entry describes."""
    return {key: value for key, value in entry.items() if key not in NOT_FIELDS}


models: Mapping[str, Architecture] = Catalogue(
    "models",
    _build_model,
    {
        "parameters, M": lambda model: round(model.num_parameters / 1e6),
        "layers": lambda model: model.num_hidden_layers,
        "hidden size": lambda model: model.hidden_size,
        "type": lambda model: model.model_type,
    },
)
"""Catalogue or Hub repository names -> Architecture; nothing is downloaded."""

gpus: Mapping[str, Gpu] = Catalogue(
    "gpus",
    _build_gpu,
    {
        "memory, GiB": lambda gpu: round(gpu.memory_bytes / 2**30, 1),
        "usable, GiB": lambda gpu: round(gpu.usable_bytes / 2**30, 1),
        "vendor": lambda gpu: gpu.vendor,
    },
)
"""Catalogue names -> Gpu; "cpu" is this host, whose memory is read at each access."""

links: Mapping[str, Link] = Catalogue(
    "links",
    _build_link,
    {
        "GB/s": lambda link: link.bandwidth_bytes_per_second / 1e9,
        "latency, µs": lambda link: link.latency_seconds * 1e6,
    },
)
"""Catalogue names -> Link."""
