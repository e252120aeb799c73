"""What DeepSpeed asks of an accelerator, answered without one, for a rehearsal in a process of its own.

Fake tensors live on "the CPU" (a build of torch without CUDA has no autograd for fake CUDA tensors), so
DeepSpeed is told that this is the accelerator. Three things have stand-ins: numbers read off tensors (losses
and norms, which become 1, and overflow flags, which become 0), comparisons of integers between ranks, and the
compiled Adam kernel, which updates in place and so allocates nothing.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
from types import SimpleNamespace, TracebackType
from typing import Any, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_GROUPS_IN_SMALL = ("mpu", "mesh_device", "expert_tensor_parallel_world_size")
"""What ``deepspeed.utils.groups`` keeps between engines under names that are no constants'."""
_ROOMY = 2**50
"""Free memory of a device that has no end: DeepSpeed flattens on the host where there is too little."""


def import_deepspeed() -> Any:
    """``deepspeed`` with its CPU accelerator, quietly; ``ValueError`` where it is not installed."""
    os.environ.update(DS_ACCELERATOR="cpu", LOCAL_RANK="0")
    try:
        deepspeed: Any = importlib.import_module("deepspeed")
    except ImportError as missing:
        raise ValueError(
            "Layout.framework is 'deepspeed', not installed here. Nearest fix: pip install deepspeed."
        ) from missing
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    return deepspeed


class FakeDevice:
    """While this lasts, DeepSpeed runs on fake tensors as rank ``rank`` of ``world_size``.

    ``separate_host``: the accelerator is "cpu:0", for fake tensors another device than the host's "cpu".
    """

    def __init__(
        self, deepspeed: Any, world_size: int, rank: int = 0, *, separate_host: bool = False
    ) -> None:
        self.deepspeed = deepspeed
        self.name = "cpu:0" if separate_host else "cpu"
        os.environ.update(
            RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_ADDR="localhost", MASTER_PORT="1"
        )
        self._before: list[tuple[Any, str, Any]] = []

    def __enter__(self) -> Self:
        from deepspeed.accelerator import get_accelerator, set_accelerator
        from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

        self._comm: Any = importlib.import_module("deepspeed.comm.comm")
        self._groups: Any = importlib.import_module("deepspeed.utils.groups")
        self._groups_were = {
            name: dict(value) if isinstance(value, dict) else value
            for name, value in vars(self._groups).items()
            if name.isupper() or name in _GROUPS_IN_SMALL
        }
        self._was = get_accelerator()
        set_accelerator(_accelerator(CPU_Accelerator, self.name))
        self.deepspeed.init_distributed("fake", dist_init_required=False)
        coordinator = importlib.import_module("deepspeed.runtime.zero.partitioned_param_coordinator")
        self._patch(coordinator, "assert_ints_same_as_other_ranks", _agreed)
        adam = importlib.import_module("deepspeed.ops.adam.fused_adam")
        self._patch(adam, "FusedAdamBuilder", _InPlace)
        lion = importlib.import_module("deepspeed.ops.lion.fused_lion")
        self._patch(lion, "FusedLionBuilder", _InPlace)
        cpu_adam = importlib.import_module("deepspeed.ops.adam.cpu_adam")
        self._patch(cpu_adam, "CPUAdamBuilder", _InPlace)
        # Fake tensors have no address; DeepSpeed checks that partitions begin at aligned ones.
        self._patch(importlib.import_module("torch._subclasses.fake_tensor").FakeTensor, "data_ptr", _aligned)
        # The model is made in its place; Module.to would swap every fake parameter for a copy.
        self._patch(torch.nn.Module, "to", _already_there)
        # What ranks of tp compare and share: batches, objects, and which rows of the vocabulary each has.
        self._patch(torch, "equal", _same)
        backend = importlib.import_module("deepspeed.comm.torch").TorchBackend
        self._patch(backend, "broadcast_object_list", _nothing)
        loss = importlib.import_module("deepspeed.sequence.cross_entropy")
        self._patch(loss, "_validate_vocab_shard_bounds", self._whole_vocabulary)
        # zero.Init puts its own in place and leaves it there.
        self._patch(torch.nn.functional, "linear", torch.nn.functional.linear)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        from deepspeed.accelerator import set_accelerator

        # DeepSpeed keeps its groups in modules; the next rehearsal of this process makes others.
        self._comm.cdb = None
        for name, value in self._groups_were.items():
            setattr(self._groups, name, value)
        for owner, name, was in reversed(self._before):
            setattr(owner, name, was)
        set_accelerator(self._was)

    def numbers(self) -> contextlib.AbstractContextManager[Any]:
        """Inside, a number read off a fake tensor is 1.0, a count or a flag 0."""
        mode: contextlib.AbstractContextManager[Any] = _Numbers()
        return mode

    def _whole_vocabulary(self, rows: int, start: int, end: int, tp_group: Any, device: Any) -> int:
        """Rows of all ranks together, each with as many as this one."""
        return rows * (torch.distributed.get_world_size(tp_group) if tp_group is not None else 1)

    def _patch(self, owner: Any, name: str, stand_in: Any) -> None:
        self._before.append((owner, name, getattr(owner, name)))
        setattr(owner, name, stand_in)


def _accelerator(cpu: Any, name: str) -> Any:
    class FakeAccelerator(cpu):  # type: ignore[misc]
        """Its device is where fake tensors are; nothing is compiled for it."""

        _communication_backend_name = "fake"

        def device_name(self, device_index: int | None = None) -> str:
            return name

        def current_device_name(self) -> str:
            return name

        def device_count(self) -> int:
            return 8

        def available_memory(self, device_index: int | None = None) -> int:
            return _ROOMY

        def create_op_builder(self, op_name: str) -> None:
            return None

        def on_accelerator(self, tensor: torch.Tensor) -> bool:
            return bool(tensor.device == torch.device(name))

        def is_fp64_supported(self) -> bool:
            return True

        def is_fp16_supported(self) -> bool:
            return True

        def memory_stats(self, device_index: int | None = None) -> dict[str, int]:
            return {}

    return FakeAccelerator()


class _InPlace:
    """In place of builders of fused and host optimizers: all change weights and moments in place."""

    def load(self) -> SimpleNamespace:
        names = ("multi_tensor_adam", "multi_tensor_lion", "create_adam", "adam_update", "destroy_adam")
        return SimpleNamespace(**dict.fromkeys(names, _nothing))


class _Numbers(TorchDispatchMode):  # type: ignore[misc]
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten._local_scalar_dense.default:
            return 1.0 if args[0].is_floating_point() else 0
        return function(*args, **(kwargs or {}))


def _nothing(*_: Any, **__: Any) -> None:
    """Changes numbers, of which there are none."""


def _same(*_: Any) -> bool:
    """Ranks of tp get the same batch."""
    return True


def _agreed(*_: Any) -> None:
    """All ranks run the same modules in the same order."""


def _aligned(_: Any) -> int:
    return 0


def _already_there(module: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
    """``Module.to`` of what lies in its place already: peft makes adapters in fp32, then casts them."""
    kind = next((value for value in (*args, *kwargs.values()) if isinstance(value, torch.dtype)), None)
    for parameter in module.parameters() if kind is not None else ():
        if parameter.is_floating_point() and parameter.dtype != kind:
            parameter.data = parameter.data.to(kind)
    return module
