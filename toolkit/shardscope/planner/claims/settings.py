"""The plans that claims are checked with: each as near to what was said as a plan can be."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shardscope.catalog import models
from shardscope.core.cluster import Cluster
from shardscope.core.layout import Layout
from shardscope.core.plan import Plan
from shardscope.core.recipe import Recipe

GB = 1e9
"""People who say "840 GB" mean 10^9 bytes."""
NVME_BYTES = 28 * 10**12
NVME_BYTES_PER_SECOND = 25e9
"""Of a DGX-2, the machine of the paper on NVMe offload (Rajbhandari et al. 2021, figure 2b)."""


def plan_of(model: str, cluster: str, layout: Layout, **recipe: Any) -> Plan:
    """A plan by names of the catalogue."""
    return Plan(models[model], Cluster.parse(cluster), Recipe(**recipe), layout)


def with_nvme(plan: Plan) -> Plan:
    """The same with the NVMe of a DGX-2 in each node, whose datasheet says more of it than others'."""
    cluster = replace(
        plan.cluster, nvme_bytes=NVME_BYTES, nvme_bandwidth_bytes_per_second=NVME_BYTES_PER_SECOND
    )
    return replace(plan, cluster=cluster)


def training_state(plan: Plan) -> dict[str, float]:
    """GB that one rank holds of parameters, gradients and optimizer, each at its most from forward to the
    update: copies that making a model or an update takes for a moment are no state."""
    names = ("parameters", "gradients", "optimizer")
    moments = [held for phase, _, held in plan.memory().timeline if phase in ("forward", "backward")]
    return {name: max(held[name] for held in moments) / GB for name in names}
