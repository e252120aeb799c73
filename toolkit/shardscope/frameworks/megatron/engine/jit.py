"""What megatron-core has torch compile (``jit_fuser``) on CUDA ranks, where nothing can compile it."""

from __future__ import annotations

import contextlib
import os
import shutil
from functools import cache

import torch

COMPILERS = ("gcc", "clang")
"""What Triton builds its launchers with, unless ``CC`` names another (triton/runtime/build.py)."""


def compiled_if_possible() -> contextlib.AbstractContextManager[object]:
    """Inside, what is compiled runs operator by operator if there is no Triton, or no C compiler for it."""
    return contextlib.nullcontext() if can_compile() else torch.compiler.set_stance("force_eager")


@cache
def can_compile() -> bool:
    """Whether there is what torch.compile makes kernels for CUDA with."""
    from torch.utils._triton import has_triton

    named = os.environ.get("CC")
    return has_triton() and any(shutil.which(name) for name in ((named,) if named else COMPILERS))
