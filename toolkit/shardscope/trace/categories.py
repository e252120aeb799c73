"""Categories and names of events as profilers write them, grouped by meaning."""

from __future__ import annotations

import re

COPY_CATEGORIES = frozenset({"gpu_memcpy", "gpu_memset", "Memcpy", "Memset"})
"""Copies on a device; torch wrote the capitalized ones before 1.11."""

GPU_CATEGORIES = COPY_CATEGORIES | {"kernel", "gpu_user_annotation", "Kernel", "mtia_ccp_events"}
"""Categories of work on a device."""

RUNTIME_CATEGORIES = frozenset(
    {"cuda_runtime", "cuda_driver", "hip_runtime", "mtia_runtime", "xpu_runtime", "privateuse1_runtime",
     "privateuse1_driver", "Runtime"}
)  # fmt: skip
"""Categories of runtime calls, which carry the correlation id of what they launch."""

PYTHON_CATEGORY = "python_function"
"""Python stack frames, recorded with ``with_stack=True``: 38 to 55 rows in real traces."""

OVERFLOW_CATEGORY = "overflow"
"""Sums of slices for which a track has no row left: our own category, not a profiler's."""

WRAPPER_CATEGORIES = frozenset(
    {"user_annotation", "gpu_user_annotation", "cuda_sync", PYTHON_CATEGORY, "Trace", OVERFLOW_CATEGORY}
)
"""Categories of slices around work (ProfilerStep, stack frames). They span idle time too: not busy time.

Kineto draws ``cuda_sync`` (``enable_cuda_sync_events``) on the stream that the host, or another stream, waits
for."""

COMMUNICATION_KERNELS = re.compile(
    r"nccl|rccl|multimem_|deep_?ep|nvshmem|mscclpp|oneccl|\bhccl\b|\bhcom_|cross_device_reduce|one_shot_all_reduce"
    r"|two_shot_all_reduce",
    re.IGNORECASE,
)
"""Names of kernels that communicate, for recordings without collectives' arguments."""
HOST_COLLECTIVES = re.compile(r"(?:gloo|mpi|ucc|ccl|xccl):(\w+)")
"""Annotations that ProcessGroupGloo and others put around a collective that runs on the CPU."""
STEP = re.compile(r"ProfilerStep\s*#?(\d+)")
"""Annotation of a training step, from ``profiler.step()``."""
