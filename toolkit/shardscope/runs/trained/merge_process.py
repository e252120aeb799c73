"""Process that merges adapters into their base: ``python -m ...merge_process files-as-json folder pid``."""

from __future__ import annotations

import sys
from pathlib import Path

from transformers import GenerationConfig

from shardscope.machine.processes import end_after_parent
from shardscope.runs.trained.loading import add_trained_adapters, load_weights
from shardscope.runs.trained.model_files import ModelFiles
from shardscope.training.data.weights_tokenizer import WeightsTokenizer
from shardscope.training.weights.pretrained import MAX_FILE_BYTES


def merge_adapters(files: ModelFiles, folder: Path) -> None:
    """Write base and adapters as one model to ``folder``, in the base's type, with its tokenizer."""
    assert files.adapters is not None
    # ``merge.py`` reads the phases, and shows them.
    print("loading the base", flush=True)
    model = add_trained_adapters(load_weights(files, "auto"), files.adapters)
    print("merging", flush=True)
    merged = model.merge_and_unload(safe_merge=True)
    print("writing", flush=True)
    # transformers refuses to save some of the configs that models are published with: write_config copies it.
    merged.generation_config = GenerationConfig()
    merged.save_pretrained(folder, max_shard_size=MAX_FILE_BYTES)
    base = files.weights_folder
    WeightsTokenizer(base).save(folder)
    # transformers' own lacks what it does not know, and names this machine's folders.
    base.write_config(folder)


if __name__ == "__main__":
    end_after_parent(int(sys.argv[3]))
    merge_adapters(ModelFiles.from_json(sys.argv[1]), Path(sys.argv[2]))
