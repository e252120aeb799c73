"""Record type of model families: properties that differ between decoder families.

The records are in the modules that read their config.json (``llama.py``, ``qwen.py``, ...), and
:func:`shardscope.families.registry.find_family` returns an architecture's. Defaults describe most families.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from shardscope.families.common import Fields, HfConfig

if TYPE_CHECKING:
    from shardscope.core.architecture import Architecture

Support = Literal[
    "pipeline_stages",
    "fsdp2_tensor_parallel",
    "fsdp2_context_parallel",
    "autotp_rehearsal",
    "autotp_training",
    "deepspeed_moe",
    "megatron_weights",
    "megatron_script",
    "liger_kernels",
    "compiled_layers",
    "dora",
    "attention_choice",
    "document_masks",
    "dropout",
]
"""Features that only some families support in training, rehearsal or prediction.

- ``pipeline_stages``: the model is ``model.embed_tokens``, ``model.layers``, ``model.norm`` and ``lm_head``,
  and accepts hidden states instead of embedded tokens.
- ``fsdp2_tensor_parallel``: DTensor shards its projections, which are separate matrices: a shard of a fused
  one would mix its parts.
- ``fsdp2_context_parallel``: attention is transformers' SDPA and positions are arguments, so that
  torch's ring can split sequences.
- ``autotp_rehearsal``: DeepSpeed's AutoTP shards it by transformers' own plan; it rejects plans with experts
  and with fused projections (Phi-3), and GPT-2 has no plan.
- ``autotp_training``: training with AutoTP was compared with training on one process.
- ``deepspeed_moe``: DeepSpeed's MoE layer routes like the family's.
- ``megatron_weights``: weights are converted to megatron-core's ``GPTModel`` and back.
- ``megatron_script``: the exported Megatron-core training script trains it.
- ``liger_kernels``: ``apply_liger_kernel_to_...`` replaces every norm and the whole MLP, and no more.
- ``compiled_layers``: saved tensors of its compiled layers have formulas (RMSNorm, a gated MLP, SDPA).
- ``dora``: saved tensors and peaks of its layers with DoRA have formulas, which are tested.
- ``document_masks``: its layers pass a prepared 4-D mask to SDPA unchanged and accept positions, so that
  packed documents can be separated.
- ``attention_choice``: ``Recipe.attention`` may differ from the family's default and has formulas.
- ``dropout``: masks have formulas: all of GPT-2's, and those of attention in other families.
"""

LLAMA_SUPPORT: frozenset[Support] = frozenset({
    "pipeline_stages", "fsdp2_tensor_parallel", "fsdp2_context_parallel", "autotp_rehearsal",
    "autotp_training", "megatron_weights", "megatron_script", "liger_kernels", "compiled_layers", "dora",
    "attention_choice", "document_masks", "dropout",
})  # fmt: skip
"""Features of Llama and of the dense families with the same layers."""


class Names(NamedTuple):
    """Names of one family's modules; inside a layer, relative to the layer."""

    layers: str = "model.layers"
    embedding: str = "model.embed_tokens"
    final_norm: str = "model.norm"
    attention: str = "self_attn"
    fused_qkv: str | None = None
    """Fused projection of query, key and value; None: separate projections."""
    output: str = "o_proj"
    fused_gate_up: str | None = None
    """Fused projection of gate and up; None: separate projections."""
    up: str = "up_proj"
    down: str = "down_proj"
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    """Norms of hidden_size in order of registration; layers with fewer norms have the first ones."""
    parallel_norms: tuple[str, str] | None = None
    """Names of the two norms of a layer with a parallel residual; None: as in ``norms``."""
    query_key_norms: tuple[str, str] = ("q_norm", "k_norm")
    router: str = "mlp.gate"
    shared_experts: str = "mlp.shared_experts"


class FileNames(NamedTuple):
    """Names in checkpoints on the Hub that differ from those in memory."""

    experts_are_stacked: bool = False
    """Whether files store all experts of a layer in one tensor."""
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    renamed: tuple[str, str] | None = None
    """Part of the names in memory, and its replacement in files."""


DEFAULT_NAMES = Names()
DEFAULT_FILE_NAMES = FileNames()


