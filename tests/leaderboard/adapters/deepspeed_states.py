"""``estimate_zero2_model_states_mem_needs`` and ``estimate_zero3_model_states_mem_needs``.

They estimate "params, optim states and gradients", with the plan's offload. Parameters and the largest module
are counted as by their ``model_to_params`` (deepspeed.readthedocs.io, Memory Requirements). For ZeRO-3 they
add the memory to all-gather the largest module, and also return it separately: it is subtracted, because
model states do not include gather buffers.
"""

from __future__ import annotations

from importlib.metadata import version

from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs
from protocol import ADAM, MIXED, Answer, Plan, refuse, refuse_other_recipes, serve


def estimate(plan: Plan) -> Answer:
    """Return the bytes of model states on one GPU."""
    layout, machines = plan.layout, (plan.gpus_per_node, plan.num_nodes)
    refuse({"has functions for ZeRO-2 and ZeRO-3 only": layout.framework != "deepspeed" or layout.stage < 2})
    on_cpu, params_on_cpu = bool(layout.offload_optimizer), bool(layout.offload_params)
    refuse({
        "has no other parallelism": max(layout.tp, layout.pp, layout.ep) > 1,
        "has no NVMe": "nvme" in (layout.offload_optimizer, layout.offload_params),
        "offloads parameters with the optimizer only": params_on_cpu and not on_cpu,
    })  # fmt: skip
    refuse_other_recipes(plan, ADAM, MIXED)
    if layout.stage == 2:
        _, on_gpu = estimate_zero2_model_states_mem_needs(plan.num_parameters, *machines, on_cpu)
        gathered = 0
    else:
        _, on_gpu, gathered = estimate_zero3_model_states_mem_needs(
            plan.num_parameters, plan.largest_module_parameters, *machines, on_cpu, params_on_cpu
        )
    return {"states": on_gpu - gathered, "tensors": "estimates model states, no activations"}


if __name__ == "__main__":
    serve(estimate, version("deepspeed"))
