"""``estimate-memory``, column "Training using Adam".

The command builds a model from a config of the Hub. Here the config is the plan's, and the functions that the
command's ``gather_data`` calls are called directly. Mixed precision is its float16
(huggingface.co/docs/accelerate, Model memory estimator).
"""

from __future__ import annotations

import json
from functools import cache
from importlib.metadata import version

import torch
from accelerate import init_empty_weights
from accelerate.commands.estimate import estimate_training_usage
from accelerate.utils import calculate_maximum_sizes
from protocol import ADAM, MIXED, Answer, Plan, refuse, refuse_other_recipes, serve
from transformers import AutoConfig, AutoModel


def estimate(plan: Plan) -> Answer:
    """Return the memory to train the whole model on one device."""
    size, degrees = plan.recipe.micro_batch_size, plan.degrees
    refuse({
        "counts the whole model on one device, without sharding": (
            max(degrees.shard, degrees.tp, degrees.pp, degrees.ep, degrees.cp) > 1
        ),
        "transformers has no config of this model": plan.hf_config is None,
    })  # fmt: skip
    refuse_other_recipes(plan, ADAM, (*MIXED, "fp32"))
    dtype = "float32" if plan.recipe.precision == "fp32" else "float16"
    needed = max(estimate_training_usage(_measure_model(plan.hf_config), dtype).values())
    return {"states": needed, "tensors": needed if size == 1 else "estimates a batch of 1"}


@cache
def _measure_model(config: str) -> int:
    with init_empty_weights():
        model = AutoModel.from_config(AutoConfig.for_model(**json.loads(config)), dtype=torch.float32)
    return int(calculate_maximum_sizes(model)[0])


if __name__ == "__main__":
    serve(estimate, version("accelerate"))
