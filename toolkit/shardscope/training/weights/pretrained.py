"""Export of a trained model as a ``from_pretrained`` folder, with the Hub's tensor names and config.

Tensors are gathered one at a time, so that no rank holds the whole model; rank 0 writes a file whenever its
size limit is reached.
"""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from shardscope.core.errors import refuse
from shardscope.training.checkpoints.temporary_folder import raising_on_all_ranks, replace_when_complete

if TYPE_CHECKING:
    from peft import PeftConfig
    from transformers import PreTrainedConfig, PreTrainedModel

MAX_FILE_BYTES = 5 * 10**9
"""Size limit of one safetensors file, usual on the Hub; rank 0 holds about as many bytes at once."""

FullTensors = Iterable[tuple[str, torch.Tensor | None]]
"""Names and unsharded tensors; the tensor is None on the ranks that do not write."""


def gather_parameters(model: torch.nn.Module, device: torch.device, only_trained: bool) -> FullTensors:
    """Yield the parameters of ``model``, all-gathered one by one on ``device``; rank 0 gets them on the host.

    A tied weight is yielded once, under its first name. Persistent buffers follow, unless ``only_trained``.
    """
    for name, parameter in model.named_parameters():
        if parameter.requires_grad or not only_trained:
            yield name, _gather_full(parameter.detach(), device)
    if not only_trained:
        persistent = model.state_dict().keys()
        for name, buffer in model.named_buffers():
            if name in persistent:
                yield name, _gather_full(buffer, device)


def _gather_full(tensor: torch.Tensor, device: torch.device) -> torch.Tensor | None:
    if isinstance(tensor, DTensor):
        # Offloaded shards are copied to the device first: NCCL cannot send host memory.
        shards = tensor.to(device)
        assert isinstance(shards, DTensor)
        tensor = shards.full_tensor()
    return tensor.cpu() if dist.get_rank() == 0 else None


def write_pretrained(
    path: Path, model: torch.nn.Module, tensors: FullTensors, *, max_file_bytes: int = MAX_FILE_BYTES
) -> None:
    """Write ``tensors`` of ``model`` to the folder ``path``. Collective: every rank must call it.

    ``model`` is the transformers model, sharded or on meta, or its peft wrapper: only its config and its
    family's names on the Hub are read. ``tensors`` have the module's own names. Raises ``ValueError`` for a
    module that is not a transformers model. Raises the ``OSError`` of a write on all ranks, which have taken
    part in all collectives then; no file is left of it.
    """
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "save_pretrained"):
        refuse(
            "Engine.export of a model",
            type(model).__name__,
            "a transformers model, whose config.json says how to open it",
            "engine.save, and torch.save of its state_dict in your own format",
        )
    with replace_when_complete(path) as temporary:
        peft_configs = getattr(model, "peft_config", None)
        adapters = None if peft_configs is None else dict(tensors)
        groups = _group_by_layer(tensors if adapters is None else ())
        with raising_on_all_ranks():
            try:
                if dist.get_rank() == 0 and adapters is None:
                    _write_model(temporary, model, config, groups, max_file_bytes)
                elif dist.get_rank() == 0 and peft_configs is not None and adapters is not None:
                    _write_adapters(temporary, model, peft_configs["default"], adapters)
            except Exception:
                shutil.rmtree(temporary, ignore_errors=True)
                raise
            finally:
                # Every rank takes part in the collectives that gather each tensor, also after a failed write.
                for _ in groups:
                    pass


def _write_model(
    folder: Path,
    model: torch.nn.Module,
    config: PreTrainedConfig,
    groups: Iterable[dict[str, torch.Tensor]],
    max_file_bytes: int,
) -> None:
    """Write ``config.json``, the safetensors files and their index, on rank 0."""
    files = _FileWriter(folder, max_file_bytes)
    for group in groups:
        files.add_tensors(_convert_to_hub_names(model, group))
    files.write_index()
    _make_exported_config(model, config, files.dtype).save_pretrained(folder)


def _group_by_layer(tensors: FullTensors) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the tensors layer by layer: the Hub's names may require splits and merges within a layer."""
    for _, group in groupby(tensors, key=lambda item: _find_layer_prefix(item[0])):
        yield {name: tensor for name, tensor in group if tensor is not None}


