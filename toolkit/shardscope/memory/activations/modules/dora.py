"""Tensors and peaks of a layer with DoRA (Liu et al. 2024, arXiv:2402.09353), as peft runs it.

Each adapted projection multiplies its base's output and its adapter's by the ratio of magnitude to norm, so
both outputs are saved. The norm is computed from the whole matrix in each forward: peft multiplies both
adapter matrices with the identity to get their product (0.21, ``tuners/lora/dora.py``, ``DoraLinearLayer``),
and these matrices exist until the projection returns, in fp32 under autocast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from shardscope.core.ops import maximum
from shardscope.core.precision import FP32
from shardscope.families.parameter_shapes import find_first_layer
from shardscope.families.registry import list_families_with
from shardscope.memory.activations.modules.attention import (
    get_attention_widths,
    list_kernel_tensors,
    list_query_key_norms,
    passes_mask,
)
from shardscope.memory.activations.modules.saved_tensors import Modules, SavedTensor, list_stream_readers

if TYPE_CHECKING:
    from shardscope.core.architecture import Architecture

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Projections of a layer in forward order. Peaks are known for layers with these only."""
_MLP = PROJECTIONS[4:]
_PENDING = {"k_proj": ("q_proj",), "v_proj": ("q_proj", "k_proj")}
"""For a projection, the earlier ones whose outputs are still unread when it runs."""


DORA_FAMILIES = list_families_with("dora")
"""Families whose layers have this structure, as tests confirm."""


def has_known_dora(arch: Architecture) -> bool:
    """Return whether this module describes the layers of ``arch``."""
    return arch.model_type in DORA_FAMILIES and not arch.num_moe_layers


def list_dora_tensors(arch: Architecture, moe: bool, modules: Modules) -> list[SavedTensor]:
    """Return the saved outputs of each adapted base and of its adapter."""
    if not modules.uses_dora:
        return []
    adapted = _list_adapted(arch, modules, moe)
    outputs = {name: 2 * out * modules.compute for name, (out, _) in adapted.items()}
    mlp = sum(num_bytes for name, num_bytes in outputs.items() if name in _MLP)
    return [
        SavedTensor("attention", sum(outputs.values()) - mlp, "sequence"),
        SavedTensor("mlp", mlp, "sequence"),
    ]


def compute_dora_vectors(arch: Architecture, modules: Modules, recompute: str) -> int:
    """Return the bytes that one layer saves for any number of tokens: a norm and two ratios per output."""
    if not modules.uses_dora or recompute != "none":
        return 0
    return 3 * _get_element_bytes(modules) * sum(out for out, _ in _list_adapted(arch, modules).values())


def compute_dora_peaks(
    arch: Architecture, modules: Modules, recompute: str, tokens: int, kept_inputs: int
) -> tuple[int, tuple[int, ...]]:
    """Return the maximum bytes of one layer's forward, and its peak candidates in backward.

    ``kept_inputs`` are the bytes per token that its recomputation keeps besides its saved tensors.
    """
    layer = _Layer(arch, modules)
    if recompute == "none":
        return layer.compute_forward(tokens), tuple(layer.list_backward(tokens))
    kept = tokens * kept_inputs
    backward = [kept + num_bytes for num_bytes in layer.list_backward(tokens)]
    backward.append(kept + tokens * layer.waiting + layer.compute_forward(tokens, is_recomputed=True))
    return layer.compute_forward(tokens, is_saved=False), tuple(backward)


def _get_element_bytes(modules: Modules) -> int:
    """Return the bytes per element of peft's arithmetic: fp32 if it casts inputs to fp32 adapters."""
    return FP32 if modules.recasts else modules.compute


def _list_adapted(arch: Architecture, modules: Modules, moe: bool = False) -> dict[str, tuple[int, int]]:
    linears = arch.layer_linears(find_first_layer(arch, moe))
    return {name: shape for name, shape in linears if name in (modules.targets or ())}


class _Stage(NamedTuple):
    """One module of the layer in forward order. Bytes per token."""

    name: str
    saved: int
    """Tensors that it saves."""


