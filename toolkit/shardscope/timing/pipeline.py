"""Pipeline schedules: the order of a stage's passes, when each of them runs, and the bubble of a stage."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

from shardscope.core.ops import maximum

if TYPE_CHECKING:
    from shardscope.core.plan import Plan

Schedule = Literal["gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2"]
NAMES: dict[Schedule, str] = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "interleaved 1F1B",
    "zb-h1": "zero-bubble ZB-H1",
    "zb-h2": "zero-bubble ZB-H2",
}


def find_schedule(plan: Plan) -> Schedule | None:
    """Return the schedule that the plan's framework runs; None for a single stage."""
    if plan.degrees.pp == 1:
        return None
    if plan.layout.runs_all_forwards_first:
        return "gpipe"
    return "interleaved" if plan.degrees.vpp > 1 else "1f1b"


def compute_bubble_seconds(all_stages: float, slowest: float, vpp: int, micro_batches: int) -> float:
    """Return the slowest stage's bubble: one micro-batch's forward and backward on all other stages.

    Arguments are seconds of all micro-batches of a step, numbers may be arrays of plans. For equal stages,
    this is (pp - 1) / (vpp x micro-batches) of one stage's own time (Narayanan et al. 2021, section 2.2),
    with 1F1B as with GPipe; interleaved, a micro-batch waits for 1/vpp of each.

    Interleaved with fewer micro-batches than stages, a stage also waits before each further chunk: the first
    micro-batch is still on other stages when the stage has finished the last one. With one micro-batch
    nothing runs at the same time.
    """
    waits = all_stages - slowest
    # A check of the class, because the comparison of an array gives an array.
    if vpp.__class__ is not int or vpp > 1:
        waits = waits + (vpp - 1) * maximum(0.0, all_stages - micro_batches * slowest)
    return waits / (vpp * micro_batches)


class Pass(NamedTuple):
    """The forward or the backward of one micro-batch in one model chunk of a stage."""

    is_forward: bool
    chunk: int
    micro_batch: int


def iterate_passes(
    schedule: Schedule, pp: int, vpp: int, stage: int, micro_batches: int
) -> Iterator[tuple[bool, int, int]]:
    """Yield the passes of a stage in order, as the fields of :class:`Pass`.

    GPipe runs all forwards first (Huang et al. 2019, section 2). 1F1B warms up with pp - 1 - stage
    micro-batches. The interleaved schedule warms up with 2 (pp - 1 - stage) + (vpp - 1) pp: pp micro-batches
    of one chunk, then pp of the next. Backward starts with the last chunk (megatron/core/pipeline_parallel/
    schedules.py, get_pp_rank_microbatches and get_schedule_table). Where pp does not divide the
    micro-batches, torch takes equal rounds of more than pp (torch.distributed.pipelining,
    ScheduleInterleaved1F1B).
    """
    total = micro_batches * vpp
    if schedule == "gpipe":
        yield from ((True, 0, number) for number in range(total))
        yield from ((False, 0, number) for number in range(total))
        return
    if vpp == 1:
        size, warm_up = total, pp - stage - 1
    else:
        size = micro_batches // max(1, micro_batches // pp)
        warm_up = 2 * (pp - stage - 1) + (vpp - 1) * size
    warm_up = min(warm_up, total)
    chunks = [index % (size * vpp) // size for index in range(total)]
    numbers = [index // (size * vpp) * size + index % size for index in range(total)]
    for index, chunk in enumerate(chunks):
        yield True, chunk, numbers[index]
        if index >= warm_up:
            yield False, vpp - 1 - chunks[index - warm_up], numbers[index - warm_up]
    for index in range(total - warm_up, total):
        yield False, vpp - 1 - chunks[index], numbers[index]


def time_passes(
    stages: Sequence[Sequence[Pass]],
    seconds: Sequence[tuple[float, float]],
    first_waits: Sequence[float] | None = None,
) -> list[list[tuple[float, float]]]:
    """Return the start and the end of each pass of each stage, if every pass runs as soon as it can.

    ``seconds`` are those of a forward and a backward of one chunk, by stage, transfers to the next stage
    included. A forward waits for that of the previous stage, or of the last stage's previous chunk; a
    backward for that of the next one. ``first_waits`` are seconds that each stage waits before its first
    pass, once it could start.
    """
    num_stages = len(stages)
    last = num_stages * (1 + max(one.chunk for passes in stages for one in passes)) - 1
    ends: dict[tuple[bool, int, int], float] = {}
    times: list[list[tuple[float, float]]] = [[] for _ in stages]
    free = [0.0] * num_stages
    left = sum(map(len, stages))
    while left:
        before = left
        for stage, passes in enumerate(stages):
            for is_forward, chunk, number in passes[len(times[stage]) :]:
                # Position of the chunk in the model: the pass waits for its neighbour's.
                position = chunk * num_stages + stage
                neighbour = position - 1 if is_forward else position + 1
                ready = 0.0
                if 0 <= neighbour <= last:
                    if (is_forward, neighbour, number) not in ends:
                        break
                    ready = ends[is_forward, neighbour, number]
                start = max(free[stage], ready)
                if first_waits is not None and not times[stage]:
                    start += first_waits[stage]
                end = start + seconds[stage][0 if is_forward else 1]
                ends[is_forward, position, number] = free[stage] = end
                times[stage].append((start, end))
                left -= 1
        assert left < before, "no stage can go on"
    return times
