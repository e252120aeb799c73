"""Known reasons for the errors of rows."""

from __future__ import annotations

from collections.abc import Callable

from tests.accuracy.measurement_kinds import find_kind
from tests.accuracy.nvidia_smi_pairs import HEADING
from tests.accuracy.rows import join_fields, read_source
from tests.accuracy.scoring import Scored

_CLOSE = 0.03
_Applies = Callable[[Scored], bool]


def find_reason(row: Scored) -> str:
    """Return the known reason for the row's error; empty for a row with a small error."""
    if abs(row.error) <= _CLOSE or (find_kind(row.mapped.row) in ("reserved", "nvidia-smi") and row.inside):
        return ""
    return next((reason for applies, reason in _KNOWN if applies(row)), "not explained")


def _text_has(*parts: str) -> _Applies:
    return lambda row: any(
        part.lower() in join_fields(row.mapped.row, "notes", "table", "source") for part in parts
    )


_KNOWN: list[tuple[_Applies, str]] = [
    (
        lambda row: row.mapped.framework == "nanotron",
        "how far the CPU runs ahead of collectives, whose tensors the allocator cannot reuse until they end: "
        "between none and a whole forward pass; runs several times slower than others of the same plan "
        "kept almost none",
    ),
    (
        lambda row: (
            row.mapped.framework == "Megatron-DeepSpeed"
            and "bf16" in join_fields(row.mapped.row, "precision")
        ),
        "CUDA 11 contexts and point-to-point communicators; blocks of other phases stay reserved",
    ),
    (
        lambda row: row.mapped.framework == "Megatron-DeepSpeed",
        "CUDA 11 contexts, one communicator for each adjacent stage, blocks of other phases stay reserved; "
        "one row looks like a typo (65 GB at micro-batch 2, 56 at 4)",
    ),
    (
        lambda row: row.mapped.framework == "FSDP1" and find_kind(row.mapped.row) == "allocated",
        "planned as FSDP2, but FSDP1 ran, with flat parameters and its own prefetch",
    ),
    (
        lambda row: "Qwen" in read_source(row.mapped.row),
        f'compared with tensors: see "{HEADING}"',
    ),
    (
        lambda row: find_kind(row.mapped.row) == "nvidia-smi" and "FMS" in read_source(row.mapped.row),
        "the allocator's cache and loading take more than the band allows",
    ),
    (
        lambda row: (
            row.mapped.framework == "one GPU" and _text_has("bnb|foak", "gptq|foak", "lora|foak")(row)
        ),
        "own kernels: Unsloth's in-place rotary embedding and fused adapters save two or three hidden states "
        "of the current layer fewer than transformers' modules",
    ),
    (
        _text_has("baseline-peft-bnb"),
        "norms, embeddings and head in fp32 (peft's prepare_model_for_kbit_training): 4 bytes per logit more "
        "than predicted, not explained",
    ),
    (
        _text_has("Moonlight selective"),
        "the peak is in the optimizer's step, as measured, but 1.3 GB lower: not explained",
    ),
    (
        _text_has("torchtitan"),
        "a fifth more is reserved than its modules and its checkpoint policy save: not explained",
    ),
]
