"""The colours of components and ranks; all other colours are in ``front_end/style.css``."""

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
"""Colour of each component in all charts, tables and traces; mostly Paul Tol's bright scheme."""

BESIDE_COLOURS: Mapping[str, str] = MappingProxyType({
    "other": "#b4bac2",
    "host": "#8a94a6",
    "nvme": "#6f7b8f",
})  # fmt: skip
"""Hatched bars besides the nine components: unattributed measured bytes, host memory and NVMe."""

RANK_COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#8b6b4a", "#9aa3ad")
"""Line colours of the first ranks; dashes distinguish the others."""

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
"""Colour of each part of a step, taken from the component whose bytes it moves or computes if there is one;
all traffic between parallel ranks counts as communication.
"""

BLOCK_COLOURS: Mapping[str, str] = MappingProxyType({
    "forward": "#77aadd",
    "backward": "#ee8866",
    "send": "#bb9977",
    "communication": "#bb9977",
    "bubble": "#9aa3ad",
    "update": "#44bb99",
})  # fmt: skip
"""Colour of each kind of block in a schedule; Paul Tol's light scheme, on which dark text is readable."""

COMPONENT_PATTERNS: Mapping[str, str] = MappingProxyType({
    "communication": "\\",
    "fragmentation": "/",
    **dict.fromkeys(BESIDE_COLOURS, "/"),
})  # fmt: skip
"""plotly's pattern of components that colour alone does not distinguish: with deuteranopia, communication
looks nearly like the optimizer. Others are plain.
"""

PART_PATTERNS: Mapping[str, str] = MappingProxyType({
    "recomputation": "/",
    "tensor_parallel": "\\",
    "context_parallel": "/",
    "expert_parallel": "x",
    "pipeline_transfers": ".",
    "bubble": "/",
    "offload": "x",
})  # fmt: skip
"""plotly's pattern of step parts that share a colour or stand for waiting; all others are plain."""

PATTERN_CLASSES: Mapping[str, str] = MappingProxyType({
    "/": "ss-lines",
    "\\": "ss-back-lines",
    "x": "ss-cross",
    ".": "ss-dots",
})  # fmt: skip
"""The same patterns in ``front_end/style.css``, for swatches in tables."""

MEASURED_COLOUR = "#b4bac2"
"""Colour of a total that is not broken down."""

FRAMEWORK_COLOURS = ("#bb8800", "#4455dd", "#ee1199", "#dd44ff")
FRAMEWORK_SYMBOLS = ("diamond", "circle", "square", "triangle-up", "cross", "x")
FRAMEWORK_SIGNS = ("◆", "●", "■", "▲", "✚", "✖")
"""Frameworks in registry order: a colour, plotly's symbol, and the same symbol as text."""

FONT = {"family": "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"}
"""Font of charts, as in JupyterLab and our stylesheet; plotly measures text in it to place labels."""
