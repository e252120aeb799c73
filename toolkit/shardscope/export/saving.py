"""How a script saves a model of which no rank has all: a file for each part, as transformers opens them."""

from __future__ import annotations

IMPORTS = """
import json
from pathlib import Path
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion
"""

SAVE_PART = '''

def save_part(folder, config, weights, number, count):
    """Whoever has weights writes them to the file of that number; the first rank says which file has which.

    All ranks together; ``folder`` is one that all of them see."""
    with torch.device("meta"):  # the names that its family has on the Hub, where experts are one by one
        model = AutoModelForCausalLM.from_config(config)
    weights = revert_weight_conversion(model, weights)
    folder, file = Path(folder), f"model-{number + 1:05d}-of-{count:05d}.safetensors"
    folder.mkdir(parents=True, exist_ok=True)
    if weights:
        save_file({name: one.contiguous() for name, one in weights.items()}, folder / file, {"format": "pt"})
    places = [None] * WORLD_SIZE
    dist.all_gather_object(places, dict.fromkeys(weights, file))
    if dist.get_rank() == 0:
        model.config.architectures = [type(model).__name__]
        model.config.use_cache = True  # off while training
        model.config.dtype = next(iter(weights.values())).dtype
        model.config.save_pretrained(folder)
        found = {name: file for own in places for name, file in own.items()}
        index = json.dumps({"metadata": {}, "weight_map": found}, indent=2)
        (folder / "model.safetensors.index.json").write_text(index)
'''
