"""``calculon llm``, from the checkout that CALCULON_CHECKOUT names (PyPI's ``calculon`` is another project).

Executions are configured as in its validation against Megatron (validation/seqsel). The systems are its A100
and H100, with the row's links and without a memory limit. Fused attention, which recomputes the scores, is
its ``attn_only``.
"""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

from calculon import System
from calculon.llm import Llm
from protocol import ADAM, MIXED, Answer, Plan, refuse, refuse_other_recipes, refuse_other_recompute, serve

_SYSTEMS = {"a100": "a100_80g", "h100-sxm": "h100_80g_nvl8"}
"""Start of a GPU's name -> its system. Memory depends on none of a system's figures."""
_RECOMPUTE = {"none": "none", "selective": "attn_only", "full": "full"}


def estimate(plan: Plan) -> Answer:
    """Return memory of a processor and the time of one batch."""
    arch, recipe, degrees = plan.architecture, plan.recipe, plan.degrees
    refuse({"models Megatron only": plan.layout.framework != "megatron"})
    refuse_other_recipes(plan, ADAM, MIXED)
    refuse_other_recompute(plan)
    refuse({
        "has no gated MLP": arch.gated_mlp,
        "has no experts": arch.mixture_of_experts,
        "has no grouped-query attention": arch.num_key_value_heads != arch.num_attention_heads,
        "has no multi-head latent attention": arch.latent_attention,
        "has no context parallelism": degrees.cp > 1,
    })  # fmt: skip
    recompute = _RECOMPUTE[recipe.recompute]
    if recompute == "none" and not plan.has_unfused_attention:
        recompute = "attn_only"
    tp, pp, dp, inside = degrees.tp, degrees.pp, degrees.data_parallel, plan.gpus_per_node
    execution = {
        "num_procs": tp * pp * dp, "tensor_par": tp, "pipeline_par": pp, "data_par": dp,
        "tensor_par_net": int(tp > inside), "data_par_net": int(tp * dp > inside),
        "pipeline_par_net": int(tp * dp * pp > inside),
        "batch_size": recipe.global_batch_size, "microbatch_size": recipe.micro_batch_size,
        "datatype": "float16", "fused_activation": False, "attention_type": "multihead", "training": True,
        "activation_recompute": recompute, "pipeline_interleaving": degrees.vpp,
        "optimizer_sharding": plan.layout.distributed_optimizer and dp > 1,
        "tensor_par_comm_type": "rs_ag" if plan.sequence_parallel else "ar",
        "tensor_par_overlap": "ring" if plan.layout.tp_comm_overlap and tp > 1 else "none",
        "seq_par_ag_redo": plan.sequence_parallel and recompute != "full",
        "data_par_overlap": plan.layout.overlap_grad_reduce and dp > 1,
        "weight_offload": False, "activations_offload": False, "optimizer_offload": False,
    }  # fmt: skip
    application = {
        "hidden": arch.hidden_size, "feedforward": arch.intermediate_size, "seq_size": recipe.seq_len,
        "attn_heads": arch.num_attention_heads, "attn_size": arch.head_dim,
        "num_blocks": arch.num_hidden_layers,
    }  # fmt: skip
    name = next((file for start, file in _SYSTEMS.items() if plan.gpu.name.startswith(start)), None)
    file = Path(os.environ["CALCULON_CHECKOUT"]) / "systems" / f"{name or 'a100_80g'}.json"
    system = json.loads(file.read_text(encoding="utf-8"))
    # Bytes, not whether they fit: its own a100_80e.json does the same.
    system["mem1"]["GiB"] = 10**9
    system["networks"][0] |= {"bandwidth": plan.links.intra_node / 1e9, "size": inside}
    system["networks"][1] |= {"bandwidth": plan.links.inter_node / 1e9}
    model, built = Llm(Llm.Application(application), logging.getLogger()), System(system)
    model.compile(built, Llm.Execution.from_json(execution))
    model.run(built)
    stats = model.get_stats_json(False)
    return {
        "tensors": stats["proc_mem_tier1_cap_req"],
        "states": stats["weight_space"] + stats["weight_grad_space"] + stats["optimizer_space"],
        "seconds": stats["total_time"] if name else f"ships no system of {plan.gpu.name}",
    }


if __name__ == "__main__":
    serve(estimate, os.environ["CHECKOUT_COMMIT"])
