"""How a model's tensors are named in its safetensors files, family by family.

Most families store what the module in memory has. Experts, which transformers stacks in memory, lie one by
one in a file, and some modules have older names there (transformers 5, ``conversion_mapping.py``);
``tests/unit/training/test_weights_folder.py`` compares with what transformers writes. Imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, NamedTuple

from shardscope.families.parameter_names import names_of
from shardscope.families.registry import family_of

if TYPE_CHECKING:
    from shardscope.core.architecture import Architecture

HEAD = "lm_head.weight"
UNUSED = re.compile(
    r"(rotary_emb\.inv_freq|\.attn\.bias|\.attn\.masked_bias|gpt_neox\..*\.attention\.(masked_)?bias)$"
)
"""Tables that older versions of transformers stored, and newer ones compute."""


class Source(NamedTuple):
    """Where one tensor of the model in memory comes from."""

    shape: tuple[int, ...]
    """In memory."""
    names: tuple[tuple[str, ...], ...]
    """In files: of a stack one entry for each of its rows, else one alone; several names of an entry are
    joined along their first dimension."""
    is_stack: bool = False

    def pieces(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Names and shapes of what files hold of it."""
        rows, *rest = self.shape[1:] if self.is_stack else self.shape
        for joined in self.names:
            for name in joined:
                yield name, (rows // len(joined), *rest)


def sources(arch: Architecture, stored: Collection[str]) -> dict[str, Source]:
    """Every parameter, and every buffer that is stored, by its name in memory.

    ``stored`` are the names that the files have: a base model's lack the prefix of the causal one's (GPT-2's
    on the Hub). A tied head is the embedding's, under either name.
    """
    prefix = names_of(arch).embedding.partition(".")[0] + "."
    found = {name: _source(arch, name, shape) for name, shape in _in_memory(arch)}
    if stored and not any(name.startswith(prefix) for name in stored):
        found = {name: _without(prefix, source) for name, source in found.items()}
    if arch.tie_word_embeddings:
        embedding = f"{names_of(arch).embedding}.weight"
        own, head = found[embedding].names[0][0], _outer(arch, HEAD)
        if own not in stored and head in stored:
            found[embedding] = found[embedding]._replace(names=((head,),))
        found[HEAD] = found[embedding]
    return found


def is_unused(arch: Architecture, name: str) -> bool:
    """Whether a stored tensor may be there without being read."""
    if arch.tie_word_embeddings and name == _outer(arch, HEAD):
        return True
    second = family_of(arch).has_multi_token_prediction and f"model.layers.{arch.num_hidden_layers}." in name
    return second or bool(UNUSED.search(name))


def _in_memory(arch: Architecture) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of parameters and of buffers that are saved."""
    yield from ((parameter.name, parameter.shape) for parameter in arch.outer_shapes)
    for layer in range(arch.num_hidden_layers):
        prefix = f"{names_of(arch).layers}.{layer}."
        yield from ((prefix + parameter.name, parameter.shape) for parameter in arch.layer_shapes(layer))
        if family_of(arch).router == "sigmoid" and arch.is_moe_layer(layer):
            assert arch.mixture_of_experts is not None
            # The router's, by which experts are kept in balance without a loss.
            yield f"{prefix}mlp.gate.e_score_correction_bias", (arch.mixture_of_experts.num_experts,)


def _source(arch: Architecture, name: str, shape: tuple[int, ...]) -> Source:
    before, _, leaf = name.rpartition(".")
    files = family_of(arch).file_names
    stacked = before.endswith(".mlp.experts") and not files.experts_are_stacked
    if not stacked:
        return Source(shape, ((_outer(arch, name),),))
    modules = (files.gate, files.up) if leaf == "gate_up_proj" else (files.down,)
    inside = _outer(arch, before)
    names = (tuple(f"{inside}.{row}.{module}.weight" for module in modules) for row in range(shape[0]))
    return Source(shape, tuple(names), is_stack=True)


def _outer(arch: Architecture, name: str) -> str:
    """The file's spelling of a name that is one tensor, or one module, there too."""
    renamed = family_of(arch).file_names.renamed
    return name.replace(*renamed) if renamed else name


def _without(prefix: str, source: Source) -> Source:
    names = (tuple(name.removeprefix(prefix) for name in joined) for joined in source.names)
    return source._replace(names=tuple(names))
