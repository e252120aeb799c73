"""Seconds of host offloading: its link, NVMe and the CPU optimizer; numbers may be arrays of plans."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from shardscope.core.errors import refuse
from shardscope.core.ops import maximum, minimum

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardscope.core.plan import Plan
    from shardscope.timing.rates import Rates
    from shardscope.timing.traffic import StateTraffic


class HostSeconds(NamedTuple):
    """Seconds of one step, exposed and overlapped with arithmetic or with collectives."""

    exposed: float
    hidden: float


_NOTHING = HostSeconds(0.0, 0.0)


def compute_host_seconds(
    plan: Plan,
    traffic: StateTraffic,
    compute_forward: Callable[[], float],
    compute_backward: Callable[[], float],
    rates: Rates,
) -> HostSeconds:
    """Return the exposed and the overlapped seconds of a step's host traffic for the training state.

    The link is full duplex, so in backward the busier direction counts. The callables return the seconds that
    transfers can overlap with. The ranks of a node share its drives and CPU, whose optimizer step starts
    after backward (Ren et al. 2021, section 4.1).
    """
    if traffic.uses_no_host:
        return _NOTHING
    forward, backward = compute_forward(), compute_backward()
    # 1. The link between GPU and host, while arithmetic runs and after it.
    link = rates.host.bytes_per_second
    going_forward = traffic.fetched_forward / link
    going_backward = maximum(traffic.fetched_backward, traffic.returned_backward) / link
    hidden = minimum(going_forward, forward) + minimum(going_backward, backward)
    waiting = (traffic.returned_waiting + traffic.returned_after) / link
    exposed = going_forward + going_backward - hidden + waiting
    # 2. The CPU optimizer, which starts when all gradients are on the host.
    per_node = plan.cluster.gpus_per_node
    exposed = exposed + traffic.updated_on_host * per_node / rates.host_updates_per_second
    # 3. NVMe. Checked before the bandwidth of the drives, which plans without NVMe need not know.
    if _is_zero(traffic.nvme_overlapped) and _is_zero(traffic.nvme_after):
        return HostSeconds(exposed, hidden)
    speed = plan.cluster.nvme_bandwidth_bytes_per_second
    if speed is None:
        refuse(
            "Cluster.nvme_bandwidth_bytes_per_second",
            None,
            "bytes per second that one node reads from its NVMe: this layout keeps state there",
            "dataclasses.replace(cluster, nvme_bandwidth_bytes_per_second=...) with what `fio` measures",
        )
    overlaps_with = traffic.nvme_overlapped * per_node / speed
    covered = minimum(overlaps_with, forward + backward)
    after = traffic.nvme_after * per_node / speed
    return HostSeconds(exposed + overlaps_with - covered + after, hidden + covered)


def _is_zero(amount: float) -> bool:
    return isinstance(amount, int | float) and amount == 0
