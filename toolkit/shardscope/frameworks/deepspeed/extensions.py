"""DeepSpeed's compiled extensions, built once per user, processor and versions of DeepSpeed and torch.

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
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

BUILDERS = {"cpu_adam": "CPUAdamBuilder", "async_io": "AsyncIOBuilder", "pin_memory": "PinMemoryBuilder"}
NEEDS_FIRST = {"async_io": "pin_memory"}
"""Extensions that must be loaded first, because the other one resolves symbols in them."""
LONG_SECONDS = 10.0


def load(name: str) -> None:
    """Load DeepSpeed's extension ``name`` into this process; compile it first if it was never built."""
    if name in NEEDS_FIRST:
        load(NEEDS_FIRST[name])
    builder: Any = importlib.import_module("deepspeed.ops.op_builder.builder").OpBuilder
    if name in builder._loaded_ops:
        return
    library = library_of(name)
    if library.is_file():
        builder._loaded_ops[name] = _imported(name, library)
        return
    began = time.perf_counter()
    print(f"compiling DeepSpeed's {name}, once for this machine: minutes", flush=True)
    with _alone(), _built_in(library.parent.parent):
        if not library.is_file():
            # A killed compiler leaves its lock, on which torch would wait forever. No other process compiles.
            (library.parent / "lock").unlink(missing_ok=True)
            getattr(importlib.import_module("deepspeed.ops.op_builder"), BUILDERS[name])().load(verbose=False)
    if name not in builder._loaded_ops:
        builder._loaded_ops[name] = _imported(name, library)
    seconds = time.perf_counter() - began
    if seconds > LONG_SECONDS:
        print(f"compiled DeepSpeed's {name} in {seconds:.0f} s", flush=True)


def is_built(name: str) -> bool:
    """Return whether the extension is built, so that ``load`` does not compile."""
    return library_of(name).is_file()


def library_of(name: str) -> Path:
    """Return the path of the built library of ``name``."""
    return folder() / name / f"{name}.so"


def folder() -> Path:
    """Return ``~/.cache/shardscope/extensions/<versions and processor>``, or under ``XDG_CACHE_HOME``."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    versions = [f"{name}-{importlib.metadata.version(name)}" for name in ("deepspeed", "torch")]
    python = f"py{sys.version_info.major}{sys.version_info.minor}"
    # Extensions are compiled for this processor, and machines may share a home directory.
    return cache / "shardscope" / "extensions" / "_".join((*versions, python, _processor()))


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = [platform.processor()]
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "".join(lines[:1]))
    return f"{platform.machine()}-{hashlib.sha256(flags.encode()).hexdigest()[:8]}"


def _imported(name: str, library: Path) -> Any:
    from torch.utils.cpp_extension import _import_module_from_library

    before = sys.getdlopenflags()
    if name in NEEDS_FIRST.values():
        sys.setdlopenflags(os.RTLD_NOW | os.RTLD_GLOBAL)
    try:
        return _import_module_from_library(name, str(library.parent), True)
    finally:
        sys.setdlopenflags(before)


@contextmanager
def _built_in(place: Path) -> Iterator[None]:
    before = os.environ.get("TORCH_EXTENSIONS_DIR")
    os.environ["TORCH_EXTENSIONS_DIR"] = str(place)
    try:
        yield
    finally:
        if before is None:
            del os.environ["TORCH_EXTENSIONS_DIR"]
        else:
            os.environ["TORCH_EXTENSIONS_DIR"] = before


@contextmanager
def _alone() -> Iterator[None]:
    """Hold the user's compile lock; the system releases it if the process dies."""
    import fcntl

    place = folder()
    place.mkdir(parents=True, exist_ok=True, mode=0o700)
    with (place / "compiling").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
