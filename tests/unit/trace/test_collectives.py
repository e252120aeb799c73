"""Tests of collectives and stragglers on hand-made traces with known answers."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.requirements import thorough
from trace_events import (
    Events,
    all_reduce,
    annotation,
    copy,
    gpu_events,
    kernel,
    launch,
    load_ranks,
    operator,
    step,
    to_ns,
    write_ranks,
)

import shardscope as ss
from shardscope.trace import Trace
from shardscope.trace.analysis.collective_calls import name_kind
from shardscope.trace.analysis.collectives import find_bus_factor
from shardscope.trace.analysis.groups import find_axis

COLUMNS = [
    "rank",
    "name",
    "kind",
    "group",
    "axis",
    "num_bytes",
    "skew_seconds",
    "transfer_seconds",
    "algorithm_bandwidth",
    "bus_bandwidth",
    "exposed_seconds",
]


def arguments(kind: str, elements: int, size: int, group: str = "0", **more: Any) -> dict[str, Any]:
    return {
        "Collective name": kind,
        "In msg nelems": elements,
        "Out msg nelems": elements,
        "Group size": size,
        "dtype": "BFloat16",
        "Process Group Name": group,
        "Process Group Ranks": str(list(range(size))),
        **more,
    }


def test_collectives_of_something_else_than_a_plan_raise_with_the_field(tmp_path: Path) -> None:
    trace = load_ranks(tmp_path, {0: [kernel(0, 10)]})
    with pytest.raises(ValueError, match="collectives"):
        trace.collectives("llama")  # type: ignore[arg-type]


def test_the_shortest_duration_is_the_transfer_and_the_rest_is_skew(tmp_path: Path) -> None:
    """TraceLens's rule: three ranks arrive at 0, 100 and 300 and leave together at 1,000."""
    args = arguments("allreduce", 3_000_000, 3)
    trace = load_ranks(
        tmp_path, {rank: [all_reduce(start, 1000, **args)] for rank, start in enumerate((0, 100, 300))}
    )
    rows = trace.collectives()
    assert [to_ns(row["transfer_seconds"]) for row in rows] == [700] * 3
    assert [to_ns(row["skew_seconds"]) for row in rows] == [300, 200, 0]
    assert [row["num_bytes"] for row in rows] == [6_000_000] * 3
    assert rows[0]["algorithm_bandwidth"] == pytest.approx(6e6 / 700e-9)
    assert rows[0]["bus_bandwidth"] == pytest.approx(6e6 / 700e-9 * 2 * 2 / 3)
    assert len({row["call"] for row in rows}) == 1
    assert list(rows.to_frame().columns) == COLUMNS


def test_clocks_do_not_matter_for_the_skew_of_named_groups(tmp_path: Path) -> None:
    args = arguments("allreduce", 8, 2)
    here, there = [all_reduce(0, 500, **args)], [all_reduce(5000, 5100, **args), kernel(0, 1)]
    rows = load_ranks(tmp_path, {0: here, 1: there}).collectives()
    assert [to_ns(row["skew_seconds"]) for row in rows] == [400, 0]


def test_full_vector_bytes_of_gathers_and_scatters(tmp_path: Path) -> None:
    events = [
        kernel(
            0, 10, "ncclDevKernel_AllGather", **arguments("_allgather_base", 50, 2) | {"Out msg nelems": 100}
        ),
        kernel(
            20,
            30,
            "ncclDevKernel_ReduceScatter",
            **arguments("_reduce_scatter_base", 100, 2) | {"Out msg nelems": 50},
        ),
        kernel(40, 50, "ncclDevKernel_SendRecv", **arguments("all_to_allv", 70, 2)),
    ]
    rows = load_ranks(tmp_path, {0: events, 1: events}).collectives()[:3]
    assert [(row["kind"], row["num_bytes"]) for row in rows] == [
        ("all_gather", 200),
        ("reduce_scatter", 200),
        ("all_to_all", 140),
    ]
    assert [row["bus_bandwidth"] / row["algorithm_bandwidth"] for row in rows] == [0.5, 0.5, 0.5]


def test_a_single_rank_of_many_has_no_transfer_time(tmp_path: Path) -> None:
    trace = load_ranks(tmp_path, {3: [all_reduce(0, 10, **arguments("allreduce", 8, 4))]})
    (row,) = trace.collectives()
    assert (row["skew_seconds"], row["transfer_seconds"], row["bus_bandwidth"]) == (None, None, None)
    assert to_ns(row["exposed_seconds"]) == 10 and row["call"] == -1
    assert "unknown, one rank" in trace.stragglers().text
    assert "Load the folder with the files of all ranks." in trace.stragglers().text


def test_ranks_that_recorded_other_steps_match_by_step(tmp_path: Path) -> None:
    """The second rank's profiler began a step later: its first call is the first one's second."""
    args = arguments("allreduce", 8, 2)
    first = [step(1, 0, 100), step(2, 100, 200), all_reduce(10, 90, **args), all_reduce(110, 190, **args)]
    second = [step(2, 100, 200), all_reduce(160, 190, **args)]
    rows = load_ranks(tmp_path, {0: first, 1: second}).collectives()
    assert [row["transfer_seconds"] for row in rows] == [None, pytest.approx(30e-9), pytest.approx(30e-9)]
    assert to_ns(rows[1]["skew_seconds"]) == 50


@pytest.mark.parametrize(("steps", "num_common"), [((2, 3), 1), ((4, 5), 0)])
def test_as_many_calls_of_other_steps_are_other_calls(
    tmp_path: Path, steps: tuple[int, int], num_common: int
) -> None:
    args = arguments("allreduce", 8, 2)
    ranks = {
        rank: [
            event
            for number in recorded
            for event in (
                step(number, 100 * number, 100 * number + 100),
                all_reduce(100 * number + 10 * rank, 100 * number + 90, **args),
            )
        ]
        for rank, recorded in enumerate([(1, 2), steps])
    }
    rows = load_ranks(tmp_path, ranks).collectives()
    known = [row for row in rows if row["transfer_seconds"] is not None]
    assert len(rows) == 4 and len(known) == 2 * num_common
    assert all(to_ns(row["transfer_seconds"]) == 80 for row in known)
    assert len({row["call"] for row in known}) == num_common


def test_pipeline_messages_of_larger_groups_are_not_paired(tmp_path: Path) -> None:
    """A middle stage sends and receives: its n-th message is not the first stage's n-th."""
    args = arguments("send", 8, 3)
    events = [kernel(0, 10, "ncclDevKernel_SendRecv", **args)]
    rows = load_ranks(tmp_path, {0: events, 1: [*events, *events], 2: events}).collectives()
    assert all(row["transfer_seconds"] is None for row in rows)


def test_older_recordings_have_kind_and_bytes_in_the_annotation_around_the_launch(tmp_path: Path) -> None:
    """Before Kineto named collectives in kernels, the CPU operators around the launch had them."""
    events = [
        operator(0, 90, "record_param_comms"),
        annotation(5, 80, "nccl:all_reduce", **{"Input Dims": [[10, 10]], "Input type": ["float"]}),
        launch(10, 20, 1),
        kernel(100, 200, "ncclKernel_SendRecv_RING", correlation=1),
    ]
    (row,) = load_ranks(tmp_path, {0: events}).collectives()
    assert (row["kind"], row["num_bytes"]) == ("all_reduce", 400)


def test_gloo_ranks_have_the_same_table(tmp_path: Path) -> None:
    shard = {"Input Dims": [[100]], "Input type": ["float"]}
    groups = [{"pg_name": "0", "pg_desc": "default_pg", "pg_size": 2, "ranks": [0, 1]}]
    ranks = {
        rank: [operator(0, 40), annotation(start, 100, "gloo:all_gather", tid=200, **shard)]
        for rank, start in enumerate((30, 60))
    }
    trace = load_ranks(tmp_path, ranks, info={"backend": "gloo", "pg_config": groups})
    rows = trace.collectives()
    assert [(row["kind"], row["num_bytes"]) for row in rows] == [("all_gather", 800)] * 2
    assert [to_ns(row["skew_seconds"]) for row in rows] == [30, 0]
    assert [to_ns(row["exposed_seconds"]) for row in rows] == [60, 40]


def test_calls_without_a_group_match_only_if_they_run_at_the_same_time(tmp_path: Path) -> None:
    """Two pairs of tensor-parallel ranks on gloo: nothing names the group of each."""
    shape = {"Input Dims": [[100]], "Input type": ["float"]}
    trace = load_ranks(
        tmp_path,
        {
            0: [annotation(0, 50, "gloo:all_reduce", **shape), operator(0, 1)],
            1: [annotation(60, 99, "gloo:all_reduce", **shape), operator(0, 1)],
        },
    )
    assert all(row["transfer_seconds"] is None for row in trace.collectives())


