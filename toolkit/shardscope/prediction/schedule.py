"""The pipeline schedule of one optimizer step, block by block, and the memory of each stage at any moment.

Seconds are those of ``plan.step()``, bytes those of ``plan.memory()``: this module only places them in time.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Literal, NamedTuple

from shardscope.core.errors import check_choice, refuse
from shardscope.prediction.pipeline import Pipeline, compute_pipeline
from shardscope.timing.calibration.selection import select_rates
from shardscope.timing.parallel import compute_recomputed_share
from shardscope.timing.pipeline import Pass, Schedule, find_schedule, iterate_passes, time_passes
from shardscope.timing.stages import PER_STEP_PARTS

if TYPE_CHECKING:
    from shardscope.core.plan import Plan
    from shardscope.memory.report import StageMemory
    from shardscope.timing.report import Part
    from shardscope.timing.stages import StageSeconds

BlockKind = Literal["forward", "backward", "send", "communication", "bubble", "update"]
SIMULATED: tuple[Schedule, ...] = ("gpipe", "1f1b", "interleaved")
"""Schedules that can be drawn for any pipeline; the zero-bubble ones only have a bubble, in closed form."""
_LAYER_COLLECTIVES: tuple[Part, ...] = ("tensor_parallel", "context_parallel", "expert_parallel")
_TOLERANCE = 1e-9
"""Share of the step below which two times are equal: sums of floats differ by rounding."""


class Block(NamedTuple):
    """One bar of a schedule."""

    stage: int
    kind: BlockKind
    """``send``: an exposed transfer between stages; ``communication``: other exposed collectives, drawn for a
    plan without a pipeline, and where the first micro-batch waits for all-gathered weights; ``update``: what
    follows the last micro-batch once a step."""
    start: float
    """Seconds from the start of the step."""
    end: float
    micro_batch: int = -1
    """Index of the micro-batch, from 0; -1: the block belongs to none."""
    chunk: int = 0
    """Model chunk of an interleaved schedule, from 0."""

    @property
    def seconds(self) -> float:
        """Duration."""
        return self.end - self.start


@dataclass(frozen=True, kw_only=True)
class PipelineSchedule:
    """Blocks of one optimizer step on one rank of each stage."""

    plan: Plan
    schedule: Schedule | None
    """None: a single stage."""
    num_stages: int
    num_chunks: int
    """Model chunks of each stage; more than 1 in an interleaved schedule."""
    num_micro_batches: int
    slowest_stage: int
    """The stage with the most seconds of work, whose parts ``plan.step()`` reports."""
    blocks: tuple[Block, ...]
    """Blocks of all stages, by stage and start; with its bubbles, a stage has no gap."""

    @cached_property
    def seconds(self) -> float:
        """Seconds until the slowest stage has ended.

        Equal to ``plan.step().seconds`` for equal stages, and where the last stage is the slowest, with a
        multiple of pp micro-batches if interleaved. For others, the closed formula of the bubble is an
        approximation.
        """
        return self.get_stage(self.slowest_stage)[-1].end

    @property
    def bubble_seconds(self) -> float:
        """Seconds that the slowest stage waits for others."""
        return sum(block.seconds for block in self.get_stage(self.slowest_stage) if block.kind == "bubble")

    @cached_property
    def _by_stage(self) -> tuple[tuple[Block, ...], ...]:
        return tuple(
            tuple(block for block in self.blocks if block.stage == stage) for stage in range(self.num_stages)
        )

    def get_stage(self, stage: int) -> tuple[Block, ...]:
        """Return the blocks of one stage in order."""
        return self._by_stage[stage]

    def find_block(self, stage: int, seconds: float) -> Block | None:
        """Return what a stage does at ``seconds``; None after its last block."""
        starts, blocks = self._starts[stage], self.get_stage(stage)
        block = blocks[max(0, bisect_right(starts, seconds + _TOLERANCE * self.seconds) - 1)]
        return block if seconds < block.end or block is not blocks[-1] else None

    @cached_property
    def _starts(self) -> tuple[list[float], ...]:
        return tuple([block.start for block in blocks] for blocks in self._by_stage)

    def count_in_flight(self, stage: int, seconds: float) -> int:
        """Return the chunks whose forward has begun and whose backward has not ended."""
        now = seconds + _TOLERANCE * self.seconds
        return bisect_right(self._forward_starts[stage], now) - bisect_right(self._backward_ends[stage], now)

    # A stage runs one pass at a time, so that both are ascending.

    @cached_property
    def _forward_starts(self) -> tuple[list[float], ...]:
        return tuple(
            [block.start for block in blocks if block.kind == "forward"] for blocks in self._by_stage
        )

    @cached_property
    def _backward_ends(self) -> tuple[list[float], ...]:
        return tuple([block.end for block in blocks if block.kind == "backward"] for blocks in self._by_stage)

    @cached_property
    def most_in_flight(self) -> tuple[int, ...]:
        """Highest number of chunks in flight, by stage."""
        return tuple(
            max(self.count_in_flight(stage, block.start) for block in blocks if block.kind == "forward")
            for stage, blocks in enumerate(self._by_stage)
        )

    @cached_property
    def event_times(self) -> tuple[float, ...]:
        """Start times of passes and updates in seconds, ascending, from 0 to the end of the step.

        Of times closer than half a forward only the last is included.
        """
        passes = [block for block in self.blocks if block.kind in ("forward", "backward", "update")]
        apart = min(block.seconds for block in passes if block.kind == "forward") / 2
        starts = sorted({block.start for block in passes})
        ends = [now for now, following in pairwise([*starts, float("inf")]) if following - now > apart]
        end = max(block.end for block in passes)
        return tuple(dict.fromkeys([0.0, *ends, end]))

    @cached_property
    def _memory(self) -> tuple[StageMemory, ...]:
        return self.plan.memory().by_stage

    @cached_property
    def _planned_in_flight(self) -> tuple[int, ...]:
        """Chunks in flight behind the bytes of ``plan.memory()``, under the plan's own schedule."""
        if self.schedule == find_schedule(self.plan):
            return self.most_in_flight
        return compute_schedule(self.plan).most_in_flight

    def compute_memory(self, stage: int, seconds: float) -> Mapping[str, int]:
        """Return the bytes of one stage at a moment, by component.

        The phases of ``plan.memory().by_stage`` hold the most micro-batches in flight. At other moments, the
        activations of those that are not in flight are subtracted, and fragmentation in proportion. Under a
        schedule that is not the plan's, a micro-batch in flight has the bytes that it has under the plan's.
        """
        memory, block = self._memory[stage], self.find_block(stage, seconds)
        if block is None:
            return memory.at("rest").components
        if block.kind == "update":
            return memory.at("optimizer").components
        in_flight = self.count_in_flight(stage, seconds)
        most = self._planned_in_flight[stage]
        each = memory.at("forward").components["activations"] / max(1, most * self._chunk_ratio)
        phase = memory.at("backward" if block.kind == "backward" else "forward").components
        parts = dict(phase)
        before = sum(parts[name] for name in ("activations", "logits", "gather_buffers"))
        missing = most * self._chunk_ratio - in_flight
        parts["activations"] = max(0, round(parts["activations"] - missing * each))
        if block.kind not in ("forward", "backward"):
            parts["logits"] = 0
        if not self._has_gradients(stage, seconds):
            parts["gradients"] = memory.at("rest").components["gradients"]
        after = sum(parts[name] for name in ("activations", "logits", "gather_buffers"))
        parts["fragmentation"] = parts["fragmentation"] * after // max(1, before)
        return parts

    @property
    def _chunk_ratio(self) -> float:
        """Chunks of this schedule for one chunk of the plan's: a chunk is smaller if a stage has more."""
        return self.num_chunks / self.plan.degrees.vpp

    def _has_gradients(self, stage: int, seconds: float) -> bool:
        now = seconds + _TOLERANCE * self.seconds
        return any(block.kind == "backward" and block.start <= now for block in self.get_stage(stage))


