"""A run's model as a transformers model, for the processes that merge it or chat with it. Imports torch.

Nothing is unpickled or downloaded, and no code of a folder runs.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from transformers import AutoModelForCausalLM

from shardscope.families.unknown import UnknownFamily
from shardscope.runs.trained.model_files import ADAPTER_WEIGHTS
from shardscope.training.model.model import parse_config
from shardscope.training.weights.stored_names import MULTIMODAL_PREFIXES, find_multimodal_prefix

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

    from shardscope.runs.trained.model_files import Adapters, ModelFiles


def load_weights(files: ModelFiles, dtype: torch.dtype | Literal["auto"]) -> PreTrainedModel:
    """Return the full weights, or the base of the adapters; "auto" is the type that they are stored in.

    Of a multimodal checkpoint it is the language model, with the names that its adapters have.
    """
    folder = files.weights_folder
    is_unknown = isinstance(folder.architecture, UnknownFamily)
    prefix = None if is_unknown else find_multimodal_prefix(folder.tensors)
    config, renamed = None, None
    if prefix is not None:
        # AutoModelForCausalLM has the whole model for some of them (Gemma3ForConditionalGeneration).
        config = parse_config(folder.config)
        head = f"{MULTIMODAL_PREFIXES[prefix]}lm_head."
        renamed = {f"^{re.escape(prefix)}": "model.", f"^{re.escape(head)}": "lm_head."}
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        files.weights,
        config=config,
        key_mapping=renamed,
        dtype=dtype,
        local_files_only=True,
        trust_remote_code=False,
        use_safetensors=True,
        # Set here, because config.json may name kernels on the Hub, which are code.
        attn_implementation="eager",
    )
    if prefix is not None:
        # save_pretrained would write the names of the files that were read (transformers 5.24,
        # core_model_loading.py, revert_weight_conversion).
        del model._weight_conversions
    model.eval()
    return model


def add_trained_adapters(model: PreTrainedModel, adapters: Adapters) -> PeftModel:
    """Return ``model`` in peft's wrapper with the adapters. Raises ``ValueError`` if they do not fit."""
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
    from safetensors.torch import load_file

    # Not PeftModel.from_pretrained, which reads adapter_config.json: see model_files.py.
    config = LoraConfig(
        r=adapters.rank,
        lora_alpha=adapters.alpha,  # type: ignore[arg-type]  # annotated as int, used as a factor.
        target_modules=adapters.targets,
        use_rslora=adapters.use_rslora,
        use_dora=adapters.use_dora,
        bias="none",
        task_type="CAUSAL_LM",
        inference_mode=True,
    )
    adapted = get_peft_model(model, config)
    tensors = load_file(Path(adapters.folder, ADAPTER_WEIGHTS))
    expected = set(get_peft_model_state_dict(adapted, save_embedding_layers=False))
    if set(tensors) != expected:
        differing = sorted(set(tensors) ^ expected)
        raise ValueError(
            f"{ADAPTER_WEIGHTS} does not fit its base: {len(differing):,} tensors are missing or too many, "
            f"first {differing[0]}. Nearest fix: the folder that the run exported."
        )
    set_peft_model_state_dict(adapted, tensors)
    adapted.eval()
    return adapted
