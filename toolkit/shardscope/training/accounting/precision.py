"""Check of an engine's actual precision, by the types of its tensors."""

from __future__ import annotations

from collections.abc import Iterable

import torch

ORIGINALS = {
    (torch.float32, torch.float32): "fp32",
    (torch.float32, torch.bfloat16): "bf16-mixed",
    (torch.float32, torch.float16): "fp16-mixed",
    (torch.bfloat16, torch.bfloat16): "bf16",
}
"""Precision by the type of the weights that the optimizer updates and the type of matmuls."""
MAIN_COPIES = {
    torch.float32: ("fp32",),
    torch.bfloat16: ("bf16-mixed", "bf16"),
    torch.float16: ("fp16-mixed",),
}
"""Possible precisions by the type of matmuls, where the optimizer updates fp32 weights in any case."""


def check_precision(planned: str, weight_types: Iterable[torch.dtype], compute: torch.dtype) -> str:
    """Return the precision of weights stored in ``weight_types`` and multiplied in ``compute``.

    Raises ``RuntimeError`` if it is not ``planned``.
    """
    types = set(weight_types)
    names = {ORIGINALS.get((kind, compute)) for kind in types}
    if names != {planned}:
        shown = " and ".join(sorted(map(str, types))).replace("torch.", "")
        raise _make_mismatch_error(planned, f"weights of {shown} that are multiplied in {compute}")
    return planned


def check_precision_of_copies(planned: str, compute: torch.dtype) -> str:
    """Return ``planned`` where main weights or adapters are always fp32: "bf16" equals "bf16-mixed" there.

    Raises ``RuntimeError`` if matmuls in ``compute`` contradict it.
    """
    if planned not in MAIN_COPIES.get(compute, ()):
        raise _make_mismatch_error(planned, f"weights of {compute}")
    return planned


def _make_mismatch_error(planned: str, actual: str) -> RuntimeError:
    message = f"the plan says precision={planned!r}, and the engine has {actual}"
    return RuntimeError(message.replace("torch.", ""))
