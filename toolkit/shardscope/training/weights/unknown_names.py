"""Tensor names in the files of a family without formulas, as transformers maps them.

The model is built on the meta device, and stored names are renamed as ``from_pretrained`` renames them
(transformers 5, ``core_model_loading.py``): files of Qwen3.5 have ``model.language_model.layers``, where its
language model alone has ``model.layers``, and a vision tower that it ignores.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from shardscope.core.errors import refuse
from shardscope.families.unknown import build_meta_model

if TYPE_CHECKING:
    from transformers.core_model_loading import WeightConverter, WeightRenaming

    from shardscope.families.unknown import UnknownFamily


class StoredShape(NamedTuple):
    """One tensor of the model in memory."""

    shape: tuple[int, ...]
    name: str
    """Name of the stored tensor that it is read from."""


class _Model(NamedTuple):
    """A model on the meta device: its tensors, and how transformers renames stored ones."""

    shapes: dict[str, tuple[int, ...]]
    """Shapes of all parameters and persistent buffers; a tied weight has all its names."""
    tied: tuple[tuple[str, ...], ...]
    """Names of each parameter."""
    renamings: list[WeightRenaming]
    converters: list[WeightConverter]
    prefix: str
    """Name of the model without its head: files of that alone lack it."""
    ignored: tuple[str, ...]
    """Patterns of stored names that transformers ignores."""

    def rename(self, stored: str) -> tuple[str, bool]:
        """Return the name in memory of a stored tensor, and whether it is merged or split for that."""
        from transformers.core_model_loading import rename_source_key

        name, converter = rename_source_key(
            stored, self.renamings, self.converters, self.prefix, dict(self.shapes)
        )
        return name, converter is not None


def find_stored_tensors(arch: UnknownFamily, stored: Collection[str]) -> dict[str, StoredShape]:
    """Return shape and source of every tensor of the model in memory; ``stored`` are the names in the files.

    A tensor that the files lack has its own name. Raises ``ValueError`` for files whose tensors transformers
    merges or splits when it reads them.
    """
    model = _build_model(arch)
    sources = {name: name for name in model.shapes}
    for stored_name in stored:
        name, is_converted = model.rename(stored_name)
        if name not in sources:
            continue
        if is_converted:
            allowed = (
                f"the tensors of the model in memory: for {name}, transformers merges or splits those of a "
                f"{arch.model_type!r} when it reads them, which only families with formulas support"
            )
            refuse("weights", stored_name, allowed, "Script(path), for code of your own with from_pretrained")
        sources[name] = stored_name
    for names in model.tied:
        source = next((sources[name] for name in names if sources[name] in stored), sources[names[0]])
        sources.update(dict.fromkeys(names, source))
    return {name: StoredShape(shape, sources[name]) for name, shape in model.shapes.items()}


def is_ignored(arch: UnknownFamily, stored: str) -> bool:
    """Return whether transformers ignores a stored tensor, or has another name of a tied weight."""
    model = _build_model(arch)
    name, _ = model.rename(stored)
    return name in model.shapes or any(re.search(pattern, name) for pattern in model.ignored)


@lru_cache(maxsize=4)
def _build_model(arch: UnknownFamily) -> _Model:
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming

    model = build_meta_model(arch)
    names_of: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names_of.setdefault(id(parameter), []).append(name)
    transforms = get_model_conversion_mapping(model)
    return _Model(
        shapes={name: tuple(tensor.shape) for name, tensor in model.state_dict().items()},
        tied=tuple(tuple(names) for names in names_of.values()),
        renamings=[transform for transform in transforms if isinstance(transform, WeightRenaming)],
        converters=[transform for transform in transforms if isinstance(transform, WeightConverter)],
        prefix=model.base_model_prefix,
        ignored=tuple(model._keys_to_ignore_on_load_unexpected or ()),
    )
