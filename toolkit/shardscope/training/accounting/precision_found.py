"""Which of a recipe's precisions an engine really made, by the types of its tensors."""

from __future__ import annotations

from collections.abc import Iterable

import torch

ORIGINALS = {
    (torch.float32, torch.float32): "fp32",
    (torch.float32, torch.bfloat16): "bf16-mixed",
    (torch.float32, torch.float16): "fp16-mixed",
    (torch.bfloat16, torch.bfloat16): "bf16",
}
"""By the type of the weights that the optimizer updates, and that of products."""
MAIN_COPIES = {
    torch.float32: ("fp32",),
    torch.bfloat16: ("bf16-mixed", "bf16"),
    torch.float16: ("fp16-mixed",),
}
"""By the type of products, where what the optimizer updates is fp32 in any case."""


def check_precision(planned: str, kept: Iterable[torch.dtype], compute: torch.dtype) -> str:
    """The precision of weights that are kept in the types ``kept`` and multiplied in ``compute``.

    Raises ``RuntimeError`` if it is not ``planned``.
    """
    types = set(kept)
    names = {ORIGINALS.get((kind, compute)) for kind in types}
    if names != {planned}:
        shown = " and ".join(sorted(map(str, types))).replace("torch.", "")
        raise _contradicts(planned, f"weights of {shown} that are multiplied in {compute}")
    return planned


def check_copied(planned: str, compute: torch.dtype) -> str:
    """The same where main copies, or adapters, are fp32 anyway: "bf16" and "bf16-mixed" are one there."""
    if planned not in MAIN_COPIES.get(compute, ()):
        raise _contradicts(planned, f"weights of {compute}")
    return planned


def _contradicts(planned: str, found: str) -> RuntimeError:
    told = f"the plan says precision={planned!r}, and the engine has {found}"
    return RuntimeError(told.replace("torch.", ""))
