"""Compiled extensions of DeepSpeed, built once per user, processor and versions of DeepSpeed and torch.

torch's own extension folder is shared by all environments, and each writes its paths into it: two
environments recompile each other's extensions, for minutes each time. Here an existing library is loaded
directly.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import os
import platform
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from shardscope.machine.user_folders import find_cache_folder

if TYPE_CHECKING:
    from collections.abc import Iterator

BUILDERS = {"cpu_adam": "CPUAdamBuilder", "async_io": "AsyncIOBuilder", "pin_memory": "PinMemoryBuilder"}
"""Classes of ``deepspeed.ops.op_builder``, by the name of the extension that they build."""
NEEDS_FIRST = {"async_io": "pin_memory"}
"""Extensions that must be loaded first, because the other one resolves symbols in them."""
LONG_SECONDS = 10.0
"""Compilations that took longer are reported when they end: the user has waited for them."""


def load_extension(name: str) -> None:
    """Load DeepSpeed's extension ``name`` into this process; compile it first if it was never built."""
    if name in NEEDS_FIRST:
        load_extension(NEEDS_FIRST[name])
    # DeepSpeed looks an extension up here before it compiles it (op_builder/builder.py, OpBuilder.load).
    loaded = importlib.import_module("deepspeed.ops.op_builder.builder").OpBuilder._loaded_ops
    if name in loaded:
        return
    library = find_library_file(name)
    if library.is_file():
        loaded[name] = _import_library(name, library)
        return
    began = time.perf_counter()
    print(f"compiling DeepSpeed's {name}, once for this machine: minutes", flush=True)
    with _lock_compilation(), _set_build_folder(library.parent.parent):
        # Another process may have compiled it while this one waited for the lock.
        if not library.is_file():
            # A killed compiler leaves its lock, on which torch would wait forever. No other process compiles.
            (library.parent / "lock").unlink(missing_ok=True)
            getattr(importlib.import_module("deepspeed.ops.op_builder"), BUILDERS[name])().load(verbose=False)
    if name not in loaded:
        loaded[name] = _import_library(name, library)
    seconds = time.perf_counter() - began
    if seconds > LONG_SECONDS:
        print(f"compiled DeepSpeed's {name} in {seconds:.0f} s", flush=True)


def is_built(name: str) -> bool:
    """Return whether the extension is built, so that ``load_extension`` does not compile."""
    return find_library_file(name).is_file()


def find_library_file(name: str) -> Path:
    """Return the path of the built library of ``name``."""
    return find_build_folder() / name / f"{name}.so"


def find_build_folder() -> Path:
    """Return ``~/.cache/shardscope/extensions/<versions and processor>``, or under ``XDG_CACHE_HOME``."""
    versions = [f"{name}-{importlib.metadata.version(name)}" for name in ("deepspeed", "torch")]
    python = f"py{sys.version_info.major}{sys.version_info.minor}"
    # Extensions are compiled for this processor, and machines may share a home directory.
    return find_cache_folder() / "extensions" / "_".join((*versions, python, _identify_processor()))


def _identify_processor() -> str:
    """Return the architecture and a hash of the instruction sets, which ``-march=native`` compiles for."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = [platform.processor()]
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "".join(lines[:1]))
    return f"{platform.machine()}-{hashlib.sha256(flags.encode()).hexdigest()[:8]}"


def _import_library(name: str, library: Path) -> ModuleType:
    from torch.utils.cpp_extension import _import_module_from_library

    before = sys.getdlopenflags()
    if name in NEEDS_FIRST.values():
        # RTLD_GLOBAL lets the extension that is loaded later resolve symbols in this one.
        sys.setdlopenflags(os.RTLD_NOW | os.RTLD_GLOBAL)
    try:
        module: ModuleType = _import_module_from_library(name, str(library.parent), True)
        return module
    finally:
        sys.setdlopenflags(before)


@contextmanager
def _set_build_folder(folder: Path) -> Iterator[None]:
    """Let torch build in ``folder`` (torch/utils/cpp_extension.py, ``_get_build_directory``)."""
    before = os.environ.get("TORCH_EXTENSIONS_DIR")
    os.environ["TORCH_EXTENSIONS_DIR"] = str(folder)
    try:
        yield
    finally:
        if before is None:
            del os.environ["TORCH_EXTENSIONS_DIR"]
        else:
            os.environ["TORCH_EXTENSIONS_DIR"] = before


@contextmanager
def _lock_compilation() -> Iterator[None]:
    """Hold the user's compile lock; the system releases it if the process dies."""
    import fcntl

    folder = find_build_folder()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with (folder / "compiling").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