def compute_schedule(plan: Plan, schedule: Schedule | None = None) -> PipelineSchedule:
    """Return the blocks of the plan's step under its own schedule, or under another for comparison.

    A stage's seconds per micro-batch are ``plan.step()``'s, split evenly over its chunks, as in the formula
    of the bubble. The split into forward and backward is exact for arithmetic; a layer's exposed collectives
    are split by their number: as many in forward as in backward, and those of recomputation in backward. The
    update begins on all stages when the last backward has ended: the gradient norm is one of all stages.

    Raises ``ValueError`` for a schedule that the plan's stages cannot run, and for a figure of the GPU that
    is not known.
    """
    own = find_schedule(plan)
    if schedule is not None:
        check_choice("schedule", schedule, SIMULATED)
        if own is None:
            refuse("schedule", schedule, "none: the plan has one stage", "a layout with pp above 1")
    chosen = schedule or own
    pipeline = compute_pipeline(plan, select_rates(plan.cluster))
    if chosen is None:
        return _build_single_stage(plan, pipeline)
    pp, micro_batches, vpp = plan.degrees.pp, plan.num_micro_batches, plan.degrees.vpp
    chunks = max(2, vpp) if chosen == "interleaved" else 1
    if chunks > 1:
        _check_interleaved(plan, chunks)
    passes = [
        [Pass(*one) for one in iterate_passes(chosen, pp, chunks, stage, micro_batches)]
        for stage in range(pp)
    ]
    stages = [pipeline.kinds[kind] for kind in pipeline.kind_of]
    divisor = chunks * micro_batches
    # A pass and its transfer: half of a stage's transfers are in forward.
    sends = [stage.parts["pipeline_transfers"] / (2 * divisor) for stage in stages]
    forwards = [_compute_forward(plan, stage) / chunks for stage in stages]
    both = [stage.repeated / divisor - 2 * send for stage, send in zip(stages, sends, strict=True)]
    seconds = [
        (forward + send, total - forward + send)
        for forward, total, send in zip(forwards, both, sends, strict=True)
    ]
    # Interleaved, all stages all-gather their weights at once (``timing/traffic.py``).
    waits = [0.0 if chunks > 1 else stage.first_wait for stage in stages]
    times = time_passes(passes, seconds, waits)
    drained = max(end for spans in times for _, end in spans)
    blocks: list[Block] = []
    for number, stage in enumerate(stages):
        busy = []
        if waits[number]:
            first = times[number][0][0]
            busy.append(Block(number, "communication", first - waits[number], first))
        for one, (start, end) in zip(passes[number], times[number], strict=True):
            busy += _split_pass(one, number, start, end, sends[number], chunks, pp)
        updated = drained + _sum_parts(stage, PER_STEP_PARTS) - waits[number]
        busy.append(Block(number, "update", drained, updated))
        blocks += _fill_bubbles(number, busy, drained)
    return PipelineSchedule(
        plan=plan,
        schedule=chosen,
        num_stages=pp,
        num_chunks=chunks,
        num_micro_batches=micro_batches,
        slowest_stage=next(
            number for number, kind in enumerate(pipeline.kind_of) if pipeline.kinds[kind] is pipeline.slowest
        ),
        blocks=tuple(blocks),
    )


