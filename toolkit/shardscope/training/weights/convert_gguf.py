"""Conversion of a GGUF file into a Hugging Face folder: ``python -m ...convert_gguf model.gguf folder``.

It runs in a process of its own, so that no notebook's kernel imports torch for it.
"""

from __future__ import annotations

import sys
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Write the weights of ``gguf`` in fp32 as safetensors, with config.json, tokenizer and chat template."""
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    dequantized = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # transformers 5.24 (quantizers/quantizer_gguf.py) refuses to save the model that it has just
    # dequantized, as "not serializable". A model built from the same config without that entry is an
    # ordinary one.
    config = dequantized.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    # The GGUF's own title, which is no path and no name on the Hub.
    config._name_or_path = ""
    model = type(dequantized)(config)
    model.load_state_dict(dequantized.state_dict())
    model.tie_weights()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    convert_gguf(Path(sys.argv[1]), Path(sys.argv[2]))
