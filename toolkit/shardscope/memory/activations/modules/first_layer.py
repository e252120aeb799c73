"""Tensors that the first layer does not save under adapters, because no gradient reaches its input.

Embeddings are frozen, so neither the first norm nor anything before the first adapter needs a gradient of its
input. With parallel attention and MLP, this includes the first layer's MLP.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardscope.core.precision import FP32
from shardscope.families.parameter_names import list_attention_inputs, list_mlp_inputs, list_parameter_names
from shardscope.families.registry import find_family
from shardscope.memory.activations.modules.attention import (
    compute_saved_scores,
    get_attention_widths,
    is_eager,
    list_kernel_tensors,
    list_latent_tensors,
    list_query_key_norms,
)
from shardscope.memory.activations.modules.compiled_layers import compute_unsaved_in_first_compiled_layer
from shardscope.memory.activations.modules.layernorm import (
    casts_norms,
    compute_inner_bytes,
    compute_norm_statistics,
)
from shardscope.memory.activations.modules.saved_tensors import Modules, SavedTensor

if TYPE_CHECKING:
    from shardscope.core.architecture import Architecture


def list_unsaved_in_first_layer(arch: Architecture, modules: Modules) -> tuple[SavedTensor, ...]:
    """Return the tensors of a layer's list that the first layer does not save."""
    if modules.kernels == "compiled" and not modules.trained:
        return (SavedTensor("norms", compute_unsaved_in_first_compiled_layer(arch, modules), "sequence"),)
    other_modules = modules.kernels != "transformers"
    if modules.trained or other_modules or find_family(arch).is_post_norm:
        return ()
    # Each of these options adds saved tensors to the list; some of them are unsaved here, too.
    if modules.keeps_frozen_inputs:
        plain = modules._replace(keeps_frozen_inputs=False)
        return (*list_unsaved_in_first_layer(arch, plain), *_list_frozen_inputs(arch, modules))
    if modules.adapter_dropout:
        undropped = modules._replace(adapter_dropout=False)
        return (*list_unsaved_in_first_layer(arch, undropped), *_list_dropout_masks(arch, modules))
    if modules.int8_base:
        plain = modules._replace(int8_base=False)
        return (*list_unsaved_in_first_layer(arch, plain), *_list_int8_inputs(arch, modules))
    hidden = arch.hidden_size
    # The first norm's own saved tensors: nothing before it needs its input's gradient.
    if arch.norm == "rmsnorm":
        norm = SavedTensor("norms", hidden * FP32 + FP32, "sequence")
        return (norm, *_list_before_first_adapter(arch, modules, norm))
    return _list_layernorm_unsaved(arch, modules)


def _list_layernorm_unsaved(arch: Architecture, modules: Modules) -> tuple[SavedTensor, ...]:
    """Return the unsaved tensors of a layer with LayerNorm: norms, attention and branches before adapters."""
    hidden, names = arch.hidden_size, list_parameter_names(arch)
    number = modules.compute if casts_norms(arch, modules) else modules.normed
    norms = arch.norms_per_layer if arch.parallel_residual else 1
    inputs = norms if modules.normed > modules.stream else 1
    unsaved = [
        SavedTensor("norms", inputs * hidden * number + norms * compute_norm_statistics(modules), "sequence")
    ]
    # Attention, unless an adapter reads what its projections of query, key and value read.
    is_kernel_unsaved = not _adapts_attention_inputs(arch, modules)
    adapts_output = modules.saves_input(names.output)
    if is_kernel_unsaved:
        output_input = get_attention_widths(arch).output * modules.compute * adapts_output
        unsaved.append(SavedTensor("attention", _sum_kernel_bytes(arch, modules) - output_input, "tp"))
    # The feed-forward, which reads the embeddings, too, or attention's output.
    if not arch.parallel_residual:
        if not is_kernel_unsaved or adapts_output:
            return tuple(unsaved)
        unsaved.append(SavedTensor("norms", hidden * number + compute_norm_statistics(modules), "sequence"))
    if not any(map(modules.saves_input, list_mlp_inputs(arch))):
        inner = compute_inner_bytes(arch, modules)
        if modules.saves_input(names.down):
            inner -= modules.inner_copies(names.down) * modules.compute
        if modules.quantized and modules.autocast:
            inner += modules.normed - modules.compute
        unsaved.append(SavedTensor("mlp", inner * arch.intermediate_size, "tp"))
    return tuple(unsaved)


def _adapts_attention_inputs(arch: Architecture, modules: Modules) -> bool:
    """Return whether a projection of queries, keys or values has an adapter."""
    attention = {name.split(".")[-2] for group, name, _ in arch.layer_shapes(0) if group == "attention"}
    return any(modules.saves_input(name) for name in attention - {list_parameter_names(arch).output})


def _sum_kernel_bytes(arch: Architecture, modules: Modules) -> int:
    tensors = list_kernel_tensors(arch, modules, list_parameter_names(arch).output)
    return sum(tensor.bytes_per_token for tensor in tensors)


def _list_dropout_masks(arch: Architecture, modules: Modules) -> list[SavedTensor]:
    """Return masks of adapter dropout whose input has no gradient; over fp32 int8 bases, also the input."""
    adapted, width = _find_first_adapted_input(arch, modules)
    mask = 1 if modules.on_gpu else FP32 if modules.autocast or modules.int8_base else modules.compute
    masks = adapted * width * mask
    if adapted and modules.int8_base and modules.compute == FP32:
        masks += width * FP32
    return [SavedTensor("attention", masks, "sequence")]


