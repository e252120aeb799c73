"""DeepSpeed's compiled extensions, built once for a user, a machine and the versions they were built of.

torch's own folder of extensions is one for all environments, and each writes its paths into it: two of them
compile in turns, minutes each time. Here a library that is there is loaded without asking a compiler.
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
"""Libraries that another resolves symbols in."""
LONG_SECONDS = 10.0


def load(name: str) -> None:
    """Load DeepSpeed's extension ``name`` into this process, compiling it where it never was."""
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
            # A compiler that was killed leaves a lock, and torch would wait for ever; we are alone here.
            (library.parent / "lock").unlink(missing_ok=True)
            getattr(importlib.import_module("deepspeed.ops.op_builder"), BUILDERS[name])().load(verbose=False)
    if name not in builder._loaded_ops:
        builder._loaded_ops[name] = _imported(name, library)
    seconds = time.perf_counter() - began
    if seconds > LONG_SECONDS:
        print(f"compiled DeepSpeed's {name} in {seconds:.0f} s", flush=True)


def is_built(name: str) -> bool:
    """Whether ``load`` compiles nothing."""
    return library_of(name).is_file()


def library_of(name: str) -> Path:
    """Where the library of ``name`` lies once it is built."""
    return folder() / name / f"{name}.so"


def folder() -> Path:
    """``~/.cache/shardscope/extensions/<versions and processor>``; ``XDG_CACHE_HOME`` moves it."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    versions = [f"{name}-{importlib.metadata.version(name)}" for name in ("deepspeed", "torch")]
    python = f"py{sys.version_info.major}{sys.version_info.minor}"
    # They are compiled for the processor at hand, and a home may be many machines'.
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
    """One process of this user compiles at a time; the system takes the lock back if it dies."""
    import fcntl

    place = folder()
    place.mkdir(parents=True, exist_ok=True, mode=0o700)
    with (place / "compiling").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
