"""Checks of one node before any rank starts: its versions of Python and packages, and its visible GPUs.

Ranks with different versions of torch may hang in their first collective or train something else, without an
error. The supervisor of each node writes its versions into its record, and all but node 0 compare theirs with
those of node 0.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import os
import platform
import time
from collections.abc import Callable, Mapping

from shardscope.core.number_format import format_count
from shardscope.frameworks.registry import frameworks
from shardscope.records.folder import NodeFolder
from shardscope.records.json_files import read_json
from shardscope.records.json_values import is_int
from shardscope.runs.backends.peers import START_SECONDS

PACKAGES = ("shardscope", "torch", "accelerate", "transformers", "peft")
"""Packages that runs of every framework use; a framework adds its own."""
PYTHON = "python"
POLL_SECONDS = 0.1


class NodeError(RuntimeError):
    """A node cannot run its ranks: it has other versions than node 0, or too few GPUs."""


def read_versions() -> dict[str, str]:
    """Return the versions of this Python and of the packages that a run uses, without importing them."""
    versions = {PYTHON: platform.python_version()}
    for package in (*PACKAGES, *(one.package for one in frameworks.values() if one.package)):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def check_node(folder: NodeFolder, description: Mapping[str, object], beat: Callable[[], None]) -> None:
    """Raise ``NodeError`` if this node has too few visible GPUs, or other versions than node 0.

    ``beat`` is called while node 0 is waited for.
    """
    if description.get("device") == "cuda":
        world_size = description.get("world_size")
        num_ranks = len(folder.select_ranks(world_size)) if is_int(world_size) else 0
        text = describe_missing_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"), num_ranks)
        if text:
            raise NodeError(f"{folder.title}: {text}")
    if not folder.is_lead:
        check_versions(folder, description, beat)


def describe_missing_gpus(visible: str | None, num_ranks: int) -> str:
    """Return why CUDA_VISIBLE_DEVICES=``visible`` (None: not set) has too few GPUs; empty if it has not."""
    if visible is None:
        return ""
    # CUDA ignores a -1 and all that follows (CUDA C++ programming guide, CUDA_VISIBLE_DEVICES).
    devices = list(itertools.takewhile(lambda name: name not in ("", "-1"), visible.split(",")))
    if len(devices) >= num_ranks:
        return ""
    return (
        f"CUDA_VISIBLE_DEVICES={visible} shows {format_count(len(devices), 'GPU')} to "
        f"{format_count(num_ranks, 'rank')}. The scheduler sets it to the job's GPUs. Fix: do not set it in "
        "ss.Slurm(setup=...), ss.Ray(runtime_env=...) or a startup file of the node"
    )


def check_versions(folder: NodeFolder, description: Mapping[str, object], beat: Callable[[], None]) -> None:
    """Wait for the record of node 0, and raise ``NodeError`` if this node has other versions.

    ``beat`` is called while it waits. A node 0 that never starts is noticed elsewhere (``peers.py``).
    """
    deadline = time.monotonic() + START_SECONDS
    while (record := read_json(folder.create_peer(0).supervisor)) is None:
        if time.monotonic() > deadline:
            return
        beat()
        time.sleep(POLL_SECONDS)
    lead = record.get("versions")
    if not isinstance(lead, dict):
        return
    text = describe_differences(description, lead, read_versions(), folder.create_peer(0).title, folder.title)
    if text:
        raise NodeError(text)


def describe_differences(
    description: Mapping[str, object],
    lead: Mapping[str, object],
    own: Mapping[str, object],
    lead_name: str,
    own_name: str,
) -> str:
    """Return which versions of two nodes must not differ but do, with the fix; empty if none does.

    ``description`` is ``run.json``, whose plan names the framework.
    """
    differences: list[str] = []
    fixes: list[str] = []
    for package, num_parts in list_compared(description):
        theirs, ours = lead.get(package), own.get(package)
        if _cut(theirs, num_parts) == _cut(ours, num_parts):
            continue
        title = "Python" if package == PYTHON else package
        differences.append(
            f"{_describe(title, ours)} on {own_name}, {_describe(title, theirs)} on {lead_name}"
        )
        if theirs is not None:
            public = str(theirs).partition("+")[0]
            fixes.append(f"Python {public}" if package == PYTHON else f"{package}=={public}")
    if not differences:
        return ""
    install = f"install {' and '.join(fixes)} on {own_name}, or " if fixes else ""
    return (
        f"the nodes have different versions: {'; '.join(differences)}. Fix: {install}start the same "
        "environment on all nodes (ss.Slurm(python=..., setup=[...]), ss.Ray(runtime_env=...))"
    )


def list_compared(description: Mapping[str, object]) -> list[tuple[str, int | None]]:
    """Return the packages that must agree, and how many parts of their versions; None: all of them."""
    plan = description.get("plan")
    layout = plan.get("layout") if isinstance(plan, Mapping) else None
    framework = layout.get("framework") if isinstance(layout, Mapping) else None
    compared: list[tuple[str, int | None]] = [
        (PYTHON, 2),
        ("torch", 2),
        ("shardscope", None),
        ("accelerate", None),  # It starts the ranks, whatever the framework.
    ]
    known = frameworks.get(framework) if isinstance(framework, str) else None
    if known is not None and known.package is not None:
        compared.append((known.package, None))
    return compared


def _cut(version: object, num_parts: int | None) -> str:
    # "2.13.0+cu128" and "2.13.0+cpu" are builds of one version.
    public = str(version).partition("+")[0]
    return public if num_parts is None else ".".join(public.split(".")[:num_parts])


def _describe(title: str, version: object) -> str:
    return f"no {title}" if version is None else f"{title} {version}"
