"""What ran beside the modules that a plan names: kernels and hooks of a source's own, moment by moment.

Each is described from the source of what ran, and changes only the moments at which it is there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Literal

from tests.accuracy.rows import Row, text

from shardscope import Plan, Recipe
from shardscope.memory.precision import FP32, widths
from shardscope.memory.report import Component, MemoryReport, Moment, StageMemory, Term

OwnCode = Literal["unsloth_loss", "fsdp1_hooks"]
_Change = Callable[[Plan, tuple[Moment, ...]], tuple[Moment, ...]]


def own_code(row: Row, framework: str, recipe: Recipe) -> tuple[OwnCode, ...]:
    """What the row's source ran beside its plan."""
    found: list[OwnCode] = []
    table = text(row, "table")
    if "foak" in table and "liger" not in table:
        found.append("unsloth_loss")
    if framework == "FSDP1" and recipe.has_adapters and recipe.recompute == "full":
        found.append("fsdp1_hooks")
    return tuple(found)


def changed(plan: Plan, report: MemoryReport, own: tuple[OwnCode, ...]) -> MemoryReport:
    """The report with the source's own code in it. A plan without pipeline stages only."""
    if not own:
        return report
    moments = report.worst_stage.moments
    for name in own:
        moments = _CHANGES[name](plan, moments)
    stage: StageMemory = replace(report.worst_stage, find_moments=lambda: moments)
    grown = stage.peak_bytes - report.peak_bytes
    low, high = report.low_bytes + grown, report.high_bytes + grown
    return replace(report, find_stages=lambda: (stage,), worst_stage=stage, find_band=lambda: (low, high))


def _unsloth_loss(plan: Plan, moments: tuple[Moment, ...]) -> tuple[Moment, ...]:
    """Unsloth's cross entropy in transformers 4.45: fp32 logits and their shifted copy.

    Its kernel keeps the row's log-sum-exp only and writes the gradient over the shifted logits
    (foundation-model-stack/fms-acceleration, fms_acceleration_foak/kernels/unsloth/cross_entropy_loss.py);
    backward then copies that into one of all positions.
    """
    tokens = plan.recipe.micro_batch_size * plan.recipe.seq_len
    logits = 2 * FP32 * plan.architecture.vocab_size * tokens
    return tuple(
        _with(moment, {"logits": logits}) if moment.components["logits"] else moment for moment in moments
    )


def _fsdp1_hooks(plan: Plan, moments: tuple[Moment, ...]) -> tuple[Moment, ...]:
    """FSDP1 over frozen weights, recomputed by reentrant checkpoints (the Trainer's default then).

    To reshard frozen weights FSDP1 hooks their layer's inputs (torch/distributed/fsdp/_runtime_utils.py,
    ``_register_post_backward_reshard_only_hook``) and keeps the hook until backward ends. It holds the
    inputs' gradient accumulators (torch/autograd/graph.py, ``register_multi_grad_hook``): in a reentrant
    checkpoint those of detached leaves, so each layer's input and its gradient stay. When backward reaches
    the first layer, all but its own and the gradient that comes in are there beside what it needs.
    """
    arch, recipe = plan.architecture, plan.recipe
    tokens = recipe.micro_batch_size * recipe.seq_len
    kept = 2 * (arch.num_hidden_layers - 2) * tokens * arch.hidden_size * widths[recipe.precision].compute
    last = [moment for moment in moments if moment.phase == "backward" and moment.fraction > 0.9]
    fullest = max(last, key=lambda moment: moment.components["activations"])
    more = {"activations": fullest.components["activations"] + kept}
    return tuple(_with(moment, more) if moment is fullest else moment for moment in moments)


def _with(moment: Moment, more: Mapping[Component, int]) -> Moment:
    terms = dict(moment.terms)
    terms.update({name: Term(num_bytes, lambda: "the source's own code") for name, num_bytes in more.items()})
    return Moment.of(moment.phase, moment.fraction, terms)


_CHANGES: dict[OwnCode, _Change] = {"unsloth_loss": _unsloth_loss, "fsdp1_hooks": _fsdp1_hooks}
