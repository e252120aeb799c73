"""Learning rates of published runs, and the rules that scale them to another batch, method or optimizer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from shardscope.core.plan import Plan


class Reference(NamedTuple):
    """One published run with Adam or AdamW."""

    name: str
    num_parameters: float
    batch_tokens: float
    learning_rate: float
    source: str


GPT3 = "Brown et al. 2020, table 2.1"
LLAMA = "Touvron et al. 2023, table 2"
REFERENCES = (
    Reference("GPT-3 125M", 125e6, 0.5e6, 6.0e-4, GPT3),
    Reference("GPT-3 350M", 350e6, 0.5e6, 3.0e-4, GPT3),
    Reference("GPT-3 760M", 760e6, 0.5e6, 2.5e-4, GPT3),
    Reference("GPT-3 1.3B", 1.3e9, 1e6, 2.0e-4, GPT3),
    Reference("GPT-3 2.7B", 2.7e9, 1e6, 1.6e-4, GPT3),
    Reference("LLaMA 7B", 6.7e9, 4e6, 3.0e-4, LLAMA),
    Reference("LLaMA 13B", 13.0e9, 4e6, 3.0e-4, LLAMA),
    Reference("LLaMA 33B", 32.5e9, 4e6, 1.5e-4, LLAMA),
    Reference("LLaMA 65B", 65.2e9, 4e6, 1.5e-4, LLAMA),
    Reference("GPT-3 175B", 175e9, 3.2e6, 0.6e-4, GPT3),
    Reference("Llama 3 405B", 405e9, 16e6, 0.8e-4, "Grattafiori et al. 2024, table 3 and section 3.4.1"),
)
"""Pretraining runs, with randomly initialized weights."""
BERT = "Devlin et al. 2019, appendix A.3"
INSTRUCT = "Ouyang et al. 2022, appendix C.1"
CHAT = "Touvron et al. 2023, arXiv:2307.09288, section 3.1"
FINE_TUNES = (
    Reference("BERT base", 110e6, 32 * 512, 5e-5, BERT),
    Reference("BERT large", 340e6, 32 * 512, 5e-5, BERT),
    Reference("InstructGPT 1.3B", 1.3e9, 32 * 2048, 9.65e-6, INSTRUCT),
    Reference("Llama 2 Chat 7B", 6.7e9, 64 * 4096, 2e-5, CHAT),
    Reference("Llama 2 Chat 13B", 13.0e9, 64 * 4096, 2e-5, CHAT),
    Reference("Llama 2 Chat 70B", 69e9, 64 * 4096, 2e-5, CHAT),
    Reference("InstructGPT 175B", 175e9, 8 * 2048, 5.03e-6, INSTRUCT),
)
"""Full fine-tuning runs; for BERT the highest recommended rate."""
NEAR = 3.0
"""Largest ratio of model sizes at which a run is a reference; there is no check beyond it."""
TOO_HIGH, TOO_LOW = 3.0, 0.1
"""Factors on the range of the rules. Published rates of one size differ by 2 to 3 (LLaMA 7B's and GPT-3
6.7B's)."""
SMALL_FROM = 768.0
"""Non-embedding parameters of the smallest model of Kaplan et al. 2020, whose rule applies below GPT-3's
sizes."""
LARGE = 1e9
"""Parameters from which a learning rate that is a few times too high wastes an expensive run."""
SMALL_BATCH_TOKENS = 512 * 1024
"""Tokens per batch of the models of Kaplan et al. 2020."""
ADAPTERS_TIMES, ADAPTERS_TIMES_SHORT = 10.0, 15.0
"""LoRA's best rate is about ten times that of full training, fifteen times in short runs (Schulman et al.
2025, "LoRA Without Regret")."""
ADAPTERS_RULE = (
    'adapters take about ten times that of all weights (Schulman et al. 2025, "LoRA Without Regret")'
)
LION_LESS = (10.0, 3.0)
"""Lion's rate is three to ten times smaller than AdamW's (Chen et al. 2023, arXiv:2302.06675, section 5)."""
LION_RULE = "Lion's is three to ten times smaller than AdamW's (Chen et al. 2023, section 5)"


class Scaled(NamedTuple):
    """A learning rate scaled from one batch size to another."""

    linear: float
    """Linear scaling (Goyal et al. 2017, section 2.1): SGD's rule."""
    square_root: float
    """Square-root scaling (Malladi et al. 2022, arXiv:2205.10287): Adam's rule."""


@dataclass(frozen=True, kw_only=True)
class UsualRate:
    """The usual learning rate for a plan, from a published run, and the range without a finding."""

    run: Reference
    batch_tokens: float
    rules: Scaled
    """The reference's rate scaled to the plan's batch, before the rules of :attr:`corrections`."""
    rate: float
    """Recommended rate: that of the square-root rule, at least the reference's own where smaller batches are
    known to work with it."""
    lowest: float
    highest: float
    corrections: tuple[str, ...] = ()
    """Additional rules besides batch scaling, each with its source."""

    @property
    def recommended(self) -> float:
        """Return :attr:`rate` rounded to one digit: the rules are not more precise."""
        return float(f"{self.rate:.1g}")

    def allows(self, rate: float) -> bool:
        """Return whether ``rate`` is in the range without a finding."""
        return self.lowest <= rate <= self.highest


def scale_rate(learning_rate: float, from_batch: float, to_batch: float) -> Scaled:
    """Return ``learning_rate`` for ``from_batch`` scaled to ``to_batch``, both in the same unit."""
    ratio = to_batch / from_batch
    return Scaled(learning_rate * ratio, learning_rate * math.sqrt(ratio))


def find_reference(num_parameters: float, references: tuple[Reference, ...] = REFERENCES) -> Reference | None:
    """Return the published run of the nearest size; None if none is within a factor of :data:`NEAR`."""
    best = min(references, key=lambda run: abs(math.log(run.num_parameters / num_parameters)))
    ratio = best.num_parameters / num_parameters
    return best if 1 / NEAR <= ratio <= NEAR else None


def find_small_reference(num_weights: float) -> Reference | None:
    """Return the rule of Kaplan et al. 2020 (arXiv:2001.08361, equation D.1) for ``num_weights``
    non-embedding parameters.

    It was fitted over 768 to 1.5e9 parameters; it is used only below the sizes of the published runs. None
    outside of that range.
    """
    if not SMALL_FROM <= num_weights <= REFERENCES[0].num_parameters / NEAR:
        return None
    rate = 0.003239 - 0.0001395 * math.log(num_weights)
    name = f"a model of {num_weights / 1e6:.2g}M weights without embeddings"
    return Reference(
        name, num_weights, SMALL_BATCH_TOKENS, float(f"{rate:.2g}"), "Kaplan et al. 2020, equation D.1"
    )


def find_usual_rate(plan: Plan, *, begins_from_weights: bool) -> UsualRate | None:
    """Return the usual learning rate of published runs of ``plan``'s size; None if there is no reference.

    ``begins_from_weights``: training starts from trained weights, which takes smaller rates. Supported are
    all forms of AdamW, Muon, whose updates have AdamW's size (Liu et al. 2025, arXiv:2502.16982), and Lion;
    there are no such runs for Adafactor, and for SGD on transformers.
    """
    recipe = plan.recipe
    # paged and 8-bit forms of AdamW have its updates, so they share its rates.
    if not recipe.optimizer.startswith(("adamw", "paged_adamw", "muon", "lion")):
        return None
    # 1. The reference: the published run of the nearest size and of the same kind of training.
    is_tuned = begins_from_weights or recipe.has_adapters
    run, keeps_rate = _choose_reference(plan, is_tuned)
    if run is None:
        return None
    # 2. Scale its rate to this batch. Linear and square-root scaling bound the range; the square root is
    # Adam's rule.
    tokens = float(recipe.global_batch_size * recipe.seq_len)
    rules = scale_rate(run.learning_rate, run.batch_tokens, tokens)
    least, advised, most = min(rules), rules.square_root, max(rules)
    # A smaller batch does not lower the rate here: widen the range to the reference's own rate
    # (_choose_reference).
    if keeps_rate:
        reference_rate = run.learning_rate
        least, advised, most = (
            min(least, reference_rate),
            max(advised, reference_rate),
            max(most, reference_rate),
        )
    rules_text: list[str] = []
    # 3. Corrections for the method and the optimizer, with the source of each in the finding's text.
    if recipe.has_adapters:
        least, advised, most = ADAPTERS_TIMES * least, ADAPTERS_TIMES * advised, ADAPTERS_TIMES_SHORT * most
        rules_text.append(ADAPTERS_RULE)
    if recipe.optimizer == "lion":
        # The paper gives a range, so the range widens to both ends, and the recommendation is its geometric
        # mean.
        far, near = LION_LESS
        least, advised, most = least / far, advised / math.sqrt(far * near), most / near
        rules_text.append(LION_RULE)
    return UsualRate(
        run=run,
        batch_tokens=tokens,
        rules=rules,
        rate=advised,
        lowest=TOO_LOW * least,
        highest=TOO_HIGH * most,
        corrections=tuple(rules_text),
    )


def limit_rate(rate: float, plan: Plan) -> float:
    """Return ``rate`` for new weights of ``plan``: for a large model capped at the usual rate, for a small
    one replaced by it if ``rate`` is outside the range."""
    usual = find_usual_rate(plan, begins_from_weights=False)
    # A large run that diverges is expensive, so its default rate is never above the usual one. Small models
    # train well at the default.
    if usual is not None and plan.architecture.num_parameters >= LARGE:
        return min(rate, usual.recommended)
    return rate if usual is None or usual.allows(rate) else usual.recommended


def _choose_reference(plan: Plan, is_tuned: bool) -> tuple[Reference | None, bool]:
    """Return the reference run, and whether smaller batches keep its rate.

    They do where rates are far below divergence: fine-tuning runs with batches of 16 and of 128 sequences use
    the same rate (Dettmers et al. 2023, table 9), and small models train at 1e-3 with a few thousand tokens.
    """
    num_parameters = plan.architecture.num_parameters
    if is_tuned:
        return find_reference(num_parameters, FINE_TUNES), True
    run = find_reference(num_parameters)
    if run is not None:
        return run, False
    others = num_parameters - plan.architecture.embedding_parameters
    return find_small_reference(float(others)), True
