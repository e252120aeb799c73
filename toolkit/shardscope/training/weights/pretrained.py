"""A model that trained, as the folder that ``transformers`` opens: names and config as its Hub has them.

Tensors come one at a time, so that no rank holds the model whole; rank 0 writes a file whenever enough came.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from shardscope.core.errors import refuse
from shardscope.training.checkpoints.temporary_folder import written_aside

MAX_FILE_BYTES = 5 * 10**9
"""Of one safetensors file, as files of models on the Hub mostly are; rank 0 holds about so much at once."""

WholeTensors = Iterable[tuple[str, torch.Tensor | None]]
"""Names and whole tensors; a tensor is None on the ranks that do not write."""


def whole_parameters(model: torch.nn.Module, device: torch.device, only_trained: bool) -> WholeTensors:
    """The parameters of ``model``, gathered one by one on ``device``; of rank 0 they come in host memory.

    A tied weight comes once, under its first name, and a persistent buffer under its own.
    """
    for name, parameter in model.named_parameters():
        if parameter.requires_grad or not only_trained:
            yield name, _whole(parameter.detach(), device)
    if not only_trained:
        kept = model.state_dict().keys()
        for name, buffer in model.named_buffers():
            if name in kept:
                yield name, _whole(buffer, device)


def _whole(tensor: torch.Tensor, device: torch.device) -> torch.Tensor | None:
    # Shards kept in host memory travel from the device: NCCL sends nothing else.
    whole = tensor.to(device).full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.cpu() if dist.get_rank() == 0 else None


def write_pretrained(
    path: Path,
    model: torch.nn.Module,
    tensors: WholeTensors,
    *,
    hub_names: bool = False,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Write ``tensors`` of ``model`` to the folder ``path``, all ranks together.

    ``model`` is the transformers model, sharded or on meta, or peft's around it: only its config and the
    names that its family has on the Hub are read. ``tensors`` have the module's own names, or ``hub_names``
    already. Raises ``ValueError`` for a module of one's own, which transformers could not open.
    """
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "save_pretrained"):
        refuse(
            "Engine.export of a model",
            type(model).__name__,
            "a transformers model, whose config.json says how to open it",
            "engine.save, and torch.save of its state_dict in your own format",
        )
    with written_aside(path) as aside:
        if hasattr(model, "peft_config"):
            _write_adapters(aside, model, dict(tensors))
            return
        groups = _by_layer(tensors)
        if dist.get_rank() != 0:
            for _ in groups:
                pass
            return
        files = _Files(aside, max_file_bytes)
        for group in groups:
            files.add(group if hub_names else _hub_names(model, group))
        files.finish()
        _exported_config(model, files.dtype).save_pretrained(aside)


def _by_layer(tensors: WholeTensors) -> Iterator[dict[str, torch.Tensor]]:
    """Tensors of one layer together: the Hub's names of a layer may cut and join the module's own."""
    for _, group in groupby(tensors, key=lambda item: _layer_of(item[0])):
        yield {name: tensor for name, tensor in group if tensor is not None}


def _layer_of(name: str) -> str:
    """``model.layers.3.`` of a name with a number in it, else the name."""
    found = re.match(r".*?\.\d+\.", name)
    return found[0] if found else name


def _hub_names(model: torch.nn.Module, group: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As ``save_pretrained`` of the same version names them: stacked experts become single ones."""
    from transformers.core_model_loading import revert_weight_conversion

    found: dict[str, torch.Tensor] = revert_weight_conversion(model, group)
    return found


def _exported_config(model: torch.nn.Module, dtype: torch.dtype) -> Any:
    config = copy.deepcopy(model.config)
    # FSDP2 puts a class of its own before the model's.
    config.architectures = [
        next(k.__name__ for k in type(model).__mro__ if not k.__name__.startswith("FSDP"))
    ]
    config.dtype = dtype
    # Off while training; whoever opens the folder may want to generate.
    config.use_cache = True
    return config


def _write_adapters(folder: Path, model: torch.nn.Module, tensors: Mapping[str, torch.Tensor | None]) -> None:
    """peft's own format: ``adapter_config.json`` and ``adapter_model.safetensors``."""
    if dist.get_rank() != 0:
        return
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    adapters: Any = model
    found = get_peft_model_state_dict(adapters, state_dict=dict(tensors))
    save_file(
        {name: tensor.contiguous() for name, tensor in found.items()}, folder / "adapter_model.safetensors"
    )
    config = copy.deepcopy(adapters.peft_config["default"])
    config.inference_mode = True
    config.save_pretrained(folder)


class _Files:
    """safetensors files of a folder, each written when it is full, and the index over them."""

    def __init__(self, folder: Path, max_file_bytes: int) -> None:
        self.dtype = torch.float32
        """Of the first tensor that came."""
        self._folder, self._max = folder, max_file_bytes
        self._waiting: dict[str, torch.Tensor] = {}
        self._names: list[list[str]] = []
        self._num_bytes = 0
        self._waiting_bytes = 0

    def add(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take whole tensors; write a file before it would be larger than the limit."""
        for name, tensor in tensors.items():
            if not self._num_bytes:
                self.dtype = tensor.dtype
            num_bytes = tensor.numel() * tensor.element_size()
            if self._waiting and self._waiting_bytes + num_bytes > self._max:
                self._write()
            # A view into a larger tensor would be written, or refused, with all of it.
            self._waiting[name] = tensor.clone() if tensor._is_view() else tensor.contiguous()
            self._waiting_bytes += num_bytes
            self._num_bytes += num_bytes

    def finish(self) -> None:
        """Write what waits, and give files the names that say how many there are."""
        self._write()
        if len(self._names) == 1:
            self._part(0).rename(self._folder / "model.safetensors")
            return
        places: dict[str, str] = {}
        for index, names in enumerate(self._names):
            name = f"model-{index + 1:05d}-of-{len(self._names):05d}.safetensors"
            self._part(index).rename(self._folder / name)
            places |= dict.fromkeys(names, name)
        index_of = {"metadata": {"total_size": self._num_bytes}, "weight_map": places}
        (self._folder / "model.safetensors.index.json").write_text(
            json.dumps(index_of, indent=2), encoding="utf-8"
        )

    def _write(self) -> None:
        from safetensors.torch import save_file

        save_file(self._waiting, self._part(len(self._names)), metadata={"format": "pt"})
        self._names.append(list(self._waiting))
        self._waiting, self._waiting_bytes = {}, 0

    def _part(self, index: int) -> Path:
        return self._folder / f"part-{index}.safetensors"
