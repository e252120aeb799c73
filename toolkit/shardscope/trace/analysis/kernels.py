"""Kernels by name and class: time, calls, TFLOP/s and bytes/s against the GPU's peaks, and occupancy.

Ranks without a GPU have operators instead of kernels, by their self time.
"""

from __future__ import annotations

import re
from collections import defaultdict
from typing import TYPE_CHECKING, TypedDict, get_type_hints

import numpy as np

from shardscope.catalog import gpus, load_table
from shardscope.trace.analysis.activity import Activity
from shardscope.trace.analysis.collective_calls import KINDS as COLLECTIVE_KINDS
from shardscope.trace.analysis.collective_calls import UNKNOWN_KIND, find_call_kinds
from shardscope.trace.analysis.intervals import Int64s
from shardscope.trace.analysis.operator_costs import COUNTED_OPERATORS, Cost, count_cost
from shardscope.trace.arguments import ShapeArgs, decode_arguments
from shardscope.trace.table import Table

if TYPE_CHECKING:
    import numpy.typing as npt

    from shardscope.core.cluster import Gpu
    from shardscope.trace.store import Trace

# torch.compile names a pointwise kernel after all operators it comes from: the one that adds a convolution's
# bias, or copies the operands of attention, is neither (triton_poi_fused_convolution_relu_3).
_NOT_FUSED = r"^(?!triton_(?:poi|red|per|for)_).*"

KERNEL_KINDS = (
    ("attention", _NOT_FUSED + r"(?:flash|[Ff]mha|attention|mha_|_attn_|\battn_(?:fwd|bwd)|sdpa)"),
    ("embedding", r"embedding|indexSelect|index_select"),
    ("normalization", r"layer_?norm|rms_?norm|batch_?norm|group_?norm|\bbn_|cudnn::bn|_norm_"),
    ("optimizer", r"adam|multi_tensor_apply|fused_sgd|lamb_|FusedOptimizer"),
    ("convolution", _NOT_FUSED + r"(?:conv(?!ert)|winograd|[fd](?:prop|grad)|wgrad|cudnn.*nn_v\d|scudnn)"),
    (
        "matmul",
        r"(?<!fb)gemm|gemv|cutlass|cublas|nvjet|\bwgmma|Cijk_|triton_(?:mm|tem)|matmul|splitKreduce|\bdot_kernel",
    ),
    (
        "copy",
        r"CatArray|direct_copy|copy_kernel|rocclr_(?:copy|fill)Buffer|memcpy|memset|nchwToNhwc|nhwcToNchw|transpose_readWrite|chunk_cat"
        r"|split_with_sizes_copy",
    ),
    (
        "elementwise",
        r"elementwise|triton_poi|triton__|fused_(?:dropout|add|mul)|Functor|pointwise|swiglu|gelu|silu",
    ),
    ("reduction", r"reduce_kernel|triton_(?:red|per)|softmax|SoftMax|nll_loss|cross_entropy|cub::|reduce"),
)
OPERATOR_KINDS = (
    ("attention", r"scaled_dot_product|flash|attention"),
    ("normalization", r"(?:layer|rms|batch|group)_norm"),
    ("optimizer", r"_fused_adam|_fused_sgd|_foreach_"),
    ("convolution", r"conv"),
    (
        "matmul",
        r"::(?:mm|addmm|bmm|baddbmm|matmul|linear|_scaled_mm|dot|mv|addmv|einsum|_grouped_mm)(?:_out)?$",
    ),
    ("embedding", r"embedding|index_select|::index|scatter|gather$"),
    ("copy", r"copy|::clone|::cat|::to$|contiguous|::fill_|zero_|::zeros|::stack|chunk_cat"),
    (
        "reduction",
        r"::(?:sum|mean|max|min|norm|linalg_vector_norm|argmax|cumsum|topk|sort|any|all|.*softmax.*|nll_loss.*"
        r"|.*cross_entropy.*)",
    ),
    (
        "view",
        r"::(?:view|reshape|_reshape_alias|slice|t|transpose|as_strided|expand|permute|unsqueeze|squeeze|select"
        r"|split|split_with_sizes|chunk|narrow|_unsafe_view|detach|detach_|alias|unbind)$",
    ),
    (
        "elementwise",
        r"::(?:add|sub|mul|div|neg|pow|rsqrt|sqrt|exp|log|silu|gelu|relu|sigmoid|tanh|where|cos|sin|clamp"
        r"|threshold|abs|eq|ne|lt|gt|le|ge|masked_fill|dropout|addcmul|addcdiv|lerp|bitwise|logical|isfinite"
        r"|reciprocal|maximum|minimum|tril|triu|arange)|^## Call CompiledFxGraph",
    ),
)
"""Classes of kernels by their name, and of operators by theirs; the first that matches."""

