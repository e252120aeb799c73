"""What the very first layer does not save under adapters: no gradient reaches its input.

Embeddings are frozen, so the first norm needs no gradient of its input. Where attention and MLP stand side by
side, neither does that layer's MLP.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardscope.memory.modules.compiled import unsaved_in_first_compiled_layer
from shardscope.memory.modules.layernorm import casts_norms, inner_bytes, statistics
from shardscope.memory.modules.saved import Modules, Saved
from shardscope.memory.precision import FP32
from shardscope.parameter_names import mlp_inputs, names_of

if TYPE_CHECKING:
    from shardscope.architecture import Architecture


def unsaved_in_first_layer(arch: Architecture, modules: Modules) -> tuple[Saved, ...]:
    """The tensors of a layer's list that the first layer lacks."""
    if modules.kernels == "compiled" and not modules.trained:
        return (Saved("norms", unsaved_in_first_compiled_layer(arch, modules), "sequence"),)
    other_modules = modules.kernels != "transformers" or modules.quantized
    if modules.trained or other_modules or arch.model_type == "olmo2":  # whose norms come behind
        return ()
    hidden = arch.hidden_size
    if arch.norm == "rmsnorm":
        return (Saved("norms", hidden * FP32 + FP32, "sequence"),)
    number = modules.compute if casts_norms(arch, modules) else modules.stream
    norms = arch.norms_per_layer if arch.parallel_residual else 1
    unsaved = [Saved("norms", hidden * number + norms * statistics(modules), "sequence")]
    adapted = any(map(modules.feeds, (*mlp_inputs(arch), names_of(arch).down)))
    if arch.parallel_residual and not adapted:
        unsaved.append(Saved("mlp", inner_bytes(arch, modules) * arch.intermediate_size, "tp"))
    return tuple(unsaved)