def make_gloo_mesh(num_calls: int = 20) -> tuple[dict[int, Events], dict[str, Any]]:
    """Return four CPU ranks with tp pairs (0, 1) and (2, 3): unnamed calls of tp, of dp and of all."""
    random = np.random.default_rng(3)
    ranks: dict[int, Events] = {rank: [operator(0, 1)] for rank in range(4)}
    meshes = [("tp", [(0, 1), (2, 3)], 100), ("dp", [(0, 2), (1, 3)], 200), ("all", [(0, 1, 2, 3)], 1)]
    now = 10
    for _ in range(num_calls):
        for _, groups, elements in meshes:
            for group in groups:
                # Each group has its own time within the step, and its ranks leave within 50 ns.
                begin = now + int(random.integers(0, 100_000)) * (len(groups) > 1)
                end = begin + 20_000
                for rank in group:
                    left = end + int(random.integers(0, 50))
                    shape = {"Input Dims": [[elements]], "Input type": ["float"]}
                    start = begin + int(random.integers(0, 15_000))
                    ranks[rank].append(annotation(start, left, "gloo:all_reduce", 200, **shape))
            now += 150_000
    descriptions = {
        (0, 1): "TENSOR_MODEL_PARALLEL_GROUP",
        (2, 3): "TENSOR_MODEL_PARALLEL_GROUP",
        (0, 2): "DATA_PARALLEL_GROUP",
        (1, 3): "DATA_PARALLEL_GROUP",
        (0, 1, 2, 3): "default_pg",
    }
    config = [
        {"pg_name": str(number), "pg_desc": text, "pg_size": len(members), "ranks": list(members)}
        for number, (members, text) in enumerate(descriptions.items())
    ]
    return ranks, {"backend": "gloo", "pg_config": config}


def test_groups_of_gloo_calls_are_inferred_from_ranks_that_leave_together(tmp_path: Path) -> None:
    ranks, info = make_gloo_mesh()
    rows = load_ranks(tmp_path, ranks, info=info).collectives()
    axes = {100: "tp", 200: "dp", 1: ""}
    assert {(row["num_bytes"], row["axis"]) for row in rows} == {(4 * n, axis) for n, axis in axes.items()}
    members: dict[int, set[int]] = {}
    for row in rows:
        members.setdefault(row["call"], set()).add(row["rank"])
    assert sorted({tuple(sorted(one)) for one in members.values()}) == [
        (0, 1),
        (0, 1, 2, 3),
        (0, 2),
        (1, 3),
        (2, 3),
    ]


@pytest.mark.parametrize("missing", range(4))
def test_groups_of_gloo_calls_are_inferred_without_a_ranks_file(tmp_path: Path, missing: int) -> None:
    ranks, info = make_gloo_mesh()
    del ranks[missing]
    rows = load_ranks(tmp_path, ranks, info=info | {"world_size": 4}).collectives()
    axes = {100: "tp", 200: "dp", 1: ""}
    assert {(row["num_bytes"], row["axis"]) for row in rows} == {(4 * n, axis) for n, axis in axes.items()}
    together = {
        tuple(sorted(row["rank"] for row in rows if row["call"] == call))
        for call in {row["call"] for row in rows} - {-1}
    }
    pairs = {pair for pair in [(0, 1), (2, 3), (0, 2), (1, 3)] if missing not in pair}
    assert together == {*pairs, tuple(sorted(ranks))}


def test_one_pair_of_a_mesh_is_in_its_own_group(tmp_path: Path) -> None:
    """Nothing tells its calls from those of all four ranks, but these are rare."""
    ranks, info = make_gloo_mesh()
    rows = load_ranks(tmp_path, {rank: ranks[rank] for rank in (0, 1)}, info=info).collectives()
    assert {row["axis"] for row in rows if row["num_bytes"] == 400} == {"tp"}


def test_groups_of_calls_at_unrelated_times_stay_unknown(tmp_path: Path) -> None:
    """Clocks that differ by more than a call: nothing shows which ranks were together."""
    ranks, info = make_gloo_mesh()
    for rank, events in ranks.items():
        for event in events[1:]:
            event["ts"] += 40 * rank
    rows = load_ranks(tmp_path, ranks, info=info).collectives()
    assert all(row["transfer_seconds"] is None and row["axis"] == "" for row in rows)


