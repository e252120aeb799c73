"""The words of the lists in this folder: one saved tensor, and what decides whether it is saved."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

from shardscope.core.precision import FP32
from shardscope.families.parameter_names import attention_inputs, mlp_inputs

if TYPE_CHECKING:
    from shardscope.core.architecture import Architecture

Operator = Literal["norms", "attention", "mlp", "experts"]
Cut = Literal["tp", "key_value_heads", "sequence", "expert_tokens", "whole"]


INT64 = 8
"""Bytes of an index."""


class Saved(NamedTuple):
    """One tensor (or several alike) that forward keeps for backward."""

    operator: Operator
    bytes_per_token: int
    cut_by: Cut
    """``tp``: always divided by it; ``key_value_heads``: by it, but not below one such head;
    ``sequence``: only with sequence parallelism; ``expert_tokens``: where each rank of tp has experts of its
    own; ``whole``: never."""


class Modules(NamedTuple):
    """Whose modules run and in which types: all beside the architecture that changes what they save."""

    kernels: str
    """``Recipe.kernels``, or what the layout runs by itself."""
    autocast: bool
    """Trained weights stay fp32 and each matrix product casts its own input (torch.autocast)."""
    compute: int
    """Bytes of a number in matrix products."""
    seq_len: int
    """Keys that a query meets, where a tensor has one number for each."""
    targets: tuple[str, ...] | None = None
    """Adapted projections; None in full training."""
    adapter_rank: int = 0
    adapter_dropout: bool = False
    """Adapters have dropout before them, so that each keeps an input of its own."""
    windowed: bool | None = None
    """Whether this is a layer with a sliding window, in a model that has both kinds; None: as most are."""
    on_gpu: bool = True
    """On CPU ranks some kernels save other tensors than on a GPU."""
    dropout: float = 0.0
    """Probability of dropout, which leaves masks."""
    attention: str | None = None
    """``Recipe.attention``: None is what the modules use by themselves."""
    fused_attention: str = "flash"
    """The best fused kernel that SDPA has on this card in this type: ``flash``; ``efficient``, which takes no
    grouped queries; or ``none``. In fp32 there is never more than ``efficient``."""
    broadcasts_views: bool = False
    """A lone key head meets one sequence at a time: expanded to all heads it is a view of itself."""
    expert_load: float = 1.0
    """Tokens of the fullest rank's experts over an even share."""

    quantized: bool = False
    """The frozen base is in NF4 or int8, and its products come out in their input's type (bitsandbytes)."""
    int8_base: bool = False
    """It is in int8: its products keep their inputs though their weights are frozen (``MatMul8bitLt``), and
    adapters on them are in fp32 and so cast these inputs (peft, ``lora/bnb.py``)."""
    eight_bit_inputs: bool = False
    """Products keep their inputs in copies of 8 bits (Transformer Engine's fp8)."""
    upcasts_norms: bool = False
    """Norms read and put out fp32: CUDA's autocast has ``layer_norm`` in its fp32 list, a CPU's has not."""
    joins_by_heads: bool = False
    """Attention's output is put together from parts of a sequence, laid by heads (torch's ring)."""
    keeps_frozen_inputs: bool = False
    """Frozen projections keep their inputs too (DeepSpeed's own ``linear`` of ZeRO-3)."""

    @property
    def trained(self) -> bool:
        """Whether the model's own weights get gradients."""
        return self.targets is None

    @property
    def stream(self) -> int:
        """Bytes of a number in the residual stream: fp32 under autocast, but over a base frozen in half.

        Products over a base in few bits give back the type that they are given (bitsandbytes): what norms
        have upcast stays in fp32.
        """
        wide = self.trained or (self.quantized and self.upcasts_norms)
        return FP32 if self.autocast and wide else self.compute

    @property
    def normed(self) -> int:
        """Bytes of a number that a norm puts out."""
        return FP32 if self.upcasts_norms else self.stream

    @property
    def recasts(self) -> bool:
        """peft casts an adapter's input to the adapter's fp32, and autocast casts it back.

        Over bitsandbytes' Linears it leaves that to autocast, of which it asks for CUDA's
        (``tuners/lora/bnb.py``).
        """
        return self.autocast and not self.trained and not (self.quantized and self.on_gpu)

    def feeds(self, projection: str) -> bool:
        """Whether a projection keeps its input: its own weight is trained, or an adapter's."""
        if self.targets is None or self.keeps_frozen_inputs or projection in self.targets:
            return True
        return self.int8_base and projection != "router"

    def stream_copies(self, *projections: str) -> int:
        """Copies of one norm's output that the projections reading it keep between them.

        Autocast casts what is in fp32 anew for each of them: the stream of a trained model, what peft casts
        for an adapter.
        """
        feeding = sum(self.feeds(projection) for projection in projections)
        return feeding if self.normed > self.compute or self.recasts else min(1, feeding)

    def inner_copies(self, projection: str, already_saved: bool = False) -> int:
        """Copies of an input that is in the compute type already, beside what another operator saved."""
        if not self.feeds(projection):
            return 0
        return 1 if self.recasts or not already_saved else 0


def stream_readers(arch: Architecture) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The projections that read the attention's norm and the dense MLP's norm."""
    return attention_inputs(arch), mlp_inputs(arch)