TENSOR_CORE = re.compile(
    r"[hsi]884|[hsic]1688|16816|hmma|i8816|i16832|tensorop|xmma|wgmma|gmma|nvjet|mma_|_mma|umma|tcgen05|sm90_|sm100_"
    r"|flash_(?:fwd|bwd)|fmha|deep_gemm",
    re.IGNORECASE,
)
"""Names of kernels that use tensor cores (torch_tb_profiler's list, and those of Hopper and Blackwell)."""
_TRITON = re.compile(r"triton_|_[a-z]")
"""Names of kernels in Triton (``triton_tem_fused_mm_4``, ``_attn_fwd``), not saying how they multiply."""
_OTHER_VENDORS = re.compile(r"^(?:AMD|Intel)|Instinct", re.IGNORECASE)
CUDA_CATEGORIES = frozenset({"kernel", "Kernel"})
MATRIX_KINDS = frozenset({"matmul", "convolution", "attention"})
NAME_CHARACTERS = 60
"""Most characters of a kernel's name in a sentence."""
OPTIMIZER_STEP = re.compile(r"^Optimizer\.step")

_PEAK_OF_TYPE = {
    "c10::bfloat16": "bf16",
    "c10::half": "fp16",
    "half": "fp16",
    "c10::float8_e4m3fn": "fp8",
    "float": "fp32",
}


class KernelRow(TypedDict):
    """All calls of one kernel, or operator, on one rank. A field is None if it was not recorded."""

    rank: int
    name: str
    kind: str
    """``matmul``, ``attention``, ``normalization``, ``elementwise``, ``copy``, a collective, ..."""
    num_calls: int
    total_seconds: float
    """For operators on CPU ranks the self time, callees excluded."""
    mean_seconds: float
    share: float
    """Share of the rank's kernel time, or self time."""
    tflops: float | None
    """Rate of the calls whose operator has shapes in the recording."""
    bytes_per_second: float | None
    """Recorded for copies; for operators with shapes, their operands and results, each moved once."""
    peak_share: float | None
    """Share of the GPU's peak for the operands' type. This and the next are not columns of the data frame."""
    bandwidth_share: float | None
    """Share of the GPU's memory bandwidth."""
    occupancy: float | None
    """Mean achieved occupancy by time, 0 to 1, as CUPTI estimates it."""
    sm_efficiency: float | None
    """Mean share of multiprocessors that have a block, by time: fewer blocks than those leave some idle."""
    uses_tensor_cores: bool | None
    """By the kernel's name. None for Triton's, and for all but matmul, convolution and attention on a GPU."""
    track: str
    """Track of the longest call."""
    start_seconds: float
    """Start of the longest call."""
    longest_seconds: float


_MORE_KEYS = (
    "peak_share",
    "bandwidth_share",
    "occupancy",
    "sm_efficiency",
    "uses_tensor_cores",
    "track",
    "start_seconds",
    "longest_seconds",
)
COLUMNS = tuple(name for name in get_type_hints(KernelRow) if name not in _MORE_KEYS)


class KindRow(TypedDict):
    """All kernels of one class on one rank."""

    rank: int
    kind: str
    num_calls: int
    total_seconds: float
    share: float


