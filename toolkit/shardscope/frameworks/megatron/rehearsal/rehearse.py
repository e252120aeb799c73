"""Rehearsal of megatron-core's model, schedule, gradient buffers and optimizer on fake tensors.

One pipeline stage runs at a time, at the plan's true sizes and world size. ``GPTModel``,
``DistributedDataParallel``, the distributed optimizer and the 1F1B or interleaved schedule are
megatron-core's own. Transformer Engine's kernels are replaced by ``fused_modules``, and routing is left out,
because fake tensors have no values.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from shardscope.core.errors import refuse
from shardscope.core.ops import ceil_div
from shardscope.frameworks.megatron.core_config import (
    build_transformer_config,
    check_rehearsed,
    compute_padded_vocab_size,
)
from shardscope.frameworks.megatron.engine.cuda_as_cpu import Replacement, patch_attribute
from shardscope.frameworks.megatron.layout import get_layout
from shardscope.frameworks.megatron.memory.precision_aware import reduces_in_fp32
from shardscope.frameworks.megatron.rehearsal.fake_device import fake_device
from shardscope.frameworks.megatron.rehearsal.fused_modules import (
    CausalSoftmax,
    DuplicatedLinear,
    FusedAttention,
    FusedExperts,
    FusedNorm,
    FusedRegions,
    apply_fused_rotary,
    look_up_embedding,
    softmax_batch_per_block,
)
from shardscope.memory.activations.modules.attention import resolve_attention
from shardscope.rehearsal.fake_world import fake_ranks, fake_tensors
from shardscope.rehearsal.result import RehearsedStage

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.optimizer import MegatronOptimizer
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.spec_utils import ModuleSpec

    from shardscope.core.plan import Plan
    from shardscope.rehearsal.torch_step import NoteProgress
    from shardscope.rehearsal.tracker import Tracker

LossFunction = Callable[[torch.Tensor], tuple[torch.Tensor, dict[str, object]]]
REGIONS = FusedRegions()
"""What stands in this process for the functions that megatron-core compiles."""
_DTYPES = {
    "bf16-mixed": torch.bfloat16,
    "bf16": torch.bfloat16,
    "fp16-mixed": torch.float16,
    "fp32": torch.float32,
}
_FUSED_QUERY_NORM = "megatron.core.transformer.mla_qk_norm_config"
"""The module with which megatron-core fuses a norm with the projection of queries, from 0.19 on."""


def rehearse(
    plan: Plan, note_progress: NoteProgress, stages: tuple[int, ...] | None = None
) -> list[RehearsedStage]:
    """Rehearse one optimizer step of every pipeline stage, or of ``stages``.

    Raises ``ValueError`` naming what megatron-core cannot build without CUDA.
    """
    check_rehearsed(plan)
    if resolve_attention(plan) == "eager" and plan.architecture.latent_attention is not None:
        # GPUs before Ampere have unfused attention by default.
        is_default = plan.recipe.attention is None
        refuse(
            "Recipe.attention",
            plan.recipe.attention,
            "fused attention (None or 'flash' from Ampere on) with latent attention: megatron-core's "
            "DotProductAttention lacks its widths",
            {"layout": "fsdp2"} if is_default else {"attention": None},
        )
    latent = plan.architecture.latent_attention
    if latent is not None and latent.q_lora_rank is None and find_spec(_FUSED_QUERY_NORM) is not None:
        refuse(
            "LatentAttention.q_lora_rank",
            None,
            "a number: this megatron-core normalizes queries that are not compressed in Transformer Engine "
            "(megatron-core below 0.19 does not)",
            {"layout": "fsdp2"},
        )
    import_with_fused_regions()
    results = []
    numbers = stages if stages is not None else tuple(range(plan.degrees.pp))
    try:
        for index, number in enumerate(numbers):
            note_progress(f"pipeline stage {number}", 0.05 + 0.9 * index / len(numbers))
            results.append(_StageRehearsal(plan, number).run())
    finally:
        # The cache holds about ten thousand shapes of this plan, which no other plan uses.
        FakeTensorMode.cache_clear()
    return results


def import_with_fused_regions() -> None:
    """Import megatron-core with fused regions in place of ``torch.compile``.

    It decorates its functions when its modules are imported. In a process that imported it otherwise, these
    stay as they are, and a rehearsal counts intermediates that a compiled function keeps in registers.
    """
    with REGIONS.in_place_of_compile():
        import megatron.core.models.gpt
        import megatron.core.optimizer
        import megatron.core.pipeline_parallel  # noqa: F401


class _StageRehearsal:
    """Rehearsal of one pipeline stage, on the rank that is first in all other groups."""

    def __init__(self, plan: Plan, number: int) -> None:
        self.plan = plan
        self.number = number
        self.dtype = _DTYPES[plan.recipe.precision]
        self.vocab = compute_padded_vocab_size(plan.architecture.vocab_size, plan.degrees.tp)

    def run(self) -> RehearsedStage:
        """Run two steps and report the second: the first creates the optimizer state."""
        plan, degrees = self.plan, self.plan.degrees
        # Ranks are numbered "tp-cp-ep-dp-pp": the first rank of a stage is the first in its other groups.
        rank = self.number * (plan.world_size // degrees.pp)
        with fake_ranks(plan.world_size, rank), self._initialize_groups():
            # The tracker recognizes logits by their width.
            logits = (self.vocab // degrees.tp,)
            with fake_tensors(True, logits) as tracker, fake_device(), self._patch_megatron(tracker):
                config = self._build_config()
                chunks = self._build_chunks(tracker, config)
                optimizer = self._build_optimizer(tracker, chunks)
                # The fewest micro-batches that the schedule accepts: interleaved, a multiple of pp.
                fewest = degrees.pp if degrees.vpp > 1 else 1
                self._run_step(tracker, chunks, optimizer, fewest)
                tracker.restart()
                self._run_step(tracker, chunks, optimizer, self._count_micro_batches())
                result = tracker.build_stage(
                    self.number, plan.stage_layers[self.number], note=self._describe_limits()
                )
                _clear_modules(chunks)
                return result

    def _count_micro_batches(self) -> int:
        """Return enough micro-batches to reach the most in flight, and to replace one of them."""
        degrees = self.plan.degrees
        enough = 2 * degrees.pp if degrees.vpp > 1 else degrees.pp - self.number + 1
        return min(self.plan.num_micro_batches, enough)

    def _describe_limits(self) -> str:
        text = "kernels of Transformer Engine are replaced by stand-ins that save and allocate the same"
        if self.plan.architecture.mixture_of_experts is not None:
            text += "; every expert gets its even share of tokens"
        return text

    # ---- setup of the rank

    @contextlib.contextmanager
    def _initialize_groups(self) -> Iterator[None]:
        from megatron.core import parallel_state

        degrees, layout = self.plan.degrees, get_layout(self.plan)
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=degrees.tp,
            pipeline_model_parallel_size=degrees.pp,
            virtual_pipeline_model_parallel_size=degrees.vpp if degrees.vpp > 1 else None,
            expert_model_parallel_size=degrees.ep,
            expert_tensor_parallel_size=layout.expert_tp,
            create_gloo_process_groups=False,
        )
        try:
            yield
        finally:
            parallel_state.destroy_model_parallel()

    @contextlib.contextmanager
    def _patch_megatron(self, tracker: Tracker) -> Iterator[None]:
        """Record forward and backward of each micro-batch as phases, and replace kernels that need CUDA."""
        with contextlib.ExitStack() as stack:
            for owner, name, stand_in in _list_replacements(tracker):
                stack.enter_context(patch_attribute(owner, name, stand_in))
            REGIONS.tracker = tracker
            try:
                yield
            finally:
                REGIONS.tracker = None

    def _build_config(self) -> TransformerConfig:
        from megatron.core.transformer import MLATransformerConfig, TransformerConfig

        config_class = MLATransformerConfig if self.plan.architecture.latent_attention else TransformerConfig
        gelu, silu = torch.nn.functional.gelu, torch.nn.functional.silu
        return config_class(
            **build_transformer_config(self.plan) | {"masked_softmax_fusion": True},
            activation_func=silu if self.plan.architecture.gated_mlp else gelu,
            bf16=self.dtype == torch.bfloat16,
            fp16=self.dtype == torch.float16,
            params_dtype=self.dtype,
            pipeline_dtype=self.dtype,
            perform_initialization=False,
        )

    def _build_chunks(self, tracker: Tracker, config: TransformerConfig) -> list[DistributedDataParallel]:
        """Build this stage's model chunks and their gradient buffers, labelled for the tracker."""
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

        layout = get_layout(self.plan)
        with tracker.label_new_storages("parameters"):
            models = [self._build_model(config, chunk) for chunk in range(self.plan.degrees.vpp)]
        options = DistributedDataParallelConfig(
            grad_reduce_in_fp32=reduces_in_fp32(layout, self.plan.recipe),
            use_distributed_optimizer=layout.distributed_optimizer,
        )
        with tracker.label_new_storages("gradients"):
            chunks = [
                DistributedDataParallel(config, options, model, disable_bucketing=chunk > 0)
                for chunk, model in enumerate(models)
            ]
        for model in models:
            # The distributed optimizer moved the weights into its own buffer, made under "gradients".
            tracker.label((parameter.data for parameter in model.parameters()), "parameters")
            # Gradients that kernels do not add to the main gradient: DDP's hook adds and frees them.
            for parameter in model.parameters():
                parameter.register_hook(lambda gradient: tracker.label([gradient], "gather_buffers"))
        return chunks

    def _build_optimizer(self, tracker: Tracker, chunks: list[DistributedDataParallel]) -> MegatronOptimizer:
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        recipe = self.plan.recipe
        options = OptimizerConfig(
            optimizer="adam" if recipe.optimizer == "adamw" else recipe.optimizer,
            lr=1e-4,
            bf16=self.dtype == torch.bfloat16,
            fp16=self.dtype == torch.float16,
            # A constant scale: a dynamic one reads overflow flags, and fake tensors have no values.
            loss_scale=1.0 if self.dtype == torch.float16 else None,
            params_dtype=self.dtype,
            use_distributed_optimizer=get_layout(self.plan).distributed_optimizer,
        )
        with tracker.label_new_storages("optimizer"):
            return get_megatron_optimizer(options, chunks, use_gloo_process_groups=False)

    def _build_model(self, config: TransformerConfig, chunk: int) -> GPTModel:
        """Build one model chunk of this stage, with the stand-ins for fused kernels."""
        from megatron.core.models.gpt import GPTModel
        from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

        arch, recipe, degrees = self.plan.architecture, self.plan.recipe, self.plan.degrees
        virtual_stage = chunk if degrees.vpp > 1 else None
        layers = self._list_layer_specs(config, virtual_stage)
        for layer in layers:
            _use_fused_kernels(layer, fused_attention=resolve_attention(self.plan) != "eager")
        is_learned = arch.position_embedding == "learned"
        model = GPTModel(
            config,
            TransformerBlockSubmodules(layer_specs=layers, layer_norm=FusedNorm),
            self.vocab,
            max(recipe.seq_len, arch.max_position_embeddings) if is_learned else recipe.seq_len,
            pre_process=self.number == 0 and chunk == 0,
            post_process=self.number == degrees.pp - 1 and chunk == degrees.vpp - 1,
            position_embedding_type="learned_absolute" if is_learned else "rope",
            share_embeddings_and_output_weights=arch.tie_word_embeddings,
            vp_stage=virtual_stage,
        )
        for parameter in model.parameters():
            # As Float16Module does.
            parameter.data = parameter.data.to(self.dtype)
        return model

    def _list_layer_specs(self, config: TransformerConfig, virtual_stage: int | None) -> list[ModuleSpec]:
        """Return megatron-core's specs of a chunk's layers, with its local modules."""
        from megatron.core.models.gpt.gpt_layer_specs import (
            get_gpt_decoder_block_spec,
            get_gpt_layer_local_spec,
        )
        from megatron.core.transformer.transformer_block import get_num_layers_to_build

        arch = self.plan.architecture
        if arch.mixture_of_experts is None:
            spec = get_gpt_layer_local_spec(
                normalization=config.normalization,
                qk_layernorm=config.qk_layernorm,
                multi_latent_attention=arch.latent_attention is not None,
            )
            return [spec] * get_num_layers_to_build(config, vp_stage=virtual_stage)
        # Dense layers and layers with experts have different specs (moe_layer_freq).
        block = get_gpt_decoder_block_spec(
            config, use_transformer_engine=False, normalization=config.normalization, vp_stage=virtual_stage
        )
        layers: list[ModuleSpec] = block.layer_specs
        return layers

    # ---- one step

    def _run_step(
        self,
        tracker: Tracker,
        chunks: list[DistributedDataParallel],
        optimizer: MegatronOptimizer,
        num_micro_batches: int,
    ) -> None:
        from megatron.core import parallel_state
        from megatron.core.pipeline_parallel import get_forward_backward_func

        recipe, interleaved = self.plan.recipe, len(chunks) > 1
        for chunk in chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        # Lists of chunks and iterators for the interleaved schedule, single ones for the others.
        get_forward_backward_func()(
            forward_step_func=self._run_forward,
            data_iterator=[None] * len(chunks) if interleaved else None,
            model=chunks if interleaved else chunks[0],
            num_microbatches=num_micro_batches,
            seq_length=recipe.seq_len,
            decoder_seq_length=recipe.seq_len,
            micro_batch_size=recipe.micro_batch_size,
            forward_only=False,
        )
        # The buffer of all-gathered sequences is allocated once, on first use, and never freed.
        shared = parallel_state.get_global_memory_buffer().buffer.values()
        tracker.label(shared, "gather_buffers")
        with tracker.phase("optimizer"):
            optimizer.step()

    def _run_forward(
        self, data_iterator: None, model: DistributedDataParallel
    ) -> tuple[torch.Tensor, LossFunction]:
        """Run the forward of one micro-batch: megatron-core's ``forward_step_func``."""
        shape = (self.plan.recipe.micro_batch_size, ceil_div(self.plan.recipe.seq_len, self.plan.degrees.cp))
        tokens, positions, labels = (torch.zeros(shape, dtype=torch.int64) for _ in range(3))
        losses = model(tokens, positions, None, labels=labels)
        return losses, lambda losses: (losses.float().mean(), {})


