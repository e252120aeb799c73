"""Memory that is not there: on the card, in a node's host, on its NVMe; and what nobody knows of them."""

from __future__ import annotations

from collections.abc import Iterator

from shardscope.memory.words import gib
from shardscope.planner.preflight.case import Case
from shardscope.planner.preflight.finding import Finding
from shardscope.planner.preflight.recomputation import recomputing
from shardscope.planner.room import Place, fits, places

NAMES = {
    "GPU memory": "gpu-memory",
    "host memory": "host-memory",
    "NVMe": "nvme",
    "host memory while the model is made": "host-memory-at-start",
}


def no_room(case: Case) -> Iterator[Finding]:
    """Every kind of memory of which the plan needs more than there is, with the cheapest repair."""
    if case.memory is None:
        return
    for place in places(case.plan, case.memory):
        if place.short_bytes and not (place.name == "GPU memory" and recomputing(case)):
            yield _short(case, place)
        elif place.room_bytes is None:
            yield _unknown(place)


def _short(case: Case, place: Place) -> Finding:
    assert place.room_bytes is not None
    whose = "The worst rank" if place.name == "GPU memory" else "A node"
    # Adapters in place of full training would be another task: only where nothing else is enough.
    same_task = (repair for repair in case.repairs if repair.plan.recipe.method == case.plan.recipe.method)
    best = next(same_task, next(iter(case.repairs), None))
    enough = best is not None and fits(best.plan, best.plan.memory())
    return Finding(
        name=f"out-of-{NAMES[place.name]}",
        severity="danger",
        why=f"{whose} needs {gib(place.needed_bytes)} GiB of {place.name}, and has {gib(place.room_bytes)}: "
        f"{gib(place.short_bytes)} GiB too little.",
        number=place.short_bytes / 2**30,
        change="No single change is enough: ss.recommend(...) looks at several"
        if best is None or not enough
        else best.change,
        plan=best.plan if best is not None and enough else None,
    )


def _unknown(place: Place) -> Finding:
    field = "nvme_bytes" if place.name == "NVMe" else "host_memory_bytes"
    return Finding(
        name=f"{NAMES[place.name]}-not-known",
        severity="hint" if place.name.endswith("is made") else "warning",
        why=f"A node needs {gib(place.needed_bytes)} GiB of {place.name}, and nobody said how much it has.",
        number=place.needed_bytes / 2**30,
        change=f"Say it: Cluster.{field}",
    )
