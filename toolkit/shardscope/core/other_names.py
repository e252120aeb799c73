"""Names of options and values in other tools, for the nearest fix of one that is not known here."""

from __future__ import annotations

_NAMES_ELSEWHERE = {
    # transformers' optim, Apex's optimizers, bitsandbytes' and torchao's numbers, Lightning's precision
    "adamw": ("adam", "adamw_torch_fused", "fused_adam", "fusedadam", "adamw_fused", "adamw_apex_fused"),
    "adamw_foreach": ("adamw_torch",),
    "adamw_8bit": ("adamw_torch_8bit",),
    "paged_adamw": ("paged_adamw_32bit",),
    "nf4": ("4bit", "4-bit", "int4", "fp4", "load_in_4bit"),
    "int8": ("8bit", "8-bit", "load_in_8bit"),
    "bf16": ("bf16-true", "bf16_true"),
    "bf16-mixed": ("mixed", "amp"),
    # Options of peft, transformers and TRL
    "method": ("adapter", "peft", "use_peft", "use_lora"),
    "lora_rank": ("r", "rank", "adapter_rank"),
    "lora_alpha": ("alpha",),
    "lora_targets": ("target_modules",),
    "quantization": ("load_in_4bit", "load_in_8bit", "quantization_config"),
    "precision": ("bf16", "fp16", "dtype", "torch_dtype", "mixed_precision"),
    "attention": ("attn_implementation", "flash_attention", "use_flash_attention_2", "flash_attn"),
    "global_batch_size": ("gradient_accumulation_steps",),
    # Megatron-LM's, torchtitan's and transformers' options
    "tp": ("tensor_parallel", "tensor_model_parallel"),
    "pp": ("pipeline_parallel", "pipeline_model_parallel"),
    "vpp": ("virtual_pipeline", "virtual_pipeline_model_parallel", "num_virtual_stages_per_pipeline_rank"),
    "cp": ("context_parallel",),
    "ep": ("expert_parallel", "expert_model_parallel"),
    "etp": ("expert_tensor_parallel",),
    "sequence_parallel": ("sp",),
    "recompute": ("gradient_checkpointing", "activation_checkpointing"),
    "seq_len": ("max_length", "max_seq_length", "block_size", "context_length"),
    "architecture": ("model", "arch"),
    "learning_rate": ("lr",),
    "num_steps": ("steps", "max_steps", "train_iters"),
    "num_epochs": ("epochs", "max_epochs", "num_train_epochs"),
    "arguments": ("args",),
    # submitit's and other schedulers' options of a job
    "time": ("time_limit", "timeout_min", "minutes", "max_time"),
    "partition": ("queue",),
    # Slurm's and Ray's GPUs of a node, GPT-2's and Megatron-LM's sizes of a model
    "gpus_per_node": ("num_gpus", "n_gpus", "ngpus", "nproc_per_node", "num_gpus_per_node"),
    "num_nodes": ("nodes", "nnodes"),
    "num_hidden_layers": ("layers", "num_layers", "n_layer", "n_layers"),
    "hidden_size": ("hidden", "n_embd", "d_model", "dim"),
    "num_attention_heads": ("heads", "n_head", "n_heads", "num_heads"),
    "num_key_value_heads": ("n_kv_heads", "num_kv_heads", "num_query_groups"),
    "intermediate_size": ("ffn_hidden", "n_inner", "d_ff"),
    "vocab_size": ("vocab", "n_vocab"),
}
"""Our name -> names of other tools, in lower case and without "_size" and "_degree"."""
_OURS: dict[str, list[str]] = {}
"""Name of another tool -> ours: that of a value, of a field, or both."""
for _ours, _names in _NAMES_ELSEWHERE.items():
    for _name in _names:
        _OURS.setdefault(_name, []).append(_ours)


def find_by_other_name(value: object, options: list[str]) -> str | None:
    """Return the option that other tools call ``value``; None if it is none of ``options``."""
    text = str(value).lower()
    names = _OURS.get(text.removesuffix("_size").removesuffix("_degree"), _OURS.get(text, []))
    return next((name for name in names if name in options), None)