def _list_replacements(tracker: Tracker) -> list[Replacement]:
    """Return the stand-ins for CUDA kernels, and wrappers that report to ``tracker``."""
    from megatron.core.fusions import fused_softmax
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.tensor_parallel import layers
    from megatron.core.transformer import multi_latent_attention

    get_dummy_gradient = layers.get_dummy_wgrad

    def get_labelled_gradient(shape: list[int], dtype: torch.dtype, zero: bool = False) -> torch.Tensor:
        with tracker.label_new_storages("gather_buffers"):
            gradient: torch.Tensor = get_dummy_gradient(shape, dtype, zero)
        return gradient

    return [
        (schedules, "forward_step", tracker.phase("forward")(schedules.forward_step)),
        (schedules, "backward_step", tracker.phase("backward")(schedules.backward_step)),
        (layers, "get_dummy_wgrad", get_labelled_gradient),
        (torch.nn.functional, "embedding", look_up_embedding),
        (multi_latent_attention, "TELinear", DuplicatedLinear),
        (rope_utils, "fused_apply_rotary_pos_emb", apply_fused_rotary),
        (fused_softmax, "ScaledUpperTriangMaskedSoftmax", CausalSoftmax),
        (fused_softmax.FusedScaleMaskSoftmax, "get_batch_per_block", staticmethod(softmax_batch_per_block)),
    ]


