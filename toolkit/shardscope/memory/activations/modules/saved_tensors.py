"""Types of the lists in this folder: one saved tensor, and the options that decide whether it is saved."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

from shardscope.core.precision import FP32
from shardscope.families.parameter_names import list_attention_inputs, list_mlp_inputs

if TYPE_CHECKING:
    from shardscope.core.architecture import Architecture

Operator = Literal["norms", "attention", "mlp", "experts"]
Sharding = Literal["tp", "key_value_heads", "sequence", "expert_tokens", "whole"]


INT64 = 8
"""Bytes of an index."""


class SavedTensor(NamedTuple):
    """One tensor (or several of one kind) saved by forward for backward."""

    operator: Operator
    bytes_per_token: int
    cut_by: Sharding
    """Sharding. ``tp``: always; ``key_value_heads``: by tp, but at least one such head per rank;
    ``sequence``: only with sequence parallelism; ``expert_tokens``: if each tensor-parallel rank has its own
    experts; ``whole``: never."""


class Modules(NamedTuple):
    """The modules that run and their dtypes: all options that affect saved tensors."""

    kernels: str
    """``Recipe.kernels``, or the layout's default."""
    autocast: bool
    """Trained weights stay fp32 and each matmul casts its own inputs (torch.autocast)."""
    compute: int
    """Bytes per element in matmuls."""
    seq_len: int
    """Number of keys per query, for tensors with one element per key."""
    targets: tuple[str, ...] | None = None
    """Adapted projections; None in full training."""
    adapter_rank: int = 0
    adapter_dropout: bool = False
    """Dropout before adapters, so that each saves its own input."""
    uses_dora: bool = False
    """Adapters are DoRA's (``modules/dora.py``)."""
    windowed: bool | None = None
    """Whether this layer has a sliding window, in a model with both kinds; None: yes if any layer has one."""
    on_gpu: bool = True
    """Whether ranks run on GPUs: on CPU ranks some kernels save different tensors."""
    dropout: float = 0.0
    """Dropout probability; above 0, masks are saved."""
    attention: str | None = None
    """``Recipe.attention``; None: the modules' default."""
    fused_attention: str = "flash"
    """The best fused kernel of SDPA for this GPU and dtype: ``flash``; ``efficient``, without grouped
    queries; or ``none``. In fp32 it is at most ``efficient``."""
    broadcasts_views: bool = False
    """A single key head with one sequence per micro-batch: expanded to all heads, it stays a view."""
    expert_load: float = 1.0
    """Tokens of the most loaded rank's experts, relative to an even share."""

    quantized: bool = False
    """The frozen base is NF4 or int8, and its matmuls return their input's dtype (bitsandbytes)."""
    int8_base: bool = False
    """The base is int8: its matmuls save their inputs though their weights are frozen (``MatMul8bitLt``), and
    its adapters are fp32 and so cast these inputs (peft, ``lora/bnb.py``)."""
    eight_bit_inputs: bool = False
    """Matmuls save 8-bit copies of their inputs (Transformer Engine's fp8)."""
    upcasts_norms: bool = False
    """Norms read and return fp32: ``layer_norm`` is in the fp32 list of CUDA's autocast, but not of the
    CPU's."""
    joins_by_heads: bool = False
    """Attention's output is concatenated from sequence chunks in head-major layout (torch's ring
    attention)."""
    keeps_frozen_inputs: bool = False
    """Frozen projections save their inputs too (DeepSpeed's own ``linear`` in ZeRO-3)."""
    masks_documents: bool = False
    """SDPA gets an additive mask that separates packed documents: one tensor, which all layers share."""

    def with_window(self, windowed: bool | None) -> Modules:
        """Return these modules in a layer with or without a sliding window."""
        return self if windowed is self.windowed else self._replace(windowed=windowed)

    @property
    def trained(self) -> bool:
        """Return whether the model's own weights get gradients."""
        return self.targets is None

    @property
    def stream(self) -> int:
        """Bytes per element in the residual stream: fp32 under autocast, but half over a frozen half base.

        Matmuls of a quantized base return their input's dtype (bitsandbytes), so the output of upcasting
        norms stays fp32.
        """
        # Autocast's matmuls return half precision, but the fp32 embedding and residual sums keep fp32.
        wide = self.trained or (self.quantized and self.upcasts_norms)
        return FP32 if self.autocast and wide else self.compute

    @property
    def normed(self) -> int:
        """Bytes per element of a norm's output."""
        return FP32 if self.upcasts_norms else self.stream

    @property
    def recasts(self) -> bool:
        """Return whether peft casts an adapter's input to the adapter's fp32, and autocast casts it back.

        Over bitsandbytes' Linears, peft leaves the cast to autocast, but only to CUDA's
        (``tuners/lora/bnb.py``).
        """
        return self.autocast and not self.trained and not (self.quantized and self.on_gpu)

    def saves_input(self, projection: str) -> bool:
        """Return whether a projection saves its input.

        It does if its own or its adapter's weight is trained, if frozen inputs are kept, or over an int8
        base.
        """
        if self.targets is None or self.keeps_frozen_inputs or projection in self.targets:
            return True
        # transformers' routers are parameters, not Linears, which bitsandbytes would replace.
        return self.int8_base and projection != "router"

    def stream_copies(self, *projections: str) -> int:
        """Return the number of saved copies of one norm's output over the projections that read it.

        Autocast casts fp32 inputs again for each projection: the stream of a trained model, and inputs that
        peft casts for an adapter.
        """
        # Without a cast autograd saves the same tensor for each projection: one storage.
        num_readers = sum(self.saves_input(projection) for projection in projections)
        return num_readers if self.normed > self.compute or self.recasts else min(1, num_readers)

    def inner_copies(self, projection: str, already_saved: bool = False) -> int:
        """Return the saved copies of an input in the compute dtype, besides what another operator saved."""
        if not self.saves_input(projection):
            return 0
        return 1 if self.recasts or not already_saved else 0


def list_stream_readers(arch: Architecture) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the projections that read attention's norm, and those that read the dense MLP's norm."""
    return list_attention_inputs(arch), list_mlp_inputs(arch)
