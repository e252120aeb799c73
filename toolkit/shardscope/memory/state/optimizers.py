"""Optimizer state and update temporaries of one tensor, by optimizer.

Read from ``torch.optim`` 2.13 (``_adafactor.py``, ``_muon.py``, ``sgd.py``), bitsandbytes 0.50
(``optim/optimizer.py``) and torchao 0.18 (``optim/adam.py``), and tested against them in
``tests/unit/memory/test_optimizers.py``. AdamW is the fused one, without temporaries.
"""

from __future__ import annotations

from typing import NamedTuple

from shardscope.core.ops import ceil_div, minimum, where
from shardscope.core.precision import FP32, HALF

EIGHT_BIT_BLOCK = 256
"""Elements that share a scale in 8-bit moments (bitsandbytes ``blocksize``, torchao ``block_size``)."""
MIN_EIGHT_BIT = 4096
"""Smaller tensors keep full-width moments (bitsandbytes ``min_8bit_size``, torchao the same)."""
MIN_PAGED = 100_000
"""Smaller tensors' moments are never paged (bitsandbytes ``get_state_buffer``)."""
QUANTILE_MAP = 256 * FP32
"""Bytes of the 256 values of the 8-bit code."""

ELEMENTWISE: dict[str, int] = {"adamw": 2, "adamw_foreach": 2, "sgd": 1, "lion": 1}
"""State elements per weight, in the weight's dtype, of optimizers that do not depend on tensor shapes."""


class TensorState(NamedTuple):
    """Optimizer bytes of one tensor."""

    state: int
    """State kept on the device between steps."""
    paged: int = 0
    """State in managed memory, which the driver moves to the host when the GPU is full."""
    working: int = 0
    """Temporaries of this tensor's update."""


def compute_tensor_state(
    optimizer: str,
    rows: int,
    columns: int,
    width: int,
    *,
    copies: int = 1,
    hidden: bool = False,
    embedding: bool = False,
    library: str = "bitsandbytes",
) -> TensorState:
    """Return the optimizer bytes of a tensor of ``copies`` x ``rows`` x ``columns``, ``width`` bytes each.

    ``copies`` are experts in one tensor; a vector has one column. ``hidden`` matrices are updated by Muon.
    ``embedding`` matrices keep 32-bit moments under bitsandbytes, as its authors recommend (Dettmers et al.
    2022, section 2.3) and transformers' Trainer sets. ``library`` is the one whose 8-bit AdamW runs.
    """
    numel = copies * rows * columns
    if optimizer in ELEMENTWISE:
        return TensorState(ELEMENTWISE[optimizer] * width * numel)
    if optimizer == "adafactor":
        return _compute_adafactor_state(copies, rows, columns, width)
    if optimizer == "muon":
        return _compute_muon_state(rows, columns, width) if hidden else TensorState(2 * width * numel)
    # torchao's AdamW8bit.
    is_eight_bit = optimizer.endswith("8bit")
    if library == "torchao":
        return TensorState(
            where(_is_quantized_by_torchao(numel), _compute_torchao_moments(numel), 2 * width * numel)
        )
    # bitsandbytes' AdamW, which keeps moments in 8 bits or in fp32, whatever the weight's type.
    is_quantized = (numel >= MIN_EIGHT_BIT) & (is_eight_bit and not embedding)
    moments = where(is_quantized, 2 * numel, 2 * FP32 * numel)
    scales = where(is_quantized, 2 * FP32 * ceil_div(numel, EIGHT_BIT_BLOCK), 0)
    if not optimizer.startswith("paged"):
        return TensorState(moments + scales)
    is_paged = numel >= MIN_PAGED
    # Paged moments are fetched to the GPU for the update.
    return TensorState(
        where(is_paged, 0, moments) + scales, where(is_paged, moments, 0), where(is_paged, moments, 0)
    )


def compute_constant_state(optimizer: str, library: str) -> int:
    """Return bytes shared by all tensors: bitsandbytes' two quantile maps."""
    return 2 * QUANTILE_MAP if optimizer.endswith("8bit") and library == "bitsandbytes" else 0


def compute_flat_state(optimizer: str, numel: int) -> int:
    """Return state bytes of a flat fp32 buffer of ``numel`` elements, without rows or embeddings.

    Adafactor keeps a full second moment of it, as of any vector.
    """
    if optimizer in ELEMENTWISE:
        return ELEMENTWISE[optimizer] * FP32 * numel
    return compute_tensor_state(optimizer, numel, 1, FP32).state + compute_constant_state(
        optimizer, "bitsandbytes"
    )


def compute_flat_working(optimizer: str, numel: int) -> int:
    """Return temporary bytes while such a buffer is updated, besides its state and gradient.

    Adafactor squares a vector's gradient, and copies its second moment (``_adafactor.py``).
    """
    return 2 * FP32 * numel if optimizer == "adafactor" else 0


def _compute_adafactor_state(copies: int, rows: int, columns: int, width: int) -> TensorState:
    """Return second moments of rows and columns, and their product as temporary (``_adafactor.py``).

    Vectors keep a full second moment.
    """
    # One row and one column vector of second moments for each expert.
    factors = copies * where(columns == 1, rows, rows + columns)
    return TensorState(width * factors, working=width * copies * rows * columns)


def _compute_muon_state(rows: int, columns: int, width: int) -> TensorState:
    """Return one momentum, and temporaries of five Newton-Schulz iterations in bf16 (``_muon.py``).

    Alive at once: the update in the weight's dtype, the iteration's matrix before and after, its Gram matrix
    and the polynomial of that. A bf16 update is itself the first iteration's matrix, and stays alive.
    """
    numel, short = rows * columns, minimum(rows, columns)
    return TensorState(width * numel, working=(width + 2 * HALF) * numel + 2 * HALF * short * short)


def _is_quantized_by_torchao(numel: int) -> bool:
    return (numel >= MIN_EIGHT_BIT) & (numel % EIGHT_BIT_BLOCK == 0)


def _compute_torchao_moments(numel: int) -> int:
    """Return bytes of two moments: codes, block scales and a quantile map (``optim/subclass_8bit.py``)."""
    return 2 * (numel + FP32 * (numel // EIGHT_BIT_BLOCK) + QUANTILE_MAP)
