"""What to train: method, precision, optimizer, sequence length, batches, recomputation, kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from shardscope.serialization import JsonNoun
from shardscope.validation import one_of, refuse, whole_number

Method = Literal["full", "lora"]
Precision = Literal["bf16-mixed", "fp16-mixed", "bf16", "fp32"]
Optimizer = Literal["adamw", "sgd"]
Recompute = Literal["none", "selective", "full"]
Kernels = Literal["transformers", "megatron"]
DEFAULT_LORA_RANK = 16


@dataclass(frozen=True, kw_only=True)
class Recipe(JsonNoun):
    """What to train. Every field is optional.

    Raises ``ValueError`` naming the field, its value, what is allowed and the nearest fix.
    """

    seq_len: int = 4096
    """Tokens in one sequence, 1 to 16,777,216."""
    micro_batch_size: int = 1
    """Sequences that one rank takes through forward and backward at once, 1 to 65,536."""
    global_batch_size: int = 64
    """Sequences in one optimizer step over all ranks, 1 to 16,777,216."""
    method: Method = "full"
    """``full`` trains every weight; ``lora`` trains low-rank adapters over a frozen base (Hu et al. 2021)."""
    precision: Precision = "bf16-mixed"
    """``bf16-mixed``/``fp16-mixed`` keep fp32 originals; ``bf16`` and ``fp32`` keep one copy in that type."""
    optimizer: Optimizer = "adamw"
    """``adamw`` keeps two moments a weight (Loshchilov & Hutter 2019), ``sgd`` one momentum."""
    recompute: Recompute = "none"
    """Activations recomputed in backward: none, all but matrix products and attention, or whole layers."""
    kernels: Kernels | None = None
    """Whose modules run: ``transformers`` or ``megatron``; ``None`` is what the framework uses."""
    lora_rank: int | None = None
    """Rank of the adapters, 1 to 4,096; ``None`` is 16. Only with ``method="lora"``."""
    lora_targets: tuple[str, ...] | None = None
    """Projections that get an adapter, by the model's names; ``None``: all of attention's. Only with LoRA."""

    def __post_init__(self) -> None:
        for field, high in (("seq_len", 2**24), ("micro_batch_size", 2**16), ("global_batch_size", 2**24)):
            self._check_number(field, high)
        one_of("Recipe.method", self.method, get_args(Method))
        one_of("Recipe.precision", self.precision, get_args(Precision))
        one_of("Recipe.optimizer", self.optimizer, get_args(Optimizer))
        one_of("Recipe.recompute", self.recompute, get_args(Recompute))
        if self.kernels is not None:
            one_of("Recipe.kernels", self.kernels, get_args(Kernels))
        if self.micro_batch_size > self.global_batch_size:
            refuse(
                "Recipe.global_batch_size",
                self.global_batch_size,
                f"at least micro_batch_size={self.micro_batch_size}",
                f"global_batch_size={self.micro_batch_size}",
            )
        self._check_lora()

    def _check_number(self, field: str, high: int) -> None:
        number = whole_number(f"Recipe.{field}", getattr(self, field), low=1, high=high)
        # A numpy integer becomes Python's, which JSON can write and which cannot overflow.
        object.__setattr__(self, field, number)

    def _check_lora(self) -> None:
        if self.method != "lora":
            for field in ("lora_rank", "lora_targets"):
                if getattr(self, field) is not None:
                    refuse(
                        f"Recipe.{field}", getattr(self, field), 'None unless method="lora"', 'method="lora"'
                    )
            return
        if self.lora_rank is not None:
            self._check_number("lora_rank", 4096)
        if self.lora_targets is None:
            return
        if isinstance(self.lora_targets, str) or not isinstance(self.lora_targets, tuple | list):
            refuse("Recipe.lora_targets", self.lora_targets, "a tuple of names", "('q_proj', 'v_proj')")
        if not self.lora_targets:
            refuse("Recipe.lora_targets", self.lora_targets, "at least one name", "None")
        for target in self.lora_targets:
            if not isinstance(target, str) or not target.isidentifier():
                refuse("Recipe.lora_targets", target, "names of projections", "'q_proj'")
        # JSON gives lists; equality after a round trip needs one type.
        object.__setattr__(self, "lora_targets", tuple(dict.fromkeys(self.lora_targets)))

    @property
    def adapter_rank(self) -> int:
        """The rank in force: ``lora_rank``, or the default where it was left open."""
        return self.lora_rank or DEFAULT_LORA_RANK
