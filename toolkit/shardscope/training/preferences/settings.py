"""Plans that DPO trains, its recommended settings, and the time of its reference. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias

from shardscope.core.errors import refuse
from shardscope.frameworks.registry import frameworks
from shardscope.memory.activations.head import resolve_loss
from shardscope.planner.checks.case import predict_step
from shardscope.timing.report import format_seconds

if TYPE_CHECKING:
    from shardscope.core.plan import Plan
    from shardscope.timing.report import Part, StepReport

Objective: TypeAlias = Literal["sft", "dpo"]
"""Supervised fine-tuning on answers, or direct preference optimization on pairs of answers."""
OBJECTIVES: tuple[Objective, ...] = ("sft", "dpo")
SIDES = 2
"""Sequences of a preference pair."""
DEFAULT_BETA = 0.1
"""Rafailov et al. 2023 (arXiv:2305.18290, appendix B), and trl's default (1.16, trainer/dpo_config.py)."""
PAIR_RATE_SHARE = 1 / 20
"""Learning rate as a share of the supervised one: 1e-6 (Rafailov et al. 2023, appendix B, and trl's default)
of Llama 2's 2e-5."""
FORWARD_PARTS: tuple[Part, ...] = ("matrices", "attention", "elementwise", "loss", "gathers")
"""Parts of a step that a forward has a share of."""


def check_pair_plan(plan: Plan) -> None:
    """Raise ``ValueError`` for a plan that cannot train preference pairs, with the nearest fix."""
    recipe, layout = plan.recipe, plan.layout
    here = 'with Finetune(objective="dpo")'
    if not layout.trains_pairs:
        classes = (framework.layout_class for framework in frameworks.values())
        names = ", ".join(f"'{other.framework}'" for other in classes if other.trains_pairs)
        allowed = f"{names} {here}: its engine computes the loss itself, from the logits"
        refuse("Layout.framework", layout.framework, allowed, {"layout": "fsdp2"})
    for degree in ("tp", "pp", "cp"):
        size = getattr(plan.degrees, degree)
        if size > 1:
            why = "whose loss needs whole rows and the whole vocabulary on each rank"
            refuse(f"Layout.{degree}", size, f"1 {here}, {why}", {degree: 1})
    loss = resolve_loss(plan)
    if loss != "full":
        allowed = f"'full' {here}: a {loss} loss is a mean over all tokens, without those of each row"
        refuse("Recipe.loss", loss, allowed, {"loss": "full"})
    if recipe.packing:
        refuse("Recipe.packing", True, f"False {here}: the sides of a pair are rows", {"packing": False})
    if recipe.micro_batch_size % SIDES:
        size = recipe.micro_batch_size + 1
        fix = {"micro_batch_size": size}
        multiple = size * plan.degrees.data_parallel
        if recipe.global_batch_size % multiple:
            fix["global_batch_size"] = -(-recipe.global_batch_size // multiple) * multiple
        allowed = f"an even number of sequences {here}: a pair is two, the chosen and the rejected answer"
        refuse("Recipe.micro_batch_size", recipe.micro_batch_size, allowed, fix)


def estimate_reference_seconds(plan: Plan, step: StepReport, num_steps: int, num_pairs: int | None) -> float:
    """Return the estimated seconds of the reference's forwards in a run of ``num_steps`` steps.

    With adapters each step has one more forward, half of the step's work: backward over a frozen base
    computes no weight gradients. In full fine-tuning a forward is a third of a step's work, and one forward
    over the ``num_pairs`` precedes the first step.
    """
    work = sum(step.parts[part] for part in FORWARD_PARTS)
    if plan.recipe.has_adapters:
        return num_steps * work / 2
    return (num_pairs or 0) * SIDES / plan.recipe.global_batch_size * work / 3


def describe_reference(plan: Plan | None, num_pairs: int | None = None) -> str:
    """Return a sentence about what the reference costs, with its time where ``plan.step()`` predicts it.

    ``num_pairs`` is the number of pairs of the data; None: it is not known.
    """
    if plan is None:
        return (
            "The reference of DPO takes no memory: with adapters it is the model without them, one more "
            "forward in each step; in full fine-tuning the initial model, one forward over all pairs before "
            "the first step."
        )
    step, has_adapters = predict_step(plan), plan.recipe.has_adapters
    seconds = None if step is None else estimate_reference_seconds(plan, step, 1, num_pairs)
    known = f", about {format_seconds(seconds)} by plan.step()" if seconds else ""
    if has_adapters:
        return (
            f"The reference is the model without its adapters: one more forward in each step{known}, and no "
            "memory."
        )
    return (
        f"The reference is the initial model: one forward over all pairs before the first step{known}, and "
        "no memory, because its log-probabilities are stored in the run."
    )