class Kernels(Table[KernelRow]):
    """Kernels of every rank by name, most time first."""

    def __init__(self, rows: list[KernelRow]) -> None:
        super().__init__(rows, COLUMNS)

    def sum_by_kind(self) -> Table[KindRow]:
        """Return the kernels summed by class, most time first."""
        sums: dict[tuple[int, str], KindRow] = {}
        for row in self:
            total = sums.setdefault(
                (row["rank"], row["kind"]),
                {
                    "rank": row["rank"],
                    "kind": row["kind"],
                    "num_calls": 0,
                    "total_seconds": 0.0,
                    "share": 0.0,
                },
            )
            total["num_calls"] += row["num_calls"]
            total["total_seconds"] += row["total_seconds"]
            total["share"] += row["share"]
        rows = sorted(sums.values(), key=lambda row: (row["rank"], -row["total_seconds"]))
        return Table(rows, tuple(get_type_hints(KindRow)))

    @property
    def tensor_core_share(self) -> float | None:
        """Share of the time of matmuls, convolutions and attention on tensor cores; None without a GPU."""
        used = sum(row["total_seconds"] for row in self if row["uses_tensor_cores"])
        total = sum(row["total_seconds"] for row in self if row["uses_tensor_cores"] is not None)
        return used / total if total else None


def find_gpu(name: str | None) -> Gpu | None:
    """Return the catalogue's GPU with the driver's ``name``; None if it is not listed."""
    for known, entry in load_table("gpus").items():
        if name is not None and name in entry.get("driver_names", ()):
            return gpus[known]
    return None


def shorten_name(name: str, max_characters: int = NAME_CHARACTERS) -> str:
    """Return a name for a sentence: kernels of templates have hundreds of characters."""
    return name if len(name) <= max_characters else f"{name[: max_characters - 1].rstrip(' ,')}…"


def find_kinds(trace: Trace) -> npt.NDArray[np.int32]:
    """Return the class of each slice of work as an index into :func:`list_kinds`; -1 for other slices."""
    activity, kinds = trace.activity, list_kinds()
    numbers = {kind: number for number, kind in enumerate(kinds)}
    of_kernel = np.array([numbers[_match_kind(KERNEL_KINDS, name)] for name in trace.names], np.int32)
    of_operator = np.array([numbers[_match_kind(OPERATOR_KINDS, name)] for name in trace.names], np.int32)
    kind_index = np.full(len(trace), -1, np.int32)
    if not len(trace):
        return kind_index
    names = trace.name_index
    kernels = np.flatnonzero(activity.is_kernel)
    kind_index[kernels] = of_kernel[names[kernels]]
    # A kernel whose name says nothing has the class of the operator that launched it.
    unknown = kernels[(kind_index[kernels] == numbers["other"]) & (activity.launches[kernels] >= 0)]
    around = trace.parents[activity.launches[unknown]]
    kind_index[unknown] = np.where(around >= 0, of_operator[names[around]], numbers["other"])
    operators = np.flatnonzero(activity.is_compute & ~activity.is_kernel)
    kind_index[operators] = of_operator[names[operators]]
    kind_index[activity.is_copy] = numbers["copy"]
    # Work inside optimizer.step() counts as the optimizer, whatever its kernels are called.
    is_step = activity.mask_names(OPTIMIZER_STEP)
    if is_step.any():
        works = np.flatnonzero(kind_index >= 0)
        origin = np.where(activity.on_gpu[works], activity.launches[works], works)
        inside = (origin >= 0) & (activity.find_around(np.maximum(origin, 0), is_step) >= 0)
        kind_index[works[inside]] = numbers["optimizer"]
    collectives = np.flatnonzero(activity.is_communication)
    kind_index[collectives] = [numbers[kind] for kind in find_call_kinds(trace, collectives)]
    return kind_index


def list_kinds() -> list[str]:
    """Return all classes; :func:`find_kinds` gives indices into this list."""
    kinds = [kind for kind, _ in (*KERNEL_KINDS, *OPERATOR_KINDS)]
    return list(dict.fromkeys([*kinds, *(kind for kind, _ in COLLECTIVE_KINDS), UNKNOWN_KIND, "other"]))


def _match_kind(patterns: tuple[tuple[str, str], ...], name: str) -> str:
    return next((kind for kind, pattern in patterns if re.search(pattern, name)), "other")


def measure_work_ns(trace: Trace) -> Int64s:
    """Return the nanoseconds of each slice of work: a kernel's duration, an operator's self time, else 0."""
    activity = trace.activity
    work = np.zeros(len(trace), np.int64)
    on_gpu = activity.is_gpu_work
    work[on_gpu] = trace.duration_ns[on_gpu]
    on_cpu = np.flatnonzero((activity.is_compute | activity.is_communication) & ~on_gpu)
    if len(on_cpu):
        nested = trace.parents >= 0
        callees = np.bincount(
            trace.parents[nested], weights=trace.duration_ns[nested], minlength=len(trace)
        ).astype(np.int64)
        # All time of a collective is communication, gloo's own operators included.
        own = np.where(activity.is_communication[on_cpu], 0, callees[on_cpu])
        work[on_cpu] = trace.duration_ns[on_cpu] - own
    return work


