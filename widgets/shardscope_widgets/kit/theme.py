"""The colours of components and ranks; everything else is in ``front_end/style.css``."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

COMPONENT_COLOURS: Mapping[str, str] = MappingProxyType({
    "parameters": "#4477aa",
    "gradients": "#66ccee",
    "optimizer": "#228833",
    "activations": "#ccbb44",
    "logits": "#ee6677",
    "gather_buffers": "#aa3377",
    "communication": "#8b6b4a",
    "runtime": "#9aa3ad",
    "fragmentation": "#d5d9de",
})  # fmt: skip
"""One colour a component, in every chart, table and trace; mostly Paul Tol's bright scheme."""

BESIDE_COLOURS: Mapping[str, str] = MappingProxyType({
    "other": "#b4bac2",
    "host": "#8a94a6",
    "nvme": "#6f7b8f",
})  # fmt: skip
"""Bars beside the nine components, hatched: measured bytes without a name, the host's memory, its NVMe."""

RANK_COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#8b6b4a", "#9aa3ad")
"""Lines of the first ranks; line dashes tell the others apart."""

RANK_DASHES = ("solid", "dash", "dot", "dashdot")

PART_COLOURS: Mapping[str, str] = MappingProxyType({
    "matrices": "#4477aa",
    "attention": "#ccbb44",
    "elementwise": "#77aadd",
    "loss": "#ee6677",
    "recomputation": "#4477aa",
    "tensor_parallel": "#8b6b4a",
    "context_parallel": "#8b6b4a",
    "expert_parallel": "#8b6b4a",
    "pipeline_transfers": "#8b6b4a",
    "gathers": "#aa3377",
    "gradients": "#66ccee",
    "bubble": "#9aa3ad",
    "optimizer": "#228833",
    "offload": "#6f7b8f",
})  # fmt: skip
"""One colour a part of a step: that of the component whose bytes it moves or makes, where there is one; all
talk between parallel ranks is communication."""

COMPONENT_PATTERNS: Mapping[str, str] = MappingProxyType({
    "communication": "\\",
    "fragmentation": "/",
    **dict.fromkeys(BESIDE_COLOURS, "/"),
})  # fmt: skip
"""plotly's pattern of the components that colour alone does not tell apart: under deuteranopia communication
has nearly the optimizer's. Others are plain."""

PART_PATTERNS: Mapping[str, str] = MappingProxyType({
    "recomputation": "/",
    "tensor_parallel": "\\",
    "context_parallel": "/",
    "expert_parallel": "x",
    "pipeline_transfers": ".",
    "bubble": "/",
    "offload": "x",
})  # fmt: skip
"""plotly's pattern of the parts that share a colour, or stand for waiting; all others are plain."""

PATTERN_CLASSES: Mapping[str, str] = MappingProxyType({
    "/": "ss-lines",
    "\\": "ss-back-lines",
    "x": "ss-cross",
    ".": "ss-dots",
})  # fmt: skip
"""The same patterns in ``front_end/style.css``, for the tables' swatches."""

MEASURED_COLOUR = "#b4bac2"
"""A whole that nothing divided."""

FRAMEWORK_COLOURS = ("#bb8800", "#4455dd", "#ee1199", "#dd44ff")
FRAMEWORK_SYMBOLS = ("diamond", "circle", "square", "triangle-up", "cross", "x")
FRAMEWORK_SIGNS = ("◆", "●", "■", "▲", "✚", "✖")
"""Of the frameworks, in the order of the registry: a colour, plotly's symbol, and the same in text."""

FONT = {"family": "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"}
"""Of charts: JupyterLab's own, which the stylesheet sets. plotly places words by the widths of this one."""
