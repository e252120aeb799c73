"""``Pretrain``: training of the plan's architecture from randomly initialized weights on real text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shardscope.core.errors import refuse
from shardscope.core.fixes import refuse_unknown_keywords
from shardscope.training.data.tokenizer import SHIPPED_TEXT, VOCAB_SIZE, write_tokenizer
from shardscope.training.tasks.text_task import MAX_STEPS, TextTask, resolve_text

if TYPE_CHECKING:
    import torch

    from shardscope.core.plan import Plan
    from shardscope.training.engine import Engine


@refuse_unknown_keywords
@dataclass(frozen=True, kw_only=True)
class Pretrain(TextTask):
    """Pretraining task: ``shardscope.launch(plan, Pretrain())``.

    Weights are initialized randomly; the tokenizer with 2,048 tokens ships with Shardscope. Raises
    ``ValueError`` naming the field, its value, what is allowed and the nearest fix.
    """

    num_steps: int = 50
    """Total number of optimizer steps, including those before a ``resume``; 1 to 10,000,000."""
    learning_rate: float = 1e-3
    """Peak learning rate; suitable for a few million parameters, too high for billions (use 3e-4)."""
    text: Path | None = None
    """UTF-8 text file; None: *Moby-Dick*, which ships with Shardscope."""

    def __post_init__(self) -> None:
        super().__post_init__()
        # The common class lets tasks without a number of steps count passes over their data.
        self._check_integer("num_steps", 1, MAX_STEPS)
        self._check_number("learning_rate", 10.0)
        if self.text is not None:
            object.__setattr__(self, "text", resolve_text(self._field("text"), self.text))

    @property
    def plain_text(self) -> Path:
        """See :class:`TextTask`."""
        return self.text or SHIPPED_TEXT

    def begin(self, engine: Engine, plan: Plan) -> Callable[[], torch.nn.Module]:
        """See :class:`TextTask`."""
        from shardscope.training.model.model import build_model

        engine.fresh_weights = True
        return lambda: build_model(plan.architecture, plan.recipe.dropout)

    def peak_rate(self, plan: Plan) -> float:
        """See :class:`TextTask`."""
        return self.learning_rate

    def encode(self) -> None:
        """Return None: the shipped tokenizer is used."""

    def complete_export(self, folder: Path, plan: Plan) -> None:
        """See :class:`TextTask`."""
        write_tokenizer(folder, plan.recipe.seq_len)

    def frozen_base(self) -> dict[str, object]:
        """See :class:`TextTask`."""
        return {"seed": self.seed}

    def check_model(self, plan: Plan) -> None:
        """See :class:`TextTask`."""
        vocab_size = plan.architecture.vocab_size
        if vocab_size < VOCAB_SIZE:
            refuse(
                "Architecture.vocab_size",
                vocab_size,
                f"at least {VOCAB_SIZE:,}, the tokens of the tokenizer that Pretrain reads text with",
                {"vocab_size": VOCAB_SIZE},
            )
