"""Why rows are off: what was found out, said where it applies, and nothing where it was not."""

from __future__ import annotations

from collections.abc import Callable

from tests.accuracy.kinds import kind
from tests.accuracy.rows import source, text
from tests.accuracy.scoring import Scored

_CLOSE = 0.03
_Applies = Callable[[Scored], bool]


def reason(row: Scored) -> str:
    """What is known about the row's error; empty for a row that is close."""
    if abs(row.error) <= _CLOSE or (kind(row.mapped.row) in ("reserved", "nvidia-smi") and row.inside):
        return ""
    return next((words for applies, words in _KNOWN if applies(row)), "not explained")


def _says(*parts: str) -> _Applies:
    return lambda row: any(part in text(row.mapped.row, "notes", "table", "source") for part in parts)


_KNOWN: list[tuple[_Applies, str]] = [
    (
        lambda row: row.mapped.framework == "nanotron",
        "nanotron's own modules: half-precision gradients and unfused activations stay, gathered inputs of "
        "tensor-parallel products stay whole, and a third more is reserved than allocated",
    ),
    (
        lambda row: (
            row.mapped.framework == "Megatron-DeepSpeed" and "bf16" in text(row.mapped.row, "precision")
        ),
        "BF16_Optimizer of 2022 keeps unsharded fp32 gradients too; CUDA 11 contexts and point-to-point "
        "communicators",
    ),
    (
        lambda row: row.mapped.framework == "Megatron-DeepSpeed",
        "CUDA 11 contexts, one communicator a pipeline neighbour, blocks of other phases stay reserved; one "
        "row looks like a typo (65 GB at micro-batch 2, 56 at 4)",
    ),
    (
        lambda row: row.mapped.framework == "FSDP1" and "liger" in text(row.mapped.row, "table"),
        "under FSDP1 a layer's backward takes 512 KB a token there, on one GPU 266 KB: not understood",
    ),
    (
        lambda row: row.mapped.framework == "FSDP1",
        "FSDP1's flat parameters and prefetch, in FSDP2's place",
    ),
    (
        lambda row: "Qwen" in source(row.mapped.row) and row.mapped.plan.recipe.method == "full",
        "full fine-tuning there runs DeepSpeed on one GPU (finetune_ds.sh), which the table does not say",
    ),
    (
        lambda row: "Qwen" in source(row.mapped.row),
        "how memory was read and whether layers were recomputed is not in the table; the model's own modules",
    ),
    (
        _says("baseline-peft-bnb"),
        "peft's prepare_model_for_kbit_training casts norms, embeddings and head to fp32",
    ),
    (
        _says("Megatron-Bridge"),
        "recipe defaults of Megatron-Bridge that the table leaves out (recomputation among them)",
    ),
    (
        _says("torchtitan"),
        "torchtitan's own Llama: norms that keep half-precision inputs; selective recomputation keeps every "
        "second product",
    ),
]