def _check_interleaved(plan: Plan, chunks: int) -> None:
    pp, micro_batches = plan.degrees.pp, plan.num_micro_batches
    if plan.degrees.vpp == 1 and min(plan.stage_layers) < chunks:
        refuse("schedule", "interleaved", f"stages of at least {chunks} layers", "'1f1b'")
    if micro_batches % max(1, micro_batches // pp):
        refuse(
            "schedule",
            "interleaved",
            f"micro-batches in equal rounds of about pp={pp}; the plan has {micro_batches}",
            "'1f1b'",
        )


def _compute_forward(plan: Plan, stage: StageSeconds) -> float:
    """Return the seconds of one micro-batch's forward, its exposed collectives included."""
    exposed = _sum_parts(stage, _LAYER_COLLECTIVES) / plan.num_micro_batches
    return stage.forward + exposed / (2 + compute_recomputed_share(plan))


def _sum_parts(stage: StageSeconds, names: Sequence[Part]) -> float:
    return sum(stage.parts[name] for name in names)


def _split_pass(
    one: Pass, stage: int, start: float, end: float, send: float, chunks: int, pp: int
) -> list[Block]:
    """Return the block of a pass and that of its transfer.

    The transfer follows the pass; at the model's end there is nothing to send, and the pass waits to receive.
    """
    kind: BlockKind = "forward" if one.is_forward else "backward"
    names = (one.micro_batch, one.chunk)
    if not send:
        return [Block(stage, kind, start, end, *names)]
    at_end = (stage, one.chunk) == ((pp - 1, chunks - 1) if one.is_forward else (0, 0))
    if at_end:
        return [
            Block(stage, "send", start, start + send, *names),
            Block(stage, kind, start + send, end, *names),
        ]
    return [Block(stage, kind, start, end - send, *names), Block(stage, "send", end - send, end, *names)]


def _fill_bubbles(stage: int, busy: Sequence[Block], drained: float) -> list[Block]:
    """Return the blocks of a stage with bubbles where it waits."""
    blocks: list[Block] = []
    now = 0.0
    for block in busy:
        if block.start - now > _TOLERANCE * drained:
            blocks.append(Block(stage, "bubble", now, block.start))
        blocks.append(block)
        now = block.end
    return blocks


def _build_single_stage(plan: Plan, pipeline: Pipeline) -> PipelineSchedule:
    """Return the step of a plan without a pipeline: its micro-batches one after another.

    Exposed all-gathers and gradient reductions are one block after the last backward, whenever they occur.
    """
    stage, micro_batches = pipeline.slowest, plan.num_micro_batches
    exposed = _sum_parts(stage, _LAYER_COLLECTIVES) / micro_batches
    in_forward = exposed / (2 + compute_recomputed_share(plan))
    repeated = (
        ("forward", stage.forward),
        ("communication", in_forward),
        ("backward", stage.repeated / micro_batches - stage.forward - exposed),
        ("communication", exposed - in_forward),
    )
    parts = plan.step().parts
    ending = (
        ("communication", parts["gathers"] + parts["gradients"]),
        ("update", parts["optimizer"] + parts["offload"] - stage.copied),
    )
    blocks: list[Block] = []
    now = 0.0

    def add(kind: BlockKind, seconds: float, number: int = -1) -> None:
        nonlocal now
        if seconds > 0 or kind in ("forward", "backward", "update"):
            blocks.append(Block(0, kind, now, now + seconds, number))
            now += seconds

    for number in range(micro_batches):
        for kind, seconds in repeated:
            add(kind, seconds, number)  # type: ignore[arg-type]
    for kind, seconds in ending:
        add(kind, seconds)  # type: ignore[arg-type]
    return PipelineSchedule(
        plan=plan,
        schedule=None,
        num_stages=1,
        num_chunks=1,
        num_micro_batches=micro_batches,
        slowest_stage=0,
        blocks=tuple(blocks),
    )
