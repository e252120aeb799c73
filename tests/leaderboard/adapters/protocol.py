"""The protocol of all adapters: plans as a JSON list on stdin, one JSON line for each on stdout.

Adapters are scripts in environments of their own; none imports Shardscope.
"""

from __future__ import annotations

import contextlib
import json
import signal
import sys
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

Plan = Any
"""A plan as ``tests/leaderboard/plan_requests.py`` describes it, with its keys as attributes."""
Answer = Mapping[str, Any]
"""Quantity -> the estimate, or as text the reason why there is none: ``tensors`` (peak bytes of all tensors),
``states`` (bytes of parameters, gradients and optimizer), ``device`` (bytes that the device shows) and
``seconds`` (of one optimizer step)."""


LIMIT_SECONDS = 120
"""An estimator's processor time for one plan, so that other programs change no answer."""


class RefusedError(Exception):
    """The estimator cannot express the plan."""


def refuse(reasons: Mapping[str, object]) -> None:
    """Raise ``RefusedError`` with the first reason that holds."""
    for reason, holds in reasons.items():
        if holds:
            raise RefusedError(reason)


def serve(estimate: Callable[[Plan], Answer], version: str) -> None:
    """Answer every plan on stdin. Refusals and errors of the estimator's own code are answers too."""
    answers = sys.stdout
    # Estimators print and log; only answers may reach stdout.
    with contextlib.redirect_stdout(sys.stderr):
        print(json.dumps({"version": version}), file=answers, flush=True)
        signal.signal(signal.SIGVTALRM, _stop)
        for plan in json.load(sys.stdin, object_hook=lambda values: SimpleNamespace(**values)):
            signal.setitimer(signal.ITIMER_VIRTUAL, LIMIT_SECONDS)
            try:
                refuse({"has no zero-bubble schedule": plan.schedule})
                answer: Answer = {"values": dict(estimate(plan))}
            except RefusedError as reason:
                answer = {"refused": str(reason)}
            except Exception as error:
                words = (str(error).strip().splitlines() or [""])[0]
                answer = {"refused": f"its code raises {type(error).__name__}: {words[:90]}"}
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            print(json.dumps({"id": plan.id, **answer}), file=answers, flush=True)


def _stop(signum: int, frame: object) -> None:
    raise RefusedError(f"its code takes more than {LIMIT_SECONDS} seconds of processor time")


def refuse_other_recipes(plan: Plan, optimizers: tuple[str, ...], precisions: tuple[str, ...]) -> None:
    """Raise ``RefusedError`` for adapters, and for other optimizers and precisions than these."""
    recipe = plan.recipe
    refuse({
        f"trains all parameters, not {recipe.method}": recipe.method != "full",
        f"has no optimizer {recipe.optimizer}": recipe.optimizer not in optimizers,
        f"has no precision {recipe.precision}": recipe.precision not in precisions,
    })  # fmt: skip


def refuse_other_recompute(plan: Plan) -> None:
    """Raise ``RefusedError`` unless every layer recomputes nothing, everything, or Megatron's core attention.

    Elsewhere a plan's ``selective`` recomputes all but products and attention.
    """
    kind, is_megatron = plan.recipe.recompute, plan.layout.framework == "megatron"
    refuse({
        "has no offload of activations": kind == "offload",
        "has Megatron's selective recomputation only": kind == "selective" and not is_megatron,
        "recomputes in every layer or in none": plan.recipe.recompute_interval > 1,
    })  # fmt: skip


ADAM = ("adamw", "adamw_foreach", "adamw_fused")
MIXED = ("bf16-mixed", "fp16-mixed")