def find_kernels(trace: Trace, *, in_steps: bool = False) -> Kernels:
    """Return one row per rank and kernel; see :meth:`Trace.kernels`. ``in_steps``: only of marked steps."""
    activity = trace.activity
    kinds, kind_names = find_kinds(trace), list_kinds()
    work = measure_work_ns(trace)
    index = np.flatnonzero((kinds >= 0) & activity.is_in_steps if in_steps else kinds >= 0)
    flops, moved, precisions = _count_costs(trace, activity, index, kinds, kind_names)
    occupancy = np.asarray(activity.work_args["occupancy"], np.float64)[index]
    blocks = np.asarray(activity.work_args["blocks_per_sm"], np.float64)[index]
    # One number for each combination of rank, name and class.
    keys = (activity.rank_position[index] * len(trace.names) + trace.name_index[index]) * len(kind_names)
    unique, first, group = np.unique(keys + kinds[index], return_index=True, return_inverse=True)

    def add_up(values: npt.NDArray[np.float64] | Int64s) -> npt.NDArray[np.float64]:
        return np.asarray(np.bincount(group, weights=values, minlength=len(unique)), np.float64)

    def divide_by_time(
        values: npt.NDArray[np.float64], is_known: npt.NDArray[np.bool_]
    ) -> list[float | None]:
        """Return the sums over the work's nanoseconds, only of calls that are known; None without any."""
        sums, known_ns = add_up(values), add_up(np.where(is_known, own, 0))
        return [float(sums[i] / known_ns[i]) if known_ns[i] else None for i in range(len(unique))]

    # The type of the first call that is known: the very first may have no recorded operator.
    precision_of: dict[int, str] = {}
    for number, precision in zip(group.tolist(), precisions, strict=True):
        if precision:
            precision_of.setdefault(number, precision)
    own = work[index]
    counts, total = np.bincount(group, minlength=len(unique)), add_up(own)
    rates, speeds = divide_by_time(flops, flops > 0), divide_by_time(moved, moved > 0)
    occupancies = divide_by_time(np.where(occupancy >= 0, occupancy * own, 0), occupancy >= 0)
    efficiencies = divide_by_time(np.where(blocks >= 0, np.minimum(blocks, 1) * own, 0), blocks >= 0)
    longest = (
        index[np.lexsort((-own, group))][np.concatenate(([0], np.cumsum(counts)[:-1]))]
        if len(index)
        else index
    )
    rank_total = {
        rank.rank: max(int(own[activity.rank_position[index] == number].sum()), 1)
        for number, rank in enumerate(activity.ranks)
    }
    known_gpus = {rank: find_gpu(name) for rank, name in trace.device_names.items()}
    # The names are those of NVIDIA's libraries; other vendors' are unknown.
    is_cuda = activity.is_kernel & activity.mask_categories(CUDA_CATEGORIES)
    is_other_vendor = any(_OTHER_VENDORS.search(name) for name in trace.device_names.values()) or any(
        name.startswith("Cijk_") for name in trace.names
    )
    rows: list[KernelRow] = []
    for number, slice_index in enumerate(index[first].tolist()):
        rank = trace.tracks[trace.track_index[slice_index]].rank
        name, kind = trace.names[trace.name_index[slice_index]], kind_names[kinds[slice_index]]
        gpu = known_gpus.get(rank)
        may_use = kind in MATRIX_KINDS and is_cuda[slice_index] and not is_other_vendor
        may_use = may_use and _TRITON.match(name) is None
        tensor_cores = bool(TENSOR_CORE.search(name)) if may_use else None
        rate, speed = (None if value is None else value * 1e9 for value in (rates[number], speeds[number]))
        occupied = occupancies[number]
        peak = _find_peak(gpu, precision_of.get(number, ""), bool(tensor_cores))
        is_copy = bool(activity.is_copy[slice_index])
        bandwidth = gpu.memory_bandwidth_bytes_per_second if gpu and not is_copy else None
        far = int(longest[number])
        rows.append(
            {
                "rank": rank,
                "name": name,
                "kind": kind,
                "num_calls": int(counts[number]),
                "total_seconds": float(total[number]) / 1e9,
                "mean_seconds": float(total[number]) / int(counts[number]) / 1e9,
                "share": float(total[number]) / rank_total[rank],
                "tflops": None if rate is None else rate / 1e12,
                "bytes_per_second": speed,
                "peak_share": rate / peak if rate is not None and peak else None,
                "bandwidth_share": speed / bandwidth if speed is not None and bandwidth else None,
                "occupancy": None if occupied is None else occupied / 100,
                "sm_efficiency": efficiencies[number],
                "uses_tensor_cores": tensor_cores,
                "track": trace.tracks[trace.track_index[far]].name,
                "start_seconds": int(trace.start_ns[far]) / 1e9,
                "longest_seconds": int(trace.duration_ns[far]) / 1e9,
            }
        )
    rows.sort(key=lambda row: (row["rank"], -row["total_seconds"], row["name"]))
    return Kernels(rows)


