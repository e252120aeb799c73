"""Optional parts of a layer: routed experts and multi-head latent attention."""

from __future__ import annotations

from dataclasses import dataclass

from shardscope.core.errors import Value, check_integer, refuse
from shardscope.core.serialization import Serializable
from shardscope.core.size_limits import LIMITS, check_size, check_size_field


@dataclass(frozen=True, kw_only=True)
class MixtureOfExperts(Serializable):
    """The routed experts of MoE layers. Raises ``ValueError`` for bad values."""

    num_experts: int
    """Routed experts in each MoE layer."""
    num_experts_per_tok: int
    """Routed experts that each token is sent to (top-k)."""
    moe_intermediate_size: int
    """Inner width of one routed expert."""
    shared_expert_intermediate_size: int = 0
    """Inner width of all shared experts together; 0: none."""
    first_k_dense_replace: int = 0
    """Number of first layers with a dense MLP (DeepSeek)."""
    decoder_sparse_step: int = 1
    """Every n-th layer is an MoE layer (Qwen)."""
    mlp_only_layers: tuple[int, ...] = ()
    """Indices of layers with a dense MLP (Qwen)."""

    def __post_init__(self) -> None:
        experts = check_size_field("MixtureOfExperts", self, "num_experts")
        check_integer("MixtureOfExperts.num_experts_per_tok", self.num_experts_per_tok, low=1, high=experts)
        check_size_field("MixtureOfExperts", self, "moe_intermediate_size")
        for field, low, high in (
            ("shared_expert_intermediate_size", 0, LIMITS["intermediate_size"][1]),
            ("first_k_dense_replace", 0, LIMITS["num_hidden_layers"][1]),
            ("decoder_sparse_step", 1, LIMITS["num_hidden_layers"][1]),
        ):
            check_integer(f"MixtureOfExperts.{field}", getattr(self, field), low=low, high=high)
        if not isinstance(self.mlp_only_layers, tuple | list):
            refuse("MixtureOfExperts.mlp_only_layers", self.mlp_only_layers, "layer indices", Value(()))
        last = LIMITS["num_hidden_layers"][1]
        layers = (
            check_integer("MixtureOfExperts.mlp_only_layers", layer, low=0, high=last)
            for layer in self.mlp_only_layers
        )
        object.__setattr__(self, "mlp_only_layers", tuple(layers))  # JSON has lists, hashing needs tuples


@dataclass(frozen=True, kw_only=True)
class LatentAttention(Serializable):
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434). Raises ``ValueError`` for bad values."""

    q_lora_rank: int | None
    """Width of the compressed query; None: queries are not compressed."""
    kv_lora_rank: int
    """Width of the compressed key and value, the only content of a KV cache."""
    qk_nope_head_dim: int
    """Width of a head's query and key without rotary position."""
    qk_rope_head_dim: int
    """Width of a head's rotary query and key; the key is shared by all heads."""
    v_head_dim: int
    """Width of a head's value."""

    def __post_init__(self) -> None:
        if self.q_lora_rank is not None:
            check_size("LatentAttention.q_lora_rank", self.q_lora_rank, "lora_rank")
        check_size("LatentAttention.kv_lora_rank", self.kv_lora_rank, "lora_rank")
        for field in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
            check_size(f"LatentAttention.{field}", getattr(self, field), "head_dim")

    @property
    def qk_head_dim(self) -> int:
        """Width of a head's query and key, with and without rotary position together."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim
