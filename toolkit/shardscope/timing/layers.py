"""Seconds of one decoder layer on one rank for one micro-batch, by class of operator.

Numbers may be arrays of plans: all arithmetic broadcasts.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import TYPE_CHECKING, NamedTuple

from shardscope.core.ops import ceil_div, group_equal, map_distinct, maximum, where
from shardscope.core.precision import FP32
from shardscope.memory.activations.forward import list_saved_tensors
from shardscope.memory.activations.modules.attention import get_attention_widths as attention_widths
from shardscope.memory.activations.modules.attention import is_eager, is_unfused
from shardscope.memory.activations.modules.megatron import build_eager_scores
from shardscope.memory.state.lora import find_adapters
from shardscope.timing.collectives import cache_calls
from shardscope.timing.matmul import (
    LayerProducts,
    count_adapter_products,
    count_adapters,
    count_attention_flops_per_token,
    count_attention_operands,
    count_dora_products,
    count_eager_attention,
    count_layer_products,
)
from shardscope.timing.parallel import list_parallel_collectives
from shardscope.timing.rates import MAX_SDPA_HEAD_DIM, MOVED_BYTES

if TYPE_CHECKING:
    from shardscope.core.architecture import Architecture
    from shardscope.core.plan import Plan
    from shardscope.memory.activations.modules.saved_tensors import Modules
    from shardscope.timing.rates import FusedAttention, MatrixRate, Rates
    from shardscope.timing.traffic import TimingModel, Transfer

PEAKS = {"bf16-mixed": "bf16", "fp16-mixed": "fp16", "fp8-mixed": "fp8", "bf16": "bf16", "fp32": "fp32"}
"""The layers' matmul dtype for each recipe precision."""
HALF_PEAKS = PEAKS | {"fp8-mixed": "bf16"}
"""The dtype of attention and of the head, which never run in 8 bits."""
_ADDS = 2 * 3
"""Tensor reads and writes of a layer's two residual additions: each reads two streams and writes one."""
_CAST_TO_8_BITS = 2 * (2 + 1)
"""Bytes moved per element of a cast: one pass for the maximum, and one that also writes a byte; or, on
Blackwell and with delayed scaling, one pass that writes it plain and transposed (Micikevicius et al.
2022)."""


_ADAPTER_KERNELS = (8, 12)
"""Kernels of one adapter on top of its base, forward and backward: peft/tuners/lora/layer.py, ``Linear``,
counted with torch's dispatcher with fp32 adapters under autocast, as peft casts them; 4 and 8 in a single
dtype."""

_DORA_KERNELS = (13, 8)
"""Kernels that DoRA adds, line by line: peft 0.21, tuners/lora/dora.py, ``DoraLinearLayer.forward``."""
_DORA_PASSES = 6
"""Reads and writes of the matrix for its norm: the scaled product, the sum with the base, and the norm."""


class Operators(NamedTuple):
    """Seconds of one pass (forward or backward) through one layer."""

    matrices: float
    attention: float
    elementwise: float
    """Memory-bound operators, and waits for kernel launches."""
    waiting: float = 0.0
    """The waits for kernel launches, a part of ``elementwise``."""

    @property
    def seconds(self) -> float:
        """Seconds of the whole pass."""
        return self.matrices + self.attention + self.elementwise


class LayerSeconds(NamedTuple):
    """Seconds of one layer, one micro-batch."""

    both: Operators
    """Forward and backward."""
    forward: float
    forward_attention: float
    forward_waiting: float
    recomputation: float
    """Recomputation before the layer's backward."""
    dropped_bytes: float
    """Activation bytes that recomputation or offloading frees on the GPU."""


