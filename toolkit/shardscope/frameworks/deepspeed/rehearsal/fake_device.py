"""Fake accelerator of DeepSpeed for rehearsals, which run in a process of their own.

Fake tensors are on the CPU device (torch without CUDA has no autograd for fake CUDA tensors), which DeepSpeed
takes for its accelerator. It replaces values read from tensors (losses and norms are 1, overflow flags
0), comparisons of integers between ranks, and compiled optimizer kernels, which update in place and allocate
nothing.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType, SimpleNamespace, TracebackType
from typing import TYPE_CHECKING, Self

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from shardscope.frameworks.deepspeed.group_state import copy_groups, restore_groups

if TYPE_CHECKING:
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

FREE_BYTES = 2**50
"""Free memory of the device: DeepSpeed flattens on the host if there is too little."""


def import_deepspeed() -> ModuleType:
    """Import ``deepspeed`` with its CPU accelerator, without log messages.

    Raises ``ValueError`` if it is not installed.
    """
    os.environ.update(DS_ACCELERATOR="cpu", LOCAL_RANK="0")
    try:
        deepspeed = importlib.import_module("deepspeed")
    except ImportError as missing:
        raise ValueError(
            "Layout.framework is 'deepspeed', not installed here. Nearest fix: pip install deepspeed."
        ) from missing
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    return deepspeed


class FakeDevice:
    """Context in which DeepSpeed runs on fake tensors as rank ``rank`` of ``world_size``.

    ``separate_host``: the accelerator is "cpu:0", for fake tensors another device than the host's "cpu".
    """

    def __init__(
        self, deepspeed: ModuleType, world_size: int, rank: int = 0, *, separate_host: bool = False
    ) -> None:
        self.deepspeed = deepspeed
        self.name = "cpu:0" if separate_host else "cpu"
        os.environ.update(
            RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_ADDR="localhost", MASTER_PORT="1"
        )
        self._originals: list[tuple[object, str, object]] = []

    def __enter__(self) -> Self:
        from deepspeed.accelerator import get_accelerator, set_accelerator
        from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

        self._initial_groups = copy_groups()
        self._accelerator = get_accelerator()
        set_accelerator(_build_accelerator(CPU_Accelerator, self.name))
        self.deepspeed.init_distributed("fake", dist_init_required=False)
        # ZeRO-3 compares its trace of modules with other ranks', which do not exist.
        coordinator = importlib.import_module("deepspeed.runtime.zero.partitioned_param_coordinator")
        self._patch(coordinator, "assert_ints_same_as_other_ranks", _do_nothing)
        # Optimizers with compiled kernels.
        adam = importlib.import_module("deepspeed.ops.adam.fused_adam")
        self._patch(adam, "FusedAdamBuilder", _InPlaceBuilder)
        lion = importlib.import_module("deepspeed.ops.lion.fused_lion")
        self._patch(lion, "FusedLionBuilder", _InPlaceBuilder)
        cpu_adam = importlib.import_module("deepspeed.ops.adam.cpu_adam")
        self._patch(cpu_adam, "CPUAdamBuilder", _InPlaceBuilder)
        # Fake tensors have no address; DeepSpeed checks that partitions begin at aligned ones.
        self._patch(
            importlib.import_module("torch._subclasses.fake_tensor").FakeTensor, "data_ptr", lambda _: 0
        )
        # The model is built on its device; Module.to would replace every fake parameter by a copy.
        self._patch(torch.nn.Module, "to", _cast_in_place)
        # Tensor-parallel ranks compare their batches, and exchange objects and their rows of the vocabulary.
        self._patch(torch, "equal", lambda *_: True)
        backend = importlib.import_module("deepspeed.comm.torch").TorchBackend
        self._patch(backend, "broadcast_object_list", _do_nothing)
        # AutoTP's mesh takes the name of a device type, without the index that "cpu:0" has.
        mesh = importlib.import_module("torch.distributed.device_mesh")
        self._patch(mesh, "init_device_mesh", functools.partial(_init_mesh, mesh.init_device_mesh))
        loss = importlib.import_module("deepspeed.sequence.cross_entropy")
        self._patch(loss, "_validate_vocab_shard_bounds", self._count_vocabulary_rows)
        # zero.Init replaces torch's function and does not restore it.
        self._patch(torch.nn.functional, "linear", torch.nn.functional.linear)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        from deepspeed.accelerator import set_accelerator

        # The next rehearsal in this process creates groups of its own.
        restore_groups(self._initial_groups)
        for owner, name, original in reversed(self._originals):
            setattr(owner, name, original)
        set_accelerator(self._accelerator)

    def fake_values(self) -> contextlib.AbstractContextManager[object]:
        """Return a context in which ``item()`` of a fake tensor returns 1.0, of integers and flags 0."""
        return _FakeValues()

    def _count_vocabulary_rows(
        self, rows: int, start: int, end: int, tp_group: dist.ProcessGroup | None, device: torch.device
    ) -> int:
        """Return the rows of all ranks, which have the same number each."""
        return rows * (dist.get_world_size(tp_group) if tp_group is not None else 1)

    def _patch(self, owner: object, name: str, stand_in: object) -> None:
        self._originals.append((owner, name, getattr(owner, name)))
        setattr(owner, name, stand_in)


def _build_accelerator(base: type[CPU_Accelerator], name: str) -> CPU_Accelerator:
    class FakeAccelerator(base):  # type: ignore[misc]
        """Accelerator on the device of the fake tensors, without compiled extensions."""

        _communication_backend_name = "fake"

        def device_name(self, device_index: int | None = None) -> str:
            return name

        def current_device_name(self) -> str:
            return name

        def device_count(self) -> int:
            return 8

        def available_memory(self, device_index: int | None = None) -> int:
            return FREE_BYTES

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


class _InPlaceBuilder:
    """Replacement of the builders of fused and CPU optimizers, which update weights and moments in place."""

    def load(self) -> SimpleNamespace:
        names = ("multi_tensor_adam", "multi_tensor_lion", "create_adam", "adam_update", "destroy_adam")
        return SimpleNamespace(**dict.fromkeys(names, _do_nothing))


class _FakeValues(TorchDispatchMode):
    """Mode in which reading a value from a fake tensor does not fail."""

    def __init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(
        self,
        function: torch._ops.OpOverload,
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if function is torch.ops.aten._local_scalar_dense.default:
            tensor = args[0]
            assert isinstance(tensor, torch.Tensor)
            return 1.0 if tensor.is_floating_point() else 0
        return function(*args, **(kwargs or {}))


def _init_mesh(create: Callable[..., object], device: str, *args: object, **kwargs: object) -> object:
    return create(device.partition(":")[0], *args, **kwargs)


def _do_nothing(*_: object, **__: object) -> None:
    """Replace functions that compare or change values, which fake tensors do not have."""


def _cast_in_place(module: torch.nn.Module, *args: object, **kwargs: object) -> torch.nn.Module:
    """Replace ``Module.to`` for a module on its device: only cast, as peft does with its fp32 adapters."""
    dtype = next((value for value in (*args, *kwargs.values()) if isinstance(value, torch.dtype)), None)
    for parameter in module.parameters() if dtype is not None else ():
        if parameter.is_floating_point() and parameter.dtype != dtype:
            parameter.data = parameter.data.to(dtype)
    return module
