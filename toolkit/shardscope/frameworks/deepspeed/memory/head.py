"""The head under DeepSpeed's AutoTP: cut over tp, but for what transformers' own plan gathers again.

AutoTP follows the plan that transformers has for a model: an untied head's logits are gathered, so that every
rank has the whole vocabulary; a head that is the embedding too stays cut, and DeepSpeed's own loss goes over
the cut logits (``deepspeed/sequence/cross_entropy.py``, ``_VocabParallelCrossEntropy``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardscope.core.arrays.arithmetic import ceil_div, where
from shardscope.core.number_format import count
from shardscope.core.precision import FP32
from shardscope.frameworks.deepspeed.memory.tensors import cuts_tied_head
from shardscope.memory.activations.head import head_terms, loss_in_force
from shardscope.memory.report import Term, chosen

if TYPE_CHECKING:
    from shardscope.memory.activations.step import StageStep


def logits(step: StageStep) -> tuple[Term, Term]:
    """Logits and loss at the end of forward, and as backward starts."""
    plan, arch = step.plan, step.plan.architecture
    usual = head_terms(plan, step.modules, step.tokens, step.stage.is_last, vocab=arch.vocab_size)
    if not cuts_tied_head(arch) or loss_in_force(plan) != "full":
        return usual
    tp, width = plan.degrees.tp, step.modules.compute
    vocab = ceil_div(arch.vocab_size, tp)
    # Of several sequences the logits without each one's last are a copy.
    shifted = where(plan.recipe.micro_batch_size > 1, width, 0)
    copy = FP32 if width < FP32 else 0
    # The copy in fp32, less its largest, and e to that; then that, its gradient, and the gradient's cast.
    forward = width + shifted + copy + 2 * FP32
    backward = 2 * FP32 + (width if copy else 0) + shifted
    parallel = _terms(step, vocab, forward), _terms(step, vocab, backward)
    return chosen(tp > 1, parallel[0], usual[0]), chosen(tp > 1, parallel[1], usual[1])


def _terms(step: StageStep, vocab: Any, each: Any) -> Term:
    return Term(
        step.stage.is_last * step.tokens * vocab * each,
        lambda: (
            f"{count(step.tokens, 'token')} × {vocab:,} of the vocabulary × {each} bytes · DeepSpeed's "
            "vocabulary-parallel cross entropy"
        ),
    )
