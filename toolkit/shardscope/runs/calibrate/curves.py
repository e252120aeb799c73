"""Measured curves: the operators and collectives of a training step, from small to large sizes.

Sizes grow as long as there is time. Matmuls and attention allocate new outputs in each call, as a step does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812

from shardscope.catalog import load_efficiency
from shardscope.runs.calibrate.stopwatch import MIN_SAMPLES, Stopwatch

Said = Callable[[str, float], None]
"""Callback with a description and the completed fraction."""

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
FEWEST_CALLS = MIN_SAMPLES + 2
"""Minimum number of calls per case: a warmup, one to estimate the time, and the samples."""
MIB = 2**20


class Curves:
    """Measurement of all curves on this rank, together with the other ranks."""

    def __init__(self, device: torch.device, seconds: float, most_bytes: int, said: Said) -> None:
        self.device, self.seconds, self.most_bytes, self.said = device, seconds, most_bytes, said
        self.watch = Stopwatch(device)
        self.on_gpu = device.type == "cuda"
        self.num_ranks = dist.get_world_size() if dist.is_initialized() else 1
        self.done = 0.0

    def measured(self) -> dict[str, Any]:
        """Measure all curves. Return them as fields of a ``Calibration``."""
        found: dict[str, Any] = {}
        found["matrix_products"] = self._told("matrix products", "matrix_products", self._products)
        found["attention"] = self._told("attention", "attention", self._attention)
        found["memory_passes"] = self._told("memory", "memory_passes", self._passes)
        found["kernel_seconds"] = self._told("the start of operators", "kernels", self._kernel)
        found["host_updates_per_second"] = self._told("the host's optimizer", "updates", self._updates)
        found["host_copies"] = self._told("copies to the host", "host_copies", self._copies)
        found["collectives"] = self._told("collectives", "collectives", self._collectives)
        return found

    def _told(self, words: str, name: str, measure: Callable[[float], Any]) -> Any:
        self.said(f"measuring {words}", self.done)
        result = measure(SHARES[name] * self.seconds)
        self.done += SHARES[name]
        return result

    # ---- arithmetic

    def precisions(self) -> list[str]:
        """Return the precisions for which this device has matmul kernels."""
        if not self.on_gpu:
            return ["fp32", "bf16"]
        # Before Ampere (compute capability 8.0) bf16 is emulated and tf32 does not exist.
        newer = torch.cuda.get_device_capability(self.device) >= (8, 0)
        return ["fp32", "tf32", "bf16", "fp16"] if newer else ["fp32", "fp16"]

    def _products(self, seconds: float) -> list[dict[str, Any]]:
        precisions, found = self.precisions(), []
        for precision in precisions:
            torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
            for rows, inner, columns, took in self._growing(
                self._shapes(), partial(self._product, TYPES[precision]), seconds / len(precisions)
            ):
                # Forward and the two matmuls of backward: the same FLOPs with other memory layouts.
                found.append({
                    "precision": precision, "rows": rows, "inner": inner, "columns": columns,
                    "seconds": took / 3,
                })  # fmt: skip
        torch.set_float32_matmul_precision("highest")
        return found

    def _shapes(self) -> list[tuple[int, int, int]]:
        """Return matmul shapes sorted by FLOPs: square ones, and few tokens with wide weights."""
        sizes = [512, 1024, 2048, 4096, 8192, 16384] if self.on_gpu else [64, 128, 256, 512, 1024, 2048]
        shapes = [(size, size, size) for size in sizes]
        shapes += [(size, 4 * size, size) for size in sizes[:-1]]
        shapes += [(sizes[1], size, size) for size in sizes[2:]]
        return sorted(set(shapes), key=lambda shape: shape[0] * shape[1] * shape[2])

    def _product(self, kind: torch.dtype, shape: Sequence[int]) -> Callable[[], Any] | None:
        rows, inner, columns = shape
        if 4 * (rows * inner + inner * columns + rows * columns) > self.most_bytes:
            return None
        tokens, weight = self._random(kind, rows, inner), self._random(kind, columns, inner)
        gradient = self._random(kind, rows, columns)

        def call() -> None:
            F.linear(tokens, weight)
            torch.mm(gradient, weight)
            torch.mm(gradient.t(), tokens)

        return call

    def _attention(self, seconds: float) -> list[dict[str, Any]]:
        # Fused attention has no fp32 kernel on a GPU.
        kinds = [name for name in self.precisions() if not self.on_gpu or name in ("bf16", "fp16")]
        lengths = [512, 1024, 2048, 4096, 8192] if self.on_gpu else [64, 128, 256, 512, 1024]
        heads, dim = (32, 128) if self.on_gpu else (8, 64)
        found = []
        for precision in kinds:
            # Half of the time for each; `_scores` with backward=True times forward and backward together.
            forward = self._scores(precision, lengths, heads, dim, seconds / 2 / len(kinds), backward=False)
            backward = self._scores(precision, lengths, heads, dim, seconds / 2 / len(kinds), backward=True)
            for length in lengths:
                if length in forward and length in backward:
                    found.append({
                        "precision": precision, "seq_len": length, "num_heads": heads, "head_dim": dim,
                        "forward_seconds": forward[length],
                        "backward_seconds": max(backward[length] - forward[length], 1e-8),
                    })  # fmt: skip
        return found

    def _scores(
        self, precision: str, lengths: list[int], heads: int, dim: int, seconds: float, *, backward: bool
    ) -> dict[int, float]:
        """Return the seconds of a pass by sequence length: forward alone, or forward and backward."""

        def made(case: Sequence[int]) -> Callable[[], Any]:
            # The memory layout of a projection's output: the heads of a token are contiguous.
            q, k, v = (
                self._random(TYPES[precision], 1, case[0], heads, dim).transpose(1, 2).requires_grad_(True)
                for _ in range(3)
            )

            def call() -> None:
                out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
                if backward:
                    torch.autograd.grad(out, (q, k, v), out)

            return call

        return dict(self._growing([(length,) for length in lengths], made, seconds))

    # ---- memory

    def _passes(self, seconds: float) -> list[dict[str, Any]]:
        # Sizes up to 512 MiB, beyond all caches, as the data of an optimizer step are.
        sizes = [size for size in (MIB * 2**power for power in range(10)) if 3 * size <= self.most_bytes]

        def made(case: Sequence[int]) -> Callable[[], Any]:
            a, b = (self._random(torch.float32, case[0] // 4) for _ in range(2))
            total = torch.empty_like(a)
            return lambda: torch.add(a, b, out=total)

        return [
            {"num_bytes": 3 * size, "seconds": took}
            for size, took in self._growing([(size,) for size in sizes], made, seconds)
        ]

    def _kernel(self, seconds: float) -> float:
        """Return the launch overhead of one operator, in seconds.

        The tensors are so small that a layer's time is only overhead. The time of a layer, forward and
        backward, is the difference of a deeper and a shallower model; it is divided by the number of
        operators per layer that the formulas count.
        """
        shallow, deep = 2, 6
        took = [self.watch.work(self._steps(layers), seconds / 2) for layers in (shallow, deep)]
        counted = load_efficiency()["passes"]["transformers"]
        operators = float(counted["kernels_forward"] + counted["kernels_backward"])
        # A lower bound of 0.1 us: noise must not make the result negative.
        return max((took[1] - took[0]) / (deep - shallow) / operators, 1e-7)

    def _steps(self, num_layers: int) -> Callable[[], Any]:
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            hidden_size=64,
            intermediate_size=128,
            num_attention_heads=2,
            num_hidden_layers=num_layers,
            vocab_size=128,
            use_cache=False,
        )
        model = LlamaForCausalLM(config).to(self.device)
        tokens = torch.zeros((1, 8), dtype=torch.long, device=self.device)

        def call() -> None:
            model(input_ids=tokens, labels=tokens).loss.backward()
            model.zero_grad(set_to_none=True)

        return call

    def _updates(self, seconds: float) -> float:
        """Return the parameters per second of torch's fused AdamW in host memory, all ranks together."""
        # Parameter, gradient and two moments in fp32: 16 bytes per parameter.
        parameter = torch.zeros(min(16 * MIB, self.most_bytes // 16), requires_grad=True)
        parameter.grad = torch.ones_like(parameter)
        optimizer = torch.optim.AdamW([parameter], fused=True)
        took = Stopwatch(torch.device("cpu")).work(optimizer.step, seconds)
        return self.watch.total(parameter.numel() / took)

    def _copies(self, seconds: float) -> list[dict[str, Any]]:
        if not self.on_gpu:
            return []
        found = []
        for direction in ("to_gpu", "to_host"):

            def made(case: Sequence[int], direction: str = direction) -> Callable[[], Any]:
                host = torch.empty(case[0], dtype=torch.uint8, pin_memory=True)
                there = torch.empty(case[0], dtype=torch.uint8, device=self.device)
                target, source = (there, host) if direction == "to_gpu" else (host, there)
                return lambda: target.copy_(source, non_blocking=True)

            sizes = [(MIB // 16 * 4**power,) for power in range(7)]
            for size, took in self._growing(sizes, made, seconds / 2):
                found.append({"direction": direction, "num_bytes": size, "seconds": took})
        return found

    # ---- collectives

    def _collectives(self, seconds: float) -> list[dict[str, Any]]:
        if self.num_ranks == 1:
            return []
        powers = range(1, 9) if self.on_gpu else range(1, 7)
        sizes = [(4096 * 4**power,) for power in powers if 4096 * 4**power * 4 <= self.most_bytes]
        found = []
        for name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"):
            made = getattr(self, f"_{name}")
            for size, took in self._growing(sizes, made, seconds / 5, self.watch.waiting):
                # `_send` sends there and back.
                each = took / 2 if name == "send" else took
                found.append({"collective": name, "num_bytes": self._whole(size), "seconds": each})
        return found

    def _whole(self, size: int) -> int:
        """Return ``size`` rounded down so that all ranks have equal shards."""
        return size // (4 * self.num_ranks) * 4 * self.num_ranks

    def _vector(self, num_bytes: int) -> torch.Tensor:
        # fp32 on CPU ranks, bf16 on GPUs: the usual types of gradient reductions there.
        kind = torch.bfloat16 if self.on_gpu else torch.float32
        return torch.ones(num_bytes // kind.itemsize, dtype=kind, device=self.device)

    def _all_reduce(self, case: Sequence[int]) -> Callable[[], Any]:
        whole = self._vector(self._whole(case[0]))
        return lambda: dist.all_reduce(whole)

    def _all_gather(self, case: Sequence[int]) -> Callable[[], Any]:
        whole = self._vector(self._whole(case[0]))
        part = self._vector(self._whole(case[0]) // self.num_ranks)
        return lambda: dist.all_gather_into_tensor(whole, part)

    def _reduce_scatter(self, case: Sequence[int]) -> Callable[[], Any]:
        whole = self._vector(self._whole(case[0]))
        part = self._vector(self._whole(case[0]) // self.num_ranks)
        return lambda: dist.reduce_scatter_tensor(part, whole)

    def _all_to_all(self, case: Sequence[int]) -> Callable[[], Any]:
        whole = self._vector(self._whole(case[0]))
        target = torch.empty_like(whole)
        return lambda: dist.all_to_all_single(target, whole)

    def _send(self, case: Sequence[int]) -> Callable[[], Any]:
        """Return a send to the peer rank and back; with an odd number of ranks the last one is idle."""
        rank, whole = dist.get_rank(), self._vector(self._whole(case[0]))
        peer = rank ^ 1
        if peer >= self.num_ranks:
            return lambda: None
        if rank < peer:
            return lambda: (dist.send(whole, peer), dist.recv(whole, peer))
        return lambda: (dist.recv(whole, peer), dist.send(whole, peer))

    # ---- shared

    def _growing(
        self,
        cases: Sequence[tuple[int, ...]],
        made: Callable[[Sequence[int]], Callable[[], Any] | None],
        seconds: float,
        timed: Callable[[Callable[[], Any], float], float] | None = None,
    ) -> Iterator[tuple[Any, ...]]:
        """Yield ``(*case, seconds)`` for each case, smallest first, while time is left, but at least one."""
        timed = timed or self.watch.work
        end, last = time.monotonic() + seconds, 0.0
        for number, case in enumerate(cases):
            left = self.watch.slowest(end - time.monotonic())
            if number and GROWTH * FEWEST_CALLS * last > left:
                return
            call = made(case)
            if call is None:
                return
            took = timed(call, max(left, 0.0) / (len(cases) - number))
            last = self.watch.once
            yield (*case, took)

    def _random(self, kind: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device=self.device).to(kind)
