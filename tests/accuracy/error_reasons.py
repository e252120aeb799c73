"""Known reasons for the errors of rows."""

from __future__ import annotations

from collections.abc import Callable

from tests.accuracy.measurement_kinds import find_kind
from tests.accuracy.rows import join_fields, read_source
from tests.accuracy.scoring import Scored

_CLOSE = 0.03
_Applies = Callable[[Scored], bool]


def find_reason(row: Scored) -> str:
    """Return the known reason for the row's error; empty for a row with a small error."""
    if abs(row.error) <= _CLOSE or (find_kind(row.mapped.row) in ("reserved", "nvidia-smi") and row.inside):
        return ""
    return next((words for applies, words in _KNOWN if applies(row)), "not explained")


def _text_has(*parts: str) -> _Applies:
    return lambda row: any(
        part.lower() in join_fields(row.mapped.row, "notes", "table", "source") for part in parts
    )


_KNOWN: list[tuple[_Applies, str]] = [
    (
        lambda row: row.mapped.framework == "nanotron",
        "how far the CPU runs ahead of collectives, whose tensors the allocator then cannot give out again: "
        "between none and those of a whole forward; runs several times slower than others of the same plan "
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
        "CUDA 11 contexts, one communicator a pipeline neighbour, blocks of other phases stay reserved; one "
        "row looks like a typo (65 GB at micro-batch 2, 56 at 4)",
    ),
    (
        lambda row: row.mapped.framework == "FSDP1" and find_kind(row.mapped.row) == "allocated",
        "FSDP1's flat parameters and prefetch, in FSDP2's place",
    ),
    (
        lambda row: "Qwen" in read_source(row.mapped.row),
        'held against tensors: see "What nvidia-smi sees beyond tensors"',
    ),
    (
        lambda row: find_kind(row.mapped.row) == "nvidia-smi" and "FMS" in read_source(row.mapped.row),
        "what the allocator holds beyond tensors, and the load, are more than the band says",
    ),
    (
        lambda row: (
            row.mapped.framework == "one GPU" and _text_has("bnb|foak", "gptq|foak", "lora|foak")(row)
        ),
        "its own kernels: Unsloth's rotation in place and fused adapters keep two or three hidden states of "
        "the layer at hand fewer than transformers' modules",
    ),
    (
        _text_has("baseline-peft-bnb"),
        "norms, embeddings and head in fp32 (peft's prepare_model_for_kbit_training): 4 bytes a logit more "
        "than counted, not explained",
    ),
    (
        _text_has("Moonlight selective"),
        "the peak is the optimizer's step, as in the rows, where 1.3 GB less was there: not explained",
    ),
    (
        _text_has("torchtitan"),
        "a fifth more is reserved than its modules and its policy keep: not explained",
    ),
]