class LayerWork:
    """Timing state shared by all layers of one plan."""

    def __init__(self, plan: Plan, modules: Modules, rates: Rates, model: TimingModel) -> None:
        self.plan, self.modules, self.rates, self.model = plan, modules, rates, model
        self.overlap = model.overlap(plan)
        self.calls = cache_calls(rates, plan.cluster.gpus_per_node)
        recipe, degrees = plan.recipe, plan.degrees
        self.arch = plan.architecture
        # Plans with equal tokens per rank share all that depends on tokens, whatever product gave them.
        self.tokens: int = group_equal(recipe.micro_batch_size * ceil_div(recipe.seq_len, degrees.cp))
        # With sequence parallelism, norms and residuals have a part of the tokens only.
        self.cut: int = where(plan.layout.splits_sequence, degrees.tp, 1)
        self.expert_tp = plan.layout.expert_tp
        self.rate = rates.get_matmul_rate(PEAKS[recipe.precision])
        self.half_rate = rates.get_matmul_rate(HALF_PEAKS[recipe.precision])
        self.memory = rates.get_memory_bandwidth()
        self.passes = rates.get_passes(modules.kernels)
        self._layers: dict[bool, LayerSeconds] = {}
        # Last, because it reads the attributes above.
        self.parallel = list_parallel_collectives(self)

    def call_seconds(self, transfer: Transfer) -> float:
        """Return the seconds of one call of ``transfer`` without overlap; cached across stages."""
        _, collective, num_bytes, ranks, stride, _, messages, _, _ = transfer
        return self.calls(collective, num_bytes, ranks, stride, messages)

    def compute_layer(self, moe: bool) -> LayerSeconds:
        """Return the seconds of one layer, dense or with routed experts; the same on every stage."""
        layer_seconds = self._layers.get(moe)
        if layer_seconds is None:
            layer_seconds = self._layers[moe] = self._compute_layer(moe)
        return layer_seconds

    def _compute_layer(self, moe: bool) -> LayerSeconds:
        arch, recipe, tp = self.arch, self.plan.recipe, self.plan.degrees.tp
        # Matmuls and attention: compute-bound, unless a matmul is small.
        products = count_layer_products(arch, moe, tp, self.plan.degrees.ep, self.expert_tp)
        matrices = self._compute_matmuls(moe, products)
        adapters, adapter_matmuls, dora_matmuls, dora = find_adapters(arch, recipe), 0.0, 0.0, (0, 0, 0)
        if adapters is not None:
            adapter_matmuls = count_adapter_products(arch, moe, adapters, tp).seconds(self.tokens, self.rate)
            if adapters.use_dora:
                dora = count_dora_products(arch, moe, adapters)
                dora_matmuls = self.rate.seconds(*dora[:2])
        attention, attention_back = self._compute_attention()
        # All other operators are memory-bound. Their traffic is proportional to what they save for backward
        # (``catalog/efficiency.toml``, [passes]); residual additions, casts and sorting are counted on top.
        saved = self._count_saved_bytes(moe)
        stream = self.tokens * ceil_div(arch.hidden_size * self.modules.stream, self.cut)
        moved, moved_back = self._count_cast_bytes(products)
        if moe:
            sorted_bytes = self._count_sort_bytes()
            moved, moved_back = moved + sorted_bytes, moved_back + sorted_bytes
        elementwise = (
            self.passes.slowdown * self.passes.forward * saved + _ADDS * stream + moved
        ) / self.memory
        elementwise += _DORA_PASSES * dora[2] * self.modules.compute / self.memory
        elementwise_back = (
            self.passes.slowdown * self.passes.backward * saved + _ADDS * stream + moved_back
        ) / self.memory
        merged, merged_back = self._compute_merge()
        elementwise, elementwise_back = elementwise + merged, elementwise_back + merged_back
        # Short kernels leave the GPU waiting for the host, forward and backward each for their own.
        own_forward, own_backward = self.overlap.kernels
        modules_forward, modules_backward = self._count_module_kernels(moe)
        num_adapters = 0 if adapters is None else count_adapters(arch, moe, adapters)
        running = Operators(matrices + adapter_matmuls + dora_matmuls, attention, elementwise)
        num_kernels = modules_forward + num_adapters * (
            _ADAPTER_KERNELS[0] + recipe.use_dora * _DORA_KERNELS[0]
        )
        calls = self.rates.get_checkpoint_calls(recipe.recompute, self.modules.kernels)
        # Every ``recompute_interval``-th layer is recomputed: this one stands for their mean.
        slower, slower_back = (
            1 + (factor - 1) / recipe.recompute_interval for factor in (calls.forward, calls.backward)
        )
        forward = self._add_launch_time(running, slower * num_kernels + own_forward)
        # Gradients of inputs and of weights are one matmul each (Kaplan et al. 2020, section 2.1); a frozen
        # matrix has only the first.
        backward = self._add_launch_time(
            Operators(
                (2 if adapters is None else 1) * matrices + 2 * adapter_matmuls,
                attention_back,
                elementwise_back,
            ),
            slower_back
            * (modules_backward + num_adapters * (_ADAPTER_KERNELS[1] + recipe.use_dora * _DORA_KERNELS[1]))
            + own_backward,
        )
        both = Operators(
            forward.matrices + backward.matrices,
            forward.attention + backward.attention,
            forward.elementwise + backward.elementwise,
            forward.waiting + backward.waiting,
        )
        recomputation = self._compute_recomputation(products, running, calls.repeated * num_kernels)
        return LayerSeconds(both, forward.seconds, forward.attention, forward.waiting, recomputation, saved)

    def _count_module_kernels(self, moe: bool) -> tuple[float, float]:
        """Return how many kernels a layer's modules start, forward and backward."""
        arch, passes = self.arch, self.passes
        latent, experts = arch.latent_attention, arch.mixture_of_experts
        # The layer that was counted has two RMSNorms. A query rank has one too; LayerNorms are one kernel.
        norms = int(latent is not None and latent.q_lora_rank is not None)
        if arch.norm == "rmsnorm":
            norms += 2 * arch.qk_norm + max(0, arch.norms_per_layer - 2)
        eager = is_eager(arch, self.modules)
        shared = moe and experts is not None and experts.shared_expert_intermediate_size > 0
        forward = (
            passes.kernels_forward
            + eager * passes.kernels_eager_forward
            + norms * passes.kernels_norm_forward
            + (latent is not None) * passes.kernels_latent_forward
            + moe * passes.kernels_experts_forward
            + shared * passes.kernels_shared_forward
        )
        backward = (
            passes.kernels_backward
            + eager * passes.kernels_eager_backward
            + norms * passes.kernels_norm_backward
            + (latent is not None) * passes.kernels_latent_backward
            + moe * passes.kernels_experts_backward
            + shared * passes.kernels_shared_backward
        )
        return forward, backward

    def _compute_matmuls(self, moe: bool, products: LayerProducts) -> float:
        if self.modules.kernels == "megatron":
            layer_seconds = products.sharded.seconds(self.tokens, self.rate)
            layer_seconds = layer_seconds + products.replicated.seconds(self.replicated_tokens, self.rate)
        else:
            layer_seconds = products.dense.seconds(self.tokens, self.rate)
        experts = self.arch.mixture_of_experts
        if moe and experts is not None:
            layer_seconds = layer_seconds + products.experts.seconds(
                self.count_routed_tokens(), self.get_expert_rate()
            )
        return layer_seconds

    @property
    def repeats_core_attention(self) -> bool:
        """Return whether selective recomputation repeats core attention, with its exchange of keys.

        Source: megatron/core/transformer/attention.py, ``_checkpointed_attention_forward``.
        """
        return self.plan.recipe.recompute == "selective" and self.modules.kernels == "megatron"

    @property
    def replicated_tokens(self) -> float:
        """Tokens that a matrix on every tensor-parallel rank multiplies.

        Megatron-core's router and latent attention's down projections read the split sequence (core 0.16,
        moe_layer.py and multi_latent_attention.py); elsewhere each rank multiplies all tokens.
        """
        return self.tokens / self.cut if self.modules.kernels == "megatron" else self.tokens

    def count_routed_tokens(self) -> float:
        """Return the tokens of the most loaded rank's experts, a copy for each expert.

        If each tensor-parallel rank has its own experts, they get only its part of the sequence.
        """
        return self._count_token_copies(self.tokens * self.expert_tp / self.plan.degrees.tp)

    def count_sent_tokens(self) -> float:
        """Return the tokens that the most loaded rank exchanges with other expert-parallel ranks.

        With a split sequence, a tensor-parallel rank sends and receives tokens of its own part only.
        """
        return self._count_token_copies(self.tokens / self.cut)

    def _count_token_copies(self, tokens: float) -> float:
        experts = self.arch.mixture_of_experts
        assert experts is not None
        return tokens * experts.num_experts_per_tok * self.modules.expert_load

    @property
    def expert_precision(self) -> str:
        """Dtype of grouped matmuls: the recipe's precision with Megatron's kernels.

        Otherwise, autocast leaves them in the weights' fp32, and torchao's float8 converts Linears only.
        """
        if self.modules.kernels == "megatron":
            return PEAKS[self.plan.recipe.precision]
        return "fp32" if self.modules.stream == FP32 else HALF_PEAKS[self.plan.recipe.precision]

    def get_expert_rate(self) -> MatrixRate:
        """Return the rate of grouped matmuls, in :attr:`expert_precision`."""
        return self.rates.get_matmul_rate(self.expert_precision)

    def _compute_attention(self) -> tuple[float, float]:
        """Return the seconds of core attention, forward and backward.

        Fused: two matmuls forward and five backward with the keys that the kernel does not skip (Dao 2023,
        section 3.1; :func:`count_attention_keys`), slower for fewer keys, and at least the time to read its
        operands and write its result, which bounds sequences of few hundred tokens. Eager: the full matmuls,
        two forward and four backward.
        """
        arch, modules, tp = self.arch, self.modules, self.plan.degrees.tp
        seq_len = self.plan.recipe.seq_len
        if is_unfused(arch, modules):
            # Eager and math attention multiply all scores, as plain matmuls do.
            once = self.half_rate.seconds(*count_eager_attention(arch, seq_len, self.tokens, tp))
            return once, 2 * once
        # torch 2.13, utils/flop_counter.py: sdpa_flop_count has two matmuls, sdpa_backward_flop_count five,
        # because the scores are computed again.
        precision = HALF_PEAKS[self.plan.recipe.precision]
        rate = self.rates.get_attention_rate(precision, find_attention_kernels(arch, modules))
        flops = self.tokens * count_attention_flops_per_token(arch, modules) / tp
        flops = flops * (1 + rate.half_keys / seq_len)
        moving = MOVED_BYTES[precision] * self.tokens * count_attention_operands(arch) / tp / self.memory
        # Backward reads them and the result's gradient, and writes three gradients.
        return maximum(flops / rate.forward, moving), maximum(2.5 * flops / rate.backward, 2 * moving)

    def _count_saved_bytes(self, moe: bool) -> float:
        """Return the bytes that a layer's operators save for backward without recomputation."""
        arch, modules = self.arch, self.modules
        of_one = partial(count_saved_bytes_per_token, arch, moe, modules)
        # Counted tensor by tensor for one token: plans with equal degrees share the count.
        bytes_per_token = map_distinct(of_one, self.plan.degrees.tp, self.cut, self.expert_tp)
        return self.tokens * bytes_per_token

    def _count_cast_bytes(self, products: LayerProducts) -> tuple[float, float]:
        """Return bytes to dequantize weights, or to cast weights and inputs to 8 bits; forward, backward."""
        recipe = self.plan.recipe
        if recipe.base_quantization is not None:
            # Half a byte or one byte is read per weight, and one element in the compute dtype is written.
            dequantized = products.weights * (self.modules.compute + (1 if self.modules.int8_base else 0.5))
            return dequantized, dequantized
        if recipe.precision != "fp8-mixed":
            return 0.0, 0.0
        # Forward casts inputs and weights, backward gradients of outputs: ``edges`` counts both widths.
        cast = _CAST_TO_8_BITS * self.tokens * products.edges / 2
        return cast + _CAST_TO_8_BITS * products.weights, cast

    def _compute_merge(self) -> tuple[float, float]:
        """Return seconds to merge attention outputs over each rank's keys, and the queries' gradients."""
        cp, tp, (forward, backward) = self.plan.degrees.cp, self.plan.degrees.tp, self.overlap.merge_bytes
        # A check of the class, because comparing an array would give an array.
        if cp.__class__ is int and cp == 1:
            return 0, 0
        joined = self.tokens * attention_widths(self.arch).output * (cp - 1) / tp
        return forward * joined / self.memory, backward * joined / self.memory

    def _count_sort_bytes(self) -> float:
        """Return bytes to sort tokens by expert and back, besides the one copy that experts save.

        Megatron's dispatcher sorts them by expert before they are sent, again by local expert where they
        arrive, and both back (megatron/core/transformer/moe/token_dispatcher.py,
        MoEAlltoAllTokenDispatcher): four copies, or two if a rank has one expert only. For transformers, the
        measured passes include them.
        """
        experts = self.arch.mixture_of_experts
        if self.modules.kernels != "megatron" or experts is None:
            return 0.0
        copies = where(self.plan.degrees.ep < experts.num_experts, 3, 1)
        return copies * 2 * self.count_routed_tokens() * self.arch.hidden_size * self.modules.compute

    def _add_launch_time(self, work: Operators, num_kernels: float) -> Operators:
        """Return the operators plus the launch time of their kernels that exceeds their run time.

        A CPU rank cannot overlap: it launches an operator itself, and then runs it.
        """
        waiting = self.compute_waiting(num_kernels, work.seconds)
        return Operators(work.matrices, work.attention, work.elementwise + waiting, waiting)

    def compute_waiting(self, num_kernels: float, seconds: float) -> float:
        """Return the launch time of kernels that exceeds the ``seconds`` in which they run."""
        starting = num_kernels * self.rates.kernel_seconds * self.passes.host_factor
        return maximum(0.0, starting - seconds) if self.plan.on_gpu else starting

    def _compute_recomputation(
        self, products: LayerProducts, running: Operators, num_kernels: float
    ) -> float:
        """Return the recomputation time of one layer, whose forward takes ``running`` without waits.

        ``num_kernels`` are those that recomputation calls, in host time of plain ones.

        ``full`` repeats its forward without the last matmul, if recomputation stops early. ``selective``
        repeats core attention with Megatron (Korthikanti et al. 2022, section 5), the softmax and dropout of
        eager attention included, and with torch everything but matmuls and attention, whose outputs are
        saved: the host calls them like all operators (torch 2.13, utils/checkpoint.py,
        ``_CachedTorchDispatchMode``).
        """
        recompute = self.plan.recipe.recompute
        if recompute == "full":
            # torch 2.13, utils/checkpoint.py, ``early_stop``: the forward is left as soon as all tensors that
            # backward needs exist, and none comes after the last matmul.
            if self.overlap.stops_early:
                last = products.last.seconds(self.tokens, self.rate)
                running = running._replace(matrices=running.matrices - last)
                num_kernels = num_kernels - 1
            return self._add_launch_time(running, num_kernels).seconds
        if recompute == "selective":
            if self.modules.kernels == "megatron":
                return running.attention + self._compute_eager_softmax()
            repeated = Operators(0.0, 0.0, running.elementwise)
            return self._add_launch_time(repeated, num_kernels).seconds
        return 0.0

    def _compute_eager_softmax(self) -> float:
        """Return the seconds of softmax and dropout of Megatron's eager attention; 0 with fused attention."""
        if self.modules.attention != "eager":
            return 0.0
        scores = build_eager_scores(self.arch, self.modules).bytes_per_token * self.tokens
        return self.passes.slowdown * self.passes.forward * scores / self.plan.degrees.tp / self.memory


def find_attention_kernels(arch: Architecture, modules: Modules) -> FusedAttention:
    """Return whose fused attention kernels run.

    SDPA with wide heads counts as FlashAttention's: its other kernels were not measured.
    """
    if modules.kernels == "megatron":
        return "cudnn"
    widths = attention_widths(arch)
    is_wide = max(widths.query, widths.output) > MAX_SDPA_HEAD_DIM * arch.num_attention_heads
    return "flash" if modules.attention == "flash" or is_wide else "sdpa"


@lru_cache(maxsize=4096)
def count_saved_bytes_per_token(
    arch: Architecture, moe: bool, modules: Modules, tp: int, cut: int, expert_tp: int
) -> float:
    """Return bytes per token saved by one layer on one rank; for mixed sliding windows, by one without."""
    # With fewer key/value heads than ranks, several ranks hold the same head: the heads bound the division.
    parts = {
        "tp": tp,
        "key_value_heads": min(tp, arch.num_key_value_heads),
        "sequence": cut,
        "expert_tokens": tp / expert_tp,
        "whole": 1,
    }
    return sum(
        tensor.bytes_per_token / parts[tensor.cut_by] for tensor in list_saved_tensors(arch, moe, modules)
    )