def _find_peak(gpu: Gpu | None, dtype: str, uses_tensor_cores: bool) -> float | None:
    """Return the GPU's peak FLOP/s for operands of a type; fp32 on tensor cores is TF32."""
    precision = _PEAK_OF_TYPE.get(dtype.lower())
    if gpu is None or precision is None:
        return None
    if precision == "fp32" and uses_tensor_cores:
        precision = "tf32"
    return gpu.peak_flops.get(precision)


def _count_costs(
    trace: Trace, activity: Activity, index: Int64s, kinds: npt.NDArray[np.int32], kind_names: list[str]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64], list[str]]:
    """Return FLOPs, bytes and operand type of each slice of work; 0 and "" where unknown."""
    flops, moved = np.zeros(len(index)), np.zeros(len(index))
    precisions = [""] * len(index)
    recorded = np.asarray(activity.work_args["bytes"], np.float64)[index]
    moved[activity.is_copy[index] & (recorded > 0)] = recorded[activity.is_copy[index] & (recorded > 0)]
    # The operator of a kernel is the innermost one with a formula around its launch.
    is_counted = np.array([name in COUNTED_OPERATORS for name in trace.names], dtype=bool)
    candidates = np.flatnonzero(~activity.is_copy[index] & ~activity.is_communication[index])
    if not len(candidates) or not is_counted.any():
        return flops, moved, precisions
    is_counted_slice = is_counted[trace.name_index] & ~activity.on_gpu
    works = index[candidates]
    launches = activity.launches[works]
    operators = np.where(
        activity.on_gpu[works],
        np.where(launches >= 0, activity.find_around(np.maximum(launches, 0), is_counted_slice), -1),
        np.where(is_counted_slice[works], works, -1),
    )
    candidates, operators = candidates[operators >= 0], operators[operators >= 0]
    by_operator: dict[int, list[int]] = defaultdict(list)
    for candidate, operator in zip(candidates.tolist(), operators.tolist(), strict=True):
        by_operator[operator].append(candidate)
    matrix_numbers = [number for number, kind in enumerate(kind_names) if kind in MATRIX_KINDS]
    is_matrix = np.isin(kinds[index], matrix_numbers).tolist()
    durations = trace.duration_ns[index].tolist()
    costs: dict[tuple[str, bytes, bytes, bytes], Cost | None] = {}
    unique = np.array(list(by_operator), np.int64)
    shapes = decode_arguments(trace.arguments, unique, ShapeArgs)
    for operator, args in zip(unique.tolist(), shapes, strict=True):
        name = trace.names[trace.name_index[operator]]
        key = (name, bytes(args.dims), bytes(args.types), bytes(args.values))
        if key not in costs:
            costs[key] = count_cost(name, args)
        cost, launched = costs[key], by_operator[operator]
        if cost is None:
            continue
        # Of several kernels of one operator (split-K and its reduction), the longest of the class has its
        # FLOPs.
        if cost.flops:
            right = [one for one in launched if is_matrix[one]]
        else:
            right = launched if len(launched) == 1 else []
        if not right:
            continue
        chosen = max(right, key=durations.__getitem__)
        flops[chosen], moved[chosen], precisions[chosen] = cost.flops, cost.num_bytes, cost.dtype
    return flops, moved, precisions