@dataclass(frozen=True, kw_only=True, eq=False)
class Family:
    """Properties of one ``model_type``."""

    model_type: str
    """Hugging Face's ``model_type``."""
    read: Callable[[HfConfig], Fields]
    """Function that reads an ``Architecture``'s fields from a config.json."""
    supports: frozenset[Support] = frozenset()
    """Supported features beyond those of all families."""

    # --- config.json ---------------------------------------------------------------------------------------

    activation: Literal["silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu2"] = "silu"
    """Default of ``hidden_act``, in transformers' names. ``gelu_new`` is not one kernel: it computes
    0.5 x (1 + tanh(...)) operator by operator."""
    activation_key: str = "hidden_act"
    """Key of the activation in config.json."""
    normalizes_top_k: bool = False
    """Whether the chosen experts' weights sum to 1 if ``norm_topk_prob`` is missing."""
    longrope_aliases: tuple[str, ...] = ()
    """Older names of ``longrope`` in its configs, which transformers still reads."""
    model_type_with_layer_types: str | None = None
    """``model_type`` with which transformers reads a config.json with ``layer_types``; None: its own."""
    config_values: Callable[[Architecture], Mapping[str, object]] | None = None
    """Function that returns keyword arguments of its transformers config that no other family has."""

    # --- Allowed architectures -----------------------------------------------------------------------------

    norms_per_layer: tuple[int, ...] = (2,)
    parallel_residual: tuple[bool, ...] = (False,)
    """Allowed values of ``Architecture.parallel_residual``: attention and MLP in parallel."""
    position_embeddings: tuple[str, ...] = ("rope", "learned")
    may_have_experts: bool = True
    has_grouped_queries: bool = True
    heads_fill_width: bool = False
    """Whether fused projections require heads x head_dim == hidden_size."""
    has_new_decoder_architecture: bool = False
    """Whether config.json has Falcon's ``new_decoder_architecture``."""
    check: Callable[[Architecture], None] | None = None
    """Function that raises ``ValueError`` for combinations of fields that its modules cannot have."""
    unlike_megatron_core: str | None = None
    """Parts of its layers that megatron-core 0.16's GPT layers lack or that have no formula, or None."""

    # --- Modules and parameters ----------------------------------------------------------------------------

    names: Names = DEFAULT_NAMES
    file_names: FileNames = DEFAULT_FILE_NAMES
    projections: Literal["linear", "conv1d", "matmul"] = "linear"
    """Modules of projections: ``torch.nn.Linear``; transformers' ``Conv1D``, stored (in, out) and always with
    a bias; or an explicit matmul with the transposed weight and an addition."""
    norm_placement: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]] = ((0,), (1, 2), (3,))
    """Indices of the norms before attention, between attention and feed-forward, and after it."""
    qk_norm_over_all_heads: bool = False
    """Whether one norm spans all query heads and one all key heads, instead of one norm per head."""
    has_head_bias: bool = False
    """Whether ``lm_head`` has a bias, also with a tied weight."""
    has_attention_sinks: bool = False
    """Whether the softmax includes a learned logit per head."""
    has_clamped_experts: bool = False
    """Whether experts have biases, clamp gate and up, and are stored as (in, out)."""
    has_shared_expert_gate: bool = False
    """Whether the shared expert is scaled by a sigmoid gate per token."""
    has_group_limited_routing: bool = False
    """Whether the router by default first chooses groups of experts (``n_group``)."""
    has_expert_intermediate_size: bool = True
    """Whether config.json has a width of experts other than ``intermediate_size``."""
    has_multi_token_prediction: bool = False
    """Whether files have an additional multi-token-prediction layer, which transformers does not build."""
    router: Literal["softmax", "softmax_upcast", "softmax_cast", "softmax_of_top_k", "sigmoid"] = "softmax"
    """Conversion of router scores to weights. ``softmax``: in fp32 over all experts, then normalized over the
    chosen ones; ``softmax_upcast``: hidden states and scores are fp32; ``softmax_cast``: weights are cast to
    the type of the input; ``softmax_of_top_k``: over the chosen experts only; ``sigmoid``: with a
    load-balancing bias."""

    # --- Saved tensors and operators -----------------------------------------------------------------------

    has_sdpa: bool = True
    """Whether attention runs SDPA by default; not with capped scores or sinks."""
    has_softcapping: bool = False
    """Whether attention scores and logits are capped by tanh."""
    always_passes_mask: bool = False
    """Whether a mask is passed where SDPA's ``is_causal`` suffices (``allow_is_causal_skip=False``)."""
    expands_key_heads: bool = False
    """Whether attention expands keys and values to all query heads itself: repeated with
    ``new_decoder_architecture``, otherwise a single head that is broadcast."""
    concatenates_query: bool = False
    """Whether the rotated and the other part of the query are joined by ``cat``, with heads outermost."""
    values_are_views: bool = False
    """Whether values are a view of the fused projection's output, which is therefore kept whole."""
    scales_before_cast: bool = False
    """Whether RMSNorm multiplies by its weight before casting back, and so saves fp32 tensors."""
    has_layernorm_1p: bool = False
    """Whether LayerNorm adds 1 to its weight; it casts its input itself under CUDA's autocast only."""
    has_dropout_modules: bool = False
    """Whether dropout modules follow attention and the feed-forward."""
    has_embedding_dropout: bool = False
    """Whether a dropout module follows the embedding."""
    is_zero3_leaf: bool = False
    """Whether ZeRO-3 all-gathers the module of all experts at once (``DEFAULT_LEAF_MODULE_CLASSES``)."""
    registers_router_last: bool = False
    """Whether the router's parameters are registered after the experts'."""
    has_own_embedding_class: bool = False
    """Whether its embedding has a forward of its own, which AutoTP does not replace by a vocabulary-parallel
    one: a tied weight stays unsharded. Set for families tested with AutoTP."""

    @property
    def is_post_norm(self) -> bool:
        """Return whether norms follow attention and MLP, which read the unnormalized residual stream."""
        return not self.norm_placement[0]

    @property
    def casts_router_weights(self) -> bool:
        """Return whether the router returns its weights in the type of its input."""
        return self.router in ("softmax_cast", "softmax_of_top_k")
