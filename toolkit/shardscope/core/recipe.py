"""What to train: method, precision, optimizer, sequence length, batches, recomputation, kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from shardscope.core.errors import Value, flag, one_of, real_number, refuse, whole_number
from shardscope.core.fixes import checked
from shardscope.core.serialization import JsonNoun

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
"""Fields that always have a value, and which values."""
OPEN_CHOICES: dict[str, tuple[str, ...]] = {
    "quantization": get_args(Quantization),
    "kernels": get_args(Kernels),
    "attention": get_args(Attention),
    "loss": get_args(Loss),
}
"""Fields that may stay open (None)."""


@checked
@dataclass(frozen=True, kw_only=True)
class Recipe(JsonNoun):
    """What to train. Every field is optional.

    Raises ``ValueError`` naming the field, its value, what is allowed and the nearest fix. What a framework
    cannot run of it is refused when the ``Plan`` is made.
    """

    seq_len: int = 4096
    """Tokens in one sequence, 1 to 16,777,216."""
    micro_batch_size: int = 1
    """Sequences that one rank takes through forward and backward at once, 1 to 65,536."""
    global_batch_size: int = 64
    """Sequences in one optimizer step over all ranks, 1 to 16,777,216."""
    method: Method = "full"
    """``full`` trains every weight; ``lora`` trains low-rank adapters over a frozen base (Hu et al. 2021),
    which mixed precision holds in its half type, for what never updates needs no fp32 original; ``qlora`` is
    the same over a base in NF4 with double quantisation (Dettmers et al. 2023, section 3)."""
    precision: Precision = "bf16-mixed"
    """``bf16-mixed``/``fp16-mixed`` keep fp32 originals of what trains; ``fp8-mixed`` is ``bf16-mixed`` whose
    large products run in 8 bits (Micikevicius et al. 2022): torchao's with FSDP2, with Megatron Transformer
    Engine's, which was read from its source and never run here; ``bf16`` and ``fp32`` keep one copy in that
    type."""
    optimizer: Optimizer = "adamw"
    """``adamw`` keeps two moments a weight (Loshchilov & Hutter 2019) and steps in one fused kernel,
    ``adamw_foreach`` in torch's multi-tensor operations; ``adamw_8bit`` keeps them in blocks of 8 bits
    (Dettmers et al. 2022), ``paged_...`` in memory that can go to the host; ``adafactor`` a row and a column
    (Shazeer & Stern 2018), ``sgd`` and ``lion`` (Chen et al. 2023) one momentum, ``muon`` one momentum for
    hidden matrices and AdamW for the rest (Jordan et al. 2024)."""
    recompute: Recompute = "none"
    """Activations recomputed in backward: none, all but matrix products and attention, or whole layers;
    ``offload`` keeps them all, in host memory."""
    recompute_interval: int = 1
    """Every so-manieth layer is recomputed or offloaded, 1 to 4,096; others keep their activations."""
    kernels: Kernels | None = None
    """Whose modules run: ``transformers``, the same with Liger kernels, the same compiled, or ``megatron``;
    ``None`` is what the framework uses."""
    attention: Attention | None = None
    """Attention in plain operations (``eager``), PyTorch's fused one (``sdpa``) or FlashAttention's own
    (``flash``); ``None`` is what the modules use by themselves."""
    loss: Loss | None = None
    """Whether logits of all tokens exist at once (``full``), of a chunk at a time (``chunked``), or never
    outside a kernel that makes their gradient at once (``fused``); ``None`` is what the kernels bring."""
    dropout: float = 0.0
    """Probability of every dropout that the model's family has, 0 to 0.99."""
    packing: bool = False
    """Several documents in one sequence, which attention keeps apart: no padding is trained on."""
    quantization: Quantization | None = None
    """Type of the frozen base under adapters: LLM.int8 (Dettmers et al. 2022) or NF4; None: unquantised, or
    NF4 with ``method="qlora"``."""
    lora_rank: int | None = None
    """Rank of the adapters, 1 to 4,096; ``None`` is 16. Only with adapters."""
    lora_targets: tuple[str, ...] | None = None
    """Projections that get an adapter, by the model's names; ``None``: all of attention's. Only with
    adapters."""
    lora_dropout: float = 0.0
    """Probability of dropout before an adapter, 0 to 0.99. Only with adapters."""
    expert_imbalance: float = 1.0
    """Tokens of the fullest rank's experts over an even share, 1 (even) to 1,024."""
    expert_capacity_factor: float | None = None
    """Room of an expert over an even share, beyond which tokens are dropped (Fedus et al. 2021), 0.1 to
    1,024; None: dropless."""

    def __post_init__(self) -> None:
        for field, high in (
            ("seq_len", 2**24),
            ("micro_batch_size", 2**16),
            ("global_batch_size", 2**24),
            ("recompute_interval", 4096),
        ):
            self._check_number(field, high)
        for field, choices in CHOICES.items():
            one_of(f"Recipe.{field}", getattr(self, field), choices)
        for field, choices in OPEN_CHOICES.items():
            if getattr(self, field) is not None:
                one_of(f"Recipe.{field}", getattr(self, field), choices)
        flag("Recipe.packing", self.packing)
        self._check_real("dropout", 0, 0.99)
        self._check_real("lora_dropout", 0, 0.99)
        self._check_real("expert_imbalance", 1, 1024)
        self._check_real("expert_capacity_factor", 0.1, 1024)
        if self.micro_batch_size > self.global_batch_size:
            refuse(
                "Recipe.global_batch_size",
                self.global_batch_size,
                f"at least micro_batch_size={self.micro_batch_size}",
                {"global_batch_size": self.micro_batch_size},
                f"{self.global_batch_size:,} is less than one micro-batch of {self.micro_batch_size:,}",
            )
        self._check_recompute()
        self._check_adapters()
        self._check_quantization()

    def _check_number(self, field: str, high: int) -> None:
        number = whole_number(f"Recipe.{field}", getattr(self, field), low=1, high=high)
        # A numpy integer becomes Python's, which JSON can write and which cannot overflow.
        object.__setattr__(self, field, number)

    def _check_real(self, field: str, low: float, high: float) -> None:
        value = getattr(self, field)
        if value is None and field == "expert_capacity_factor":
            return
        object.__setattr__(self, field, real_number(f"Recipe.{field}", value, low=low, high=high))

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
            for field, unset in (("lora_rank", None), ("lora_targets", None), ("lora_dropout", 0.0)):
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
        if self.lora_targets is None:
            return
        if isinstance(self.lora_targets, str) or not isinstance(self.lora_targets, tuple | list):
            refuse("Recipe.lora_targets", self.lora_targets, "a tuple of names", Value(("q_proj", "v_proj")))
        if not self.lora_targets:
            refuse("Recipe.lora_targets", self.lora_targets, "at least one name", Value(None))
        for target in self.lora_targets:
            if not isinstance(target, str) or not target.isidentifier():
                refuse("Recipe.lora_targets", target, "names of projections", Value("q_proj"))
        # JSON gives lists; equality after a round trip needs one type.
        object.__setattr__(self, "lora_targets", tuple(dict.fromkeys(self.lora_targets)))

    def _check_quantization(self) -> None:
        """Only a frozen base is quantised, and 8-bit products want weights of their own."""
        if self.quantization and not self.has_adapters:
            refuse(
                "Recipe.quantization",
                self.quantization,
                'None unless method="lora" or "qlora": weights that train are not quantised',
                {"quantization": None},
            )
        if self.method == "qlora" and self.quantization == "int8":
            refuse("Recipe.quantization", "int8", '"nf4" or None with method="qlora"', {"quantization": None})
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
        """Whether low-rank adapters train, over a base that is frozen."""
        return self.method in ("lora", "qlora")

    @property
    def base_quantization(self) -> Quantization | None:
        """The frozen base's type in force; None where it is not quantised."""
        return "nf4" if self.method == "qlora" else self.quantization

    @property
    def adapter_rank(self) -> int:
        """The rank in force: ``lora_rank``, or the default where it was left open."""
        return self.lora_rank or DEFAULT_LORA_RANK
