"""Megatron-core's own model chunks, gradient buffers and optimizer for one rank of a plan that trains."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from megatron.core.transformer.dot_product_attention import DotProductAttention

from shardscope.frameworks.megatron.core_config import build_transformer_config, compute_padded_vocab_size
from shardscope.frameworks.megatron.engine.context_parallel import get_context_attention
from shardscope.frameworks.megatron.layout import get_layout
from shardscope.frameworks.megatron.memory.precision_aware import reduces_in_fp32
from shardscope.frameworks.megatron.weights.config import convert_config, convert_rope
from shardscope.memory.activations.modules.attention import resolve_attention
from shardscope.training.engine import LOSS_SCALE_POWER

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.optimizer import MegatronOptimizer
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.spec_utils import ModuleSpec
    from transformers import PretrainedConfig

    from shardscope.core.plan import Plan
    from shardscope.frameworks.megatron.engine.optimizer_numbers import OptimizerNumbers

T = TypeVar("T")

DTYPES = {
    "bf16-mixed": torch.bfloat16,
    "bf16": torch.bfloat16,
    "fp16-mixed": torch.float16,
    "fp32": torch.float32,
}
"""Dtype of the model weights; for 16-bit weights the optimizer keeps fp32 main weights."""
UNFUSED = (
    *("bias_dropout_fusion", "masked_softmax_fusion", "apply_rope_fusion"),
    *("gradient_accumulation_fusion", "cross_entropy_loss_fusion"),
)
"""Fusions of Apex, Transformer Engine or torch.compile, which rehearsals model and this engine disables."""


def init_model_parallel(plan: Plan) -> None:
    """Initialize Megatron-core's process groups, after destroying those of an earlier engine. Collective."""
    from megatron.core import parallel_state

    degrees, layout = plan.degrees, get_layout(plan)
    leave_model_parallel()
    # megatron-core has no list of its groups: those that exist afterwards and not before are its own.
    before = set(_list_groups())
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=degrees.tp,
        pipeline_model_parallel_size=degrees.pp,
        virtual_pipeline_model_parallel_size=degrees.vpp if degrees.vpp > 1 else None,
        context_parallel_size=degrees.cp,
        expert_model_parallel_size=degrees.ep,
        expert_tensor_parallel_size=layout.expert_tp,
        create_gloo_process_groups=False,
    )
    _OWN_GROUPS[:] = [group for group in _list_groups() if group not in before]


_OWN_GROUPS: list[dist.ProcessGroup] = []
"""Process groups that :func:`init_model_parallel` created in this process."""


def leave_model_parallel() -> None:
    """Destroy the process groups of an earlier engine in this process, if there was one. Collective.

    megatron-core only drops its references, and the threads of two dozen groups stay: about 100 per rank.
    """
    from megatron.core import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        return
    parallel_state.destroy_model_parallel()
    # Wait, so that no rank destroys a group that another rank still reads from.
    dist.barrier()
    while _OWN_GROUPS:
        dist.destroy_process_group(_OWN_GROUPS.pop())


def _list_groups() -> list[dist.ProcessGroup]:
    """Return every process group that this rank is in."""
    return list(dist.distributed_c10d._world.pg_map)


def build_config(plan: Plan, hf_config: PretrainedConfig) -> TransformerConfig:
    """Return the ``TransformerConfig`` of a model that computes what the transformers model does."""
    from megatron.core.transformer import TransformerConfig

    dtype, vpp = DTYPES[plan.recipe.precision], plan.degrees.vpp
    values: dict[str, object] = build_transformer_config(plan) | dict.fromkeys(UNFUSED, False)
    # Fused SwiGLU saves only its input. As three operators it also saves the gate's activation and a copy of
    # the other half. An activation without a gate saves the same either way.
    fused = values["bias_activation_fusion"] = plan.architecture.gated_mlp
    if plan.architecture.mixture_of_experts is not None:
        # No token dropping: every token goes to the experts that its router chose, as in transformers.
        values |= {"moe_expert_capacity_factor": None, "moe_pad_expert_input_to_capacity": False}
    values |= {
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        # Every weight is loaded from a transformers model, so these initialize nothing. Initialization stays
        # on because it sets tensor-parallel attributes, without which the gradient norm counts weights twice.
        **dict.fromkeys(
            ("init_method", "output_layer_init_method", "embedding_init_method"), _leave_uninitialized
        ),
        # Two interleaved stages send each other an output and a gradient at once. Batched messages would mix
        # them up, so megatron/training/arguments.py rejects that combination.
        "overlap_p2p_comm": vpp > 1,
        "batch_p2p_comm": vpp == 1,
    }
    return TransformerConfig(**values | convert_config(hf_config, fused_activation=fused))