def test_the_shapes_of_a_request_say_how_many_ranks_a_group_of_gloo_has(tmp_path: Path) -> None:
    """All ranks reduce their gradients at a time, each with its data-parallel group of two."""
    ranks, info = make_gloo_mesh()
    shapes = {"Input Dims": [[500], [1000]], "Input type": ["float", "float"]}
    for number in range(3):
        now = 10_000_000 + 3_000_000 * number
        for rank, events in ranks.items():
            # The ranks of dp leave at once, and all four within twice the time.
            left = now + 2_000_000 + 2_000 * (rank % 2) + 1_500 * (rank // 2)
            events.append(operator(now, left, "c10d::_reduce_scatter_base_", **shapes))
            full = {"Input Dims": [[1000]], "Input type": ["float"]}
            events.append(annotation(now, left, "gloo:all_reduce", 200, **full))
    trace = load_ranks(tmp_path, ranks, info=info)
    calls = trace.collectives()
    gradients = [row for row in calls if row["num_bytes"] == 4000]
    assert {row["axis"] for row in gradients} == {"dp"} and len(gradients) == 12
    # Groups of two ranks: the factor of an all-reduce is one.
    assert all(row["bus_bandwidth"] == row["algorithm_bandwidth"] for row in gradients)
    assert all(row["is_reduce_scatter"] == (row["num_bytes"] == 4000) for row in calls)
    exposed = [one.text for one in trace.summary().findings if one.text.startswith("Exposed all-reduce")]
    assert ["gloo runs them" in text for text in exposed] == [" of dp: " in text for text in exposed]


@pytest.mark.parametrize("has_shapes", [True, False])
def test_a_group_of_one_rank_is_not_the_only_one_of_several(tmp_path: Path, has_shapes: bool) -> None:
    """Pipeline stages of one rank each: Megatron reduces gradients, and the last stage's loss, alone."""
    group = {"pg_name": "1", "pg_desc": "PIPELINE_MODEL_PARALLEL_GROUP", "pg_size": 2, "ranks": [0, 1]}

    def shape(*sizes: int) -> dict[str, Any]:
        return (
            {"Input Dims": [[n] for n in sizes], "Input type": ["float"] * len(sizes)} if has_shapes else {}
        )

    ranks: dict[int, Events] = {}
    for rank in (0, 1):
        ranks[rank] = [
            operator(0, 10, "c10d::allreduce_"),
            annotation(5, 50, "gloo:all_reduce", 200, **shape(1)),
        ]
    ranks[1] += [
        operator(60, 70, "_VocabParallelCrossEntropy"),
        operator(61, 69, "c10d::allreduce_"),
        annotation(65, 75, "gloo:all_reduce", 200, **shape(64)),
    ]
    if has_shapes:
        for events in ranks.values():
            events.append(operator(80, 90, "c10d::_reduce_scatter_base_", **shape(500, 500)))
            events.append(annotation(85, 95, "gloo:all_reduce", 200, **shape(500)))
    rows = load_ranks(tmp_path, ranks, info={"backend": "gloo", "pg_config": [group]}).collectives(
        ss.Plan(PLAN.architecture, ss.Cluster.parse("2xcpu"), ss.Recipe(), ss.Layout.megatron(pp=2))
    )
    axes = {to_ns(row["start_seconds"]): row["axis"] for row in rows}
    assert axes == ({5: "pp", 65: "", 85: ""} if has_shapes else {5: "pp", 65: ""})
    assert all(row["transfer_seconds"] is None for row in rows if not row["axis"])


def test_what_one_rank_of_a_pipeline_calls_alone_is_along_no_axis(tmp_path: Path) -> None:
    """Of ranks in two groups, as the first and last stage with embeddings, it counted as the pipeline's."""
    groups = [
        {"pg_name": "1", "pg_desc": "PIPELINE_MODEL_PARALLEL_GROUP", "pg_size": 3, "ranks": [0, 1, 2]},
        {"pg_name": "2", "pg_desc": "EMBEDDING_GROUP", "pg_size": 2, "ranks": [0, 2]},
    ]

    def call(begin: int, name: str, *sizes: int) -> Events:
        shape = {"Input Dims": [[size] for size in sizes], "Input type": ["float"] * len(sizes)}
        end = begin + 20
        return [operator(begin, end, name, **shape), annotation(begin, end, "gloo:all_reduce", 200, **shape)]

    ranks: dict[int, Events] = {}
    for rank in range(3):
        ranks[rank] = call(100, "c10d::_reduce_scatter_base_", 500 + rank, 500 + rank)
        info = {"backend": "gloo", "world_size": 3, "pg_config": groups if rank != 1 else groups[:1]}
        ranks[rank] += call(0, "c10d::allreduce_", 64) if rank == 2 else []
        write_ranks(tmp_path, {rank: ranks[rank]}, info=info | {"rank": rank})
    plan = ss.Plan(PLAN.architecture, ss.Cluster.parse("3xcpu"), ss.Recipe(), ss.Layout.megatron(pp=3, tp=1))
    rows = Trace.load(tmp_path).collectives(plan)
    assert [(row["axis"], row["group_size"]) for row in rows] == [("", 1)] * 4


def test_gloo_calls_of_one_size_that_begin_in_another_order_are_told_by_their_shape(tmp_path: Path) -> None:
    """As of Megatron's gradient norm and flag of overflows, requested together and run by two threads."""
    group = {"pg_name": "1", "pg_desc": "PIPELINE_MODEL_PARALLEL_GROUP", "pg_size": 2, "ranks": [0, 1]}
    other = {"pg_name": "2", "pg_desc": "EMBEDDING_GROUP", "pg_size": 2, "ranks": [0, 1]}
    ranks: dict[int, Events] = {}
    for rank in (0, 1):
        ranks[rank] = []
        for number in range(10):
            begin = 1_000 * number
            for name, shape, start, end in (("norm", [], 10, 500), ("flag", [1], 12, 300)):
                start = start + 4 * (name == "norm" and rank == number % 2)
                args = {"Input Dims": [shape], "Input type": ["float"]}
                ranks[rank].append(operator(begin, begin + 9, name))
                ranks[rank].append(operator(begin + 2, begin + 8, "c10d::allreduce_"))
                thread = 200 + len(shape)
                ranks[rank].append(annotation(begin + start, begin + end, "gloo:all_reduce", thread, **args))
    info = {"backend": "gloo", "pg_config": [group, other]}
    rows = load_ranks(tmp_path, ranks, info=info).collectives()
    skews = [to_ns(row["skew_seconds"]) for row in rows if row["skew_seconds"] is not None]
    # The flags begin and end together, and one of the ranks begins each norm 4 ns later.
    assert len(skews) == 40 and sorted(skews) == [0] * 30 + [4] * 10


@pytest.mark.parametrize("num_others", [0, 1])
def test_gloo_calls_of_one_collective_may_have_other_shapes_on_some_ranks(
    tmp_path: Path, num_others: int
) -> None:
    """Such as a loss, [] in the last stage and [1] in the others: no rank was compared with another one."""
    ranks: dict[int, Events] = {0: [], 1: []}
    for rank, shape in ((0, [1]), (1, [])):
        for number in range(10):
            for call, one in enumerate([shape, *([[1]] * num_others)]):
                begin = 1_000 * number + 400 * call
                args = {"Input Dims": [one], "Input type": ["float"]}
                ranks[rank].append(operator(begin, begin + 9, "c10d::allreduce_"))
                start = begin + 10 + 50 * rank
                ranks[rank].append(annotation(start, begin + 300, "gloo:all_reduce", 200, **args))
    rows = load_ranks(tmp_path, ranks, info={"backend": "gloo"}).collectives()
    assert len(rows) == 20 * (1 + num_others)
    assert [to_ns(row["skew_seconds"] or 0) for row in rows] == [50 * (row["rank"] == 0) for row in rows]


@pytest.mark.parametrize("odd", ["absent", "stopped", "sizes"])
def test_a_rank_with_other_calls_leaves_the_others_in_their_group(tmp_path: Path, odd: str) -> None:
    """Of three ranks, one recorded no call, or fewer than the others; or each gathers another size."""
    name, kind = "c10d::allreduce_", "gloo:all_reduce"
    if odd == "sizes":
        name, kind = "c10d::alltoall_base_", "gloo:all_to_all"
    ranks: dict[int, Events] = {rank: [operator(0, 1)] for rank in range(3)}
    for rank, events in ranks.items():
        shape = {"Input Dims": [[100 + rank * (odd == "sizes")]], "Input type": ["float"]}
        for number in range({"absent": 0, "stopped": 2, "sizes": 4}[odd] if rank == 2 else 4):
            begin = 1_000 * (number + 1)
            around = "loss" if number == 3 else "backward"
            events += [
                step(number, begin, begin + 900),
                operator(begin, begin + 100, around),
                operator(begin + 10, begin + 90, name),
                annotation(begin + 20, begin + 500, kind, 200, **shape),
            ]
    group = {"pg_name": "0", "pg_desc": "DATA_PARALLEL_GROUP", "pg_size": 3, "ranks": [0, 1, 2]}
    rows = load_ranks(tmp_path, ranks, info={"backend": "gloo", "pg_config": [group]}).collectives()
    assert {row["axis"] for row in rows} == {"dp"}
    # Of two ranks all four calls, and of three ranks those of the steps that all of them recorded.
    num_matched = sum(row["transfer_seconds"] is not None for row in rows)
    assert num_matched == {"absent": 2 * 4, "stopped": 3 * 2, "sizes": 0}[odd]


def test_a_mesh_whose_ranks_lost_a_request_is_still_inferred(tmp_path: Path) -> None:
    ranks, info = make_gloo_mesh()
    for rank, events in ranks.items():
        calls = [event for event in events if event["name"] == "gloo:all_reduce"]
        for event in calls[: len(calls) - (rank == 3)]:
            begin = round(1000 * event["ts"])
            events.append(operator(begin - 9, begin - 1, "c10d::allreduce_"))
    rows = load_ranks(tmp_path, ranks, info=info).collectives()
    axes = {100: "tp", 200: "dp", 1: ""}
    assert {(row["num_bytes"], row["axis"]) for row in rows} == {(4 * n, axis) for n, axis in axes.items()}


def test_without_shapes_calls_are_told_apart_by_what_requested_them(tmp_path: Path) -> None:
    """A step has many reductions of tensor-parallel activations, and one of gradients at its end."""
    ranks, info = make_gloo_mesh(0)
    layers, gradients = [(0, 1), (2, 3)], [(0, 2), (1, 3)]
    now = 1_000
    for number in range(60):
        groups, around = (gradients, "optimizer") if number % 20 == 19 else (layers, "LinearBackward")
        for position, members in enumerate(groups):
            # Ranks of a group leave within 2 ns; the other group's calls do not overlap with these.
            begin = now + 5_000 * position
            for rank in members:
                ranks[rank] += [
                    operator(begin, begin + 100, around),
                    operator(begin + 10, begin + 90, "c10d::allreduce_"),
                    annotation(begin + 20, begin + 2_000 + rank, "gloo:all_reduce", 200),
                ]
        now += 20_000
    rows = load_ranks(tmp_path, ranks, info=info).collectives()
    axes = [row["axis"] for row in sorted(rows, key=lambda row: row["start_seconds"]) if row["rank"] == 0]
    assert axes == [*["tp"] * 19, "dp"] * 3


def test_groups_that_are_as_likely_as_others_stay_unknown(tmp_path: Path) -> None:
    """Without shapes: rank 3 enters when rank 0 has left, so either of the others may be with either."""
    ranks, info = make_gloo_mesh(0)
    for number in range(9):
        for rank, events in ranks.items():
            begin, left = ((0, 50), (0, 90), (0, 90), (60, 90))[rank]
            now = 1_000 * number
            events.append(annotation(now + begin, now + left, "gloo:all_reduce", 200))
    rows = load_ranks(tmp_path, ranks, info=info).collectives()
    assert {row["axis"] for row in rows} == {""}


def test_messages_of_gloo_are_those_of_pipeline_stages(tmp_path: Path) -> None:
    shape = {"Input Dims": [[8]], "Input type": ["float"]}
    ranks = {
        rank: [operator(0, 10), annotation(10, 20, f"gloo:{name}", 200, **shape)]
        for rank, name in ((0, "send"), (1, "recv"))
    }
    trace = load_ranks(tmp_path, ranks, info={"backend": "gloo"})
    cluster, recipe = ss.Cluster.parse("8xh100-sxm-80gb"), ss.Recipe()
    for layout, axis in (
        (ss.Layout.fsdp2(pp=2), "pp"),
        (ss.Layout.megatron(cp=2), "cp"),
        (ss.Layout.megatron(cp=2, pp=2), ""),
    ):
        plan = ss.Plan(ss.models["llama-3.1-8b"], cluster, recipe, layout)
        assert {row["axis"] for row in trace.collectives(plan)} == {axis}
    assert {row["axis"] for row in trace.collectives()} == {""}


@pytest.mark.parametrize("is_gloo", [True, False])
def test_a_send_is_paired_with_its_receive(tmp_path: Path, is_gloo: bool) -> None:
    """In 1F1B a stage sends twice before the next one sends for the first time: both were one message."""
    shape = {"Input Dims": [[8]], "Input type": ["float"]}

    def message(name: str, start: int, end: int) -> dict[str, Any]:
        if is_gloo:
            return annotation(start, end, f"gloo:{name}", 200 + start, **shape)
        return kernel(start, end, "ncclDevKernel_SendRecv", 20 + start, **arguments(name, 8, 2))

    ranks = {
        0: [message("send", 10, 20), message("send", 30, 60), message("recv", 31, 60)],
        1: [message("recv", 0, 20), message("send", 50, 60), message("recv", 51, 60)],
    }
    ranks = {rank: [operator(0, 1) if is_gloo else kernel(0, 1), *events] for rank, events in ranks.items()}
    groups = [{"pg_name": "0", "pg_desc": "default_pg", "pg_size": 2, "ranks": [0, 1]}]
    rows = load_ranks(tmp_path, ranks, info={"pg_config": groups}).collectives()
    calls: dict[int, list[tuple[int, int]]] = {}
    for row in rows:
        calls.setdefault(row["call"], []).append((row["rank"], to_ns(row["start_seconds"])))
    assert sorted(calls.values()) == [[(0, 10), (1, 0)], [(0, 30), (1, 51)], [(0, 31), (1, 50)]]
    assert [to_ns(row["transfer_seconds"]) for row in rows] == [10, 9, 10, 10, 10, 9]


@given(st.lists(gpu_events(), min_size=1, max_size=3))
def test_exposed_times_add_up_and_nothing_is_negative(ranks: list[Events]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        trace = load_ranks(Path(folder), dict(enumerate(ranks)))
    rows = trace.collectives()
    for of_rank in trace.breakdown():
        exposed = sum(to_ns(row["exposed_seconds"]) for row in rows if row["rank"] == of_rank["rank"])
        assert exposed == to_ns(of_rank["exposed_communication_seconds"])
    for row in rows:
        assert row["exposed_seconds"] >= 0 and (row["skew_seconds"] or 0) >= 0
        if row["transfer_seconds"] is not None:
            assert to_ns(row["skew_seconds"] + row["transfer_seconds"]) == to_ns(row["seconds"])


PLAN = ss.Plan(
    ss.models["llama-3.1-8b"],
    ss.Cluster.parse("2x8xh100-sxm-80gb"),
    ss.Recipe(global_batch_size=64),
    ss.Layout.megatron(tp=2, pp=2, cp=2),
)


@pytest.mark.parametrize(
    ("ranks", "description", "axis"),
    [
        ((0, 1), "", "tp"),
        ((0, 2), "", "cp"),
        ((0, 4), "", "dp"),
        ((0, 8), "", "pp"),
        ((0, 2, 4, 6), "", "cp+dp"),
        (tuple(range(16)), "default_pg", "tp+cp+dp+pp"),
        (None, "TENSOR_MODEL_PARALLEL_GROUP", "tp"),
        (None, "DATA_PARALLEL_GROUP_WITH_CP", "dp"),
        (None, "EXPERT_DATA_PARALLEL_GROUP", "dp"),
        (None, "EXPERT_MODEL_PARALLEL_GROUP", "ep"),
        (None, "PIPELINE_MODEL_PARALLEL_GROUP", "pp"),
        (None, "CONTEXT_PARALLEL_GROUP", "cp"),
        (None, "mesh_dp_shard", "dp"),
        (None, "mesh_tp", "tp"),
        (None, "default_pg", ""),
        (None, "TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP", ""),
        (None, "INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP", ""),
    ],
)
def test_the_axis_of_a_group_comes_from_the_mesh_or_its_name(
    ranks: tuple[int, ...] | None, description: str, axis: str
) -> None:
    assert find_axis(ranks, description, PLAN.degrees) == axis


def test_expert_parallel_groups_are_neighbours_among_data_parallel_ranks() -> None:
    degrees = ss.Plan(
        ss.models["mixtral-8x7b"],
        ss.Cluster.parse("8xh100-sxm-80gb"),
        ss.Recipe(),
        ss.Layout.zero(stage=1, ep=4),
    ).degrees
    assert find_axis((0, 1, 2, 3), "", degrees) == "ep"
    assert find_axis((0, 4), "", degrees) == "dp"


def test_what_if_without_an_axis_and_with_a_faster_link(tmp_path: Path) -> None:
    """A step of 1,000 has 300 of exposed transfer on tp; of dp's 200, compute hides 150."""
    events = [
        step(1, 0, 1000),
        kernel(0, 500),
        all_reduce(
            500, 800, **arguments("allreduce", 8, 2, "tp", **{"Process Group Description": "mesh_tp"})
        ),
        all_reduce(
            350, 550, 21, **arguments("allreduce", 8, 2, "dp", **{"Process Group Description": "mesh_dp"})
        ),
    ]
    calls = load_ranks(tmp_path, {0: events, 1: events}).collectives()
    by_axis = {row["axis"]: row for row in calls.sum_by_axis()}
    # From 500 to 550 both run: the time counts for the earlier one.
    assert {axis: to_ns(row["exposed_seconds"]) for axis, row in by_axis.items()} == {"tp": 250, "dp": 50}
    assert to_ns(calls.what_if("tp").changed_seconds) == 750
    assert to_ns(calls.what_if("tp", link_speed=2).changed_seconds) == 850
    assert to_ns(calls.what_if("dp", link_speed=2).changed_seconds) == 950
    assert to_ns(calls.what_if("tp", link_speed=0.5).changed_seconds) == 1300
    assert "a step would take" in str(calls.what_if("tp"))
    with pytest.raises(ValueError, match="'pp' has no collectives"):
        calls.what_if("pp")
    with pytest.raises(ValueError, match="not positive"):
        calls.what_if("tp", 0)


def test_what_if_says_that_messages_of_stages_include_the_bubble(tmp_path: Path) -> None:
    """A stage that waits for the work of another is in a receive: no link makes that shorter. A ring of
    context-parallel ranks has no stages.
    """
    messages = [kernel(500, 800, "ncclDevKernel_SendRecv", 20, **arguments("recv", 8, 2, "pp"))]
    reduction = [all_reduce(500, 800, **arguments("allreduce", 8, 2, "dp"))]
    for name, calls in (("pp", messages), ("dp", reduction)):
        events = [step(1, 0, 1000), kernel(0, 500), *calls]
        answer = load_ranks(tmp_path / name, {0: events, 1: events}).collectives().what_if("")
        assert to_ns(answer.changed_seconds) == 700
        assert ("bubble" in str(answer)) is (name == "pp")
    described = {"Process Group Description": "mesh_cp"}
    events = [
        step(1, 0, 1000),
        kernel(0, 500),
        kernel(500, 800, "ncclDevKernel_SendRecv", 20, **arguments("recv", 8, 2, "cp", **described)),
    ]
    ring = load_ranks(tmp_path / "cp", {0: events, 1: events}).collectives().what_if("cp")
    assert to_ns(ring.changed_seconds) == 700 and "bubble" not in str(ring)


def test_what_if_names_the_axes_that_a_trace_has(tmp_path: Path) -> None:
    events = [step(1, 0, 1000), kernel(0, 500), all_reduce(500, 800, **arguments("allreduce", 8, 2, "7"))]
    calls = load_ranks(tmp_path, {0: events, 1: events}).collectives()
    assert to_ns(calls.what_if("").changed_seconds) == 700
    with pytest.raises(ValueError, match='Allowed: "" for all of them, because this recording does not tell'):
        calls.what_if("tp")
    silent = load_ranks(tmp_path / "silent", {0: [step(1, 0, 1000), kernel(0, 500)]}).collectives()
    with pytest.raises(ValueError, match="Allowed: none, because this trace has no collectives"):
        silent.what_if("tp")


def test_the_bandwidth_of_an_axis_is_that_of_its_bytes(tmp_path: Path) -> None:
    """Two norms of one number beside one large gradient: their rates are not those of the link."""
    dp = {"Process Group Description": "mesh_dp"}
    events = [
        step(1, 0, 1000),
        kernel(0, 100),
        *(all_reduce(start, start + 10, **arguments("allreduce", 1, 2, "dp", **dp)) for start in (200, 300)),
        all_reduce(400, 580, **arguments("allreduce", 10_000, 2, "dp", **dp)),
    ]
    calls = load_ranks(tmp_path, {0: events, 1: events}).collectives()
    (row,) = calls.sum_by_axis()
    carried = sum(call["bus_bandwidth"] * call["transfer_seconds"] for call in calls if call["rank"] == 0)
    assert row["bus_bandwidth"] == pytest.approx(carried / 200e-9)
    assert row["bus_bandwidth"] > 0.8 * max(call["bus_bandwidth"] for call in calls)


def make_arrivals(delays: np.ndarray, transfer: int = 1000) -> dict[int, Events]:
    """Return ranks that arrive ``delays`` (calls x ranks) after each call's begin and leave together."""
    num_calls, num_ranks = delays.shape
    args = arguments("allreduce", 8, num_ranks)
    ranks: dict[int, Events] = {rank: [step(0, 0, 100_000 * num_calls)] for rank in range(num_ranks)}
    for call in range(num_calls):
        begin = 100_000 * call
        end = begin + int(delays[call].max()) + transfer
        for rank in range(num_ranks):
            ranks[rank].append(all_reduce(begin + int(delays[call, rank]), end, **args))
    return ranks


@pytest.mark.parametrize(("num_ranks", "num_calls"), [(2, 30), (8, 30), (8, 1), (4, 600)])
def test_equal_ranks_have_no_stragglers(tmp_path: Path, num_ranks: int, num_calls: int) -> None:
    """HTA names two stragglers of any eight ranks."""
    delays = np.random.default_rng(1).integers(0, 50_000, (num_calls, num_ranks))
    result = load_ranks(tmp_path, make_arrivals(delays)).stragglers()
    assert result.text.startswith("Stragglers: none")
    assert not any(row["is_straggler"] for row in result)


@thorough()
def test_equal_ranks_are_rarely_named() -> None:
    """Of 100 traces of equal ranks, about one may name a straggler by chance."""
    random = np.random.default_rng(2)
    named = 0
    for _ in range(100):
        with tempfile.TemporaryDirectory() as folder:
            delays = (random.exponential(10_000, (12, 3))).astype(int)
            named += any(
                row["is_straggler"] for row in load_ranks(Path(folder), make_arrivals(delays)).stragglers()
            )
    assert named <= 4


@pytest.mark.parametrize("num_calls", [2, 40, 600])
def test_ranks_that_are_late_in_turn_need_no_more_steps(tmp_path: Path, num_calls: int) -> None:
    delays = np.zeros((num_calls, 2), int)
    delays[::2, 0] = delays[1::2, 1] = 20_000
    text = load_ranks(tmp_path, make_arrivals(delays)).stragglers().text
    assert ("Record more steps" in text) is (num_calls < 30)
    assert text.startswith("Stragglers: none. Rank 0 arrives") is (num_calls >= 30)


@pytest.mark.parametrize("num_calls", [30, 600])
def test_a_slow_rank_is_named_with_what_it_costs(tmp_path: Path, num_calls: int) -> None:
    delays = np.random.default_rng(1).integers(0, 1_000, (num_calls, 8))
    delays[:, 5] += 20_000
    result = load_ranks(tmp_path, make_arrivals(delays)).stragglers()
    assert [row["rank"] for row in result if row["is_straggler"]] == [5]
    row = result[5]
    assert row["late_seconds"] == pytest.approx(num_calls * 20_000e-9, rel=0.05)
    assert row["p_value"] <= 0.01 and "rank 5 arrives" in result.text
    assert list(result.to_frame().columns) == ["rank", "late_seconds", "p_value", "is_straggler"]


def test_of_many_stragglers_the_first_are_named(tmp_path: Path) -> None:
    """Such as all ranks of a stage of a pipeline: the sentence had each with its figures."""
    delays = np.zeros((60, 24), np.int64)
    delays[:, :10] = 2_000
    result = load_ranks(tmp_path, make_arrivals(delays)).stragglers()
    assert sum(row["is_straggler"] for row in result) == 10
    assert result.text.count("arrives") == 4 and result.text.endswith("), and 6 more ranks.")


def test_a_significant_but_negligible_delay_is_not_a_straggler(tmp_path: Path) -> None:
    delays = np.zeros((200, 4), int)
    delays[:, 2] = 5  # always last, by 5 ns of 100,000
    result = load_ranks(tmp_path, make_arrivals(delays)).stragglers()
    assert result[2]["p_value"] < 0.01 and not result[2]["is_straggler"]


def test_calls_in_flight_together_count_a_delay_once(tmp_path: Path) -> None:
    """DDP reduces several buckets at a time: all of them wait for the same late rank."""
    args = arguments("allreduce", 8, 2)
    ranks: dict[int, Events] = {0: [], 1: []}
    for number in range(20):
        begin = 100_000 * number
        for rank, late in ((0, 0), (1, 30_000)):
            ranks[rank].append(step(number, begin, begin + 100_000))
            ranks[rank] += [
                all_reduce(begin + late + 1_000 * bucket, begin + 50_000 + 1_000 * bucket, bucket, **args)
                for bucket in range(6)
            ]
    result = load_ranks(tmp_path, ranks).stragglers()
    assert [row["rank"] for row in result if row["is_straggler"]] == [1]
    assert result[1]["late_seconds"] == pytest.approx(30_000e-9)
    assert "rank 1 arrives 30.0 µs a step after the others (30 % of the step" in result.text


def compute(start: int, end: int, is_host_bound: bool) -> Events:
    """A kernel, or one in the second half of each ms: the GPU waits for its host."""
    if not is_host_bound:
        return [kernel(start, end)]
    return [kernel(now + 500_000, now + 1_000_000) for now in range(start, end, 1_000_000)]


def make_overlapped_buckets(
    delays: np.ndarray[Any, Any],
    segment: int = 10_000_000,
    first_transfer: int = 4_000_000,
    is_host_bound: bool = False,
) -> dict[int, Events]:
    """Steps of DDP: ranks compute on while eight buckets are reduced, and wait for the last one only.

    ``delays`` are added to the forward of each step (rows) on each rank.
    """
    num_steps, num_ranks = delays.shape
    args = arguments("allreduce", 1_000_000, num_ranks)
    ranks: dict[int, Events] = {rank: [] for rank in range(num_ranks)}
    now = np.zeros(num_ranks, int)
    for number in range(num_steps):
        begin, free = now.copy(), now.copy()
        for rank in range(num_ranks):
            ranks[rank].append(kernel(now[rank], now[rank] + 60_000_000 + delays[number, rank]))
        now += 60_000_000 + delays[number]
        for bucket in range(8):
            for rank in range(num_ranks):
                ranks[rank] += compute(now[rank], now[rank] + segment, is_host_bound)
            now += segment
            start = np.maximum(now, free)
            free[:] = start.max() + (4_000_000 if bucket else first_transfer)
            for rank in range(num_ranks):
                ranks[rank].append(all_reduce(start[rank], free[rank], **args))
        now = np.maximum(now, free) + 5_000_000
        for rank in range(num_ranks):
            ranks[rank] += [kernel(now[rank] - 5_000_000, now[rank]), step(number, begin[rank], now[rank])]
    return ranks


@pytest.mark.parametrize("segment", [10_000_000, 30_000_000, 3_000_000])
def test_a_delay_before_overlapped_buckets_counts_once(tmp_path: Path, segment: int) -> None:
    """The next bucket waits again for a rank that is still late, also if no other one is in flight."""
    delays = np.zeros((12, 4), int)
    delays[:, 2] = 20_000_000
    result = load_ranks(tmp_path, make_overlapped_buckets(delays, segment)).stragglers()
    assert [row["rank"] for row in result if row["is_straggler"]] == [2]
    assert result[2]["late_seconds"] == pytest.approx(0.02)


def test_a_gpu_that_waits_for_its_host_does_not_wait_for_other_ranks(tmp_path: Path) -> None:
    """Each gap took away from the lead of the ranks in front, so that the next bucket counted it again."""
    delays = np.zeros((12, 4), int)
    delays[:, 2] = 20_000_000
    result = load_ranks(tmp_path, make_overlapped_buckets(delays, is_host_bound=True)).stragglers()
    assert [row["rank"] for row in result if row["is_straggler"]] == [2]
    assert result[2]["late_seconds"] == pytest.approx(0.02, rel=0.05)


@pytest.mark.parametrize("first_transfer", [20_000_000, 38_000_000])
def test_the_transfer_of_a_large_bucket_is_no_delay(tmp_path: Path, first_transfer: int) -> None:
    """Behind it other buckets queue, up to one that begins later on the late rank: the whole transfer was
    its delay, too.
    """
    delays = np.zeros((12, 4), int)
    delays[:, 2] = 4_000_000
    ranks = make_overlapped_buckets(delays, first_transfer=first_transfer)
    result = load_ranks(tmp_path, ranks).stragglers()
    assert [row["rank"] for row in result if row["is_straggler"]] == [2]
    assert result[2]["late_seconds"] == pytest.approx(0.004)


def test_a_call_that_begins_while_another_one_is_in_flight_is_not_queued_behind_it(tmp_path: Path) -> None:
    """As FSDP's all-gathers during a reduce-scatter on another stream: ranks are late in turn there."""
    args, ranks = arguments("allreduce", 8, 2), dict[int, Events]()
    for rank in (0, 1):
        ranks[rank] = []
        for begin in range(0, 8_000_000, 1_000_000):
            early, late = (begin + 100_000 + 20_000 * rank, begin + 320_000 - 20_000 * rank)
            ranks[rank] += [
                step(begin // 1_000_000, begin, begin + 1_000_000),
                kernel(begin, begin + 900_000),
                all_reduce(begin, begin + 800_000, 21, **args),
                all_reduce(early, begin + 200_000, **args),
                all_reduce(late, begin + 400_000, **args),
            ]
    result = load_ranks(tmp_path, ranks).stragglers()
    # Rank 0 arrives 20 us earlier, then 20 us later than rank 1.
    assert result[0]["late_seconds"] == pytest.approx(40e-6)


def test_a_pipeline_of_two_stages_is_compared_at_calls_that_are_no_messages(tmp_path: Path) -> None:
    """All ranks are those of the messages, too, where stages wait by the schedule."""
    ranks: dict[int, Events] = {0: [], 1: []}
    sent = arguments("send", 8, 2, "pp", **{"Process Group Ranks": "[0, 1]"})
    received = arguments("recv", 8, 2, "pp", **{"Process Group Ranks": "[0, 1]"})
    norm = arguments("allreduce", 1, 2, "world", **{"Process Group Ranks": "[0, 1]"})
    name = "ncclDevKernel_SendRecv"
    for number in range(12):
        t = 300_000 * number
        # Rank 1 waits for the forward of rank 0, takes 20 us longer than it, and rank 0 waits for it.
        ranks[0] += [
            step(number, t, t + 300_000),
            kernel(t, t + 100_000),
            kernel(t + 100_000, t + 101_000, name, 30, **sent),
            kernel(t + 101_000, t + 222_000, name, 31, **received),
            all_reduce(t + 222_000, t + 223_000, 32, **norm),
        ]
        ranks[1] += [
            step(number, t, t + 300_000),
            kernel(t, t + 101_000, name, 30, **received),
            kernel(t + 101_000, t + 221_000),
            kernel(t + 221_000, t + 222_000, name, 31, **sent),
            all_reduce(t + 222_000, t + 223_000, 32, **norm),
        ]
    result = load_ranks(tmp_path, ranks).stragglers()
    assert [row["rank"] for row in result if row["is_straggler"]] == [1]
    assert result[1]["late_seconds"] == pytest.approx(20e-6, abs=1e-9)


@pytest.mark.parametrize("is_host_bound", [False, True])
def test_a_delay_in_a_mesh_with_overlapped_buckets_counts_once(tmp_path: Path, is_host_bound: bool) -> None:
    """Tensor-parallel ranks 0 and 1, and 2 and 3, wait at every layer; gradients are reduced meanwhile."""
    ranks: dict[int, Events] = {rank: [] for rank in range(4)}
    now, free, pairs = np.zeros(4, int), np.zeros(4, int), {"tp": ([0, 1], [2, 3]), "dp": ([0, 2], [1, 3])}

    def reduce(axis: str) -> None:
        for group in pairs[axis]:
            named = {"Process Group Name": f"{axis}{group[0]}", "Process Group Ranks": str(group)}
            args = arguments("allreduce", 8, 2) | named
            start = now[group] if axis == "tp" else np.maximum(now[group], free[group])
            end = start.max() + 1_000_000
            for rank, begin in zip(group, start.tolist(), strict=True):
                ranks[rank].append(all_reduce(begin, end, 20 if axis == "tp" else 21, **args))
            (now if axis == "tp" else free)[group] = end

    for number in range(8):
        begin = now.copy()
        for _ in range(6):
            for rank in range(4):
                end = now[rank] + 8_000_000 + 2_000_000 * (rank == 0)
                ranks[rank] += compute(now[rank], end, is_host_bound)
            now += [10_000_000, 8_000_000, 8_000_000, 8_000_000]
            reduce("tp")
            reduce("dp")
        now = np.maximum(now, free)
        for rank in range(4):
            ranks[rank].append(step(number, begin[rank], now[rank]))
    result = load_ranks(tmp_path, ranks).stragglers()
    assert [row["rank"] for row in result if row["is_straggler"]] == [0]
    assert result[0]["late_seconds"] == pytest.approx(6 * 0.002)


def test_a_gpu_that_waits_for_its_host_does_not_wait_in_other_groups(tmp_path: Path) -> None:
    """HSDP: ranks 0 and 1, and 2 and 3, have shards; 0 and 2, and 1 and 3, reduce them. Rank 3 is slow.

    Rank 1 was said to wait for it in each gap between its kernels, and rank 0 to be later than rank 1.
    """
    ranks: dict[int, Events] = {rank: [] for rank in range(4)}
    now, shards, gradients = np.zeros(4, int), np.zeros(4, int), np.zeros(4, int)

    def reduce(pairs: list[list[int]], axis: str, stream: int, free: np.ndarray[Any, Any]) -> None:
        for group in pairs:
            named = {"Process Group Name": f"{axis}{group[0]}", "Process Group Ranks": str(group)}
            start = np.maximum(now[group], free[group])
            free[group] = start.max() + 1_000_000
            for rank, begin in zip(group, start.tolist(), strict=True):
                ranks[rank].append(
                    all_reduce(begin, int(free[rank]), stream, **arguments("allreduce", 8, 2) | named)
                )

    for number in range(10):
        begin = now.copy()
        for _ in range(6):
            reduce([[0, 1], [2, 3]], "shard", 20, shards)
            for rank in range(4):
                end = now[rank] + 8_000_000 + 2_000_000 * (rank == 3)
                ranks[rank] += compute(now[rank], end, is_host_bound=True)
            now += [8_000_000, 8_000_000, 8_000_000, 10_000_000]
            reduce([[0, 2], [1, 3]], "replica", 21, gradients)
            now = np.maximum(now, shards)
        now = np.maximum(now, gradients)
        for rank in range(4):
            ranks[rank].append(step(number, begin[rank], now[rank]))
    result = load_ranks(tmp_path, ranks).stragglers()
    assert [row["rank"] for row in result if row["is_straggler"]] == [3]
    assert result[3]["late_seconds"] == pytest.approx(6 * 0.002, rel=0.1)


def test_equal_ranks_with_overlapped_buckets_are_rarely_named() -> None:
    """The buckets of a step show one delay, which was taken for as many proofs of a straggler."""
    random = np.random.default_rng(5)
    named = 0
    for _ in range(20):
        with tempfile.TemporaryDirectory() as folder:
            delays = random.exponential(5_000_000, (6, 3)).astype(int)
            trace = load_ranks(Path(folder), make_overlapped_buckets(delays))
            named += any(row["is_straggler"] for row in trace.stragglers())
    assert named <= 1


def test_calls_of_several_groups_in_flight_together_make_no_rank_late(tmp_path: Path) -> None:
    """Rank 0 is in a call with rank 1 while another one begins with rank 2, at which both arrive together."""
    ranks: dict[int, Events] = {
        rank: [step(number, 200_000 * number, 200_000 * (number + 1)) for number in range(10)]
        for rank in range(3)
    }
    for number in range(10):
        begin = 200_000 * number
        for members, stream, start, end in (((0, 1), 20, 0, 100_000), ((0, 2), 21, 50_000, 150_000)):
            args = arguments("allreduce", 8, 2) | {
                "Process Group Name": f"{stream}",
                "Process Group Ranks": str(list(members)),
            }
            for rank in members:
                ranks[rank].append(all_reduce(begin + start, begin + end, stream, **args))
    assert [row["late_seconds"] for row in load_ranks(tmp_path, ranks).stragglers()] == [0, 0, 0]


def make_slow_mesh(
    slow: int | None,
    *,
    has_more_ranks: bool = False,
    has_sizes: bool = True,
    seed: int | None = None,
    num_steps: int = 20,
    num_buckets: int = 1,
) -> dict[int, Events]:
    """Return a 2 x 2 mesh in which one rank takes 1,000 ns more in each of four layers of a step.

    At the end of a step, the calls of all buckets are in flight together.
    With more ranks, it is one of two such meshes: each rank ends a step in a group with one of the other.
    Without sizes, bytes of the calls are unknown. With a seed, all layers take random times.
    """
    random = np.random.default_rng(seed)
    ranks: dict[int, Events] = {rank: [] for rank in range(4)}
    clock, begin = dict.fromkeys(range(4), 0), 0

    def reduce(groups: list[tuple[int, int]], name: str, num_buckets: int = 1) -> None:
        for members in groups:
            end = max(clock[rank] for rank in members) + 100
            named = arguments("allreduce", 8, 2, name, **{"Process Group Ranks": str(list(members))})
            if not has_sizes:
                del named["dtype"]
            for rank in members:
                ranks[rank] += [
                    all_reduce(clock[rank], end, 20 + bucket, **named) for bucket in range(num_buckets)
                ]
                clock[rank] = end

    for number in range(num_steps):
        begin = max(clock.values())
        for _ in range(4):
            for rank in ranks:
                work = 4_000 + 1_000 * (rank == slow)
                work += 0 if seed is None else int(random.integers(0, 1_000))
                ranks[rank].append(kernel(clock[rank], clock[rank] + work))
                clock[rank] += work
            reduce([(0, 1), (2, 3)], "1")
        reduce([(0, 2), (1, 3)], "2", num_buckets)
        for rank in ranks if has_more_ranks else ():
            named = arguments("allreduce", 8, 2, "3", **{"Process Group Ranks": str([rank, rank + 4])})
            ranks[rank].append(all_reduce(clock[rank], clock[rank] + 100, **named))
            clock[rank] += 100
        for rank in ranks:
            ranks[rank].append(step(number, begin, max(clock.values())))
    return ranks


@pytest.mark.parametrize("world_size", [4, 8])
def test_a_delay_that_two_axes_show_counts_once(tmp_path: Path, world_size: int) -> None:
    mesh = make_slow_mesh(0, has_more_ranks=world_size > 4)
    stragglers = load_ranks(tmp_path, mesh, info={"world_size": world_size}).stragglers()
    late = [to_ns(row["late_seconds"]) for row in stragglers]
    assert late[0] == 4_000
    # Rank 1 is late for rank 3 at the end of a step because it waited for rank 0 in each layer.
    assert max(late[1:]) < 100 and [row["is_straggler"] for row in stragglers] == [True, False, False, False]


def test_waits_before_calls_in_flight_together_count_once(tmp_path: Path) -> None:
    """Rank 1 waited for rank 0 before the two buckets, and rank 3 was as late as if it had done so twice."""
    stragglers = load_ranks(tmp_path, make_slow_mesh(0, num_buckets=2)).stragglers()
    assert [to_ns(row["late_seconds"]) for row in stragglers] == [4_000, 0, 0, 0]
    assert [row["is_straggler"] for row in stragglers] == [True, False, False, False]


@pytest.mark.parametrize(
    ("slow", "missing"), [(0, 1), (2, 3), (1, 2), (2, 1), (0, 2), (1, 3), (2, 0), (3, 1)]
)
def test_a_delay_of_a_mesh_with_a_missing_rank_counts_once(tmp_path: Path, slow: int, missing: int) -> None:
    """How long ranks waited for the missing one is unknown: this makes no other rank late, and none early."""
    ranks = make_slow_mesh(slow)
    del ranks[missing]
    stragglers = load_ranks(tmp_path, ranks, info={"world_size": 4}).stragglers()
    late = {row["rank"]: to_ns(row["late_seconds"]) for row in stragglers}
    assert late.pop(slow) == 4_000 and max(late.values()) < 100
    assert [row["rank"] for row in stragglers if row["is_straggler"]] == [slow]


@pytest.mark.parametrize("has_sizes", [True, False])
def test_a_rank_is_told_from_the_one_that_waits_for_it_if_a_peer_is_missing(
    tmp_path: Path, has_sizes: bool
) -> None:
    """At the end of a step, rank 0 is as late for rank 2 as rank 1 was for it, but only because it waited."""
    ranks = make_slow_mesh(1, has_sizes=has_sizes)
    del ranks[3]
    stragglers = load_ranks(tmp_path, ranks, info={"world_size": 4}).stragglers()
    assert [row["rank"] for row in stragglers if row["is_straggler"]] == [1]
    assert "rank 1 arrives" in stragglers.text and "rank 0" not in stragglers.text.lower()


@pytest.mark.parametrize("has_sizes", [True, False])
@pytest.mark.parametrize("slow", range(4))
def test_a_slow_rank_without_a_file_makes_no_other_one_a_straggler(
    tmp_path: Path, slow: int, has_sizes: bool
) -> None:
    ranks = make_slow_mesh(slow, has_sizes=has_sizes, seed=slow)
    del ranks[slow]
    stragglers = load_ranks(tmp_path, ranks, info={"world_size": 4}).stragglers()
    assert not any(row["is_straggler"] for row in stragglers)
    # Its neighbour waited for it in each layer.
    assert stragglers.text.startswith(f"Stragglers: unknown. Rank {slow ^ 1} arrives")
    latest = max(stragglers, key=lambda row: row["late_seconds"])
    assert latest["rank"] == slow ^ 1 and latest["late_seconds"] >= 3e-6
    assert "Load the files of all ranks." in stragglers.text


@pytest.mark.parametrize("seed", range(4))
def test_a_slow_rank_of_a_mesh_is_named_by_three_steps(tmp_path: Path, seed: int) -> None:
    """Its twelve tensor-parallel calls tell it; three data-parallel ones of whole steps alone could not."""
    stragglers = load_ranks(tmp_path, make_slow_mesh(0, seed=seed, num_steps=3)).stragglers()
    assert [row["rank"] for row in stragglers if row["is_straggler"]] == [0]


def make_pipeline(slow: int | None = None) -> dict[int, Events]:
    """Return two stages of two tensor-parallel ranks, with 12 steps of two micro-batches.

    Each stage waits for the other by the schedule. At the end of a step all ranks reduce the gradient norm.
    """
    ranks: dict[int, Events] = {rank: [] for rank in range(4)}
    clock = dict.fromkeys(range(4), 0)

    def call(name: str, kind: str, *groups: tuple[int, ...]) -> None:
        for members in groups:
            end = max(clock[rank] for rank in members) + 50
            named = arguments(kind, 8, len(members), name, **{"Process Group Ranks": str(list(members))})
            for rank in members:
                kernel_name = "ncclDevKernel_SendRecv" if name == "pp" else "ncclDevKernel_AllReduce_Sum"
                ranks[rank].append(kernel(clock[rank], end, kernel_name, 20, **named))
                clock[rank] = end

    def compute(*stage: int) -> None:
        for rank in stage:
            work = 4_000 + 800 * (rank == slow)
            ranks[rank].append(kernel(clock[rank], clock[rank] + work))
            clock[rank] += work
        call("tp", "allreduce", stage)

    for number in range(12):
        begin = dict(clock)
        for order in (((0, 1), (2, 3)), ((2, 3), (0, 1))):
            for _ in range(2):
                compute(*order[0])
                call("pp", "send", (0, 2), (1, 3))
                compute(*order[1])
        call("world", "allreduce", (0, 1, 2, 3))
        for rank in ranks:
            ranks[rank].append(step(number, begin[rank], clock[rank]))
    return ranks


@pytest.mark.parametrize("missing", [None, 0, 1, 2, 3])
def test_equal_stages_of_a_pipeline_are_no_stragglers(tmp_path: Path, missing: int | None) -> None:
    ranks = make_pipeline()
    ranks = {rank: events for rank, events in ranks.items() if rank != missing}
    stragglers = load_ranks(tmp_path, ranks, info={"world_size": 4}).stragglers()
    assert not any(row["is_straggler"] for row in stragglers)


def test_the_delay_of_a_rank_in_a_pipeline_is_not_what_stages_wait_for_each_other(tmp_path: Path) -> None:
    stragglers = load_ranks(tmp_path, make_pipeline(slow=0)).stragglers()
    assert {row["rank"]: to_ns(row["late_seconds"]) for row in stragglers if row["is_straggler"]} == {
        0: 4 * 800
    }


def make_scheduled_pipeline(
    num_stages: int,
    replicas: int = 1,
    slow: int | None = None,
    missing: int | None = None,
    *,
    has_loss: bool = False,
    has_norm: bool = True,
) -> dict[int, Events]:
    """Return 12 steps of four micro-batches in the 1F1B schedule, with messages in a group of all stages.

    With a loss, the last stage has a short call of an unknown group after each forward.

    A slow rank takes 2,000 ns more in each of the eight forwards and backwards of a step. At the end of it
    replicas reduce their gradients, and all ranks the gradient norm, if any. All work takes random times.
    """
    random = np.random.default_rng(0)
    everyone = range(num_stages * replicas)
    ranks: dict[int, Events] = {rank: [] for rank in everyone}
    clock = dict.fromkeys(everyone, 0)

    def call(rank: int, end: int, kind: str, group: list[int]) -> None:
        named = arguments(kind, 8, len(group), str(group), **{"Process Group Ranks": str(group)})
        name = "ncclDevKernel_AllReduce_Sum" if kind == "allreduce" else "ncclDevKernel_SendRecv"
        ranks[rank].append(kernel(clock[rank], end, name, 20, **named))
        clock[rank] = end

    def reduce(group: list[int]) -> None:
        end = max(clock[rank] for rank in group) + 50
        for rank in group:
            call(rank, end, "allreduce", group)

    def list_work(stage: int) -> list[tuple[int, int]]:
        """Return the direction (forward: 1) and micro-batch of a stage's work in its order."""
        warm = min(num_stages - stage - 1, 4)
        steady = [work for batch in range(4 - warm) for work in ((1, warm + batch), (-1, batch))]
        return [*((1, batch) for batch in range(warm)), *steady, *((-1, 4 - warm + b) for b in range(warm))]

    for number in range(12):
        begin = dict(clock)
        left = {stage: list_work(stage) for stage in range(num_stages)}
        sent: dict[tuple[int, int, int, int], int] = {}
        while any(left.values()):
            for stage, works in left.items():
                direction, batch = works[0] if works else (0, 0)
                before, after = stage - direction, stage + direction
                if not works or (0 <= before < num_stages and (direction, batch, before, 0) not in sent):
                    continue
                works.pop(0)
                for replica in range(replicas):
                    rank = stage * replicas + replica
                    stages = [replica + replicas * one for one in range(num_stages)]
                    if 0 <= before < num_stages:
                        ready = max(clock[rank], sent[direction, batch, before, replica])
                        call(rank, ready + 30, "recv", stages)
                    work = 4_000 * (1 if direction == 1 else 2) + 2_000 * (rank == slow)
                    end = clock[rank] + work + int(random.integers(0, 200))
                    ranks[rank].append(kernel(clock[rank], end))
                    if has_loss and direction == 1 and after == num_stages:
                        ranks[rank].append(all_reduce(end, end + 10))
                        end += 10
                    sent[direction, batch, stage, replica] = clock[rank] = end
                    if 0 <= after < num_stages:
                        call(rank, end + 30, "send", stages)
        for stage in range(num_stages) if replicas > 1 else ():
            reduce([stage * replicas + replica for replica in range(replicas)])
        if has_norm:
            reduce(list(everyone))
        for rank in everyone:
            ranks[rank].append(step(number, begin[rank], clock[rank]))
    return {rank: events for rank, events in ranks.items() if rank != missing}


@pytest.mark.parametrize(
    ("num_stages", "replicas", "missing"), [(4, 1, None), (4, 2, None), (4, 1, 2), (2, 2, 0), (2, 2, 3)]
)
def test_the_schedule_of_a_pipeline_makes_no_stage_a_straggler(
    tmp_path: Path, num_stages: int, replicas: int, missing: int | None
) -> None:
    """The first stage ends each step last, and waited for messages before, as for those of a lost rank."""
    ranks = make_scheduled_pipeline(num_stages, replicas, missing=missing)
    stragglers = load_ranks(tmp_path, ranks, info={"world_size": num_stages * replicas}).stragglers()
    assert not any(row["is_straggler"] for row in stragglers)
    if missing is None:
        assert stragglers.text.startswith("Stragglers: none.")


@pytest.mark.parametrize(
    ("num_stages", "replicas", "slow", "missing"),
    [(4, 1, 0, None), (4, 1, 2, None), (4, 2, 1, None), (4, 2, 7, 6), (2, 2, 0, 2), (2, 2, 1, 3)],
)
def test_the_slow_rank_of_a_pipeline_is_named_with_what_its_work_takes(
    tmp_path: Path, num_stages: int, replicas: int, slow: int, missing: int | None
) -> None:
    """Its own stage, or the other ranks of its replica, which wait for its messages, were named instead."""
    ranks = make_scheduled_pipeline(num_stages, replicas, slow, missing)
    stragglers = load_ranks(tmp_path, ranks, info={"world_size": num_stages * replicas}).stragglers()
    late = {row["rank"]: to_ns(row["late_seconds"]) for row in stragglers if row["is_straggler"]}
    assert late == {slow: pytest.approx(8 * 2_000, rel=0.06)}
    # Most arrive before the first stage, which is the last one by the schedule.
    assert f"rank {slow} works 1" in stragglers.text and "longer than the others" in stragglers.text


@pytest.mark.parametrize(("slow", "missing"), [(1, 0), (0, 1), (None, 0)])
def test_messages_tell_of_stages_that_no_other_calls_compare(
    tmp_path: Path, slow: int | None, missing: int
) -> None:
    """Without a gradient norm, only the other stage's replicas reduced: "no rank is later" was the answer."""
    ranks = make_scheduled_pipeline(2, 2, slow, missing, has_norm=False)
    stragglers = load_ranks(tmp_path, ranks, info={"world_size": 4}).stragglers()
    assert [row["rank"] for row in stragglers if row["is_straggler"]] == ([] if slow is None else [slow])


@pytest.mark.parametrize("slow", [None, 1])
def test_short_calls_of_an_unknown_group_leave_ranks_comparable(tmp_path: Path, slow: int | None) -> None:
    """Such as those of Megatron's loss in a tensor-parallel group of one rank, which gloo does not name."""
    ranks = make_scheduled_pipeline(2, 2, slow, has_loss=True)
    stragglers = load_ranks(tmp_path, ranks).stragglers()
    assert [row["rank"] for row in stragglers if row["is_straggler"]] == ([] if slow is None else [slow])
    assert "unknown" not in stragglers.text


@pytest.mark.parametrize("slow", [None, 2])
def test_a_slow_rank_of_a_ring_of_context_parallel_ranks_is_named(tmp_path: Path, slow: int | None) -> None:
    """All ranks wait for it at the messages of the ring, and then reach the all-gather together."""
    ranks: dict[int, Events] = {rank: [] for rank in range(4)}
    clock = 0
    for number in range(40):
        for _ in range(3):
            for rank, events in ranks.items():
                work = 5_000 + 1_000 * (rank == slow) + 10 * ((rank + number) % 4)
                events.append(kernel(clock, clock + work))
                named = arguments("coalesced", 8, 4, "cp", **{"Process Group Description": "mesh_cp"})
                end = clock + 6_100
                events.append(kernel(clock + work, end, "ncclDevKernel_SendRecv", 20, **named))
            clock += 6_100
        for events in ranks.values():
            events.append(all_reduce(clock, clock + 100, **arguments("allreduce", 8, 4, "world")))
            events.append(step(number, clock - 3 * 6_100, clock + 100))
        clock += 100
    stragglers = load_ranks(tmp_path, ranks).stragglers()
    late = {row["rank"]: to_ns(row["late_seconds"]) for row in stragglers if row["is_straggler"]}
    assert late == ({} if slow is None else {slow: pytest.approx(3_000, rel=0.05)})


@thorough()
def test_equal_ranks_of_a_mesh_are_rarely_named() -> None:
    """Each axis of the mesh shows the same random delays: they are no evidence of their own."""
    named = 0
    for seed in range(60):
        with tempfile.TemporaryDirectory() as folder:
            trace = load_ranks(Path(folder), make_slow_mesh(None, seed=seed))
            named += any(row["is_straggler"] for row in trace.stragglers())
    assert named <= 2


def test_only_names_of_collectives_are_kept_after_a_trace(tmp_path: Path) -> None:
    """Traces with stacks have hundreds of thousands of other names."""
    others = [operator(10 * number, 10 * number + 5, f"frame {number}") for number in range(50)]
    name_kind.cache_clear()
    assert load_ranks(tmp_path, {0: [*others, all_reduce(0, 100)]}).collectives()
    assert name_kind.cache_info().currsize < 10


def test_ranks_that_cannot_be_compared_have_a_hint(tmp_path: Path) -> None:
    without = load_ranks(tmp_path / "none", {rank: [kernel(0, 100)] for rank in range(2)})
    assert "ProfilerActivity.CUDA" in without.stragglers().text
    apart = load_ranks(tmp_path / "apart", {0: [kernel(0, 100)], 1: [all_reduce(0, 100)]})
    assert apart.stragglers().text.endswith("Record the same steps on all ranks.")


def test_messages_alone_do_not_compare_ranks(tmp_path: Path) -> None:
    """Stages that recorded the same steps, as NCCL names the kernels of grouped sends and receives."""
    args = arguments("coalesced", 8, 3)
    events = [kernel(0, 10, "ncclDevKernel_SendRecv", **args)]
    trace = load_ranks(tmp_path, dict.fromkeys(range(3), events))
    assert {row["kind"] for row in trace.collectives()} == {"send_recv"}
    assert {row["kind"] for row in trace.kernels()} == {"send_recv"}
    text = trace.stragglers().text
    assert "sends and receives" in text and "Record" not in text


def test_two_calls_of_two_ranks_prove_nothing(tmp_path: Path) -> None:
    delays = np.array([[0, 40_000], [0, 40_000]])
    result = load_ranks(tmp_path, make_arrivals(delays)).stragglers()
    assert result[1]["late_seconds"] > 0 and not result[1]["is_straggler"]


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", "all_reduce"),
        ("multimem_all_reduce_kernel", "all_reduce"),
        ("_allgather_base", "all_gather"),
        ("all_gather_into_tensor_coalesced", "all_gather"),
        ("ncclDevKernel_ReduceScatter_Sum_f32", "reduce_scatter"),
        ("ncclKernel_SendRecv_RING_SIMPLE", "send_recv"),
        ("alltoallv", "all_to_all"),
        ("ncclDevKernel_Broadcast", "broadcast"),
        ("deep_ep::internode::dispatch", "communication"),
    ],
)
def test_kinds_of_collectives(text: str, kind: str) -> None:
    assert name_kind(text) == kind


def test_bus_factors_are_those_of_nccl_tests() -> None:
    assert find_bus_factor("all_reduce", 8) == 1.75
    assert find_bus_factor("all_gather", 8) == find_bus_factor("reduce_scatter", 8) == 0.875
    assert find_bus_factor("broadcast", 8) == 1 and find_bus_factor("all_reduce", 0) is None


def test_recorded_gloo_ranks_have_skew_and_transfer() -> None:
    trace = Trace.load(Path(__file__).parents[2] / "fixtures" / "trace_2_ranks")
    rows = trace.collectives()
    assert len(rows) == 4 and {row["kind"] for row in rows} == {"all_reduce"}
    assert all(row["transfer_seconds"] > 0 and row["num_bytes"] is None for row in rows)
    assert [row["rank"] for row in trace.stragglers()] == [0, 1]


def test_copies_are_not_collectives(tmp_path: Path) -> None:
    assert len(load_ranks(tmp_path, {0: [copy(0, 10), kernel(10, 20)]}).collectives()) == 0
