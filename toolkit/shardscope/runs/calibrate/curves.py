"""Measured curves: the operators and collectives of a training step, from small to large sizes.

Sizes grow as long as there is time. Matmuls and attention allocate new outputs in each call, as a step does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812

from shardscope.catalog import load_efficiency
from shardscope.runs.calibrate.stopwatch import MIN_SAMPLES, Stopwatch

Progress = Callable[[str, float], None]
"""Callback with a description and the completed fraction."""
Call = Callable[[], object]
"""One measured call."""
Case = tuple[int, ...]
"""Sizes of one measured call: a matmul's dimensions, a sequence length, or a number of bytes."""
Record = dict[str, str | int | float]
"""One point of a curve, with the field names of ``timing/calibration/curves.py``."""

TYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SHARES = {
    "matrix_products": 0.4,
    "attention": 0.15,
    "memory_passes": 0.1,
    "kernels": 0.05,
    "updates": 0.05,
    "host_copies": 0.05,
    "collectives": 0.2,
}
"""Share of the total time of each curve."""
GROWTH = 4
"""Assumed ratio of the times of two successive cases of a curve."""
MIN_CALLS = MIN_SAMPLES + 2
"""Minimum number of calls per case: a warmup, one to estimate the time, and the samples."""
MIB = 2**20


