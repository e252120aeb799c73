"""Training recipe: method, precision, optimizer, sequence length, batch sizes, recomputation, kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from shardscope.core.errors import (
    Value,
    check_choice,
    check_flag,
    check_integer,
    check_number,
    convert_numpy_number,
    refuse,
)
from shardscope.core.fixes import suggest_complete_fixes
from shardscope.core.serialization import Serializable

Method = Literal["full", "lora", "qlora"]
Quantization = Literal["int8", "nf4"]
Precision = Literal["bf16-mixed", "fp16-mixed", "fp8-mixed", "bf16", "fp32"]
Optimizer = Literal[
    "adamw",
    "adamw_foreach",
    "adamw_8bit",
    "paged_adamw",
    "paged_adamw_8bit",
    "adafactor",
    "sgd",
    "lion",
    "muon",
]
Recompute = Literal["none", "selective", "full", "offload"]
Kernels = Literal["transformers", "liger", "megatron", "compiled"]
Attention = Literal["eager", "sdpa", "flash"]
Loss = Literal["full", "chunked", "fused"]
DEFAULT_LORA_RANK = 16
CHOICES: dict[str, tuple[str, ...]] = {
    "method": get_args(Method),
    "precision": get_args(Precision),
    "optimizer": get_args(Optimizer),
    "recompute": get_args(Recompute),
}
"""Fields that always have a value -> allowed values."""
OPEN_CHOICES: dict[str, tuple[str, ...]] = {
    "quantization": get_args(Quantization),
    "kernels": get_args(Kernels),
    "attention": get_args(Attention),
    "loss": get_args(Loss),
}
"""Fields that may be None (the framework's default) -> other allowed values."""
UNSET_ADAPTER_FIELDS: dict[str, object] = {
    "lora_rank": None,
    "lora_targets": None,
    "lora_dropout": 0.0,
    "lora_alpha": None,
    "use_rslora": False,
    "use_dora": False,
}
"""Fields of adapters -> value without adapters."""


@suggest_complete_fixes
@dataclass(frozen=True, kw_only=True)
class Recipe(Serializable):
    """The training recipe. Every field is optional.

    Raises ``ValueError`` with the field, its value, what is allowed and the nearest fix. Whether the
    framework supports the values is checked by ``Plan``.
    """

    seq_len: int = 4096
    """Tokens in one sequence, 1 to 16,777,216."""
    micro_batch_size: int = 1
    """Sequences in one forward and backward pass of one rank, 1 to 65,536."""
    global_batch_size: int = 64
    """Sequences in one optimizer step, over all ranks, 1 to 16,777,216."""
    method: Method = "full"
    """``full`` trains all weights. ``lora`` trains low-rank adapters on a frozen base (Hu et al. 2021). Mixed
    precision stores the base in 16 bits, because frozen weights need no fp32 master weights. ``qlora`` is
    ``lora`` with the base in NF4 with double quantization (Dettmers et al. 2023, section 3)."""
    precision: Precision = "bf16-mixed"
    """``bf16-mixed`` and ``fp16-mixed`` keep fp32 master weights of trainable parameters. ``fp8-mixed`` is
    ``bf16-mixed`` with large matmuls in fp8 (Micikevicius et al. 2022): torchao's with FSDP2, Transformer
    Engine's with Megatron (modeled from its source, never run here). ``bf16`` and ``fp32`` keep one copy in
    that type."""
    optimizer: Optimizer = "adamw"
    """``adamw`` has two moments per weight (Loshchilov & Hutter 2019) and one fused kernel; ``adamw_foreach``
    uses torch's multi-tensor operators instead. ``adamw_8bit`` stores the moments block-wise in 8 bits
    (Dettmers et al. 2022), ``paged_...`` in memory that can be paged to the host. ``adafactor`` stores a row
    and a column per matrix (Shazeer & Stern 2018), ``sgd`` and ``lion`` (Chen et al. 2023) one momentum.
    ``muon`` has one momentum for hidden matrices and AdamW for the rest (Jordan et al. 2024)."""
    recompute: Recompute = "none"
    """Activations recomputed in backward: ``none``, ``selective`` (all but matmuls and attention) or ``full``
    (whole layers). ``offload`` saves all of them in host memory."""
    recompute_interval: int = 1
    """Recompute or offload every n-th layer, 1 to 4,096; the others save their activations."""
    kernels: Kernels | None = None
    """Implementation of the modules: ``transformers``, the same with Liger kernels, the same compiled, or
    ``megatron``; None: the framework's default."""
    attention: Attention | None = None
    """Attention implementation: unfused operators (``eager``), PyTorch's fused one (``sdpa``) or the
    FlashAttention package (``flash``); None: the default of the kernels."""
    loss: Loss | None = None
    """Logits of all tokens at once (``full``), of one chunk at a time (``chunked``), or only inside a kernel
    that also computes their gradient (``fused``); None: the default of the kernels."""
    dropout: float = 0.0
    """Probability of all dropouts of the model family, 0 to 0.99."""
    packing: bool = False
    """Several documents in one sequence, separated in attention, instead of padding: by FlashAttention's
    offsets, or by a mask for SDPA, which takes micro_batch_size x seq_len x seq_len numbers."""
    quantization: Quantization | None = None
    """Quantization of the frozen base of adapters: LLM.int8 (Dettmers et al. 2022) or NF4; None: not
    quantized, or NF4 with ``method="qlora"``."""
    lora_rank: int | None = None
    """Rank of the adapters, 1 to 4,096; None: 16. Only with adapters."""
    lora_targets: tuple[str, ...] | None = None
    """Module names of projections with an adapter; None: all attention projections, and without formulas all
    Linears of the layers. Only with adapters."""
    lora_dropout: float = 0.0
    """Dropout probability of adapter inputs, 0 to 0.99. Only with adapters."""
    lora_alpha: float | None = None
    """Updates are scaled by alpha / rank, up to 1e6; None: twice the rank. Only with adapters."""
    use_rslora: bool = False
    """Scale updates by alpha / sqrt(rank), so that high ranks learn too (Kalajdzievski 2023,
    arXiv:2312.03732). Only with adapters."""
    use_dora: bool = False
    """Train the magnitudes of the adapted matrices' rows, and their directions by adapters (Liu et al. 2024,
    arXiv:2402.09353). Only with adapters over an unquantized base."""
    expert_imbalance: float = 1.0
    """Tokens of the most loaded rank's experts divided by an even share, 1 (balanced) to 1,024."""
    expert_capacity_factor: float | None = None
    """Capacity of an expert divided by an even share of tokens, 0.1 to 1,024. Tokens beyond it are dropped
    (Fedus et al. 2021). None: dropless."""

    def __post_init__(self) -> None:
        # Each field alone first: the error then names one field, not a combination.
        for field, high in (
            ("seq_len", 2**24),
            ("micro_batch_size", 2**16),
            ("global_batch_size", 2**24),
            ("recompute_interval", 4096),
        ):
            self._check_number(field, high)
        for field, choices in CHOICES.items():
            check_choice(f"Recipe.{field}", getattr(self, field), choices)
        for field, choices in OPEN_CHOICES.items():
            check_choice(f"Recipe.{field}", getattr(self, field), (None, *choices))
        check_flag("Recipe.packing", self.packing)
        check_flag("Recipe.use_rslora", self.use_rslora)
        check_flag("Recipe.use_dora", self.use_dora)
        self._check_real("dropout", 0, 0.99)
        self._check_real("lora_dropout", 0, 0.99)
        self._check_real("expert_imbalance", 1, 1024)
        self._check_real("expert_capacity_factor", 0.1, 1024)
        if self.micro_batch_size > self.global_batch_size:
            refuse(
                "Recipe.global_batch_size",
                self.global_batch_size,
                f"at least micro_batch_size={self.micro_batch_size}",
                {"micro_batch_size": self.global_batch_size},  # which trains the same
                f"{self.global_batch_size:,} is less than one micro-batch of {self.micro_batch_size:,}",
            )
        self._check_recompute()
        self._check_adapters()
        self._check_quantization()

    def _check_number(self, field: str, high: int) -> None:
        default = getattr(type(self), field)
        number = check_integer(f"Recipe.{field}", getattr(self, field), low=1, high=high, default=default)
        # Numpy integers become Python ints, which JSON can encode and which cannot overflow.
        object.__setattr__(self, field, number)

    def _check_real(self, field: str, low: float, high: float) -> None:
        value = getattr(self, field)
        if value is None and field == "expert_capacity_factor":
            return
        default = getattr(type(self), field)
        number = check_number(
            f"Recipe.{field}", convert_numpy_number(value), low=low, high=high, default=default
        )
        object.__setattr__(self, field, number)

    def _check_recompute(self) -> None:
        if self.recompute == "none" and self.recompute_interval > 1:
            refuse(
                "Recipe.recompute_interval",
                self.recompute_interval,
                '1 unless recompute is "selective", "full" or "offload"; "none" recomputes no layer',
                {"recompute_interval": 1},
            )

    def _check_adapters(self) -> None:
        if not self.has_adapters:
            for field, unset in UNSET_ADAPTER_FIELDS.items():
                if getattr(self, field) != unset:
                    refuse(
                        f"Recipe.{field}",
                        getattr(self, field),
                        f'{unset} unless method="lora" or "qlora"',
                        {"method": "lora"},
                    )
            return
        if self.lora_rank is not None:
            self._check_number("lora_rank", 4096)
        if self.lora_alpha is not None:
            self._check_real("lora_alpha", 1e-3, 1e6)
        # None means all attention projections, which depend on the architecture (``prediction/support.py``
        # checks named ones).
        if self.lora_targets is None:
            return
        if isinstance(self.lora_targets, str) or not isinstance(self.lora_targets, tuple | list):
            refuse("Recipe.lora_targets", self.lora_targets, "a tuple of names", Value(("q_proj", "v_proj")))
        if not self.lora_targets:
            refuse("Recipe.lora_targets", self.lora_targets, "at least one name", Value(None))
        # Names without dots: peft matches them as the last part of module names (LoraConfig.target_modules).
        for target in self.lora_targets:
            if not isinstance(target, str) or not target.isidentifier():
                refuse("Recipe.lora_targets", target, "names of projections", Value("q_proj"))
        # JSON decodes to lists; equality after a round trip needs one type.
        object.__setattr__(self, "lora_targets", tuple(dict.fromkeys(self.lora_targets)))

    def _check_quantization(self) -> None:
        """Raise ``ValueError`` for quantization without adapters or with an unsupported combination."""
        if self.quantization and not self.has_adapters:
            refuse(
                "Recipe.quantization",
                self.quantization,
                'None unless method="lora" or "qlora": weights that train are not quantized',
                {"quantization": None},
            )
        if self.method == "qlora" and self.quantization == "int8":
            refuse("Recipe.quantization", "int8", '"nf4" or None with method="qlora"', {"quantization": None})
        if self.use_dora and self.base_quantization:
            refuse(
                "Recipe.use_dora",
                True,
                "False over a quantized base, of which peft's DoRA dequantizes a copy in each forward",
                {"use_dora": False},
            )
        if self.has_adapters and self.precision == "fp8-mixed":
            refuse(
                "Recipe.precision",
                "fp8-mixed",
                '"bf16-mixed", "fp16-mixed", "bf16" or "fp32" with adapters: neither torchao nor Transformer '
                "Engine runs peft's adapters in fp8",
                {"precision": "bf16-mixed"},
            )

    @property
    def has_adapters(self) -> bool:
        """Return whether the method trains low-rank adapters on a frozen base."""
        return self.method in ("lora", "qlora")

    @property
    def base_quantization(self) -> Quantization | None:
        """Effective quantization of the frozen base; None if it is not quantized."""
        return "nf4" if self.method == "qlora" else self.quantization

    @property
    def adapter_rank(self) -> int:
        """Effective rank of the adapters: ``lora_rank``, or the default."""
        return self.lora_rank or DEFAULT_LORA_RANK

    @property
    def adapter_alpha(self) -> float:
        """Effective alpha of the adapters: ``lora_alpha``, or twice the rank."""
        return 2 * self.adapter_rank if self.lora_alpha is None else self.lora_alpha
