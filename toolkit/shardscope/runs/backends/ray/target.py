"""``ss.Ray``: a Ray cluster as the target of a run, as the user describes it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING

from shardscope.core.errors import Value, find_nearest, refuse
from shardscope.core.fixes import refuse_unknown_keywords
from shardscope.records.redaction import redact

if TYPE_CHECKING:
    from shardscope.core.cluster import Cluster

ADDRESS = re.compile(r"auto|(?:ray://)?(?:[A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.]+\]):\d{1,5}")
HOST = re.compile(r"(https?://|ray://)?([A-Za-z0-9][A-Za-z0-9_.-]*)(?::8265)?/?")
KEYS = frozenset({
    *("conda", "config", "container", "env_vars", "excludes", "image_uri", "java_jars", "mpi", "nsight"),
    *("pip", "py_executable", "py_modules", "rocprof-sys", "uv", "worker_process_setup_hook", "working_dir"),
})  # fmt: skip
"""Keys of a runtime environment (ray/runtime_env/runtime_env.py, ray 2.60)."""
MAX_BYTES = 2**20


@refuse_unknown_keywords
@dataclass(frozen=True, kw_only=True)
class Ray:
    """A Ray cluster as the target of ``ss.launch(plan, task, on=ss.Ray(...))``.

    Raises ``ValueError`` with the field, the value, what is allowed and the nearest fix.
    """

    address: str = "auto"
    """Address of the head, "host:port" or "ray://host:port"; "auto": RAY_ADDRESS, or this machine's."""
    runtime_env: Mapping[str, object] | None = field(default=None, hash=False)
    """Runtime environment of the nodes' processes, such as ``{"env_vars": {"HF_HOME": "/shared/hf"}}``."""
    node_folder: str | None = None
    """Folder on each node for the files of a run whose folder it does not see; None: the temporary one."""

    def __post_init__(self) -> None:
        if self.node_folder is not None and not (
            isinstance(self.node_folder, str) and self.node_folder.startswith("/")
        ):
            allowed = "None, or the absolute path of a folder on the nodes"
            refuse("Ray.node_folder", self.node_folder, allowed, Value("/tmp"))
        if not isinstance(self.address, str) or not ADDRESS.fullmatch(self.address):
            allowed = '"auto", or the address of a running cluster, such as "10.0.0.1:6379"'
            refuse("Ray.address", self.address, allowed, Value(_find_address(self.address)))
        if self.runtime_env is None:
            return
        allowed = "None, or a mapping as Ray's runtime_env"
        if not isinstance(self.runtime_env, Mapping):
            refuse("Ray.runtime_env", self.runtime_env, allowed, Value({"env_vars": {"NAME": "value"}}))
        for key in self.runtime_env:
            if key not in KEYS:
                nearest = find_nearest(key, sorted(KEYS))
                refuse("Ray.runtime_env", key, f"the keys {', '.join(sorted(KEYS))}", repr(nearest))
        try:
            text = json.dumps(dict(self.runtime_env))
        except (TypeError, ValueError, RecursionError) as error:
            problem = "a mapping of text, numbers, lists and mappings, which JSON can hold"
            refuse("Ray.runtime_env", self.runtime_env, problem, f"leave it out: {error}")
        if len(text) > MAX_BYTES:
            refuse("Ray.runtime_env", f"{len(text):,} characters", f"at most {MAX_BYTES:,}", "a shorter one")
        # Ray stores it in the cluster's head, and its dashboard shows it.
        if redact(text) != text:
            fix = "set it where the nodes' Ray is started, or read it from a file of yours"
            refuse("Ray.runtime_env", redact(text), "values without passwords or tokens", fix)
        object.__setattr__(self, "runtime_env", MappingProxyType(dict(self.runtime_env)))

    @property
    def changes_imports(self) -> bool:
        """Return whether the runtime environment gives the nodes other packages than this process has."""
        return bool(set(self.runtime_env or ()) - {"config", "env_vars"})

    @staticmethod
    def inventory(address: str = "auto", gpu: str | None = None, *, only_idle: bool = False) -> Cluster:
        """Return the nodes of a Ray cluster that have the most frequent kind of GPUs.

        ``gpu`` is the catalogue's name of the GPU type, needed where Ray's name of it is ambiguous: "A100"
        has 40 or 80 GB. Nodes in use are counted too; with ``only_idle``, only nodes whose CPUs and GPUs are
        all free now. Raises ``ValueError`` if the type is unclear, no node counts or no cluster is at
        ``address``, ``ImportError`` without the extra "ray", ``OSError`` if the cluster does not answer.
        """
        # Imported lazily: it imports this module.
        from shardscope.runs.backends.ray.submission import read_inventory

        return read_inventory(Ray(address=address), gpu, only_idle=only_idle)

    def __reduce__(self) -> tuple[object, ...]:
        # pickle refuses a read-only mapping.
        environment = None if self.runtime_env is None else dict(self.runtime_env)
        return _restore, (self.address, environment, self.node_folder)


def _find_address(text: object) -> str:
    """Return the address that a host without a port, or the URL of a dashboard, most likely means."""
    match = HOST.fullmatch(text) if isinstance(text, str) else None
    # "local" is Ray's word for a cluster of this machine.
    if match is None or text == "local":
        return "auto"
    # Ray's own ports: of the head, and of the server of its clients.
    return f"ray://{match[2]}:10001" if match[1] == "ray://" else f"{match[2]}:6379"


def _restore(address: str, runtime_env: Mapping[str, object] | None, node_folder: str | None) -> Ray:
    return Ray(address=address, runtime_env=runtime_env, node_folder=node_folder)