def _leave_uninitialized(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def build_chunks(plan: Plan, config: TransformerConfig, hf_config: PretrainedConfig) -> list[torch.nn.Module]:
    """Build this rank's ``GPTModel``s, one for each model chunk of its stage, with weights not yet set."""
    return [_build_chunk(plan, config, hf_config, number) for number in range(plan.degrees.vpp)]


def _build_chunk(
    plan: Plan, config: TransformerConfig, hf_config: PretrainedConfig, number: int
) -> torch.nn.Module:
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    arch, degrees = plan.architecture, plan.degrees
    virtual_stage = number if degrees.vpp > 1 else None
    # Local modules, which need neither Transformer Engine nor Apex; norms and attention are replaced.
    block = get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization=config.normalization, vp_stage=virtual_stage
    )
    attention = choose_attention(plan)
    for layer in block.layer_specs:
        _use_marked_norms(layer)
        layer.submodules.self_attention.submodules.core_attention = attention
    stage = parallel_state.get_pipeline_model_parallel_rank()
    learned = arch.position_embedding == "learned"
    model: torch.nn.Module = GPTModel(
        config,
        TransformerBlockSubmodules(layer_specs=block.layer_specs, layer_norm=MarkedNorm),
        compute_padded_vocab_size(arch.vocab_size, degrees.tp),
        arch.max_position_embeddings if learned else plan.recipe.seq_len,
        pre_process=stage == 0 and number == 0,
        post_process=stage == degrees.pp - 1 and number == degrees.vpp - 1,
        position_embedding_type="learned_absolute" if learned else "rope",
        share_embeddings_and_output_weights=arch.tie_word_embeddings,
        vp_stage=virtual_stage,
        **convert_rope(hf_config),
    )
    for parameter in model.parameters():
        # As Float16Module does.
        parameter.data = parameter.data.to(DTYPES[plan.recipe.precision])
    return model


def choose_attention(plan: Plan) -> type[torch.nn.Module]:
    """Return the core attention class that matches ``plan``: for "eager" Megatron-core's own.

    GPUs before Ampere have it by default (``resolve_attention``).
    """
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    if plan.degrees.cp > 1:
        return get_context_attention()
    return DotProductAttention if resolve_attention(plan) == "eager" else FusedAttention


def _use_marked_norms(layer: ModuleSpec) -> None:
    """Replace the norms of a layer's spec, except the IdentityOp where a model has none."""
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = MarkedNorm
    attention = parts.self_attention.submodules
    for name in ("q_layernorm", "k_layernorm"):
        if "Identity" not in str(getattr(attention, name)):
            setattr(attention, name, MarkedNorm)


def wrap_chunks(
    plan: Plan, config: TransformerConfig, models: list[torch.nn.Module]
) -> list[DistributedDataParallel]:
    """Wrap each chunk in megatron-core's ``DistributedDataParallel``, whose buffers hold the gradients."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    # Buckets in the first chunk only, as in Megatron-LM (megatron/training/training.py, get_model): those of
    # the other chunks are overlapped with compute anyway.
    layout = get_layout(plan)
    options = DistributedDataParallelConfig(
        grad_reduce_in_fp32=reduces_in_fp32(layout, plan.recipe),
        use_distributed_optimizer=layout.distributed_optimizer,
        overlap_grad_reduce=layout.overlap_grad_reduce,
        overlap_param_gather=layout.overlap_param_gather,
    )
    chunks = [
        DistributedDataParallel(config, options, model, disable_bucketing=chunk > 0)
        for chunk, model in enumerate(models)
    ]
    # As Megatron-LM's train() does: reduce gradients in the last micro-batch only, and let the interleaved
    # schedule start the collectives of each chunk.
    if layout.overlap_grad_reduce:
        config.no_sync_func = _unpack_single([chunk.no_sync for chunk in chunks])
        if len(chunks) > 1:
            config.grad_sync_func = [chunk.start_grad_sync for chunk in chunks]
    if layout.overlap_param_gather and len(chunks) > 1:
        config.param_sync_func = [chunk.start_param_sync for chunk in chunks]
    return chunks


def _unpack_single(methods: list[T]) -> T | list[T]:
    """Return a single method itself: megatron-core's schedules expect a list only with several chunks."""
    return methods[0] if len(methods) == 1 else methods


