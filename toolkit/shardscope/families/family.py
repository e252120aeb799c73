"""One record per model family: all that is true of a family and not of every decoder.

The records stand beside the adapters that read their config.json (``llama.py``, ``qwen.py``, ...), and
:func:`shardscope.families.registry.family_of` returns an architecture's. A field that a record does not set
says what most families do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

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
    "attention_choice",
    "dropout",
]
"""What is trained, rehearsed or predicted in some families only.

- ``pipeline_stages``: the model is ``model.embed_tokens``, ``model.layers``, ``model.norm`` and ``lm_head``,
  and takes hidden states in the embedding's place.
- ``fsdp2_tensor_parallel``: DTensor shards its projections, which are matrices of their own: a cut of a fused
  one would go across its parts.
- ``fsdp2_context_parallel``: attention is transformers' SDPA and positions are arguments, so that
  torch's ring can split sequences.
- ``autotp_rehearsal``: DeepSpeed's AutoTP shards it by transformers' own plan; it refuses plans with experts
  and with fused projections (Phi-3), and GPT-2 has none.
- ``autotp_training``: AutoTP's training was compared with that of one process.
- ``deepspeed_moe``: DeepSpeed's MoE layer routes as the family's does.
- ``megatron_weights``: weights go into megatron-core's ``GPTModel`` and come back.
- ``megatron_script``: the training script that is exported for Megatron-core trains it.
- ``liger_kernels``: ``apply_liger_kernel_to_...`` replaces every norm and the whole MLP, and no more.
- ``compiled_layers``: what its compiled layers save was counted (RMSNorm, a gated MLP, SDPA).
- ``attention_choice``: ``Recipe.attention`` may differ from the family's own implementation, and is counted.
- ``dropout``: the memory model has its masks: GPT-2's everywhere, the others' in attention alone.
"""

LLAMA_SUPPORT: frozenset[Support] = frozenset({
    "pipeline_stages", "fsdp2_tensor_parallel", "fsdp2_context_parallel", "autotp_rehearsal",
    "autotp_training", "megatron_weights", "megatron_script", "liger_kernels", "compiled_layers",
    "attention_choice", "dropout",
})  # fmt: skip
"""Support of Llama and of the dense families with the same layers."""


class Names(NamedTuple):
    """The names of one family's modules; inside a layer, relative to the layer."""

    layers: str = "model.layers"
    embedding: str = "model.embed_tokens"
    final_norm: str = "model.norm"
    attention: str = "self_attn"
    fused_qkv: str | None = None
    """One projection for query, key and value; None: one each."""
    output: str = "o_proj"
    fused_gate_up: str | None = None
    """One projection for gate and up; None: one each."""
    up: str = "up_proj"
    down: str = "down_proj"
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    """The norms of hidden_size as a layer registers them; a layer of fewer has the first ones."""
    parallel_norms: tuple[str, str] | None = None
    """The two norms of a layer whose halves stand side by side; None: as ``norms``."""
    query_key_norms: tuple[str, str] = ("q_norm", "k_norm")
    router: str = "mlp.gate"
    shared_experts: str = "mlp.shared_experts"


class FileNames(NamedTuple):
    """Where the names in checkpoints on the hub differ from those in memory."""

    experts_are_stacked: bool = False
    """Whether files, too, have all experts of a layer in one tensor."""
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    renamed: tuple[str, str] | None = None
    """A part of names in memory, and what stands for it in files."""


DEFAULT_NAMES = Names()
DEFAULT_FILE_NAMES = FileNames()