def _find_layer_prefix(name: str) -> str:
    """Return the prefix up to the layer number (``model.layers.3.``), or the name if it has none."""
    match = re.match(r".*?\.\d+\.", name)
    return match[0] if match else name


def _convert_to_hub_names(model: torch.nn.Module, group: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Rename and split as ``save_pretrained`` of the same version: stacked experts become single matrices."""
    from transformers.core_model_loading import revert_weight_conversion

    converted: dict[str, torch.Tensor] = revert_weight_conversion(cast("PreTrainedModel", model), group)
    return converted


def _make_exported_config(
    model: torch.nn.Module, config: PreTrainedConfig, dtype: torch.dtype
) -> PreTrainedConfig:
    exported = copy.deepcopy(config)
    # FSDP2's fully_shard inserts a class of its own before the model's in the MRO.
    exported.architectures = [
        next(kind.__name__ for kind in type(model).__mro__ if not kind.__name__.startswith("FSDP"))
    ]
    exported.dtype = dtype
    # Off during training; needed for generation.
    exported.use_cache = True
    return exported


def _write_adapters(
    folder: Path, model: torch.nn.Module, config: PeftConfig, tensors: Mapping[str, torch.Tensor | None]
) -> None:
    """Write peft's own format, on rank 0: ``adapter_config.json`` and ``adapter_model.safetensors``."""
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    adapter_tensors = get_peft_model_state_dict(model, state_dict=dict(tensors))
    save_file(
        {name: tensor.contiguous() for name, tensor in adapter_tensors.items()},
        folder / "adapter_model.safetensors",
    )
    # As peft's own save_pretrained: the adapters are loaded frozen unless the caller asks to train them.
    exported = copy.deepcopy(config)
    exported.inference_mode = True
    exported.save_pretrained(str(folder))


class _FileWriter:
    """Writer of a folder's safetensors files, each written when it is full, and of their index."""

    def __init__(self, folder: Path, max_file_bytes: int) -> None:
        self.dtype = torch.float32
        """Type of the first tensor added."""
        self._folder, self._max = folder, max_file_bytes
        self._waiting: dict[str, torch.Tensor] = {}
        self._names: list[list[str]] = []
        self._num_bytes = 0
        self._waiting_bytes = 0

    def add_tensors(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Add whole tensors; write the current file before it would exceed the limit."""
        for name, tensor in tensors.items():
            if not self._num_bytes:
                self.dtype = tensor.dtype
            num_bytes = tensor.numel() * tensor.element_size()
            if self._waiting and self._waiting_bytes + num_bytes > self._max:
                self._write_file()
            # safetensors writes or rejects a view with the whole storage behind it.
            self._waiting[name] = tensor.clone() if tensor._is_view() else tensor.contiguous()
            self._waiting_bytes += num_bytes
            self._num_bytes += num_bytes

    def write_index(self) -> None:
        """Write the remaining tensors, rename the files to ``model-<i>-of-<n>`` and write the index."""
        # The number of files, part of their names, is known only now.
        self._write_file()
        if len(self._names) == 1:
            self._part_path(0).rename(self._folder / "model.safetensors")
            return
        weight_map: dict[str, str] = {}
        for index, names in enumerate(self._names):
            name = f"model-{index + 1:05d}-of-{len(self._names):05d}.safetensors"
            self._part_path(index).rename(self._folder / name)
            weight_map |= dict.fromkeys(names, name)
        index_json = {"metadata": {"total_size": self._num_bytes}, "weight_map": weight_map}
        (self._folder / "model.safetensors.index.json").write_text(
            json.dumps(index_json, indent=2), encoding="utf-8"
        )

    def _write_file(self) -> None:
        from safetensors.torch import save_file

        save_file(self._waiting, self._part_path(len(self._names)), metadata={"format": "pt"})
        self._names.append(list(self._waiting))
        self._waiting, self._waiting_bytes = {}, 0

    def _part_path(self, index: int) -> Path:
        return self._folder / f"part-{index}.safetensors"
