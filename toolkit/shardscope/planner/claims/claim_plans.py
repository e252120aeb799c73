"""Plans for checking claims: each is as close to the claim as a plan can be."""

from __future__ import annotations

from dataclasses import replace

from shardscope.catalog import models
from shardscope.core.cluster import Cluster
from shardscope.core.layout import Layout
from shardscope.core.plan import Plan
from shardscope.core.recipe import Recipe
from shardscope.core.serialization import replace_fields

GB = 1e9
"""Bytes of a GB in claims such as "840 GB"."""
NVME_BYTES = 28 * 10**12
NVME_BYTES_PER_SECOND = 25e9
"""NVMe of a DGX-2, the machine of the paper on NVMe offload (Rajbhandari et al. 2021, figure 2b)."""


def build_plan(model: str, cluster: str, layout: Layout, **recipe: object) -> Plan:
    """Return a plan from catalogue names."""
    return Plan(models[model], Cluster.parse(cluster), replace_fields(Recipe(), recipe), layout)


def add_nvme(plan: Plan) -> Plan:
    """Return the plan with a DGX-2's NVMe in each node: its datasheet has more NVMe figures than others."""
    cluster = replace(
        plan.cluster, nvme_bytes=NVME_BYTES, nvme_bandwidth_bytes_per_second=NVME_BYTES_PER_SECOND
    )
    return replace(plan, cluster=cluster)


def compute_training_state_gb(plan: Plan) -> dict[str, float]:
    """Return GB of parameters, gradients and optimizer on one rank, each at its maximum from forward to
    backward: temporary copies for building the model or the update are not training state."""
    names = ("parameters", "gradients", "optimizer")
    # Each part's own maximum, as the paper counts them: their peaks need not coincide.
    snapshots = [
        components for phase, _, components in plan.memory().timeline if phase in ("forward", "backward")
    ]
    return {name: max(components[name] for components in snapshots) / GB for name in names}
