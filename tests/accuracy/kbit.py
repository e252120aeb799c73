"""Memory effects of peft's ``prepare_model_for_kbit_training`` (utils/other.py) on a quantized base.

It casts every parameter that is not quantised to fp32: norms, embeddings and the head, though they never
update. So the residual stream is in fp32 from the embedding on, and products over NF4 give back the type that
they are given. A plan has these parameters as they are loaded, in half precision.
"""

from __future__ import annotations

from collections.abc import Iterable

from shardscope import Plan
from shardscope.core.precision import FP32, HALF
from shardscope.frameworks.registry import frameworks
from shardscope.memory.activations.forward import find_modules
from shardscope.memory.activations.rank_activations import RankActivations
from shardscope.memory.report import Component, PhaseMemory, Term
from shardscope.memory.state.quantization import compute_frozen_base_bytes
from shardscope.prediction.memory import compute_phases as moments_of


def kbit_training(plan: Plan, moments: Iterable[PhaseMemory]) -> tuple[PhaseMemory, ...]:
    """peft's prepare_model_for_kbit_training: norms, embeddings, head and residual stream in fp32.

    Autograd keeps autocast's copy of the head until that has gone backward.
    """
    model = frameworks[plan.layout.framework].memory_model()
    (shape,) = model.find_shapes(plan).kinds
    stage = model.count_weights(plan, shape)
    wide = find_modules(plan)._replace(upcasts_norms=True)
    more = compute_frozen_base_bytes(plan, stage, FP32) - compute_frozen_base_bytes(plan, stage, HALF)
    copy = HALF * stage.head
    results = []
    theirs = moments_of(RankActivations(plan, wide), stage, model.compute_training_state(plan, stage))
    for moment in sorted(theirs, key=lambda moment: moment.fraction):
        parts = moment.components
        changes: dict[Component, int] = {
            "parameters": parts["parameters"] + more,
            "activations": parts["activations"] + (copy if parts["logits"] else 0),
        }
        terms = dict(moment.terms)
        for name, size in changes.items():
            terms[name] = Term(size, lambda: "as prepare_model_for_kbit_training leaves it")
        results.append(PhaseMemory.from_terms(moment.phase, moment.fraction, terms))
    return tuple(results)