def _find_first_adapted_input(arch: Architecture, modules: Modules) -> tuple[int, int]:
    """Return how many adapters read the first adapted input, and its elements per token."""
    for readers, width in _list_inputs(arch):
        adapted = len(set(readers).intersection(modules.targets or ()))
        if adapted:
            return adapted, width
    return 0, 0


def _list_inputs(arch: Architecture) -> tuple[tuple[tuple[str, ...], int], ...]:
    """Return the projections that read each tensor, in forward order, and its elements per token."""
    names, hidden = list_parameter_names(arch), arch.hidden_size
    return (
        (list_attention_inputs(arch), hidden),
        ((names.output,), get_attention_widths(arch).output),
        (list_mlp_inputs(arch), hidden),
        ((names.down,), arch.intermediate_size),
    )


def _list_frozen_inputs(arch: Architecture, modules: Modules) -> list[SavedTensor]:
    """Return inputs that frozen projections save if these have a gradient, up to the first adapter's."""
    # The adapter saves the same tensor, unless dropout has copied it.
    unsaved = _sum_inputs(arch, modules, copies_adapted=modules.adapter_dropout)
    return [SavedTensor("attention", unsaved, "sequence")]


def _sum_inputs(arch: Architecture, modules: Modules, *, copies_adapted: bool) -> int:
    """Return bytes per token of the projections' inputs that have no gradient.

    ``copies_adapted``: the first adapters read a copy, so that nothing saves the input itself.
    """
    targets, output, num_bytes = set(modules.targets or ()), list_parameter_names(arch).output, 0
    plain = modules._replace(keeps_frozen_inputs=False, int8_base=False)
    # Attention's output is already counted as the kernel's output, unless it is a copy of that.
    copied_output = _sum_kernel_bytes(arch, modules) - _sum_kernel_bytes(arch, plain)
    for branch in _list_input_branches(arch):
        for readers, width in branch:
            input_bytes = copied_output if readers == (output,) else width * modules.compute
            if targets.intersection(readers):
                num_bytes += copies_adapted * input_bytes
                break
            num_bytes += input_bytes
    return num_bytes


def _list_input_branches(arch: Architecture) -> tuple[tuple[tuple[tuple[str, ...], int], ...], ...]:
    """Return the projections that read each tensor, with its width, for each branch that reads embeddings."""
    attention, output, mlp, down = _list_inputs(arch)
    if not arch.parallel_residual:
        return ((attention, output, mlp, down),)
    if arch.norms_per_layer > 1:
        return ((attention, output), (mlp, down))
    # Both branches read the output of one norm.
    both = ((*attention[0], *mlp[0]), arch.hidden_size)
    return ((both,), ((attention[0], 0), output), ((mlp[0], 0), down))


def _list_int8_inputs(arch: Architecture, modules: Modules) -> list[SavedTensor]:
    """Return the inputs of int8 matmuls (``MatMul8bitLt``) that are not saved here, for lack of a gradient.

    Adapters save their own fp32 copies; in an fp32 model they save the same tensor.
    """
    has_copies = modules.compute < FP32
    unsaved = _sum_inputs(arch, modules, copies_adapted=has_copies)
    output = list_parameter_names(arch).output
    targets = set(modules.targets or ())
    if has_copies and output in targets and targets.isdisjoint(list_attention_inputs(arch)):
        # Without int8, the output projection's adapter saves attention's output.
        unsaved += get_attention_widths(arch).output * modules.compute
    return [SavedTensor("attention", unsaved, "sequence")]


def _list_before_first_adapter(arch: Architecture, modules: Modules, norm: SavedTensor) -> list[SavedTensor]:
    """Return attention's tensors, and the feed-forward's norm and branches, if nothing before is adapted."""
    c, width, output = modules.compute, get_attention_widths(arch), list_parameter_names(arch).output
    attention = {name.split(".")[-2] for group, name, _ in arch.layer_shapes(0) if group == "attention"}
    if any(modules.saves_input(name) for name in attention - {output}):
        return _list_with_adapted_values(arch, modules, attention - {output})
    # The output projection's input stays if it is that adapter's.
    output_input = width.output * c * modules.saves_input(output)
    unsaved = [
        SavedTensor("attention", _sum_kernel_bytes(arch, modules) - output_input, "tp"),
        *list_query_key_norms(arch, modules),
        *list_latent_tensors(arch, modules),
    ]
    if modules.saves_input(output) or arch.is_moe_layer(0) or arch.norms_per_layer > 2:
        return unsaved
    unsaved.append(norm)
    # The gate's gradient needs its own output and the up branch; the up branch's needs the activation.
    gate, up = (modules.saves_input(name) for name in (list_mlp_inputs(arch)[0], list_mlp_inputs(arch)[-1]))
    branches = (0 if gate else 2) + (0 if up else 1)
    unsaved.append(SavedTensor("mlp", branches * arch.intermediate_size * c, "tp"))
    return unsaved


def _list_with_adapted_values(arch: Architecture, modules: Modules, inputs: set[str]) -> list[SavedTensor]:
    """Return unsaved tensors if only ``v_proj`` is adapted: query and key norms.

    With eager attention, values need only the probabilities, so the other operands are not saved either.
    """
    if inputs.intersection(modules.targets or ()) != {"v_proj"}:
        return []
    if not is_eager(arch, modules):
        return list_query_key_norms(arch, modules)
    c, heads = modules.compute, arch.num_attention_heads
    probabilities = heads * modules.seq_len * c
    operands = (get_attention_widths(arch).query + 2 * heads * arch.head_dim) * c
    scores = SavedTensor("attention", compute_saved_scores(arch, modules) - probabilities + operands, "tp")
    return [scores, *list_query_key_norms(arch, modules)]
