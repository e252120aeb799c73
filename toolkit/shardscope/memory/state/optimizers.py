"""What each optimizer keeps of one tensor, and what it needs beside that while it updates it.

Read off ``torch.optim`` 2.13 (``_adafactor.py``, ``_muon.py``, ``sgd.py``), bitsandbytes 0.50
(``optim/optimizer.py``) and torchao 0.18 (``optim/adam.py``), and counted against them in
``tests/unit/memory/test_optimizers.py``. AdamW is the fused one, which needs nothing beside its moments.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from shardscope.core.arrays.arithmetic import ceil_div, smallest, where
from shardscope.core.precision import FP32, HALF

EIGHT_BIT_BLOCK = 256
"""Numbers that share a scale in 8-bit moments (bitsandbytes ``blocksize``, torchao ``block_size``)."""
MIN_EIGHT_BIT = 4096
"""Smaller tensors keep moments of their full width (bitsandbytes ``min_8bit_size``, torchao the same)."""
MIN_PAGED = 100_000
"""Smaller tensors' moments are never paged (bitsandbytes ``get_state_buffer``)."""
QUANTILE_MAP = 256 * FP32
"""The 256 numbers that 8 bits stand for."""

ELEMENTWISE: dict[str, int] = {"adamw": 2, "adamw_foreach": 2, "sgd": 1, "lion": 1}
"""Optimizers that keep so many numbers a weight in the weight's own type, whatever the tensor's shape."""


class TensorState(NamedTuple):
    """Bytes of one tensor's optimizer."""

    state: Any
    """What stays on the device between steps."""
    paged: Any = 0
    """What stays in managed memory, which the driver moves to the host when the GPU is full."""
    working: Any = 0
    """What exists only while this tensor is updated."""


def tensor_state(
    optimizer: str,
    rows: Any,
    columns: Any,
    width: int,
    *,
    copies: Any = 1,
    hidden: bool = False,
    embedding: bool = False,
    library: str = "bitsandbytes",
) -> TensorState:
    """The optimizer of one tensor of ``copies`` x ``rows`` x ``columns`` numbers of ``width`` bytes each.

    ``copies`` are experts in one tensor; a vector has one column. ``hidden`` matrices are those that Muon
    takes; ``embedding`` ones keep 32-bit moments under bitsandbytes, as its authors ask for (Dettmers et al.
    2022, section 2.3) and transformers' Trainer sets. ``library`` is whose 8-bit AdamW runs.
    """
    numel = copies * rows * columns
    if optimizer in ELEMENTWISE:
        return TensorState(ELEMENTWISE[optimizer] * width * numel)
    if optimizer == "adafactor":
        return _adafactor(copies, rows, columns, width)
    if optimizer == "muon":
        return _muon(rows, columns, width) if hidden else TensorState(2 * width * numel)
    eight = optimizer.endswith("8bit")
    if library == "torchao":
        return TensorState(where(_torchao_fits(numel), _torchao(numel), 2 * width * numel))
    quantised = (numel >= MIN_EIGHT_BIT) * (eight and not embedding)
    moments = where(quantised, 2 * numel, 2 * FP32 * numel)
    scales = where(quantised, 2 * FP32 * ceil_div(numel, EIGHT_BIT_BLOCK), 0)
    if not optimizer.startswith("paged"):
        return TensorState(moments + scales)
    is_paged = numel >= MIN_PAGED
    # What is updated is fetched to the GPU.
    return TensorState(
        where(is_paged, 0, moments) + scales, where(is_paged, moments, 0), where(is_paged, moments, 0)
    )


def constant_state(optimizer: str, library: str) -> int:
    """Bytes that all tensors share: bitsandbytes' two quantile maps."""
    return 2 * QUANTILE_MAP if optimizer.endswith("8bit") and library == "bitsandbytes" else 0


def flat_state(optimizer: str, numel: Any) -> Any:
    """Bytes over a flat fp32 buffer of ``numel`` numbers, which has neither rows nor embeddings.

    Adafactor keeps a whole second moment of it, for it is a vector.
    """
    if optimizer in ELEMENTWISE:
        return ELEMENTWISE[optimizer] * FP32 * numel
    return tensor_state(optimizer, numel, 1, FP32).state + constant_state(optimizer, "bitsandbytes")


def flat_working(optimizer: str, numel: Any) -> Any:
    """Bytes beside that and the gradient while such a buffer is updated.

    Adafactor squares a vector's gradient, and copies its second moment (``_adafactor.py``).
    """
    return 2 * FP32 * numel if optimizer == "adafactor" else 0


def _adafactor(copies: Any, rows: Any, columns: Any, width: int) -> TensorState:
    """A row's and a column's second moments, whose product exists during the update (``_adafactor.py``).

    Vectors keep all of theirs.
    """
    factors = copies * where(columns == 1, rows, rows + columns)
    return TensorState(width * factors, working=width * copies * rows * columns)


def _muon(rows: Any, columns: Any, width: int) -> TensorState:
    """One momentum; during the update five Newton-Schulz rounds in bf16 (``_muon.py``).

    At once: the update in the weight's type, the round's matrix before and after, its Gram matrix and the
    polynomial of that. A bf16 update is itself the first round's matrix, and stays.
    """
    numel, short = rows * columns, smallest(rows, columns)
    return TensorState(width * numel, working=(width + 2 * HALF) * numel + 2 * HALF * short * short)


def _torchao_fits(numel: Any) -> Any:
    return (numel >= MIN_EIGHT_BIT) * (numel % EIGHT_BIT_BLOCK == 0)


def _torchao(numel: Any) -> Any:
    """Codes, a scale a block and a quantile map of its own, twice (``optim/subclass_8bit.py``)."""
    return 2 * (numel + FP32 * (numel // EIGHT_BIT_BLOCK) + QUANTILE_MAP)