class Curves:
    """Measurement of all curves on this rank, together with the other ranks."""

    def __init__(self, device: torch.device, seconds: float, max_bytes: int, progress: Progress) -> None:
        self.device, self.seconds, self.max_bytes, self.progress = device, seconds, max_bytes, progress
        self.stopwatch = Stopwatch(device)
        self.on_gpu = device.type == "cuda"
        self.num_ranks = dist.get_world_size() if dist.is_initialized() else 1
        self.completed = 0.0

    def measure(self) -> dict[str, object]:
        """Measure all curves. Return them as fields of a ``Calibration``."""
        curves: dict[str, object] = {}
        for field, share, title, measure in (
            ("matrix_products", "matrix_products", "matrix products", self._measure_matmuls),
            ("attention", "attention", "attention", self._measure_attention),
            ("memory_passes", "memory_passes", "memory", self._measure_memory_passes),
            ("kernel_seconds", "kernels", "the start of operators", self._measure_launch_overhead),
            ("host_updates_per_second", "updates", "the host's optimizer", self._measure_host_updates),
            ("host_copies", "host_copies", "copies to the host", self._measure_host_copies),
            ("collectives", "collectives", "collectives", self._measure_collectives),
        ):
            self.progress(f"measuring {title}", self.completed)
            curves[field] = measure(SHARES[share] * self.seconds)
            self.completed += SHARES[share]
        return curves

    # ---- arithmetic

    def list_precisions(self) -> list[str]:
        """Return the precisions for which this device has matmul kernels."""
        if not self.on_gpu:
            return ["fp32", "bf16"]
        # Before Ampere (compute capability 8.0) bf16 is emulated and tf32 does not exist.
        newer = torch.cuda.get_device_capability(self.device) >= (8, 0)
        return ["fp32", "tf32", "bf16", "fp16"] if newer else ["fp32", "fp16"]

    def _measure_matmuls(self, seconds: float) -> list[Record]:
        precisions = self.list_precisions()
        records: list[Record] = []
        for precision in precisions:
            # torch's names: "high" allows TF32, "highest" is full fp32 (torch/__init__.py).
            torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
            make_call = partial(self._make_matmul, TYPES[precision])
            cases = self._list_shapes()
            for (rows, inner, columns), call_seconds in self._time_cases(
                cases, make_call, seconds / len(precisions)
            ):
                # Forward and the two matmuls of backward: the same FLOPs with other memory layouts.
                records.append({
                    "precision": precision, "rows": rows, "inner": inner, "columns": columns,
                    "seconds": call_seconds / 3,
                })  # fmt: skip
        torch.set_float32_matmul_precision("highest")
        return records

    def _list_shapes(self) -> list[Case]:
        """Return matmul shapes sorted by FLOPs: square ones, and few tokens with wide weights."""
        sizes = [512, 1024, 2048, 4096, 8192, 16384] if self.on_gpu else [64, 128, 256, 512, 1024, 2048]
        shapes: list[Case] = [(size, size, size) for size in sizes]
        shapes += [(size, 4 * size, size) for size in sizes[:-1]]
        shapes += [(sizes[1], size, size) for size in sizes[2:]]
        return sorted(set(shapes), key=lambda shape: shape[0] * shape[1] * shape[2])

    def _make_matmul(self, dtype: torch.dtype, case: Case) -> Call | None:
        # In fp32, the largest type, whatever the precision: so all precisions have the same shapes.
        rows, inner, columns = case
        if 4 * (rows * inner + inner * columns + rows * columns) > self.max_bytes:
            return None
        tokens, weight = self._make_random(dtype, rows, inner), self._make_random(dtype, columns, inner)
        gradient = self._make_random(dtype, rows, columns)

        def call() -> None:
            F.linear(tokens, weight)
            torch.mm(gradient, weight)
            torch.mm(gradient.t(), tokens)

        return call

    def _measure_attention(self, seconds: float) -> list[Record]:
        # Fused attention has no fp32 kernel on a GPU.
        precisions = [name for name in self.list_precisions() if not self.on_gpu or name in ("bf16", "fp16")]
        lengths = [512, 1024, 2048, 4096, 8192] if self.on_gpu else [64, 128, 256, 512, 1024]
        heads, dim = (32, 128) if self.on_gpu else (8, 64)
        records: list[Record] = []
        for precision in precisions:
            # Half of the time for each pass; with backward=True forward and backward are timed together.
            share = seconds / 2 / len(precisions)
            forward = self._time_attention(precision, lengths, heads, dim, share, backward=False)
            backward = self._time_attention(precision, lengths, heads, dim, share, backward=True)
            for length in lengths:
                if length in forward and length in backward:
                    records.append({
                        "precision": precision, "seq_len": length, "num_heads": heads, "head_dim": dim,
                        "forward_seconds": forward[length],
                        # Noise must not make the difference zero or negative.
                        "backward_seconds": max(backward[length] - forward[length], 1e-8),
                    })  # fmt: skip
        return records

    def _time_attention(
        self, precision: str, lengths: list[int], heads: int, dim: int, seconds: float, *, backward: bool
    ) -> dict[int, float]:
        """Return the seconds of a pass by sequence length: forward alone, or forward and backward."""

        def make_call(case: Case) -> Call:
            # The memory layout of a projection's output: the heads of a token are contiguous.
            shape = (1, case[0], heads, dim)
            q, k, v = (
                self._make_random(TYPES[precision], *shape).transpose(1, 2).requires_grad_(True)
                for _ in range(3)
            )

            def call() -> None:
                out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
                if backward:
                    torch.autograd.grad(out, (q, k, v), out)

            return call

        cases = [(length,) for length in lengths]
        return {case[0]: call_seconds for case, call_seconds in self._time_cases(cases, make_call, seconds)}

    # ---- memory

    def _measure_memory_passes(self, seconds: float) -> list[Record]:
        # Sizes up to 512 MiB, beyond all caches, as the data of an optimizer step are.
        sizes = [size for size in (MIB * 2**power for power in range(10)) if 3 * size <= self.max_bytes]

        def make_call(case: Case) -> Call:
            a, b = (self._make_random(torch.float32, case[0] // 4) for _ in range(2))
            # Two reads and one write: three times the bytes of one tensor.
            total = torch.empty_like(a)
            return lambda: torch.add(a, b, out=total)

        return [
            {"num_bytes": 3 * case[0], "seconds": call_seconds}
            for case, call_seconds in self._time_cases([(size,) for size in sizes], make_call, seconds)
        ]

    def _measure_launch_overhead(self, seconds: float) -> float:
        """Return the launch overhead of one operator, in seconds.

        The tensors are so small that a layer's time is only overhead. The time of a layer, forward and
        backward, is the difference of a deeper and a shallower model; it is divided by the number of
        operators per layer that the formulas count.
        """
        shallow, deep = 2, 6
        shallow_seconds = self.stopwatch.measure_work(self._make_small_model_step(shallow), seconds / 2)
        deep_seconds = self.stopwatch.measure_work(self._make_small_model_step(deep), seconds / 2)
        passes = load_efficiency()["passes"]["transformers"]
        operators = float(passes["kernels_forward"] + passes["kernels_backward"])
        # A lower bound of 0.1 us: noise must not make the result negative.
        return max((deep_seconds - shallow_seconds) / (deep - shallow) / operators, 1e-7)

    def _make_small_model_step(self, num_layers: int) -> Call:
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            hidden_size=64,
            intermediate_size=128,
            num_attention_heads=2,
            num_hidden_layers=num_layers,
            vocab_size=128,
            use_cache=False,
        )
        model: torch.nn.Module = LlamaForCausalLM(config)
        model.to(self.device)
        tokens = torch.zeros((1, 8), dtype=torch.long, device=self.device)

        def call() -> None:
            model(input_ids=tokens, labels=tokens).loss.backward()
            model.zero_grad(set_to_none=True)

        return call

    def _measure_host_updates(self, seconds: float) -> float:
        """Return the parameters per second of torch's fused AdamW in host memory, all ranks together."""
        # Parameter, gradient and two moments in fp32: 16 bytes per parameter.
        parameter = torch.zeros(min(16 * MIB, self.max_bytes // 16), requires_grad=True)
        parameter.grad = torch.ones_like(parameter)
        optimizer = torch.optim.AdamW([parameter], fused=True)
        update_seconds = Stopwatch(torch.device("cpu")).measure_work(optimizer.step, seconds)
        return self.stopwatch.sum_over_ranks(parameter.numel() / update_seconds)

    def _measure_host_copies(self, seconds: float) -> list[Record]:
        if not self.on_gpu:
            return []
        sizes = [(MIB // 16 * 4**power,) for power in range(7)]
        records: list[Record] = []
        for direction in ("to_gpu", "to_host"):
            for case, call_seconds in self._time_cases(
                sizes, partial(self._make_host_copy, direction), seconds / 2
            ):
                records.append({"direction": direction, "num_bytes": case[0], "seconds": call_seconds})
        return records

    def _make_host_copy(self, direction: str, case: Case) -> Call:
        # Pinned memory, as the frameworks' offloading uses it; copies from pageable memory are much slower.
        on_host = torch.empty(case[0], dtype=torch.uint8, pin_memory=True)
        on_device = torch.empty(case[0], dtype=torch.uint8, device=self.device)
        target, source = (on_device, on_host) if direction == "to_gpu" else (on_host, on_device)
        return lambda: target.copy_(source, non_blocking=True)

    # ---- collectives

    def _measure_collectives(self, seconds: float) -> list[Record]:
        if self.num_ranks == 1:
            return []
        powers = range(1, 9) if self.on_gpu else range(1, 7)
        sizes = [(4096 * 4**power,) for power in powers if 4096 * 4**power * 4 <= self.max_bytes]
        records: list[Record] = []
        for name, make_call in (
            ("all_reduce", self._make_all_reduce),
            ("all_gather", self._make_all_gather),
            ("reduce_scatter", self._make_reduce_scatter),
            ("all_to_all", self._make_all_to_all),
            ("send", self._make_send),
        ):
            for case, call_seconds in self._time_cases(
                sizes, make_call, seconds / 5, self.stopwatch.measure_waiting
            ):
                # `_make_send` sends to the peer and back: two transfers a call.
                transfer_seconds = call_seconds / 2 if name == "send" else call_seconds
                num_bytes = self._round_to_shards(case[0])
                records.append({"collective": name, "num_bytes": num_bytes, "seconds": transfer_seconds})
        return records

    def _round_to_shards(self, size: int) -> int:
        """Return ``size`` rounded down so that all ranks have equal shards."""
        return size // (4 * self.num_ranks) * 4 * self.num_ranks

    def _make_vector(self, num_bytes: int) -> torch.Tensor:
        # fp32 on CPU ranks, bf16 on GPUs: the usual types of gradient reductions there.
        dtype = torch.bfloat16 if self.on_gpu else torch.float32
        return torch.ones(num_bytes // dtype.itemsize, dtype=dtype, device=self.device)

    def _make_all_reduce(self, case: Case) -> Call:
        full = self._make_vector(self._round_to_shards(case[0]))
        return lambda: dist.all_reduce(full)

    def _make_all_gather(self, case: Case) -> Call:
        full = self._make_vector(self._round_to_shards(case[0]))
        shard = self._make_vector(self._round_to_shards(case[0]) // self.num_ranks)
        return lambda: dist.all_gather_into_tensor(full, shard)

    def _make_reduce_scatter(self, case: Case) -> Call:
        full = self._make_vector(self._round_to_shards(case[0]))
        shard = self._make_vector(self._round_to_shards(case[0]) // self.num_ranks)
        return lambda: dist.reduce_scatter_tensor(shard, full)

    def _make_all_to_all(self, case: Case) -> Call:
        full = self._make_vector(self._round_to_shards(case[0]))
        target = torch.empty_like(full)
        return lambda: dist.all_to_all_single(target, full)

    def _make_send(self, case: Case) -> Call:
        """Return a send to the peer rank and back; with an odd number of ranks the last one is idle."""
        rank, full = dist.get_rank(), self._make_vector(self._round_to_shards(case[0]))
        peer = rank ^ 1
        if peer >= self.num_ranks:
            return lambda: None
        if rank < peer:
            return lambda: (dist.send(full, peer), dist.recv(full, peer))
        return lambda: (dist.recv(full, peer), dist.send(full, peer))

    # ---- shared

    def _time_cases(
        self,
        cases: Sequence[Case],
        make_call: Callable[[Case], Call | None],
        seconds: float,
        measure: Callable[[Call, float], float] | None = None,
    ) -> Iterator[tuple[Case, float]]:
        """Yield (case, seconds of a call), smallest case first, while time is left, but at least one.

        ``measure`` defaults to :meth:`Stopwatch.measure_work`. A case that does not fit into memory, whose
        ``make_call`` returns None, ends the curve.
        """
        measure = measure or self.stopwatch.measure_work
        end, last = time.monotonic() + seconds, 0.0
        for number, case in enumerate(cases):
            # All ranks must decide the same, so they use the largest remaining time of any rank.
            left = self.stopwatch.max_over_ranks(end - time.monotonic())
            if number and GROWTH * MIN_CALLS * last > left:
                return
            call = make_call(case)
            if call is None:
                return
            call_seconds = measure(call, max(left, 0.0) / (len(cases) - number))
            last = self.stopwatch.seconds_per_call
            yield case, call_seconds

    def _make_random(self, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device=self.device).to(dtype)