def _clear_modules(chunks: list[DistributedDataParallel]) -> None:
    """Clear the modules, which would otherwise never be freed.

    The token dispatcher keeps the last probabilities, and so their autograd graph, the hooks of
    megatron-core's DDP and the model. This reference cycle goes through C++, where Python's garbage
    collector cannot see it.
    """
    for chunk in chunks:
        for module in list(chunk.modules()):
            vars(module).clear()


def _use_fused_kernels(layer: ModuleSpec, *, fused_attention: bool) -> None:
    """Replace the modules of a layer's spec that Transformer Engine would have."""
    parts = layer.submodules
    parts.input_layernorm = FusedNorm
    parts.pre_mlp_layernorm = FusedNorm
    # A ModuleSpec in megatron-core 0.16 and 0.17, a partial from 0.18 on.
    mlp = parts.mlp.keywords["submodules"] if isinstance(parts.mlp, partial) else parts.mlp.submodules
    if hasattr(mlp, "experts"):
        mlp.experts = FusedExperts
    attention = parts.self_attention.submodules
    if fused_attention:
        attention.core_attention = FusedAttention
    # Only latent attention has these two.
    for name in ("linear_q_down_proj", "linear_kv_down_proj"):
        if hasattr(attention, name):
            setattr(attention, name, DuplicatedLinear)
    # A model without norms of queries and keys has IdentityOp here.
    for name in ("q_layernorm", "k_layernorm", "kv_layernorm"):
        if hasattr(attention, name) and "Identity" not in str(getattr(attention, name)):
            setattr(attention, name, FusedNorm)
