"""Whether two folders hold the same weights, by a sample: a checkpoint of adapters has no base to compare."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from shardscope.training.weights.safetensors_header import LENGTH_BYTES

if TYPE_CHECKING:
    from shardscope.training.weights.weights_folder import WeightsFolder

MOST_TENSORS = 512
SAMPLED_BYTES = 4096


def base_sample(folder: WeightsFolder) -> str:
    """SHA-256 of the tensors' names, types and shapes, and of the first 4 KiB of up to 512 of them.

    Neither paths are in it nor which file has what. Of a model of more tensors those read are spread evenly
    over their names: further training changes every one that it trains.
    """
    names = sorted(folder.tensors)
    digest = hashlib.sha256()
    for name in names:
        _, tensor = folder.tensors[name]
        digest.update(f"{name} {tensor.dtype} {tensor.shape}\n".encode())
    for name in names[:: -(-len(names) // MOST_TENSORS)]:
        file, tensor = folder.tensors[name]
        with file.open("rb") as opened:
            data = LENGTH_BYTES + int.from_bytes(opened.read(LENGTH_BYTES), "little")
            opened.seek(data + tensor.begin)
            digest.update(opened.read(min(SAMPLED_BYTES, tensor.num_bytes)))
    return digest.hexdigest()
