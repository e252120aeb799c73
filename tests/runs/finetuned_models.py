"""Models that transformers created and saved, and their losses in a single process."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from gloo_ranks import StandInContext
from single_process import take_steps

from shardscope import Architecture, Cluster, Finetune, Plan, Recipe
from shardscope.frameworks.engines import get_engine_class
from shardscope.training.data.tokenizer import SHIPPED_TOKENIZER

ROWS, SEQ_LEN, RATE, NUM_STEPS = 4, 32, 1e-3, 2
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 2048,
    "max_position_embeddings": 64,
    # Far from the family's default, and from small weights: so that settings in the file other than sizes
    # matter.
    "rms_norm_eps": 1e-2,
    "initializer_range": 0.1,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **SIZES},
    "tied": {"model_type": "qwen3", **SIZES, "tie_word_embeddings": True},
    "mixtral": {
        "model_type": "mixtral",
        **SIZES,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 2,
    },
    "gpt2": {"model_type": "gpt2", "n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 64}
    | {"vocab_size": 2048, "initializer_range": 0.1},
    # Without formulas: three layers of gated delta rule, and one of full attention.
    "qwen3_5": {
        "model_type": "qwen3_5_text",
        **SIZES,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "mrope_section": [2, 1, 1]},
    },
}
TEXT_SIZES = {**SIZES, "num_hidden_layers": 2}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
MULTIMODAL: dict[str, dict[str, Any]] = {
    "gemma3": {
        "model_type": "gemma3",
        "text_config": {
            "model_type": "gemma3_text",
            **TEXT_SIZES,
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        "vision_config": {"model_type": "siglip_vision_model", **VISION},
        "mm_tokens_per_image": 1,
        "image_token_index": 2047,
    },
    "mistral3": {
        "model_type": "mistral3",
        "text_config": {
            "model_type": "ministral3",
            **TEXT_SIZES,
            # Queries are scaled from position 8 on.
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "llama_4_scaling_beta": 0.1}
            | {"original_max_position_embeddings": 8},
        },
        "vision_config": {"model_type": "pixtral", **VISION, "head_dim": 16},
        "image_token_index": 2047,
        "tie_word_embeddings": False,
    },
}
"""Checkpoints with a vision tower, of whose language model there are formulas."""
HALF = ("tied",)
"""Stored in bf16."""


def write_model(folder: Path, config: dict[str, Any], kind: torch.dtype, max_shard_size: str) -> Path:
    """A random model of ``config``, as transformers saves it, with the shipped tokenizer."""
    from transformers import AutoConfig

    torch.manual_seed(5)
    model = get_auto_class(config).from_config(AutoConfig.for_model(**config), dtype=kind)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    shutil.copy(SHIPPED_TOKENIZER, folder / "tokenizer.json")
    # Otherwise a family's own class, such as GemmaTokenizer, adds special tokens to it.
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return folder


def get_auto_class(config: dict[str, Any]) -> Any:
    """Return transformers' class of the whole model: a multimodal one reads text alone as well."""
    import transformers

    return getattr(
        transformers, "AutoModelForImageTextToText" if "vision_config" in config else "AutoModelForCausalLM"
    )


def small_model(parent: Path, name: str) -> Path:
    """The folder of one of :data:`MODELS` or :data:`MULTIMODAL`, in several files."""
    kind = torch.bfloat16 if name in HALF else torch.float32
    return write_model(parent / name, (MODELS | MULTIMODAL)[name], kind, max_shard_size="300KB")


def make_batch(step: int) -> dict[str, torch.Tensor]:
    tokens = torch.randint(0, 2048, (ROWS, SEQ_LEN), generator=torch.Generator().manual_seed(step))
    return {"input_ids": tokens, "labels": tokens.clone()}


def train_alone(folder: Path) -> list[float]:
    """Return the losses of one process: ``from_pretrained``, plain autograd, the whole batch, no engine."""
    from shardscope.training.optimizers.optimizers import build_optimizer

    # In eval: GPT-2's dropouts are 0.1 by themselves.
    auto = get_auto_class(json.loads((folder / "config.json").read_text()))
    model = auto.from_pretrained(folder, dtype=torch.float32).eval()
    optimizer = build_optimizer("adamw", list(model.parameters()), RATE)
    losses, _ = take_steps(optimizer, (model(**make_batch(step)).loss for step in range(NUM_STEPS)))
    return losses


def make_plan(folder: Path, layout: Any, **recipe: Any) -> Plan:
    fields = {"micro_batch_size": 1, "global_batch_size": ROWS, "seq_len": SEQ_LEN, "precision": "fp32"}
    arch = Architecture.from_hf(folder, rehearse_only=True)
    return Plan(arch, Cluster.parse("2xcpu"), Recipe(**{**fields, **recipe}), layout)


def set_up_engine(ctx: StandInContext, folder: Path, plan: Plan) -> StandInContext:
    """Return a new context on this rank, whose engine is set up with the weights of ``folder``."""
    own = StandInContext(
        rank=ctx.rank, world_size=ctx.world_size, plan=plan, folder=ctx.folder, device=ctx.device
    )
    task = Finetune(weights=folder)
    task.check(plan)
    own.engine = get_engine_class(plan)(own)
    own.engine.learning_rate = RATE
    own.engine.setup(task.begin(own.engine, plan))
    return own


def train_beside_single_process(ctx: StandInContext, name: str, layout: Any) -> dict[str, list[float]]:
    """Return the losses of an engine on two ranks and of one process, from the same model files."""
    folder = ctx.folder / "models" / name
    if ctx.rank == 0:  # save_pretrained writes on no other rank.
        small_model(folder.parent, name)
    torch.distributed.barrier()
    return {"losses": train_on_ranks(ctx, folder, make_plan(folder, layout)), "alone": train_alone(folder)}


def train_on_ranks(ctx: StandInContext, folder: Path, plan: Plan) -> list[float]:
    """Return an engine's losses of the steps that :func:`train_alone` takes."""
    engine = set_up_engine(ctx, folder, plan).engine
    losses = []
    for step in range(NUM_STEPS):
        shares = {name: rows.chunk(engine.num_data_ranks) for name, rows in make_batch(step).items()}
        losses.append(engine.step({name: rows[engine.data_rank] for name, rows in shares.items()}))
    return losses
