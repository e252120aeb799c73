"""Folders of weights as the Hub has them, small, written without torch: for tests of what reads them."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardscope.core.architecture import Architecture
from shardscope.training.data.tokenizer import SHIPPED_TOKENIZER
from shardscope.training.weights.stored_names import find_sources

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "vocab_size": 2048,
    "max_position_embeddings": 64,
}
BYTES = {"F32": 4, "BF16": 2, "I64": 8, "F8_E4M3": 1}


def write_file(path: Path, tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
    """A safetensors file of zeros: types and shapes by name."""
    header, end = {}, 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + BYTES[dtype] * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    write_header(path, header, end)


def write_header(path: Path, header: Any, num_bytes: int) -> None:
    """A file with that header, and so many zeros behind it."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(num_bytes))


def read_tensors(config: Mapping[str, Any], dtype: str = "F32") -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the tensors in the files of a model of ``config``."""
    arch = Architecture.from_hf(dict(config))
    pieces = (piece for source in find_sources(arch, ()).values() for piece in source.list_stored())
    return {name: (dtype, shape) for name, shape in pieces}


def write_folder(folder: Path, *, shards: int = 1, **config: Any) -> Path:
    """A small Llama with the shipped tokenizer, in so many files."""
    config = {**LLAMA, **config}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    shutil.copy(SHIPPED_TOKENIZER, folder / "tokenizer.json")
    tensors = read_tensors(config)
    if shards == 1:
        write_file(folder / "model.safetensors", tensors)
        return folder
    names = list(tensors)
    places = {}
    for number in range(shards):
        own = names[number::shards]
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        write_file(folder / file, {name: tensors[name] for name in own})
        places |= dict.fromkeys(own, file)
    write_index(folder, places)
    return folder


CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write_chat_folder(folder: Path, **config: Any) -> Path:
    """A small Llama as :func:`write_folder` writes it, whose tokenizer has a chat template."""
    # Two rows of the embedding more than the shipped tokenizer has: those of the template's tokens.
    write_folder(folder, **{"vocab_size": LLAMA["vocab_size"] + 2, **config})
    tokens = ["<|im_start|>", "<|im_end|>"]
    tokenizer = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "additional_special_tokens": tokens,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return folder


MULTIMODAL_PREFIXES = {
    "hub": ("language_model.model.", "language_model."),
    "transformers": ("model.language_model.", ""),
}
"""Prefixes in multimodal files where a causal model alone has ``model.``, and of its head."""


def rename_multimodal(name: str, style: str) -> str:
    before_layers, before_head = MULTIMODAL_PREFIXES[style]
    is_head = not name.startswith("model.")
    return before_head + name if is_head else before_layers + name.removeprefix("model.")


def make_multimodal(folder: Path, style: str = "hub", without: tuple[str, ...] = ()) -> Path:
    """Make the folder's one file and config those of a Llava with that language model."""
    config = json.loads((folder / "config.json").read_text())
    vision = {"model_type": "clip_vision_model", "hidden_size": 8, "num_attention_heads": 2}
    whole = {"model_type": "llava", "text_config": config, "vision_config": vision}
    (folder / "config.json").write_text(json.dumps({**whole, "eos_token_id": [1, 106]}))
    tensors = {rename_multimodal(name, style): tensor for name, tensor in read_tensors(config).items()}
    before = "model." if style == "transformers" else ""
    for name in ("vision_tower.layers.0.attn.weight", "multi_modal_projector.linear_1.weight"):
        tensors[before + name] = ("F32", (4, 4))
    write_file(folder / "model.safetensors", {name: tensors[name] for name in tensors if name not in without})
    return folder


def write_index(folder: Path, places: Mapping[str, str]) -> None:
    """The index of a folder of several files."""
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict(places)}))


def read_index(folder: Path) -> dict[str, str]:
    """The file of each tensor, by its name."""
    record: dict[str, str] = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    return record
