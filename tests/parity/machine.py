"""A report's description of its machine: devices and versions, no names of hosts or users."""

from __future__ import annotations

import importlib.metadata
import platform
from dataclasses import dataclass, field

import shardscope as ss

PACKAGES = ("torch", "transformers", "deepspeed", "megatron-core", "transformer-engine", "accelerate")


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Devices and libraries."""

    cluster: ss.Cluster
    versions: dict[str, str] = field(default_factory=dict)

    @classmethod
    def here(cls) -> Machine:
        """This one. CUDA is not touched, so that ranks may still fork from this process."""
        return cls(cluster=ss.Cluster.detect(), versions=_read_versions())

    @property
    def on_gpus(self) -> bool:
        """Return whether there are any GPUs."""
        return self.cluster.gpu.vendor != "cpu"

    @property
    def num_ranks(self) -> int:
        """Most ranks that a row may take: one for each GPU; CPU ranks share the cores."""
        return self.cluster.num_gpus if self.on_gpus else 4

    @property
    def device(self) -> str:
        """Return a description of the device."""
        if not self.on_gpus:
            return "CPU ranks over gloo"
        return f"{self.cluster.num_gpus} x {self.cluster.gpu.name} over NCCL"

    @property
    def libraries(self) -> str:
        """Names and versions, in one line."""
        return ", ".join(f"{name} {version}" for name, version in self.versions.items())

    def __str__(self) -> str:
        return f"{self.device}; {self.libraries}"


def _read_versions() -> dict[str, str]:
    found = {"shardscope": ss.__version__} if hasattr(ss, "__version__") else {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    if (driver := _read_driver_version()) is not None:
        found["NVIDIA driver"] = driver
    return {**found, "Python": platform.python_version()}


def _read_driver_version() -> str | None:
    try:
        import pynvml

        pynvml.nvmlInit()
        version = pynvml.nvmlSystemGetDriverVersion()
        pynvml.nvmlShutdown()
    except Exception:  # No library, no driver, no permission: a report says nothing of it.
        return None
    return version if isinstance(version, str) else version.decode()
