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
