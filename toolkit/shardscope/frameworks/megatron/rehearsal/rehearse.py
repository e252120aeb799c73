"""Rehearsal of megatron-core's model, schedule, gradient buffers and optimizer on fake tensors.

One pipeline stage runs at a time, at the plan's true sizes and world size. ``GPTModel``,
``DistributedDataParallel``, the distributed optimizer and the 1F1B or interleaved schedule are
megatron-core's own. Transformer Engine's kernels are replaced by ``fused_modules``, and routing is left out,
because fake tensors have no values.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from shardscope.core.errors import refuse
from shardscope.core.ops import ceil_div
from shardscope.frameworks.megatron.core_config import (
    build_transformer_config,
    check_rehearsed,
    compute_padded_vocab_size,
)
from shardscope.frameworks.megatron.layout import MegatronLayout
from shardscope.frameworks.megatron.memory.precision_aware import reduces_in_fp32
from shardscope.frameworks.megatron.rehearsal.fake_device import fake_device
from shardscope.frameworks.megatron.rehearsal.fused_modules import (
    CausalSoftmax,
    DuplicatedLinear,
    FusedAttention,
    FusedExperts,
    FusedNorm,
    FusedRegions,
    embedding,
    fused_rotary,
    softmax_batch_per_block,
)
from shardscope.rehearsal.fake_world import fake_ranks, fake_tensors
from shardscope.rehearsal.result import RehearsedStage

if TYPE_CHECKING:
    from shardscope.core.plan import Plan
    from shardscope.rehearsal.tracker import Tracker

NoteProgress = Callable[[str, float], None]
_REGIONS = FusedRegions()
_DTYPES = {
    "bf16-mixed": torch.bfloat16,
    "bf16": torch.bfloat16,
    "fp16-mixed": torch.float16,
    "fp32": torch.float32,
}


def rehearse(
    plan: Plan, note_progress: NoteProgress, stages: tuple[int, ...] | None = None
) -> list[RehearsedStage]:
    """Rehearse one optimizer step of every pipeline stage, or of ``stages``.

    Raises ``ValueError`` naming what megatron-core cannot build without CUDA.
    """
    check_rehearsed(plan)
    if plan.recipe.attention == "eager" and plan.architecture.latent_attention is not None:
        refuse(
            "Recipe.attention",
            "eager",
            "None or 'flash' with latent attention: megatron-core's DotProductAttention lacks its widths",
            {"attention": None},
        )
    with _REGIONS.in_place_of_compile():
        import megatron.core.models.gpt
        import megatron.core.optimizer
        import megatron.core.pipeline_parallel  # noqa: F401
    found = []
    wanted = stages if stages is not None else tuple(range(plan.degrees.pp))
    try:
        for done, number in enumerate(wanted):
            note_progress(f"pipeline stage {number}", 0.05 + 0.9 * done / len(wanted))
            found.append(_StageRehearsal(plan, number).play())
    finally:
        # The cache holds about ten thousand shapes of this plan, which no other plan uses.
        FakeTensorMode.cache_clear()
    return found


class _StageRehearsal:
    """Rehearsal of one pipeline stage, on the rank that is first in all other groups."""

    def __init__(self, plan: Plan, number: int) -> None:
        self.plan = plan
        self.number = number
        self.dtype = _DTYPES[plan.recipe.precision]
        self.vocab = compute_padded_vocab_size(plan.architecture.vocab_size, plan.degrees.tp)

    def play(self) -> RehearsedStage:
        """Run two steps and report the second: the first creates the optimizer state."""
        plan, degrees = self.plan, self.plan.degrees
        rank = self.number * (plan.world_size // degrees.pp)
        with fake_ranks(plan.world_size, rank), self._model_parallel():
            logits = (self.vocab // degrees.tp,)
            with fake_tensors(True, logits) as tracker, fake_device(), self._followed(tracker):
                chunks, optimizer = self._build(tracker)
                first = degrees.pp if degrees.vpp > 1 else 1
                for step, num_micro_batches in enumerate((first, self._num_micro_batches())):
                    if step == 1:
                        tracker.restart()
                    self._step(tracker, chunks, optimizer, num_micro_batches)
                found = tracker.build_stage(self.number, plan.stage_layers[self.number], note=self._note())
                _let_go(chunks)
                return found

    def _num_micro_batches(self) -> int:
        """Return enough micro-batches to reach the most in flight, and to replace one of them."""
        degrees = self.plan.degrees
        enough = 2 * degrees.pp if degrees.vpp > 1 else degrees.pp - self.number + 1
        return min(self.plan.num_micro_batches, enough)

    def _note(self) -> str:
        found = "kernels of Transformer Engine are stood for by what they keep and allocate"
        if self.plan.architecture.mixture_of_experts is not None:
            found += "; every expert gets its even share of tokens"
        return found

    # ---- setup of the rank

    @contextlib.contextmanager
    def _model_parallel(self) -> Iterator[None]:
        from megatron.core import parallel_state

        degrees, layout = self.plan.degrees, self.plan.layout
        assert isinstance(layout, MegatronLayout)
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
    def _followed(self, tracker: Tracker) -> Iterator[None]:
        """Record forward and backward of each micro-batch as phases, in any schedule."""
        from megatron.core.fusions import fused_softmax
        from megatron.core.models.common.embeddings import rope_utils
        from megatron.core.pipeline_parallel import schedules
        from megatron.core.tensor_parallel import layers
        from megatron.core.transformer import multi_latent_attention

        dummy = layers.get_dummy_wgrad

        def kept_dummy(*args: Any, **kwargs: Any) -> torch.Tensor:
            with tracker.labelling("gather_buffers"):
                found: torch.Tensor = dummy(*args, **kwargs)
            return found

        def in_phase(name: Any, function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                with tracker.phase(name):
                    return function(*args, **kwargs)

            return call

        replaced: list[tuple[Any, str, Any]] = [
            (schedules, "forward_step", in_phase("forward", schedules.forward_step)),
            (schedules, "backward_step", in_phase("backward", schedules.backward_step)),
            (layers, "get_dummy_wgrad", kept_dummy),
            (torch.nn.functional, "embedding", embedding),
            (multi_latent_attention, "TELinear", DuplicatedLinear),
            (rope_utils, "fused_apply_rotary_pos_emb", fused_rotary),
            (fused_softmax, "ScaledUpperTriangMaskedSoftmax", CausalSoftmax),
            (
                fused_softmax.FusedScaleMaskSoftmax,
                "get_batch_per_block",
                staticmethod(softmax_batch_per_block),
            ),
        ]
        before = [(owner, name, vars(owner)[name]) for owner, name, _ in replaced]
        for owner, name, stand_in in replaced:
            setattr(owner, name, stand_in)
        _REGIONS.tracker = tracker
        try:
            yield
        finally:
            _REGIONS.tracker = None
            for owner, name, was in before:
                setattr(owner, name, was)

    def _build(self, tracker: Tracker) -> tuple[list[Any], Any]:
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        layout: Any = self.plan.layout
        recipe = self.plan.recipe
        config = self._config()
        with tracker.labelling("parameters"):
            models = [self._chunk(config, chunk) for chunk in range(self.plan.degrees.vpp)]
        buffers = DistributedDataParallelConfig(
            grad_reduce_in_fp32=reduces_in_fp32(layout, recipe),
            use_distributed_optimizer=layout.distributed_optimizer,
        )
        with tracker.labelling("gradients"):
            chunks = [
                DistributedDataParallel(config, buffers, model, disable_bucketing=chunk > 0)
                for chunk, model in enumerate(models)
            ]
        for model in models:
            tracker.label((parameter.data for parameter in model.parameters()), "parameters")
            for parameter in model.parameters():
                parameter.register_hook(lambda gradient: tracker.label([gradient], "gather_buffers"))
        with tracker.labelling("optimizer"):
            optimizer = get_megatron_optimizer(
                OptimizerConfig(
                    optimizer="adam" if recipe.optimizer == "adamw" else recipe.optimizer,
                    lr=1e-4,
                    bf16=self.dtype == torch.bfloat16,
                    fp16=self.dtype == torch.float16,
                    loss_scale=1.0 if self.dtype == torch.float16 else None,
                    params_dtype=self.dtype,
                    use_distributed_optimizer=layout.distributed_optimizer,
                ),
                chunks,
                use_gloo_process_groups=False,
            )
        return chunks, optimizer

    def _config(self) -> Any:
        from megatron.core.transformer import MLATransformerConfig, TransformerConfig

        kind = MLATransformerConfig if self.plan.architecture.latent_attention else TransformerConfig
        gelu, silu = torch.nn.functional.gelu, torch.nn.functional.silu
        return kind(
            **build_transformer_config(self.plan) | {"masked_softmax_fusion": True},
            activation_func=silu if self.plan.architecture.gated_mlp else gelu,
            bf16=self.dtype == torch.bfloat16,
            fp16=self.dtype == torch.float16,
            params_dtype=self.dtype,
            pipeline_dtype=self.dtype,
            perform_initialization=False,
        )

    def _chunk(self, config: Any, chunk: int) -> Any:
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import (
            get_gpt_decoder_block_spec,
            get_gpt_layer_local_spec,
        )
        from megatron.core.transformer.transformer_block import (
            TransformerBlockSubmodules,
            get_num_layers_to_build,
        )

        arch, degrees = self.plan.architecture, self.plan.degrees
        interleaved = chunk if degrees.vpp > 1 else None
        if arch.mixture_of_experts is None:
            one = get_gpt_layer_local_spec(
                normalization=config.normalization,
                qk_layernorm=config.qk_layernorm,
                multi_latent_attention=arch.latent_attention is not None,
            )
            layers = [one] * get_num_layers_to_build(config, vp_stage=interleaved)
        else:
            block = get_gpt_decoder_block_spec(
                config, use_transformer_engine=False, normalization=config.normalization, vp_stage=interleaved
            )
            layers = block.layer_specs
        fused = self.plan.recipe.attention != "eager"
        for layer in layers:
            _use_fused_kernels(layer, fused_attention=fused)
        first = self.number == 0 and chunk == 0
        last = self.number == degrees.pp - 1 and chunk == degrees.vpp - 1
        model = GPTModel(
            config,
            TransformerBlockSubmodules(layer_specs=layers, layer_norm=FusedNorm),
            self.vocab,
            max(self.plan.recipe.seq_len, arch.max_position_embeddings)
            if arch.position_embedding == "learned"
            else self.plan.recipe.seq_len,
            pre_process=first,
            post_process=last,
            position_embedding_type="learned_absolute" if arch.position_embedding == "learned" else "rope",
            share_embeddings_and_output_weights=arch.tie_word_embeddings,
            vp_stage=interleaved,
        )
        for parameter in model.parameters():
            # As Float16Module does.
            parameter.data = parameter.data.to(self.dtype)
        return model

    # ---- one step

    def _step(self, tracker: Tracker, chunks: list[Any], optimizer: Any, num_micro_batches: int) -> None:
        from megatron.core import parallel_state
        from megatron.core.pipeline_parallel import get_forward_backward_func

        recipe, interleaved = self.plan.recipe, len(chunks) > 1
        for chunk in chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        get_forward_backward_func()(
            forward_step_func=self._forward_step,
            data_iterator=[None] * len(chunks) if interleaved else None,
            model=chunks if interleaved else chunks[0],
            num_microbatches=num_micro_batches,
            seq_length=recipe.seq_len,
            decoder_seq_length=recipe.seq_len,
            micro_batch_size=recipe.micro_batch_size,
            forward_only=False,
        )
        shared = parallel_state.get_global_memory_buffer().buffer.values()
        tracker.label(shared, "gather_buffers")
        with tracker.phase("optimizer"):
            optimizer.step()

    def _forward_step(self, data_iterator: Any, model: Any) -> tuple[Any, Callable[[Any], Any]]:
        shape = (self.plan.recipe.micro_batch_size, ceil_div(self.plan.recipe.seq_len, self.plan.degrees.cp))
        tokens, positions, labels = (torch.zeros(shape, dtype=torch.int64) for _ in range(3))
        losses = model(tokens, positions, None, labels=labels)
        return losses, lambda losses: (losses.float().mean(), {})


def _let_go(chunks: list[Any]) -> None:
    """Clear the modules, which would otherwise never be freed.

    The token dispatcher keeps the last probabilities, and so their autograd graph, the hooks of
    megatron-core's DDP and the model. This reference cycle goes through C++, where Python's garbage
    collector cannot see it.
    """
    for chunk in chunks:
        for module in list(chunk.modules()):
            vars(module).clear()


def _use_fused_kernels(layer: Any, *, fused_attention: bool) -> None:
    parts = layer.submodules
    parts.input_layernorm = FusedNorm
    parts.pre_mlp_layernorm = FusedNorm
    if hasattr(parts.mlp.submodules, "experts"):
        parts.mlp.submodules.experts.module = FusedExperts
    attention = parts.self_attention.submodules
    if fused_attention:
        attention.core_attention = FusedAttention
    for name in ("linear_q_down_proj", "linear_kv_down_proj"):
        if hasattr(attention, name):
            setattr(attention, name, DuplicatedLinear)
    for name in ("q_layernorm", "k_layernorm", "kv_layernorm"):
        if hasattr(attention, name) and "Identity" not in str(getattr(attention, name)):
            setattr(attention, name, FusedNorm)