def build_optimizer(
    plan: Plan,
    config: TransformerConfig,
    chunks: list[DistributedDataParallel],
    numbers: OptimizerNumbers,
    clip: float | None,
) -> MegatronOptimizer:
    """Build megatron-core's optimizer over ``chunks`` from ``numbers`` (:class:`OptimizerNumbers`)."""
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    layout = get_layout(plan)
    dtype = DTYPES[plan.recipe.precision]
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam" if plan.recipe.optimizer == "adamw" else plan.recipe.optimizer,
            lr=numbers.learning_rate,
            weight_decay=numbers.weight_decay,
            adam_beta1=numbers.betas[0],
            adam_beta2=numbers.betas[1],
            adam_eps=numbers.eps,
            sgd_momentum=numbers.momentum,
            bf16=dtype == torch.bfloat16,
            fp16=dtype == torch.float16,
            initial_loss_scale=2.0**LOSS_SCALE_POWER,
            # As torch.amp.GradScaler: it grows after 2000 steps and halves at the first overflow.
            loss_scale_window=2000,
            hysteresis=1,
            params_dtype=dtype,
            use_distributed_optimizer=layout.distributed_optimizer,
            overlap_param_gather=layout.overlap_param_gather,
            # Not 0: that disables clipping, but then no gradient norm is computed either.
            clip_grad=float("inf") if clip is None else clip,
        ),
        chunks,
        use_gloo_process_groups=False,
    )
    for group in optimizer.param_groups:
        # As Megatron-LM's scheduler at every step (core/optimizer_param_scheduler.py): ``wd_mult`` of vectors
        # is 0.
        group["weight_decay"] = numbers.weight_decay * group["wd_mult"]
    # The schedule scales the loss for fp16, and reduces the gradients that the buffers do not: of norms over
    # sequence shards, of tied embeddings over stages.
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    return optimizer


def flatten_optimizers(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """Return the chained megatron-core optimizers, each around a torch optimizer; experts have their own."""
    chained = getattr(optimizer, "chained_optimizers", None)
    if chained is None:
        return [optimizer]
    return [single for part in chained for single in flatten_optimizers(part)]


# ---- PyTorch's fused attention kernels for layers of Megatron-core's local modules
#
# Megatron-core's own ``DotProductAttention`` writes the full score matrix to memory. A plan's memory and time
# are those of fused kernels, which Megatron users get from Transformer Engine.


class FusedAttention(DotProductAttention):  # type: ignore[misc]
    """Causal attention over whole sequences, without dropout, with multi-head or grouped-query heads."""

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: object, **__: object
    ) -> torch.Tensor:
        """Attend. Inputs are (tokens, rows, heads, width), the output is (tokens, rows, heads x width)."""
        # Values are a view of the fused QKV output, while rotary embedding has copied queries and keys.
        # Without ``contiguous`` the saved view would keep the whole output alive for backward.
        queries, keys, values = (tensor.contiguous().permute(1, 2, 0, 3) for tensor in (query, key, value))
        grouped = key.shape[2] != query.shape[2]
        attended = F.scaled_dot_product_attention(
            queries, keys, values, is_causal=True, scale=self.softmax_scale, enable_gqa=grouped
        )
        return attended.permute(2, 0, 1, 3).flatten(2)


# ---- torch norms that support sequence parallelism, for ranks without Transformer Engine or Apex


class MarkedNorm:
    """Replacement of ``WrappedTorchNorm``, with the ``sequence_parallel`` attribute that it lacks.

    Each tp rank sees its own shard of the sequence, so each has a partial gradient of the norm's weights.
    ``finalize_model_grads`` sums the gradients of parameters with that attribute
    (megatron/core/distributed/finalize_model_grads.py).
    """

    # A class and not a function: megatron-core's build_module (transformer/spec_utils.py) does not call
    # functions.
    def __new__(  # type: ignore[misc,unused-ignore]
        cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object
    ) -> torch.nn.Module:
        """Return a ``LayerNorm`` or ``RMSNorm`` of ``hidden_size``."""
        norm_class = torch.nn.RMSNorm if config.normalization == "RMSNorm" else torch.nn.LayerNorm
        norm = norm_class(hidden_size, eps=eps, dtype=config.params_dtype)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined,unused-ignore]
        return norm
