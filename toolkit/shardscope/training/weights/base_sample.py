"""Sampled hash of a folder's weights: identifies the base model of an adapter checkpoint."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from shardscope.training.weights.safetensors_header import LENGTH_BYTES

if TYPE_CHECKING:
    from shardscope.training.weights.weights_folder import WeightsFolder

MAX_SAMPLED_TENSORS = 512
SAMPLED_BYTES = 4096


def hash_base(folder: WeightsFolder) -> str:
    """Return the SHA-256 of all tensors' names, types and shapes, and the first 4 KiB of up to 512 tensors.

    The hash does not depend on paths or on how tensors are split over files. In a model with more tensors,
    the sampled ones are spread evenly over the sorted names: further training changes every trained tensor.
    """
    names = sorted(folder.tensors)
    digest = hashlib.sha256()
    for name in names:
        _, tensor = folder.tensors[name]
        digest.update(f"{name} {tensor.dtype} {tensor.shape}\n".encode())
    # Every n-th name, n rounded up. ``data`` is the offset at which the file's tensors begin.
    for name in names[:: -(-len(names) // MAX_SAMPLED_TENSORS)]:
        file, tensor = folder.tensors[name]
        with file.open("rb") as opened:
            data = LENGTH_BYTES + int.from_bytes(opened.read(LENGTH_BYTES), "little")
            opened.seek(data + tensor.begin)
            digest.update(opened.read(min(SAMPLED_BYTES, tensor.num_bytes)))
    return digest.hexdigest()
