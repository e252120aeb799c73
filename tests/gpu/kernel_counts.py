"""Counts and times the kernels of one decoder layer on this machine's GPU, for catalog/efficiency.toml.

``python -m tests.gpu.kernel_counts`` prints one JSON line per stack: transformers' Llama and Mixtral layers,
with eager attention, with Liger's kernels, and compiled. Each figure of a layer is a fraction of the
difference between two models of other depths; the rest of the model is ``ends``.

- ``kernels``: kernels, copies and fills on the GPU, forward and backward, in a profile of 64 tokens;
- ``host_seconds``: wall-clock time of the same pass without a profiler, where the GPU waits for the host;
- ``gpu_seconds``: kernels' time by kind for 8,192 tokens, where the host is ahead.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

FEW, MANY, MANY_LONG = 2, 18, 4
"""Layers of the two models, and of the larger one with many tokens."""
SHORT, LONG = 64, 8192
"""Tokens: so few that the host bounds each pass, and so many that it does not."""
_KINDS = (
    ("attention", "flash|fmha|sdpa|attention"),
    ("matmul", "gemm|cutlass|cublas|nvjet|splitK|grouped_mm"),
)
_TIMED = 15


class Stack(NamedTuple):
    """What runs the layers."""

    name: str
    kernels: str = "transformers"
    attention: str = "sdpa"
    family: str = "llama"
    mixed: bool = False
    """fp32 weights under autocast; otherwise bf16 weights."""


STACKS = (
    Stack("transformers"),
    Stack("transformers, mixed", mixed=True),
    Stack("transformers, eager attention", attention="eager"),
    Stack("transformers, Mixtral", family="mixtral"),
    Stack("liger", kernels="liger"),
    Stack("liger, mixed", kernels="liger", mixed=True),
    Stack("liger, eager attention", kernels="liger", attention="eager"),
    Stack("compiled", kernels="compiled"),
    Stack("compiled, mixed", kernels="compiled", mixed=True),
    Stack("compiled, eager attention", kernels="compiled", attention="eager"),
)


def measure(stack: Stack) -> dict[str, Any]:
    """Return the figures of one stack."""
    short = {layers: _measure_passes(stack, layers, SHORT) for layers in (FEW, MANY)}
    long = {layers: _measure_passes(stack, layers, LONG) for layers in (FEW, MANY_LONG)}
    figures: dict[str, Any] = {"stack": stack.name}
    for phase in ("forward", "backward"):
        kernels, kernels_ends = _split(short[FEW][phase].kernels, short[MANY][phase].kernels, MANY)
        host, host_ends = _split(short[FEW][phase].seconds, short[MANY][phase].seconds, MANY)
        few, many = (long[layers][phase].gpu_seconds for layers in (FEW, MANY_LONG))
        figures[phase] = {
            "kernels": kernels,
            "kernels_ends": kernels_ends,
            "host_seconds": host,
            "host_seconds_ends": host_ends,
            "gpu_seconds": {kind: _split(few[kind], many[kind], MANY_LONG)[0] for kind in few},
            "names": short[MANY][phase].names,
        }
    return figures


def _split(few: float, many: float, num_layers: int) -> tuple[float, float]:
    """Return the figure of one layer, and of the rest of the model."""
    layer = (many - few) / (num_layers - FEW)
    return layer, few - FEW * layer


class Pass(NamedTuple):
    """Forward or backward of a whole model."""

    kernels: int
    gpu_seconds: dict[str, float]
    """By kind of kernel."""
    names: dict[str, int]
    """Number of kernels by the begin of their names."""
    seconds: float = 0.0
    """Wall-clock time without a profiler."""


def _measure_passes(stack: Stack, num_layers: int, tokens: int) -> dict[str, Pass]:
    import torch

    # The model before this one is in cycles of references.
    gc.collect()
    torch.cuda.empty_cache()
    model = _build(stack, num_layers)
    ids = torch.randint(0, 4096, (1, tokens), device="cuda")

    def forward() -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=stack.mixed):
            loss: torch.Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
        return loss

    for _ in range(3):
        forward().backward()
        model.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    with _profile() as of_forward:
        loss = forward()
        torch.cuda.synchronize()
    with _profile() as of_backward:
        loss.backward()
        torch.cuda.synchronize()
    forwards, backwards = [], []
    for _ in range(_TIMED):
        model.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        loss = forward()
        torch.cuda.synchronize()
        between = time.perf_counter()
        loss.backward()
        torch.cuda.synchronize()
        forwards.append(between - begin)
        backwards.append(time.perf_counter() - between)
    del loss
    return {
        "forward": _summarize(of_forward)._replace(seconds=min(forwards)),
        "backward": _summarize(of_backward)._replace(seconds=min(backwards)),
    }


def _build(stack: Stack, num_layers: int) -> Any:
    import torch
    import transformers

    sizes: dict[str, Any] = {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "vocab_size": 32_000,
        "max_position_embeddings": LONG,
    }
    if stack.family == "mixtral":
        config: Any = transformers.MixtralConfig(**sizes, num_local_experts=8, num_experts_per_tok=2)
    else:
        config = transformers.LlamaConfig(**sizes)
    config._attn_implementation = stack.attention
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(
            config,
            attn_implementation=stack.attention,
            dtype=torch.float32 if stack.mixed else torch.bfloat16,
        )
    model.train()
    if stack.kernels == "liger":
        from liger_kernel.transformers import _apply_liger_kernel_to_instance

        _apply_liger_kernel_to_instance(model=model)
    if stack.kernels == "compiled":
        from shardscope.training.model.compile_layers import compile_layers

        torch._dynamo.reset()
        compile_layers(model, "cuda")
    return model


@contextlib.contextmanager
def _profile() -> Iterator[list[dict[str, Any]]]:
    import torch

    recorded: list[dict[str, Any]] = []
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        yield recorded
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    recorded += [one for one in events if one.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]


def _summarize(recorded: list[dict[str, Any]]) -> Pass:
    seconds = {"attention": 0.0, "matmul": 0.0, "elementwise": 0.0}
    for one in recorded:
        kinds = (kind for kind, pattern in _KINDS if re.search(pattern, one["name"], re.IGNORECASE))
        seconds[next(kinds, "elementwise")] += one["dur"] / 1e6
    names = Counter(re.sub(r"<.*|\(.*", "", one["name"])[:60] for one in recorded)
    return Pass(len(recorded), seconds, dict(names))


def main() -> None:
    if sys.argv[1:]:
        print(json.dumps(measure(next(stack for stack in STACKS if stack.name == sys.argv[1]))))
        return
    import torch
    import transformers

    packages = {"torch": torch.__version__, "transformers": transformers.__version__}
    print(json.dumps({"gpu": torch.cuda.get_device_name(), "cpus": os.cpu_count(), **packages}), flush=True)
    for stack in STACKS:
        # Liger replaces functions of transformers' modules, so each stack has a process of its own.
        done = subprocess.run(
            [sys.executable, "-m", "tests.gpu.kernel_counts", stack.name],
            check=False,
            capture_output=True,
            text=True,
        )
        failure = {"stack": stack.name, "error": done.stderr[-400:]}
        print(json.dumps(failure) if done.returncode else done.stdout.splitlines()[-1], flush=True)


if __name__ == "__main__":
    main()
