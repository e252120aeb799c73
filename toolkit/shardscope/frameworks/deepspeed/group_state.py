"""DeepSpeed's process groups: it keeps them in module variables, and creates them once in a process.

For another engine or rehearsal in the same process, the variables must be as they were at import.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import ModuleType

STATEFUL_NAMES = ("mpu", "mesh_device", "expert_tensor_parallel_world_size")
"""Lower-case module variables of ``deepspeed.utils.groups`` that it sets; the others are in capitals."""


def copy_groups() -> dict[str, object]:
    """Return the module variables, by name."""
    variables = vars(_import_groups()).items()
    return {name: _copy_dict(value) for name, value in variables if name.isupper() or name in STATEFUL_NAMES}


def restore_groups(variables: Mapping[str, object]) -> None:
    """Set the module variables to those of :func:`copy_groups`, and forget DeepSpeed's world."""
    groups = _import_groups()
    for name, value in variables.items():
        setattr(groups, name, _copy_dict(value))
    importlib.import_module("deepspeed.comm.comm").cdb = None  # type: ignore[attr-defined]


def _import_groups() -> ModuleType:
    # DeepSpeed chooses its accelerator when it is first imported, which the caller has done.
    return importlib.import_module("deepspeed.utils.groups")


def _copy_dict(value: object) -> object:
    return dict(value) if isinstance(value, dict) else value