class _Layer:
    """A layer of RMSNorms before attention and before a gated MLP, module by module."""

    def __init__(self, arch: Architecture, modules: Modules) -> None:
        self.modules, self.readers = modules, list_stream_readers(arch)
        self.linears = dict(arch.layer_linears(0))
        self.adapted = _list_adapted(arch, modules)
        self.has_bias = {
            name.split(".")[-2] for _, name, _ in arch.layer_shapes(0) if name.endswith("proj.bias")
        }
        self.hidden, self.inner = arch.hidden_size * modules.compute, arch.intermediate_size * modules.compute
        width = get_attention_widths(arch)
        inputs = 3 * width.query if passes_mask(arch, modules) else width.inputs
        self.attention_gradients = (width.output + inputs) * modules.compute
        self.stages = self._list_stages(arch)
        self.vectors = compute_dora_vectors(arch, modules, "none")
        self.element_bytes = _get_element_bytes(modules)
        self.waiting = self.hidden  # the stream's gradient
        if "down_proj" in self.adapted:
            # The gradient of the adapter's output before its scaling; autocast has casts to and from fp32.
            self.waiting += arch.hidden_size * (
                self.element_bytes + (modules.recasts and FP32 + modules.compute)
            )

    def _list_stages(self, arch: Architecture) -> list[_Stage]:
        modules = self.modules
        norm = arch.hidden_size * FP32 + FP32
        attention, mlp = self.readers
        kernel = (*list_kernel_tensors(arch, modules), *list_query_key_norms(arch, modules))
        stages = {
            "norm": norm + (0 if modules.recasts else modules.stream_copies(*attention) * self.hidden),
            **dict.fromkeys(("q_proj", "k_proj", "v_proj"), 0),
            "attention": sum(tensor.bytes_per_token for tensor in kernel),
            "o_proj": 0,
            "second norm": norm + (0 if modules.recasts else modules.stream_copies(*mlp) * self.hidden),
            "gate_proj": 0,
            "activation": 2 * self.inner,
            "up_proj": 0,
            "product": self.inner * (1 + modules.inner_copies("down_proj")),
            "down_proj": 0,
        }
        for name, (out, _) in self.adapted.items():
            copied = modules.recasts and name in (*attention, *mlp)
            stages[name] = (2 * out + modules.adapter_rank) * modules.compute + copied * self.hidden
        return [_Stage(name, saved) for name, saved in stages.items()]

    def _sum_to(self, name: str) -> int:
        """Return the bytes saved by the modules up to and including ``name``."""
        names = [stage.name for stage in self.stages]
        return sum(stage.saved for stage in self.stages[: names.index(name) + 1])

    def compute_forward(self, tokens: int, *, is_saved: bool = True, is_recomputed: bool = False) -> int:
        """Return the maximum bytes of the layer's forward, at the projections and at its end."""
        peaks = [self.vectors + tokens * self._sum_to("down_proj")] if is_saved else []
        for name in self.adapted:
            per_token, matrices = self._list_in_projection(name, is_saved, is_recomputed)
            peaks += [
                tokens * num_bytes + constant for num_bytes, constant in zip(per_token, matrices, strict=True)
            ]
        return maximum(*peaks)

    def _list_in_projection(
        self, name: str, is_saved: bool, is_recomputed: bool
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return bytes per token, and bytes of matrices, at the identity, at the norm and at the outputs."""
        modules, element_bytes, casts = self.modules, self.element_bytes, self.modules.recasts
        (out, inner), c = self.adapted[name], modules.compute
        in_mlp, half = name in _MLP, out * c
        # The residual stream now, at the layer's input and at the model's, unless norms saved it or
        # recomputation keeps it.
        streams = in_mlp + (is_saved and not is_recomputed) + (not is_recomputed)
        alive = self.hidden * (streams if c < FP32 or not is_saved else not is_recomputed)
        # The norm's output, the projection's input, and the outputs of projections before it.
        if casts or not is_saved or not modules.stream_copies(*self.readers[in_mlp]):
            alive += self.hidden
        if name == "down_proj" and (casts or not is_saved):
            alive += self.inner
        alive += c * sum(self.linears[earlier][0] for earlier in _PENDING.get(name, ()))
        own = 2 * half
        if is_saved:
            alive += self._sum_to(name) - own
        elif name in ("o_proj", "up_proj"):
            alive += c * (inner if name == "o_proj" else out)
        alive += casts * inner * FP32
        # The adapter has not read its input yet.
        unread = alive - is_saved * c * (modules.adapter_rank + casts * inner)
        matrix, square = out * inner, inner * inner
        graph = c * (square + modules.adapter_rank * inner) * is_saved
        identity = (casts * FP32 + c) * square + c * (modules.adapter_rank * inner + matrix)
        kept = (2 if casts else 1) * element_bytes * matrix
        # Both outputs, and three products; a recomputation stops before the second one.
        products = 1 if is_recomputed and name == "down_proj" else 3
        outputs = own + (name in self.has_bias) * half + products * element_bytes * out
        return (
            (unread + half, unread + half, alive + outputs),
            (identity, graph + kept + 2 * element_bytes * matrix, graph + kept),
        )

    def list_backward(self, tokens: int) -> list[int]:
        """Return the bytes at the backward of each adapted projection, of the MLP's product and attention."""
        c, casts = self.modules.compute, self.modules.recasts
        stream, linears = self.hidden, self.linears
        product = self._sum_to("product") - self.inner * self.modules.inner_copies("down_proj")
        peaks = [
            stream + product + 3 * self.inner,
            stream + self._sum_to("attention") + self.attention_gradients,
        ]
        queries, keys = (c * linears[name][0] for name in ("q_proj", "k_proj"))
        waiting = {
            "up_proj": 2 * self.inner,
            "gate_proj": stream + self.inner,
            "v_proj": queries + 2 * keys,
            "k_proj": stream + queries + keys,
            "q_proj": stream + queries,
        }
        for name, (out, _) in self.adapted.items():
            # Gradients of the scaled outputs and of the ratios, before their sums over tokens.
            # Autocast's cast to fp32 frees the output's own gradient, unless it is the stream's.
            own = c * out * (name not in ("o_proj", "down_proj"))
            gradients = out * (4 * FP32 + c) - own if casts else out * 3 * c
            freed = self.inner if name == "up_proj" else 0  # the activation's output, the product's factor
            peaks.append(stream + self._sum_to(name) - freed + waiting.get(name, 0) + gradients)
        return [tokens * num_bytes + self.vectors for num_bytes in peaks]
