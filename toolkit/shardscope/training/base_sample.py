"""Whether two folders hold the same weights, by a sample: a checkpoint of adapters has no base to compare."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardscope.training.weights_folder import WeightsFolder

NUM_BLOCKS = 256
BLOCK_BYTES = 4096


def base_sample(folder: WeightsFolder) -> str:
    """SHA-256 of 256 blocks of 4 KiB, evenly spread, of each of the folder's files; its path is not in it.

    Of weights that were trained further every block is another: a fraction of a second for any model.
    """
    digest = hashlib.sha256()
    # In the order of tensors' names: the Hub's cache has other names for files than its snapshots.
    for file in dict.fromkeys(file for _, (file, _) in sorted(folder.tensors.items())):
        size = file.stat().st_size
        digest.update(str(size).encode())
        with file.open("rb") as opened:
            for number in range(NUM_BLOCKS):
                opened.seek(size * number // NUM_BLOCKS)
                digest.update(opened.read(BLOCK_BYTES))
    return digest.hexdigest()
