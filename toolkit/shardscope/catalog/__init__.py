"""Models, GPUs, links and efficiency constants in TOML files, each figure with its source, and their
lookup.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from importlib import resources
from typing import Any, Generic, TypeVar

from shardscope.catalog.model_names import ModelNames
from shardscope.core.architecture import Architecture
from shardscope.core.cluster import Gpu, Link
from shardscope.core.errors import find_similar
from shardscope.core.html_table import html_table
from shardscope.machine.host import host_memory_bytes

Noun = TypeVar("Noun")

NOT_FIELDS = frozenset({
    "source", "nulls", "price_source", "usable_source", "latency_source", "host_source", "usable_gib",
    "nvml_names", "host_link", "inter_node_link", "gpus_per_node", "host_memory_bytes",
})  # fmt: skip
"""Keys of a TOML entry that are no fields of the object: sources, and defaults of its cluster."""


COLUMNS: Mapping[str, Mapping[str, Callable[[Any], object]]] = {
    "models": {
        "parameters": lambda model: f"{model.num_parameters / 1e9:,.3g}B",
        "layers": lambda model: model.num_hidden_layers,
        "hidden size": lambda model: model.hidden_size,
        "type": lambda model: model.model_type,
    },
    "gpus": {
        "memory GiB": lambda gpu: round(gpu.memory_bytes / 2**30, 1),
        "usable GiB": lambda gpu: round(gpu.usable_bytes / 2**30, 1),
        "vendor": lambda gpu: gpu.vendor,
    },
    "links": {
        "GB/s": lambda link: link.bandwidth_bytes_per_second / 1e9,
        "latency µs": lambda link: link.latency_seconds * 1e6,
    },
}
"""Columns of each catalogue's HTML table."""


class Catalogue(Mapping[str, Noun], Generic[Noun]):
    """A read-only mapping from names to objects, in the file's order.

    A model is also found by the Hub repository of its config, case-insensitively. Raises ``KeyError`` with
    the nearest name for an unknown one.
    """

    def __init__(self, kind: str, build: Callable[[str, dict[str, Any]], Noun]) -> None:
        self._kind = kind
        self._build = cache(lambda name: build(name, load_table(kind)[name]))

    def __getitem__(self, name: str) -> Noun:
        known = load_table(self._kind)
        found = self._find(name)
        if found is None:
            close = (
                load_model_names().find_similar(name) if self._kind == "models" else find_similar(name, known)
            )
            nearest = f"; nearest: {close!r}" if close else ""
            raise KeyError(
                f"{self._kind[:-1]} {name!r} is not in the catalogue{nearest}; "
                f"known: {', '.join(sorted(known))}"
            )
        return _cpu() if self._kind == "gpus" and found == "cpu" else self._build(found)  # type: ignore[return-value]

    def _find(self, name: object) -> str | None:
        if self._kind == "models":
            return load_model_names().find(name)
        return name if isinstance(name, str) and name in load_table(self._kind) else None

    def __iter__(self) -> Iterator[str]:
        return iter(load_table(self._kind))

    def __len__(self) -> int:
        return len(load_table(self._kind))

    def __contains__(self, name: object) -> bool:
        return self._find(name) is not None

    def _repr_html_(self) -> str:
        return html_table(("name", *COLUMNS[self._kind]), [(name, *self._figures(name)) for name in self])

    def _figures(self, name: str) -> list[object]:
        noun = self[name]
        return [figure(noun) for figure in COLUMNS[self._kind].values()]

    def __repr__(self) -> str:
        return f"<{self._kind} of Shardscope's catalogue: {', '.join(self)}>"


@cache
def load_table(kind: str) -> dict[str, dict[str, Any]]:
    """Return the tables of ``kind``.toml ("models", "gpus", "links"). Do not modify the result."""
    return tomllib.loads(resources.files(__name__).joinpath(f"{kind}.toml").read_text("utf-8"))


@cache
def load_model_names() -> ModelNames:
    """Return the names of the catalogue's models, here and on the Hub."""
    return ModelNames(load_table("models"))


def get_config(name: str) -> dict[str, Any]:
    """Return the config.json of a catalogue model, reduced to the keys that its entry has."""
    entry = load_table("models")[name]
    config = {key: value for key, value in entry.items() if key not in NOT_FIELDS}
    return config | dict.fromkeys(entry.get("nulls", ()))


def _model(name: str, entry: dict[str, Any]) -> Architecture:
    return Architecture.from_hf({**get_config(name), "_name_or_path": name})


def _gpu(name: str, entry: dict[str, Any]) -> Gpu:
    fields = {key: value for key, value in entry.items() if key not in NOT_FIELDS}
    return Gpu(name=name, usable_bytes=round(entry["usable_gib"] * 2**30), **fields)


def _cpu() -> Gpu:
    """Return this host as a ``Gpu``. Not cached, because a container's memory limit may change."""
    memory = host_memory_bytes()
    fields = {key: value for key, value in load_table("gpus")["cpu"].items() if key not in NOT_FIELDS}
    return Gpu(name="cpu", memory_bytes=memory, usable_bytes=memory, memory_is_shared=True, **fields)


def _link(name: str, entry: dict[str, Any]) -> Link:
    return Link(name=name, **{key: value for key, value in entry.items() if key not in NOT_FIELDS})


models: Mapping[str, Architecture] = Catalogue("models", _model)
"""Catalogue or Hub repository names -> Architecture; nothing is downloaded."""

gpus: Mapping[str, Gpu] = Catalogue("gpus", _gpu)
"""Catalogue names -> Gpu; "cpu" is this host, whose memory is read at each access."""

links: Mapping[str, Link] = Catalogue("links", _link)
"""Catalogue names -> Link."""
