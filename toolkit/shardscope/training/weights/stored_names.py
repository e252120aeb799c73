"""Tensor names in a model's safetensors files, by family.

Most families store the names of the module in memory. Experts, which transformers stacks in memory, are
stored one by one, and some modules keep older names in files (transformers 5, ``conversion_mapping.py``).
A multimodal checkpoint has its language model under a prefix, beside a vision tower and a projector.
``tests/unit/training/test_weights_folder.py`` compares with what transformers writes. Imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING, NamedTuple

from shardscope.families.parameter_names import list_parameter_names
from shardscope.families.registry import find_family
from shardscope.families.unknown import UnknownFamily
from shardscope.training.weights.unknown_names import find_stored_tensors, is_ignored

if TYPE_CHECKING:
    from shardscope.core.architecture import Architecture

HEAD = "lm_head.weight"
MULTIMODAL_PREFIXES = {"language_model.model.": "language_model.", "model.language_model.": ""}
"""Prefixes of the language model in a multimodal checkpoint, and of its head. The first are those of the Hub,
which transformers 5 writes as well (``conversion_mapping.py``, "llava"), the others its own in memory."""
UNUSED = re.compile(
    r"(rotary_emb\.inv_freq|\.attn\.bias|\.attn\.masked_bias|gpt_neox\..*\.attention\.(masked_)?bias)$"
)
"""Buffers that older versions of transformers stored and newer ones compute."""


class Source(NamedTuple):
    """Stored tensors that one tensor of the model in memory is read from."""

    shape: tuple[int, ...]
    """Shape in memory."""
    names: tuple[tuple[str, ...], ...]
    """Names in files: one entry per row of a stack, otherwise a single entry; several names in an entry are
    concatenated along their first dimension."""
    is_stack: bool = False

    def list_stored(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield names and shapes of its stored tensors."""
        rows, *rest = self.shape[1:] if self.is_stack else self.shape
        for joined in self.names:
            for name in joined:
                yield name, (rows // len(joined), *rest)


def find_sources(arch: Architecture, stored: Collection[str]) -> dict[str, Source]:
    """Return the source of every parameter and every stored buffer, by its name in memory.

    ``stored`` are the names in the files: files of a base model lack the causal model's prefix (GPT-2 on the
    Hub). A tied head may be stored under the name of the embedding or of the head.
    """
    if isinstance(arch, UnknownFamily):
        tensors = find_stored_tensors(arch, stored)
        return {name: Source(tensor.shape, ((tensor.name,),)) for name, tensor in tensors.items()}
    # Names as in the files of a causal model; then adapt them to the files at hand.
    rename = _find_renaming(arch, stored)
    by_name = {
        name: _rename(_find_source(arch, name, shape), rename)
        for name, shape in _list_tensors_in_memory(arch)
    }
    # A tied weight is one tensor in memory, and may have either name in the files.
    if arch.tie_word_embeddings:
        embedding = f"{list_parameter_names(arch).embedding}.weight"
        embedding_name, head = by_name[embedding].names[0][0], rename(_get_file_name(arch, HEAD))
        if embedding_name not in stored and head in stored:
            by_name[embedding] = by_name[embedding]._replace(names=((head,),))
        by_name[HEAD] = by_name[embedding]
    return by_name


def find_multimodal_prefix(stored: Collection[str]) -> str | None:
    """Return the prefix that the files of a multimodal checkpoint have for its language model, or None."""
    return next((prefix for prefix in MULTIMODAL_PREFIXES if any(n.startswith(prefix) for n in stored)), None)


def is_unused(arch: Architecture, name: str, stored: Collection[str] = ()) -> bool:
    """Return whether a tensor of the ``stored`` ones is allowed although nothing reads it."""
    if isinstance(arch, UnknownFamily):
        return is_ignored(arch, name)
    multimodal = find_multimodal_prefix(stored)
    head = _get_file_name(arch, HEAD)
    if multimodal is not None:
        head = MULTIMODAL_PREFIXES[multimodal] + head
        if not name.startswith(multimodal) and name != head:
            return True  # Vision tower and projector.
    if arch.tie_word_embeddings and name == head:
        return True
    # Layers after the last one predict further tokens (DeepSeek-V3); transformers does not load them.
    is_multi_token = (
        find_family(arch).has_multi_token_prediction and f"model.layers.{arch.num_hidden_layers}." in name
    )
    return is_multi_token or bool(UNUSED.search(name))


def _list_tensors_in_memory(arch: Architecture) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield names and shapes of all parameters and persistent buffers."""
    yield from ((parameter.name, parameter.shape) for parameter in arch.outer_shapes)
    for layer in range(arch.num_hidden_layers):
        prefix = f"{list_parameter_names(arch).layers}.{layer}."
        yield from ((prefix + parameter.name, parameter.shape) for parameter in arch.layer_shapes(layer))
        if find_family(arch).router == "sigmoid" and arch.is_moe_layer(layer):
            assert arch.mixture_of_experts is not None
            # DeepSeek-V3's router bias, which balances the experts without an auxiliary loss.
            yield f"{prefix}mlp.gate.e_score_correction_bias", (arch.mixture_of_experts.num_experts,)


def _find_source(arch: Architecture, name: str, shape: tuple[int, ...]) -> Source:
    module, _, leaf = name.rpartition(".")
    files = find_family(arch).file_names
    stacked = module.endswith(".mlp.experts") and not files.experts_are_stacked
    if not stacked:
        return Source(shape, ((_get_file_name(arch, name),),))
    # transformers fuses gate and up of an expert along the rows (gate_up_proj), and stacks all experts.
    modules = (files.gate, files.up) if leaf == "gate_up_proj" else (files.down,)
    experts = _get_file_name(arch, module)
    names = (tuple(f"{experts}.{row}.{module}.weight" for module in modules) for row in range(shape[0]))
    return Source(shape, tuple(names), is_stack=True)


def _get_file_name(arch: Architecture, name: str) -> str:
    """Return the name in files of a tensor or module that is stored unsplit."""
    renamed = find_family(arch).file_names.renamed
    return name.replace(*renamed) if renamed else name


def _find_renaming(arch: Architecture, stored: Collection[str]) -> Callable[[str], str]:
    """Return the function from names in the files of a causal model to those in the files at hand."""
    prefix = list_parameter_names(arch).embedding.partition(".")[0] + "."
    multimodal = find_multimodal_prefix(stored)
    if multimodal is not None:
        before_head = MULTIMODAL_PREFIXES[multimodal]
        return lambda name: (
            multimodal + name.removeprefix(prefix) if name.startswith(prefix) else before_head + name
        )
    if stored and not any(name.startswith(prefix) for name in stored):
        return lambda name: name.removeprefix(prefix)
    return lambda name: name


def _rename(source: Source, rename: Callable[[str], str]) -> Source:
    return source._replace(names=tuple(tuple(rename(name) for name in joined) for joined in source.names))
