"""Tensors that the first layer does not save under adapters, because no gradient reaches its input.

Embeddings are frozen, so neither the first norm nor anything before the first adapter needs a gradient of its
input. With parallel attention and MLP, this includes the first layer's MLP.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardscope.core.precision import FP32
from shardscope.families.parameter_names import attention_inputs, mlp_inputs, names_of
from shardscope.families.registry import family_of
from shardscope.memory.activations.modules.attention import is_eager, kernel_tensors, scores_per_token, widths
from shardscope.memory.activations.modules.compiled import unsaved_in_first_compiled_layer
from shardscope.memory.activations.modules.decoder import latent_ranks, query_key_norms
from shardscope.memory.activations.modules.layernorm import casts_norms, inner_bytes, statistics
from shardscope.memory.activations.modules.saved import Modules, Saved

if TYPE_CHECKING:
    from shardscope.core.architecture import Architecture


def unsaved_in_first_layer(arch: Architecture, modules: Modules) -> tuple[Saved, ...]:
    """Return the tensors of a layer's list that the first layer does not save."""
    if modules.kernels == "compiled" and not modules.trained:
        return (Saved("norms", unsaved_in_first_compiled_layer(arch, modules), "sequence"),)
    other_modules = modules.kernels != "transformers"
    if modules.trained or other_modules or family_of(arch).is_post_norm:
        return ()
    if modules.keeps_frozen_inputs:
        plain = modules._replace(keeps_frozen_inputs=False)
        return (*unsaved_in_first_layer(arch, plain), *_inputs_of_frozen(arch, modules))
    if modules.adapter_dropout:
        undropped = modules._replace(adapter_dropout=False)
        return (*unsaved_in_first_layer(arch, undropped), *_masks(arch, modules))
    if modules.int8_base:
        plain = modules._replace(int8_base=False)
        return (*unsaved_in_first_layer(arch, plain), *_inputs_of_int8(arch, modules))
    hidden = arch.hidden_size
    if arch.norm == "rmsnorm":
        norm = Saved("norms", hidden * FP32 + FP32, "sequence")
        return (norm, *_before_the_first_adapter(arch, modules, norm))
    number = modules.compute if casts_norms(arch, modules) else modules.normed
    norms = arch.norms_per_layer if arch.parallel_residual else 1
    inputs = norms if modules.normed > modules.stream else 1
    unsaved = [Saved("norms", inputs * hidden * number + norms * statistics(modules), "sequence")]
    adapted = any(map(modules.feeds, (*mlp_inputs(arch), names_of(arch).down)))
    if arch.parallel_residual and not adapted:
        inner = inner_bytes(arch, modules)
        if modules.quantized and modules.autocast:
            inner += modules.normed - modules.compute
        unsaved.append(Saved("mlp", inner * arch.intermediate_size, "tp"))
    return tuple(unsaved)


def _masks(arch: Architecture, modules: Modules) -> list[Saved]:
    """Return masks of adapter dropout whose input has no gradient; over fp32 int8 bases, also the input."""
    adapted, width = _first_adapted(arch, modules)
    mask = 1 if modules.on_gpu else FP32 if modules.autocast or modules.int8_base else modules.compute
    masks = adapted * width * mask
    if adapted and modules.int8_base and modules.compute == FP32:
        masks += width * FP32
    return [Saved("attention", masks, "sequence")]


def _first_adapted(arch: Architecture, modules: Modules) -> tuple[int, int]:
    """Return how many adapters read the first adapted input, and its elements per token."""
    for readers, width in _inputs(arch):
        adapted = len(set(readers).intersection(modules.targets or ()))
        if adapted:
            return adapted, width
    return 0, 0


def _inputs(arch: Architecture) -> tuple[tuple[tuple[str, ...], int], ...]:
    """Return the projections that read each tensor, in forward order, and its elements per token."""
    names, hidden = names_of(arch), arch.hidden_size
    return (
        (attention_inputs(arch), hidden),
        ((names.output,), widths(arch).output),
        (mlp_inputs(arch), hidden),
        ((names.down,), arch.intermediate_size),
    )


def _inputs_of_frozen(arch: Architecture, modules: Modules) -> list[Saved]:
    """Return inputs that frozen projections save if these have a gradient, up to the first adapter's."""
    targets = set(modules.targets or ())
    unsaved = 0
    for readers, width in _inputs(arch):
        # Attention's output is already counted as the kernel's output.
        own = 0 if readers == (names_of(arch).output,) else width * modules.compute
        if targets.intersection(readers):
            # The adapter saves the same tensor, unless dropout has copied it.
            unsaved += modules.adapter_dropout * own
            break
        unsaved += own
    return [Saved("attention", unsaved, "sequence")]


def _inputs_of_int8(arch: Architecture, modules: Modules) -> list[Saved]:
    """Return the inputs of int8 matmuls (``MatMul8bitLt``) that are not saved here, for lack of a gradient.

    Adapters save their own fp32 copies; in an fp32 model they save the same tensor.
    """
    readers, targets = attention_inputs(arch), set(modules.targets or ())
    shared = modules.compute == FP32 and targets.intersection(readers)
    unsaved = [] if shared else [Saved("attention", arch.hidden_size * modules.compute, "sequence")]
    if arch.parallel_residual and not targets.intersection((*mlp_inputs(arch), names_of(arch).down)):
        unsaved.append(Saved("mlp", arch.intermediate_size * modules.compute, "tp"))
    return unsaved


def _before_the_first_adapter(arch: Architecture, modules: Modules, norm: Saved) -> list[Saved]:
    """Return attention's tensors, and the feed-forward's norm and branches, if nothing before is adapted."""
    c, width, output = modules.compute, widths(arch), names_of(arch).output
    attention = {name.split(".")[-2] for group, name, _ in arch.layer_shapes(0) if group == "attention"}
    if any(modules.feeds(name) for name in attention - {output}):
        return _under_values_alone(arch, modules, attention - {output})
    own = width.output * c * modules.feeds(output)
    kernel = sum(tensor.bytes_per_token for tensor in kernel_tensors(arch, modules))
    unsaved = [
        Saved("attention", kernel - own, "tp"),
        *query_key_norms(arch, modules),
        *latent_ranks(arch, modules),
    ]
    if modules.feeds(output) or arch.is_moe_layer(0) or arch.norms_per_layer > 2:
        return unsaved
    unsaved.append(norm)
    # The gate's gradient needs its own output and the up branch; the up branch's needs the activation.
    gate, up = (modules.feeds(name) for name in (mlp_inputs(arch)[0], mlp_inputs(arch)[-1]))
    branches = (0 if gate else 2) + (0 if up else 1)
    unsaved.append(Saved("mlp", branches * arch.intermediate_size * c, "tp"))
    return unsaved


def _under_values_alone(arch: Architecture, modules: Modules, inputs: set[str]) -> list[Saved]:
    """Return unsaved tensors if only ``v_proj`` is adapted: query and key norms.

    With eager attention, values need only the probabilities, so the other operands are not saved either.
    """
    if inputs.intersection(modules.targets or ()) != {"v_proj"}:
        return []
    if not is_eager(arch, modules):
        return query_key_norms(arch, modules)
    c, heads = modules.compute, arch.num_attention_heads
    kept = heads * modules.seq_len * c
    operands = (widths(arch).query + 2 * heads * arch.head_dim) * c
    scores = Saved("attention", scores_per_token(arch, modules) - kept + operands, "tp")
    return [scores, *query_key_norms(arch, modules)]