@dataclass(frozen=True, kw_only=True, eq=False)
class Family:
    """The record of one ``model_type``."""

    model_type: str
    """Hugging Face's name of the family."""
    read: Callable[[HfConfig], Fields]
    """Make an ``Architecture``'s fields of a config.json."""
    supports: frozenset[Support] = frozenset()
    """What is trained, rehearsed or predicted of it beyond what all families share."""

    # --- config.json ---------------------------------------------------------------------------------------

    activation: Literal["silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu2"] = "silu"
    """The default of ``hidden_act``, by transformers' names. ``gelu_new`` is no kernel, but
    0.5 x (1 + tanh(...)), operator by operator."""
    activation_key: str = "hidden_act"
    """The key of the activation in config.json."""
    normalizes_top_k: bool = False
    """The weights of the chosen experts sum to 1 where ``norm_topk_prob`` is missing."""
    longrope_aliases: tuple[str, ...] = ()
    """What its configs called ``longrope`` once; transformers still reads them so."""
    model_type_with_layer_types: str | None = None
    """The ``model_type`` as which transformers reads a config.json with ``layer_types``; None: its own."""
    config_values: Callable[[Architecture], Mapping[str, Any]] | None = None
    """Make keyword arguments of its transformers config that no other family's has."""

    # --- What its architectures can be ---------------------------------------------------------------------

    norms_per_layer: tuple[int, ...] = (2,)
    parallel_residual: tuple[bool, ...] = (False,)
    """Whether attention and MLP may, or must, stand side by side."""
    position_embeddings: tuple[str, ...] = ("rope", "learned")
    may_have_experts: bool = True
    has_grouped_queries: bool = True
    heads_fill_width: bool = False
    """Fused projections leave head_dim no choice: the heads' widths sum to hidden_size."""
    has_new_decoder_architecture: bool = False
    """config.json has Falcon's ``new_decoder_architecture``."""
    check: Callable[[Architecture], None] | None = None
    """Raise ``ValueError`` for combinations of fields that its modules cannot have."""
    unlike_megatron_core: str | None = None
    """What megatron-core 0.16's GPT layers lack of its layers, or no formula counts there; None: nothing."""

    # --- Modules and parameters ----------------------------------------------------------------------------

    names: Names = DEFAULT_NAMES
    file_names: FileNames = DEFAULT_FILE_NAMES
    projections: Literal["linear", "conv1d", "matmul"] = "linear"
    """The modules of projections: ``torch.nn.Linear``; transformers' ``Conv1D``, stored (in, out) and always
    with a bias; or a product with the transposed weight and an addition, written out."""
    norm_placement: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]] = ((0,), (1, 2), (3,))
    """Places of the registered norms before attention, between it and the feed-forward, and behind."""
    qk_norm_over_all_heads: bool = False
    """One norm for all query heads together, and one for all key heads, instead of one for each head."""
    has_head_bias: bool = False
    """``lm_head`` has a bias, even where its matrix is the embedding's."""
    has_attention_sinks: bool = False
    """A learned logit for each head takes part in the softmax."""
    has_clamped_experts: bool = False
    """Experts have biases, clamp gate and up, and are stored as the products read them: (in, out)."""
    has_shared_expert_gate: bool = False
    """A sigmoid of one number for each token weighs the shared expert."""
    has_group_limited_routing: bool = False
    """By default the router first chooses groups of experts (``n_group``)."""
    has_expert_intermediate_size: bool = True
    """config.json has a width of experts apart from ``intermediate_size``."""
    has_multi_token_prediction: bool = False
    """Files hold one layer more, which predicts a second token and which transformers does not build."""
    router: Literal["softmax", "softmax_upcast", "softmax_cast", "softmax_of_top_k", "sigmoid"] = "softmax"
    """How scores become weights. ``softmax``: in fp32 over all, then normalised over the chosen;
    ``softmax_upcast``: hidden states and scores are fp32; ``softmax_cast``: the weights are cast to the type
    of the input; ``softmax_of_top_k``: over the chosen alone; ``sigmoid``: with a bias to even the load."""

    # --- What its modules save and compute -----------------------------------------------------------------

    has_sdpa: bool = True
    """Attention runs SDPA unless chosen otherwise: not where it caps scores or adds sinks."""
    has_softcapping: bool = False
    """A tanh bounds attention scores and logits."""
    always_passes_mask: bool = False
    """A mask is made even where SDPA's ``is_causal`` would do (``allow_is_causal_skip=False``)."""
    expands_key_heads: bool = False
    """Attention itself brings keys and values to all query heads: repeated with ``new_decoder_architecture``,
    else a lone head that is broadcast."""
    concatenates_query: bool = False
    """Rotated and other numbers of the query are put together by ``cat``, which lays it by heads."""
    values_are_views: bool = False
    """Values are a view of the fused projection's output, which so stays whole."""
    scales_before_cast: bool = False
    """RMSNorm multiplies with its weight before it casts back, and so keeps fp32 numbers."""
    has_layernorm_1p: bool = False
    """LayerNorm adds 1 to its weight, and casts its input itself under CUDA's autocast only."""
    has_dropout_modules: bool = False
    """A dropout module behind attention and another behind the feed-forward."""
    is_zero3_leaf: bool = False
    """ZeRO-3 gathers its experts' module as one (``DEFAULT_LEAF_MODULE_CLASSES``)."""
    registers_router_last: bool = False
    """The router's parameters come behind the experts' in the module."""
    has_own_embedding_class: bool = False
    """Its embedding has a forward of its own, which no vocabulary-parallel embedding of AutoTP's replaces: a
    tied one stays whole. Set where AutoTP was tried."""

    @property
    def is_post_norm(self) -> bool:
        """Whether attention and MLP read the residual stream itself, and are normalised behind."""
        return not self.norm_placement[0]

    @property
    def casts_router_weights(self) -> bool:
        """Whether the router hands out its weights in the type of its input."""
        return self.router in ("softmax_cast", "softmax_of_top_k")
