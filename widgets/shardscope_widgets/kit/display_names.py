"""Display names of catalogue entries and plans."""

from __future__ import annotations

import re
from html import escape
from typing import TYPE_CHECKING

from shardscope.catalog import load_table
from shardscope.core.cluster import name_device
from shardscope.core.errors import FieldError
from shardscope.core.number_format import format_count
from shardscope.planner.advice import descriptions

if TYPE_CHECKING:
    import shardscope as ss

_SPELLED = {
    "sxm": "SXM",
    "pcie": "PCIe",
    "rtx": "RTX",
    "pro": "PRO",
    "gpt": "GPT",
    "gpt2": "GPT-2",
    "neox": "NeoX",
    "oss": "OSS",
    "glm": "GLM",
    "olmo": "OLMo",
    "smollm2": "SmolLM2",
    "smollm3": "SmolLM3",
    "starcoder2": "StarCoder2",
    "rw": "RW",
    "nvl": "NVL",
    "deepseek": "DeepSeek",
    "cpu": "CPU",
    "xl": "XL",
    "moe": "MoE",
    "nvlink": "NVLink",
    "infiniband": "InfiniBand",
    "c2c": "C2C",
    "edr": "EDR",
    "hdr": "HDR",
    "ndr": "NDR",
    "xdr": "XDR",
    "x16": "x16",
}


def format_name(name: str) -> str:
    """Return ``Llama 3.1 8B`` for ``llama-3.1-8b``, ``H100 SXM 80 GB`` for ``h100-sxm-80gb``."""
    return " ".join(_format_word(part) for part in re.split(r"[-_ ]", name) if part)


def name_model(architecture: ss.Architecture) -> str:
    """Return ``Llama 3.1 8B`` for a model of the catalogue, and the name of a folder as it is."""
    name = architecture.name
    return format_name(name) if name in load_table("models") else name


def _format_word(part: str) -> str:
    if part in _SPELLED:
        return _SPELLED[part]
    if match := re.fullmatch(r"(\d+)gb", part):
        return f"{match[1]} GB"
    if re.fullmatch(r"[a-z]{0,3}\d[\d.]*[a-z]?", part):
        return part.upper()
    if re.fullmatch(r"\d+x\d+b", part):
        return part[:-1] + "B"
    return part[:1].upper() + part[1:]


def describe_devices(cluster: ss.Cluster) -> str:
    """Return ``8 × H100 SXM 80 GB``, ``4 nodes of 8 × ...``, ``4 CPU ranks on 2 nodes``."""
    if cluster.gpu.name == "cpu":
        ranks = format_count(cluster.num_gpus, "CPU rank")
        return ranks if cluster.num_nodes == 1 else f"{ranks} on {cluster.num_nodes:,} nodes"
    one_node = f"{cluster.gpus_per_node} × {format_name(cluster.gpu.name)}"
    return one_node if cluster.num_nodes == 1 else f"{cluster.num_nodes:,} nodes of {one_node}"


def count_devices(cluster: ss.Cluster) -> str:
    """Return ``8 GPUs``, ``1 GPU`` or ``2 CPU ranks``."""
    return format_count(cluster.num_gpus, name_device(cluster))


def name_rate_unit(cluster: ss.Cluster) -> str:
    """Return the word after "per" in a rate of one device: ``GPU``, or ``rank`` for CPU ranks."""
    return "rank" if cluster.gpu.vendor == "cpu" else "GPU"


_MISSING_INPUTS = {
    "Cluster.nvme_bandwidth_bytes_per_second": "the read bandwidth of a node's NVMe is not known; the Studio "
    "asks for it under GPUs, More options, NVMe",
}
"""Field that a prediction lacks -> what is missing, and the Studio's input for it: a view may stand outside
of the Studio."""


def name_missing_input(error: FieldError) -> str:
    """Return what a prediction lacks, and the Studio's input for it; empty if none of the inputs is it."""
    return _MISSING_INPUTS.get(error.field, "")


def explain_missing_time(plan: ss.Plan) -> str:
    """Return why ``plan`` has no predicted time, and the input or fix; empty if it has one."""
    try:
        plan.step()
    except FieldError as error:
        if named := name_missing_input(error):
            return f"{named}."
    except ValueError:
        pass
    return descriptions.explain_missing_time(plan)


def describe_plan(plan: ss.Plan) -> str:
    """Return a sentence with the task, the model, the hardware and the framework as HTML."""
    rank = plan.recipe.adapter_rank
    methods = {"full": "full training", "lora": f"LoRA of rank {rank}", "qlora": f"QLoRA of rank {rank}"}
    method = methods[plan.recipe.method]
    return (
        f"<span class='what'><b>{escape(name_model(plan.architecture))}</b> on "
        f"<b>{escape(describe_devices(plan.cluster))}</b> with <b>{escape(plan.layout.description)}</b>, "
        f"{method}, {escape(plan.recipe.precision)}</span>"
    )
